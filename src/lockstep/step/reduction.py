"""Reduce the gradients and sums of one step over all ranks.

Owns: one class for each kind of model: on a single rank, replicated, sharded, or in exact mode.
Does not own: the passes that compute gradients, or the update that uses them.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lockstep.data.batch import MicroBatch, StepBatch
from lockstep.dist.collectives import Collectives
from lockstep.dist.ddp import Replica, replica_of, unwrap
from lockstep.dist.fsdp import is_sharded, local_rows, sums_and_norm
from lockstep.dist.trained import TrainedParameters
from lockstep.errors import ConfigError
from lockstep.exact.contrastive import GatheredRows, LeafLoss, gather_rows
from lockstep.exact.reducer import ExactReducer


class Reduction:
    """A single rank, whose gradients and sums are those of the step."""

    is_exact = False

    def __init__(self, model: nn.Module, world: Collectives) -> None:
        self.model = model
        self.world = world
        self.num_averaged = world.size
        """Gradients are the sum over all ranks divided by this."""

    @property
    def trained(self) -> TrainedParameters | None:
        """The parameters whose gradients are reduced, if they are fixed before the step."""
        return None

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer with tensors that are not reduced over ranks."""

    def start(self, batch: StepBatch) -> None:
        """Begin a step."""

    def gather_rows(self, leaf_loss: LeafLoss, batch: StepBatch) -> list[GatheredRows]:
        """Return exact mode's rows for a loss that compares samples of all ranks. Collective."""
        return []

    def micro_batch(self, micro_batch: MicroBatch, is_last: bool) -> AbstractContextManager[object]:
        """Return the block for the forward and backward pass of a micro-batch."""
        return nullcontext()

    def check(self) -> None:
        """Refuse passes after which some gradients were not reduced.

        Raises:
            ConfigError: each rank would take a different step.
        """
        if self.world.size > 1:
            raise ConfigError(
                f"the model is not replicated: each of the {self.world.size} ranks would train "
                "its own",
                "call model = world.replicate(model) before the loop, and train that model",
            )

    def take_part_with_zeros(self) -> None:
        """After a failure on this rank, join the exchanges that the other ranks wait in."""

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the gradients of this rank, summed or averaged over all ranks. Collective.

        Raises:
            ConfigError: one of them is sparse.
        """
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        grads: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
        if not grads:
            raise ConfigError(
                "no parameter of the optimizer has a gradient",
                "build the optimizer from parameters that the loss depends on",
            )
        sparse = next((grad for grad in grads if grad.layout != torch.strided), None)
        if sparse is not None:
            raise ConfigError(
                f"a parameter of shape {list(sparse.shape)} has a sparse gradient, which cannot be "
                "summed over ranks or clipped",
                "make it dense: pass sparse=False to the embedding",
            )
        return grads

    def sums_and_norm(
        self, rows: Sequence[Tensor], grads: list[Tensor], batch: StepBatch
    ) -> tuple[Tensor, Tensor]:
        """Return the rows of all micro-batches, summed, and the norm of the gradient. Collective.

        All sums go through one collective. With a second one, a rank in another branch could
        keep the others waiting in a second place.
        """
        return self.world.all_sum(added_up(rows)), get_total_norm(grads)

    def total(self, rows: Sequence[Tensor], batch: StepBatch) -> Tensor:
        """Return one row for each micro-batch, summed over all of them. Collective."""
        return self.world.all_sum(torch.stack(tuple(rows)).sum(dim=0))

    def begin_update(self) -> None:
        """Begin the update, after all exchanges."""

    def end(self) -> None:
        """End the step, after the update."""


class ReplicatedReduction(Reduction):
    """The model is on every rank; DDP averages gradients in the last backward pass."""

    model: Replica

    @property
    def trained(self) -> TrainedParameters | None:
        """The parameters that the model was replicated with."""
        return self.model.trained

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse tensors that the replicated model does not have."""
        self.model.check_optimizer(optimizer)

    def start(self, batch: StepBatch) -> None:
        """Start to count the buckets of this step."""
        self.model.begin_exchanges()

    def micro_batch(self, micro_batch: MicroBatch, is_last: bool) -> AbstractContextManager[object]:
        """Accumulate gradients on this rank until the last micro-batch."""
        return nullcontext() if is_last else self.model.no_sync()

    def check(self) -> None:
        """Refuse a backward pass that did not reach every bucket."""
        self.model.check_exchanged()

    def take_part_with_zeros(self) -> None:
        """Send zeros for every remaining bucket."""
        self.model.send_remaining_zeros()

    def begin_update(self) -> None:
        """Time this rank's own work again."""
        self.model.pace.begin()

    def end(self) -> None:
        """Stop timing this rank's own work."""
        self.model.pace.end()


class ShardedReduction(Reduction):
    """Every rank has some rows of each parameter; FSDP averages after every micro-batch."""

    def check(self) -> None:
        """Trust FSDP, which reduces inside the backward pass."""

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Return this rank's rows of the gradients."""
        return local_rows(super().gradients(optimizer))

    def sums_and_norm(
        self, rows: Sequence[Tensor], grads: list[Tensor], batch: StepBatch
    ) -> tuple[Tensor, Tensor]:
        """Sum the squares of all ranks' rows in the same collective."""
        return sums_and_norm(added_up(rows), grads, self.world)


class ExactReduction(Reduction):
    """Exact mode: everything is added along one tree, the same for any number of ranks."""

    is_exact = True

    def __init__(self, model: nn.Module, world: Collectives, exact_reducer: ExactReducer) -> None:
        super().__init__(model, world)
        self.num_averaged = 1
        self.exact_reducer = exact_reducer
        replica = replica_of(model)
        self.replica = ReplicatedReduction(replica, world) if replica is not None else None

    @property
    def trained(self) -> TrainedParameters | None:
        """The parameters whose gradients are summed."""
        return self.exact_reducer.trained

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse tensors that the replicated model does not have."""
        if self.replica:
            self.replica.check_optimizer(optimizer)

    def start(self, batch: StepBatch) -> None:
        """Begin the sum over the micro-batches of all ranks."""
        if self.replica:
            self.replica.start(batch)
        self.exact_reducer.begin(batch.num_leaves)

    def gather_rows(self, leaf_loss: LeafLoss, batch: StepBatch) -> list[GatheredRows]:
        """Compute the rows of all ranks beforehand, one micro-batch at a time."""
        if not self.exact_reducer.gathers:
            return []
        return gather_rows(leaf_loss, unwrap(self.model), batch, self.world)

    @contextmanager
    def micro_batch(self, micro_batch: MicroBatch, is_last: bool) -> Iterator[None]:
        """Keep each micro-batch's gradients and running statistics separate."""
        local = self.replica.micro_batch(micro_batch, is_last) if self.replica else nullcontext()
        with local, self.exact_reducer.leaf(micro_batch, is_last):
            yield

    def check(self) -> None:
        """Refuse a backward pass that did not reach every bucket."""
        if self.replica:
            self.replica.check()
        else:
            super().check()

    def take_part_with_zeros(self) -> None:
        """Send zeros for every remaining bucket."""
        if self.replica:
            self.replica.take_part_with_zeros()

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Finish the sum over all ranks."""
        self.exact_reducer.finish()
        return super().gradients(optimizer)

    def sums_and_norm(
        self, rows: Sequence[Tensor], grads: list[Tensor], batch: StepBatch
    ) -> tuple[Tensor, Tensor]:
        """Sum the rows along the tree."""
        return self.total(rows, batch), get_total_norm(grads)

    def total(self, rows: Sequence[Tensor], batch: StepBatch) -> Tensor:
        """Sum along the tree."""
        return self.exact_reducer.total(rows, batch)

    def begin_update(self) -> None:
        """Time this rank's own work again."""
        if self.replica:
            self.replica.begin_update()

    def end(self) -> None:
        """Stop timing this rank's own work."""
        if self.replica:
            self.replica.end()


def choose_reduction(
    model: nn.Module, world: Collectives, exact_reducer: ExactReducer | None = None
) -> Reduction:
    """Return the reduction for `model`, depending on how it was replicated or sharded."""
    if exact_reducer:
        return ExactReduction(model, world, exact_reducer)
    if (replica := replica_of(model)) is not None:
        return ReplicatedReduction(replica, world)
    if is_sharded(model):
        return ShardedReduction(model, world)
    return Reduction(model, world)


def added_up(rows: Sequence[Tensor]) -> Tensor:
    """Return the sum of rows."""
    return rows[0] if len(rows) == 1 else torch.stack(tuple(rows)).sum(dim=0)
