"""The step and rank of every sample, as pure functions without state.

Owns: the permutation of an epoch, and splitting a step into leaves (micro-batches). Does not own:
reading samples. The position of a run is one integer, the number of samples consumed.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.plan import BatchPlan
from lockstep.randomness import derive_seed

Ids = NDArray[np.int64]
_ROUNDS = 8


class Order(Protocol):
    """The sequence in which an epoch visits the samples."""

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Return the sample ids at positions `start` to `stop` of `epoch`."""
        ...


@dataclass(frozen=True, slots=True)
class Shuffled:
    """A keyed permutation for each epoch, computable at any position in O(1).

    A Feistel network over pairs of digits in base ceil(sqrt(n)) permutes a square that is barely
    larger than n. It is applied again to the few values outside of n until they are inside.

    >>> sorted(Shuffled(10, seed=0).ids(epoch=3, start=0, stop=10).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    num_samples: int
    seed: int

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Return the sample ids at positions `start` to `stop` of `epoch`."""
        if stop > self.num_samples:  # the loop below would not end
            raise ValueError(f"an epoch of {self.num_samples} samples has no position {stop - 1}")
        side = np.uint64(math.isqrt(self.num_samples - 1) + 1)
        keys = [
            np.uint64(derive_seed(self.seed, "order", epoch, index)) for index in range(_ROUNDS)
        ]
        values = np.arange(start, stop, dtype=np.uint64)
        outside = np.ones(len(values), dtype=bool)
        while outside.any():
            left, right = np.divmod(values[outside], side)
            for key in keys:
                left, right = right, (left + mix(right ^ key) % side) % side
            values[outside] = left * side + right
            outside = values >= self.num_samples
        return values.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Sequential:
    """The samples in order, the same in every epoch; used for evaluation."""

    num_samples: int

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Return the sample ids at positions `start` to `stop`."""
        return np.arange(start, stop, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One micro-batch of a step; `place` is its index in the step."""

    epoch: int
    place: int
    start: int
    stop: int
    is_padding: bool = False
    """Whether it has weight 0, and is only computed so that all ranks join each collective."""


def step_of(plan: BatchPlan, consumed: int) -> int:
    """Return the step that begins after `consumed` samples of the run."""
    epoch, offset = divmod(consumed, plan.samples_per_epoch)
    return epoch * plan.steps_per_epoch + offset // plan.global_batch


def consumed_after(plan: BatchPlan, step: int) -> int:
    """Return the number of samples that the run has consumed after `step`."""
    epoch, index = divmod(step, plan.steps_per_epoch)
    in_epoch = min((index + 1) * plan.global_batch, plan.samples_per_epoch)
    return epoch * plan.samples_per_epoch + in_epoch


def leaves_of(plan: BatchPlan, step: int, rank: int) -> list[Leaf]:
    """Return the leaves of `step` that `rank` computes, which are consecutive.

    If leaves do not divide evenly, ranks with one less also compute the last leaf as padding, so
    that all ranks call the same collectives. This takes no time, since the other ranks are busy.
    """
    epoch, begin, end = _span(plan, step)
    num_leaves = num_leaves_of(plan, step)

    def leaf(place: int, is_padding: bool = False) -> Leaf:
        start = begin + place * plan.leaf_size
        return Leaf(epoch, place, start, min(start + plan.leaf_size, end), is_padding)

    own = [leaf(place) for place in share(num_leaves, rank, plan.world_size)]
    num_padding = math.ceil(num_leaves / plan.world_size) - len(own)
    return own + [leaf(num_leaves - 1, is_padding=True)] * num_padding


def num_leaves_of(plan: BatchPlan, step: int) -> int:
    """Return the number of leaves of a step; the last step of an epoch may have fewer."""
    _, begin, end = _span(plan, step)
    return math.ceil((end - begin) / plan.leaf_size)


def padded_step(plan: BatchPlan, num_steps: int) -> int | None:
    """Return the first of `num_steps` steps whose micro-batches do not fill all ranks, or None."""
    candidates = (0, plan.steps_per_epoch - 1)
    padded = [s for s in candidates if s < num_steps and num_leaves_of(plan, s) % plan.world_size]
    return min(padded, default=None)


def share(num_leaves: int, rank: int, world_size: int) -> range:
    """Return the places of a rank's leaves, without padding.

    >>> [list(share(5, rank, 3)) for rank in range(3)]
    [[0], [1, 2], [3, 4]]
    """
    return range(num_leaves * rank // world_size, num_leaves * (rank + 1) // world_size)


def _span(plan: BatchPlan, step: int) -> tuple[int, int, int]:
    """Return the epoch of a step, and its first and last position in the epoch."""
    epoch, index = divmod(step, plan.steps_per_epoch)
    begin = index * plan.global_batch
    return epoch, begin, min(begin + plan.global_batch, plan.samples_per_epoch)


def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit words: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))
