"""A step of torch's fused Adam or AdamW, with its tensors listed at once.

In each step torch goes through the parameters one by one and sorts them by device and type, which
takes a hundredth of a small model's step on a GPU. Owns: listing them in less. Does not own: the
arithmetic, which is torch's kernel; nor any other step than this plain one, which torch takes.
"""

from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer


def step_at_once(optimizer: Optimizer, grads: list[Tensor]) -> bool:
    """Do what `optimizer.step()` does, bit for bit, if it is a plain fused step; say whether.

    `grads` are those of all parameters in their order. Gradients are not to be recorded.
    """
    groups, state = optimizer.param_groups, optimizer.state
    params = [p for group in groups for p in group["params"]]
    is_listed = len(params) == len(state) == len(grads) and all(map(is_, state, params))
    if not (isinstance(optimizer, Adam) and is_listed and all(map(_is_plain, groups))):
        return False
    if not all(state.values()):  # somebody has looked for one: torch makes it in its first step
        return False
    kinds = {*map(type, params), *(grad.dtype for grad in grads)}
    if kinds != {nn.Parameter, grads[0].dtype}:  # some are cut over ranks, or lower in precision
        return False
    moments = [of_one["exp_avg"] for of_one in state.values()]
    squares = [of_one["exp_avg_sq"] for of_one in state.values()]
    steps = [of_one["step"] for of_one in state.values()]
    bad, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    torch._foreach_add_(steps, 1)
    end = 0
    for group in groups:
        here = slice(end, end := end + len(group["params"]))
        kernel: Any = torch._fused_adam_
        if group["decoupled_weight_decay"]:
            kernel = torch._fused_adamw_
        kernel(
            group["params"], grads[here], moments[here], squares[here], [], steps[here],
            amsgrad=False, lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=group["maximize"],
            grad_scale=scale, found_inf=bad,
        )  # fmt: skip
    if bad is not None:  # then nothing has moved: the step is not counted
        torch._foreach_add_(steps, bad, alpha=-1)
    return True


def _is_plain(group: dict[str, Any]) -> bool:
    odd = group["amsgrad"] or group["differentiable"] or group["capturable"]
    return bool(group["fused"] and group["params"] and isinstance(group["lr"], float) and not odd)
