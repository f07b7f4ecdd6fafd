"""What the cluster tests submit: a real run on ranks, its steps slow enough to be hit in, once.

python train_steps.py FOLDER [STEP_SECONDS] [FAULT] [RESUME]

A FAULT is an exception at step 10 on the last rank (`bug`), a request that cannot work
(`refused`), an evaluation after step 6 that takes STEP_SECONDS for each of 240 batches
(`evaluation`), or `none`.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.errors import DataError
from lockstep.task import Context, PartialLoss
from lockstep.testing import TinyTask
from lockstep_recipes.command import train

NUM_STEPS = 30
SAVE_EVERY = 4
EVALUATED_STEP = 6


class SlowTask(TinyTask):
    """A tiny task with a sleep in every step."""

    def __init__(self, step_s: float = 0.0, fault: str = "") -> None:
        super().__init__(num_samples=64, num_held_out=480)
        self.step_s = step_s
        self.fault = fault

    def train_data(self) -> list[dict[str, Tensor]]:
        if self.fault == "refused":
            raise DataError("the planted folder cannot be read", "another folder")
        return super().train_data()

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        if (self.fault == "evaluation") != context.training:
            time.sleep(self.step_s)
        last = context.world.rank == context.world.size - 1
        if self.fault == "bug" and context.step == 10 and last:
            raise ZeroDivisionError("the planted bug")
        return super().loss(model, batch, context)


def config(folder: str, resume: str = "auto", **changes: Any) -> RunConfig:
    return RunConfig.parse(
        {
            "output_dir": folder,
            "resume": resume,
            "max_steps": NUM_STEPS,
            "batch": {"batch_size": 2, "global_batch_size": 8},
            "evaluation": {"every_epochs": None},
            "checkpoint": {"every_steps": SAVE_EVERY, "keep_last": 100},
            "sinks": {"curves": False},
            "log_every": 1,
            "timeout_s": 60,
            **changes,
        }
    )


def build(argv: Sequence[str]) -> tuple[TinyTask, RunConfig]:
    folder, step_s, fault, resume = (*argv, *("", "0", "none", "auto")[len(argv) :])
    goes_on = any(Path(folder, "checkpoints").glob("step_*"))  # nothing hits it a second time
    evaluated = {"evaluation": {"every_steps": EVALUATED_STEP}} if fault == "evaluation" else {}
    return SlowTask(0.0 if goes_on else float(step_s), fault), config(folder, resume, **evaluated)


if __name__ == "__main__":
    train(build, sys.argv[1:])
