"""Latency and bandwidth of a link between ranks, and the time of an all-reduce over it.

Owns: the time of an all-reduce by ring and by tree, the fit of a link to measured times, and the
figures of well-known links. Does not own: any measurement, or what overlaps with an all-reduce.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import ConfigError, closest

REACHED = 0.8
"""The assumed share of a link's nominal bandwidth that is reached."""
ASSUMED_SPREAD = 0.2
"""The assumed relative error of the times of a link that was not measured."""


@dataclass(frozen=True, slots=True)
class Link:
    """The link from each rank to the next."""

    name: str
    latency_s: float
    bytes_per_s: float
    """Bandwidth of each rank, in each direction."""
    spread: float = 0.0
    """Relative error of the times."""
    ring_only: bool = False
    """Whether only the ring is used, as by gloo; NCCL picks the faster of ring and tree."""

    def ring_s(self, size_bytes: float, ranks: int) -> float:
        """Return the time of an all-reduce by ring: 2 (N - 1) rounds of 1/N of the bytes each.

        >>> Link("", 0.001, 1e6).ring_s(1e6, 4)
        1.506
        """
        rounds = 2 * (ranks - 1)
        return rounds * (self.latency_s + size_bytes / ranks / self.bytes_per_s)

    def tree_s(self, size_bytes: float, ranks: int) -> float:
        """Return the time of an all-reduce by two pipelined trees, each with half of the bytes.

        >>> Link("", 0.001, 1e6).tree_s(1e6, 4)
        2.004
        """
        if ranks == 1:
            return 0.0
        depth = math.ceil(math.log2(ranks))
        return 2 * depth * self.latency_s + 2 * size_bytes / self.bytes_per_s

    def all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        """Return the time of an all-reduce by the faster way that the backend has."""
        ring_s = self.ring_s(size_bytes, ranks)
        return ring_s if self.ring_only else min(ring_s, self.tree_s(size_bytes, ranks))

    def __str__(self) -> str:
        return f"{self.name}: {self.bytes_per_s / 1e9:.3g} GB/s, {1e6 * self.latency_s:.3g} us"


def _well_known(name: str, nominal_gb_per_s: float, latency_us: float) -> Link:
    return Link(name, latency_us * 1e-6, REACHED * nominal_gb_per_s * 1e9, ASSUMED_SPREAD)


INTERCONNECTS = {
    link.name: link
    for link in (
        _well_known("pcie4", 32.0, 5.0),  # x16, 16 GT/s a lane, between neighbours
        _well_known("nvlink4", 450.0, 3.0),  # 18 links of 25 GB/s, inside one NVLink domain
        _well_known("ethernet100", 12.5, 30.0),  # 100 Gb/s to every GPU, TCP
        _well_known("ethernet400", 50.0, 10.0),  # 400 Gb/s to every GPU, RDMA
        _well_known("infiniband-ndr", 50.0, 5.0),  # 400 Gb/s to every GPU
    )
}
"""From the nominal GB/s of a GPU in each direction, and the microseconds of a message."""

BYTES_PER_S = {"GB": 1e9, "MB": 1e6, "KB": 1e3, "Gb": 1e9 / 8, "Mb": 1e6 / 8}
NUMBER = r" *(\d+(?:\.\d*)?(?:e[+-]?\d+)?) *"
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def choose_link(interconnect: str, link: str) -> Link | None:
    """Return the link given by name or by numbers, or None.

    >>> print(choose_link("", "10Gb/s,50us"))
    10Gb/s,50us: 1.25 GB/s, 50 us
    """
    if interconnect and link:
        raise ConfigError("--interconnect and --link both name the link", "pass one of them")
    if interconnect:
        if interconnect not in INTERCONNECTS:
            near = closest(interconnect, INTERCONNECTS)
            known = near or f"one of {', '.join(INTERCONNECTS)}; or --link 12.5GB/s,10us"
            raise ConfigError(f"--interconnect {interconnect} is not known", f"pass {known}")
        return INTERCONNECTS[interconnect]
    if not link:
        return None
    match = re.fullmatch(rf"{NUMBER}([GMK]B|[GM]b)(?:it)?(?:/s|ps)?,{NUMBER}(s|ms|us)", link)
    bytes_per_s = float(match[1]) * BYTES_PER_S[match[2]] if match else 0.0
    if match is None or bytes_per_s <= 0:
        raise ConfigError(
            f"--link {link} is not a bandwidth and a latency",
            "pass both with units: --link 12.5GB/s,10us (GB: bytes, Gb: bits)",
        )
    return Link(link, float(match[3]) * SECONDS[match[4]], bytes_per_s)


def fit_link(times: Sequence[tuple[float, float]], ranks: int, name: str = "measured") -> Link:
    """Fit a link to pairs of bytes and seconds, the times of all-reduces by ring.

    The fit minimises the relative error, so every size counts the same. Its root mean square is
    the link's spread.
    """
    import numpy as np

    sizes, seconds = np.array(times, dtype=float).T
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    (fixed_s, per_byte_s), *_ = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)
    if fixed_s < 0:
        fixed_s, per_byte_s = 0.0, float(rows[:, 1].sum() / np.square(rows[:, 1]).sum())
    if per_byte_s <= 0:
        raise ConfigError(
            f"the times of {len(times)} message sizes do not grow with the size",
            "run it again when the machine is idle",
        )
    errors = rows @ np.array([fixed_s, per_byte_s]) - 1
    spread = float(np.sqrt(np.square(errors).mean()))
    rounds = 2 * (ranks - 1)
    return Link(name, float(fixed_s) / rounds, rounds / ranks / float(per_byte_s), spread, True)
