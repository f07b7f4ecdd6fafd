"""The micro-batches of one rank in one step, each with the ids of its samples.

Owns: the data classes. Does not own: reading samples.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.data.feed import pin
from lockstep.data.order import Ids, Leaf
from lockstep.plan import SplitChange


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """A worker process that died or hung while reading a leaf, and was replaced."""

    pid: int
    happened: str
    seconds: float
    """The time lost, from when the leaf was needed until it was read."""

    def __str__(self) -> str:
        return f"loader worker {self.pid} {self.happened}; replaced, {self.seconds:.2g} s lost"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A leaf that has been read: the collated data, and the ids of its samples."""

    leaf: Leaf
    ids: Ids
    data: Any
    skipped: tuple[tuple[int, str], ...] = ()
    error: tuple[str, str] | None = None
    faults: tuple[WorkerFault, ...] = ()
    is_stand_in: bool = False
    """Whether every sample of the leaf was skipped, and `data` are others that must not count."""

    @property
    def counts(self) -> bool:
        """Return whether this micro-batch adds to the step; padding and a stand-in do not."""
        return not (self.leaf.is_padding or self.is_stand_in)

    @property
    def visited(self) -> Ids:
        """Return every sample of the leaf, including skipped ones, for the ledger."""
        return np.append(self.ids, [s for s, _ in self.skipped]) if self.skipped else self.ids

    def pin_memory(self) -> "MicroBatch":
        """Return the micro-batch with its data in page-locked memory."""
        return replace(self, data=pin(self.data))


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The micro-batches of one rank in one step."""

    step: int
    epoch: int
    micro_batches: list[MicroBatch]
    consumed: int
    """The samples that the run has consumed after this step."""
    num_leaves: int = 0
    """The number of micro-batches of the step on all ranks together."""
    changed_split: SplitChange | None = None
    """Set if a resume changed the micro-batches without accept_changes."""
