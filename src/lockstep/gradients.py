"""Sums and gathers over ranks through which gradients flow back.

Owns: the backward pass of a collective. Does not own: the collective; `World` issues it.
A gather that drops gradients gives the right loss and a wrong step.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lockstep.runtime import World


def sum_over_ranks(value: Tensor, world: "World") -> Tensor:
    """Return the sum of `value` over all ranks. Collective, forward and backward."""
    return _Sum.apply(value, world)  # type: ignore[no-any-return,no-untyped-call]


def gather_over_ranks(local: Tensor, world: "World") -> Tensor:
    """Concatenate `local` over ranks along its first axis. Collective, forward and backward."""
    return _Gather.apply(local, world)  # type: ignore[no-any-return,no-untyped-call]


class _Sum(torch.autograd.Function):
    """Sum forward; every rank's result depends on our value, so sum the gradients backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, world: "World") -> Tensor:
        ctx.world = world
        return world.all_sum(value.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.world.all_sum(grads[0].contiguous()), None


class _Gather(torch.autograd.Function):
    """Gather forward; sum the gradients of all ranks backward and keep our own rows."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, world: "World") -> Tensor:
        parts = world.all_parts(local.detach().contiguous())
        ctx.world = world
        ctx.start = sum(len(part) for part in parts[: world.rank])
        ctx.length = len(local)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.world.all_sum(grads[0].contiguous()).narrow(0, ctx.start, ctx.length), None
