"""What the segmentation tests share: generated shapes, a thin network, a short run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import RunConfig
from lockstep_recipes.segmentation.sample_data import NUM_CLASSES, make_shapes
from lockstep_recipes.segmentation.task import SegmentationConfig, SegmentationTask

THIN: dict[str, Any] = {
    "layers": 18,
    "width": 4,
    "crop": (33, 33),
    "num_classes": NUM_CLASSES,
    "num_pictures": 0,
}


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shapes(tmp_path_factory.mktemp("shapes") / "VOC2012", num=48, num_val=5, size=40)


@pytest.fixture
def make_task(shapes: Path) -> Callable[..., SegmentationTask]:
    def make(kind: type[SegmentationTask] = SegmentationTask, **changes: Any) -> SegmentationTask:
        return kind(SegmentationConfig(**THIN | {"data": shapes} | changes))

    return make


@pytest.fixture
def settings() -> Callable[..., RunConfig]:
    def make(folder: Path, **values: Any) -> RunConfig:
        plain: dict[str, Any] = {
            "output_dir": str(folder),
            "epochs": 9,
            "max_steps": 4,
            "rate": {"lr": 0.05},
            "schedule": {"shape": "cosine", "warmup_steps": 2},
            "evaluation": {"every_epochs": None, "batch_size": 1},
            "sinks": {"curves": False},
            "max_grad_norm": None,
            "sync_batch_norm": True,
        }
        return RunConfig.parse(plain | values)

    return make
