"""A step whose loss or gradient is no number: it moves nothing, and all ranks deal with it alike.

Owns: keeping such a step from the weights, and the three policies. Does not own: looking for
one; a step's report says what it is.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.agreement import together
from lockstep.errors import NonFiniteError

if TYPE_CHECKING:
    from lockstep.observe.events import EventLog
    from lockstep.setup import Run
    from lockstep.step import StepReport

MAX_LEFT_OUT = 10
"""More steps than this without a number are no accident."""


def unbroken(device: torch.device) -> Tensor:
    """Return what `train_step` takes as `broken`: a step, its loss and its gradient norm."""
    return torch.full((3,), -1.0, dtype=torch.float64, device=device)


def move(optimizer: Optimizer, report: "StepReport", step: int, broken: Tensor | None) -> None:
    """Let the optimizer move the weights unless the step is bad, or one before it was."""
    bad = ~report.finite
    if broken is not None:
        met = torch.stack([torch.full_like(report.loss, step), report.loss, report.grad_norm])
        broken.copy_(torch.where((broken[0] < 0) & bad, met, broken))
        bad = broken[0] >= 0
    if bad.is_cuda and getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = bad.float()  # type: ignore[attr-defined]  # it asks on the device
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]
    elif not bool(bad):
        optimizer.step()


def is_finite(report: "StepReport", run: "Run") -> bool:
    """Say whether a step was arithmetic, alike on all ranks; it waits for the device."""
    # With a scaler an overflowing gradient is routine: it skips the step and scales down.
    return bool(torch.isfinite(report.loss_sum) if run.scaler else report.finite)


class LeftOut:
    """The steps of a run that were left out."""

    def __init__(self, run: "Run", events: "EventLog") -> None:
        self.run, self.events = run, events
        self.num = 0

    def add(self, step: int, loss: float, norm: float) -> None:
        """Deal with the step after `step` updates, as the run was told to. Collective.

        The state it met is kept, to be met again in one process. Saves are settled by now.

        Raises:
            NonFiniteError: the run is to stop, or there were too many.
        """
        run, policy = self.run, self.run.config.on_non_finite
        evidence = together(run.world, lambda: run.keep_evidence(step))
        message = f"step {step + 1}: loss {loss:g}, gradient norm {norm:g}"
        self.num += 1
        if policy == "stop" or self.num > MAX_LEFT_OUT:
            often = "" if policy == "stop" else f", {self.num} such steps by now"
            raise NonFiniteError(
                f"{message}{often}; no weight has moved, and nothing of it was saved",
                "a lower learning rate, a longer warm-up, precision=fp32, or on_non_finite=skip; "
                f"to see it again: one process with resume={evidence}",
            )
        message += ": left out"
        if policy == "rewind":
            message += f", and the weights of step {together(run.world, run.rewind)} taken again"
        message += f"; to see it again: resume={evidence}"
        self.events.write("non_finite", step, policy=policy, path=str(evidence), message=message)
