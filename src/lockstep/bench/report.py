"""Report the measurements: a table, the limit in words, a forecast.

Owns: texts and layout, for people and as JSON. Does not own: any number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.bench.forecast import Forecast, forecast
from lockstep.bench.link import INTERCONNECTS, Link
from lockstep.bench.measured import Measured
from lockstep.bench.work import Work

SIZES = (8, 64, 1024)
"""The numbers of GPUs to forecast."""
BUSY = 0.8
"""If the GPU is busy for a smaller share of a step, it waits for the host."""
UNITS = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6}
WORTH_NAMING = 0.05
"""A cost below this share of a step is not named as the limit."""


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one number of processes, compared with those of one process."""

    ranks: int
    step_ms: float
    spread_ms: float
    samples_per_s: float
    theoretical: float
    actual: float
    overhead: float
    efficiency: float
    communication: float
    """The share of a step spent waiting for gradients or small sums."""
    input: float
    """The share of a step spent waiting for data."""
    compute_ms: float
    alone_ms: float
    """The time of one process for the same work."""
    all_reduce_ms: float
    backward_ms: float
    input_samples_per_s: float
    buckets: list[int]
    limit: str

    @classmethod
    def of(cls, found: Measured, one: Measured) -> "Row":
        """Compare the figures of several processes with those of one."""
        actual = found.samples_per_s / one.samples_per_s
        return cls(
            ranks=found.ranks,
            step_ms=1e3 * found.step_s,
            spread_ms=1e3 * found.spread_s,
            samples_per_s=found.samples_per_s,
            theoretical=float(found.ranks),
            actual=actual,
            overhead=1 - actual / found.ranks,
            efficiency=actual / found.ranks,
            communication=min(1.0, (found.exposed_s + found.sums_s) / found.step_s),
            input=found.wait_s / found.step_s,
            compute_ms=1e3 * found.compute_s,
            alone_ms=1e3 * alone_s(found, one),
            all_reduce_ms=1e3 * found.exchange_s,
            backward_ms=1e3 * found.backward_s,
            input_samples_per_s=found.input_samples_per_s,
            buckets=[bucket.size_bytes for bucket in found.buckets],
            limit=limit_of(found, one),
        )


def alone_s(found: Measured, one: Measured) -> float:
    """Return the time that one process needs for a rank's share of a step, without data waits."""
    own = one.timeline().on(found.ranks)
    return own.step_s - own.wait_s


def limit_of(found: Measured, one: Measured) -> str:
    """Return as text what limits the speed of a step."""
    own_s = found.compute_s - found.local_wait_s
    losses = {"input": found.wait_s}
    if found.ranks > 1:
        losses |= {"communication": found.exposed_s, "sums": found.sums_s}
        losses["contention"] = own_s - alone_s(found, one) - found.sums_s
        if not found.sizes:
            losses = {"input": found.wait_s, "sharded": losses["contention"]}
    worst = max(losses, key=lambda name: losses[name])
    if losses[worst] < WORTH_NAMING * found.step_s:
        rest_s = found.step_s - found.wait_s - found.exposed_s
        return f"compute: {_ms(rest_s)} of {_ms(found.step_s)} ms"
    if worst == "sharded":
        return (
            f"sharding or contention: a step's own work takes {_ms(own_s)} ms with its exchanges, "
            f"{_ms(alone_s(found, one))} ms on one process"
        )
    if worst == "communication":
        return (
            f"communication: {_ms(found.exposed_s)} ms of all-reduce do not overlap with "
            f"{_ms(found.backward_s)} ms of backward ({_ms(found.exchange_s)} ms alone)"
        )
    if worst == "sums":
        return (
            f"communication: {found.sums_per_step:.0f} small sums over ranks in a step of "
            f"{_ms(found.step_s)} ms take {_ms(found.sums_s)} ms; a larger batch has fewer steps"
        )
    if worst == "input":
        needed = found.facts["global_batch"] / (found.step_s - found.wait_s)
        return (
            f"input: {_ms(found.wait_s)} of {_ms(found.step_s)} ms wait for data; the loader alone "
            f"reads {found.input_samples_per_s:.0f} samples/s, the steps could use {needed:.0f}"
        )
    return (
        f"contention: a step's own work takes {_ms(own_s)} ms beside the other processes, "
        f"{_ms(alone_s(found, one))} ms on one process (cores, memory or power are shared)"
    )


@dataclass(frozen=True, slots=True)
class Scaling:
    """The report of `lockstep bench scaling`."""

    command: list[str]
    found: list[Measured]
    rows: list[Row]
    measured_link: Link | None
    forecasts: list[tuple[Link, list[Forecast]]]
    remarks: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, command: Sequence[str], found: Sequence[Measured], asked: Link | None) -> "Scaling":
        """Compare; forecast for the link `asked`, or the measured one, or the known ones."""
        one, most = found[0], found[-1]
        link = most.link()
        timeline = one.timeline(num_sums=most.sums_per_step)
        links = [asked or link] if asked or link else list(INTERCONNECTS.values())
        if one.facts["parallel"] == "fsdp":
            links = []
        forecasts = [(k, [forecast(timeline, k, n) for n in SIZES]) for k in links if k]
        rows = [Row.of(each, one) for each in found]
        remarks = list(dict.fromkeys(said for each in found for said in each.facts["remarks"]))
        return cls(list(command), list(found), rows, link, forecasts, remarks)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        one, facts = self.found[0], self.found[0].facts
        names = ("device", "backend", "threads", "num_workers", "parameters")
        return {
            "command": self.command,
            **{name: self.found[-1].facts[name] for name in names},
            "rows": [asdict(row) for row in self.rows],
            "one_process": {
                "samples": facts["global_batch"],
                "micro_batches": facts["micro_batches"],
                "timeline": asdict(one.timeline()),
            },
            "all_reduce": [
                {"ranks": each.ranks, "sizes": each.sizes} for each in self.found if each.sizes
            ],
            "measured_link": asdict(self.measured_link) if self.measured_link else None,
            "work": [
                {"ranks": each.ranks, **asdict(each.work)} for each in self.found if each.work
            ],
            "forecasts": [
                {"link": asdict(link), "gpus": [asdict(made) for made in at]}
                for link, at in self.forecasts
            ],
            "remarks": self.remarks,
        }

    def lines(self) -> list[str]:
        """Return the report as lines of tables."""
        heads = ["processes", "step ms", "samples/s", "theoretical", "actual", "overhead"]
        heads += ["efficiency", "communication", "input"]
        lines = ["", _cells(heads)]
        for row in self.rows:
            cells = [str(row.ranks), f"{row.step_ms:.1f}", f"{row.samples_per_s:.0f}"]
            cells += [f"{row.theoretical:.1f} x", f"{row.actual:.2f} x"]
            shares = (row.overhead, row.efficiency, row.communication, row.input)
            lines.append(_cells([*cells, *(f"{100 * share:.0f} %" for share in shares)]))
        lines.append("")
        lines += [f"  {row.ranks} limited by {row.limit}" for row in self.rows]
        if self.measured_link:
            link, ranks = self.measured_link, self.found[-1].ranks
            lines += [
                "",
                f"  all-reduce between {ranks} processes here: {1e6 * link.latency_s:.3g} us per "
                f"message, {link.bytes_per_s / 1e9:.3g} GB/s, fit within {100 * link.spread:.0f} %",
            ]
        for link, at in self.forecasts:
            assumed = " (80 % of nominal, assumed)" if link.name in INTERCONNECTS else ""
            lines += ["", f"  forecast, {link}{assumed}"]
            heads = ["GPUs", "step ms", "good", "bad", "samples/s", "speed-up"]
            lines.append(_cells([*heads, "efficiency", "all-reduce", "exposed", "slowest rank"]))
            lines += [_forecast_line(made) for made in at]
        return [*lines, *(f"  remark: {remark}" for remark in self.remarks)]


def _forecast_line(made: Forecast) -> str:
    times = (made.step_s, made.low_s, made.high_s)
    cells = [str(made.ranks), *(f"{1e3 * seconds:.1f}" for seconds in times)]
    cells += [f"{made.samples_per_s:.0f}", f"{made.speed_up:.1f} x"]
    cells += [f"{100 * made.efficiency:.0f} %"]
    parts = (made.all_reduce_s, made.exposed_s, made.late_s)
    return _cells([*cells, *(f"{1e3 * seconds:.1f} ms" for seconds in parts)])


def step_lines(found: Measured) -> list[str]:
    """Return lines about where the time of a step goes."""
    body_s = found.backward_end_s + found.after_s
    between_s = max(0.0, found.compute_s - found.local_wait_s - body_s)
    parts = {
        "forward": (found.forward_s, "from the batch to the loss"),
        "backward": (found.backward_s, ""),
        "after backward": (found.after_s, "sums of the losses, clipping, optimizer, averages"),
        "waiting for data": (found.local_wait_s, f"{found.facts['num_workers']} workers"),
        "between steps": (between_s, "votes of the ranks, log"),
        "exchange": (found.exposed_s, f"not overlapped, of {_ms(found.exchange_s)} ms alone"),
    }
    if not found.sizes:
        parts.pop("exchange")
    all_s = sum(seconds for seconds, _ in parts.values())
    lines = [
        f"  {name:<18}{_ms(seconds):>9} ms {100 * seconds / all_s:>4.0f} %   {remark}"
        for name, (seconds, remark) in parts.items()
    ]
    lines.append(
        f"  {'step':<18}{_ms(found.step_s):>9} ms   +- {_ms(found.spread_s)} ms, "
        f"{found.samples_per_s:.0f} samples/s on {found.ranks} x {found.facts['device']}"
    )
    lines += work_lines(found, found.work) if found.work else []
    return [line.rstrip() for line in lines]


def work_lines(found: Measured, work: Work) -> list[str]:
    """Return lines about how close a step is to the limits of the machine and of the host."""
    amount, unit = _scaled(work.operations)
    least, most = (f(n for rank in work.operations_each for n in rank) for f in (min, max))
    spread = f", {_scaled(least)[0]} to {_scaled(most)[0]}" if most > 1.05 * least else ""
    uncounted = ", ".join(["pointwise work", *work.not_counted])
    reached, reached_unit = _scaled(work.per_s)
    limit, limit_unit = _scaled(work.limit_per_s)
    rows = [
        (
            "operations",
            f"{amount} {unit}FLOP",
            f"per step and rank{spread}: {_percent(work.operations_by_kind)}; "
            f"not counted: {uncounted}",
        ),
        (
            "rate",
            f"{reached} {reached_unit}FLOP/s",
            f"{100 * work.mfu:.3g} % of the {limit} {limit_unit}FLOP/s that a {work.dtype} matrix "
            "product reaches here (MFU)",
        ),
        (
            "update",
            f"{_ms(work.update_s)} ms",
            f"at least: optimizer and averages move {work.update_bytes / 1e9:.3g} GB, a copy "
            f"reaches {work.bytes_per_s / 1e9:.3g} GB/s",
        ),
        (
            "peak memory",
            f"{work.peak_bytes / 1e9:.2f} GB",
            f"of {work.memory_bytes / 1e9:.0f} GB, until the end of the timed steps",
        ),
    ]
    if work.busy is None:
        rows.append(("operators", "", _percent(work.kinds)))
    else:
        rows.append(("GPU busy", f"{100 * work.busy:.0f} %", f"kernels: {_percent(work.kinds)}"))
    lines = [f"  {name:<18}{number:>14}   {remark}" for name, number, remark in rows]
    if is_host_bound(found, work):
        compiled = found.facts["compile"]
        faster = {False: "compile: true or ", True: "compile: graphs or "}.get(compiled, "")
        lines.append(f"  the host is the limit: try {faster}larger micro-batches")
    return lines


def is_host_bound(found: Measured, work: Work) -> bool:
    """Return whether the GPU waits for the host to launch kernels, and not for data."""
    is_idle = work.busy is not None and work.busy < BUSY
    return is_idle and found.wait_s < WORTH_NAMING * found.step_s


def _percent(shares: Mapping[str, float]) -> str:
    """Return shares as text, without those below one percent."""
    named = {name: share for name, share in shares.items() if share >= 0.01}
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in named.items()) or "nothing"


def _scaled(number: float) -> tuple[str, str]:
    """Return a number with three digits and the prefix of its unit.

    >>> _scaled(2.5e12), _scaled(3.1e8)
    (('2.5', 'T'), ('310', 'M'))
    """
    unit, size = next((u for u in UNITS.items() if number >= u[1]), ("M", 1e6))
    return f"{number / size:.3g}", unit


def input_lines(found: Measured) -> list[str]:
    """Return lines about whether the loader is as fast as the steps."""
    needed = found.facts["global_batch"] / (found.step_s - found.wait_s)
    reads = found.input_samples_per_s
    share = found.wait_s / found.step_s
    verdict = f"not the limit: {reads / needed:.1f} x what the steps use"
    if share > WORTH_NAMING:
        verdict = f"the limit: {_ms(found.wait_s)} of {_ms(found.step_s)} ms wait for data"
    return [
        f"  loader alone  {reads:>10.0f} samples/s, "
        f"{found.facts['num_workers']} workers for each of {found.ranks} x {found.facts['device']}",
        f"  steps use     {needed:>10.0f} samples/s when they do not wait",
        f"  waiting       {100 * share:>10.0f} % of a step",
        f"input is {verdict}",
    ]


def _cells(words: Sequence[str]) -> str:
    return "  " + "".join(f"{word:>15}" if n > 6 else f"{word:>12}" for n, word in enumerate(words))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"
