"""A certificate: which runs it needs, what is compared with what, and the verdict.

Owns: the two proofs, resume and parity. Does not own: starting a run (`runs.py`), comparing
(`compare.py`), the tolerance (`rounding.py`), the name of a difference (`verdict.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.certify.compare import (
    Attempt,
    Comparison,
    compare,
    distance,
    order_of,
    read_attempts,
)
from lockstep.certify.cut import UNITS, Cut
from lockstep.certify.rounding import CEILING, Rounding
from lockstep.certify.settings import RunSettings
from lockstep.certify.verdict import NAMES, TRY, ComparisonKind, Finding, find_cause, name_cut
from lockstep.errors import ConfigError, LaunchError
from lockstep.harness.attach import TRACE
from lockstep.plan import count_ranks

RunCommand = Callable[[str, RunSettings, int], Path]
"""Runs the command under a name, with these settings, on this number of ranks (0: as typed), and
returns the folder of the run."""

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
    "apart": "ranks agree",
    "scaler": "scaler",
    "optimizer": "optimizer",
    "parameters": "weights",
    "averages": "averages",
    "random": "generators",
}
"""The rows of the table: stages of a comparison, and their names."""
FEWEST_STEPS = 3


@dataclass
class Column:
    """One run, compared with the first: for each row a verdict, and how many values it covers."""

    title: str
    cells: dict[str, str] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, title: str, *comparisons: Comparison, weights: float | None = None) -> "Column":
        """Return the column of one or more comparisons."""
        column = cls(title)
        for stage, name in ROWS.items():
            num = sum(found.counts[stage] for found in comparisons)
            if not num:
                continue
            spread = max(found.spread(stage) for found in comparisons)
            if stage == "parameters" and weights is not None:
                spread = weights
            differs = any(d.stage == stage for found in comparisons for d in found.differences)
            differs = differs or spread > CEILING
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
    batch_sizes: dict[int, int] = field(default_factory=dict)
    """In parity, the `batch_size` that each number of ranks was run with."""
    is_joint: bool = False
    """Whether samples of all ranks are combined, so that fewer ranks had a larger `batch_size`."""
    rounding: Rounding | None = None
    """The tolerance, if it had to be measured."""

    @property
    def verdict(self) -> str:
        """Return "certified" or "differs"."""
        return "differs" if self.finding else "certified"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "kind": self.kind,
            "verdict": self.verdict,
            "steps": self.steps,
            "proof": self.proof,
            "batch_size": {str(ranks): size for ranks, size in self.batch_sizes.items()},
            "finding": asdict(self.finding) if self.finding else None,
            "compared": {column.title: column.compared for column in self.columns},
            "verdicts": {column.title: column.cells for column in self.columns},
            "tolerance": self.rounding.to_json() if self.rounding else {},
            "remarks": self.remarks,
        }


def certify_resume(run_command: RunCommand, steps: int, *, evaluates: bool = False) -> Certificate:
    """Prove that a run that was killed and resumed equals one that was not."""
    check_steps(steps)
    certificate = Certificate("resume", steps)
    settings = RunSettings(steps, evaluates=evaluates)
    straight = _last_attempt(run_command("straight", settings, 0), steps)
    try:
        folder = run_command("interrupted", replace(settings, kills=True), 0)
    except LaunchError:
        # A run whose data differ at every start refuses to resume.
        certificate.finding = find_cause(
            _compare_again(run_command, settings, 0, straight), "twice"
        )
        if certificate.finding is None:
            raise
        return certificate
    attempts = read_attempts(folder / TRACE)
    if len(attempts) < 2 or steps not in attempts[-1].whole:
        raise LaunchError(
            "the command was killed, and the second time it ended early without an error",
            "certify a command that resumes when it is started again",
        )
    first, last = attempts[0], attempts[-1]
    twice, resumed = compare(straight, first), compare(straight, last)
    certificate.columns = [Column.of("resumed", twice, resumed)]
    killed = max(first.steps)
    certificate.finding = find_cause(twice, "twice") or _started_again(last, killed)
    if certificate.finding is None and find_cause(resumed, "resume"):
        again = _compare_again(run_command, settings, 0, straight)
        certificate.finding = _name_cause(resumed, "resume", again)
    if certificate.finding is not None:
        return certificate
    certificate.remarks = _remarks(resumed)
    certificate.proof = (
        f"resuming equals never stopping, bit for bit: {steps} steps on "
        f"{count_ranks(straight.size)}, killed after step {killed}, "
        f"resumed from step {last.began_at}"
    )
    return certificate


def certify_parity(
    run_command: RunCommand, gpus: Sequence[int], steps: int, *, exact: bool = False
) -> Certificate:
    """Prove that two or more numbers of ranks take the same steps, comparing with the smallest."""
    check_steps(steps, fewest=1)
    fewest, *more = sorted(set(gpus))
    certificate = Certificate("parity", steps)
    settings = RunSettings(steps, most_ranks=more[-1], exact=exact)
    folder = run_command(count_ranks(fewest), settings, fewest)
    reference = _last_attempt(folder, steps, fewest)
    certificate.is_joint = bool(reference.plan["joint"])
    certificate.batch_sizes[fewest] = int(reference.plan["batch_size"])
    worst = 0.0
    for num in more:
        other = run_command(count_ranks(num), settings, num)
        attempt = _last_attempt(other, steps, num)
        certificate.batch_sizes[num] = int(attempt.plan["batch_size"])
        compared = compare(reference, attempt, bits=exact)
        compared.judge(lambda one: CEILING)  # more than that is never rounding
        apart, name = (0.0, "") if exact else distance(folder / TRACE, other / TRACE, 0, steps)
        worst = max(worst, apart)
        if _needs_tolerance(compared) or (apart and not compared.hard):
            if certificate.rounding is None:
                certificate.rounding = _measure_rounding(
                    run_command, settings, fewest, folder, reference
                )
            compared.judge(partial(certificate.rounding.allows, hints=compared.hints))
        certificate.columns.append(Column.of(count_ranks(num), compared, weights=apart))
        far = None
        if not compared.hard and certificate.rounding and apart > certificate.rounding.weights:
            far = _too_far(apart, name, certificate.rounding.weights, steps)
        if compared.hard or far:
            again = _compare_again(run_command, settings, fewest, reference)
            certificate.finding = _name_cause(compared, "parity", again) or far
            break
        certificate.remarks += _remarks(compared)
    certificate.remarks = list(dict.fromkeys(certificate.remarks))
    if certificate.finding is None:
        _add_cut(certificate, reference)
    if certificate.finding is None:
        certificate.proof = _parity_proof(certificate, reference, [fewest, *more], worst, exact)
    return certificate


def check_steps(steps: int, fewest: int = FEWEST_STEPS) -> None:
    """Refuse a run that is too short to show anything."""
    if steps < fewest:
        why = " (one to save, one to lose, one to resume with)" if fewest == FEWEST_STEPS else ""
        raise ConfigError(f"--steps {steps} is too few{why}", f"pass --steps {max(fewest, 6)}")


def _last_attempt(folder: Path, steps: int, ranks: int = 0) -> Attempt:
    """Return the last attempt of a run, which must have reached its last step on these ranks."""
    attempts = read_attempts(folder / TRACE)
    if not attempts or not attempts[-1].start:
        raise ConfigError(
            "the command succeeded, but no training step of lockstep was seen",
            "certify a recipe, or a script that calls lockstep.fit or uses its Trainer; if it is "
            "one, let it keep LOCKSTEP_CALLBACKS and LOCKSTEP_TOOL_FOLDER in the environment",
        )
    attempt = attempts[-1]
    if ranks and attempt.size != ranks:
        raise ConfigError(
            f"certify started the command as {count_ranks(ranks)}, but {attempt.size} trained",
            "pass the command of one process, such as python train.py: certify starts the ranks",
        )
    if steps not in attempt.whole:
        raise ConfigError(
            f"the run took {max(attempt.steps, default=0)} steps of {steps}",
            f"pass --steps {max(attempt.steps, default=0)}",
        )
    return attempt


def _started_again(last: Attempt, killed: int) -> Finding | None:
    if last.began_at:
        return None
    return Finding(
        "checkpoint",
        0,
        f"the run was killed after step {killed} and started again from scratch",
        "resume from the checkpoint folder: call fit(task, config), or prepare(...)",
    )


def _compare_again(
    run_command: RunCommand, settings: RunSettings, ranks: int, straight: Attempt
) -> Comparison:
    """Run the command uninterrupted a second time, and compare."""
    return compare(straight, _last_attempt(run_command("again", settings, ranks), settings.steps))


def _name_cause(compared: Comparison, kind: ComparisonKind, again: Comparison) -> Finding | None:
    """Name the first difference, ignoring what differs even between two equal runs."""
    noise = {name for hint in again.hints for name in hint.names}
    return find_cause(again, "twice") or find_cause(compared.without(noise), kind)


def _needs_tolerance(compared: Comparison) -> bool:
    """Return whether a number that rounding may change differs before anything else does."""
    if not compared.hard:
        return bool(compared.measured)
    return any(order_of(one) < order_of(compared.hard[0]) for one in compared.measured)


def _measure_rounding(
    run_command: RunCommand, settings: RunSettings, ranks: int, folder: Path, reference: Attempt
) -> Rounding:
    """Measure what rounding does when the same steps are summed in another order."""
    other = run_command("reordered", replace(settings, reverses=True), ranks)
    compared = compare(reference, _last_attempt(other, settings.steps, ranks), bits=False)
    apart, _ = distance(folder / TRACE, other / TRACE, 0, settings.steps)
    return Rounding.measured(compared, apart, reference.plan)


def _add_cut(certificate: Certificate, reference: Attempt) -> None:
    """Add the result of computing samples in other micro-batches: finding, column or remark."""
    cut = Cut(**reference.cut) if reference.cut else Cut("that takes one rank: pass --gpus 1,2")
    if cut.why_not:
        certificate.remarks.append(
            "not shown: whether the loss depends on how samples are divided into micro-batches "
            f"({cut.why_not})"
        )
        return
    column = Column("regrouped", compared={"loss": cut.num_groups})
    column.cells["loss"] = f"rounding {cut.spread:.0e}" if cut.spread else "same bits"
    if cut.reason == UNITS:
        column.cells["loss"] = "DIFFERS"
        certificate.finding = name_cut(cut, certificate.steps)
    elif cut.reason:
        column.cells["loss"] = "depends on it"
        certificate.remarks.append(
            f"{len(cut.ids)} samples have a loss of {cut.whole:.6g} in one micro-batch and of "
            f"{cut.parts:.6g} in three: the loss depends on batch_size"
        )
    certificate.columns.append(column)


def _too_far(apart: float, name: str, allowed: float, steps: int) -> Finding:
    cause = NAMES["parameters"]
    says = (
        f"step {steps}: the same losses and gradients, but weights that differ by {apart:.1e} of "
        f"the distance they moved, {name} most; rounding explains {allowed:.1e}"
    )
    return Finding(cause, steps, says, TRY[cause], names=(name,))


def _remarks(compared: Comparison) -> list[str]:
    """Return what differs without consequences, but for attributes and states, which often do."""
    quiet = ("attributes", "task", "built")
    hints = [hint for hint in compared.hints if hint.stage not in quiet]
    names = [name for hint in hints for name in hint.names]
    kinds = {"NumPy": "NumPy's global generator", "Python": "Python's global generator"}
    said = list(dict.fromkeys(kinds.get(name, name) for name in names))
    return [f"differs without consequences: {', '.join(said)}"] if said else []


def _parity_proof(
    certificate: Certificate, reference: Attempt, sizes: list[int], worst: float, exact: bool
) -> str:
    plan = reference.plan
    batch = f"{certificate.steps} steps of {plan['global_batch']} samples"
    many = f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks"
    if exact:
        return f"{many} give the same bits: {batch} in {plan['leaves_per_step']} micro-batches"
    if not worst:
        return f"{many} gave the same bits: {batch}"
    allowed = certificate.rounding.weights if certificate.rounding else 0.0
    return (
        f"{many} are equal up to rounding: weights differ by {worst:.1e} of the distance they "
        f"moved in {batch}; rounding explains up to {allowed:.1e}"
    )
