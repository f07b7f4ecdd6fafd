"""Steps whose loss or gradient was not finite: skipped on every rank, or the end of the run.

Owns: the three policies of `on_non_finite`. Does not own: keeping such a step from the weights
(`step/update.py`).
"""

import math

from torch import Tensor

from lockstep.dist.agreement import together
from lockstep.dist.ddp import unwrap
from lockstep.errors import CheckpointError, NonFiniteError
from lockstep.observe.events import EventLog
from lockstep.run.run import Run
from lockstep.step.report import StepReport
from lockstep.step.update import new_non_finite_flag

MAX_SKIPPED = 10
"""A run with more non-finite steps than this stops, whatever its policy."""


def is_finite(report: StepReport, run: Run) -> bool:
    """Say whether a step is finite, the same on every rank; this waits for the device."""
    # With a scaler an overflowing gradient is routine: it skips the step and scales down.
    if run.scaler:
        loss_sum, weight = report.sums[:2].tolist()
        return math.isfinite(loss_sum) and weight >= 0
    return math.isfinite(float(report.loss_sum + report.grad_norm))


class SkippedSteps:
    """The steps of a run that were left out."""

    def __init__(self, run: Run, events: EventLog) -> None:
        self.run, self.events = run, events
        self.num = 0
        self._buffers: list[Tensor] = []

    def flag(self) -> Tensor | None:
        """Return what `train_step` takes as `non_finite`; without it every step is looked at."""
        run, device = self.run, self.run.world.device
        if run.config.on_non_finite == "stop" and device.type == "cuda" and not run.scaler:
            run.non_finite = (
                new_non_finite_flag(device) if run.non_finite is None else run.non_finite
            )
        return run.non_finite

    def keep_buffers(self) -> None:
        """Keep what a forward pass changes, as running statistics; a step left out changes none."""
        if self.run.config.on_non_finite == "skip":
            self._buffers = [buffer.clone() for buffer in unwrap(self.run.model).buffers()]

    def drop_step(self) -> None:
        """Give buffers the values they had before a step that is left out, where they are known."""
        for buffer, kept in zip(unwrap(self.run.model).buffers(), self._buffers, strict=False):
            buffer.copy_(kept)

    def add(self, step: int, loss: float, norm: float, weight: float) -> None:
        """Deal with the step after `step` updates, as the run was told to. Collective.

        The state it met is kept, to be met again in one process. Saves are settled by now.

        Raises:
            NonFiniteError: the run is to stop, or there were too many.
        """
        run, policy = self.run, self.run.config.on_non_finite
        self.drop_step()
        try:
            evidence = str(together(run.world, lambda: run.keep_evidence(step)))
            again = f"to see it again: one process, another output_dir, resume={evidence}"
        except CheckpointError as error:  # it must not hide what has happened
            evidence, again = "", f"the state that met it is not kept: {error.problem}"
        message = f"step {step + 1}: loss {loss:g}, gradient norm {norm:g}"
        remedy = (
            "lower the learning rate, lengthen the warm-up, set precision=fp32, "
            "or set on_non_finite=skip; "
        )
        if weight < 0:
            message = f"step {step + 1}: the total weight of the loss is {weight:g}, below 0"
            remedy = "return a weight of 0 or more for every micro-batch; "
        self.num += 1
        if policy == "stop" or self.num > MAX_SKIPPED:
            often = "" if policy == "stop" else f", {self.num} such steps by now"
            raise NonFiniteError(
                f"{message}{often}; no weight has moved, and nothing of it was saved",
                remedy + again,
            )
        message += ": left out"
        if policy == "rewind":
            message += f", and the weights of step {together(run.world, run.rewind)} taken again"
        message += f"; {again}"
        self.events.write("non_finite", step, policy=policy, path=evidence, message=message)
