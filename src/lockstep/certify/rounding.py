"""What rounding explains: the tolerance of parity, measured by summing in another order.

Owns: how large a tolerance follows from what was measured. Does not own: the run that sums in
another order (`callback.py`), or comparing it (`compare.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.certify.compare import Comparison, Difference

MARGIN = 16.0
"""How many times the rounding error of one order of summation another order may have."""
FLOOR = 1e-5
"""The smallest tolerance."""
FLOOR_REDUCED = 1e-2
"""The smallest tolerance in bf16 or fp16 if samples of ranks are combined, because matrix products
then have other shapes; and if gradients are rounded between ranks, which one rank cannot show."""
CEILING = 0.05
"""The largest tolerance."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """The relative differences that rounding may explain."""

    numbers: dict[str, float]
    """Of losses, their sums and gradient norms."""
    weights: float
    """Of the final weights."""
    same_weights: float
    """Of the loss of a micro-batch while the weights of the model, and of other networks that the
    task holds, are the same bits: 0, unless another order of summation changed it, too."""

    @classmethod
    def measured(cls, compared: Comparison, apart: float, plan: Mapping[str, Any]) -> "Rounding":
        """Return what a run with another order of summation shows.

        Args:
            compared: The comparison with the run in the usual order.
            apart: The distance of their final weights.
            plan: What the trace says of the run's batches.
        """
        is_reduced = plan["rounded"] or (plan["joint"] and plan["reduced"])
        floor = FLOOR_REDUCED if is_reduced else FLOOR

        def allowed(difference: float) -> float:
            return min(max(MARGIN * difference, floor), CEILING)

        at_same_weights = [
            one.relative or 0.0
            for one in compared.measured
            if one.stage == "loss" and one.same_weights and one.place is not None
        ]
        return cls(
            {name: allowed(compared.spread(name)) for name in ("loss", "sums", "grad_norm")},
            allowed(apart),
            allowed(max(at_same_weights)) if at_same_weights else 0.0,
        )

    def allows(self, one: Difference, hints: Sequence[Difference]) -> float:
        """Return the largest relative difference that two numbers may have."""
        if one.stage != "loss" or not one.same_weights or one.place is None:
            return self.numbers[one.stage]
        seen = {hint.stage for hint in hints if hint.step <= one.step}
        if "task" in seen:
            return self.numbers["loss"]
        return 0.0 if seen - {"built"} else self.same_weights

    def to_json(self) -> dict[str, float]:
        """Return it as plain numbers."""
        return {**self.numbers, "weights": self.weights}
