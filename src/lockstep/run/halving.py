"""Smaller micro-batches after a step that did not fit in memory.

Owns: halving the micro-batches of the rest of a run. Does not own: detecting that memory ran out
(`step/votes.py`).
"""

from dataclasses import replace

from lockstep.errors import OutOfMemoryError
from lockstep.observe.events import EventLog
from lockstep.run.run import Run


def halve(run: Run, problem: str, events: EventLog) -> None:
    """Halve the micro-batches of the failed step and of all later ones. Collective.

    Raises:
        OutOfMemoryError: a micro-batch is a single sample already.
    """
    plan = run.contract.plan
    step = run.progress.step
    if plan.leaf_size == 1:
        raise OutOfMemoryError(
            f"step {step + 1}: one sample does not fit in memory: {problem}",
            "use a smaller model or sample, or precision=bf16",
        )
    halved = plan.halved()
    run.contract = replace(run.contract, plan=halved)
    run.loader.plan = halved
    run.loader.seek(step, run.progress.consumed)
    run.replicate()
    message = (
        f"step {step + 1} did not fit in memory ({problem}): repeating it, and continuing, with "
        f"micro-batches of {halved.leaf_size} instead of {plan.leaf_size}, "
        f"still {plan.global_batch} samples a step"
    )
    events.write("out_of_memory", step, batch_size=halved.leaf_size, message=message)
