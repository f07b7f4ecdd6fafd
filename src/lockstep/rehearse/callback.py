"""The callback of `lockstep rehearse`: writes notes about a run, and waits to be killed.

Owns: the evaluation and the checkpoint in the middle of a rehearsed run, and the notes of each
rank. Does not own: the number of steps (`lockstep.run.rehearsal`, and `Loader` for a custom loop),
or the verdict (`rehearsal.py`).
"""

import os
import time
from pathlib import Path
from typing import Any

from lockstep.callback import Callback, RunView
from lockstep.config import RunConfig
from lockstep.data.batch import StepBatch
from lockstep.dist.collectives import Collectives
from lockstep.dist.environment import tool_folder
from lockstep.harness.attach import KILLED, write_note
from lockstep.run.rehearsal import STEPS
from lockstep.step.report import StepReport

CALLBACK = "lockstep.rehearse.callback:RehearsalCallback"
HOLD_S = 300.0
"""How long a rank waits at its first checkpoint to be killed."""


class RehearsalCallback(Callback):
    """Writes the notes of one rank."""

    def __init__(self) -> None:
        self.folder = tool_folder()
        self.note("process")

    def note(self, event: str, step: int = 0, **values: Any) -> None:
        """Append a note, which the tool reads."""
        write_note(self.folder, event, step=step, **values)

    @property
    def was_killed(self) -> bool:
        """Return whether the run has been killed already, and resumes."""
        return (self.folder / KILLED).exists()

    def configure(self, task: Any, config: RunConfig, world: Collectives) -> RunConfig:
        """Evaluate and save halfway."""
        self.note("run", output_dir=str(Path(config.output_dir).absolute()))
        return saving_halfway(config, self.was_killed)

    def on_run_start(self, run: RunView) -> None:
        """Note that this rank has started, and its first step."""
        self.note("start", run.step)

    def on_step_end(self, run: RunView, batch: StepBatch, report: StepReport) -> None:
        """Note a step."""
        self.note("trained", run.step)

    def on_checkpoint_saved(self, run: RunView, path: Path) -> None:
        """Note a checkpoint; at the first one, wait to be killed."""
        if not run.world.is_first:
            return
        is_first_save = not self.was_killed
        self.note("saved", run.step, path=str(path.absolute()))
        parent = os.getppid()
        deadline = time.monotonic() + HOLD_S
        while is_first_save and time.monotonic() < deadline and os.getppid() == parent:
            time.sleep(0.05)


def saving_halfway(config: RunConfig, was_killed: bool) -> RunConfig:
    """Return a rehearsed config that also evaluates and saves halfway; resume it after a kill."""
    total = config.max_steps or config.epochs or STEPS
    # Save in the foreground before the kill, so that the run is killed at a known step.
    config = config.saving_every(max(1, total // 2), waits=not was_killed)
    return config.model_copy(update={"resume": "auto"}) if was_killed else config
