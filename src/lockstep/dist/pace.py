"""Find the slow rank: all others wait for it, so step times are equal on every rank.

Owns: the time of a rank's own work (forward and backward passes, update) on the device's clock;
finding an outlier. Does not own: when to measure.
"""

import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

MAX_SPANS = 2000
"""Most intervals to measure, two per step: log lines may be far apart."""
STANDS_OUT = 1.5
"""A rank is slow if it takes at least this many times as long as the others."""


class Clock:
    """Records moments on the device; on a GPU, as CUDA events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        """Return the moment at which all work queued so far is done."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        """Return the seconds between two marks; on a GPU, call `synchronize` first."""
        return float(first.elapsed_time(second)) / 1e3 if self.on_gpu else float(second - first)

    def synchronize(self) -> None:
        """Wait until the device has reached every mark."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


class Pace:
    """The time of one rank's own work; meaningless if the loss itself communicates."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._began: Any = None
        self._spans = deque[tuple[Any, Any]](maxlen=MAX_SPANS)

    def begin(self) -> None:
        """Start an interval of the rank's own work."""
        self._began = self._clock.mark()

    def end(self) -> None:
        """End the interval: the rank now waits for others, or for data."""
        if self._began is not None:
            self._spans.append((self._began, self._clock.mark()))
            self._began = None

    def interval(self) -> float:
        """Return the seconds of own work since the previous call, for equal steps on all ranks."""
        done = [span for span in self._spans if not self._clock.on_gpu or span[1].query()]
        self._spans.clear()
        return sum(self._clock.between(*span) for span in done)


def slow_rank(times: Sequence[float]) -> tuple[int, float] | None:
    """Return the slow rank, and how many times as long as the others it takes, or None.

    >>> slow_rank([1.0, 0.9, 3.0, 1.1])
    (2, 3.0)
    >>> slow_rank([1.0, 1.2])
    >>> slow_rank([0.0, 0.0])  # nothing was measured: a sharded model
    """
    slowest = times.index(max(times))
    usual = median([*times[:slowest], *times[slowest + 1 :]] or [0.0])
    is_slow = usual > 0 and times[slowest] > STANDS_OUT * usual
    return (slowest, times[slowest] / usual) if is_slow else None
