"""How near a step is to what the machine can do.

Owns: the numbers of all ranks together, and what follows from them and the time of a step. Does
not own: any measurement (`look.py`), or the words (`report.py`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank computes in a step, the mean of all ranks, against what it could."""

    operations: float
    """Floating-point operations of a step on one rank."""
    operations_each: list[list[int]]
    """Of each step that was counted, on each rank."""
    operations_by_kind: dict[str, float]
    """Shares of them."""
    not_counted: list[str]
    """Operators that were met and have no rule, pointwise ones apart."""
    per_s: float
    """Operations a second, over the time of a whole step."""
    dtype: str
    limit_per_s: float
    """What a large matrix product in that precision reaches, measured in the same run."""
    limit_side: int
    mfu: float
    """The one over the other."""
    update_bytes: float
    bytes_per_s: float
    """What a large copy reads and writes."""
    update_s: float
    """What an update of weights, optimizer and averages takes at least."""
    peak_bytes: int
    """Of the rank that needs the most."""
    memory_bytes: int
    busy: float | None
    """The share of a traced step in which the GPU had something to do."""
    traced_step_s: float
    kinds: dict[str, float]
    """Shares of the time of all kernels (on a CPU, operators), the largest first."""
    names: list[dict[str, Any]]
    """The first rank's kernels by name, the longest first."""

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Any]], step_s: float) -> "Work":
        """Put together what the ranks found."""

        def middle(name: str) -> float:
            return mean(float(rank[name]) for rank in ranks)

        first = ranks[0]
        operations = mean(mean(rank["operations"]) for rank in ranks)
        limit, moved, bytes_per_s = (
            middle(name) for name in ("limit_per_s", "update_bytes", "bytes_per_s")
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
            traced_step_s=middle("traced_step_s"),
            kinds=_shares(rank["kinds_s"] for rank in ranks),
            names=first["names"],
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def _shares(parts: Any) -> dict[str, float]:
    """Return what part of the whole each name has, the largest first."""
    summed: Counter[str] = Counter()
    for part in parts:
        summed.update(part)
    whole = sum(summed.values()) or 1
    return {name: amount / whole for name, amount in summed.most_common()}
