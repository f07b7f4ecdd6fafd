"""The callback of `lockstep certify`: traces a run, and kills it once where that is asked for.

Owns: the settings and the samples of a certified run, the order of its micro-batches, and when
something is written to the trace. Does not own: what is written (`trace.py`, `cut.py`), or what
two traces say (`certificate.py`).
"""

import os
import signal
from dataclasses import replace
from typing import Any

from torch import Tensor

from lockstep.callback import Callback, RunView
from lockstep.certify.cut import Cut, measure_cut
from lockstep.certify.settings import RunSettings, combines_ranks
from lockstep.certify.trace import Tracer
from lockstep.config import RunConfig
from lockstep.data.batch import MicroBatch, StepBatch
from lockstep.dist.collectives import Collectives
from lockstep.dist.environment import tool_folder
from lockstep.errors import ConfigError
from lockstep.harness.attach import KILLED, TRACE, read_settings
from lockstep.nested import map_leaves
from lockstep.step.report import StepReport
from lockstep.task import Task

CALLBACK = "lockstep.certify.callback:CertifyCallback"
NUM_HELD_OUT = 8
"""How many held-out samples an evaluation reads."""


class CertifyCallback(Callback):
    """Traces the steps of one rank."""

    tracer: Tracer
    """Created when the run starts."""

    def __init__(self) -> None:
        self.folder = tool_folder()
        self.settings = RunSettings(**read_settings(self.folder))
        self.combines_ranks = False
        self.kill_step = 0
        """The step to kill this process after, or 0."""

    def configure(self, task: Task, config: RunConfig, world: Collectives) -> RunConfig:
        """Return the config of a certified run."""
        config = self.settings.config(task, config, world.size, self.folder / "run")
        self.combines_ranks = self.settings.most_ranks > 0 and combines_ranks(task, config)
        return config

    def on_run_start(self, run: Any) -> None:
        """Choose when the run saves and evaluates, and begin its trace."""
        if run.is_custom_loop:
            raise ConfigError(
                "a loop around train_step alone leaves nothing to compare",
                "write the loop with prepare and a Trainer, as docs/own_loop.md shows",
            )
        kills = self.settings.kills and not (self.folder / KILLED).exists()
        save_step = self.settings.save_step(run.contract.plan.steps_per_epoch)
        self.kill_step = save_step + 1 if kills and run.world.is_first else 0
        run.config = run.config.saving_every(save_step, waits=kills)
        run.held_out = first_samples(run.held_out) if self.settings.evaluates else None
        self.tracer = Tracer(run, self.folder / TRACE, self.settings.steps, self.combines_ranks)
        self.tracer.write_start()

    def on_step_start(self, run: RunView, batch: StepBatch) -> None:
        """Reverse the micro-batches where asked, and hash them before the step can change them."""
        if self.settings.reverses:
            batch.micro_batches[:] = reversed_samples(batch.micro_batches)
        self.tracer.receive(batch)

    def on_step_end(self, run: RunView, batch: StepBatch, report: StepReport) -> None:
        """Trace the step; after the last, compare other micro-batches; kill the process when due.

        The kill is like a power cut: nothing is flushed, and no other rank is told.
        """
        self.tracer.write_step(report, batch)
        if run.step == self.settings.steps and self._measures_cut(run):
            self.tracer.write_cut(self._measured_cut(batch))
        if run.step == self.kill_step:
            (self.folder / KILLED).write_text(str(run.step))
            os.kill(os.getpid(), signal.SIGKILL)

    def _measures_cut(self, run: RunView) -> bool:
        """Return whether this run, of parity on one rank, also computes other micro-batches."""
        is_parity = self.settings.most_ranks > 0 and not self.settings.reverses
        return is_parity and run.world.size == 1

    def _measured_cut(self, batch: StepBatch) -> Cut:
        run = self.tracer.run
        if not run.uses_task_loss:
            return Cut("a custom loop takes its own steps")
        return measure_cut(run, batch)


def first_samples(data: Any) -> Any:
    """Return a few of the held-out samples, if there are any."""
    if data is None:
        return None
    return [data[index] for index in range(min(NUM_HELD_OUT, len(data)))]


def reversed_samples(micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """Return micro-batches in reverse order; of a single one, its samples in reverse order."""
    if len(micro_batches) > 1:
        return micro_batches[::-1]
    (only,) = micro_batches
    num = len(only.ids)

    def holds_samples(node: Any) -> bool:
        """Return whether a tensor, or a list of strings or numbers, has a row for each sample."""
        if isinstance(node, Tensor):
            return node.ndim > 0 and len(node) == num
        return isinstance(node, list) and len(node) == num and not isinstance(node[0], Tensor)

    def reverse(rows: Any) -> Any:
        return rows.flip(0) if isinstance(rows, Tensor) else rows[::-1]

    data = map_leaves(reverse, only.data, holds_samples)
    return [replace(only, ids=only.ids[::-1].copy(), data=data)]
