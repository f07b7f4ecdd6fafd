"""Let all ranks learn in each step whether it failed on one of them, or one needs attention.

Owns: which errors of a rank become errors of all, and the votes of a step. Does not own: the
passes, or the reaction: smaller micro-batches (`run/halving.py`), or a stop (`trainer.py`).
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from lockstep.data.batch import StepBatch
from lockstep.dist.agreement import is_shared, raise_together
from lockstep.dist.collectives import Collectives
from lockstep.dist.ddp import unwrap
from lockstep.errors import ConfigError, LockstepError, OutOfMemoryError, TrainedParametersError
from lockstep.step.partial import PARTS, WHERE_EMPTY
from lockstep.step.reduction import Reduction, added_up
from lockstep.torch_compat.error_texts import CPU_ALLOCATOR

Rows = tuple[list[Tensor], list[str]]
"""A row of sums for each micro-batch, and the names of its columns."""


@dataclass
class PassResult:
    """The result of a step's passes on this rank."""

    rows: list[Tensor]
    """A row of sums for each micro-batch."""
    names: list[str]
    """The names of the loss's parts."""
    problem: LockstepError | None = None
    """Why the passes failed; then the other fields are empty."""


def run_alone(passes: Callable[[], Rows], reduction: Reduction) -> PassResult:
    """Run the passes of this rank; an error in them is its own."""
    return PassResult(*passes())


def run_together(passes: Callable[[], Rows], reduction: Reduction) -> PassResult:
    """Run the passes; if they run out of memory or raise a ConfigError, keep that for the vote.

    The rank then joins, with zeros, the exchanges of gradients that the others wait in. If the
    forward pass communicates, they may wait in another collective: the error is this rank's own.
    """
    problem: LockstepError
    try:
        return PassResult(*passes())
    except TrainedParametersError as error:  # raised after the last pass
        problem = error
    except Exception as error:
        if unwrap(reduction.model) in _communicating:
            raise
        if isinstance(error, ConfigError):
            problem = error
        elif is_out_of_memory(error):
            problem = _smaller_batch(error)
        else:
            raise
    # Outside the handlers, because the caught exception keeps tensors alive.
    reduction.model.zero_grad(set_to_none=True)
    reduction.take_part_with_zeros()
    return PassResult([], [], problem)


@contextmanager
def forward_pass(model: nn.Module, world: Collectives) -> Iterator[None]:
    """Notice whether the forward pass in the block calls a collective of `world`."""
    before = world.num_collectives
    try:
        yield
    finally:
        if world.size > 1 and world.num_collectives > before:
            _communicating.add(unwrap(model))


_communicating: WeakSet[nn.Module] = WeakSet()
"""The models with a forward pass that has called a collective: replication keeps the module."""


class HostVotes:
    """The ranks vote on the host, after the passes, whose kernels a GPU is still computing.

    So the host need not wait for the device to learn the result. Exact mode votes here, too: no
    rank may begin to sum gradients along the tree before all have theirs.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.needs_attention = False
        """Whether any rank needed attention in the last step."""

    def begin(self, passed: PassResult, needs_attention: bool) -> None:
        """Vote; raise on all ranks the failure of one. Collective."""
        self.needs_attention = _vote(passed, self.reduction.world, needs_attention)

    def sums_and_norm(
        self, passed: PassResult, grads: list[Tensor], batch: StepBatch
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of the step, and the norm of its gradient. Collective."""
        return self.reduction.sums_and_norm(passed.rows, grads, batch)


class SumsVotes(HostVotes):
    """A vote is one more column of the sums, so that a step on CPUs has no other collective.

    All rows need the same columns. A rank that failed, or has parts with other names than the
    ranks last agreed on, sends zeros and a vote. Then all ranks vote on the host, too.
    """

    def begin(self, passed: PassResult, needs_attention: bool) -> None:
        """Remember the vote for `sums_and_norm`."""
        self.needs_attention = needs_attention

    def sums_and_norm(
        self, passed: PassResult, grads: list[Tensor], batch: StepBatch
    ) -> tuple[Tensor, Tensor]:
        """Return sums and norm; raise on all ranks the failure of one. Collective."""
        reduction = self.reduction
        agreed = _agreed_names.get(reduction.model)
        is_agreed = passed.problem is None and passed.names == agreed
        num_columns = 0 if agreed is None else 2 + 2 * len(agreed)
        row = added_up(passed.rows) if is_agreed else torch.zeros(num_columns, dtype=torch.float64)
        vote = row.new_tensor([self.needs_attention or not is_agreed])
        sums, norm = reduction.sums_and_norm([torch.cat([row, vote])], grads, batch)
        if not bool(sums[-1]):
            self.needs_attention = False
            return sums[:-1], norm
        self.needs_attention = _vote(passed, reduction.world, self.needs_attention)
        _agreed_names[reduction.model] = passed.names
        if is_agreed:
            return sums[:-1], norm
        return reduction.sums_and_norm(passed.rows, grads, batch)


_agreed_names: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
"""The names of parts that all ranks last agreed on, by model: a custom loop keeps no TrainStep."""


def choose_votes(reduction: Reduction, has_scaler: bool) -> HostVotes:
    """Return how the ranks vote in each step."""
    world = reduction.world
    # A scaler counts each unscaling of gradients, and a failed step must not have one.
    is_in_sums = world.device.type == "cpu" and not (reduction.is_exact or has_scaler)
    return SumsVotes(reduction) if is_in_sums and world.size > 1 else HostVotes(reduction)


def count_together(
    count: Callable[[], Rows], kind: str, world: Collectives, agree_on_memory: bool
) -> Rows:
    """Count units before the passes; if one rank has any exception, fail on all. Collective.

    The ranks also compare the names of what they counted. `count` contains no collective.

    Args:
        kind: What the names are names of.
    """
    problem: Exception | None = None
    try:
        result = count()
    except Exception as error:
        if is_shared(error):
            raise
        is_memory = agree_on_memory and is_out_of_memory(error)
        problem = _smaller_batch(error) if is_memory else error
    _compare(None if problem else result[1], world, problem, kind)
    return result


def _vote(passed: PassResult, world: Collectives, needs_attention: bool) -> bool:
    """Raise the failure of one rank on all; else return whether one needs attention. Collective."""
    if world.size == 1 and passed.problem is None:
        return needs_attention
    names = None if passed.problem else passed.names
    return _compare(names, world, passed.problem, needs_attention=needs_attention)


def _compare(
    names: list[str] | None,
    world: Collectives,
    problem: Exception | None,
    kind: str = PARTS,
    needs_attention: bool = False,
) -> bool:
    """Compare names, which are None on a rank that failed. Collective.

    Returns:
        Whether any rank needs attention.

    Raises:
        Exception: `problem`, or an error about that of another rank.
        ConfigError: on all ranks, if their losses have different parts or terms. Rows are added
            up by column, so different parts would be added to each other.
    """
    label = 0 if names is None else zlib.crc32(repr(names).encode())
    failed, needed, highest, lowest = world.all_max(
        int(names is None), int(needs_attention), label, -label
    )
    if failed:
        raise_together(world, problem)
    if highest != -lowest:
        own = ", ".join(names or []) or "none"
        listed = " and ".join(sorted(set(world.all_texts(own))))
        raise ConfigError(
            f"ranks have different {kind} in one step: {listed}",
            f"return the same {kind} on every rank, {WHERE_EMPTY}",
        )
    return bool(needed)


def _smaller_batch(error: Exception) -> OutOfMemoryError:
    return OutOfMemoryError(str(error).splitlines()[0], "lower batch_size")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory ran out, on a GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_ALLOCATOR in str(error)
