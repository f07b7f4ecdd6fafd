"""Check the meta data and progress that `fit` saved in a checkpoint, before they are used.

Owns: their types and bounds. Does not own: the manifest that contains them
(`checkpoint/manifest.py`), or what a resume decides from them (`resume.py`).

Training divides by these numbers, counts to them and reads samples by them. So all are checked
here, once, and an error names the first wrong one.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator
from torch import Tensor

from lockstep.checkpoint import Checkpoint
from lockstep.checkpoint.layout import damaged
from lockstep.checkpoint.manifest import Count, Text, first_fault, in_brief
from lockstep.plan import MAX_COUNT, BatchPlan, Contract
from lockstep.plan import OLD_NAMES as PLAN_NAMES
from lockstep.run.progress import OLD_NAMES as PROGRESS_NAMES
from lockstep.run.progress import Progress

MAX_HALVINGS: Final = 62
MAX_NAMES: Final = 16
"""The most names of one checkpoint: of the best one, of an epoch, of a step."""
MAX_FINGERPRINTS: Final = 100_000
"""The most samples, or groups of samples, in a fingerprint of the data."""


class SavedFingerprint(BaseModel):
    """The fingerprint of a data set; see `data/fingerprint.py`."""

    model_config = ConfigDict(strict=True)

    length: Count = 0
    per_entry: PositiveInt | None = None
    entries: Annotated[list[Text], Field(max_length=MAX_FINGERPRINTS)] = []
    samples: Annotated[dict[str, list[Any]], Field(max_length=MAX_FINGERPRINTS)] = {}

    @field_validator("samples")
    @classmethod
    def _digests(cls, samples: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for index, found in samples.items():
            if not (index.isascii() and index.isdigit() and len(index) < 19):
                raise ValueError(f"{in_brief(index)} is not the number of a sample")
            is_digest = 3 <= len(found) <= 4 and isinstance(found[0], str)
            if not is_digest or not all(_is_number(value) for value in found[1:]):
                raise ValueError(f"{in_brief(index)} is not a digest and two or three numbers")
        return samples


class SavedMeta(BaseModel):
    """The meta data of a run's checkpoint. Older versions of lockstep wrote fewer fields."""

    model_config = ConfigDict(strict=True)

    contract: dict[str, Any]
    world_size: PositiveInt = 1
    job: Annotated[str, Field(max_length=10_000)] = ""
    consumed: Count = 0
    ledger: Annotated[str, Field(pattern="^[0-9a-f]{16}$")] = "0" * 16
    epochs_completed: Count = 0
    config: dict[str, Any] = {}
    task: dict[str, Any] = {}
    data: dict[Text, SavedFingerprint] = {}
    versions: dict[Text, Text] = {}
    numerics: dict[Text, str] = {}
    names: Annotated[list[Text], Field(max_length=MAX_NAMES)] = []
    metrics: dict[str, Any] = {}
    optimizer_as_built: list[dict[str, Any]] | None = None
    trained: list[str] | None = None
    trained_at_start: list[str] = []


def check_saved_run(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose meta data are not those of a run.

    One without a contract was saved by a custom loop, which defines its own meta data.

    Raises:
        CheckpointError: names the file and the field.
    """
    if "contract" not in checkpoint.meta:
        return
    try:
        SavedMeta.model_validate(dict(checkpoint.meta))
        _check_contract(checkpoint.meta["contract"])
    except ValidationError as invalid:
        raise damaged(checkpoint.path, f"manifest.json: meta.{first_fault(invalid)}") from None
    except ValueError as error:
        raise damaged(checkpoint.path, f"manifest.json: meta.{error}") from None


def load_progress(checkpoint: Checkpoint) -> Progress:
    """Return the saved progress of a run, which must be that of the checkpoint's step.

    Raises:
        CheckpointError: names the file and the field.
    """
    state = with_new_names(checkpoint.load("progress"), PROGRESS_NAMES)
    try:
        _check_progress(state, checkpoint)
    except ValueError as error:
        raise damaged(checkpoint.path, f"manifest.json: skeletons.progress: {error}") from None
    return Progress.from_state(state)


def with_new_names(stored: Any, old_names: Mapping[str, str]) -> Any:
    """Return a stored dict with its fields' current names; anything else unchanged.

    >>> with_new_names({"owes_evaluation": True, "step": 3}, PROGRESS_NAMES)
    {'evaluation_pending': True, 'step': 3}
    """
    if not isinstance(stored, dict):
        return stored
    return {old_names.get(name, name): value for name, value in stored.items()}


def _check_contract(contract: Mapping[str, Any]) -> None:
    _check_fields(Contract, contract, "contract")
    for name in ("base_lr", "effective_lr"):
        if not 0 < contract[name] < math.inf:
            raise ValueError(f"contract.{name} is {in_brief(contract[name])}, not a learning rate")
    plan = with_new_names(contract["plan"], PLAN_NAMES)
    _check_fields(BatchPlan, plan, "contract.plan")
    for name, value in plan.items():
        lowest = 0 if name in ("halvings", "planned_for", "split_for_ranks") else 1
        highest = MAX_HALVINGS if name == "halvings" else MAX_COUNT
        if not lowest <= value <= highest:
            raise ValueError(
                f"contract.plan.{name} is {in_brief(value)}, not between {lowest} and {highest}"
            )
    if plan["samples_per_epoch"] > plan["num_samples"]:
        raise ValueError(
            f"contract.plan.samples_per_epoch is {plan['samples_per_epoch']}, more than the "
            f"{plan['num_samples']} samples there were"
        )


def _check_fields(kind: type[Any], values: Any, path: str) -> None:
    """Compare the keys and types of a saved dataclass with those of the class."""
    if not isinstance(values, dict):
        raise ValueError(f"{path} is {in_brief(values)}, not a dict")
    known = {field.name: field for field in fields(kind)}
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{path}.{name} is missing")
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{path} has the unknown field {in_brief(name)}")
        wanted: Any = known[name].type
        is_wrong = (
            (wanted is int and type(value) is not int)
            or (wanted is float and not _is_number(value))
            or (wanted is str and not (isinstance(value, str) and len(value) <= 200))
        )
        if is_wrong:
            raise ValueError(f"{path}.{name} is {in_brief(value)}, not of type {wanted.__name__}")


def _check_progress(state: Any, checkpoint: Checkpoint) -> None:
    if not isinstance(state, dict):
        raise ValueError(f"it is {in_brief(state)}, not a dict")
    known = {field.name for field in fields(Progress)} - {"pending", "non_finite_step"}
    if unknown := [key for key in state if key not in known]:
        raise ValueError(f"{in_brief(unknown[0])} is unknown")
    if missing := {"step", "consumed", "ledger", "interval", "epoch"} - state.keys():
        raise ValueError(f"{min(missing)} is missing")
    if type(state["step"]) is not int or state["step"] != checkpoint.step:
        raise ValueError(
            f"step is {in_brief(state['step'])}, the checkpoint's is {checkpoint.step}"
        )
    consumed = state["consumed"]
    if type(consumed) is not int or consumed != checkpoint.meta.get("consumed", consumed):
        raise ValueError(
            f"consumed is {in_brief(consumed)}, the checkpoint's is "
            f"{in_brief(checkpoint.meta.get('consumed'))}"
        )
    if not 0 <= consumed < MAX_COUNT:
        raise ValueError(f"consumed is {in_brief(consumed)}, more than any run consumes")
    _check_ledger(state["ledger"], checkpoint.meta.get("ledger"))
    best = state.get("best")
    if best is not None and not _is_number(best):
        raise ValueError(f"best is {in_brief(best)}, not a number")
    if type(state.get("evaluation_pending", False)) is not bool:
        raise ValueError(
            f"evaluation_pending is {in_brief(state['evaluation_pending'])}, not true or false"
        )
    for name in ("interval", "epoch"):
        sums = state[name]
        if not isinstance(sums, dict) or not all(isinstance(key, str) for key in sums):
            raise ValueError(f"{name} is {in_brief(sums)}, not sums by name")
        for key, pair in sums.items():
            is_pair = isinstance(pair, list | tuple | Tensor) and len(pair) == 2
            if not is_pair or not all(_is_number(value) for value in pair):
                raise ValueError(f"{name}.{in_brief(key)} is not a sum and a weight")


def _check_ledger(ledger: Any, said: Any) -> None:
    is_pair = isinstance(ledger, list | tuple) and [type(value) for value in ledger] == [int, int]
    if not is_pair or not (0 <= ledger[0] < 2**64 and 0 <= ledger[1] < MAX_COUNT):
        raise ValueError(f"ledger is {in_brief(ledger)}, not a digest and a count")
    if said is not None and said != f"{ledger[0]:016x}":
        raise ValueError(f"ledger is {ledger[0]:016x}, the checkpoint's is {in_brief(said)}")


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that fits a float, or a tensor of one such number."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    if type(value) is int:
        return abs(value) < 2**1000
    return type(value) is float
