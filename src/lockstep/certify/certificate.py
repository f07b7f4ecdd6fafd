"""A certificate: which runs it takes, what is compared with what, and the verdict.

Owns: the two proofs, resume and parity, and the tolerance where rounding is allowed. Does not
own: starting a run (the caller's `play`), comparing (`compare.py`), naming (`verdict.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.certify.compare import Comparison, Life, compare, distance, read_lives
from lockstep.certify.part import TRACE, Part
from lockstep.certify.verdict import NAMES, TRY, Finding, find_cause
from lockstep.errors import ConfigError, LaunchError

Play = Callable[[str, Part, int], Path]
"""Runs the command as a part says, on so many ranks (0: as typed), and returns its folder."""

ROWS = {
    "ids": "data",
    "content": "augmentation",
    "inputs": "model inputs",
    "outputs": "model outputs",
    "loss": "loss",
    "sums": "sum of losses",
    "statistics": "BatchNorm",
    "buffers": "buffers",
    "grad_norm": "gradient",
    "rates": "learning rate",
    "apart": "ranks alike",
    "scaler": "scaler",
    "optimizer": "optimizer",
    "parameters": "weights",
    "averages": "averages",
    "random": "generators",
}
FEWEST_STEPS = 3
MARGIN = 16.0
"""How much more than one reordering of the sums another one may do."""
FLOOR, CEILING = 1e-5, 0.05
"""The least and the most that is ever taken for rounding."""
FLOOR_REDUCED = 1e-2
"""In bf16 or fp16: where samples meet, and so other shapes are multiplied, and where gradients
are rounded on their way between ranks, which one rank cannot show."""


@dataclass
class Column:
    """One run, compared with the first: a verdict and a count for each thing."""

    title: str
    cells: dict[str, str] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, title: str, *comparisons: Comparison, weights: float | None = None) -> "Column":
        """Lay out what comparisons found."""
        column = cls(title)
        for stage, name in ROWS.items():
            num = sum(found.counts[stage] for found in comparisons)
            if not num:
                continue
            spread = max(found.spread(stage) for found in comparisons)
            if stage == "parameters" and weights is not None:
                spread = weights
            differs = any(d.stage == stage for found in comparisons for d in found.differences)
            column.cells[name] = (
                "DIFFERS" if differs else f"rounding {spread:.0e}" if spread else "same bits"
            )
            column.compared[name] = num
        return column


@dataclass
class Certificate:
    """What was proved, or what differs first."""

    kind: str
    steps: int
    proof: str = ""
    columns: list[Column] = field(default_factory=list)
    finding: Finding | None = None
    remarks: list[str] = field(default_factory=list)
    tolerance: dict[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Return one word for all of it."""
        return "differs" if self.finding else "certified"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "kind": self.kind,
            "verdict": self.verdict,
            "steps": self.steps,
            "proof": self.proof,
            "finding": self.finding.to_json() if self.finding else None,
            "compared": {column.title: column.compared for column in self.columns},
            "verdicts": {column.title: column.cells for column in self.columns},
            "tolerance": self.tolerance,
            "remarks": self.remarks,
        }


def certify_resume(play: Play, steps: int, *, evaluates: bool = False) -> Certificate:
    """Prove that a run which was killed and resumed equals one that was not."""
    check_steps(steps)
    certificate = Certificate("resume", steps)
    part = Part(steps, evaluates=evaluates)
    straight = _only(play("straight", part, 0), steps)
    folder = play("interrupted", Part(steps, kills=True, evaluates=evaluates), 0)
    lives = read_lives(folder / TRACE)
    if len(lives) < 2 or steps not in lives[-1].whole:
        raise LaunchError(
            "the command was killed, and ended well without having got to its end",
            "a run that trains on when it is started again",
        )
    first, last = lives[0], lives[-1]
    twice, resumed = compare(straight, first), compare(straight, last)
    certificate.columns = [Column.of("resumed", twice, resumed)]
    killed = max(first.steps)
    certificate.finding = find_cause(twice, "twice") or _began_anew(last, killed)
    if certificate.finding is None and (found := find_cause(resumed, "resume")):
        certificate.finding = _unless_never_the_same(play, part, 0, straight, found)
    if certificate.finding is not None:
        return certificate
    certificate.remarks = _remarks(resumed)
    ranks = "1 rank" if straight.size == 1 else f"{straight.size} ranks"
    certificate.proof = (
        f"resuming equals never stopping, bit for bit: {steps} steps on {ranks}, "
        f"killed after step {killed}, resumed from step {last.began_at}"
    )
    return certificate


def certify_parity(
    play: Play, gpus: Sequence[int], steps: int, *, exact: bool = False
) -> Certificate:
    """Prove that every number of ranks takes the same steps as the smallest."""
    check_steps(steps, fewest=1)
    fewest, *more = sorted(set(gpus))
    if not more:
        raise ConfigError(f"--gpus {fewest} is nothing to compare", f"--gpus {fewest},{2 * fewest}")
    certificate = Certificate("parity", steps)
    part = Part(steps, most_ranks=more[-1], exact=exact)
    folder = play(_ranks(fewest), part, fewest)
    reference = _only(folder, steps, fewest)
    worst = 0.0
    for num in more:
        other = play(_ranks(num), part, num)
        compared = compare(reference, _only(other, steps, num), bits=exact)
        apart, name = (0.0, "") if exact else distance(folder / TRACE, other / TRACE, 0, steps)
        certificate.columns.append(Column.of(_ranks(num), compared, weights=apart))
        worst = max(worst, apart)
        found = find_cause(compared, "parity")
        before = steps if found is None else found.step - 1
        if any(one.step <= before for one in compared.measured) or (apart and not found):
            allowed = certificate.tolerance or _tolerance(play, part, fewest, folder, reference)
            certificate.tolerance = allowed
            found = _beyond(compared, allowed, before) or found
            if found is None and apart > allowed["weights"]:
                found = _too_far(apart, name, allowed["weights"], steps)
        if found is not None:
            certificate.finding = _unless_never_the_same(play, part, fewest, reference, found)
            break
        certificate.remarks += _remarks(compared)
    certificate.remarks = list(dict.fromkeys(certificate.remarks))
    if certificate.finding is None:
        certificate.proof = _parity_proof(certificate, reference, [fewest, *more], worst, exact)
    return certificate


def check_steps(steps: int, fewest: int = FEWEST_STEPS) -> None:
    """Refuse a run that is too short to show anything."""
    if steps < fewest:
        why = " (one to save, one to lose, one to go on with)" if fewest == FEWEST_STEPS else ""
        raise ConfigError(f"--steps {steps} is too few{why}", f"--steps {max(fewest, 6)}")


def _only(folder: Path, steps: int, ranks: int = 0) -> Life:
    """Return the one life of a run, which must have got to the end on as many ranks."""
    lives = read_lives(folder / TRACE)
    if not lives or not lives[-1].start:
        raise ConfigError(
            "the command ended well, and not one step of lockstep's was seen in it",
            "a recipe, or a script around lockstep.fit or its Trainer; if it is one, PYTHONPATH "
            "added to, not replaced",
        )
    life = lives[-1]
    if ranks and life.size != ranks:
        raise ConfigError(
            f"{_ranks(ranks)} should have trained, and the command started {life.size}",
            "the command of one process, such as python train.py; the ranks are started here",
        )
    if steps not in life.whole:
        raise ConfigError(
            f"the run took {max(life.steps, default=0)} steps of {steps}",
            f"--steps {max(life.steps, default=0)}",
        )
    return life


def _began_anew(last: Life, killed: int) -> Finding | None:
    if last.began_at:
        return None
    return Finding(
        "checkpoint",
        0,
        f"the run was killed after step {killed} and began again from nothing",
        "a run that goes on from its checkpoint folder: fit(task, config), or prepare(...)",
    )


def _unless_never_the_same(
    play: Play, part: Part, ranks: int, straight: Life, found: Finding
) -> Finding:
    """Run it straight a second time: what differs even then has nothing to do with the rest."""
    again = _only(play("again", part, ranks), part.steps)
    return find_cause(compare(straight, again), "twice") or found


def _tolerance(
    play: Play, part: Part, ranks: int, folder: Path, reference: Life
) -> dict[str, float]:
    """Measure what rounding does when the same step is added up in another order."""
    turned = Part(part.steps, part.most_ranks, reorders=True)
    other = play("reordered", turned, ranks)
    compared = compare(reference, _only(other, part.steps, ranks), bits=False)
    apart, _ = distance(folder / TRACE, other / TRACE, 0, part.steps)
    measured = {name: compared.spread(name) for name in ("loss", "sums", "grad_norm")}
    plan = reference.plan
    reduced = plan["rounded"] or (plan["joint"] and plan["reduced"])
    floor = FLOOR_REDUCED if reduced else FLOOR
    return {
        name: min(max(MARGIN * value, floor), CEILING)
        for name, value in (measured | {"weights": apart}).items()
    }


def _beyond(compared: Comparison, allowed: dict[str, float], last_step: int) -> Finding | None:
    """Return the first number, up to a step, that rounding does not explain."""
    for one in compared.measured:
        if one.step <= last_step and (one.relative or 0.0) > allowed[one.stage]:
            return find_cause(Comparison([*compared.hints, one]), "parity")
    return None


def _too_far(apart: float, name: str, allowed: float, steps: int) -> Finding:
    cause = NAMES["parameters"]
    says = (
        f"step {steps}: the same losses and gradients, and weights {apart:.1e} of their way apart, "
        f"{name} farthest; rounding explains {allowed:.1e}"
    )
    return Finding(cause, steps, says, TRY[cause], names=(name,))


def _remarks(compared: Comparison) -> list[str]:
    """Say what differs and had no consequences; attributes may well, a clock's say."""
    hints = [hint for hint in compared.hints if hint.stage != "attributes"]
    names = [name for hint in hints for name in hint.names]
    kinds = {"NumPy": "NumPy's global generator", "Python": "Python's global generator"}
    said = list(dict.fromkeys(kinds.get(name, name) for name in names))
    return [f"not the same, and nothing followed from it: {', '.join(said)}"] if said else []


def _ranks(num: int) -> str:
    return "1 rank" if num == 1 else f"{num} ranks"


def _parity_proof(
    certificate: Certificate, reference: Life, sizes: list[int], worst: float, exact: bool
) -> str:
    plan = reference.plan
    batch = f"{certificate.steps} steps of {plan['global_batch']} samples"
    many = f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks"
    if exact:
        return f"{many} give the same bits: {batch} in {plan['leaves_per_step']} micro-batches"
    if not worst:
        return f"{many} gave the same bits: {batch}"
    return (
        f"{many} are equal to rounding: {worst:.1e} of the way the weights came in {batch}; "
        f"rounding explains up to {certificate.tolerance['weights']:.1e}"
    )
