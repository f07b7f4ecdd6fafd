"""Between log lines no step makes the host wait for the GPU: torch says so where one does."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import RunConfig, fit
from lockstep.data.batch import StepBatch
from lockstep.step.train_step import TrainStep
from lockstep.testing import TinyTask

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

from test_exact import COMMANDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]
FIRST = 2
"""Steps that may wait: kernels are chosen, tables travel."""


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let torch raise where a step waits; return the steps that were watched."""
    step, watched = TrainStep.__call__, []

    def watch(self: TrainStep, batch: StepBatch) -> Any:
        torch.cuda.set_sync_debug_mode("error" if batch.step >= FIRST else "default")
        try:
            return step(self, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            watched.append(batch.step)

    monkeypatch.setattr(TrainStep, "__call__", watch)
    return watched


def test_a_step_of_the_loop_does_not_wait(tmp_path: Path, strict: list[int]) -> None:
    values = {
        "output_dir": str(tmp_path),
        "max_steps": 6,
        "batch": {"batch_size": 4, "accumulate": 2},
        "precision": "bf16",
        "averages": [0.9],
        "sinks": {"curves": False},
    }
    fit(TinyTask(), RunConfig.parse(values))
    assert strict == list(range(6))


@pytest.mark.parametrize("recipe", ["jit", "protein", "segmentation"])
def test_a_recipes_step_does_not_wait(
    recipe: str, tmp_path: Path, strict: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_REHEARSAL", "1")
    words = [w for w in COMMANDS[recipe] if not w.startswith(("--exact", "--set=batch"))]
    settings = ["sinks.curves=false", "max_steps=4"]
    build = import_module(f"lockstep_recipes.{recipe}.flags").build
    fit(*build([*words, *(f"--set={setting}" for setting in settings)]))
    assert strict == list(range(4))
