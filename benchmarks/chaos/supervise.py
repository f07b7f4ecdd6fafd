"""Launch the legs of a schedule one after the other, from one warm process.

    python -m chaos.supervise

Owns: calling `lockstep launch` again with a different number of ranks until a run is finished. Does
not own: the faults. Each line on its standard input is a run to take up: folder, steps, first
leg, mutant. It is what dies when the launcher is killed.
"""

import json
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from pathlib import Path

from chaos import schedule
from chaos.notes import note
from chaos.points import LAUNCHER, arm_fork
from lockstep.launch.local import preloaded

PRELOAD = [*preloaded(restarts=1), "chaos.points"]
MOST_EXTRA = 5
"""Launches after the last leg of the schedule, before the run is given up."""


def take_up(folder: Path, num_steps: int, first: int, mutant: str) -> int:
    """Launch leg after leg until one of them finishes the run."""
    from lockstep.launch.local import launch
    from lockstep.launch.request import LaunchRequest

    legs = schedule.read(folder / "chaos" / "schedule.json")
    code = 1
    for number in range(first, len(legs) + MOST_EXTRA):
        leg = legs[number] if number < len(legs) else schedule.Leg(1 + number % 2, ())
        words = ("-m", "chaos.train", str(folder), str(num_steps), str(number), mutant)
        note(folder, "launch", leg=number, size=leg.size)
        arm_fork(folder, number, leg)
        code = launch(LaunchRequest(words, leg.size, restarts=leg.restarts))
        note(folder, "left", leg=number, code=code)
        if code == 0:
            break
    return code


def main() -> None:
    os.environ[LAUNCHER] = str(os.getpid())  # the process that forks the ranks inherits this
    # Started by us, it also loads what strikes at a fork; `launch` finds it running.
    multiprocessing.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    for line in sys.stdin:
        folder, num_steps, first, mutant = json.loads(line)
        code = take_up(Path(folder), num_steps, first, mutant)
        note(Path(folder), "ended", code=code)


if __name__ == "__main__":
    main()
