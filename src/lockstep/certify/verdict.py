"""The verdict: the name of the first difference, one sentence about it, and what to try.

Owns: choosing the name, given the differences of a comparison. Does not own: finding them.

The name is that of the first result that differs although everything it was computed from is the
same. Where this could have several reasons, the hints decide: differences in state that no
checkpoint holds (the global random generators, buffers outside `state_dict`, attributes of the task
and of modules).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.certify.compare import Comparison, Difference
from lockstep.certify.cut import Cut
from lockstep.certify.trace import GENERATOR

ComparisonKind = Literal["twice", "resume", "parity"]

NAMES = {
    "batch": "batch size",
    "ids": "data",
    "content": "augmentation",
    "inputs": "RNG",
    "outputs": "RNG",
    "loss": "loss weighting",
    "sums": "gradient reduction",
    "statistics": "BatchNorm",
    "buffers": "buffers",
    "grad_norm": "gradient reduction",
    "rates": "learning rate",
    "apart": "ranks disagree",
    "scaler": "scaler",
    "optimizer": "optimizer",
    "parameters": "optimizer",
    "averages": "averages",
}
COMPUTED = ("inputs", "outputs", "loss", "sums", "grad_norm", "optimizer", "parameters")
"""Stages that hidden state may change: the hints decide about them."""
KERNELS = "kernels"
ROUNDING = 1e-5
"""A sum that differs relatively by less may only have been added in another order."""
TASK_STATE = "task state"
INITIALISATION = "initialisation"
TRY = {
    "batch size": "pass the same batch_size for every number of ranks (it is per GPU); to keep the "
    "number of samples in a step, pass global_batch_size",
    "data": "make the order a function of (seed, epoch, position), as lockstep's own orders are",
    "augmentation": "draw random numbers in __getitem__ from torch, NumPy or random, which are "
    "seeded by (seed, epoch, sample) before each read; do not use the clock, the rank or a "
    "generator of your own there",
    INITIALISATION: "seed the random numbers that the script draws while it builds data or model, "
    "for example with np.random.default_rng(0): lockstep seeds the global generators before "
    "train_data, eval_data and build_model, but not earlier, and no other generators",
    "RNG": "draw random numbers for the loss from context.generator(NAME); inside the model use "
    "torch's own functions, which are seeded for every micro-batch",
    TASK_STATE: "return it from Task.state() and restore it in Task.load_state(), or compute it "
    "from context.step and context.place, which do not depend on resumes and ranks",
    "loss weighting": "return PartialLoss(sum, weight): the sum over units and the number of "
    "units; do not divide by the number of ranks or by anything counted on one rank",
    "BatchNorm": "set sync_batch_norm=true for several ranks; keep running statistics in "
    "state_dict()",
    "buffers": "call register_buffer(..., persistent=True) for everything that forward() changes",
    "gradient reduction": "remove detach() around a gather, and keep every trained part inside the "
    "model",
    "learning rate": "make the rate a function of the step, and leave its scaling with the number "
    "of ranks to lr_scaling",
    "ranks disagree": "let only the optimizer change weights, and make decisions on all ranks "
    "together",
    "scaler": "use the run's own scaler (run.scaler), which is saved and restored",
    "optimizer": "keep everything that changes the weights in the optimizer's state, or in "
    "Task.state()",
    "averages": "let lockstep keep the averages (averages=[0.999]): it saves them",
    "weights": "make load_state_dict restore what state_dict returned",
    KERNELS: "call torch.use_deterministic_algorithms(True), and draw random numbers only from "
    "torch's own generators",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The first thing that differs, named."""

    cause: str
    step: int
    says: str
    remedy: str
    place: int | None = None
    names: tuple[str, ...] = ()


def find_cause(compared: Comparison, kind: ComparisonKind) -> Finding | None:
    """Return the first cause, or None if no difference counts."""
    if not compared.hard:
        return None
    first = compared.hard[0]
    hints = [hint for hint in compared.hints if hint.step <= first.step]
    cause, because = _cause(first, hints, kind)
    says = f"{_where(first)}: {_what(first, kind)}{because}"
    return Finding(cause, first.step, says, TRY[cause], first.place, first.names)


def name_cut(cut: Cut, steps: int) -> Finding:
    """Name a loss that is a mean over units where samples have different numbers of them."""
    says = (
        f"step {steps}: samples {_some(cut.ids)} have a loss of {cut.whole:.6g} in one micro-batch "
        f"and of {cut.parts:.6g} in three: the loss is a mean over units that differ between "
        f"samples (up to {cut.ratio:.3g} times as many)"
    )
    names = tuple(str(sample) for sample in cut.ids)
    return Finding("loss weighting", steps, says, TRY["loss weighting"], names=names)


def _cause(first: Difference, hints: list[Difference], kind: ComparisonKind) -> tuple[str, str]:
    """Return the name of a difference, and what the hints add to the sentence."""
    name = NAMES[first.stage]
    if first.at_start:
        if first.step == 0 and first.stage not in ("batch", "ids"):
            return INITIALISATION, ", although nothing was restored"
        return ("weights" if first.stage == "parameters" else name), ""
    if first.stage == "content" and any(hint.stage == "built" for hint in hints):
        return INITIALISATION, "; the data set itself differs at every start, not how it is read"
    if first.stage not in COMPUTED:
        return name, ""
    if first.stage == "loss" and not first.same_weights:
        return "optimizer", "; losses, gradients and rates were the same until then"
    if first.stage == "loss" and any(hint.stage == "rows" for hint in hints):
        return "augmentation", "; the same samples look different"
    volatile = _names_of(hint for hint in hints if hint.stage == "volatile")
    if volatile and first.stage != "inputs":
        return "buffers", f"; {_differ(volatile)} and {_be(volatile)} not in state_dict()"
    if first.stage in ("inputs", "outputs", "loss"):
        return _cause_of_pass(first, hints, kind)
    own, _ = _attributes(hints)
    return (KERNELS if kind == "twice" else name), _unsaved(own)


def _cause_of_pass(
    first: Difference, hints: list[Difference], kind: ComparisonKind
) -> tuple[str, str]:
    """Do the same for a difference in the model's inputs or outputs, or in the loss."""
    states = _names_of(hint for hint in hints if hint.stage == "random")
    if states:
        return "RNG", f"; the state of {_list(sorted(states))}'s global generator differs"
    own, generators = _attributes(hints)
    if generators:
        return "RNG", f"; the state of {_list(generators)} differs, and is not saved"
    suspect = _unsaved(own)
    if kind == "twice":
        built = _names_of(filter(_is_initial, hints))
        if built:
            return INITIALISATION, f"; {_differ(built)} from the start"
        return ("RNG" if first.stage == "inputs" else KERNELS), suspect
    modules = [name for name in own if name.startswith("model.")]
    if modules and first.stage == "outputs":
        return "buffers", suspect
    lost = _names_of(hint for hint in hints if hint.stage == "task" and hint.at_start)
    if lost and kind == "resume":
        return TASK_STATE, f"; {_list(lost)} of the task {_be(lost, past=True)} not restored"
    task = [name for name in own if name.startswith("task.")]
    if task:
        if kind == "resume":
            return TASK_STATE, _unsaved(task)
        return TASK_STATE, f"; {_differ(task)} with the number of ranks"
    if kind == "resume":
        # Generators are as they were, and torch's is seeded for every micro-batch.
        if first.stage == "outputs":
            return "buffers", "; the model remembers something that state_dict() does not hold"
        return TASK_STATE, "; the loss depends on something that no checkpoint holds"
    if first.stage == "loss" and not _is_weighting(first):
        return "RNG", suspect
    return NAMES[first.stage], suspect


def _names_of(hints: Iterable[Difference]) -> list[str]:
    """Return the names of hints, each once."""
    return list(dict.fromkeys(name for hint in hints for name in hint.names))


def _is_initial(hint: Difference) -> bool:
    return hint.stage in ("attributes", "task") and hint.at_start and hint.step == 0


def _unsaved(names: list[str]) -> str:
    return f"; {_differ(names)}, and {_be(names)} not saved" if names else ""


def _is_weighting(first: Difference) -> bool:
    """Return whether a loss differs by its weighting, and not by what the model computed.

    That is so if the model's outputs are the same or, where they were not recorded, if the weight
    itself differs.
    """
    return "batch" not in first.names or first.before[1:2] != first.after[1:2]


def _attributes(hints: list[Difference]) -> tuple[list[str], list[str]]:
    """Return the names of attributes that differ: plain ones, and random generators."""
    own: dict[str, None] = {}
    generators: dict[str, None] = {}
    for hint in hints:
        for name in hint.names if hint.stage == "attributes" else ():
            is_generator = GENERATOR in str(hint.before.get(name)) + str(hint.after.get(name))
            (generators if is_generator else own)[name] = None
    return list(own), list(generators)


def _where(first: Difference) -> str:
    if first.at_start:
        return f"after resuming from step {first.step}" if first.step else "at the start"
    return f"step {first.step}" + (
        f", micro-batch {first.place}" if first.place is not None else ""
    )


def _what(first: Difference, kind: ComparisonKind) -> str:
    """Return what differs, with the numbers."""
    match first.stage:
        case "batch":
            return _about_batch(first)
        case "ids" if first.at_start:
            return f"{first.after[0]} training samples instead of {first.before[0]}"
        case "ids":
            return f"samples {_some(first.after)} instead of {_some(first.before)}"
        case "content":
            return f"samples {_some(first.names)} look different"
        case "inputs":
            return "the same batch, but different inputs to the model"
        case "outputs":
            return "the same inputs and weights, but different outputs of the model"
        case "loss" if not first.same_weights:
            old, new = first.before[0], first.after[0]
            return f"the weights differ by more than rounding: a loss of {new:.9g}, not {old:.9g}"
        case "loss":
            return _about_loss(first)
        case "sums":
            what = f"{_some(first.after)} instead of {_some(first.before)}"
            return f"the same losses of all micro-batches, but their sum is {what}{_only(first)}"
        case "grad_norm" if first.names:
            what = f"{_list(first.names)}{_only(first)}"
            return f"the same losses, but a different gradient of {what}"
        case "grad_norm":
            gap = f"{first.after[0]:.9g} instead of {first.before[0]:.9g}"
            return f"the same losses, but a gradient of norm {gap}"
        case "rates":
            return f"learning rate {_some(first.after)} instead of {_some(first.before)}"
        case "apart":
            return f"{_differ(first.names)} between ranks 0 and {first.after}"
    if first.at_start and first.step:
        return f"{_list(first.names)} {_be(first.names, past=True)} not restored"
    if first.at_start:
        return _differ(first.names)
    if first.stage == "parameters":
        return f"the same gradient, but {_differ(first.names)} after the update"
    return f"{_differ(first.names)}, and everything before is the same"


def _about_batch(first: Difference) -> str:
    said = {"batch_size": "in a micro-batch", "global_batch": "in a step"}
    sizes = zip(first.names, first.before, first.after, strict=True)
    changes = [f"{new} samples {said[n]} instead of {old}" for n, old, new in sizes if old != new]
    return ", ".join(changes)


def _only(first: Difference) -> str:
    return " (only rounding)" if (first.relative or 0.0) < ROUNDING else ""


def _about_loss(first: Difference) -> str:
    if not first.before or not first.after or len(first.before) != len(first.after):
        return "different parts of the loss"
    if first.place is None:
        about = f"loss {first.names[0]!r}" if first.names else "the reduced loss"
        return f"{about} {_some(first.after)} instead of {_some(first.before)}"
    (old, old_weight), (new, new_weight) = first.before[:2], first.after[:2]
    same = f"the same {first.names[0]}"
    if old_weight != new_weight:
        return f"{same}, but a weight of {new_weight:g} instead of {old_weight:g}"
    if old == new:
        return f"the same loss, but parts {_some(first.after)} instead of {_some(first.before)}"
    ratio = f" (x {new / old:.6g})" if old else ""
    return f"{same}, but a loss of {new:.9g} instead of {old:.9g}{ratio}"


def _some(values: Any, num: int = 4) -> str:
    shown = [f"{value:.9g}" if isinstance(value, float) else str(value) for value in values or []]
    return ", ".join(shown[:num]) + (", ..." if len(shown) > num else "") or "none"


def _differ(names: Sequence[str]) -> str:
    """Return "a differs", or "a, b differ"."""
    return f"{_list(names)} {'differs' if len(names) == 1 else 'differ'}"


def _be(names: Sequence[str], past: bool = False) -> str:
    singular, plural = ("was", "were") if past else ("is", "are")
    return singular if len(names) == 1 else plural


def _list(names: Any, num: int = 3) -> str:
    names = list(names)
    more = f" and {len(names) - num} more" if len(names) > num else ""
    return ", ".join(names[:num]) + more
