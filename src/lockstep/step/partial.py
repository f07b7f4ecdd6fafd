"""Check the result of a loss and lay it out as one row of sums.

Owns: accepting a plain mean or a `PartialLoss`, and the layout of a row. Does not own: adding up
rows (`reduction.py`).
"""

import functools
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lockstep.data.batch import MicroBatch
from lockstep.errors import ConfigError, shown
from lockstep.task import PartialLoss

PARTS = "parts of the loss"
WHERE_EMPTY = "with sum 0 and weight 0 where one is empty"


def as_partial(
    result: PartialLoss | Tensor, micro_batch: MicroBatch, is_averaged: bool = False
) -> PartialLoss:
    """Return the loss with its weight; the weight of a plain mean is its number of samples.

    A padding micro-batch gets weight 0 but keeps its graph, so that its rank takes part in the
    gradient exchange.
    """
    if isinstance(result, Tensor):
        num_samples = 1 if is_averaged else len(micro_batch.ids)
        result = PartialLoss(result * num_samples, float(num_samples))
    if micro_batch.counts:
        return result
    parts = {name: (value * 0, weight * 0) for name, (value, weight) in result.parts.items()}
    return PartialLoss(result.loss_sum * 0, result.weight * 0, parts)


def names_of(part: PartialLoss, before: list[str] | None = None) -> list[str]:
    """Return the names of a loss's parts, which must be those of the micro-batch `before`.

    Raises:
        ConfigError: the names differ, so rows cannot be added up; or `part` is not a loss, or one
            of its numbers is not one.
    """
    loss: Any = getattr(part, "loss_sum", part)
    is_real = isinstance(loss, Tensor) and not loss.is_complex()
    if not is_real or loss.numel() != 1 or not loss.requires_grad:
        problem = f"the loss of a micro-batch is {loss!r:.80}, not one number with a gradient"
        raise ConfigError(
            problem, "return a mean or a PartialLoss; if nothing counts, return 0 * output.sum()"
        )
    if not _is_number(part.weight):
        raise ConfigError(
            f"the weight of the loss is {shown(part.weight)}, not one number",
            "return the number of units in loss_sum: weight=mask.sum()",
        )
    for name, pair in part.parts.items():
        _check_part(name, pair)
    return same_names(sorted(part.parts), before, PARTS)


def _check_part(name: Any, pair: Any) -> None:
    if not isinstance(name, str) or name == "loss":
        why = "as the loss itself is" if name == "loss" else "which is not a string"
        raise ConfigError(
            f"a part of the loss is named {shown(name)}, {why}",
            "give the part another name: parts={'cross_entropy': (sum, weight)}",
        )
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(_is_number, pair))):
        raise ConfigError(
            f"part {name!r} of the loss is {shown(pair)}, not a pair of numbers",
            "return (sum, weight) for each part: (error.sum(), error.numel())",
        )


def _is_number(value: Any) -> bool:
    """Return whether a value is one real number, without waiting for the device."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def same_names(names: list[str], before: list[str] | None, kind: str) -> list[str]:
    """Return the names of a micro-batch's parts or terms; refuse others than those `before`."""
    if before is not None and names != before:
        listed = " and ".join(", ".join(one) or "none" for one in (before, names))
        problem = f"two micro-batches of a step have different {kind}: {listed}"
        raise ConfigError(problem, f"return the same {kind} for each, {WHERE_EMPTY}")
    return names


def row_of(part: PartialLoss, names: list[str]) -> Tensor:
    """Return one row: loss, weight, then the sum and weight of each part, in order of `names`."""
    pairs = [(part.loss_sum, part.weight), *(part.parts[name] for name in names)]
    return torch.stack([number(n, part.loss_sum.device) for pair in pairs for n in pair])


def number(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a number as float64 on the device, without waiting for it."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64).reshape(())
    return constant(value, device)


@functools.lru_cache(maxsize=256)
def constant(value: float, device: torch.device) -> Tensor:
    """Return a number as a tensor that must not be changed.

    Most numbers are the size of a batch. The cache saves a copy to the GPU in every step.
    """
    return torch.full((), value, dtype=torch.float64, device=device)
