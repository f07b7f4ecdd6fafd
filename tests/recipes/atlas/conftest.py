"""What the atlas tests share: generated episodes, micro backbones, a short run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import RunConfig
from lockstep_recipes.atlas.data import DataConfig
from lockstep_recipes.atlas.model import ModelConfig
from lockstep_recipes.atlas.sample_data import make_episodes
from lockstep_recipes.atlas.task import AtlasConfig, AtlasTask

MICRO: dict[str, Any] = {
    "vggt_preset": "micro",
    "lang_preset": "micro",
    "geom_output_dim": 32,
    "fusion_hidden_dim": 64,
    "fusion_layers": 1,
}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare each forked rank the import of matplotlib; the commands' tests look at pictures."""
    monkeypatch.setattr("lockstep_recipes.atlas.task.draw_actions", lambda *drawn: False)


@pytest.fixture(scope="session")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_episodes(tmp_path_factory.mktemp("episodes") / "data", 4, 2, frames=6, size=32)


@pytest.fixture
def make_task(episodes: Path) -> Callable[..., AtlasTask]:
    def make(
        kind: type[AtlasTask] = AtlasTask,
        model: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
        **changes: Any,
    ) -> AtlasTask:
        seen = DataConfig(**{"data_dir": episodes, "image_size": 28} | (data or {}))
        return kind(AtlasConfig(model=ModelConfig(**MICRO | (model or {})), data=seen, **changes))

    return make


@pytest.fixture
def settings() -> Callable[..., RunConfig]:
    def make(folder: Path, **values: Any) -> RunConfig:
        plain: dict[str, Any] = {
            "output_dir": str(folder),
            "epochs": 9,
            "max_steps": 4,
            "rate": {"lr": 1e-3},
            "schedule": {"shape": "cosine", "warmup_steps": 2},
            "evaluation": {"every_epochs": None},
            "sinks": {"curves": False},
        }
        return RunConfig.parse(plain | values)

    return make
