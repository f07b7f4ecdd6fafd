"""How close a step is to what the machine can do.

Owns: the figures of all ranks together, and what follows from them and the time of a step. Does
not own: any measurement (`profiled_steps.py`), or the words (`report.py`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank computes in a step and what it could; means over ranks."""

    operations: float
    """Floating-point operations of a step on one rank."""
    operations_each: list[list[int]]
    """The operations of each counted step, on each rank."""
    operations_by_kind: dict[str, float]
    """The share of each kind."""
    not_counted: list[str]
    """Operators without a formula, except pointwise ones."""
    per_s: float
    """Operations per second, over the time of a whole step."""
    dtype: str
    limit_per_s: float
    """The rate of a large matrix product in that precision, measured in the same run."""
    limit_side: int
    mfu: float
    """`per_s` over `limit_per_s`."""
    update_bytes: float
    bytes_per_s: float
    """The speed of a large copy, reads and writes added up."""
    update_s: float
    """The shortest time of an update of weights, optimizer and averages at that speed."""
    peak_bytes: int
    """The peak of the rank that needs the most."""
    memory_bytes: int
    busy: float | None
    """The share of a traced step in which the GPU was busy; None on a CPU."""
    traced_step_s: float
    kinds: dict[str, float]
    """Shares of the time of all kernels (on a CPU, operators), largest first."""
    names: list[dict[str, Any]]
    """The first rank's kernels by name, longest first."""

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Any]], step_s: float) -> "Work":
        """Put the figures of all ranks together."""

        def average(name: str) -> float:
            return mean(float(rank[name]) for rank in ranks)

        first = ranks[0]
        operations = mean(mean(rank["operations"]) for rank in ranks)
        limit, moved, bytes_per_s = (
            average(name) for name in ("limit_per_s", "update_bytes", "bytes_per_s")
        )
        busy = [rank["busy_s"] / rank["traced_step_s"] for rank in ranks if rank["busy_s"]]
        return cls(
            operations=operations,
            operations_each=[rank["operations"] for rank in ranks],
            operations_by_kind=_shares(rank["operations_by_kind"] for rank in ranks),
            not_counted=sorted({name for rank in ranks for name in rank["not_counted"]}),
            per_s=operations / step_s,
            dtype=first["dtype"],
            limit_per_s=limit,
            limit_side=first["limit_side"],
            mfu=operations / step_s / limit,
            update_bytes=moved,
            bytes_per_s=bytes_per_s,
            update_s=moved / bytes_per_s,
            peak_bytes=max(rank["peak_bytes"] for rank in ranks),
            memory_bytes=first["memory_bytes"],
            busy=min(1.0, mean(busy)) if busy else None,
            traced_step_s=average("traced_step_s"),
            kinds=_shares(rank["kinds_s"] for rank in ranks),
            names=first["names"],
        )


def _shares(parts: Any) -> dict[str, float]:
    """Return the share of each name, largest first."""
    summed: Counter[str] = Counter()
    for part in parts:
        summed.update(part)
    whole = sum(summed.values()) or 1
    return {name: amount / whole for name, amount in summed.most_common()}
