"""The terms of a loss that have units of their own: check what `Task.weights` returned.

Owns: the names and the numbers of units. Does not own: adding them up over ranks, or the loss,
which divides its terms itself.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError, shown
from lockstep.step.partial import constant, number, same_names

TERMS = "terms from weights()"


def check_counted(counted: Any, before: list[str] | None = None) -> list[str]:
    """Return the names of the terms, which must be those of the micro-batch `before`.

    Raises:
        ConfigError: the names differ; or `counted` is no mapping.
    """
    if not isinstance(counted, Mapping):
        raise ConfigError(
            f"weights() returned {shown(counted)}, not a mapping",
            "return a dict with the number of units of each term, or {} for a loss without terms",
        )
    return same_names(sorted(counted), before, TERMS)


def units_row(counted: Mapping[str, Any], names: list[str], device: torch.device) -> Tensor:
    """Return one row: the units of each term, in order of `names`."""
    return torch.stack([_units(counted[name], name, device) for name in names] or [torch.zeros(0)])


def _units(value: Any, name: str, device: torch.device) -> Tensor:
    """Return a number of units as float64 on the device, without waiting for it.

    A number on the GPU cannot be refused without waiting. One that is not finite or is negative
    becomes NaN there, which leaves the weights unchanged on every rank as a loss of NaN does.

    Raises:
        ConfigError: the value is no number of units.
    """
    is_tensor = isinstance(value, Tensor)
    if is_tensor and value.numel() == 1 and not value.is_complex() and not value.is_cpu:
        units = number(value, device)
        return torch.where((units >= 0) & units.isfinite(), units, math.nan)
    try:
        on_host = float(value.detach() if is_tensor else value)
    except (TypeError, ValueError, RuntimeError):  # several numbers, complex, or none
        on_host = math.nan
        said = f"{value!r:.80}"
    else:
        said = f"{on_host:g}"
    if not 0 <= on_host < math.inf:
        raise ConfigError(
            f"weights(): {name!r} is {said}, not a number of units",
            "return one finite number of 0 or more for each term of the loss",
        )
    return constant(on_host, device)
