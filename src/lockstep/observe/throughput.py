"""The speed of a run, and the share of its time spent waiting for data.

Owns: the definitions. Does not own: when to report, which the trainer decides, or the device:
the clock is the host's, and is accurate if the interval ends with a step whose loss was read.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


class Throughput:
    """Measure the steps between two calls of `interval()`.

    - `samples_per_second`: samples of the finished steps, divided by the training time;
      over all ranks if `step_done` gets the samples of all ranks.
    - `step_time_s`: training time divided by finished steps.
    - `data_wait_share`: the part of the training time spent inside `waiting()`, 0 to 1.

    Training time is the time since the previous interval without the time inside `pausing()`
    (evaluations, saves), which must not look like a slow step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._reset()

    def _reset(self) -> None:
        self._began = self._clock()
        self._spent_s = {"waiting": 0.0, "pausing": 0.0}
        self._num_steps = 0
        self._num_samples = 0

    def waiting(self) -> AbstractContextManager[None]:
        """Count the time inside as waiting for data."""
        return self._spending("waiting")

    def pausing(self) -> AbstractContextManager[None]:
        """Do not count the time inside at all."""
        return self._spending("pausing")

    @contextmanager
    def _spending(self, how: str) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self._spent_s[how] += self._clock() - began

    def step_done(self, num_samples: int) -> None:
        """Count one weight update on `num_samples` samples."""
        self._num_steps += 1
        self._num_samples += num_samples

    def interval(self) -> dict[str, float]:
        """Return the three numbers since the previous call, and start over.

        All are 0 if no step was finished or no time passed.

        >>> now = iter([0.0, 0.0, 1.0, 4.0, 4.0])
        >>> throughput = Throughput(clock=lambda: next(now))
        >>> with throughput.waiting():
        ...     pass
        >>> throughput.step_done(32)
        >>> throughput.interval()
        {'samples_per_second': 8.0, 'step_time_s': 4.0, 'data_wait_share': 0.25}
        """
        training_s = self._clock() - self._began - self._spent_s["pausing"]
        counts = training_s > 0 and self._num_steps > 0
        report = {
            "samples_per_second": self._num_samples / training_s if counts else 0.0,
            "step_time_s": training_s / self._num_steps if counts else 0.0,
            "data_wait_share": min(1.0, self._spent_s["waiting"] / training_s) if counts else 0.0,
        }
        self._reset()
        return report
