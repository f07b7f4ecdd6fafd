"""What the signal tests start: a run that sleeps in its evaluation, and not in its steps.

python evaluate_slowly.py FOLDER [SECONDS_PER_BATCH]
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from train_slowly import config

from lockstep.config import RunConfig
from lockstep.task import Context
from lockstep.testing import TinyTask
from lockstep_recipes.command import train

STEP = 3
"""After which it evaluates."""
NUM_BATCHES = 50


class SlowToEvaluate(TinyTask):
    """Leaves each rank's process id in its folder once the rank is in an evaluation."""

    def __init__(self, folder: str, batch_s: float) -> None:
        super().__init__(num_samples=64, num_held_out=4 * NUM_BATCHES)
        self.folder = folder
        self.batch_s = batch_s

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> Any:
        Path(self.folder, f"evaluating_{context.world.rank}").write_text(str(os.getpid()))
        time.sleep(self.batch_s)
        return super().evaluate(model, batch, context)


def build(argv: Sequence[str]) -> tuple[TinyTask, RunConfig]:
    folder, batch_s = (*argv, "1.0")[:2]
    evaluation = {"every_steps": STEP, "save_best": False}
    run = config(folder, num_workers=1, evaluation=evaluation, max_steps=STEP + 1)
    return SlowToEvaluate(folder, float(batch_s)), run


if __name__ == "__main__":
    train(build, sys.argv[1:])
