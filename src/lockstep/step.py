"""One optimizer step, top to bottom.

Owns: the order of events between "here are the micro-batches" and "the weights
moved". Does not own: where batches come from, the learning rate, when to log or
to save. Every rank enters `train_step` the same number of times; that is the
contract the whole package is named after.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lockstep.data.loader import StepBatch
from lockstep.data.reader import MicroBatch
from lockstep.parallel import local_gradients
from lockstep.randomness import seed_torch
from lockstep.runtime import World
from lockstep.task import Context, PartialLoss

Loss = Callable[[nn.Module, Any, Context], PartialLoss | Tensor]
"""A task's `loss`, or any function of the same shape."""
Weights = Callable[[Any, Context], Mapping[str, Tensor | float]]
"""A task's `weights`."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What happened, reduced over ranks and still on the device: reading a field costs a sync."""

    loss_sum: Tensor
    weight: Tensor
    grad_norm: Tensor
    parts: dict[str, tuple[Tensor, Tensor]]

    @property
    def loss(self) -> Tensor:
        """Return the mean loss over all units of the step."""
        return self.loss_sum / self.weight

    @property
    def finite(self) -> Tensor:
        """Say whether loss and gradient are numbers; alike on all ranks, being reduced."""
        return torch.isfinite(self.loss_sum) & torch.isfinite(self.grad_norm)


def train_step(
    loss: Loss,
    model: nn.Module,
    optimizer: Optimizer,
    batch: StepBatch,
    world: World,
    *,
    weights: Weights | None = None,
    seed: int = 0,
    max_grad_norm: float | None = None,
    autocast: AbstractContextManager[Any] | None = None,
    scaler: GradScaler | None = None,
) -> StepReport:
    """Move the weights once, along the gradient of the mean over the global batch. Collective."""
    totals = all_weights(weights, batch, world, seed) if weights else {}
    rows = []
    for index, micro_batch in enumerate(batch.micro_batches):
        place = micro_batch.leaf.place
        seed_torch(world.device, seed, "torch", batch.step, place)  # dropout and the like
        context = Context(world, seed, batch.step, place, counts=micro_batch.counts, weights=totals)
        is_last = index == len(batch.micro_batches) - 1
        with nullcontext() if is_last else local_gradients(model):
            with autocast or nullcontext():
                part = as_partial(loss(model, micro_batch.data, context), micro_batch, bool(totals))
            (scaler.scale(part.loss_sum) if scaler else part.loss_sum).backward()  # type: ignore[no-untyped-call]
        rows.append(_row(part))

    # One collective carries every sum: a second one would be a second place
    # where a rank that took a different branch keeps the others waiting.
    sums = world.all_sum(torch.stack(rows).sum(dim=0))
    loss_sum, weight = sums[0], torch.ones_like(sums[1]) if totals else sums[1]

    # Ranks hold the *average* of the summed gradients; times size / weight, it is
    # the gradient of the global mean. No unit at all leaves no gradient.
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if scaler:
        scaler.unscale_(optimizer)
    scale = torch.where(weight > 0, world.size / weight, 0.0)
    grad_norm = torch.nn.utils.get_total_norm(grads).double() * scale  # before clipping
    if max_grad_norm is not None:
        scale = scale * (max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, scale.to(grads[0].dtype))

    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    names = sorted(part.parts)
    pairs = zip(sums[2::2], sums[3::2], strict=True)
    return StepReport(loss_sum, weight, grad_norm, dict(zip(names, pairs, strict=True)))


def all_weights(weights: Weights, batch: StepBatch, world: World, seed: int) -> dict[str, Tensor]:
    """Return the step's total weight of each term of the loss. Collective."""
    rows = []
    for micro_batch in batch.micro_batches:
        context = Context(world, seed, batch.step, micro_batch.leaf.place)
        counted = weights(micro_batch.data, context)
        if not counted:
            return {}
        numbers = [number(n, world.device) for n in counted.values()]
        rows.append(torch.stack(numbers) * micro_batch.counts)
    totals = world.all_sum(torch.stack(rows).sum(dim=0))
    # A term without a unit in the whole step is a sum of nothing: 0 / 1.
    return dict(zip(counted, torch.where(totals > 0, totals, 1.0), strict=True))


def as_partial(
    result: PartialLoss | Tensor, micro_batch: MicroBatch, is_averaged: bool = False
) -> PartialLoss:
    """Return the loss with its weight; a plain mean weighs as much as it has samples.

    A borrowed micro-batch keeps its graph, so that its rank meets the others in
    the reduce, and counts for nothing.
    """
    if isinstance(result, Tensor):
        num_samples = 1 if is_averaged else len(micro_batch.ids)
        result = PartialLoss(result * num_samples, float(num_samples))
    if micro_batch.counts:
        return result
    parts = {name: (value * 0, weight * 0) for name, (value, weight) in result.parts.items()}
    return PartialLoss(result.loss_sum * 0, result.weight * 0, parts)


def _row(part: PartialLoss) -> Tensor:
    """Lay out sums and weights as one row: loss, weight, then each part's pair, by name."""
    pairs = [(part.loss_sum, part.weight), *(part.parts[name] for name in sorted(part.parts))]
    return torch.stack([number(n, part.loss_sum.device) for pair in pairs for n in pair])


def number(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a number as float64 on the device, without waiting for it."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)
