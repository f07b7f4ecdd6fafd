"""Run a command to be measured, on one process or several, and read what its ranks found.

Owns: how its ranks are started, and the numbers of all of them together. Does not own: what
a rank measures (`probe.py`), or what is made of it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.bench.forecast import SUM_BYTES, Bucket, Timeline
from lockstep.bench.link import Link, fit_link
from lockstep.bench.part import BenchPart
from lockstep.bench.work import Work
from lockstep.cli.stage import reach
from lockstep.errors import ConfigError
from lockstep.harness.attach import TRACE
from lockstep.harness.command import RunningCommand
from lockstep.harness.ranks import free_port, rank_variables
from lockstep.harness.runs import CommandRuns


class Bench(CommandRuns):
    """Runs a command as it was typed, or as so many ranks of one group, and measures it."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        *,
        limit_s: float = 300.0,
        threads: int = 0,
        tell: Callable[[str, float], None] = lambda name, seconds: None,
    ) -> None:
        attach = partial(reach, module="lockstep.bench.part")
        super().__init__(words, folder, attach, limit_s=limit_s, tell=tell, threads=threads)

    def measure(self, ranks: int, steps: int, *, looks: bool = True) -> "Measured":
        """Run the command on so many ranks; 0 is as it was typed."""
        part = BenchPart(steps, looks=looks)
        stage = self.run(f"{ranks} x" if ranks else "as typed", ranks, asdict(part))
        return Measured.read(stage, ranks)

    def start(self, folder: Path, ranks: int) -> list[RunningCommand]:
        """Start the ranks where `before` says."""
        if not ranks:
            return super().start(folder, ranks)
        env, port = dict(self.attach(folder)), free_port()
        return [
            RunningCommand(
                [*self.before(rank), *self.words],
                env | self.variables(rank, ranks, port),
                folder / f"output_{rank}.txt",
            )
            for rank in range(ranks)
        ]

    def before(self, rank: int) -> list[str]:
        """Return the words that stand before the command, to start it elsewhere."""
        return []

    def variables(self, rank: int, ranks: int, port: int) -> dict[str, str]:
        """Return what makes a process one rank of a group on this machine."""
        return rank_variables(rank, ranks, port, threads=self.threads)


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found on so many ranks; seconds are of the slowest rank, medians over steps."""

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
    def read(cls, stage: Path, ranks: int = 0) -> "Measured":
        """Read what the ranks wrote down."""
        files = sorted((stage / TRACE).glob("rank_*.jsonl"))
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        found = sorted(
            (line for line in lines if line["event"] == "measured"), key=lambda line: line["rank"]
        )
        if not found:
            raise ConfigError(
                "the command ended before it could be measured: no step of lockstep's was seen",
                "a command that trains with lockstep's fit, or a loop around its trainer",
            )
        if (ranks and len(found) != ranks) or {len(found)} != {line["size"] for line in found}:
            raise ConfigError(
                f"the command was started {ranks or 1} times, and {len(found)} ranks were measured",
                "the command of one process, without a launcher: --gpus starts as many as it says",
            )
        return cls._of(found)

    @classmethod
    def _of(cls, found: list[dict[str, Any]]) -> "Measured":
        def slowest(name: str) -> float:
            return max(float(median(rank[name])) for rank in found)

        def each_step(name: str) -> list[float]:
            return [max(step) for step in zip(*(rank[name] for rank in found), strict=True)]

        first, body_s = found[0], slowest("body_s")
        looked = [rank.pop("work") for rank in found if "work" in rank]
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
            work=Work.of(looked, median(whole_s)) if looked else None,
        )

    @property
    def step_s(self) -> float:
        """Return the time of a step as it is."""
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
        """Return the part of the exchange that nothing hides."""
        return max(0.0, self.step_s - self.compute_s) if self.sizes else 0.0

    @property
    def sums_s(self) -> float:
        """Return what the small sums of a step take, by the fit."""
        link = self.link()
        return self.sums_per_step * link.ring_s(SUM_BYTES, self.ranks) if link else 0.0

    @property
    def spread_s(self) -> float:
        """Return the standard deviation of a step, as if the few that were disturbed were not."""
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
        """Return the link that the ranks talked over."""
        if not self.sizes:  # one process, or a sharded model
            return None
        return fit_link(self.sizes, self.ranks, f"as measured between {self.ranks} processes here")
