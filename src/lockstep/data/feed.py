"""To the device, from page-locked memory, without waiting for the copy.

Owns: how a batch travels. Does not own: when; the trainer asks for the next
batch while the device is busy with the present one, so the host never waits.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`; containers keep their types.

    The copy is queued on the device's stream. A page-locked source stays alive
    until the copy is done: torch's host allocator holds it back.
    """
    if device.type == "cpu":
        return batch
    return _map(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pin(batch: Any) -> Any:
    """Return `batch` with its tensors in page-locked memory."""
    return _map(batch, Tensor.pin_memory)


def _map(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        moved = copy.copy(tree)  # whatever kind of dict it is
        moved.update((key, _map(value, change)) for key, value in tree.items())
        return moved
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(value, change) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_map(value, change) for value in tree)
    return tree
