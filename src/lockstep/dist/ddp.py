"""Replicate a model over ranks, and what that does to its gradients and state.

Owns: the wrapper that averages gradients, how they travel, and the way back to the bare module.
Does not own: when gradients are exchanged; the step says so. Nor a model that is cut over
ranks (`fsdp.py`): it has no wrapper, and averages gradients after every micro-batch.
"""

import inspect
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, TypeVar, cast

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.dist.collectives import Collectives, GradBucket
from lockstep.dist.fsdp import is_sharded
from lockstep.dist.same_state import check_registered, check_same_model
from lockstep.dist.trained import TrainedParameters
from lockstep.errors import ConfigError
from lockstep.exact.reducer import ExactReducer
from lockstep.observe.pace import Pace

T = TypeVar("T")


class GradientConfig(BaseModel):
    """How gradients travel between ranks. On one rank they stay, and none of this matters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    exchange_in: Literal["same", "bf16", "fp16"] = "same"
    """What gradients are rounded to before they are sent and averaged; `same`: to nothing."""
    bucket_mb: PositiveInt | None = None
    """How much is sent at a time; unless said, torch's choice: 1 MB, then 25 MB each."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Return what gradients are sent as, or None for what they are."""
        return {"same": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.exchange_in]

    def raise_if_unfit(self, exact: bool, parallel: str) -> None:
        """Refuse what the way that gradients are summed cannot do."""
        if exact and self != GradientConfig():
            raise ValueError("exact fixes how gradients are sent and summed: leave out gradients")
        if parallel == "fsdp" and (self.bucket_mb or self.exchange_in == "fp16"):
            raise ValueError(
                "fsdp sends blocks, not buckets, and does not scale them to what fp16 can hold: "
                "leave out gradients.bucket_mb, and set gradients.exchange_in to bf16"
            )


def replicate(
    model: nn.Module,
    world: Collectives,
    way: "Averaging | ExactReducer | None" = None,
    bucket_mb: int | None = None,
) -> nn.Module:
    """Put `model` on this rank's device; with several ranks, average its gradients.

    All ranks start from the first rank's weights. The forward pass does not synchronise buffers:
    `train_step` does at its end, or whoever uses them (`sync_buffers`).
    A model that was replicated before is replicated again, with the parameters that require a
    gradient now. `way` is how gradients travel, unless as they are, or as they did before; a
    `ExactReducer` sums them, alike for any number of ranks. A sharded model is left as it is.

    Raises:
        ConfigError: on all ranks, if they have other parameters or do not train the same ones; or
            an embedding would make sparse gradients.
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
    if isinstance(model, Replica) and way is None:
        way = model.exchanges
    check_same_model(unwrap(model), world)
    model = unwrap(model).to(world.device)
    if isinstance(way, ExactReducer):
        way.follow(model)
    if world.size == 1 or not any(p.requires_grad for p in model.parameters()):
        return model
    return Replica(model, world, way or Averaging(world), bucket_mb)


class Replica(DistributedDataParallel):
    """A model that is on every rank, and the exchange of its gradients.

    Args:
        exchanges: Averages or sums gradients over ranks, a bucket at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        world: Collectives,
        exchanges: "Averaging | ExactReducer",
        bucket_mb: int | None = None,
    ) -> None:
        known = inspect.signature(DistributedDataParallel).parameters
        renamed = "forward_sync_buffers" in known  # in torch 2.13
        options: dict[str, Any] = {
            "forward_sync_buffers" if renamed else "broadcast_buffers": False
        }
        super().__init__(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_mb,
            **options,
        )
        self.exchanges = exchanges
        self.pace = Pace(world.device)
        self.trained = TrainedParameters(model)
        self._known = {id(parameter) for parameter in model.parameters()}
        exchange: Any = type(exchanges).exchange
        pace = self.pace

        def send(exchanges: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            if bucket.is_last():
                pace.end()
            return exchange(exchanges, bucket)  # type: ignore[no-any-return]

        self.register_comm_hook(exchanges, send)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer of tensors whose gradients are not exchanged.

        Raises:
            ConfigError: with the parameter group and the shape.
        """
        remedy = "register it as an nn.Parameter of the module that world.replicate is given"
        check_registered(optimizer, self._known, "the replicated model", remedy)

    def begin_exchanges(self) -> None:
        """Count from here what a backward pass has exchanged."""
        self.exchanges.num_sent = 0
        self.pace.begin()

    def check_exchanged(self) -> None:
        """Refuse a backward pass after which some gradients would be a rank's own.

        Raises:
            ConfigError: naming the parameters without a gradient.
        """
        try:
            self._check_reducer_finalized()  # type: ignore[no-untyped-call]
            if self.exchanges.num_sent:
                self.pace.begin()
                return
            problem = "no gradient was averaged: the loss calls not the model, but what is in it"
        except RuntimeError as error:
            told = str(error).partition("grad for rank")[2].partition("\n")[0].split()[1:9]
            named = [name for name, p in self.module.named_parameters() if p.requires_grad]
            problem = "a micro-batch has no gradient for " + ", ".join(named[int(i)] for i in told)
        raise ConfigError(
            f"{problem}; the weights would differ between ranks",
            "call model(...), freeze unused parameters, or add 0 * p.sum() of others to the loss",
        )

    def answer_exchanges(self) -> None:
        """Take part, with zeros, in what is left of a backward pass that failed on this rank.

        The other ranks then finish the pass and can be told. Replicate the model again afterwards.
        """
        self.exchanges.has_failed = True
        with suppress(RuntimeError):  # a backward pass has begun: it is done
            self.reducer._rebuild_buckets()  # part of the second step's forward pass
        for bucket in self.reducer._get_zeros_like_grad_buckets()[self.exchanges.num_sent :]:
            self.reducer._run_comm_hook(bucket).wait()


class Averaging:
    """Averages gradients over ranks, and counts the buckets sent.

    Args:
        dtype: What they are rounded to for the way; unless given, they travel as they are, and
            the average is what torch would make of them by itself.
    """

    num_sent = 0
    has_failed = False

    def __init__(self, world: Collectives, dtype: torch.dtype | None = None) -> None:
        self.world, self.dtype = world, dtype

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start averaging a bucket."""
        self.num_sent += 1
        return self.average(bucket.buffer())

    def average(self, grads: Tensor) -> torch.futures.Future[Tensor]:
        """Start averaging numbers over ranks, in place; a subclass may do so in its own way.

        The result must be the same on every rank. Collective.
        """
        world, dtype = self.world, self.dtype
        if dtype in (None, grads.dtype):
            return world.all_sum_later(grads.div_(world.size)).then(lambda done: done.value()[0])
        scale = _fp16_scale(grads, world) if dtype == torch.float16 else grads.new_ones(1)
        sent = torch.mul(grads, scale / world.size, out=torch.empty_like(grads, dtype=dtype))

        def arrive(done: torch.futures.Future[Any]) -> Tensor:
            if scale.is_cuda:  # a stream of its own: the memory is not to be given away before
                scale.record_stream(torch.cuda.current_stream())
            return torch.div(done.value()[0], scale, out=grads)

        return world.all_sum_later(sent).then(arrive)


def _fp16_scale(grads: Tensor, world: Collectives) -> Tensor:
    """Return the power of two that brings the largest number of all ranks to 2**15. Collective.

    Losses are sums over however many units there are: as they come, they may lie anywhere, and
    fp16 ends at 65,504 and gets coarse below 6e-5.
    """
    largest = torch.linalg.vector_norm(grads, torch.inf).float()[None]
    exponent = torch.cat(world.all_parts(largest, [1] * world.size)).max().frexp().exponent
    return torch.ldexp(torch.ones_like(largest), (15 - exponent).clamp(-120, 120)).to(grads.dtype)


def own_seconds(model: nn.Module) -> float:
    """Return what this rank's steps took by themselves since the last call; 0 if nobody timed."""
    return model.pace.interval() if isinstance(model, Replica) else 0.0


@torch.no_grad()
def sync_buffers(model: nn.Module, world: Collectives) -> None:
    """Give all ranks the first rank's buffers, running statistics among them. Collective.

    Expanded ones are left out.
    """
    if world.size == 1:
        return
    all_tensors_from_first(unwrap(model).buffers(), world)


@torch.no_grad()
def all_tensors_from_first(tensors: Iterable[Tensor], world: Collectives) -> None:
    """Give all ranks the first rank's tensors, however they lie in memory. Collective.

    All of them travel as the bytes of one tensor, the widest types first, so that each lies at
    an address that its type can be read from.
    """
    buffers = [b for b in tensors if b.numel() and not _is_expanded(b)]
    buffers.sort(key=lambda buffer: -buffer.element_size())
    if not buffers:
        return
    flat = torch.cat([b.contiguous().reshape(-1).view(torch.uint8) for b in buffers])
    world.all_from_first(flat)
    pieces = torch.split(flat, [b.numel() * b.element_size() for b in buffers])
    for buffer, piece in zip(buffers, pieces, strict=True):
        buffer.copy_(piece.view(buffer.dtype).view(buffer.shape))


def _is_expanded(tensor: Tensor) -> bool:
    """Say whether one element stands at many indices: such a tensor cannot be written to."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def unwrap(model: T) -> T:
    """Return the module that was replicated, whose names are those of the checkpoint.

    Anything else comes back as it is.
    """
    replica = replica_of(model)
    if replica is not None:
        return cast(T, replica.module)
    return cast(T, model.module) if isinstance(model, DistributedDataParallel) else model


def replica_of(model: object) -> Replica | None:
    """Return the replica that `model` is, or that `torch.compile` has wrapped; else None."""
    inner = getattr(model, "_orig_mod", model)  # what torch.compile keeps a module under
    return inner if isinstance(inner, Replica) else None
