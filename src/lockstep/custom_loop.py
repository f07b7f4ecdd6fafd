"""Callbacks in a loop around `train_step` that has no trainer.

Owns: when they are called there, and that ranks agree on a stop and on what a callback raised.
Does not own: the loop. `train_step`, `Loader` and `CheckpointStore` say what happens in it.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.callback import Callbacks
from lockstep.data.batch import StepBatch
from lockstep.dist.agreement import raise_together
from lockstep.dist.collectives import Collectives
from lockstep.run.result import RunResult
from lockstep.step.report import StepReport

_log = logging.getLogger("lockstep")


class CustomLoop:
    """What callbacks see of such a loop: a `RunView`.

    The loop ends with the `Loader` that yielded the batch trained on last.
    """

    def __init__(self, world: Collectives, callbacks: Callbacks) -> None:
        self.world = world
        self.callbacks = callbacks
        self.model: nn.Module = nn.Module()
        """The model of the step under way or of the last one; a loop may train several."""
        self.optimizer: Any = None
        self.step = 0
        self.stop_reason = ""
        self._batch: StepBatch | None = None
        """The batch that was trained on last."""
        self._saved = Path()
        """The checkpoint that callbacks were told of last."""
        self._error: Exception | None = None
        """What a callback of this rank raised, until the ranks agree on it."""

    def log(self, name: str, value: Tensor | float) -> None:
        """Write a number of this rank to the logger `lockstep`; such a loop has no log lines."""
        _log.info("step %d: %s %.6g", self.step, name, float(value))

    def stop(self, reason: str) -> None:
        """Ask for the end of the loop after this step, on every rank."""
        self.stop_reason = reason or "a callback asked for it"

    def start_step(self, model: nn.Module, optimizer: Optimizer, batch: StepBatch) -> None:
        """Tell callbacks of a step, and before the first one of the run. Collective."""
        is_first = self._batch is None
        self.model, self.optimizer, self.step = model, optimizer, batch.step
        self._batch = batch
        if is_first:
            self._call("on_run_start")
            self._agree()
        self._call("on_step_start", batch)

    def end_step(self, batch: StepBatch, report: StepReport) -> None:
        """Tell callbacks that a step is done. Collective."""
        self.step = batch.step + 1
        self._call("on_step_end", batch, report)
        self._agree()

    def is_over(self, batch: StepBatch, is_last: bool) -> bool:
        """Say whether the loop ends after `batch`, and tell callbacks if it does. Collective."""
        if batch is not self._batch or not (is_last or self.stop_reason):
            return False
        self._call("on_run_end", RunResult(self.step, {}, self._saved.parent, 0, self.stop_reason))
        self._agree()
        return True

    def checkpoint_saved(self, path: Path) -> None:
        """Tell callbacks of a checkpoint, once. Collective."""
        if path != self._saved:
            self._saved = path
            self._call("on_checkpoint_saved", path)
            self._agree()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the callbacks."""
        return self.callbacks.state_dict()

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Give the callbacks their states back."""
        for name in self.callbacks.load_state_dict(states):
            _log.warning("the checkpoint holds the state of %s, which this loop lacks", name)

    def _call(self, method: str, *args: object) -> None:
        try:
            self.callbacks.call(method, self, *args)
        except Exception as error:
            self._error = self._error or error

    def _agree(self) -> None:
        """Raise what a callback raised, on all ranks; take over a reason to stop. Collective."""
        error, self._error = self._error, None
        failed, stops = self.world.all_max(int(error is not None), int(bool(self.stop_reason)))
        if failed:
            raise_together(self.world, error)
        if stops:
            texts = self.world.all_texts(self.stop_reason)
            self.stop_reason = next(text for text in texts if text)
