"""The flags of the CT-CLIP recipe: a settings file and overrides."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.dist.environment import is_rehearsal, launched_rank
from lockstep.parse import parse_override
from lockstep.result import RunResult
from lockstep_recipes.command import REHEARSAL_STEPS, Flags
from lockstep_recipes.ctclip.config import CTClipConfig, Experiment
from lockstep_recipes.ctclip.sample_data import make_volumes
from lockstep_recipes.ctclip.task import CTClipTask
from lockstep_recipes.ctclip.trainer import run
from lockstep_recipes.settings import merged, read_settings

SMALL_MODEL: dict[str, Any] = {
    "image_encoder": {
        "image_size": 48,
        "depth": 24,
        "patch_size": 12,
        "temporal_patch_size": 6,
        "dim": 64,
        "spatial_depth": 2,
        "temporal_depth": 2,
        "heads": 4,
        "dim_head": 16,
    },
    "text_encoder": {"dim": 64, "depth": 2, "heads": 4, "max_length": 128},
    "clip": {"dim_image": 1024, "dim_latent": 64},
}
"""A network for a laptop: 64 tokens of 64 channels."""


def flags() -> Flags:
    """Return the parser: the original script's flag, then our own."""
    parser = Flags(
        "ctclip",
        "Train CT-CLIP: chest CT volumes and their reports in one space.",
        "lockstep run ctclip --gpus 2 --config configs/base_config.yaml",
    )
    add = parser.add_argument
    add("--config", type=Path, required=True, help="settings file (YAML)")
    setting = "override any setting"
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=setting)
    add("--resume", help="auto, never, discard, or a path")
    changed = "resume even if batch size, learning rate or data changed"
    add("--accept_changes", action="store_true", default=None, help=changed)
    add("--local_rank", type=int, help="accepted and ignored; the launcher's environment counts")
    return parser


def build(argv: Sequence[str]) -> Callable[[], RunResult]:
    """Turn the command line into a function that runs the training."""
    args = flags().read(argv)
    values = merged(read_settings(args.config), overrides(args.set))
    given = {"resume": args.resume, "accept_changes": args.accept_changes}
    values |= {key: value for key, value in given.items() if value is not None}
    config = CTClipConfig.parse(values)
    if not is_rehearsal():
        return partial(run, config)
    small = rehearse(config, values)
    return partial(run, small, CTClipTask(small, config.model.image_encoder.volume_shape))


def overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Return `section.key=value` texts as nested values.

    >>> overrides(["data.paths.train=x", "data.batch_size=2"])
    {'data': {'paths': {'train': 'x'}, 'batch_size': 2}}
    """
    values: dict[str, Any] = {}
    for text in texts:
        keys, value = parse_override(text)
        for key in reversed(keys):
            value = {key: value}
        values = merged(values, value)
    return values


def rehearse(config: CTClipConfig, values: dict[str, Any]) -> CTClipConfig:
    """Shrink the run to a minute: a small network, a few steps, one evaluation, one save.

    Batch size and accumulation stay, so the batch contract is that of the real run. If the
    data do not exist, some are generated inside the run's folder.
    """
    image = config.model.image_encoder
    epochs = config.training.max_epochs
    if launched_rank() == 0:
        print(
            f"rehearsal: a CTViT of 48 x 48 x 24 voxels for {REHEARSAL_STEPS} steps stands in for "
            f"{image.image_size} x {image.image_size} x {image.depth} for {epochs} epochs",
            flush=True,
        )
    folder = config.checkpoint.save_dir / "rehearsal"
    small: dict[str, Any] = {
        "data": {"num_workers": min(config.data.num_workers, 1)},
        "training": {"max_steps": REHEARSAL_STEPS, "save_every_n_epochs": 1e9},
        "validation": {"eval_every_n_epochs": 1e9},
        "checkpoint": {"save_dir": str(folder)},
        "logging": {"log_every_n_steps": 1},
        "resume": "discard",
    }
    if not config.data.paths.train.exists():
        made = make_volumes(
            folder / "sample_data", seed=Experiment().seed
        )  # the next one reuses it
        paths = {"train": str(made / "train"), "validation": str(made / "validation")}
        small["data"]["paths"] = paths | {"labels": None}
    clip = SMALL_MODEL["clip"] | {"loss": config.model.clip.loss}
    return CTClipConfig.parse(merged(values, small) | {"model": SMALL_MODEL | {"clip": clip}})
