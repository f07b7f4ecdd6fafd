"""The terms of a loss that have units of their own: what `Task.weights` returned, and its use.

Owns: checking the result of `weights`, and what a loss reads of the step's totals. Does not own:
adding up over ranks, or the loss, which divides its terms itself.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
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
            "return the number of units of each term by its name; {} for a loss without terms",
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


class Totals(Mapping[str, Tensor]):
    """The units of each term in the whole step, never 0; remembers which of them were read.

    Args:
        counted: The units in each micro-batch of this rank.
        totals: Their sum over the micro-batches of all ranks.
    """

    def __init__(self, names: list[str], counted: Sequence[Tensor], totals: Tensor) -> None:
        self._names = names
        self._counted = counted
        # A term without units in the whole step has sum 0; divide it by 1.
        divisors = torch.where(totals == 0, 1.0, totals)
        self._totals: dict[str, Tensor] = dict(zip(names, divisors, strict=True))
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        """Return the step's units of a term."""
        if name not in self:
            raise ConfigError(
                f"the loss reads context.weights[{name!r}]; weights() returned "
                f"{', '.join(self._names)}",
                f"return {name!r} from weights(), or correct the name",
            )
        self._read.add(name)
        return self._totals[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the step's units of a term, or `default`."""
        return self[name] if name in self._totals else default

    def __contains__(self, name: object) -> bool:
        """Return whether `weights` has counted a term."""
        return name in self._totals

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the terms."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of terms."""
        return len(self._names)

    def check_used(self, parts: list[str]) -> None:
        """Refuse a term that has units here and that the losses neither read nor list as a part.

        This waits for the device.
        """
        unused = [name for name in self._names if name not in {*self._read, *parts}]
        units = torch.stack(tuple(self._counted)).sum(dim=0).tolist() if unused else []
        has_units = {name for name, num in zip(self._names, units, strict=False) if num}
        for name in has_units.intersection(unused):
            raise ConfigError(
                f"weights() counts {name!r}, and the loss has no such term: it neither reads "
                f"context.weights[{name!r}] nor returns such a part",
                "divide the term by it, or leave it out of weights() in steps without the term",
            )
