"""The next batch of a run, read between two steps or ahead within one.

Owns: reading it, and keeping the error of a batch that cannot be read until the ranks agree on it.
Does not own: when it is read, or the loader.
"""

import signal
from collections.abc import Iterator

from lockstep.data.batch import StepBatch
from lockstep.data.loader import Loader
from lockstep.errors import LockstepError
from lockstep.observe.throughput import Throughput
from lockstep.signals import StopSignals


class NextBatch:
    """The batch after the current step."""

    def __init__(self, loader: Loader, throughput: Throughput, signals: StopSignals) -> None:
        self._loader = loader
        self._throughput = throughput
        self._signals = signals
        self._batches: Iterator[StepBatch] = iter(())
        self._batch: StepBatch | None = None
        self.error: LockstepError | None = None
        """Why it could not be read on this rank."""
        self.is_read = False
        """Whether it has been read since `take` returned the one before."""

    def seek(self) -> None:
        """Read the batch at the position of the loader."""
        self._batches = iter(self._loader)
        self.is_read = False
        self.read()

    def read(self) -> None:
        """Read the batch unless it has been read."""
        if self.is_read:
            return
        self.is_read = True
        with self._throughput.waiting():
            try:
                self._batch = next(self._batches, None)
            except LockstepError as error:
                self.error = error
            except KeyboardInterrupt:  # outside a pass, so that the run can save
                self._signals.requested = self._signals.requested or signal.SIGINT

    def take(self) -> StepBatch:
        """Return the batch, for the next step."""
        assert self._batch is not None  # ranks have agreed that all have theirs
        self.is_read = False
        return self._batch
