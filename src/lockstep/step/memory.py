"""Fail a step on every rank if it fails on one: one that did not fit in memory can be repeated.

Owns: how ranks agree that the step did not fit. Does not own: the step, or repeating it with
smaller micro-batches (`run/halving.py`).
"""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.dist.agreement import is_shared, raise_together
from lockstep.dist.collectives import Collectives
from lockstep.errors import ConfigError, LockstepError, OutOfMemoryError
from lockstep.step.partial import PARTS, WHERE_EMPTY
from lockstep.step.reduction import Reduction
from lockstep.torch_compat.error_texts import CPU_ALLOCATOR

Rows = tuple[list[Tensor], list[str]]
"""The result of a step's passes: a row of sums for each micro-batch, and the names of parts."""


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
    if compare_names(None if problem else result[1], world, kind):
        raise_together(world, problem)
    return result


def run_alone(passes: Callable[[], Rows], reduction: Reduction) -> Rows:
    """Run the passes of this rank; an error in them is its own. Collective."""
    rows, names = passes()
    if reduction.world.size > 1:
        compare_names(names, reduction.world)
    return rows, names


def run_together(passes: Callable[[], Rows], reduction: Reduction) -> Rows:
    """Run the passes; if one rank runs out of memory or has a ConfigError, fail on all. Collective.

    A rank that failed first joins, with zeros, the exchanges that the others wait in. The ranks
    also compare the names of their parts.
    """
    problem: LockstepError | None = None
    try:
        result = passes()
    except ConfigError as error:
        problem = error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = _smaller_batch(error)
    # Outside the handler, because the caught exception keeps tensors alive.
    if problem:
        reduction.model.zero_grad(set_to_none=True)
        reduction.take_part_with_zeros()
    names = None if problem else result[1]
    if compare_names(names, reduction.world):
        raise_together(reduction.world, problem)
    return result


def compare_names(names: list[str] | None, world: Collectives, kind: str = PARTS) -> bool:
    """Return whether a rank has failed, which passes None. Collective.

    Raises:
        ConfigError: on all ranks, if their losses have different parts or terms. Rows are added
            up by column, so different parts would be added to each other.
    """
    label = 0 if names is None else zlib.crc32(repr(names).encode())
    failed, highest, lowest = world.all_max(int(names is None), label, -label)
    if not failed and highest != -lowest:
        own = ", ".join(names or []) or "none"
        listed = " and ".join(sorted(set(world.all_texts(own))))
        raise ConfigError(
            f"ranks have different {kind} in one step: {listed}",
            f"return the same {kind} on every rank, {WHERE_EMPTY}",
        )
    return bool(failed)


def _smaller_batch(error: Exception) -> OutOfMemoryError:
    return OutOfMemoryError(str(error).splitlines()[0], "lower batch_size")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory ran out, on a GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_ALLOCATOR in str(error)
