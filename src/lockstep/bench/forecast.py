"""Forecast the time of a step on GPUs you do not have, from one process and a link.

Owns: the model of a step. The backward pass fills buckets of gradients one after the other. Each
is sent when it is full and the previous one has arrived. The step continues when both the backward
pass and the last bucket are done. Does not own: the time of a bucket (`link.py`), or any
measurement.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.bench.link import Link

SUM_BYTES = 64
"""The size of a vote, or of the sums of a step's losses."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are sent together."""

    size_bytes: int
    ready_s: float
    """The time from the start of the step until its last gradient is ready."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step of one process, with no others on the machine."""

    step_s: float
    backward_end_s: float
    """The end of the backward pass of the last micro-batch, from the start of the step."""
    buckets: tuple[Bucket, ...]
    samples: int
    spread_s: float = 0.0
    """The standard deviation of `step_s`."""
    micro_batches: int = 1
    num_sums: float = 0.0
    """The number of small sums over ranks that a step waits for."""
    fixed_batch: bool = False
    """Whether the user set the global batch: then more GPUs take fewer micro-batches each."""
    wait_s: float = 0.0
    """The wait for data after the backward pass; on a GPU it partly overlaps with computation."""

    def on(self, ranks: int) -> "Timeline":
        """Return the step of one of `ranks` ranks, without communication."""
        num = max(1, -(-self.micro_batches // ranks)) if self.fixed_batch else self.micro_batches
        less = (self.micro_batches - num) / self.micro_batches
        less_s = self.backward_end_s * less
        less_wait_s = max(0.0, min(self.wait_s, self.step_s - self.backward_end_s)) * less
        return replace(
            self,
            step_s=self.step_s - less_s - less_wait_s,
            wait_s=self.wait_s - less_wait_s,
            backward_end_s=self.backward_end_s - less_s,
            buckets=tuple(replace(b, ready_s=max(0.0, b.ready_s - less_s)) for b in self.buckets),
            samples=self.samples * num // self.micro_batches,
            micro_batches=num,
        )


def step_s(timeline: Timeline, costs_s: Sequence[float], sums_s: float = 0.0) -> float:
    """Return the time of a step, given the time to send each bucket."""
    arrived_s = 0.0
    for bucket, cost_s in zip(timeline.buckets, costs_s, strict=True):
        arrived_s = max(arrived_s, bucket.ready_s) + cost_s
    after_s = timeline.step_s - timeline.backward_end_s
    return max(timeline.backward_end_s, arrived_s) + after_s + sums_s


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step on some number of GPUs, with a good and a bad case."""

    ranks: int
    step_s: float
    low_s: float
    high_s: float
    samples_per_s: float
    speed_up: float
    efficiency: float
    all_reduce_s: float
    """The time of all buckets, one after the other."""
    exposed_s: float
    """The part of buckets and small sums that does not overlap with computation."""
    late_s: float
    """The expected delay of the slowest rank."""


def slowest_of(ranks: int) -> float:
    """Return the mean delay of the slowest of `ranks` ranks, in standard deviations.

    >>> [round(slowest_of(ranks), 2) for ranks in (1, 2, 64, 1024)]
    [0.0, 0.59, 2.34, 3.23]
    """
    return statistics.NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def forecast(timeline: Timeline, link: Link, ranks: int) -> Forecast:
    """Forecast a step on `ranks` GPUs.

    All ranks wait for the slowest, whose delay follows from the measured spread. The good case has
    no delay and a link that is faster by its spread; the bad case has twice the delay and a link
    that is slower by its spread.
    """
    own = timeline.on(ranks)
    costs_s = [link.all_reduce_s(bucket.size_bytes, ranks) for bucket in own.buckets]
    sums_s = own.num_sums * link.all_reduce_s(SUM_BYTES, ranks)
    late_s = slowest_of(ranks) * own.spread_s

    def case(times: float, factor: float) -> float:
        slower = [cost_s * factor for cost_s in costs_s]
        return step_s(own, slower, sums_s * factor) + times * late_s

    middle_s = case(1.0, 1.0)
    # If micro-batches cannot be divided evenly, some ranks have one less.
    is_whole = timeline.fixed_batch and timeline.micro_batches >= ranks
    rate = (timeline.samples if is_whole else own.samples * ranks) / middle_s
    speed_up = rate / (timeline.samples / timeline.step_s)
    return Forecast(
        ranks=ranks,
        step_s=middle_s,
        low_s=case(0.0, max(0.0, 1 - link.spread)),
        high_s=case(2.0, 1 + link.spread),
        samples_per_s=rate,
        speed_up=speed_up,
        efficiency=speed_up / ranks,
        all_reduce_s=sum(costs_s),
        exposed_s=middle_s - late_s - own.step_s,
        late_s=late_s,
    )
