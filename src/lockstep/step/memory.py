"""A step that does not fit in memory fails on every rank, and can be taken again.

Owns: how ranks agree that it did not fit. Does not own: the step, nor the smaller micro-batches
it is taken again with (`run/halving.py`).
"""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.dist.agreement import raise_together
from lockstep.dist.collectives import Collectives
from lockstep.errors import ConfigError, LockstepError, OutOfMemoryError
from lockstep.step.reduction import Reduction
from lockstep.torch_errors import CPU_ALLOCATOR

Rows = tuple[list[Tensor], list[str]]
"""What a step's passes return: a row of sums for each micro-batch, and the names in it."""


def fit_together(work: Callable[[], Rows], reduction: Reduction) -> Rows:
    """Do `work`; if it does not fit in memory on one rank, or cannot work, fail on all alike.

    Collective. The rank that failed first answers the exchanges the others are still waiting in.
    In passing ranks compare the names of their parts.
    """
    problem: LockstepError | None = None
    try:
        result = work()
    except ConfigError as error:
        problem = error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = OutOfMemoryError(str(error).splitlines()[0], "lower batch_size")
    # Outside of the handler: inside, the error still holds what filled the memory.
    if problem:
        reduction.model.zero_grad(set_to_none=True)
        reduction.take_part_with_zeros()
    names = None if problem else result[1]
    if compare_names(names, reduction.world):
        raise_together(reduction.world, problem)
    return result


def compare_names(names: list[str] | None, world: Collectives) -> bool:
    """Say whether a rank has failed: one that has none passes None. Collective.

    Raises:
        ConfigError: on all ranks: their losses have different parts. Numbers are added up by
            place, so a part would be added to another one.
    """
    label = 0 if names is None else zlib.crc32(repr(names).encode())
    failed, highest, lowest = world.all_max(int(names is None), label, -label)
    if not failed and highest != -lowest:
        own = ", ".join(names or []) or "none"
        said = " and ".join(sorted(set(world.all_texts(own))))
        raise ConfigError(
            f"ranks have different parts of the loss in one step: {said}",
            "return the same parts on every rank, with a sum and a weight of 0 for nothing",
        )
    return bool(failed)


def is_out_of_memory(error: Exception) -> bool:
    """Say whether memory was lacking, on a GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_ALLOCATOR in str(error)
