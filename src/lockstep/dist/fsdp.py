"""Shard a model that does not fit on a single GPU: each rank has some rows of every parameter.

Owns: the blocks that are sharded and gathered together, and converting between a whole tensor and
a rank's rows. Does not own: the gathers and sums of a step, which torch does (`fully_shard`), or
files.

A sharded tensor is a `DTensor`. It has the shape of the whole, and each rank has consecutive rows
of it: the same number on every rank, except that the last ranks may have fewer or none.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lockstep.dist.collectives import Collectives
from lockstep.errors import ConfigError
from lockstep.torch_compat.error_texts import MIXED_SHARDS


def shard(
    model: nn.Module,
    world: Collectives,
    blocks: Iterable[nn.Module] = (),
    reduce_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard the parameters of `model` in place, and put them on the ranks' devices. Collective.

    A block is gathered only while it computes; parameters outside of blocks, while the model
    does. All ranks start from the first rank's weights. A parameter that is a single number is
    not sharded. Gradients are rounded to `reduce_dtype`, if given, before they are sent and
    averaged. On a single rank nothing is sharded.

    Raises:
        ConfigError: two blocks share a parameter.
    """
    if world.size == 1:
        return model.to(world.device)
    from torch.distributed import DeviceMesh, group  # type: ignore[attr-defined]
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    named = dict(model.named_parameters())
    single = {parameter for parameter in named.values() if not parameter.dim()}
    # Use the existing group: if it is gloo on GPUs, torch would make another one with NCCL.
    mesh = DeviceMesh.from_group(group.WORLD, world.device.type)  # type: ignore[arg-type]
    form: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
    }
    for part in (*_innermost_first(model, blocks), model):
        for parameter in part.parameters():
            if not is_dtensor(parameter):  # one block at a time, because all may not fit
                parameter.data = parameter.data.to(world.device).contiguous()
                world.all_from_first(parameter.data)
        # Reshard the root, too, after its forward pass: an average that is copied into the shards
        # between two evaluations would not reach weights that are still gathered.
        fully_shard(part, reshard_after_forward=True, ignored_params=single, **form)
    if lost := named.keys() ^ dict(model.named_parameters()).keys():
        raise ConfigError(
            f"parallel=fsdp would shard {', '.join(sorted(lost))} twice: blocks share it",
            "remove those blocks from Task.blocks, or use parallel=ddp",
        )
    for buffer in model.buffers():
        buffer.data = buffer.data.contiguous()
        world.all_from_first(buffer)
    return model


def _innermost_first(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the blocks to shard, each after those inside it; a list of modules is no block."""
    chosen = set(blocks) - {model}
    lists = (nn.ModuleList, nn.ModuleDict)
    found = [part for part in model.modules() if part in chosen and not isinstance(part, lists)]
    return [part for part in reversed(found) if any(True for _ in part.parameters())]


@contextmanager
def gathered_whole(model: nn.Module, unless: bool = False) -> Iterator[None]:
    """Gather all weights on every rank inside the block, so that ranks may differ. Collective."""
    parts: list[Any] = [p for p in model.modules() if is_sharded(p) and not unless]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()


def raise_if_out_of_reach(error: RuntimeError) -> None:
    """Raise a ConfigError if a forward pass used sharded weights where it needs whole ones."""
    if MIXED_SHARDS in str(error):
        problem = "parallel=fsdp: weights are used outside the forward pass of their block"
        remedy = "return only modules that the model calls from Task.blocks"
        raise ConfigError(problem, remedy) from error


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model is sharded: then each of its forward passes is a collective."""
    return hasattr(type(model), "unshard")


def is_dtensor(value: Any) -> bool:
    """Return whether a tensor is sharded."""
    return hasattr(value, "placements")  # importing DTensor would take a second


def rows_of(sharded: Any) -> tuple[Tensor, int]:
    """Return this rank's rows of a sharded tensor, and the index of the first."""
    mesh = sharded.device_mesh
    num_rows = len(sharded)
    each = -(-num_rows // mesh.size())
    return sharded.detach().to_local(), min(mesh.get_local_rank() * each, num_rows)


def local_rows(tensors: Iterable[Any]) -> list[Tensor]:
    """Return this rank's rows of each tensor, or all of an unsharded one, without copying."""
    return [tensor.detach().to_local() if is_dtensor(tensor) else tensor for tensor in tensors]


def sums_and_norm(local: Tensor, grads: list[Tensor], world: Collectives) -> tuple[Tensor, Tensor]:
    """Return `local`, summed over ranks, and the norm of the gradient. Collective.

    `grads` are this rank's rows of the gradients. Parameters that are a single number are not
    sharded; their gradients are averaged in the same collective.
    """
    rows = [g for g in grads if g.dim()]
    single = [g for g in grads if not g.dim()]
    square = get_total_norm(rows).double().square()
    total = world.all_sum(torch.stack([*local, square, *(g.double() for g in single)]))
    num = len(local)
    sums, square, means = total[:num], total[num], total[num + 1 :] / world.size
    for grad, mean in zip(single, means, strict=True):
        grad.copy_(mean)
    return sums, (square + means.square().sum()).sqrt()


def gathered(tensor: Any) -> Tensor:
    """Return the whole tensor. Collective if it is sharded."""
    return cast(Tensor, tensor.detach().full_tensor() if is_dtensor(tensor) else tensor)


def shard_like(whole: Tensor, target: Any) -> Tensor:
    """Return `whole`, sharded like `target` if that is sharded."""
    if not is_dtensor(target):
        return whole
    from torch.distributed.tensor import DTensor

    local, first = rows_of(target)
    rows = whole[first : first + len(local)].to(local.device)
    form: dict[str, Any] = {"shape": target.shape, "stride": target.stride(), "run_check": False}
    return DTensor.from_local(rows, target.device_mesh, target.placements, **form)
