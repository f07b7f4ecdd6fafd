"""What the signal tests start: a real run whose steps take a moment, ended as a command ends.

python train_slowly.py FOLDER [SECONDS_PER_STEP] [NUM_WORKERS] [FAILING_STEP]
"""

import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.errors import DataError
from lockstep.task import Context, PartialLoss
from lockstep.testing import TinyTask
from lockstep_recipes.command import train

TIMEOUT_S = 60.0
"""How long a rank waits in a collective for one that does not come."""


class SlowTask(TinyTask):
    """A tiny task with a sleep in every step, which may fail at one."""

    def __init__(self, step_s: float, failing_step: int | None = None) -> None:
        super().__init__(num_samples=64)
        self.step_s = step_s
        self.failing_step = failing_step

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        time.sleep(self.step_s)
        if context.step == self.failing_step and context.world.rank == context.world.size - 1:
            raise ZeroDivisionError("the planted fault")
        return super().loss(model, batch, context)


class LockedTask(TinyTask):
    """A task whose data no rank can read."""

    def train_data(self) -> list[dict[str, Tensor]]:
        raise DataError("the planted folder cannot be read", "another folder")


def config(folder: str, num_workers: int = 0, **changes: object) -> RunConfig:
    """Return a run of ten thousand steps that saves nothing unless it is told to stop."""
    return RunConfig.parse(
        {
            "output_dir": folder,
            "max_steps": 10_000,
            "batch": {"batch_size": 4},
            "loader": {"num_workers": num_workers},
            "evaluation": {"every_epochs": None},
            "checkpoint": {"every_epochs": None},
            "log_every": 1,
            "timeout_s": TIMEOUT_S,
            **changes,
        }
    )


def build(argv: Sequence[str]) -> tuple[TinyTask, RunConfig]:
    """Turn the command line into what `fit` takes."""
    folder, step_s, num_workers, failing_step = (*argv, *("", "0.05", "0", "")[len(argv) :])
    if step_s == "refused":
        return LockedTask(), config(folder)
    failing = int(failing_step) if failing_step else None
    return SlowTask(float(step_s), failing), config(folder, int(num_workers))


def main(argv: Sequence[str]) -> NoReturn:
    train(build, argv)


if __name__ == "__main__":
    main(sys.argv[1:])
