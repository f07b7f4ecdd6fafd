"""What the tests of stopping start: a run of which one rank does something at a named moment.

python train_stuck.py FOLDER MOMENT ACT

Moments, in the order a run meets them: import, enter, data, model, first_step, fifth_step,
sixth_step, evaluation, save, finished, exit. Acts: stop (SIGSTOP), hold (wait in C with the
interpreter lock held), exit (sys.exit(0)), leave (os._exit(0)), kill (SIGKILL), work (take a
second). The rank that acts is the last, or the first for `work`; all act for all_exit (sys.exit()),
all_vanish (exit in C code) and all_interrupt (KeyboardInterrupt). It leaves a file `acts` first,
and before `stop` and `hold` it starts a process of its own.
"""

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.task import Context, PartialLoss
from lockstep.testing import TinyTask
from lockstep.trainer import fit

if __name__ == "__main__":  # pytest imports this file, too
    FOLDER = Path(sys.argv[1])
    MOMENT = sys.argv[2]
    ACT = sys.argv[3]
    RANK = 0 if ACT == "work" else int(os.environ["WORLD_SIZE"]) - 1


def act_at(moment: str) -> None:
    """Act, if this is the moment and the rank."""
    if moment != MOMENT or (int(os.environ["RANK"]) != RANK and not ACT.startswith("all_")):
        return
    if ACT in ("stop", "hold"):
        subprocess.Popen(["sleep", "1000"])  # it would outlive a rank that is killed
    (FOLDER / "acts").touch()
    match ACT:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hold":
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):  # a lock that is taken already; no signal interrupts the wait for it
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        case "exit":
            sys.exit(0)
        case "leave":
            os._exit(0)
        case "all_exit":
            sys.exit()
        case "all_vanish":
            ctypes.CDLL(None)._exit(0)
        case "all_interrupt":
            raise KeyboardInterrupt
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "work":
            time.sleep(1)


class Acting(TinyTask):
    """A tiny task that passes the moments."""

    def train_data(self) -> list[dict[str, Tensor]]:
        act_at("data")
        return super().train_data()

    def build_model(self) -> nn.Module:
        act_at("model")
        return super().build_model()

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        if not context.training:
            act_at("evaluation")
        elif context.step == 0:
            act_at("first_step")
        elif context.step == 4:
            act_at("fifth_step")
        elif context.step == 5:
            act_at("sixth_step")
        return super().loss(model, batch, context)

    def state(self) -> dict[str, Any]:
        act_at("save")
        return super().state()


def main() -> None:
    """Train six steps, and save and evaluate after them."""
    atexit.register(act_at, "exit")
    config = RunConfig.parse(
        {
            "output_dir": str(FOLDER / "run"),
            "max_steps": 6,
            "batch": {"batch_size": 4},
            "checkpoint": {"every_steps": 2, "background": False},
            "sinks": {"curves": False},
            "log_every": 1,
            "device": "cpu",
        }
    )
    act_at("enter")
    result = fit(Acting(num_samples=64), config)
    act_at("finished")
    raise SystemExit(result.exit_code)


if __name__ == "__main__":
    act_at("import")
    main()
