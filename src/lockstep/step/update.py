"""Update the weights with reduced gradients, unless the step is non-finite.

Owns: one class for each way to check: on the host, on the GPU, or by a gradient scaler. Does not
own: the gradients, or how a run reacts to a skipped step (`run/skipped_steps.py`).
"""

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer

from lockstep.step.report import StepReport
from lockstep.torch_compat.private import (
    check_scaler,
    foreach,
    overflow_flags,
    reads_flag,
    step_unless,
)


class Update:
    """Checks the reduced loss and gradient on the host before the optimizer steps.

    Args:
        flag: From `new_non_finite_flag`. A non-finite step sets it to 1, and the next step to 0
            again unless it is sticky: then no later step changes the weights.
    """

    def __init__(self, flag: Tensor, is_sticky: bool) -> None:
        self.flag = flag
        self.is_sticky = is_sticky

    def scale(self, loss: Tensor) -> Tensor:
        """Return the tensor to call `backward` on."""
        return loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo the effect of `scale` on the gradients."""

    def apply(
        self, optimizer: Optimizer, grads: list[Tensor], divisor: Tensor, report: StepReport
    ) -> None:
        """Divide the gradients by `divisor` and step; a non-finite step changes no weight."""
        divide(grads, divisor)
        non_finite = report.finite.logical_not()
        self.flag.copy_(torch.maximum(self.flag, non_finite) if self.is_sticky else non_finite)
        self.step(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Let the optimizer step unless the flag is set."""
        if not bool(self.flag):
            optimizer.step()


class GatedUpdate(Update):
    """Checks the flag on the GPU, so that the host need not wait for it."""

    def step(self, optimizer: Optimizer) -> None:
        """Step; torch's fused optimizers do not change the weights if `found_inf` is 1."""
        step_unless(self.flag, optimizer)


class ScaledUpdate(Update):
    """Scales the loss for fp16; a step that overflows is skipped and the scale lowered."""

    def __init__(self, scaler: GradScaler, flag: Tensor) -> None:
        super().__init__(flag, is_sticky=False)
        check_scaler(scaler)
        self.scaler = scaler

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss."""
        return self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale."""
        self.scaler.unscale_(optimizer)

    def apply(
        self, optimizer: Optimizer, grads: list[Tensor], divisor: Tensor, report: StepReport
    ) -> None:
        """Divide, and let the scaler call `optimizer.step()`."""
        divide(grads, divisor)
        # The scaler has only looked at the gradients, before they were divided.
        non_finite = report.finite.logical_not()
        for found in overflow_flags(self.scaler, optimizer):
            found.copy_(torch.maximum(found, non_finite))
        self.scaler.step(optimizer)
        self.scaler.update()


def choose_update(
    optimizer: Optimizer, device: torch.device, scaler: GradScaler | None, flag: Tensor | None
) -> Update:
    """Return how to check for a non-finite step with this optimizer; a given flag is sticky."""
    is_sticky = flag is not None
    flag = new_non_finite_flag(device) if flag is None else flag
    if scaler:
        return ScaledUpdate(scaler, flag)
    is_gated = device.type == "cuda" and reads_flag(optimizer)
    return (GatedUpdate if is_gated else Update)(flag, is_sticky)


def new_non_finite_flag(device: torch.device) -> Tensor:
    """Return a flag for `train_step`: 0, and 1 after the first non-finite step."""
    return torch.zeros((), dtype=torch.float32, device=device)


def divide(grads: list[Tensor], divisor: Tensor) -> None:
    """Divide all gradients in place, by a float32 number: half precision may not hold it."""
    kind = torch.promote_types(grads[0].dtype.to_real(), torch.float32)
    foreach("div_")(grads, divisor.to(kind))


def init_momentum(optimizer: Optimizer) -> None:
    """Give the parameters of a fused SGD a momentum of 0 before their first step.

    If that step is skipped on the device, torch would use uninitialised memory in the next one.
    It also refuses a group in which only some parameters have a momentum, as after unfreezing.
    """
    if not isinstance(optimizer, SGD):
        return
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"] and not group["dampening"]:
            for p in (p for p in group["params"] if p.requires_grad and p not in optimizer.state):
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
