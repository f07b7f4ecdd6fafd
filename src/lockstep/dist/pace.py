"""Which rank is slow, where all wait for it in the exchange of gradients and so take as long.

Owns: the time that a rank takes for its passes until its gradients are ready, and for its update,
on the device's clock; who stands out by it. Does not own: when it is looked at.
"""

import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

MAX_SPANS = 2000
"""Of so many at most the time is added up, two a step: log lines may be far apart."""
STANDS_OUT = 1.5
"""How many times as long as the others a rank takes that is called slow."""


class Clock:
    """Marks moments on the device: on a GPU, when it gets there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        """Return the moment at which all that was asked for so far is done."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        """Return the seconds between two marks; on a GPU, after `settle`."""
        return float(first.elapsed_time(second)) / 1e3 if self.on_gpu else float(second - first)

    def settle(self) -> None:
        """Wait until the device has got to every mark."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


class Pace:
    """What one rank's steps take by themselves; a loss that talks to other ranks hides it."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._began: Any = None
        self._spans = deque[tuple[Any, Any]](maxlen=MAX_SPANS)

    def begin(self) -> None:
        """Note that from here on the rank does something by itself."""
        self._began = self._clock.mark()

    def end(self) -> None:
        """Note that it now waits for others, or for data."""
        if self._began is not None:
            self._spans.append((self._began, self._clock.mark()))
            self._began = None

    def interval(self) -> float:
        """Return the time since the previous call in seconds; all ranks took as many steps."""
        done = [span for span in self._spans if not self._clock.on_gpu or span[1].query()]
        self._spans.clear()
        return sum(self._clock.between(*span) for span in done)


def slow_rank(times: Sequence[float]) -> tuple[int, float] | None:
    """Return the rank that stands out, and how many times as long as the others it takes.

    >>> slow_rank([1.0, 0.9, 3.0, 1.1])
    (2, 3.0)
    >>> slow_rank([1.0, 1.2])
    >>> slow_rank([0.0, 0.0])  # nothing was measured: a model that is cut over ranks
    """
    slowest = times.index(max(times))
    usual = median([*times[:slowest], *times[slowest + 1 :]] or [0.0])
    is_slow = usual > 0 and times[slowest] > STANDS_OUT * usual
    return (slowest, times[slowest] / usual) if is_slow else None
