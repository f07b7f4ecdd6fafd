"""The keys of the YAML file with their defaults, checked before anything starts.

Owns: the keys, contradictions between them, and their translation to a `RunConfig`. Does
not own: files (`lockstep_recipes.settings`), or the use of a value.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from lockstep.config import RunConfig
from lockstep.errors import ConfigError
from lockstep.parse import parse_model
from lockstep.plan import Rule
from lockstep_recipes.ctclip.launch import TIMEOUT_S
from lockstep_recipes.settings import merged

Metric = Literal["auroc", "auprc", "f1", "precision", "recall", "retrieval_at_1"]
METRICS: tuple[Metric, ...] = get_args(Metric)


class Section(BaseModel):
    """Keys that belong together; unknown ones are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _a_word_is_no_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse an unquoted `no`, which YAML reads as false, for a word or a number."""
        is_switch = cls.model_fields[info.field_name or ""].annotation is bool
        if isinstance(value, bool) and not is_switch:
            raise ValueError(
                "YAML reads an unquoted no, yes, on or off as true or false\n  try: quote the value"
            )
        return value


class Experiment(Section):
    """The name of the run, and the seed of everything random in it."""

    name: str = Field(default="ctclip", pattern=r"^[\w.-]+$")
    seed: int = 2025


class Paths(Section):
    """The data: folders with a manifest, or manifests."""

    train: Path = Path("data/train")
    validation: Path | None = Path("data/validation")
    labels: Path | None = None
    """A CSV file of findings by VolumeName, if the manifest has none."""


class Data(Section):
    """How volumes are read."""

    batch_size: PositiveInt = 4
    num_workers: NonNegativeInt = 8
    prefetch_factor: PositiveInt = 2
    paths: Paths = Field(default_factory=Paths)
    spacing: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (1.5, 0.75, 0.75)
    """Millimetres between voxels after resampling: depth, height, width."""
    drop_last: bool = True
    on_bad_sample: Literal["stop", "skip"] = "stop"


class ImageEncoder(Section):
    """The CTViT."""

    image_size: PositiveInt = 480
    depth: PositiveInt = 240
    patch_size: PositiveInt = 20
    temporal_patch_size: PositiveInt = 10
    dim: PositiveInt = 512
    spatial_depth: PositiveInt = 4
    temporal_depth: PositiveInt = 4
    heads: PositiveInt = 8
    dim_head: PositiveInt = 32
    codebook_size: PositiveInt | None = None
    """Quantise tokens to this many codes; 8192 in the original."""

    @property
    def volume_shape(self) -> tuple[int, int, int]:
        """Return depth, height and width of the encoder's input."""
        return self.depth, self.image_size, self.image_size

    @property
    def dim_image(self) -> int:
        """Return the width of a volume's features: `dim` for each position in the plane."""
        return (self.image_size // self.patch_size) ** 2 * self.dim


class TextEncoder(Section):
    """A transformer over words, or a local Hugging Face model."""

    path: Path | None = None
    """A folder as `save_pretrained` writes it. Nothing is ever downloaded."""
    dim: PositiveInt = 768
    depth: PositiveInt = 6
    heads: PositiveInt = 12
    max_length: PositiveInt = 512
    """In words, or tokens of a Hugging Face model; longer texts are truncated."""
    max_words: PositiveInt = 30_000


class Clip(Section):
    """The shared space of the two encoders."""

    dim_image: PositiveInt = 294_912
    dim_text: PositiveInt | None = None
    dim_latent: PositiveInt = 512
    loss: Literal["softmax", "siglip"] = "softmax"
    tau: float | None = Field(default=None, allow_inf_nan=False)
    """Logarithm of the initial temperature (default: 1.0 for softmax, ln 10 for siglip)."""


class Model(Section):
    """The two encoders and their shared space."""

    image_encoder: ImageEncoder = Field(default_factory=ImageEncoder)
    text_encoder: TextEncoder = Field(default_factory=TextEncoder)
    clip: Clip = Field(default_factory=Clip)


class Training(Section):
    """How long, how fast, and how often to save."""

    max_epochs: PositiveInt = 20
    max_steps: PositiveInt | None = None
    learning_rate: PositiveFloat = Field(default=1.25e-6, allow_inf_nan=False)
    lr_scaling: Rule = "none"
    reference_batch: PositiveInt = 4
    """The batch size that `learning_rate` was tuned for, used by `lr_scaling: batch`."""
    weight_decay: float = Field(default=0.01, ge=0)
    gradient_accumulation_steps: PositiveInt = 1
    max_grad_norm: PositiveFloat | None = 0.5
    warmup_steps: NonNegativeInt = 1000
    min_lr_ratio: float = Field(default=0.01, ge=0, le=1)
    save_every_n_epochs: PositiveFloat = 0.5
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = "auto"
    """`auto`: the precision in Accelerate's file; without one, bf16 or fp16 on a GPU."""


class Validation(Section):
    """When to evaluate on held-out volumes, and the metrics."""

    eval_every_n_epochs: PositiveFloat = 0.5
    eval_samples: PositiveInt | None = 200
    metrics: tuple[Metric, ...] = METRICS
    threshold: float = Field(default=0.5, gt=0, lt=1)
    """Score above which a finding counts as found, for precision and recall."""


class Checkpoint(Section):
    """Where to save checkpoints, and which to keep."""

    save_dir: Path = Path("./saves")
    keep_last_n: PositiveInt = 3
    best_metric: Metric = "auroc"


class Logging(Section):
    """Where to log, and how often."""

    use_wandb: bool = False
    wandb_project: str = "ctclip"
    log_every_n_steps: PositiveInt = 10
    profile_timing: bool = False
    curves: bool = True


class CTClipConfig(Section):
    """All settings of a run."""

    experiment: Experiment = Field(default_factory=Experiment)
    data: Data = Field(default_factory=Data)
    model: Model = Field(default_factory=Model)
    training: Training = Field(default_factory=Training)
    validation: Validation = Field(default_factory=Validation)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    logging: Logging = Field(default_factory=Logging)
    resume: str = "auto"
    """`auto`: resume from the newest valid checkpoint, if any. `never`: refuse a folder that holds
    one. `discard`: delete the run in the folder (checkpoints, events, samples, TensorBoard files)
    and start from scratch. Or the path of a checkpoint."""
    accept_changes: bool = False
    lockstep: dict[str, Any] = Field(default_factory=dict)
    """Any further setting of a `RunConfig`, by its own name."""

    @property
    def folder(self) -> Path:
        """Return the run's folder: one per experiment."""
        return self.checkpoint.save_dir / self.experiment.name

    def run_config(self, precision: str = "fp32") -> RunConfig:
        """Return the RunConfig that these settings describe."""
        data = self.data
        training = self.training
        log = self.logging
        return RunConfig.parse(
            merged(
                {
                    "output_dir": str(self.folder),
                    "seed": self.experiment.seed,
                    "epochs": training.max_epochs,
                    "max_steps": training.max_steps,
                    "batch": {
                        "batch_size": data.batch_size,
                        "accumulate": training.gradient_accumulation_steps,
                        "drop_last": data.drop_last,
                    },
                    "rate": {
                        "lr": training.learning_rate,
                        "lr_scaling": training.lr_scaling,
                        "reference_batch": training.reference_batch,
                    },
                    "schedule": {
                        "shape": "cosine",
                        "warmup_steps": training.warmup_steps,
                        "floor": training.min_lr_ratio,
                    },
                    "loader": {
                        "num_workers": data.num_workers,
                        "prefetch": data.prefetch_factor,
                        "on_bad_sample": data.on_bad_sample,
                    },
                    "evaluation": {
                        "every_epochs": self.validation.eval_every_n_epochs,
                        "best_metric": self.checkpoint.best_metric,
                        "best_is": "highest",
                    },
                    "checkpoint": {
                        "every_epochs": training.save_every_n_epochs,
                        "keep_last": self.checkpoint.keep_last_n,
                    },
                    "sinks": {
                        "wandb": log.use_wandb,
                        "wandb_project": log.wandb_project,
                        "wandb_name": self.experiment.name,
                        "curves": log.curves,
                    },
                    "precision": precision,
                    "timeout_s": TIMEOUT_S,
                    "max_grad_norm": training.max_grad_norm,
                    "log_every": log.log_every_n_steps,
                    "resume": self.resume,
                    "accept_changes": self.accept_changes,
                },
                self.lockstep,
            )
        )

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "CTClipConfig":
        """Build the settings from plain values.

        Raises:
            ConfigError: naming the path of the first bad key, and a similar known one.
        """
        for key in values.keys() - cls.model_fields.keys():
            if homes := [name for name, keys in _sections().items() if key in keys]:
                raise ConfigError(
                    f"{key!r} is not a key of the top level of the settings",
                    "write " + " or ".join(f"{home}.{key}: {values[key]}" for home in homes),
                )
        config = parse_model(cls, values)
        _check_sizes(config.model)
        if config.checkpoint.best_metric not in config.validation.metrics:
            raise ConfigError(
                f"checkpoint.best_metric {config.checkpoint.best_metric!r} is not measured",
                f"choose one of validation.metrics: {', '.join(config.validation.metrics)}",
            )
        return config


def _sections() -> dict[str, Mapping[str, Any]]:
    """Return the keys of each section."""
    kinds = {name: field.annotation for name, field in CTClipConfig.model_fields.items()}
    return {
        name: kind.model_fields
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, Section)
    }


def _check_sizes(model: Model) -> None:
    """Refuse sizes that contradict each other."""
    image = model.image_encoder
    text = model.text_encoder
    clip = model.clip
    for name, patch_name in (("image_size", "patch_size"), ("depth", "temporal_patch_size")):
        size = getattr(image, name)
        patch = getattr(image, patch_name)
        if size % patch:
            raise ConfigError(
                f"model.image_encoder.{name} {size} is not a multiple of {patch_name} {patch}",
                f"set {name} to {-(-size // patch) * patch}",
            )
    if clip.dim_image != image.dim_image:
        raise ConfigError(
            f"model.clip.dim_image is {clip.dim_image:,}, but (image_size / patch_size)^2 * dim = "
            f"({image.image_size} / {image.patch_size})^2 * {image.dim} = {image.dim_image:,}",
            f"set dim_image: {image.dim_image}",
        )
    if text.path is None and text.dim % text.heads:
        raise ConfigError(
            f"model.text_encoder.dim {text.dim} is not a multiple of heads {text.heads}",
            f"set dim to {-(-text.dim // text.heads) * text.heads}",
        )
    if text.path is None and clip.dim_text not in (None, text.dim):
        raise ConfigError(
            f"model.clip.dim_text is {clip.dim_text}, model.text_encoder.dim is {text.dim}",
            "leave dim_text out",
        )
