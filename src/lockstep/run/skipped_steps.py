"""React to steps with a non-finite loss or gradient: stop the run or skip them on every rank.

Owns: the three policies of `on_non_finite`. Does not own: leaving the weights unchanged in such a
step (`step/update.py`).
"""

import math

from lockstep.dist.agreement import together
from lockstep.dist.buffer_places import BufferChanges
from lockstep.errors import CheckpointError, NonFiniteError
from lockstep.observe.events import EventLog
from lockstep.run.kept_buffers import KeptBuffers
from lockstep.run.run import Run
from lockstep.step.report import StepReport

MAX_SKIPPED = 10
"""A run with more non-finite steps than this stops, whatever its policy."""


def is_finite(report: StepReport, run: Run) -> bool:
    """Return whether a step is finite, the same on every rank; this waits for the device."""
    # With a scaler, gradients overflow regularly: it skips the step and lowers the scale. So
    # only the loss counts here, and the weight, which makes the gradient NaN if it is negative.
    if run.scaler:
        loss_sum, weight = report.sums[:2].tolist()
        return math.isfinite(loss_sum) and weight >= 0
    return bool(report.finite)


class SkippedSteps:
    """The skipped steps of a run."""

    def __init__(self, run: Run, events: EventLog, changes: BufferChanges) -> None:
        self.run = run
        self.events = events
        self.num = 0
        self.buffers = KeptBuffers(changes)

    def add(self, step: int, loss: float, norm: float, weight: float) -> None:
        """Apply `on_non_finite` to the step after `step` updates. Collective.

        The state before the step is saved, so that one process can repeat it. No other save
        may be in progress.

        Raises:
            NonFiniteError: the policy is to stop, or there were too many such steps.
        """
        run = self.run
        policy = run.config.on_non_finite
        self.buffers.restore()
        try:
            saved = str(together(run.world, lambda: run.save_before_non_finite(step)))
            again = f"; to repeat it, run one process with another output_dir and resume={saved}"
            unsaved = ""
        except CheckpointError as error:  # must not hide the non-finite step
            saved = again = ""
            unsaved = f"; the state before it could not be saved: {error.problem}"
        message = f"step {step + 1}: loss {loss:g}, gradient norm {norm:g}"
        remedy = (
            "lower the learning rate, lengthen the warm-up, set precision=fp32, "
            "or set on_non_finite=skip"
        )
        if not weight >= 0:  # NaN too
            message = f"step {step + 1}: the total weight of the loss is {weight:g}, not 0 or more"
            remedy = "return a weight of 0 or more for every micro-batch"
        self.num += 1
        if policy == "stop" or self.num > MAX_SKIPPED:
            often = "" if policy == "stop" else f", {self.num} such steps by now"
            raise NonFiniteError(
                f"{message}{often}; weights unchanged, step not saved{unsaved}",
                remedy + again,
            )
        message += ": skipped"
        if policy == "rewind":
            message += f", and the weights of step {together(run.world, run.rewind)} restored"
        message += unsaved or again
        self.events.write("non_finite", step, policy=policy, path=saved, message=message)
