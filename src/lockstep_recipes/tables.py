"""Lookup tables of a loss, copied to the batch's device once and cached there.

`tensor.to(device)` waits for all work queued on the device: inside a loss, a pause in every step.
Tensors that change from step to step go through `lockstep.data.feed.to_device` instead.
"""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def placed(table: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return `table` on `device`. The cache goes by identity: the values must never change.

    >>> table = torch.arange(3)
    >>> placed(table, torch.device("cpu")) is table
    True
    """
    return table.to(device, dtype, non_blocking=True)


def beside(table: Tensor, like: Tensor) -> Tensor:
    """Return `table` on the device of `like`, in its dtype."""
    return placed(table, like.device, like.dtype)
