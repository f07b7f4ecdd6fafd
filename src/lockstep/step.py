"""One optimizer step, top to bottom.

Owns: the order of events between "here are the micro-batches" and "the weights
moved". Does not own: where batches come from, the learning rate, when to log or
to save. Every rank enters `train_step` the same number of times; that is the
contract the whole package is named after.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lockstep import late_compiler, position
from lockstep.data.loader import StepBatch
from lockstep.data.reader import MicroBatch
from lockstep.exact import LeafSum
from lockstep.meeting import Meeting, meet
from lockstep.memory import fit_together
from lockstep.non_finite import begin_momentum, divide, move
from lockstep.numerics import drop_stale_casts, weights_cast_once
from lockstep.parallel import (
    bare,
    begin_exchanges,
    check_exchanged,
    end_step,
    local_gradients,
    sync_buffers,
    trained_parameters,
)
from lockstep.progress import StepReport, as_partial, names_of, number, row_of
from lockstep.randomness import seed_everything
from lockstep.runtime import World
from lockstep.sharding import held, is_sharded, norm_of, sums_and_norm
from lockstep.task import Context, PartialLoss
from lockstep.trained import TrainedParameters

Loss = Callable[[nn.Module, Any, Context], PartialLoss | Tensor]
"""A task's `loss`, or any function of the same shape."""
Weights = Callable[[Any, Context], Mapping[str, Tensor | float]]
"""A task's `weights`."""


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
    leaf_sum: LeafSum | None = None,
    broken: Tensor | None = None,
    agree_on_memory: bool = False,
    trained: TrainedParameters | None = None,
    buffers_later: bool = False,
) -> StepReport:
    """Move the weights once, along the gradient of the mean over the global batch. Collective.

    A step whose loss or gradient is no number moves nothing.

    Args:
        leaf_sum: Adds up alike for every number of ranks; `model` was replicated with it.
        broken: From `unbroken`: after the first step that was no longer arithmetic, none moves
            anything. It spares asking the device each time. Not with a scaler.
        agree_on_memory: What does not fit on one rank fails on all. Not for a loss that itself
            talks to other ranks.
        trained: The parameters whose gradients are exchanged; unless given, those that the
            replica was made for.
        buffers_later: Leave each rank's buffers as its own forward passes made them. Call
            `world.sync_buffers(model)` before they are used; until then an evaluation differs
            between ranks. Otherwise every rank has the first rank's buffers after the step.

    Raises:
        OutOfMemoryError: on all ranks; nothing has moved. Replicate the model anew.
        TrainedParametersError: `requires_grad` changed after the model was replicated; nothing
            has moved. On all ranks with `agree_on_memory`, else on the rank that saw it.
    """
    totals = all_weights(weights, batch, world, seed, leaf_sum) if weights else {}
    trained = trained or (leaf_sum.trained if leaf_sum else trained_parameters(model))
    work = _Backward(loss, model, batch, world, totals, seed, autocast, scaler, leaf_sum, trained)
    moved = [p for group in optimizer.param_groups for p in group["params"]]  # no walk of modules
    for parameter in moved:
        parameter.grad = None  # or what half a step, or another network's loss, left would add
    rows, names, units = fit_together(work, model, world) if agree_on_memory else work()

    if leaf_sum:
        sums = leaf_sum.total(rows, batch)
        leaf_sum.finish()
    if scaler:
        scaler.unscale_(optimizer)
    grads = [p.grad for p in moved if p.grad is not None]
    grads = held(grads) if is_sharded(model) else grads
    if leaf_sum:
        norm, units = norm_of(grads), None  # with any number of ranks the same arithmetic
    else:
        # One collective carries every sum: a second one would be a second place
        # where a rank that took a different branch keeps the others waiting.
        local = rows[0] if len(rows) == 1 else torch.stack(rows).sum(dim=0)
        sums, norm = sums_and_norm(local, grads, model, world)
    if totals:  # the terms of the loss are means already
        sums, units = torch.cat([sums[:1], torch.ones_like(sums[:1]), sums[2:]]), 1.0

    # Ranks hold the *average* of the summed gradients, or with `leaf_sum` the sum; divided by
    # weight / size, it is the gradient of the global mean. No unit at all leaves no gradient.
    if units is None or world.size > 1:
        divisor = torch.where(sums[1] > 0, sums[1] / (1 if leaf_sum else world.size), math.inf)
    else:
        divisor = number(units or math.inf, sums.device)
    grad_norm = norm / divisor  # before clipping
    if max_grad_norm is not None:
        divisor = torch.maximum(divisor, norm.add(divisor, alpha=1e-6) / max_grad_norm)

    report = StepReport(sums, names, grad_norm, rows)
    begin_momentum(optimizer)
    if scaler:  # it looks for itself, and scales down
        divide(grads, divisor)
        scaler.step(optimizer)
        scaler.update()
    else:
        move(optimizer, grads, divisor, report, broken)
    late_compiler.drop_gradients(optimizer, moved)
    end_step(model)
    if not (buffers_later or leaf_sum):  # exact mode merges the statistics of all ranks itself
        sync_buffers(model, world)
    position.own.reach(batch.step + 1)
    return report


@dataclass
class _Backward:
    """The forward and backward passes of a step's micro-batches on this rank."""

    loss: Loss
    model: nn.Module
    batch: StepBatch
    world: World
    totals: dict[str, Tensor]
    seed: int
    autocast: AbstractContextManager[Any] | None
    scaler: GradScaler | None
    leaf_sum: LeafSum | None
    trained: TrainedParameters | None

    @weights_cast_once()
    def __call__(self) -> tuple[list[Tensor], list[str], float | None]:
        """Leave gradients on the model; return a row of numbers for each micro-batch.

        And the names of the parts, and the weight of all, if it is known without the device.
        """
        leaf_sum, last = self.leaf_sum, len(self.batch.micro_batches) - 1
        rows, names = list[Tensor](), list[str]()
        units: float | None = 0.0
        begin_exchanges(self.model)
        if leaf_sum:
            leaf_sum.begin(self.batch.num_leaves)
        gathers = leaf_sum is not None and leaf_sum.gathers
        meetings = meet(self.part, bare(self.model), self.batch, self.world) if gathers else []
        cast_at = -1
        for index, micro_batch in enumerate(self.batch.micro_batches):
            cast_at = drop_stale_casts(self.model, cast_at) if self.autocast and last else -1
            keeping = leaf_sum.leaf(micro_batch, index == last) if leaf_sum else nullcontext()
            meeting = meetings[index] if meetings else None
            with nullcontext() if index == last else local_gradients(self.model), keeping:
                own = self.part(self.model, micro_batch, meeting)
                names = names_of(own, names if rows else None)
                self.go_back(own, meeting)
            rows.append(row_of(own, names))
            units = None if units is None or isinstance(own.weight, Tensor) else units + own.weight
        if self.trained:  # first: what it finds may be why an exchange is incomplete
            self.trained.check()
        check_exchanged(self.model)
        return rows, names, units

    def go_back(self, own: PartialLoss, meeting: Meeting | None) -> None:
        """Add the gradient of the summed loss to the model's."""
        root, times = own.loss_sum + meeting.owed if meeting else own.loss_sum, None
        if own.mean is not None and not meeting:  # a launch fewer, and the same bits
            # Made anew each time: it may become, as it is, a parameter's gradient.
            root, times = own.mean, torch.full_like(own.mean, float(own.weight))
        (self.scaler.scale(root) if self.scaler else root).backward(times)  # type: ignore[no-untyped-call]

    def part(
        self, model: nn.Module, micro_batch: MicroBatch, meeting: Meeting | None = None
    ) -> PartialLoss:
        """Return the loss of a micro-batch, with the random streams of its place."""
        place = micro_batch.leaf.place
        # For dropout and other random numbers of the model or the loss.
        seed_everything(self.world.device, self.seed, self.batch.step, place)
        context = Context(
            self.world,
            self.seed,
            self.batch.step,
            place,
            counts=micro_batch.counts,
            weights=self.totals,
            meeting=meeting,
            exact=self.leaf_sum is not None,
        )
        with self.autocast or nullcontext():
            result = self.loss(model, micro_batch.data, context)
            return as_partial(result, micro_batch, bool(self.totals))


def all_weights(
    weights: Weights, batch: StepBatch, world: World, seed: int, leaf_sum: LeafSum | None = None
) -> dict[str, Tensor]:
    """Return the step's total weight of each term of the loss. Collective."""
    rows = []
    for micro_batch in batch.micro_batches:
        place = micro_batch.leaf.place
        # As before the loss: what is drawn here to count units, the loss draws again.
        seed_everything(world.device, seed, batch.step, place)
        context = Context(world, seed, batch.step, place)
        counted = weights(micro_batch.data, context)
        if not counted:
            return {}
        numbers = [number(n, world.device) for n in counted.values()]
        rows.append(torch.stack(numbers) * micro_batch.counts)
    totals = leaf_sum.total(rows, batch) if leaf_sum else world.all_sum(torch.stack(rows).sum(0))
    # A term without a unit in the whole step is a sum of nothing: 0 / 1.
    return dict(zip(counted, torch.where(totals > 0, totals, 1.0), strict=True))
