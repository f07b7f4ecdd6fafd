"""The phase of a run that this rank is in, and listeners for its changes.

Owns: the names of the phases. Does not own: where they begin and end, which `prepare`, the loader,
`train_step` and the trainer decide, or what a listener does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

BuildPhase = Literal["open folder", "build data", "find checkpoint", "plan batches", "build model"]
"""The phases of `prepare`, in this order. Add a listener for them in `Callback.configure`."""
StepPhase = Literal["data", "forward", "backward", "exchange", "update", "evaluate", "save"]
"""Waiting for data, the passes of a micro-batch, waiting for the gradients and sums of all ranks,
the optimizer step, an evaluation, a checkpoint. On a GPU these are the times of the host."""
Phase = BuildPhase | StepPhase
Listener = Callable[[Phase, bool], None]
"""Called with a phase, and whether it begins."""


class Phases:
    """The current phase of one rank: `with world.phase("forward"):`."""

    def __init__(self) -> None:
        self.current: Phase | None = None
        self.listeners: list[Listener] = []

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Enter a phase for the duration of a block; phases may be nested."""
        outer = self.current
        self.current = phase
        for listener in self.listeners:
            listener(phase, True)
        try:
            yield
        finally:
            self.current = outer
            for listener in self.listeners:
                listener(phase, False)
