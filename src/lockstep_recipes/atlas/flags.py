"""The settings file and flags of the atlas recipe, and their translation to a run config.

Owns: the keys outside the sections model, data and loss, and their translation to a run config.
Does not own: reading YAML. Every key has a default: the original script's example sets only five.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lockstep.config import RunConfig
from lockstep.dist.environment import is_rehearsal, launched_rank, planned_size
from lockstep.parse import parse_model, parse_override
from lockstep_recipes.atlas.data import DataConfig
from lockstep_recipes.atlas.model import ModelConfig
from lockstep_recipes.atlas.sample_data import make_episodes
from lockstep_recipes.atlas.section import Section
from lockstep_recipes.atlas.task import AtlasConfig, AtlasTask, LossConfig
from lockstep_recipes.command import Flags
from lockstep_recipes.settings import merged, read_settings

REHEARSAL_EPOCHS = 10
REHEARSAL_FRAMES = 16
"""Frames of a generated episode."""


class DataSettings(DataConfig):
    """The `data` section."""

    batch_size: int = Field(default=8, ge=1)
    num_workers: int = Field(default=4, ge=0)


class TrainingSettings(Section):
    """The `training` section; a step is a weight update, on any number of GPUs."""

    learning_rate: float = Field(default=1e-4, gt=0, allow_inf_nan=False)
    lr_scaling: Literal["none", "linear", "sqrt", "batch"] = "linear"
    warmup_steps: int = Field(default=1000, ge=0)
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    val_interval: int = Field(default=1000, ge=1)
    num_epochs: int = Field(default=50, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    weight_decay: float = Field(default=0.01, ge=0)
    log_interval: int = Field(default=100, ge=1)
    save_interval: int = Field(default=5000, ge=1)
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    seed: int = 0
    loss: LossConfig = Field(default_factory=LossConfig)


class CheckpointSettings(Section):
    """The `checkpoint` section."""

    save_dir: str = "./checkpoints"
    resume_from: str | None = None
    epoch_interval: int = Field(default=5, ge=1)
    """Epochs between `checkpoint_epoch_N.pt`, beside `training.save_interval` in steps."""


class LoggingSettings(Section):
    """The `logging` section."""

    save_to_file: bool = False
    log_dir: str = "./logs"


class WandbSettings(Section):
    """The `wandb` section."""

    enabled: bool = False
    project: str = "atlas-vla"
    name: str | None = None
    entity: str | None = None
    tags: list[str] = Field(default_factory=list)


class Settings(Section):
    """The whole file."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataSettings = Field(default_factory=DataSettings)
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    logging: LoggingSettings = Field(default_factory=LoggingSettings)
    wandb: WandbSettings = Field(default_factory=WandbSettings)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    lockstep: dict[str, Any] = Field(default_factory=dict)
    """Any further setting of a `RunConfig`, by its own name."""


def flags() -> Flags:
    """Return the parser: the original script's flags, then our own."""
    parser = Flags(
        "atlas",
        "Train a robot policy: images and an instruction in, an action out.",
        "lockstep run atlas --gpus 8 --config atlas/configs/train_config.yaml",
    )
    add = parser.add_argument
    add("--config", type=Path, help="settings file (YAML); without it, every key has its default")
    add("--resume", help="auto, never, discard, or a path; overrides checkpoint.resume_from")
    add(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a key of the settings file, or a setting of the run",
    )
    add("--local_rank", type=int, help="accepted and ignored; the launcher's environment counts")
    return parser


def build(argv: Sequence[str]) -> tuple[AtlasTask, RunConfig]:
    """Turn the command line and its settings file into the arguments of `fit`."""
    args = flags().read(argv)
    values = read_settings(args.config) if args.config else {}
    for name in Settings.model_fields:  # an empty `data:` is an empty section
        if name != "device" and values.get(name, 0) is None:
            values[name] = {}
    own, others = split_overrides(args.set)
    settings = parse_model(Settings, functools.reduce(merged, own, values))
    resume = args.resume or settings.checkpoint.resume_from or "auto"
    folder = run_folder(settings.checkpoint.save_dir)
    if is_rehearsal():
        settings, folder, resume = rehearse(settings, folder, resume)
    config = RunConfig.parse(
        merged(run_values(settings, folder, resume), settings.lockstep)
    ).with_overrides(others)
    return AtlasTask(task_config(settings, args.config)), config


def split_overrides(texts: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Separate keys of the settings file from settings of the run.

    >>> split_overrides(["data.batch_size=4", "checkpoint.keep_last=2"])
    ([{'data': {'batch_size': 4}}], ['checkpoint.keep_last=2'])
    """
    own = []
    others = []
    for text in texts:
        (section, *keys), value = parse_override(text)
        kind = Settings.model_fields[section].annotation if section in Settings.model_fields else 0
        known = kind.model_fields if isinstance(kind, type) and issubclass(kind, Section) else {}
        is_shared = section in RunConfig.model_fields  # `checkpoint` is a section of both
        if not (keys and known and (keys[0] in known or not is_shared)):
            others.append(text)
            continue
        for key in reversed([section, *keys]):
            value = {key: value}
        own.append(value)
    return own, others


def run_folder(save_dir: str) -> str:
    """Return the run's folder; its checkpoints are in `checkpoints` below it.

    >>> run_folder("./checkpoints"), run_folder("runs/a/checkpoints"), run_folder("elsewhere")
    ('.', 'runs/a', 'elsewhere')
    """
    path = Path(save_dir)
    return str(path.parent if path.name == "checkpoints" else path)


def rehearse(settings: Settings, folder: str, resume: str) -> tuple[Settings, str, str]:
    """Shrink the run to a minute: the smallest backbones, ten epochs of one step each.

    Batch size and accumulation stay, so the batch contract is that of the real run. If the
    data exist, one step's worth of frames is used; otherwise frames are generated. With a
    checkpoint to resume, which must be the rehearsal's own, two more epochs are trained.
    """
    model = settings.model
    data = settings.data
    training = settings.training
    folder = str(Path(folder) / "rehearsal")
    is_going_on = resume not in ("auto", "never", "discard")
    epochs = REHEARSAL_EPOCHS + 2 * is_going_on
    if launched_rank() == 0:
        print(
            f"rehearsal: micro backbones at 28 px for {epochs} epochs of one step stand in for "
            f"{model.vggt_preset} at {data.image_size} px for {training.num_epochs} epochs",
            flush=True,
        )
    step = data.batch_size * training.gradient_accumulation_steps * planned_size()
    small: dict[str, Any] = {"image_size": 28, "num_workers": 0}
    small |= {"max_frames": step, "random_shift": min(2, data.random_shift)}
    if not data.data_dir.exists():
        made = make_episodes(
            Path(folder) / f"sample_data_{step}",
            num=-(-step // REHEARSAL_FRAMES),
            frames=REHEARSAL_FRAMES,
            size=32,
        )
        defaults = DataConfig()
        small |= {"data_dir": made, "views": None, "use_wrist_camera": True}
        small |= {"train_split": defaults.train_split, "val_split": defaults.val_split}
        small["action_stats_path"] = None
        model = model.model_copy(update={"action_dim": 7, "has_gripper": True})
    tiny = {"vggt_preset": "micro", "lang_preset": "micro", "fusion_layers": 1}
    tiny |= {"geom_output_dim": 32, "fusion_hidden_dim": 64}
    tiny |= {"vggt_checkpoint": None, "lang_encoder_name": None}
    often = {"num_epochs": epochs, "max_steps": epochs, "val_interval": epochs, "log_interval": 1}
    shrunk = settings.model_copy(
        update={
            "model": model.model_copy(update=tiny),
            "data": data.model_copy(update=small),
            "training": training.model_copy(update=often),
            "logging": settings.logging.model_copy(update={"log_dir": str(Path(folder) / "logs")}),
        }
    )
    if not is_going_on:
        return shrunk, folder, "discard"
    return shrunk, folder, resume if Path(resume).is_absolute() else str(Path(folder) / resume)


def task_config(settings: Settings, path: Path | None) -> AtlasConfig:
    """Return the config of the task."""
    data = {name: getattr(settings.data, name) for name in DataConfig.model_fields}
    return AtlasConfig(
        model=settings.model,
        data=DataConfig.model_construct(**data),
        loss=settings.training.loss,
        weight_decay=settings.training.weight_decay,
        notes=() if path else ("no --config: every key has its default",),
    )


def run_values(settings: Settings, folder: str, resume: str) -> dict[str, Any]:
    """Return the values of a RunConfig."""
    data = settings.data
    training = settings.training
    wandb = settings.wandb
    log = settings.logging
    return {
        "output_dir": folder,
        "seed": training.seed,
        "epochs": training.num_epochs,
        "max_steps": training.max_steps,
        "batch": {
            "batch_size": data.batch_size,
            "accumulate": training.gradient_accumulation_steps,
        },
        "rate": {"lr": training.learning_rate, "lr_scaling": training.lr_scaling},
        "schedule": {"shape": "cosine", "warmup_steps": training.warmup_steps},
        "loader": {"num_workers": data.num_workers},
        "evaluation": {"every_steps": training.val_interval},
        "checkpoint": {
            "every_steps": training.save_interval,
            "every_epochs": settings.checkpoint.epoch_interval,
            "name_epochs": True,
            "name_steps": True,
        },
        "sinks": {
            "wandb": wandb.enabled,
            "wandb_project": wandb.project,
            "wandb_name": wandb.name,
            "wandb_entity": wandb.entity,
            "wandb_tags": wandb.tags,
            "log_file": str(Path(log.log_dir) / "train.log") if log.save_to_file else None,
        },
        "precision": training.precision,
        "max_grad_norm": training.max_grad_norm,
        "device": settings.device,
        "log_every": training.log_interval,
        "resume": resume,
    }
