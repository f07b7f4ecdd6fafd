"""One optimizer step, top to bottom.

Owns: the order of events from the micro-batches to the changed weights. Does not own: where
batches come from, the learning rate, or when to log or save. Every rank must call `train_step`
the same number of times. The package is named after this rule.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lockstep.data.batch import MicroBatch, StepBatch
from lockstep.dist import position
from lockstep.dist.agreement import is_shared
from lockstep.dist.batch_norm import padding, refuse_changed_split, refuse_padding
from lockstep.dist.ddp import has_other_buffers, sync_buffers_in_step, unwrap
from lockstep.dist.trained import TrainedParameters, not_optimized
from lockstep.errors import LockstepError
from lockstep.exact.contrastive import GatheredRows
from lockstep.exact.reducer import ExactReducer
from lockstep.randomness import seed_everything
from lockstep.step.partial import as_partial, names_of, row_of
from lockstep.step.reduction import choose_reduction
from lockstep.step.report import StepReport
from lockstep.step.terms import TERMS, check_counted, units_row
from lockstep.step.update import choose_update, init_momentum
from lockstep.step.votes import (
    Rows,
    choose_votes,
    count_together,
    forward_pass,
    run_alone,
    run_together,
)
from lockstep.task import Context, PartialLoss, Task

if TYPE_CHECKING:
    from lockstep.world import World

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
        weights: A task's `weights`, for a loss of several terms with units of their own.
        seed: The seed of the random numbers in the model and the loss.
        exact_reducer: Exact mode's gradient reducer; `model` was replicated with it.
        non_finite: From `new_non_finite_flag`: a sticky flag on the GPU. Once it is set, later
            steps leave the weights unchanged, so that the host need not look at each. Not with a
            scaler.
        agree_on_memory: A rank that runs out of memory fails the step on all ranks. Not for a
            loss that itself communicates with other ranks; once `world` has seen it do so, such
            an error is raised on that rank only.
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
    take_step = TrainStep(
        loss,
        model,
        optimizer,
        world,
        weights=weights,
        seed=seed,
        max_grad_norm=max_grad_norm,
        autocast=autocast,
        scaler=scaler,
        exact_reducer=exact_reducer,
        non_finite=non_finite,
        agree_on_memory=agree_on_memory,
        trained=trained,
        buffers_later=buffers_later,
    )
    if world.custom_loop is None:
        return take_step(batch)
    world.custom_loop.start_step(model, optimizer, batch)
    report = take_step(batch)
    world.custom_loop.end_step(batch, report)
    return report


@dataclass(eq=False)
class TrainStep:
    """Takes the steps of one model. The classes that reduce and update are chosen here, once.

    The fields are the arguments of `train_step`.
    """

    loss: Loss
    model: nn.Module
    optimizer: Optimizer
    world: "World"
    _: KW_ONLY
    weights: Weights | None = None
    seed: int = 0
    max_grad_norm: float | None = None
    autocast: AbstractContextManager[Any] | None = None
    scaler: GradScaler | None = None
    exact_reducer: ExactReducer | None = None
    non_finite: Tensor | None = None
    agree_on_memory: bool = False
    trained: TrainedParameters | None = None
    buffers_later: bool = False
    look_ahead: Callable[[], bool] | None = field(default=None, init=False)
    """Called between the passes and the votes; returns whether this rank needs attention: then
    `votes.needs_attention` becomes true on every rank."""

    def __post_init__(self) -> None:
        if getattr(self.weights, "__func__", None) is Task.weights:  # has no terms
            self.weights = None
        self.reduction = choose_reduction(self.model, self.world, self.exact_reducer)
        self.update = choose_update(self.optimizer, self.world.device, self.scaler, self.non_finite)
        self.votes = choose_votes(self.reduction, has_scaler=self.scaler is not None)
        self.run_passes = run_together if self.agree_on_memory else run_alone
        self.trained = self.trained or self.reduction.trained
        named = self.trained.named if self.trained else {}
        self.not_optimized = list(not_optimized(named, self.optimizer).values())
        # Exact mode merges the statistics of all ranks itself.
        is_later = self.buffers_later or self.exact_reducer is not None
        self.syncs_buffers = self.world.size > 1 and not is_later

    def __call__(self, batch: StepBatch) -> StepReport:
        """Update the weights once. Collective."""
        model, optimizer, world = self.model, self.optimizer, self.world
        reduction, update = self.reduction, self.update
        optimizer.zero_grad()  # of the last step, or of another network's loss
        for parameter in self.not_optimized:  # exchanged with the others, in one bucket
            parameter.grad = None
        try:
            self.check(batch)
            totals = self.total_weights(batch)
            passed = self.run_passes(Passes(self, batch, totals).run, reduction)
            needs_attention = self.syncs_buffers and has_other_buffers(model)
            if self.look_ahead is not None and passed.problem is None:
                needs_attention |= self.look_ahead()
            with world.phase("exchange"):
                self.votes.begin(passed, needs_attention)
                grads = [] if passed.problem else reduction.gradients(optimizer)
                update.unscale(optimizer)
                sums, norm = self.votes.sums_and_norm(passed, grads, batch)
        except Exception as error:
            if isinstance(error, LockstepError) or is_shared(error):
                error.is_before_update = True  # type: ignore[attr-defined]
            raise

        if totals:
            sums = without_weight(sums, totals)
        divisor = mean_divisor(sums[1], reduction.num_averaged)
        report = StepReport(sums, passed.names, norm / divisor, passed.rows)
        if self.max_grad_norm is not None:
            divisor = clipping_divisor(divisor, norm, self.max_grad_norm)

        with world.phase("update"):
            reduction.begin_update()
            init_momentum(optimizer)
            update.apply(optimizer, grads, divisor, report)  # calls optimizer.step()
        reduction.end()
        if self.syncs_buffers:
            sync_buffers_in_step(model, world, have_others=self.votes.needs_attention)
        position.this_rank.reach(batch.step + 1)
        return report

    def check(self, batch: StepBatch) -> None:
        """Refuse an optimizer or a batch with which several ranks would not train like one."""
        self.reduction.check_optimizer(self.optimizer)
        if batch.changed_split:
            refuse_changed_split(unwrap(self.model), batch.changed_split)
        if batch.num_leaves % self.world.size:
            refuse_padding(unwrap(self.model), batch.num_leaves, self.world.size)

    def total_weights(self, batch: StepBatch) -> dict[str, Tensor]:
        """Return the step's total weight of each term of the loss, if it has terms. Collective.

        Raises:
            Exception: raised by `weights`, on that rank; the others raise an OtherRankError.
            ConfigError: on all ranks, if `weights` returned other names or no number on one.
        """
        if self.weights is None:
            return {}
        counted, names = count_together(
            lambda: self.count(batch), TERMS, self.world, self.agree_on_memory
        )
        if not names:
            return {}
        totals = self.reduction.total(counted, batch)
        # A term without units in the whole step has sum 0; divide it by 1.
        return dict(zip(names, torch.where(totals == 0, 1.0, totals), strict=True))

    def count(self, batch: StepBatch) -> Rows:
        """Count the units of each term in this rank's micro-batches."""
        assert self.weights is not None
        rows: list[Tensor] = []
        names: list[str] | None = None
        for micro_batch in batch.micro_batches:
            place = micro_batch.leaf.place
            # The same seed as before the loss, so that both draw the same random numbers.
            seed_everything(self.world.device, self.seed, batch.step, place)
            context = Context(self.world, self.seed, batch.step, place)
            counted = self.weights(micro_batch.data, context)
            names = check_counted(counted, names)
            row = units_row(counted, names, self.world.device)
            rows.append(row if micro_batch.counts else torch.zeros_like(row))
        return rows, names or []


class Passes:
    """The forward and backward passes of a step's micro-batches on this rank.

    Args:
        totals: The step's total weight of each term of the loss.
    """

    def __init__(self, step: TrainStep, batch: StepBatch, totals: Mapping[str, Tensor]) -> None:
        self.step = step
        self.batch = batch
        self.totals = totals

    def run(self) -> Rows:
        """Compute gradients; return a row of sums for each micro-batch."""
        step, reduction = self.step, self.step.reduction
        model, world = step.model, step.world
        rows: list[Tensor] = []
        names: list[str] | None = None
        reduction.start(self.batch)
        gathered = reduction.gather_rows(self.forward, self.batch)
        last = len(self.batch.micro_batches) - 1
        for index, micro_batch in enumerate(self.batch.micro_batches):
            leaf_rows = gathered[index] if gathered else None
            # Includes the backward pass, where activation checkpointing calls layers again.
            counting = nullcontext() if micro_batch.counts else padding(unwrap(model))
            with reduction.micro_batch(micro_batch, is_last=index == last), counting:
                with world.phase("forward"):
                    own = self.forward(model, micro_batch, leaf_rows)
                names = names_of(own, names)
                total = own.loss_sum + leaf_rows.surrogate_loss if leaf_rows else own.loss_sum
                with world.phase("backward"):
                    step.update.scale(total).backward()  # type: ignore[no-untyped-call]
            rows.append(row_of(own, names))
        if step.trained:  # check this first: a change here can leave an exchange incomplete
            step.trained.check()
        reduction.check()
        return rows, names or []

    def forward(
        self, model: nn.Module, micro_batch: MicroBatch, gathered: GatheredRows | None = None
    ) -> PartialLoss:
        """Return the loss of a micro-batch, seeded for its place in the step."""
        step, place = self.step, micro_batch.leaf.place
        # Seed dropout and other random numbers of the model or the loss.
        seed_everything(step.world.device, step.seed, self.batch.step, place)
        context = Context(
            step.world,
            step.seed,
            self.batch.step,
            place,
            counts=micro_batch.counts,
            weights=self.totals,
            gathered=gathered,
            exact=step.reduction.is_exact,
            changed_split=self.batch.changed_split,
        )
        noticing = forward_pass(step.model, step.world) if step.agree_on_memory else nullcontext()
        with noticing, step.autocast or nullcontext():
            result = step.loss(model, micro_batch.data, context)
            return as_partial(result, micro_batch, bool(self.totals))


def mean_divisor(weight: Tensor, num_averaged: int) -> Tensor:
    """Return the number that turns reduced gradients into those of the global mean.

    With a total weight of 0 all gradients become 0; a negative one makes the step non-finite.

    >>> mean_divisor(torch.tensor(8.0), num_averaged=2)
    tensor(4.)
    """
    if_not_positive = torch.where(weight == 0, math.inf, math.nan)
    return torch.where(weight > 0, weight / num_averaged, if_not_positive)


def clipping_divisor(divisor: Tensor, norm: Tensor, max_grad_norm: float) -> Tensor:
    """Return the divisor with which the gradient's norm is at most `max_grad_norm`.

    `norm` is that of the reduced gradients, before they are divided.

    >>> clipping_divisor(torch.tensor(4.0), torch.tensor(40.0), max_grad_norm=5.0)
    tensor(8.0000)
    """
    return torch.maximum(divisor, norm.add(divisor, alpha=1e-6) / max_grad_norm)


def without_weight(sums: Tensor, totals: Mapping[str, Tensor]) -> Tensor:
    """Return the sums with weight 1: the terms of the loss are divided by their totals already.

    A total of NaN stays, and makes the step non-finite.
    """
    least = torch.stack(tuple(totals.values())).min()
    return torch.cat([sums[:1], torch.where(least > 0, 1.0, least)[None], sums[2:]])
