"""One optimizer step, top to bottom.

Owns: the order of events from the micro-batches to the changed weights. Does not own: where
batches come from, the learning rate, or when to log or save. Every rank must call `train_step`
the same number of times. The package is named after this rule.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lockstep.data.batch import MicroBatch, StepBatch
from lockstep.dist import position
from lockstep.dist.batch_norm import padding, refuse_other_cut, refuse_padding
from lockstep.dist.ddp import sync_buffers, unwrap
from lockstep.dist.trained import TrainedParameters
from lockstep.errors import LockstepError
from lockstep.exact.contrastive import GatheredRows, gather_rows
from lockstep.exact.reducer import ExactReducer
from lockstep.randomness import seed_everything
from lockstep.step.memory import Rows, compare_names, fit_together
from lockstep.step.partial import as_partial, names_of, number, row_of
from lockstep.step.reduction import Reduction, choose_reduction
from lockstep.step.report import StepReport
from lockstep.step.update import Update, choose_update, init_momentum
from lockstep.task import Context, PartialLoss

if TYPE_CHECKING:
    from lockstep.dist.world import World

Loss = Callable[[nn.Module, Any, Context], PartialLoss | Tensor]
"""A task's `loss`, or any function with its signature."""
Weights = Callable[[Any, Context], Mapping[str, Tensor | float]]
"""A task's `weights`."""


def train_step(
    loss: Loss,
    model: nn.Module,
    optimizer: Optimizer,
    batch: StepBatch,
    world: "World",
    *,
    weights: Weights | None = None,
    seed: int = 0,
    max_grad_norm: float | None = None,
    autocast: AbstractContextManager[Any] | None = None,
    scaler: GradScaler | None = None,
    exact_reducer: ExactReducer | None = None,
    non_finite: Tensor | None = None,
    agree_on_memory: bool = False,
    trained: TrainedParameters | None = None,
    buffers_later: bool = False,
) -> StepReport:
    """Update the weights once, along the gradient of the mean over the global batch. Collective.

    A step whose loss or gradient is not finite, or whose total weight is negative, leaves the
    weights unchanged.

    Args:
        exact_reducer: Exact mode's gradient reducer; `model` was replicated with it.
        non_finite: From `new_non_finite_flag`: a sticky flag on the GPU. Once it is set, later
            steps leave the weights unchanged, so that the host need not look at each. Not with a
            scaler.
        agree_on_memory: A rank that runs out of memory fails the step on all ranks. Not for a
            loss that itself communicates with other ranks.
        trained: The parameters whose gradients are exchanged; unless given, those that the model
            was replicated with.
        buffers_later: Leave each rank's buffers as its own forward passes made them. Call
            `world.sync_buffers(model)` before they are used; until then an evaluation differs
            between ranks. Otherwise every rank has the first rank's buffers after the step.

    Raises:
        OutOfMemoryError: on all ranks; the weights are unchanged. Replicate the model again.
        TrainedParametersError: `requires_grad` changed after the model was replicated; the
            weights are unchanged. On all ranks with `agree_on_memory`, else on the rank that saw
            it.
    """
    loop = world.custom_loop
    if loop is not None:
        loop.start_step(model, optimizer, batch)
    reduction = choose_reduction(model, world, exact_reducer)
    update = choose_update(optimizer, world.device, scaler, non_finite)
    trained = trained or reduction.trained
    optimizer.zero_grad()  # a failed step, or another network's loss, may have left gradients
    try:
        reduction.check_optimizer(optimizer)
        if batch.changed_cut:
            refuse_other_cut(unwrap(model), batch.changed_cut)
        if batch.num_leaves % world.size:
            refuse_padding(unwrap(model), batch.num_leaves, world.size)
        totals = all_weights(weights, batch, world, seed, reduction) if weights else {}
        passes = _Passes(
            loss,
            model,
            batch,
            world,
            reduction,
            update,
            trained,
            totals,
            seed,
            autocast,
            exact_reducer,
        )
        if agree_on_memory:
            rows, names = fit_together(passes.run, reduction)
        else:
            rows, names = passes.run()
            if world.size > 1:
                compare_names(names, world)
        with world.phase("exchange"):
            grads = reduction.gradients(optimizer)
    except LockstepError as error:
        error.is_before_update = True
        raise

    update.unscale(optimizer)
    with world.phase("exchange"):
        sums, norm = reduction.sums_and_norm(rows, grads, batch)
    if totals:  # the terms of the loss are means already
        least = torch.stack(tuple(totals.values())).min()
        sums = torch.cat([sums[:1], torch.where(least < 0, least, 1.0)[None], sums[2:]])

    # Divided by this, gradients are those of the global mean. With a total weight of 0 all
    # gradients become 0. A negative total weight makes the step non-finite.
    if_not_positive = torch.where(sums[1] == 0, math.inf, math.nan)
    divisor = torch.where(sums[1] > 0, sums[1] / reduction.num_averaged, if_not_positive)
    report = StepReport(sums, names, norm / divisor, rows)
    if max_grad_norm is not None:
        divisor = torch.maximum(divisor, norm.add(divisor, alpha=1e-6) / max_grad_norm)

    with world.phase("update"):
        init_momentum(optimizer)
        update.apply(optimizer, grads, divisor, report)  # calls optimizer.step()
        optimizer.zero_grad()
    reduction.end()
    if not (buffers_later or exact_reducer):  # exact mode merges the statistics of all ranks itself
        sync_buffers(model, world)
    position.own.reach(batch.step + 1)
    if loop is not None:
        loop.end_step(batch, report)
    return report


@dataclass
class _Passes:
    """The forward and backward passes of a step's micro-batches on this rank."""

    loss: Loss
    model: nn.Module
    batch: StepBatch
    world: "World"
    reduction: Reduction
    update: Update
    trained: TrainedParameters | None
    totals: Mapping[str, Tensor]
    seed: int
    autocast: AbstractContextManager[Any] | None
    exact_reducer: ExactReducer | None

    def run(self) -> Rows:
        """Compute gradients; return a row of sums for each micro-batch."""
        rows: list[Tensor] = []
        names: list[str] | None = None
        self.reduction.start(self.batch)
        gathered = self.gather_rows()
        last = len(self.batch.micro_batches) - 1
        for index, micro_batch in enumerate(self.batch.micro_batches):
            leaf_rows = gathered[index] if gathered else None
            # Includes the backward pass, where activation checkpointing calls layers again.
            counting = nullcontext() if micro_batch.counts else padding(unwrap(self.model))
            with self.reduction.micro_batch(micro_batch, is_last=index == last), counting:
                with self.world.phase("forward"):
                    own = self.forward(self.model, micro_batch, leaf_rows)
                names = names_of(own, names)
                total = own.loss_sum + leaf_rows.surrogate_loss if leaf_rows else own.loss_sum
                with self.world.phase("backward"):
                    self.update.scale(total).backward()  # type: ignore[no-untyped-call]
            rows.append(row_of(own, names))
        if self.trained:  # check this first: a change here can leave an exchange incomplete
            self.trained.check()
        self.reduction.check()
        return rows, names or []

    def gather_rows(self) -> list[GatheredRows]:
        """Return the gathered rows for the loss of each micro-batch, in exact mode."""
        if self.exact_reducer is None or not self.exact_reducer.gathers:
            return []
        return gather_rows(self.forward, unwrap(self.model), self.batch, self.world)

    def forward(
        self, model: nn.Module, micro_batch: MicroBatch, gathered: GatheredRows | None = None
    ) -> PartialLoss:
        """Return the loss of a micro-batch, seeded for its place in the step."""
        place = micro_batch.leaf.place
        # Seed dropout and other random numbers of the model or the loss.
        seed_everything(self.world.device, self.seed, self.batch.step, place)
        context = Context(
            self.world,
            self.seed,
            self.batch.step,
            place,
            counts=micro_batch.counts,
            weights=self.totals,
            gathered=gathered,
            exact=self.exact_reducer is not None,
            changed_cut=self.batch.changed_cut,
        )
        with self.autocast or nullcontext():
            result = self.loss(model, micro_batch.data, context)
            return as_partial(result, micro_batch, bool(self.totals))


def all_weights(
    weights: Weights, batch: StepBatch, world: "World", seed: int, reduction: Reduction
) -> dict[str, Tensor]:
    """Return the step's total weight of each term of the loss. Collective."""
    rows = []
    for micro_batch in batch.micro_batches:
        place = micro_batch.leaf.place
        # The same seed as before the loss, so that both draw the same random numbers.
        seed_everything(world.device, seed, batch.step, place)
        context = Context(world, seed, batch.step, place)
        counted = weights(micro_batch.data, context)
        if not counted:
            return {}
        numbers = [number(n, world.device) for n in counted.values()]
        rows.append(torch.stack(numbers) * micro_batch.counts)
    totals = reduction.total(rows, batch)
    # A term without units in the whole step has sum 0; divide it by 1.
    return dict(zip(counted, torch.where(totals == 0, 1.0, totals), strict=True))
