"""Replicate a model over ranks and average its gradients.

Owns: the wrapper that averages gradients, the dtype and size of what is sent, and unwrapping.
Does not own: when gradients are exchanged, which the step decides, or sharded models (`fsdp.py`),
which have no wrapper and average gradients after every micro-batch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, cast

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.dist.agreement import is_same
from lockstep.dist.buffer_places import Mark, buffer_places
from lockstep.dist.collectives import Collectives, GradBucket
from lockstep.dist.fsdp import is_sharded
from lockstep.dist.pace import Pace
from lockstep.dist.same_state import check_registered, check_same_model
from lockstep.dist.trained import TrainedParameters
from lockstep.errors import ConfigError
from lockstep.torch_compat.private import (
    check_reducer,
    no_buffer_sync,
    send_zeros,
    uncompiled,
    without_gradient,
)

T = TypeVar("T")


class GradientConfig(BaseModel):
    """How gradients are sent between ranks. It has no effect on a single rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    exchange_in: Literal["same", "bf16", "fp16"] = "same"
    """Round gradients to this type before they are sent and averaged; `same`: do not round."""
    bucket_mb: PositiveInt | None = None
    """Megabytes to send at a time (default: torch's choice, 1 MB, then 25 MB each)."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the type that gradients are sent in, or None for their own type."""
        return {"same": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.exchange_in]

    def raise_if_unfit(self, exact: bool, parallel: str) -> None:
        """Refuse settings that exact mode or FSDP cannot follow."""
        if exact and self != GradientConfig():
            raise ValueError(
                "exact=true decides itself how gradients are sent and summed\n"
                "  try: unset the section gradients"
            )
        if parallel == "fsdp" and (self.bucket_mb or self.exchange_in == "fp16"):
            raise ValueError(
                "parallel=fsdp sends blocks, not buckets, and does not scale gradients for fp16\n"
                "  try: unset gradients.bucket_mb, and set gradients.exchange_in=bf16"
            )


class GradientExchange(Protocol):
    """How a Replica exchanges its gradients: an `Averaging`, or exact mode's `ExactReducer`."""

    def set_model(self, model: nn.Module) -> None:
        """Called before a model is replicated, which may have other trained parameters now."""

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start exchanging a bucket. Collective."""
        ...

    def fail(self) -> None:
        """Called when a pass has failed on this rank: its remaining buckets are zeros."""


@dataclass
class Sent:
    """The buckets that the current backward pass has sent, in order."""

    num: int = 0
    has_last: bool = False


def replicate(
    model: nn.Module,
    world: Collectives,
    averaging: GradientExchange | None = None,
    bucket_mb: int | None = None,
    is_again: bool = False,
) -> nn.Module:
    """Put `model` on this rank's device; with several ranks, average its gradients.

    All ranks start from the first rank's weights. The forward pass does not synchronise buffers:
    `train_step` does so at its end, or call `sync_buffers` before you use them. A replicated
    model is replicated again, for the parameters that now require a gradient; its weights, the
    same on every rank, are not sent again. A sharded model is returned unchanged.

    Args:
        averaging: How gradients are averaged; by default as before, or with an `Averaging`. An
            `ExactReducer` sums them to the same bits on any number of ranks.
        is_again: The model was replicated before, and has been unwrapped.

    Raises:
        ConfigError: on all ranks, if their parameters or trained parameters differ, or if an
            embedding has sparse gradients.
    """
    for name, layer in unwrap(model).named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise ConfigError(
                f"{name or 'the model'} is an nn.{type(layer).__name__} with sparse=True: sparse "
                "gradients cannot be summed over ranks or clipped",
                "build it with sparse=False",
            )
    if is_sharded(model):
        return model
    if (replica := replica_of(model)) is not None:
        is_again = True
        averaging = averaging or replica.exchanges
    check_same_model(unwrap(model), world)
    model = unwrap(model).to(world.device)
    averaging = averaging or Averaging(world)
    averaging.set_model(model)
    if world.size == 1 or not any(p.requires_grad for p in model.parameters()):
        return model
    if is_again:
        sync_buffers(model, world)  # torch would send them all, also those that have grown
    return Replica(model, world, averaging, bucket_mb, not is_again)


class Replica(DistributedDataParallel):
    """A model that is on every rank, and the exchange of its gradients.

    Args:
        exchanges: Averages or sums gradients over ranks, a bucket at a time.
        sends_weights: Whether all ranks get the first rank's weights and buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        world: Collectives,
        exchanges: GradientExchange,
        bucket_mb: int | None = None,
        sends_weights: bool = True,
    ) -> None:
        options: dict[str, Any] = no_buffer_sync()
        super().__init__(
            model,
            init_sync=sends_weights,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_mb,
            **options,
        )
        check_reducer(self)
        self.exchanges = exchanges
        self.sent = Sent()
        self.pace = Pace(world.device)
        self.trained = TrainedParameters(model)
        self._known = {id(parameter) for parameter in model.parameters()}
        sent, pace = self.sent, self.pace

        # The hook must not hold the replica, which holds the hook: garbage collection cannot look
        # into torch's reducer, and a replica that is not freed keeps hooks on the parameters.
        def send(exchanges: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            sent.num += 1
            if bucket.is_last():
                sent.has_last = True
                pace.end()
            return exchanges.exchange(bucket)  # type: ignore[no-any-return]

        self.register_comm_hook(exchanges, send)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer with tensors whose gradients are not exchanged.

        Raises:
            ConfigError: with the parameter group and the shape.
        """
        remedy = "register it as an nn.Parameter of the module that world.replicate is given"
        check_registered(optimizer, self._known, "the replicated model", remedy)

    def begin_exchanges(self) -> None:
        """Start to count the buckets that a backward pass exchanges."""
        self.sent.num = 0
        self.sent.has_last = False
        self.pace.begin()

    def check_exchanged(self) -> None:
        """Refuse a backward pass that did not average all gradients.

        Raises:
            ConfigError: naming the parameters without a gradient.
        """
        if self.sent.has_last:
            return
        problem = "the loss called model.module directly, so DDP did not average its gradients"
        numbers = without_gradient(self)
        if numbers or self.sent.num:
            trained = [name for name, p in self.module.named_parameters() if p.requires_grad]
            names = ", ".join(trained[number] for number in numbers[:8])
            problem = f"a micro-batch has no gradient for {names or 'some parameters'}"
        raise ConfigError(
            f"{problem}; the weights would differ between ranks",
            "call model(...), freeze unused parameters, or add 0 * p.sum() for them to the loss",
        )

    def send_remaining_zeros(self) -> None:
        """Send zeros for the remaining buckets of a backward pass that failed on this rank.

        So the other ranks finish the pass and can learn of the failure. Replicate the model again
        afterwards.
        """
        self.exchanges.fail()
        send_zeros(self, self.sent.num)


class Averaging:
    """Averages gradients over ranks.

    Args:
        dtype: The type to round gradients to before they are sent. By default they are not
            rounded, and the average is the one that torch computes.
    """

    def __init__(self, world: Collectives, dtype: torch.dtype | None = None) -> None:
        self.world = world
        self.dtype = dtype

    def set_model(self, model: nn.Module) -> None:
        """Nothing to do: an average does not depend on the model."""

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start averaging a bucket. Collective."""
        return self.average(bucket.buffer())

    def fail(self) -> None:
        """Nothing to do: the average of a bucket depends on that bucket alone."""

    def average(self, grads: Tensor) -> torch.futures.Future[Tensor]:
        """Start averaging numbers over ranks, in place; a subclass may override this.

        The result must be the same on every rank. Collective.
        """
        world = self.world
        dtype = self.dtype
        if dtype in (None, grads.dtype):
            return world.all_sum_later(grads.div_(world.size)).then(lambda done: done.value()[0])
        scale = _fp16_scale(grads, world) if dtype == torch.float16 else grads.new_ones(1)
        sent = torch.mul(grads, scale / world.size, out=torch.empty_like(grads, dtype=dtype))

        def unscale(done: torch.futures.Future[Any]) -> Tensor:
            if scale.is_cuda:  # runs on another stream, so keep the memory until it is done
                scale.record_stream(torch.cuda.current_stream())
            return torch.div(done.value()[0], scale, out=grads)

        return world.all_sum_later(sent).then(unscale)


def _fp16_scale(grads: Tensor, world: Collectives) -> Tensor:
    """Return the power of two that brings the largest number of all ranks to 2**15. Collective.

    Losses are sums over any number of units, so gradients can have any size. fp16 ends at 65,504
    and loses precision below 6e-5.
    """
    largest = torch.linalg.vector_norm(grads, torch.inf).float()[None]
    of_all_ranks = world.all_parts(largest, [1] * world.size, is_counted=False)
    exponent = torch.cat(of_all_ranks).max().frexp().exponent
    return torch.ldexp(torch.ones_like(largest), (15 - exponent).clamp(-120, 120)).to(grads.dtype)


def own_seconds(model: nn.Module) -> float:
    """Return the seconds of this rank's own work since the last call; 0 if not measured."""
    return model.pace.interval() if isinstance(model, Replica) else 0.0


def sync_buffers(model: nn.Module, world: Collectives) -> None:
    """Give all ranks the first rank's buffers, such as running statistics. Collective.

    A buffer is skipped if its shape differs between ranks, as of a cache for the longest sequence
    so far, or if it is expanded. One that is the same already is not written to, so that
    `BufferChanges` does not take a constant for a changing buffer; this waits for the device.
    """
    if world.size > 1:
        statistics, others = _buffers_by_kind(model)
        buffers = [*statistics, *all_of_one_form(others, world).values()]
        all_tensors_from_first(buffers, world, rewrites_equal=False)


def sync_buffers_in_step(model: nn.Module, world: Collectives, have_others: bool) -> None:
    """Give all ranks the first rank's buffers, without waiting for the device. Collective.

    Args:
        have_others: Whether `has_other_buffers` on any rank, as the ranks have agreed: a rank may
            have registered a buffer that others have not. If not, their shapes are not compared.
    """
    statistics, others = _buffers_by_kind(model)
    common = all_of_one_form(others, world).values() if have_others else ()
    all_tensors_from_first([*statistics, *common], world)


def has_other_buffers(model: nn.Module) -> bool:
    """Return whether this rank's `model` has buffers that are not running statistics."""
    return bool(_buffers_by_kind(model)[1])


def _buffers_by_kind(model: nn.Module) -> tuple[list[Tensor], dict[str, Mark]]:
    """Return the running statistics, whose shapes are the same on all ranks, and the others."""
    model = unwrap(model)
    once = dict(model.named_buffers())  # a shared buffer has one name
    places = {name: place for name, place in buffer_places(model).items() if name in once}
    statistics = [once[name] for name, place in places.items() if place.is_statistic]
    others = {name: place.mark() for name, place in places.items() if not place.is_statistic}
    return statistics, others


def all_of_one_form(marks: Mapping[str, Mark], world: Collectives) -> dict[str, Tensor]:
    """Return the buffers with the same type and shape on every rank, by name. Collective."""
    forms = {name: marks[name].form for name in sorted(marks)}
    ranks = [] if is_same(forms, world) else world.all_values(forms)
    return {
        name: buffer
        for name, form in forms.items()
        if form and (buffer := marks[name].buffer) is not None
        if all(other.get(name) == form for other in ranks)
    }


@torch.no_grad()
def all_tensors_from_first(
    tensors: Iterable[Tensor], world: Collectives, rewrites_equal: bool = True
) -> None:
    """Give all ranks the first rank's tensors, of any type and layout. Collective.

    They are sent as the bytes of one tensor. The widest types come first, so that each tensor is
    aligned for its type.

    Args:
        rewrites_equal: Also write to tensors that have the first rank's values already; to find
            these, the host must wait for the device.
    """
    buffers = [buffer for buffer in tensors if buffer.numel()]
    buffers.sort(key=lambda buffer: -buffer.element_size())
    if not buffers:
        return
    flat = torch.cat([_bytes_of(buffer) for buffer in buffers])
    world.all_from_first(flat)
    if world.is_first:
        return
    pieces = torch.split(flat, [b.numel() * b.element_size() for b in buffers])
    for buffer, piece in zip(buffers, pieces, strict=True):
        if rewrites_equal or not torch.equal(_bytes_of(buffer), piece):
            buffer.copy_(piece.view(buffer.dtype).view(buffer.shape))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def unwrap(model: T) -> T:
    """Return the module inside a replicated model: its parameter names are the checkpoint's.

    Any other object is returned unchanged.
    """
    replica = replica_of(model)
    if replica is not None:
        return cast(T, replica.module)
    return cast(T, model.module) if isinstance(model, DistributedDataParallel) else model


def replica_of(model: object) -> Replica | None:
    """Return `model` as a Replica, also if `torch.compile` has wrapped it; otherwise None."""
    inner = uncompiled(model)
    return inner if isinstance(inner, Replica) else None
