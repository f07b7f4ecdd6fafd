"""Replicate a model over ranks, and what that does to its gradients and state.

Owns: the wrapper that averages gradients, how they travel, and the way back to the bare module.
Does not own: when gradients are exchanged; the step says so. Nor a model that is cut over
ranks (`sharding.py`): it has no wrapper, and averages gradients after every micro-batch.
"""

import inspect
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Literal, TypeVar, cast

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import ConfigError
from lockstep.exact import LeafSum
from lockstep.observe.pace import Pace
from lockstep.runtime import GradBucket, World
from lockstep.sharding import is_sharded
from lockstep.trained import TrainedParameters

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
    world: World,
    way: "Averaging | LeafSum | None" = None,
    bucket_mb: int | None = None,
) -> nn.Module:
    """Put `model` on this rank's device; with several ranks, average its gradients.

    All ranks start from the first rank's weights. The forward pass does not synchronise buffers:
    `train_step` does at its end, or whoever uses them (`sync_buffers`).
    A model that was replicated before is replicated again, with the parameters that require a
    gradient now. `way` is how gradients travel, unless as they are, or as they did before; a
    `LeafSum` sums them, alike for any number of ranks. A sharded model is left as it is.
    """
    if is_sharded(model):
        return model
    if isinstance(model, DistributedDataParallel) and way is None:
        way = cast("Averaging | LeafSum | None", getattr(model, "exchanges", None))
    model = bare(model).to(world.device)
    if isinstance(way, LeafSum):
        way.follow(model)
    if world.size == 1 or not any(p.requires_grad for p in model.parameters()):
        return model
    known = inspect.signature(DistributedDataParallel).parameters
    following = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {following: False}  # renamed in torch 2.13
    replica = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mb,
        **options,
    )
    way, pace = way or Averaging(world), Pace(world.device)
    exchange: Any = type(way).exchange

    def send(way: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.is_last():
            pace.end()
        return exchange(way, bucket)  # type: ignore[no-any-return]

    replica.register_comm_hook(way, send)
    replica.exchanges, replica.pace = way, pace  # type: ignore[assignment]
    replica.trained = TrainedParameters(model)  # type: ignore[assignment]
    return replica


def trained_parameters(model: nn.Module) -> TrainedParameters | None:
    """Return what a replica knows of the parameters it was made for; None if it is no replica."""
    return getattr(model, "trained", None) if isinstance(model, DistributedDataParallel) else None


class Averaging:
    """Averages gradients over ranks, and counts the buckets sent.

    Args:
        dtype: What they are rounded to for the way; unless given, they travel as they are, and
            the average is what torch would make of them by itself.
    """

    num_sent = 0
    has_failed = False

    def __init__(self, world: World, dtype: torch.dtype | None = None) -> None:
        self.world, self.dtype = world, dtype

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start averaging a bucket."""
        self.num_sent += 1
        return self.average(bucket.buffer())

    def average(self, grads: Tensor) -> torch.futures.Future[Tensor]:
        """Start averaging numbers over ranks, in place; a subclass may do so in its own way.

        The result must be alike on all ranks. Collective.
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


def _fp16_scale(grads: Tensor, world: World) -> Tensor:
    """Return the power of two that brings the largest number of all ranks to 2**15. Collective.

    Losses are sums over however many units there are: as they come, they may lie anywhere, and
    fp16 ends at 65,504 and gets coarse below 6e-5.
    """
    largest = torch.linalg.vector_norm(grads, torch.inf).float()[None]
    exponent = torch.cat(world.all_parts(largest, [1] * world.size)).max().frexp().exponent
    return torch.ldexp(torch.ones_like(largest), (15 - exponent).clamp(-120, 120)).to(grads.dtype)


def begin_exchanges(model: nn.Module) -> None:
    """Count from here what a backward pass has exchanged."""
    if isinstance(model, DistributedDataParallel):
        model.exchanges.num_sent = 0  # type: ignore[union-attr]
        model.pace.begin()  # type: ignore[operator, union-attr]


def check_exchanged(model: nn.Module) -> None:
    """Refuse a backward pass that has left gradients, and so would leave weights, a rank's own."""
    if not isinstance(model, DistributedDataParallel):
        return
    try:
        model._check_reducer_finalized()  # type: ignore[no-untyped-call]
        if model.exchanges.num_sent:  # type: ignore[union-attr]
            model.pace.begin()  # type: ignore[operator, union-attr]
            return
        problem = "no gradient was averaged: the loss calls not the model, but what is in it"
    except RuntimeError as error:
        told = str(error).partition("grad for rank")[2].partition("\n")[0].split()[1:9]
        named = [name for name, p in model.module.named_parameters() if p.requires_grad]
        problem = "a micro-batch has no gradient for " + ", ".join(named[int(i)] for i in told)
    remedy = "to call the model itself; to freeze what is never used; to add 0 * p.sum() of others"
    raise ConfigError(f"{problem}; ranks would each go their own way", remedy)


def end_step(model: nn.Module) -> None:
    """Note that this rank's part of a step is done."""
    if isinstance(model, DistributedDataParallel):
        model.pace.end()  # type: ignore[operator, union-attr]


def own_seconds(model: nn.Module) -> float:
    """Return what this rank's steps took by themselves since the last call; 0 if nobody timed."""
    pace: Any = model.pace if isinstance(model, DistributedDataParallel) else None
    return float(pace.interval()) if pace else 0.0


def answer_exchanges(model: nn.Module) -> None:
    """Take part, with zeros, in what is left of a backward pass that failed on this rank.

    The other ranks then come to its end, and can be told. The model is to be replicated anew.
    """
    if isinstance(model, DistributedDataParallel):
        exchange: Any = model.exchanges
        exchange.has_failed = True
        with suppress(RuntimeError):  # a backward pass has begun: it is done
            model.reducer._rebuild_buckets()  # part of the second step's forward pass
        for bucket in model.reducer._get_zeros_like_grad_buckets()[exchange.num_sent :]:
            model.reducer._run_comm_hook(bucket).wait()


@torch.no_grad()
def sync_buffers(model: nn.Module, world: World) -> None:
    """Give all ranks the first rank's buffers, running statistics among them. Collective.

    All of them travel as the bytes of one tensor, the widest types first, so that each lies at
    an address that its type can be read from.
    """
    if world.size == 1:
        return
    # An expanded buffer has one element at many indices: it cannot be written to.
    buffers = [b for b in bare(model).buffers() if b.numel() and b.is_contiguous()]
    buffers.sort(key=lambda buffer: -buffer.element_size())
    if not buffers:
        return
    flat = torch.cat([b.reshape(-1).view(torch.uint8) for b in buffers])
    world.all_from_first(flat)
    pieces = torch.split(flat, [b.numel() * b.element_size() for b in buffers])
    for buffer, piece in zip(buffers, pieces, strict=True):
        buffer.copy_(piece.view(buffer.dtype).view(buffer.shape))


def bare(model: T) -> T:
    """Return the module that was replicated, whose names are those of the checkpoint.

    Anything else comes back as it is.
    """
    return cast(T, model.module) if isinstance(model, DistributedDataParallel) else model


def local_gradients(model: nn.Module) -> AbstractContextManager[None]:
    """Keep gradients on this rank inside the block, to accumulate micro-batches."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
