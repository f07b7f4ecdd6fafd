"""Smaller micro-batches after a step that did not fit in memory.

Owns: cutting the rest of a run into smaller micro-batches. Does not own: noticing that memory ran
out (`step/memory.py`).
"""

from dataclasses import replace

from lockstep.errors import OutOfMemoryError
from lockstep.observe.events import EventLog
from lockstep.run.run import Run


def halve(run: Run, problem: str, events: EventLog) -> None:
    """Cut micro-batches in two from the step on that was not taken. Collective.

    Raises:
        OutOfMemoryError: there is nothing left to cut.
    """
    plan, step = run.contract.plan, run.progress.step
    if plan.leaf_size == 1:
        raise OutOfMemoryError(
            f"step {step + 1}: one sample does not fit in memory: {problem}",
            "use a smaller model or sample, or precision=bf16",
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
