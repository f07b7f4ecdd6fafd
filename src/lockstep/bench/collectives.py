"""All-reduces of many sizes between the processes of this machine.

Owns: starting them, and the table. Does not own: the fit (`link.py`).
"""

from dataclasses import asdict, dataclass
from typing import Any

from lockstep.bench.link import Link, fit_link

LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Collectives:
    """What all-reduces took."""

    ranks: int
    backend: str
    device: str
    times: list[tuple[int, float]]
    link: Link

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Lay it out as a table."""
        lines = [f"  {'bytes':>12}{'ms':>12}{'GB/s':>12}{'fit ms':>12}"]
        for size, seconds in self.times:
            carried = 2 * (self.ranks - 1) / self.ranks * size / seconds / 1e9
            fit_ms = 1e3 * self.link.ring_s(size, self.ranks)
            lines.append(f"  {size:>12}{1e3 * seconds:>12.3f}{carried:>12.3f}{fit_ms:>12.3f}")
        link = self.link
        return [
            *lines,
            f"fit: {1e6 * link.latency_s:.3g} us a message, {link.bytes_per_s / 1e9:.3g} GB/s each "
            f"way, {100 * link.spread:.0f} % off ({self.ranks} x {self.device}, {self.backend})",
        ]


def measure_collectives(ranks: int) -> Collectives:
    """Time all-reduces between so many processes, a GPU each if there are any."""
    from lockstep.harness.forked import run_ranks

    found = run_ranks(ranks, _be_measured, timeout_s=LIMIT_S)
    backend, device, _ = found[0]
    all_times = zip(*(times for _, _, times in found), strict=True)
    slowest = [(same[0][0], max(seconds for _, seconds in same)) for same in all_times]
    return Collectives(ranks, backend, device, slowest, fit_link(slowest, ranks))


def _be_measured() -> tuple[str, str, list[tuple[int, float]]]:
    from lockstep.bench.probe import time_sizes
    from lockstep.dist.world import World
    from lockstep.observe.pace import Clock

    with World.enter() as world:
        return str(world.backend), world.device.type, time_sizes(world, Clock(world.device))
