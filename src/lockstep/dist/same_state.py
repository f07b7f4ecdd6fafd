"""Check that ranks have the same model and optimizer, and name the first difference.

Owns: comparing parameters, trained names and optimizer settings between ranks, and the messages.
Does not own: when to compare. A run does so when it is built, after its first step and at every
save; in a custom loop `CheckpointStore.save_from` does.

Ranks first compare a hash. They exchange details only if it differs.
"""

from collections.abc import Container, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.dist.agreement import first_difference
from lockstep.dist.collectives import Collectives
from lockstep.dist.fsdp import is_dtensor
from lockstep.errors import ConfigError

SAME_MODEL = (
    "build the same model on every rank: its layers and requires_grad must not depend on the rank "
    "or the clock"
)
SAME_OPTIMIZER = (
    "build the same optimizer on every rank, and change its settings on every rank by the same "
    "values: average a loss over ranks (world.all_sum) before passing it to a scheduler"
)
SAME_WEIGHTS = (
    "change weights by the same values on every rank: average over ranks (world.all_sum) what is "
    "written to a parameter outside of optimizer.step(), or register it as a buffer; if nothing "
    "writes to it, run all ranks on the same kind of hardware"
)
REGISTER = "register it in the module that build_model returns"

CHUNK_WORDS = 2**20
"""The number of integers to multiply at a time: 8 MB on the device."""


def check_same_model(model: nn.Module, world: Collectives) -> None:
    """Refuse ranks whose models differ in their parameters or trained parameters. Collective.

    Raises:
        ConfigError: on all ranks, with the first parameter that differs.
    """
    own = {
        f"parameter {name}": f"{str(p.dtype).removeprefix('torch.')} of shape {_shape(p)}, "
        + ("trained" if p.requires_grad else "frozen")
        for name, p in model.named_parameters()
    }
    _refuse_difference("built different models", own, world, SAME_MODEL)


def _shape(parameter: Tensor) -> str:
    is_lazy = nn.parameter.is_lazy(parameter)
    return "not known yet" if is_lazy else str(tuple(parameter.shape))


def check_same_optimizer(model: nn.Module, optimizer: Optimizer, world: Collectives) -> None:
    """Refuse ranks whose parameter groups or their settings differ. Collective.

    Raises:
        ConfigError: on all ranks, with the first parameter or setting that differs.
    """
    own = _settings({"": optimizer}, {"": model})
    _refuse_difference("have different optimizers", own, world, SAME_OPTIMIZER)


def check_registered(optimizer: Optimizer, known: Container[int], of: str, remedy: str) -> None:
    """Refuse an optimizer that holds a tensor whose `id` is not `known`.

    Args:
        optimizer: The optimizer to check.
        known: The ids of the parameters that are averaged over ranks and saved.
        of: The owner of these parameters, for the message.
        remedy: The remedy, for the message.

    Raises:
        ConfigError: with the parameter group and the shape.
    """
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ConfigError(
                    f"group {number} of the optimizer holds a tensor of shape "
                    f"{tuple(parameter.shape)} that is not a parameter of {of}: it would be "
                    "neither averaged over ranks nor saved",
                    remedy,
                )


def weights_difference(
    modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], world: Collectives
) -> str:
    """Describe where settings or weights differ between ranks; "" if nowhere. Collective.

    Weights are compared bit by bit, through a checksum that is computed on the device. Sharded
    parameters are skipped, because each rank has different rows. Buffers may differ.
    """
    if world.size == 1:
        return ""
    settings = _settings(optimizers, modules)  # compared first: they may be why weights differ
    return first_difference({**settings, **_checksums(modules)}, world, _different_entry)


def check_same_weights(
    modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], world: Collectives
) -> None:
    """Refuse ranks whose weights or optimizer settings differ. Collective.

    Raises:
        ConfigError: on all ranks, with the first setting or parameter that differs.
    """
    if difference := weights_difference(modules, optimizers, world):
        raise different_weights(difference)


def different_weights(difference: str, what_then: str = "") -> ConfigError:
    """Return the error for a result of `weights_difference`, the same on all ranks."""
    remedy = SAME_WEIGHTS if difference.startswith("parameter ") else SAME_OPTIMIZER
    error = ConfigError(f"ranks have diverged: {difference}{what_then}", remedy)
    error.is_shared = True
    return error


def checksum(value: Tensor) -> Tensor:
    """Return a number that changes with any bit of a tensor, without waiting for the device.

    The bytes are read as 64-bit integers. Each is multiplied by an odd number that depends on its
    position, and the products are added modulo 2**64. Integer sums do not depend on their order,
    and a change in a single integer always changes the sum.
    """
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()  # integers must be aligned
    raw = flat.view(torch.uint8)
    num_whole = len(raw) // 8 * 8
    words = raw[:num_whole].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, piece in enumerate(torch.split(words, CHUNK_WORDS) if num_whole else ()):
        total = total + (piece * _multipliers(flat.device)[: len(piece)]).sum() * (2 * number + 1)
    if rest := len(raw) - num_whole:
        last = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        last[:rest] = raw[num_whole:]
        total = total + last.view(torch.int64)[0] * -7046029254386353131
    return total


def checksums(named: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the checksum of each tensor; waits for each device once."""
    sums = {name: checksum(value) for name, value in named.items()}
    found: dict[str, int] = {}
    for device in {value.device for value in sums.values()}:
        names = [name for name, value in sums.items() if value.device == device]
        numbers = torch.stack([sums[name] for name in names]).tolist()
        found.update(zip(names, numbers, strict=True))
    return found


@lru_cache(maxsize=1)
def _multipliers(device: torch.device) -> Tensor:
    """Return pseudo-random odd numbers, the same on every rank."""
    numbers = torch.arange(1, CHUNK_WORDS + 1, device=device) * -7046029254386353131
    numbers = (numbers ^ (numbers >> 32)) * -4658895280553007687
    return (numbers ^ (numbers >> 29)) | 1


def _checksums(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the checksum of every unsharded parameter by name; waits for the device once."""
    found: dict[str, Tensor] = {}
    for above, module in modules.items():
        for name, parameter in module.named_parameters():
            is_plain = parameter.layout == torch.strided and not parameter.is_meta
            is_known = not nn.parameter.is_lazy(parameter)
            if is_known and is_plain and not is_dtensor(parameter):
                found[f"parameter {_dotted(above, name)}"] = parameter
    return {name: f"checksum {number % 2**64:016x}" for name, number in checksums(found).items()}


def _settings(
    optimizers: Mapping[str, Optimizer], modules: Mapping[str, nn.Module]
) -> dict[str, str]:
    """Return every plain setting of every parameter group, and the names of its parameters."""
    names = {
        id(p): _dotted(above, name)
        for above, module in modules.items()
        for name, p in module.named_parameters()
    }
    found: dict[str, str] = {}
    for above, optimizer in optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            place = f"group {number} of {above or 'the optimizer'}"
            found |= {
                f"{setting} of {place}": shown
                for setting, value in group.items()
                if setting not in ("params", "param_names") and (shown := _plain(value)) is not None
            }
            for index, p in enumerate(group["params"]):
                called = names.get(id(p), f"a tensor of shape {tuple(p.shape)}")
                found[f"number {index} of {place}"] = called
    return found


def _plain(value: Any) -> str | None:
    """Return a setting as exact text, or None if it is not a plain value."""
    if isinstance(value, Tensor):
        value = value.tolist() if value.numel() <= 16 and not is_dtensor(value) else None
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    if isinstance(value, list | tuple):
        shown = [_plain(part) for part in value]
        return None if None in shown else f"({', '.join(map(str, shown))})"
    return None


def _dotted(above: str, name: str) -> str:
    return f"{above}.{name}" if above else name


def _refuse_difference(what: str, own: Mapping[str, str], world: Collectives, remedy: str) -> None:
    if difference := first_difference(own, world, _different_entry):
        error = ConfigError(f"ranks {what}: {difference}", remedy)
        error.is_shared = True
        raise error


def _different_entry(first: Mapping[str, str], own: Mapping[str, str], rank: int) -> str:
    for name in {**first, **own}:
        if name not in own:
            return f"{name} ({first[name]}) is on rank 0 and not on rank {rank}"
        if name not in first:
            return f"{name} ({own[name]}) is on rank {rank} and not on rank 0"
        if first[name] != own[name]:
            return f"{name} is {first[name]} on rank 0 and {own[name]} on rank {rank}"
    if list(first) != list(own):
        return f"rank {rank} has the same entries as rank 0 in another order"
    return ""
