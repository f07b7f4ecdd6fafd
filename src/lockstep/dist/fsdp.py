"""Cut a model over ranks, each with some rows of every parameter: for what fits on no single GPU.

Owns: what is cut and gathered as one, and the way from a whole tensor to a rank's rows and back.
Does not own: the gathers and sums of a step, which are torch's (`fully_shard`); nor files.

A tensor that is cut is a `DTensor`: it has the shape of the whole, and each rank consecutive
rows of it, as many as any other but for the last ones, which may have fewer or none.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from lockstep.dist.collectives import Collectives
from lockstep.errors import ConfigError
from lockstep.torch_errors import MIXED_SHARDS


def shard(
    model: nn.Module,
    world: Collectives,
    blocks: Iterable[nn.Module] = (),
    via: torch.dtype | None = None,
) -> nn.Module:
    """Cut the parameters of `model` over ranks, in place, and put them on the ranks' devices.

    A block is whole only while it computes; what is in none, while the model does. All ranks
    start from the first rank's weights. What is a single number stays whole on every rank.
    Gradients are rounded to `via`, if given, before they are sent and averaged.
    Alone, there is nothing to cut. Collective.

    Raises:
        ConfigError: a parameter cannot be cut.
    """
    if world.size == 1:
        return model.to(world.device)
    from torch.distributed import DeviceMesh, group  # type: ignore[attr-defined]
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    named = dict(model.named_parameters())
    single = {parameter for parameter in named.values() if not parameter.dim()}
    # Of the group there is: where that is gloo on GPUs, torch would make one of NCCL.
    mesh = DeviceMesh.from_group(group.WORLD, world.device.type)  # type: ignore[arg-type]
    form: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=via)}
    for part in (*_innermost_first(model, blocks), model):
        for parameter in part.parameters():
            if not is_dtensor(parameter):  # a block at a time: the device could not hold them all
                parameter.data = parameter.data.to(world.device).contiguous()
                world.all_from_first(parameter.data)
        # The root, too, is cut again after its forward pass: an average that is put into the
        # weights between two evaluations would not reach what is still gathered.
        fully_shard(part, reshard_after_forward=True, ignored_params=single, **form)
    if lost := named.keys() ^ dict(model.named_parameters()).keys():
        raise ConfigError(
            f"parallel=fsdp would shard {', '.join(sorted(lost))} twice: blocks share it",
            "leave those blocks out of Task.blocks, or use parallel=ddp",
        )
    for buffer in model.buffers():
        buffer.data = buffer.data.contiguous()
        world.all_from_first(buffer)
    return model


def _innermost_first(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the blocks to cut, each after those inside it; a bare list of modules is none."""
    chosen, lists = set(blocks) - {model}, (nn.ModuleList, nn.ModuleDict)
    found = [part for part in model.modules() if part in chosen and not isinstance(part, lists)]
    return [part for part in reversed(found) if any(True for _ in part.parameters())]


@contextmanager
def gathered_whole(model: nn.Module, unless: bool = False) -> Iterator[None]:
    """Let every rank have all of the weights inside the block, for calls of its own. Collective."""
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
    """Say in our words that a forward pass has met rows where it needs the whole."""
    if MIXED_SHARDS in str(error):
        problem = "parallel=fsdp: weights are used outside the forward pass of their block"
        remedy = "return only modules that the model calls from Task.blocks"
        raise ConfigError(problem, remedy) from error


def is_sharded(model: nn.Module) -> bool:
    """Say whether a model is cut over ranks: each of its forward passes is then a collective."""
    return hasattr(type(model), "unshard")


def is_dtensor(value: Any) -> bool:
    """Say whether ranks hold some rows each of a tensor."""
    return hasattr(value, "placements")  # importing DTensor to ask would take a second


def rows_of(cut: Any) -> tuple[Tensor, int]:
    """Return this rank's rows of a tensor that is cut, and the number of the first."""
    mesh, num_rows = cut.device_mesh, len(cut)
    each = -(-num_rows // mesh.size())
    return cut.detach().to_local(), min(mesh.get_local_rank() * each, num_rows)


def local_rows(tensors: Iterable[Any]) -> list[Tensor]:
    """Return what this rank has of each tensor, in the same memory: its rows, or all of it."""
    return [tensor.detach().to_local() if is_dtensor(tensor) else tensor for tensor in tensors]


def sums_and_norm(local: Tensor, grads: list[Tensor], world: Collectives) -> tuple[Tensor, Tensor]:
    """Return `local`, summed over ranks, and the norm of the gradient. Collective.

    `grads` are this rank's rows of the gradients. Parameters that are a single number cannot be
    cut: their gradients are averaged in passing, for it takes no further collective.
    """
    rows, single = [g for g in grads if g.dim()], [g for g in grads if not g.dim()]
    square = get_total_norm(rows).double().square()
    total = world.all_sum(torch.stack([*local, square, *(g.double() for g in single)]))
    num = len(local)
    sums, square, means = total[:num], total[num], total[num + 1 :] / world.size
    for grad, mean in zip(single, means, strict=True):
        grad.copy_(mean)
    return sums, (square + means.square().sum()).sqrt()


def gathered(tensor: Any) -> Tensor:
    """Return all of a tensor. Collective where it is cut."""
    return cast(Tensor, tensor.detach().full_tensor() if is_dtensor(tensor) else tensor)


def shard_like(whole: Tensor, target: Any) -> Tensor:
    """Return this rank's rows of a whole tensor, cut as `target` is; or, if it is not, all."""
    if not is_dtensor(target):
        return whole
    from torch.distributed.tensor import DTensor

    local, first = rows_of(target)
    rows = whole[first : first + len(local)].to(local.device)
    form: dict[str, Any] = {"shape": target.shape, "stride": target.stride(), "run_check": False}
    return DTensor.from_local(rows, target.device_mesh, target.placements, **form)
