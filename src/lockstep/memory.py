"""A step that does not fit in memory: known to all ranks, dropped by all, taken again in halves.

Owns: how ranks agree that it did not fit, and the smaller pieces. Does not own: the step.
"""

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lockstep.agreement import raise_together
from lockstep.errors import ConfigError, LockstepError, OutOfMemoryError
from lockstep.parallel import answer_exchanges
from lockstep.runtime import World

if TYPE_CHECKING:
    from lockstep.observe.events import EventLog
    from lockstep.setup import Run

Passes = tuple[list[Tensor], list[str], float | None]
"""What a step's passes return: rows of numbers, the names of the parts in them, the weight."""


def fit_together(work: Callable[[], Passes], model: nn.Module, world: World) -> Passes:
    """Do `work`; if it does not fit in memory on one rank, or cannot work, fail on all alike.

    Collective. The rank that failed first answers the exchanges the others are still waiting in.
    In passing ranks compare the names of their parts: numbers are to be added up by place.
    """
    problem: LockstepError | None = None
    try:
        result = work()
    except ConfigError as error:
        problem = error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = OutOfMemoryError(str(error).splitlines()[0], "a smaller batch_size")
    # Outside of the handler: inside, the error still holds what filled the memory.
    if problem:
        model.zero_grad(set_to_none=True)
        answer_exchanges(model)
    label = 0 if problem else zlib.crc32(repr(result[1]).encode())
    failed, highest, lowest = world.all_max(int(bool(problem)), label, -label)
    if failed:
        raise_together(world, problem)
    if highest != -lowest:
        said = " and ".join(sorted(set(world.all_texts(", ".join(result[1]) or "none"))))
        differ = f"ranks have different parts of the loss in one step: {said}"
        raise ConfigError(differ, "the same on all, with a sum and a weight of 0 for nothing")
    return result


def is_out_of_memory(error: Exception) -> bool:
    """Say whether memory was lacking, on a GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "CPUAllocator" in str(error)


def halve(run: "Run", problem: str, events: "EventLog") -> None:
    """Cut micro-batches in two from the step on that was not taken. Collective.

    Raises:
        OutOfMemoryError: there is nothing left to cut.
    """
    plan, step = run.contract.plan, run.progress.step
    if plan.leaf_size == 1:
        raise OutOfMemoryError(
            f"step {step + 1}: one sample does not fit in memory: {problem}",
            "a smaller model or sample, or precision=bf16",
        )
    halved = plan.halved()
    run.contract, run.loader.plan = replace(run.contract, plan=halved), halved
    run.loader.seek(step, run.progress.consumed)
    run.replicate()
    message = (
        f"step {step + 1} did not fit in memory ({problem}): taken again, and on from here, in "
        f"micro-batches of {halved.leaf_size} in place of {plan.leaf_size}, "
        f"still {plan.global_batch} samples a step"
    )
    events.write("out_of_memory", step, batch_size=halved.leaf_size, message=message)
