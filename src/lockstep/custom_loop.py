"""Callbacks in a custom loop around `train_step`, without a trainer.

Owns: when they are called, and agreement of the ranks on a stop and on a callback's error. Does
not own: the loop; `train_step`, `Loader` and `CheckpointStore` report what happens in it.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.callback import Callbacks
from lockstep.data.batch import StepBatch
from lockstep.dist.agreement import first_of_ranks, raise_together
from lockstep.dist.collectives import Collectives
from lockstep.result import RunResult
from lockstep.step.report import StepReport

_log = logging.getLogger("lockstep")


class CustomLoop:
    """The `RunView` of a custom loop.

    The loop ends with the `Loader` of the last batch.
    """

    is_custom_loop = True
    task = config = held_out = None

    def __init__(self, world: Collectives, callbacks: Callbacks) -> None:
        self.world = world
        self.callbacks = callbacks
        self.model: nn.Module = nn.Module()
        """The model of the current or last step; a loop may train several."""
        self.optimizer: Any = None
        self.step = 0
        self.stop_reason = ""
        """Why the ranks have agreed to stop."""
        self._wanted_stop = ""
        """Why this rank asks to stop; the others learn of it at the next vote."""
        self._batch: StepBatch | None = None
        """The last batch."""
        self._saved = Path()
        """The last checkpoint that callbacks were called for."""

    def log(self, name: str, value: Tensor | float) -> None:
        """Write this rank's number to the logger `lockstep`: a custom loop has no log lines."""
        _log.info("step %d: %s %.6g", self.step, name, float(value))

    def stop(self, reason: str, *, save: bool = True) -> None:
        """Stop the loop on every rank: after this step, or after the next if no step is running.

        Whether to save is up to the loop.
        """
        self._wanted_stop = reason or "a callback asked for it"

    def start_step(self, model: nn.Module, optimizer: Optimizer, batch: StepBatch) -> None:
        """Call callbacks before a step, and first at the start of the run. Collective."""
        is_first = self._batch is None
        self.model = model
        self.optimizer = optimizer
        self.step = batch.step
        self._batch = batch
        if is_first:
            self._call("on_run_start")
            self._agree()
        if self.callbacks.overrides("on_step_start"):
            self._call("on_step_start", batch)
            self._agree()

    def end_step(self, batch: StepBatch, report: StepReport) -> None:
        """Call callbacks after a step. Collective."""
        self.step = batch.step + 1
        self._call("on_step_end", batch, report)
        self._agree()

    def is_over(self, batch: StepBatch, is_last: bool) -> bool:
        """Return whether the loop ends after `batch`; if so, call callbacks. Collective."""
        if batch is not self._batch or not (is_last or self.stop_reason):
            return False
        self._call("on_run_end", RunResult(self.step, {}, self._saved.parent, 0, self.stop_reason))
        self._agree()
        self._batch = None  # another loop may follow
        self.stop_reason = ""
        self._wanted_stop = ""
        return True

    def checkpoint_saved(self, path: Path) -> None:
        """Call callbacks for a checkpoint, once. Collective."""
        if path != self._saved:
            self._saved = path
            self._call("on_checkpoint_saved", path)
            self._agree()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the callbacks."""
        return self.callbacks.state_dict()

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the states of the callbacks."""
        for name in self.callbacks.load_state_dict(states):
            _log.warning(
                "the checkpoint has a state for %s, and this loop has no such callback", name
            )

    def _call(self, method: str, *args: object) -> None:
        self.callbacks.call(method, self, *args)

    def _agree(self) -> None:
        """Raise a callback's error on all ranks, and share a reason to stop. Collective."""
        error, self.callbacks.error = self.callbacks.error, None
        failed, stops = self.world.all_max(int(error is not None), int(bool(self._wanted_stop)))
        if failed:
            raise_together(self.world, error)
        if stops:
            self.stop_reason = first_of_ranks(self._wanted_stop, self.world)
