"""A step whose loss or gradient is no number: it moves nothing, and all ranks deal with it alike.

Owns: keeping such a step from the weights, and the three policies. Does not own: looking for
one; a step's report says what it is.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lockstep import late_compiler
from lockstep.agreement import together
from lockstep.errors import CheckpointError, NonFiniteError
from lockstep.parallel import bare
from lockstep.progress import StepReport, constant

if TYPE_CHECKING:
    from lockstep.observe.events import EventLog
    from lockstep.setup import Run

MAX_LEFT_OUT = 10
"""More steps than this without a number are no accident."""


def unbroken(device: torch.device) -> Tensor:
    """Return what `train_step` takes as `broken`: 0, and 1 after the first bad step."""
    return torch.zeros((), dtype=torch.float32, device=device)


def move(
    optimizer: Optimizer,
    grads: list[Tensor],
    divisor: Tensor,
    report: StepReport,
    broken: Tensor | None,
) -> None:
    """Let the optimizer move the weights along the gradients, each divided by `divisor`.

    Nothing moves if the step is bad, or one before it was.
    """
    device = report.grad_norm.device
    bad = unbroken(device) if broken is None else broken
    looked_at = [report.loss_sum.to(device), report.grad_norm]
    # One launch: both are multiplied by 1, and `bad` is set if one is no number.
    one = constant(1.0, device, torch.float32)
    torch._amp_foreach_non_finite_check_and_unscale_(looked_at, bad, one)
    if not (bad.is_cuda and getattr(optimizer, "_step_supports_amp_scaling", False)):
        divide(grads, divisor)
        if not bool(bad):
            late_compiler.step(optimizer, grads)
        return
    fused: Any = optimizer  # it asks on the device
    fused.found_inf = bad
    if late_compiler.bare_step(fused) and grads[0].dtype == torch.float32:
        # Nobody looks at the gradients before it divides them.
        fused.grad_scale = divisor.to(device, torch.float32)
    else:
        divide(grads, divisor)
    late_compiler.step(fused, grads)
    fused.found_inf = fused.grad_scale = None


def divide(grads: list[Tensor], divisor: Tensor) -> None:
    """Divide all gradients in place; half precision would not hold the divisor."""
    kind = torch.promote_types(grads[0].dtype.to_real(), torch.float32)
    torch._foreach_div_(grads, divisor.to(kind))


def begin_momentum(optimizer: Optimizer) -> None:
    """Give the parameters of a fused SGD a momentum of 0 before their first step.

    Were that step skipped on the device, torch would continue with whatever lay in memory; and
    it does not take parameters with a momentum and, unfrozen later, without one in one group.
    """
    if not isinstance(optimizer, SGD):
        return
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"] and not group["dampening"]:
            for p in (p for p in group["params"] if p.requires_grad and p not in optimizer.state):
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def is_finite(report: StepReport, run: "Run") -> bool:
    """Say whether a step was arithmetic, alike on all ranks; it waits for the device."""
    # With a scaler an overflowing gradient is routine: it skips the step and scales down.
    number = report.loss_sum if run.scaler else report.loss_sum + report.grad_norm
    return math.isfinite(float(number))


class LeftOut:
    """The steps of a run that were left out."""

    def __init__(self, run: "Run", events: "EventLog") -> None:
        self.run, self.events = run, events
        self.num = 0
        self._buffers: list[Tensor] = []

    def latch(self) -> Tensor | None:
        """Return what `train_step` takes as `broken`; without it every step is looked at."""
        run, device = self.run, self.run.world.device
        if run.config.on_non_finite == "stop" and device.type == "cuda" and not run.scaler:
            run.broken = unbroken(device) if run.broken is None else run.broken
        return run.broken

    def remember(self) -> None:
        """Keep what a forward pass changes, as running statistics; a step left out changes none."""
        if self.run.config.on_non_finite == "skip":
            self._buffers = [buffer.clone() for buffer in bare(self.run.model).buffers()]

    def add(self, step: int, loss: float, norm: float) -> None:
        """Deal with the step after `step` updates, as the run was told to. Collective.

        The state it met is kept, to be met again in one process. Saves are settled by now.

        Raises:
            NonFiniteError: the run is to stop, or there were too many.
        """
        run, policy = self.run, self.run.config.on_non_finite
        for buffer, kept in zip(bare(run.model).buffers(), self._buffers, strict=False):
            buffer.copy_(kept)
        try:
            evidence = str(together(run.world, lambda: run.keep_evidence(step)))
            again = f"to see it again: one process, another output_dir, resume={evidence}"
        except CheckpointError as error:  # it must not hide what has happened
            evidence, again = "", f"the state that met it is not kept: {error.problem}"
        message = f"step {step + 1}: loss {loss:g}, gradient norm {norm:g}"
        self.num += 1
        if policy == "stop" or self.num > MAX_LEFT_OUT:
            often = "" if policy == "stop" else f", {self.num} such steps by now"
            raise NonFiniteError(
                f"{message}{often}; no weight has moved, and nothing of it was saved",
                "a lower learning rate, a longer warm-up, precision=fp32, or on_non_finite=skip; "
                + again,
            )
        message += ": left out"
        if policy == "rewind":
            message += f", and the weights of step {together(run.world, run.rewind)} taken again"
        message += f"; {again}"
        self.events.write("non_finite", step, policy=policy, path=evidence, message=message)
