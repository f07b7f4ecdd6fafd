"""To the device, from page-locked memory, without waiting for the copy.

Owns: how a batch travels. Does not own: when; the trainer asks for the next
batch while the device is busy with the present one, so the host never waits.
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.nested import map_tensors


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`; containers keep their types.

    The copy is queued on the device's stream. A page-locked source stays alive
    until the copy is done: torch's host allocator holds it back.
    """
    if device.type == "cpu":
        return batch
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def pin(batch: Any) -> Any:
    """Return `batch` with its tensors in page-locked memory."""
    return map_tensors(Tensor.pin_memory, batch)
