"""What autocast multiplies in, for tensors that several products share.

Autocast keeps the weights that it casts, but casts an activation anew for each product that it
enters: as many copies forward, and as many of the gradient backward.
"""

import torch
from torch import Tensor


def lowered(x: Tensor) -> Tensor:
    """Return `x` as products take it: under autocast in its precision, else as it is.

    >>> lowered(torch.ones(1)).dtype
    torch.float32
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     lowered(torch.ones(1)).dtype
    torch.bfloat16
    """
    kind = x.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if casts and x.dtype == torch.float32 else x
