"""Replicate a model over ranks, and what that does to its gradients and state.

Owns: the wrapper that averages gradients, and the way back to the bare module.
Does not own: when gradients are exchanged; the step says so. Nor a model that is cut over
ranks (`sharding.py`): it has no wrapper, and averages gradients after every micro-batch.
"""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from lockstep.exact import LeafSum
from lockstep.runtime import GradBucket, World
from lockstep.sharding import is_sharded

T = TypeVar("T")


def replicate(model: nn.Module, world: World, leaf_sum: LeafSum | None = None) -> nn.Module:
    """Put `model` on this rank's device; with several ranks, average its gradients.

    All ranks start from the first rank's weights. Buffers stay a rank's own: running
    statistics follow the first rank's when they are used (`follow_first`).
    `leaf_sum` sums gradients instead, and keeps statistics, alike for any number of ranks.
    A model that is cut over ranks is left as it is.
    """
    if is_sharded(model):
        return model
    model = model.to(world.device)
    if world.size == 1 or not any(p.requires_grad for p in model.parameters()):
        return model
    known = inspect.signature(DistributedDataParallel).parameters
    following = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {following: False}  # renamed in torch 2.13
    replica = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **options,
    )
    exchange = leaf_sum or Averaging(world)
    replica.register_comm_hook(exchange, type(exchange).exchange)
    replica.exchanges = exchange  # type: ignore[assignment]
    return replica


class Averaging:
    """Averages gradients over ranks as torch would by itself, and counts the buckets sent."""

    num_sent = 0
    has_failed = False

    def __init__(self, world: World) -> None:
        self.world = world

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start averaging a bucket."""
        self.num_sent += 1
        return self.world.average(bucket)


def begin_exchanges(model: nn.Module) -> None:
    """Count from here what a backward pass has exchanged."""
    if isinstance(model, DistributedDataParallel):
        model.exchanges.num_sent = 0  # type: ignore[union-attr]


def answer_exchanges(model: nn.Module) -> None:
    """Take part, with zeros, in what is left of a backward pass that failed on this rank.

    The other ranks then come to its end, and can be told. The model is to be replicated anew.
    """
    if isinstance(model, DistributedDataParallel):
        exchange: Any = model.exchanges
        exchange.has_failed = True
        model.reducer._rebuild_buckets()  # part of the second step's forward pass
        for bucket in model.reducer._get_zeros_like_grad_buckets()[exchange.num_sent :]:
            model.reducer._run_comm_hook(bucket).wait()


@torch.no_grad()
def follow_first(model: nn.Module, world: World) -> None:
    """Give all ranks the first rank's running statistics, as the next step would. Collective."""
    for part in model.modules() if world.size > 1 else ():
        if isinstance(part, _BatchNorm):
            for buffer in part.buffers(recurse=False):
                buffer.copy_(world.all_sum(buffer if world.is_first else torch.zeros_like(buffer)))


def bare(model: T) -> T:
    """Return the module that was replicated, whose names are those of the checkpoint.

    Anything else comes back as it is.
    """
    return cast(T, model.module) if isinstance(model, DistributedDataParallel) else model


def local_gradients(model: nn.Module) -> AbstractContextManager[None]:
    """Keep gradients on this rank inside the block, to accumulate micro-batches."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
