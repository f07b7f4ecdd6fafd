"""Replicate a model over ranks, and what that does to its gradients and state.

Owns: the wrapper that averages gradients, and the way back to the bare module.
Does not own: when gradients are exchanged; the step says so.
"""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from lockstep.runtime import World

T = TypeVar("T")


def replicate(model: nn.Module, world: World) -> nn.Module:
    """Put `model` on this rank's device; with several ranks, average its gradients.

    All ranks start from the first rank's weights. Running statistics follow the
    first rank's where there are any; other buffers are constants and stay put.
    """
    model = model.to(world.device)
    if world.size == 1 or not any(p.requires_grad for p in model.parameters()):
        return model
    has_statistics = any(isinstance(part, _BatchNorm) for part in model.modules())
    known = inspect.signature(DistributedDataParallel).parameters
    following = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {following: has_statistics}  # renamed in torch 2.13
    return DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **options,
    )


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
