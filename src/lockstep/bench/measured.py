"""The figures of a measured run: read from the files of its ranks, and put together.

Owns: which rank counts for which figure, and what follows from the figures. Does not own: the
measurement (`probe.py`), or the words (`report.py`).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.bench.forecast import SUM_BYTES, Bucket, Timeline
from lockstep.bench.link import Link, fit_link
from lockstep.bench.work import Work
from lockstep.errors import ConfigError
from lockstep.harness.attach import TRACE


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of all ranks; seconds are of the slowest rank, medians over steps."""

    facts: dict[str, Any]
    ranks: int
    whole_s: list[float]
    local_s: list[float]
    wait_s: float
    local_wait_s: float
    forward_s: float
    backward_s: float
    after_s: float
    backward_end_s: float
    buckets: list[Bucket]
    exchange_s: float
    sizes: list[tuple[float, float]]
    sums_per_step: float
    input_samples_per_s: float
    work: Work | None = None

    @classmethod
    def read(cls, folder: Path, ranks: int = 0) -> "Measured":
        """Read the files of a run's ranks; `ranks` as they were started, 0: as typed."""
        files = sorted((folder / TRACE).glob("rank_*.jsonl"))
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        found = sorted(
            (line for line in lines if line["event"] == "measured"), key=lambda line: line["rank"]
        )
        if not found:
            raise ConfigError(
                "the command ended before it could be measured: no step of lockstep's was seen",
                "pass a command that trains with lockstep's fit, or with a loop around its Trainer",
            )
        if (ranks and len(found) != ranks) or {len(found)} != {line["size"] for line in found}:
            raise ConfigError(
                f"the command was started {ranks or 1} times, and {len(found)} ranks were measured",
                "pass the command of one process, without a launcher: --gpus starts the others",
            )
        return cls._of(found)

    @classmethod
    def _of(cls, found: list[dict[str, Any]]) -> "Measured":
        def slowest(name: str) -> float:
            return max(float(median(rank[name])) for rank in found)

        def each_step(name: str) -> list[float]:
            return [max(step) for step in zip(*(rank[name] for rank in found), strict=True)]

        first, body_s = found[0], slowest("body_s")
        work = [rank.pop("work") for rank in found if "work" in rank]
        sizes = zip(*(rank["sizes"] for rank in found), strict=True)
        whole_s = each_step("whole_s")
        return cls(
            facts=first,
            ranks=first["size"],
            whole_s=whole_s,
            local_s=each_step("local_s"),
            wait_s=slowest("whole_wait_s"),
            local_wait_s=slowest("local_wait_s"),
            forward_s=slowest("backward_end_s") - slowest("backward_s"),
            backward_s=slowest("backward_s"),
            after_s=max(0.0, body_s - slowest("backward_end_s")),
            backward_end_s=slowest("backward_end_s"),
            buckets=[Bucket(*bucket) for bucket in first["buckets"]],
            exchange_s=max(rank["exchange_s"] for rank in found),
            sizes=[(same[0][0], max(seconds for _, seconds in same)) for same in sizes],
            sums_per_step=first["sums_per_step"],
            input_samples_per_s=sum(rank["input_samples_per_s"] for rank in found),
            work=Work.of(work, median(whole_s)) if work else None,
        )

    @property
    def step_s(self) -> float:
        """Return the time of a step."""
        return median(self.whole_s)

    @property
    def compute_s(self) -> float:
        """Return the time of a step whose gradients stay local."""
        return median(self.local_s)

    @property
    def samples_per_s(self) -> float:
        """Return the speed of all ranks together."""
        return float(self.facts["global_batch"]) / self.step_s

    @property
    def exposed_s(self) -> float:
        """Return the part of the exchange that does not overlap with computation."""
        return max(0.0, self.step_s - self.compute_s) if self.sizes else 0.0

    @property
    def sums_s(self) -> float:
        """Return the time of the small sums of a step, by the fit."""
        link = self.link()
        return self.sums_per_step * link.ring_s(SUM_BYTES, self.ranks) if link else 0.0

    @property
    def spread_s(self) -> float:
        """Return the standard deviation of a step, estimated without outliers."""
        return 1.4826 * median(abs(s - self.step_s) for s in self.whole_s)

    def timeline(self, num_sums: float | None = None) -> Timeline:
        """Return the step of one process by itself, for a forecast."""
        assert self.ranks == 1
        return Timeline(
            step_s=self.step_s,
            backward_end_s=self.backward_end_s,
            buckets=tuple(self.buckets),
            samples=self.facts["global_batch"],
            spread_s=self.spread_s,
            micro_batches=self.facts["micro_batches"],
            num_sums=self.sums_per_step if num_sums is None else num_sums,
            fixed_batch=self.facts["fixed_batch"],
            wait_s=self.wait_s,
        )

    def link(self) -> Link | None:
        """Return the link between the ranks, fitted to their all-reduces."""
        if not self.sizes:  # one process, or a sharded model
            return None
        return fit_link(self.sizes, self.ranks, f"as measured between {self.ranks} processes here")
