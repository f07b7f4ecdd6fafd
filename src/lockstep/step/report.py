"""The report of a step: sums over its micro-batches, reduced over ranks.

Owns: the data class. Does not own: adding up steps (`run/progress.py`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepReport:
    """The numbers of a step, reduced over ranks and on the device: reading one costs a sync."""

    sums: Tensor
    """Loss, weight, then the sum and weight of each part."""
    names: list[str]
    """The names of the parts."""
    grad_norm: Tensor
    local_rows: list[Tensor]
    """The rows of this rank's micro-batches; `sums` is the sum of all ranks' rows."""

    @property
    def loss_sum(self) -> Tensor:
        """Return the loss, summed over all units of the step."""
        return self.sums[0]

    @property
    def weight(self) -> Tensor:
        """Return the number of units."""
        return self.sums[1]

    @property
    def parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the (sum, weight) pair of each named part of the loss."""
        pairs = zip(self.sums[2::2], self.sums[3::2], strict=True)
        return dict(zip(self.names, pairs, strict=True))

    @property
    def loss(self) -> Tensor:
        """Return the mean loss over all units of the step."""
        return self.loss_sum / self.weight

    @property
    def finite(self) -> Tensor:
        """Return whether the step counts: finite loss and gradient, and no negative weight.

        It is the same on every rank, because all numbers are reduced.
        """
        return torch.isfinite(self.loss_sum + self.grad_norm)
