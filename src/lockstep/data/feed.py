"""Copy a batch to the device from page-locked memory, without waiting for the copy.

Owns: the copy. Does not own: when to copy. The trainer asks for the next batch while the device
computes the current one.
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.nested import map_tensors


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`; containers keep their types.

    The copy is queued on the device's stream. torch's host allocator keeps a page-locked source
    until the copy is done.
    """
    if device.type == "cpu":
        return batch
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def pin(batch: Any) -> Any:
    """Return `batch` with its tensors in page-locked memory."""
    return map_tensors(Tensor.pin_memory, batch)
