"""Which phase of a run this rank is in, and who is told when it changes.

Owns: the names of the phases. Does not own: where they begin and end (`prepare`, the loader,
`train_step` and the trainer say so), nor what a listener makes of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

BuildPhase = Literal["open folder", "build data", "find checkpoint", "plan batches", "build model"]
"""What `prepare` does, in this order. A listener that hears it is added in `configure`."""
StepPhase = Literal["data", "forward", "backward", "exchange", "update", "evaluate", "save"]
"""Waiting for data, the passes of a micro-batch, waiting for the gradients and sums of all ranks,
the optimizer step, an evaluation, a checkpoint. On a GPU these are the times of the host."""
Phase = BuildPhase | StepPhase
Listener = Callable[[Phase, bool], None]
"""Is called with a phase, and with whether it begins or ends."""


class Phases:
    """The phase of one rank: `with world.phase("forward"):`."""

    def __init__(self) -> None:
        self.current: Phase | None = None
        self.listeners: list[Listener] = []

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Return the block that is this phase; a phase may lie within another."""
        outer, self.current = self.current, phase
        for listener in self.listeners:
            listener(phase, True)
        try:
            yield
        finally:
            self.current = outer
            for listener in self.listeners:
                listener(phase, False)
