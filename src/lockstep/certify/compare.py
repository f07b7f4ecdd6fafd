"""Compare two traces: every difference, in the order in which they arose.

Owns: reading traces, what is compared with what, and the order of causes within a step. Does
not own: the name of a difference (`verdict.py`).

Leaves (micro-batches) are the same for every number of ranks, so they are compared by place.
Numbers that rounding may change are measured; whether the difference is allowed is decided later.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Record = dict[str, Any]

STATE = ("statistics", "buffers", "scaler", "optimizer", "parameters", "averages")
"""The state that a run carries from step to step, in the order in which a step changes it."""
HINTS_OF_STATE = ("volatile", "random", "attributes", "task")
"""State that no checkpoint holds, and the task's own."""
HINTS = ("rows", "built", *HINTS_OF_STATE)
"""Differences that count only if another one follows: in the state above, in how samples were
padded ("rows"), and in what the data set holds before it is read ("built")."""
STAGES = (
    *("batch", "ids", "content", "apart", "inputs", "outputs", "loss", "sums", "statistics"),
    *("buffers", "grad_norm", "rates", "scaler", "optimizer", "parameters", "averages"),
)
"""The order of causes within a step. "apart": ranks have different weights, because one of them
changed its own. Different losses cannot do that, since gradients are averaged."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same."""

    stage: str
    step: int
    """Counted from 1; at the start of an attempt, the step it starts after."""
    names: tuple[str, ...] = ()
    place: int | None = None
    """The place of the micro-batch, if it concerns one."""
    before: Any = None
    after: Any = None
    at_start: bool = False
    relative: float | None = None
    """The relative difference, of numbers that rounding may change."""
    same_weights: bool = True
    """Whether the weights were the same bits before the step."""


@dataclass
class Attempt:
    """What one process group recorded, from its start to its end or its kill."""

    start: dict[int, Record] = field(default_factory=dict)
    cut: Record | None = None
    """The result of computing samples of the last step in other micro-batches, if there is one."""
    steps: dict[int, dict[int, Record]] = field(default_factory=dict)
    """By step, then by rank."""

    @property
    def began_at(self) -> int:
        """Return the step that it resumed after, or 0."""
        return int(self.start[0]["step"])

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return int(self.start[0]["size"])

    @property
    def plan(self) -> Mapping[str, Any]:
        """Return the batch plan of the run."""
        return dict(self.start[0]["plan"])

    @property
    def whole(self) -> set[int]:
        """Return the steps that every rank recorded: after a kill, some ranks lack the last."""
        return {step for step, ranks in self.steps.items() if len(ranks) == self.size}

    def after(self, step: int) -> dict[int, Record]:
        """Return what the ranks recorded after `step` steps."""
        return self.steps.get(step, self.start)


@dataclass
class Comparison:
    """The differences between two attempts, and how much was compared."""

    differences: list[Difference] = field(default_factory=list)
    measured: list[Difference] = field(default_factory=list)
    """Numbers that are not the same bits where rounding may be the reason."""
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, difference: Difference) -> None:
        """Note a difference."""
        self.differences.append(difference)

    def sort(self) -> None:
        """Sort differences into the order in which they arose."""
        self.differences.sort(key=order_of)

    def judge(self, allows: Callable[[Difference], float]) -> None:
        """Turn measured numbers that differ by more than allowed into differences."""
        beyond = [one for one in self.measured if (one.relative or 0.0) > allows(one)]
        self.measured = [one for one in self.measured if one not in beyond]
        self.differences += beyond
        self.sort()

    def without(self, noise: Collection[str]) -> "Comparison":
        """Return a copy without the hints that have these names."""
        kept = []
        for one in self.differences:
            names = tuple(name for name in one.names if name not in noise)
            if one.stage not in HINTS or not one.names:
                kept.append(one)
            elif names:
                kept.append(replace(one, names=names))
        return replace(self, differences=kept)

    def spread(self, stage: str) -> float:
        """Return the largest relative difference that was measured."""
        return max((m.relative or 0.0 for m in self.measured if m.stage == stage), default=0.0)

    @property
    def hard(self) -> list[Difference]:
        """Return the differences that refute a certificate."""
        return [d for d in self.differences if d.stage not in HINTS]

    @property
    def hints(self) -> list[Difference]:
        """Return the differences that count only if another one follows."""
        return [d for d in self.differences if d.stage in HINTS]


def read_attempts(folder: Path) -> list[Attempt]:
    """Return the attempts of a run, in order; a line that a kill cut short is dropped."""
    attempts: list[Attempt] = []
    for path in sorted(folder.glob("rank_*.jsonl"), key=lambda p: int(p.stem.split("_")[1])):
        number = -1
        for record in _records(path):
            if record["event"] == "start":
                number += 1
                if number == len(attempts):
                    attempts.append(Attempt())
                attempts[number].start[record["rank"]] = record
            elif record["event"] == "cut":
                attempts[number].cut = record["cut"]
            else:
                attempts[number].steps.setdefault(record["step"], {})[record["rank"]] = record
    return attempts


def _records(path: Path) -> Iterator[Record]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def compare(a: Attempt, b: Attempt, *, bits: bool = True) -> Comparison:
    """Compare the steps that both attempts recorded.

    With `bits` every bit must be the same. Otherwise sums over micro-batches may be rounded
    differently: as long as the weights are the same bits, everything before the sum must be, too;
    after that, losses and gradients are measured.
    """
    found = Comparison()
    joint = bool(b.plan["joint"])
    _compare_plans(found, a, b, joint)
    _compare_states(found, a.after(b.began_at), b.start, b.began_at, STATE, at_start=True)
    if not bits:
        found.counts.clear()  # state that is compared only at the start is not in the table
    _compare_ranks(found, b.start, b.began_at)
    is_same_so_far = True
    for step in sorted(a.whole & b.whole):
        mine, theirs = _Step(a.steps[step]), _Step(b.steps[step])
        one = _StepComparison(found, step, mine, theirs, bits=bits, same=is_same_so_far)
        one.compare_data(joint)
        one.compare_leaves(joint)
        one.compare_sums(joint)
        kept: tuple[str, ...] = STATE
        if not bits:
            kept = STATE[:3] if is_same_so_far and not joint else ("scaler",)
        _compare_ranks(found, b.steps[step], step)
        _compare_states(found, a.steps[step], b.steps[step], step, kept, is_joint=joint)
        same = mine.first["state"]["parameters"] == theirs.first["state"]["parameters"]
        is_same_so_far = is_same_so_far and same
        found.counts["parameters"] += 0 if bits else len(mine.first["state"]["parameters"])
    found.sort()
    return found


def order_of(difference: Difference) -> tuple[int, bool, int]:
    """Return the position of a difference in the order of causes."""
    stages = (*HINTS, *STAGES)
    return difference.step, not difference.at_start, stages.index(difference.stage)


def _compare_plans(found: Comparison, a: Attempt, b: Attempt, joint: bool) -> None:
    """Compare the batch plans of the runs, and what their data sets hold."""
    sizes = ("global_batch",) if joint else ("batch_size", "global_batch")
    for stage, names in (("batch", sizes), ("ids", ("num_samples",))):
        before, after = ([int(attempt.plan[name]) for name in names] for attempt in (a, b))
        if before != after:
            found.add(Difference(stage, b.began_at, names, None, before, after, at_start=True))
    mine, theirs = a.start[0]["data"], b.start[0]["data"]
    if mine["repeats"] and theirs["repeats"] and mine["holds"] != theirs["holds"]:
        found.add(Difference("built", b.began_at, ("the data set",), at_start=True))


class _Step:
    """One step of one run, over all its ranks."""

    def __init__(self, ranks: Mapping[int, Record]) -> None:
        self.ranks = ranks
        self.first = ranks[0]
        leaves = [leaf for record in ranks.values() for leaf in record["leaves"]]
        self.leaves = {leaf["place"]: leaf for leaf in leaves}


@dataclass
class _StepComparison:
    """The comparison of one step."""

    found: Comparison
    step: int
    a: _Step
    b: _Step
    bits: bool
    same: bool
    """Whether the weights are the same bits so far."""

    def compare_data(self, joint: bool) -> None:
        """Compare which samples were read, and their contents."""
        if joint:
            for key, stage in (("ids", "ids"), ("content", "rows")):
                mine, theirs = (
                    sorted(row for leaf in side.leaves.values() for row in leaf[key])
                    for side in (self.a, self.b)
                )
                self.found.counts[stage] += len(mine)
                if mine != theirs:
                    self.found.add(Difference(stage, self.step, before=mine, after=theirs))
            return
        for key in ("ids", "content"):
            self._by_place(key)

    def compare_leaves(self, joint: bool) -> None:
        """Compare inputs and outputs of the model, by micro-batch."""
        if joint or not (self.same or self.bits):
            return
        for key in ("inputs", "outputs"):
            self._by_place(key)

    def compare_sums(self, joint: bool) -> None:
        """Compare losses, gradient and rates.

        Losses are measured even while the weights are the same bits: the task may have trained
        another network before.
        """
        for place in sorted(self.a.leaves.keys() & self.b.leaves.keys()) if not joint else ():
            leaf = self.a.leaves[place]
            seen = "outputs" if leaf["outputs"] else "batch"
            theirs = self.b.leaves[place]["loss"]
            self._numbers("loss", leaf["loss"], theirs, self.bits, place, seen)
        for name in sorted(self.a.first["loss"].keys() | self.b.first["loss"].keys()):
            mine, theirs = (side.first["loss"].get(name, []) for side in (self.a, self.b))
            self._numbers("loss" if joint else "sums", mine, theirs, self.bits, None, name)
        norms = [self.a.first["grad_norm"]], [self.b.first["grad_norm"]]
        self._numbers("grad_norm", *norms, self.bits)
        if self.bits:
            mine, theirs = self.a.first["gradients"], self.b.first["gradients"]
            names = tuple(n for n in sorted(mine | theirs) if mine.get(n) != theirs.get(n))
            self.found.counts["grad_norm"] += len(mine)
            if names:
                apart = relative(*([float.fromhex(n) for n in norm] for norm in norms))
                self.found.add(Difference("grad_norm", self.step, names, relative=apart))
        rates = self.a.first["rates"], self.b.first["rates"]
        self._numbers("rates", *rates, True)

    def _by_place(self, key: str) -> None:
        for place in sorted(self.a.leaves.keys() | self.b.leaves.keys()):
            mine, theirs = (side.leaves.get(place, {}).get(key) for side in (self.a, self.b))
            self.found.counts[key] += 1
            if mine != theirs:
                about = (self.b.leaves.get(place) or self.a.leaves[place])["ids"]
                names = tuple(str(sample) for sample in about)
                self.found.add(Difference(key, self.step, names, place, mine, theirs))
                return

    def _numbers(
        self,
        stage: str,
        mine: list[str],
        theirs: list[str],
        exactly: bool,
        place: int | None = None,
        name: str = "",
    ) -> None:
        self.found.counts[stage] += len(mine)
        if mine == theirs:
            return
        a, b = ([float.fromhex(n) for n in numbers] for numbers in (mine, theirs))
        names = (name,) if name else ()
        apart = relative(a, b)
        to = self.found.differences if exactly else self.found.measured
        same = self.same or self.bits
        to.append(
            Difference(stage, self.step, names, place, a, b, relative=apart, same_weights=same)
        )


def relative(a: list[float], b: list[float]) -> float:
    """Return the largest difference of two lists of numbers, relative to the larger number.

    It is infinite between a non-finite number and a finite one, which rounding cannot explain.

    >>> relative([1.0, 4.0], [1.0, 2.0])
    0.5
    """
    if len(a) != len(b):
        return float("inf")
    both = zip(a, b, strict=True)
    pairs = [(x, y) for x, y in both if x != y and not (math.isnan(x) and math.isnan(y))]
    gaps = [abs(x - y) / max(abs(x), abs(y)) for x, y in pairs]
    return max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)


def _compare_states(
    found: Comparison,
    a: Mapping[int, Record],
    b: Mapping[int, Record],
    step: int,
    kept: tuple[str, ...],
    at_start: bool = False,
    is_joint: bool = False,
) -> None:
    """Compare the state of the first ranks; of generators, that of the last ranks.

    All generators are seeded for every micro-batch, the last of which is on the last rank. So they
    cannot be compared at the start, nor where micro-batches differ.
    """
    compares_generators = not (at_start or is_joint)
    for stage in (*kept, *HINTS_OF_STATE):
        ranks = (max(a), max(b)) if stage == "random" else (0, 0)
        mine, theirs = a[ranks[0]]["state"][stage], b[ranks[1]]["state"][stage]
        names = [n for n in sorted(mine.keys() | theirs.keys()) if mine.get(n) != theirs.get(n)]
        if stage == "random":
            names = [n for n in names if n in ("NumPy", "Python") and compares_generators]
        found.counts[stage] += len(mine)
        if names:
            before, after = ({n: side.get(n) for n in names} for side in (mine, theirs))
            found.add(
                Difference(stage, step, tuple(names), before=before, after=after, at_start=at_start)
            )


def distance(a: Path, b: Path, began_at: int, step: int) -> tuple[float, str]:
    """Return the distance of two runs' final weights, relative to how far training moved them.

    And the name of the parameter whose own relative distance is largest.
    """
    import torch

    start, mine, theirs = (
        torch.load(folder / f"values_{number}.pt", weights_only=True)
        for folder, number in ((a, began_at), (a, step), (b, step))
    )
    gaps = {n: float((mine[n].double() - theirs[n].double()).square().sum()) for n in mine}
    ways = {n: float((mine[n].double() - start[n].double()).square().sum()) for n in mine}
    farthest = max(gaps, key=lambda n: gaps[n] / (ways[n] or 1e-300) if gaps[n] else 0.0)
    gap, way = sum(gaps.values()), sum(ways.values())
    return (math.sqrt(gap / way) if way else math.inf if gap else 0.0), farthest


def _compare_ranks(found: Comparison, ranks: Mapping[int, Record], step: int) -> None:
    """Add a difference if a rank has other weights than the first."""
    first = ranks[0]["state"]["parameters"]
    found.counts["apart"] += len(ranks) - 1
    for rank, record in sorted(ranks.items()):
        own = record["state"]["parameters"]
        names = tuple(name for name in first if own.get(name) != first[name])
        if names:
            found.add(Difference("apart", step, names, before=0, after=rank))
            return
