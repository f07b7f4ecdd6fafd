"""What one rank computes in one step: micro-batches, each with the ids of its samples.

Owns: the records. Does not own: reading them.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.data.feed import pin
from lockstep.data.order import Ids, Leaf
from lockstep.plan import CutChange


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """A worker process that was lost over a leaf, and replaced."""

    pid: int
    happened: str
    seconds: float
    """Lost by it: from when the leaf was needed until it was there."""

    def __str__(self) -> str:
        return f"loader worker {self.pid} {self.happened}; replaced, {self.seconds:.2g} s lost"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One leaf, read: the collated data and the ids of the samples in it."""

    leaf: Leaf
    ids: Ids
    data: Any
    skipped: tuple[tuple[int, str], ...] = ()
    error: tuple[str, str] | None = None
    faults: tuple[WorkerFault, ...] = ()

    @property
    def counts(self) -> bool:
        """Say whether this micro-batch adds to the step; a borrowed one only keeps company."""
        return not self.leaf.borrowed

    @property
    def visited(self) -> Ids:
        """Return every sample that was tried, bad ones included: what the ledger counts."""
        return np.append(self.ids, [s for s, _ in self.skipped]) if self.skipped else self.ids

    def pin_memory(self) -> "MicroBatch":
        """Return it with the data in page-locked memory."""
        return replace(self, data=pin(self.data))


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one rank computes in one step."""

    step: int
    epoch: int
    micro_batches: list[MicroBatch]
    consumed: int
    """Samples the whole run has consumed once this step is done."""
    num_leaves: int = 0
    """Micro-batches of the step on all ranks together."""
    changed_cut: CutChange | None = None
    """If the run was resumed with other micro-batches, and nobody has accepted that."""
