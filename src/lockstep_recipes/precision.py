"""Cast an activation to the autocast dtype once, where several matrix products share it.

Autocast caches the weights that it casts, but casts an activation again for every product that
reads it: one copy per product forward, and one of the gradient backward.
"""

import torch
from torch import Tensor


def lowered(x: Tensor) -> Tensor:
    """Return `x` in the dtype that matrix products use here: autocast's, if it is on.

    >>> lowered(torch.ones(1)).dtype
    torch.float32
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     lowered(torch.ones(1)).dtype
    torch.bfloat16
    """
    kind = x.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if casts and x.dtype == torch.float32 else x
