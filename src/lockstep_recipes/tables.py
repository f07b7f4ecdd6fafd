"""Tables that a loss looks things up in, beside the batch: each travels there once.

`tensor.to(device)` waits until the device has done all it was asked to do before. In a loss that
is a pause in every step; what differs from step to step goes by `lockstep.data.feed.to_device`.
"""

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def placed(table: Tensor, device: torch.device) -> Tensor:
    """Return `table` on `device`. It is known by itself, not by its numbers: they must not change.

    >>> table = torch.arange(3)
    >>> placed(table, torch.device("cpu")) is table
    True
    """
    return table.to(device, non_blocking=True)


def beside(table: Tensor, like: Tensor) -> Tensor:
    """Return `table` on the device of `like`, in its precision."""
    return placed(table, like.device).to(like.dtype)
