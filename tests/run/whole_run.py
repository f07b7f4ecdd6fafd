"""Whole runs of a tiny task, on one rank or several, and what they leave in their folder."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep import CheckpointStore, RunConfig, fit, read_events
from lockstep.checkpoint.generation import is_claim
from lockstep.errors import (
    LockstepError,
)
from lockstep.testing import TinyTask, run_ranks

NUM_SAMPLES = 20


TIMES = re.compile(r"time|.*_s|samples_per_second|.*_share|data_wait_rank|slow_.*|path")


def config_for(folder: Path, **changes: Any) -> RunConfig:
    values = {
        "output_dir": str(folder),
        "epochs": 2,
        "batch": {"batch_size": 2, "global_batch_size": 8, "drop_last": False},
        "rate": {"lr": 0.05},
        "evaluation": {"every_steps": 3, "save_best": False},
        "checkpoint": {"every_steps": 2},
        "sinks": {"curves": False},
        "log_every": 1,
        "device": "cpu",
        "timeout_s": 20,
    }
    return RunConfig.parse(values | changes)


def run(
    folder: Path,
    num_ranks: int,
    build: Callable[[], TinyTask] = lambda: TinyTask(NUM_SAMPLES),
    before: Callable[[], None] = lambda: None,
    **changes: Any,
) -> list[Any]:
    """Run `fit`; return each rank's result, or its error as (class, text, exit code)."""

    def one_rank() -> Any:
        before()
        try:
            return fit(build(), config_for(folder, **changes))
        except LockstepError as error:
            return type(error).__name__, str(error), error.exit_code

    return run_ranks(num_ranks, one_rank, timeout_s=30)


def weights(folder: Path) -> dict[str, Tensor]:
    checkpoint, _ = store(folder).latest()
    assert checkpoint is not None
    return checkpoint.load("model")


def store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", recipe="tiny")


def events(folder: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    return [event for event in read_events(folder, rank) if event["event"] == kind]


def verdicts(folder: Path) -> list[str]:
    return [event["message"] for event in events(folder, "epoch")]


def files(folder: Path) -> dict[str, bytes]:
    """Return what the checkpoints consist of."""
    found = (path for path in (folder / "checkpoints").rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in found if not is_claim(path.name)}
