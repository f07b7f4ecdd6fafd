"""What the CT-CLIP tests share: generated volumes, a small network, a short run."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep_recipes.ctclip.config import CTClipConfig
from lockstep_recipes.ctclip.sample_data import make_volumes
from lockstep_recipes.settings import merged

# Half as wide and deep as the small preset: what is tested here does not depend on it.
TINY: dict[str, Any] = {
    "image_encoder": {
        "image_size": 24,
        "depth": 12,
        "patch_size": 12,
        "temporal_patch_size": 6,
        "dim": 16,
        "spatial_depth": 1,
        "temporal_depth": 1,
        "heads": 2,
        "dim_head": 8,
    },
    "text_encoder": {"dim": 16, "depth": 1, "heads": 2, "max_length": 64},
    "clip": {"dim_image": 64, "dim_latent": 16},
}


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    """Import here what every forked rank would otherwise import for itself."""
    importlib.import_module("accelerate")
    importlib.import_module("torchmetrics.functional.classification")


@pytest.fixture(scope="session")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("volumes") / "data"
    return make_volumes(folder, num=22, num_val=7, shape=(12, 24, 24))


@pytest.fixture
def values(volumes: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that makes plain settings, with sections put over them."""

    def make(*over: dict[str, Any]) -> dict[str, Any]:
        paths = {"train": str(volumes / "train"), "validation": str(volumes / "validation")}
        made: dict[str, Any] = {
            "data": {"batch_size": 4, "num_workers": 0, "paths": paths},
            "model": TINY,
            "training": {"max_epochs": 9, "learning_rate": 1e-3, "warmup_steps": 2, "max_steps": 4},
            "checkpoint": {"save_dir": str(tmp_path / "saves")},
            "logging": {"log_every_n_steps": 1, "curves": False},
        }
        for values in over:
            made = merged(made, values)
        return made

    return make


@pytest.fixture
def settings(values: Callable[..., dict[str, Any]]) -> Callable[..., CTClipConfig]:
    def make(*over: dict[str, Any]) -> CTClipConfig:
        return CTClipConfig.parse(values(*over))

    return make
