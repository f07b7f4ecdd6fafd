"""Fail a step that does not fit in memory on every rank, so that it can be repeated.

Owns: how ranks agree that the step did not fit. Does not own: the step, or repeating it with
smaller micro-batches (`run/halving.py`).
"""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.dist.agreement import raise_together
from lockstep.dist.collectives import Collectives
from lockstep.errors import ConfigError, LockstepError, OutOfMemoryError
from lockstep.step.reduction import Reduction
from lockstep.torch_compat.error_texts import CPU_ALLOCATOR

Rows = tuple[list[Tensor], list[str]]
"""The result of a step's passes: a row of sums for each micro-batch, and the names of parts."""


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
        problem = OutOfMemoryError(str(error).splitlines()[0], "lower batch_size")
    # Outside the handler, because the caught exception keeps tensors alive.
    if problem:
        reduction.model.zero_grad(set_to_none=True)
        reduction.take_part_with_zeros()
    names = None if problem else result[1]
    if compare_names(names, reduction.world):
        raise_together(reduction.world, problem)
    return result


def compare_names(names: list[str] | None, world: Collectives) -> bool:
    """Return whether a rank has failed, which passes None. Collective.

    Raises:
        ConfigError: on all ranks, if their losses have different parts. Rows are added up by
            column, so different parts would be added to each other.
    """
    label = 0 if names is None else zlib.crc32(repr(names).encode())
    failed, highest, lowest = world.all_max(int(names is None), label, -label)
    if not failed and highest != -lowest:
        own = ", ".join(names or []) or "none"
        listed = " and ".join(sorted(set(world.all_texts(own))))
        raise ConfigError(
            f"ranks have different parts of the loss in one step: {listed}",
            "return the same parts on every rank, with sum 0 and weight 0 where one is empty",
        )
    return bool(failed)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory ran out, on a GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_ALLOCATOR in str(error)
