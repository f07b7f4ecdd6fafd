"""The checkpoint to resume from, and the settings and data that may have changed since.

Owns: the choice of a checkpoint, the settings and data that must not change, and the messages
about changed ones. Does not own: restoring a state (`run.py`).
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.checkpoint import Checkpoint, CheckpointStore
from lockstep.config import RunConfig
from lockstep.data.fingerprint import differences, take_fingerprint
from lockstep.data.loader import plan_for
from lockstep.dist.agreement import check_same
from lockstep.dist.batch_norm import SyncBatchNorm, has_batch_norm, synchronises_itself
from lockstep.dist.collectives import Collectives
from lockstep.errors import CheckpointError, ConfigError
from lockstep.plan import (
    BatchPlan,
    Change,
    Contract,
    SplitChange,
    contract_change,
    count_ranks,
    scaled_rate,
)
from lockstep.run.saved_run import check_saved_run, load_progress

BINDING: tuple[str, ...] = (
    "schedule",
    "batch.drop_last",
    "precision",
    "max_grad_norm",
    "sync_batch_norm",
    "gradients.exchange_in",
    "exact",
    "evaluation.best_metric",
    "evaluation.best_is",
)
"""Settings, or sections, that change what is learned or which checkpoint is best. They must be the
same on a resume."""
OF_BEST: tuple[str, ...] = ("evaluation.best_metric", "evaluation.best_is")
"""Settings that may change until an evaluation has found a best checkpoint."""
ROUNDING: tuple[str, ...] = ("compile", "num_threads", "gradients.bucket_mb")
"""Settings that change only rounding. They must be the same on a resume in exact mode."""


@dataclass
class Resumed:
    """The checkpoint that a run resumed from, and what the resume left to do or to report."""

    checkpoint: Checkpoint | None = None
    rejected: list[tuple[Path, str]] = field(default_factory=list)
    """Newer checkpoints, and why the run could not resume from them."""
    accepted: list[str] = field(default_factory=list)
    """The changes since the checkpoint that `accept_changes` has accepted."""
    unclaimed_states: list[str] = field(default_factory=list)
    """Callbacks that have a state in the checkpoint but are not in this run."""
    pending_optimizer: dict[str, Any] | None = None
    """The saved optimizer state, to load once this run has added the same parameter groups."""


def resume_if_restarted(config: RunConfig, store: CheckpointStore, job: str) -> RunConfig:
    """Return the config of a run that `job` has restarted, with resume=auto if it has saved.

    `discard` and a path apply to the first start only. Otherwise a restart would delete what the
    job itself has saved.
    """
    newest = store.latest(check_saved_run)[0] if config.resume != "auto" else None
    saved_by = newest.meta.get("job", "") if newest else None
    # A launch without an id is called "none" on several nodes, and "none..." on one node.
    is_same_job = saved_by == job or (saved_by and os.path.commonprefix([saved_by, job]) == "none")
    return config.model_copy(update={"resume": "auto"}) if is_same_job else config


def choose_checkpoint(
    store: CheckpointStore, resume: str
) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """Return the checkpoint to resume from, and why newer ones were skipped."""
    if resume == "discard":
        return None, []
    if resume not in ("auto", "never"):
        checkpoint = store.open(resume)
        check_saved_run(checkpoint)
        return checkpoint, []
    newest, rejected = store.latest(check_saved_run)
    if resume == "never" and (newest or rejected):
        found = newest.path if newest else rejected[0][0]
        raise ConfigError(
            f"{found} is from an earlier run, and resume is 'never'",
            "pass resume=auto to continue it, or use another output_dir",
        )
    set_aside = [(path, "set aside") for path in sorted(store.folder.glob("superseded_*"))]
    # Only set-aside ones are left if a run was killed while it restored another checkpoint.
    if newest is None and (rejected or set_aside):
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in rejected + set_aside)
        raise CheckpointError(
            f"no checkpoint in {store.folder} is valid ({reasons})",
            "use another output_dir, or pass the path of a checkpoint to resume",
        )
    return newest, rejected


def check_same_choice(checkpoint: Checkpoint | None, purpose: str, world: Collectives) -> None:
    """Refuse ranks that chose different checkpoints: nodes may list a folder late. Collective."""
    chosen = f"{checkpoint.path.name} {checkpoint.meta.get('ledger')}" if checkpoint else "none"
    check_same(f"checkpoints to {purpose}", chosen, world)


def resumed_contract(
    config: RunConfig, data: Any, world_size: int, checkpoint: Checkpoint, gathers: bool
) -> tuple[Contract, Change | None]:
    """Return the batch and rate contract of a resumed run, and the change it needs, if any.

    A run that keeps its settings and data keeps the stored contract, split for this many ranks. If
    anything has changed, the contract is the one to continue with once the change is accepted.

    Raises:
        ConfigError: no run is possible with these settings, data and ranks.
    """
    stored = _stored_contract(checkpoint)
    was = stored.plan
    fresh = _fresh_for(was, config, data, world_size)
    if config.sync_batch_norm and checkpoint.meta.get("config", {}).get("sync_batch_norm"):
        stored = replace(stored, plan=was.with_split_of(fresh.plan))
    asked = config.batch.global_batch_size
    if asked in (None, was.global_batch):
        change = contract_change(stored, fresh)
    else:
        change = Change(
            f"the checkpoint was trained with global_batch_size {was.global_batch}, "
            f"this run asks for {asked}",
            f"set global_batch_size={was.global_batch}, or pass accept_changes=true to continue "
            f"with {asked}",
        )
    contract = fresh if change else stored.on_ranks(world_size)
    # On a different number of ranks such a loss compares a different number of samples at a time.
    if gathers and not change:
        change = SplitChange(was, contract.plan).for_gather()
    if config.exact and contract.plan.split_for_ranks:
        change = change or Change(
            f"a step has {was.num_leaves} x {was.leaf_size} samples, too few micro-batches for "
            f"{world_size} ranks: smaller ones would change the bits of exact mode",
            f"use at most {count_ranks(was.num_leaves)}, or pass accept_changes=true to "
            "continue with smaller micro-batches and other bits",
        )
        # From now on the bits are again the same for any number of ranks.
        contract = replace(contract, plan=contract.plan.halved_for_ranks())
    return contract, change


def _fresh_for(was: BatchPlan, config: RunConfig, data: Any, world_size: int) -> Contract:
    """Return the contract of a new run, to compare with that of the checkpoint."""
    try:
        return fresh_contract(config, data, world_size)
    except ConfigError:
        if world_size <= was.began_on:
            raise
        # A new run on this many ranks would need a larger step than the settings or data allow.
        # A resumed run keeps the step it began with.
        return fresh_contract(config, data, was.began_on).on_ranks(world_size)


def fresh_contract(config: RunConfig, data: Any, world_size: int) -> Contract:
    """Return the batch and rate contract of a new run."""
    plan = plan_for(data, config.batch, world_size)
    effective = scaled_rate(config.rate, world_size, plan.global_batch)
    return Contract(plan, config.rate.lr, config.rate.lr_scaling, effective, config.seed)


def _stored_contract(checkpoint: Checkpoint) -> Contract:
    if "contract" not in checkpoint.meta:
        raise CheckpointError(
            f"{checkpoint.path} was saved by a custom loop",
            "resume it with that loop, or use another output_dir",
        )
    return Contract.from_json(checkpoint.meta["contract"])


def check_batch_norm(
    model: nn.Module, checkpoint: Checkpoint | None, plan: BatchPlan, config: RunConfig
) -> None:
    """Refuse a resume in which batch normalisation sees a different number of samples at a time.

    Raises:
        ConfigError: with the number of samples, before and now.
    """
    if checkpoint is None or config.accept_changes:
        return
    change = SplitChange(_stored_contract(checkpoint).plan, plan)
    before, now = _normalised(checkpoint, plan, model)
    instead = also = ""
    if config.sync_batch_norm:
        size, rest = divmod(before, plan.world_size)
        if not rest:
            instead = f"set batch.batch_size={size} (still {plan.global_batch} samples a step), "
    elif not synchronises_itself(model):
        also = f"; together with sync_batch_norm=true statistics see {plan.samples_at_once} samples"
    change.raise_for_batch_norm(before, now, instead, also)


def describe_micro_batches(
    checkpoint: Checkpoint, plan: BatchPlan, model: nn.Module, exact: bool
) -> list[str]:
    """Return the lines to print if a resumed run splits a step into other micro-batches."""
    was = _stored_contract(checkpoint).plan
    if (was.global_batch, was.batch_size) != (plan.global_batch, plan.batch_size):
        return []  # the user asked for that
    lines = []
    if plan.leaf_size != was.leaf_size:
        lines.append(
            f"saved on {count_ranks(was.world_size)}, resumed on {count_ranks(plan.world_size)}: "
            f"micro-batches of {plan.leaf_size} samples instead of {was.leaf_size}, "
            f"still {plan.global_batch} samples a step"
            + ("; warning: the bits differ from here on" if exact else "")
        )
    before, now = _normalised(checkpoint, plan, model)
    if before != now:
        lines.append(
            f"warning: batch normalisation sees {now} samples at a time instead of {before}"
        )
    return lines


def _normalised(checkpoint: Checkpoint, plan: BatchPlan, model: nn.Module) -> tuple[int, int]:
    """Return the number of samples that batch normalisation sees at a time, before and now."""
    if not has_batch_norm(model):
        return 0, 0
    was = _stored_contract(checkpoint).plan
    own = synchronises_itself(model)
    was_synchronised = own or checkpoint.meta["config"].get("sync_batch_norm", False)
    is_synchronised = own or any(isinstance(m, SyncBatchNorm) for m in model.modules())
    before = was.samples_at_once if was_synchronised else was.leaf_size
    now = plan.samples_at_once if is_synchronised else plan.leaf_size
    return before, now


def flat_settings(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted names.

    >>> flat_settings({"seed": 1, "rate": {"lr": 0.1}})
    {'seed': 1, 'rate.lr': 0.1}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        below = isinstance(value, Mapping) and value
        flat |= flat_settings(value, f"{above}{name}.") if below else {above + name: value}
    return flat


def is_among(name: str, names: Iterable[str]) -> bool:
    """Return whether a dotted name is one of `names`, or below one."""
    return any(f"{name}.".startswith(f"{above}.") for above in names)


def free_settings(checkpoint: Checkpoint) -> Sequence[str]:
    """Return the settings that may change because no evaluation has been the best yet."""
    if "contract" not in checkpoint.meta:
        return ()
    return OF_BEST if load_progress(checkpoint).best is None else ()


def changes_best(checkpoint: Checkpoint, config: RunConfig) -> bool:
    """Return whether another metric, or the other direction, now decides what is best."""
    then = _saved_settings(checkpoint)
    now = flat_settings(config.model_dump(mode="json"))
    return any(now[name] != then.get(name) for name in OF_BEST)


def _saved_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's settings; one that is missing had its default value."""
    defaults = flat_settings(RunConfig().model_dump(mode="json"))
    return defaults | flat_settings(checkpoint.meta.get("config", {}))


def changed_settings(
    checkpoint: Checkpoint,
    config: RunConfig,
    task_settings: Mapping[str, Any],
    may_change: Sequence[str] = (),
    free: Sequence[str] = (),
) -> list[str]:
    """Return the changed settings that decide the result, as "name old -> new".

    The task's settings at or below a name in `may_change` may change, and so may the run's
    settings in `free`.
    """
    if "config" not in checkpoint.meta:
        return []
    now = flat_settings(config.model_dump(mode="json"))
    then = _saved_settings(checkpoint)
    binding = BINDING + (ROUNDING if config.exact else ())
    names = [name for name in now if is_among(name, binding) and name not in free]
    pairs = [(name, then.get(name), now[name]) for name in names]
    if "task" in checkpoint.meta:
        old = flat_settings(checkpoint.meta["task"])
        new = flat_settings(json.loads(json.dumps(task_settings)))
        names = [n for n in sorted(old.keys() | new.keys()) if not is_among(n, may_change)]
        pairs += [(f"task.{name}", old.get(name), new.get(name)) for name in names]
    return [f"{name} {old!s:.200} -> {new}" for name, old, new in pairs if old != new]


def take_fingerprints(
    data: Any, held_out: Any, seed: int, checkpoint: Checkpoint | None, is_full: bool
) -> dict[str, Any]:
    """Return fingerprints of the data, comparable with the checkpoint's; see `take_fingerprint`."""
    before = checkpoint.meta.get("data", {}) if checkpoint else {}
    named = {"training": data, "held-out": held_out}
    return {
        name: take_fingerprint(dataset, seed, before.get(name), is_full)
        for name, dataset in named.items()
    }


def changed_data(
    checkpoint: Checkpoint | None, now: Mapping[str, Any], data: Mapping[str, Any]
) -> list[str]:
    """Return the changes of the data since the checkpoint; `now` are their fingerprints."""
    before = checkpoint.meta.get("data", {}) if checkpoint else {}
    found = {name: differences(before.get(name, {}), now[name], data[name]) for name in now}
    return [f"{name} data: {change}" for name, change in found.items() if change]


def warnings_of(checkpoint: Checkpoint, config: RunConfig) -> list[str]:
    """Return warnings about a checkpoint that the run resumes from."""
    then = {**RunConfig().model_dump(), **checkpoint.meta.get("config", {})}
    now = config.model_dump(include={"epochs", "max_steps"})
    lengths = [f"{n} {then[n]} -> {value}" for n, value in now.items() if then[n] != value]
    warnings = []
    if lengths and config.schedule.shape == "cosine":
        warnings.append(f"the cosine schedule has a different length: {', '.join(lengths)}")
    if "data" not in checkpoint.meta:
        warnings.append(f"{checkpoint.path} has no fingerprints of its data: not compared")
    return warnings
