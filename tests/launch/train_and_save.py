"""What the launcher's tests start: a run of 24 steps that saves each, says hello, may fail.

python train_and_save.py FOLDER [--step_s=0] [--fail_at=STEP|each] [--fail_rank=0] [--batch_size=4]
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.dist.environment import launched_rank
from lockstep.task import Context, PartialLoss
from lockstep.testing import TinyTask
from lockstep_recipes.command import train


class Task(TinyTask):
    """A tiny task whose steps may take a moment, and may fail."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(num_samples=32)
        self.args = args

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        time.sleep(self.args.step_s)
        if context.step == self.failing_step and context.world.rank == self.args.fail_rank:
            if self.args.fail_with:
                os._exit(self.args.fail_with)
            raise ZeroDivisionError("the planted fault")
        return super().loss(model, batch, context)

    @property
    def failing_step(self) -> int:
        if self.args.fail_at != "each":
            return int(self.args.fail_at)
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        return 2 * attempt + 1 if attempt < 4 else -1


def build(argv: Sequence[str]) -> tuple[Task, RunConfig]:
    """Turn the command line into what `fit` takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--step_s", type=float, default=0.0)
    parser.add_argument("--fail_at", default="-1")
    parser.add_argument("--fail_rank", type=int, default=0)
    parser.add_argument("--fail_with", type=int, help="an exit code, in place of an exception")
    parser.add_argument("--batch_size", default=4)
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / f"pid_{launched_rank()}").write_text(str(os.getpid()))
    print(f"hello from rank {launched_rank()}", flush=True)
    values = {
        "output_dir": str(args.folder),
        "max_steps": 24,
        "batch": {"batch_size": args.batch_size},
        "evaluation": {"every_epochs": None},
        "checkpoint": {"every_steps": 1, "background": False},
        "sinks": {"curves": False},
        "log_every": 1,
        "timeout_s": 60,
        "device": "cpu",
    }
    return Task(args), RunConfig.parse(values)


if __name__ == "__main__":
    train(build, sys.argv[1:])
