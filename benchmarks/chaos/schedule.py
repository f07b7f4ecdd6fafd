"""Which faults strike, where or when, and on how many ranks: drawn from a seed.

Owns: the alphabet of faults, the named points, and the draw. Does not own: doing any of it.
A schedule is a list of legs; a leg is one launch, which its last fault ends.
"""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

START_POINTS = ("fork", "import", "rendezvous", "restore")
STEP_POINTS = (
    "loader_next",
    "forward",
    "backward",
    "reduce_send",
    "reduce_recv",
    "before_update",
    "mid_update",
    "after_update",
    "log_flush",
)
SAVE_POINTS = ("ckpt_open", "ckpt_write", "ckpt_fsync", "ckpt_rename", "ckpt_prune")
POINTS = (*START_POINTS, *STEP_POINTS, *SAVE_POINTS, "shutdown")
BETWEEN_RANKS = ("reduce_send", "reduce_recv")

CODES = {
    "kill": 137,
    "segfault": 139,
    "exit": 7,
    "exception": 1,
    "term": 143,
    "int": 130,
    "usr1": 138,
    "no_space": 2,
    "io_error": 2,
    "flip": 137,
    "power_loss": 137,
}
"""What a launch ends with (docs/running.md; 128 + signal for what was killed)."""
RESTARTED = ("kill", "segfault", "exit", "exception")
"""Faults after which `lockstep launch --restarts` tries again by itself."""
ASKED = ("term", "int", "usr1")
SURVIVED = ("stop", "worker", "second")
"""Faults that end no launch."""
FAULTS = (*CODES, "launcher", *SURVIVED)
SAVE_FAULTS = ("no_space", "io_error")
LATER = 8
"""So many steps after a fault that ends no launch comes one that does: a save lies in between."""
COLD_SHARE = 0.05
"""Of all legs, how many end with the launcher killed: each costs the import of torch."""


@dataclass(frozen=True)
class Fault:
    """One fault. With a point it fires there, else by the clock."""

    kind: str
    point: str = ""
    rank: int = 0
    """Modulo the number of ranks."""
    gap: int = 0
    """How many steps of the launch come first; -1 strikes by the clock while it starts."""
    nth: int = 1
    """The how manieth time the point is passed after that."""
    delay_s: float = 0.0
    attempt: int = 0
    """Armed in the launch itself, or in its first restart."""

    def __str__(self) -> str:
        where = self.point or ("start-up" if self.gap < 0 else "any time")
        return f"{self.kind} at {where}" + (f"[{self.nth}]" if self.nth > 1 else "")


@dataclass(frozen=True)
class Leg:
    """One launch and the faults in it."""

    size: int
    faults: tuple[Fault, ...]
    workers: int = 0
    restarts: int = 0
    background: bool = False
    """Whether it saves while it trains."""
    sharded: bool = False
    """Whether every rank writes its share."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Leg":
        return cls(**{**values, "faults": tuple(Fault(**fault) for fault in values["faults"])})


def valid_pairs() -> list[tuple[str, str]]:
    """Return every (point, fault) that can happen, but for a kill of the launcher."""
    pairs = list(itertools.product(POINTS, (*RESTARTED, *ASKED, "stop")))
    pairs += itertools.product(SAVE_POINTS[:-1], SAVE_FAULTS)
    pairs += itertools.product((*SAVE_POINTS, "after_update"), ("power_loss",))
    pairs += [("after_update", "flip"), ("loader_next", "worker"), ("after_update", "second")]
    # A process that was just forked has no interpreter to raise in, and leaves Ctrl-C to others.
    return [pair for pair in pairs if pair not in (("fork", "exception"), ("fork", "int"))]


def draw(
    seed: int, num_legs: int, num_steps: int, max_ranks: int, *, all_at_points: bool = False
) -> list[Leg]:
    """Return a schedule: half of the faults by the clock, half at points, pairs evenly."""
    dice = random.Random(seed)
    pairs: list[tuple[str, str]] = []
    gap = max(2, 2 * num_steps // max(1, num_legs))
    legs = []
    for _ in range(num_legs):
        size = dice.randint(1, max_ranks)
        if not pairs:
            pairs = dice.sample(valid_pairs(), len(valid_pairs()))
        if not all_at_points and dice.random() < COLD_SHARE:
            point = dice.choice(["", *POINTS[:-1]])
            legs.append(_leg(dice, size, _at(dice, point, "launcher", gap), gap))
        elif all_at_points or dice.random() < 0.5:
            legs.append(_leg(dice, size, _at(dice, *pairs.pop(), gap), gap))
        else:
            by_clock = (*RESTARTED[:2], *RESTARTED[:1], *ASKED, "flip", "stop", "worker")
            kind = dice.choices(by_clock, [8, 2, 8, 2, 2, 1, 2, 2, 2])[0]
            legs.append(_leg(dice, size, _at(dice, "", kind, gap), gap))
    return legs


def _at(dice: random.Random, point: str, kind: str, gap: int) -> Fault:
    """Draw when a fault strikes: its step, how often its point is passed before, or a time."""
    is_start = point in START_POINTS or (not point and kind in RESTARTED and dice.random() < 0.15)
    steps = (0 if point else -1) if is_start else dice.randint(0, gap)
    nth = {"ckpt_write": dice.randint(1, 6), "ckpt_fsync": dice.randint(1, 4)}.get(point, 1)
    if point == "shutdown":
        steps, nth = 0, dice.randint(1, 2)
    delay_s = dice.uniform(0, 0.4 if steps < 0 else 0.02)
    return Fault(kind, point, dice.randrange(12), steps, nth, delay_s)


def _leg(dice: random.Random, size: int, fault: Fault, gap: int) -> Leg:
    """Make a fault a leg: with what must come before it, what ends it, and its own echo."""
    if fault.point in BETWEEN_RANKS:
        size = max(size, 2)
    leg = Leg(
        size,
        (fault,),
        workers=int(fault.kind == "worker" or dice.random() < 0.15),
        background=dice.random() < 0.4,
        sharded=dice.random() < 0.4,
    )
    if fault.point == "shutdown":
        asked = Fault("term", "", fault.rank, dice.randint(1, gap), 1, 0.01)
        return replace(leg, faults=(asked, fault))
    if fault.kind in SURVIVED:
        gap = max(fault.gap, 0) + LATER
        later = replace(fault, kind="kill", point="", gap=gap, delay_s=0.01)
        return replace(leg, faults=(fault, later))
    if fault.kind in RESTARTED and dice.random() < 0.25:
        kind = dice.choice((*RESTARTED, *ASKED))
        point = dice.choice(START_POINTS[1:] + STEP_POINTS[:3])
        echo = Fault(kind, point, dice.randrange(12), 0, 1, 0.0, attempt=1)
        return replace(leg, faults=(fault, echo), restarts=1)
    return leg


def write(legs: Sequence[Leg], path: Path) -> None:
    """Write a schedule down, to be replayed."""
    path.write_text(json.dumps([asdict(leg) for leg in legs], indent=1) + "\n")


def read(path: Path) -> list[Leg]:
    """Read a schedule."""
    return [Leg.from_json(values) for values in json.loads(path.read_text())]
