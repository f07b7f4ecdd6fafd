"""What a loss returned, checked and laid out as one row of sums.

Owns: taking a plain mean or a `PartialLoss`, and the layout of its row. Does not own: adding rows
up (`reduction.py`).
"""

import functools
from typing import Any

import torch
from torch import Tensor

from lockstep.data.batch import MicroBatch
from lockstep.errors import ConfigError
from lockstep.task import PartialLoss


def as_partial(
    result: PartialLoss | Tensor, micro_batch: MicroBatch, is_averaged: bool = False
) -> PartialLoss:
    """Return the loss with its weight; a plain mean weighs as much as it has samples.

    A borrowed micro-batch keeps its graph, so that its rank meets the others in
    the reduce, and counts for nothing.
    """
    if isinstance(result, Tensor):
        num_samples = 1 if is_averaged else len(micro_batch.ids)
        result = PartialLoss(result * num_samples, float(num_samples))
    if micro_batch.counts:
        return result
    parts = {name: (value * 0, weight * 0) for name, (value, weight) in result.parts.items()}
    return PartialLoss(result.loss_sum * 0, result.weight * 0, parts)


def names_of(part: PartialLoss, before: list[str] | None = None) -> list[str]:
    """Return the names of a loss's parts; those of the micro-batch `before` must be the same.

    Raises:
        ConfigError: they are not, and could not be added up; or it is no loss.
    """
    loss: Any = getattr(part, "loss_sum", part)
    is_real = isinstance(loss, Tensor) and not loss.is_complex()
    if not is_real or loss.numel() != 1 or not loss.requires_grad:
        problem = f"the loss of a micro-batch is {loss!r:.80}, not one number with a gradient"
        raise ConfigError(
            problem, "return a mean or a PartialLoss; where nothing counts, 0 * output.sum()"
        )
    names = sorted(part.parts)
    if before is not None and names != before:
        said = " and ".join(", ".join(one) or "none" for one in (before, names))
        problem = f"two micro-batches of a step have different parts of the loss: {said}"
        raise ConfigError(
            problem, "return the same parts for each, with sum 0 and weight 0 where one is empty"
        )
    return names


def row_of(part: PartialLoss, names: list[str]) -> Tensor:
    """Lay out sums and weights as one row: loss, weight, then each part's pair, by name."""
    pairs = [(part.loss_sum, part.weight), *(part.parts[name] for name in names)]
    return torch.stack([number(n, part.loss_sum.device) for pair in pairs for n in pair])


def number(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a number as float64 on the device, without waiting for it."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64).reshape(())
    return constant(value, device)


@functools.lru_cache(maxsize=256)
def constant(value: float, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a plain number; most are the size of a batch, and made once. Not to be changed."""
    return torch.full((), value, dtype=dtype, device=device)
