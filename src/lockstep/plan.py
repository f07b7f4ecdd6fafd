"""The batch and learning-rate contract: samples per step, and the learning rate.

Owns: the arithmetic of micro-batch x accumulation x ranks, steps per epoch, dropped samples,
and the scaling rules. Does not own: which samples are in a step (`data/order.py`). All functions
are pure: `lockstep plan` prints the same numbers before a run as the run prints at its start and
stores in its checkpoints.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from lockstep.errors import ConfigError

Rule = Literal["none", "linear", "sqrt", "batch"]
MAX_COUNT: Final = 2**62
"""The length of a stream; no other number of samples, or of steps, is as large."""
OLD_NAMES = {"cut_for_ranks": "split_for_ranks"}
"""Fields of a plan that older checkpoints store under another name."""


class BatchConfig(BaseModel):
    """The number of samples in a step.

    Set `batch_size` (one micro-batch on one GPU) and `accumulate`, or
    `batch_size` and `global_batch_size`, from which accumulation follows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: PositiveInt = 32
    accumulate: PositiveInt = 1
    global_batch_size: PositiveInt | None = None
    drop_last: bool = True

    @model_validator(mode="after")
    def _refuse_two_step_sizes(self) -> Self:
        if self.global_batch_size is not None and self.accumulate != 1:
            raise ValueError(
                f"accumulate={self.accumulate} and global_batch_size={self.global_batch_size} "
                "both set the size of a step\n  try: set one of them, not both"
            )
        return self


class RateConfig(BaseModel):
    """The base learning rate and the rule that adapts it to the number of GPUs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: PositiveFloat = Field(default=1e-4, allow_inf_nan=False)
    lr_scaling: Rule = "none"
    reference_batch: PositiveInt | None = None
    """The global batch size that `lr` was tuned for, used by the rule `batch` (default: 256)."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step's global batch, split into leaves: micro-batches of a fixed size.

    Leaves belong to the step, not to a rank. Each rank takes a contiguous run of them, so
    every number of ranks, divisor or not, computes the same leaves, as long as there is one
    for each rank. With more ranks, leaves are smaller.
    """

    num_samples: int
    batch_size: int
    leaves_per_step: int
    samples_per_epoch: int
    world_size: int
    halvings: int = 0
    """How often leaves were permanently halved: when memory ran out, or in exact mode for more
    ranks than the step had leaves."""
    planned_for: int = 0
    """Number of ranks the run started with; 0 in checkpoints of version 0.1."""
    split_for_ranks: int = 0
    """Samples per leaf if there are more ranks than leaves of the batch size, else 0."""

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Rebuild a plan from a checkpoint.

        >>> plan = BatchPlan(100, 8, 1, 96, 2, split_for_ranks=4)
        >>> stored = asdict(plan)
        >>> stored["cut_for_ranks"] = stored.pop("split_for_ranks")  # as older versions did
        >>> BatchPlan.from_json(stored) == plan
        True
        """
        return cls(**{OLD_NAMES.get(name, name): value for name, value in stored.items()})

    @property
    def leaf_size(self) -> int:
        """Return the samples per leaf: the batch size, or less if leaves were split."""
        halved = math.ceil(self.batch_size / (1 << self.halvings))
        return min(halved, self.split_for_ranks or halved)

    @property
    def began_on(self) -> int:
        """Return the number of ranks that the plan was computed for."""
        return self.planned_for or self.world_size

    @property
    def samples_at_once(self) -> int:
        """Return the samples in one micro-batch on all ranks: those that one loss can compare."""
        return min(self.leaf_size * self.world_size, self.global_batch)

    @property
    def global_batch(self) -> int:
        """Return the samples per step, also called the effective batch size."""
        return self.batch_size * self.leaves_per_step

    @property
    def accumulate(self) -> int:
        """Return the largest number of micro-batches per rank and step."""
        return math.ceil(self.num_leaves / self.world_size)

    @property
    def num_leaves(self) -> int:
        """Return the number of micro-batches per step on all ranks together."""
        return math.ceil(self.global_batch / self.leaf_size)

    @property
    def steps_per_epoch(self) -> int:
        """Return the weight updates per epoch; the last step may be smaller."""
        return math.ceil(self.samples_per_epoch / self.global_batch)

    @property
    def dropped(self) -> int:
        """Return the samples that an epoch drops; each epoch's shuffle drops different ones."""
        return self.num_samples - self.samples_per_epoch

    def halved(self) -> Self:
        """Return the plan with permanently halved leaves and the same global batch."""
        smaller = replace(self, halvings=self.halvings + 1)
        while (
            smaller.leaf_size == self.leaf_size > 1
        ):  # leaves may already be smaller because of the ranks
            smaller = replace(smaller, halvings=smaller.halvings + 1)
        return smaller

    def on_ranks(self, world_size: int) -> Self:
        """Return the plan with the same global batch on a different number of ranks.

        If a step has fewer leaves than ranks, it is split into one per rank.
        """
        plan = replace(self, world_size=world_size, planned_for=self.began_on, split_for_ranks=0)
        if plan.num_leaves >= world_size:
            return plan
        return replace(plan, split_for_ranks=math.ceil(plan.global_batch / world_size))

    def with_split_of(self, other: "BatchPlan") -> Self:
        """Return the plan with the micro-batches of `other`, if the total batch is the same.

        This matters if a loss compares samples of all ranks: 2 ranks x 4 samples become
        1 rank x 8.
        """
        mine = (self.samples_at_once, self.global_batch)
        theirs = (other.samples_at_once, other.global_batch)
        if mine != theirs:
            return self
        return replace(
            self,
            batch_size=other.batch_size,
            leaves_per_step=other.leaves_per_step,
            planned_for=self.began_on,
            halvings=0,
            split_for_ranks=0,
        )

    def halved_for_ranks(self) -> Self:
        """Return the plan with leaves permanently halved until there is one per rank or sample."""
        plan = replace(self, split_for_ranks=0)
        while plan.num_leaves < min(plan.world_size, plan.global_batch):
            plan = plan.halved()
        return plan


class Change(NamedTuple):
    """A difference from the checkpoint that a resume must not make by itself."""

    problem: str
    remedy: str


@dataclass(frozen=True, slots=True)
class SplitChange:
    """How a step was split at the checkpoint and is split now, on a different number of ranks."""

    was: BatchPlan
    now: BatchPlan

    @property
    def matters(self) -> bool:
        """Return whether a loss would compare different samples than before."""
        was = self.was
        now = self.now
        return (was.leaf_size, was.samples_at_once) != (now.leaf_size, now.samples_at_once)

    def raise_for_batch_norm(
        self, before: int, now: int, instead: str = "", also: str = ""
    ) -> None:
        """Refuse batch normalisation over `now` samples at a time if it was over `before`.

        `instead` is an alternative to the old number of ranks; `also` is appended.

        Raises:
            ConfigError: they differ.
        """
        if before != now:
            raise ConfigError(
                f"batch normalisation would see {now} samples at a time on "
                f"{count_ranks(self.now.world_size)}; the checkpoint was trained with {before} on "
                f"{count_ranks(self.was.world_size)}",
                f"use {count_ranks(self.was.world_size)}, {instead}or pass "
                f"accept_changes=true{also}",
            )

    def for_gather(self) -> Change | None:
        """Return what changes for a loss that compares the samples of all ranks, or None."""
        was = self.was
        if self.now.samples_at_once == was.samples_at_once:
            return None
        return Change(
            f"the loss compares the samples of all ranks: the checkpoint was trained with "
            f"{was.samples_at_once} at a time ({was.leaf_size} x {was.world_size} ranks), "
            f"this run would have {self.now.samples_at_once}",
            f"use {count_ranks(was.world_size)}, or pass accept_changes=true",
        )

    def raise_for_gather(self) -> None:
        """Refuse a loss that compares the samples of all ranks, if it would compare others now.

        Raises:
            ConfigError: with both numbers of samples.
        """
        if change := self.for_gather():
            raise ConfigError(*change)


def count_ranks(num: int) -> str:
    """Return a number of ranks with its unit.

    >>> count_ranks(1), count_ranks(2)
    ('1 rank', '2 ranks')
    """
    return "1 rank" if num == 1 else f"{num} ranks"


def plan_batches(config: BatchConfig, num_samples: int, world_size: int) -> BatchPlan:
    """Plan micro-batch x accumulation x ranks for a data set of `num_samples`.

    >>> plan = plan_batches(BatchConfig(batch_size=4), num_samples=29_500, world_size=8)
    >>> plan.steps_per_epoch, plan.dropped, plan.global_batch
    (921, 28, 32)

    Raises:
        ConfigError: for impossible numbers, with possible ones.
    """
    batch = config.batch_size
    if config.global_batch_size is None:
        leaves = world_size * config.accumulate
        drop_unit = batch * world_size
    else:
        leaves, rest = divmod(config.global_batch_size, batch)
        drop_unit = config.global_batch_size
        if rest or leaves < world_size:
            fitting = max(world_size, round(config.global_batch_size / batch)) * batch
            raise ConfigError(
                f"global_batch_size={config.global_batch_size} is not a whole number of "
                f"micro-batches of {batch} for {world_size} ranks",
                f"pass global_batch_size={fitting}",
            )
    if num_samples == 0:
        raise ConfigError(
            "there are 0 samples to train on", "check the data folder and the filters"
        )
    kept = num_samples // drop_unit * drop_unit if config.drop_last else num_samples
    if kept == 0:
        smaller = 0 if config.global_batch_size else num_samples // world_size
        raise ConfigError(
            f"a batch of {batch} x {drop_unit // batch} = {drop_unit} is larger than the "
            f"{num_samples} samples there are",
            "pass " + (f"batch_size={smaller}, or " if smaller else "") + "drop_last=false",
        )
    return BatchPlan(num_samples, batch, leaves, kept, world_size, planned_for=world_size)


def scaled_rate(config: RateConfig, world_size: int, global_batch: int) -> float:
    """Return the effective learning rate.

    >>> scaled_rate(RateConfig(lr=1e-4, lr_scaling="linear"), world_size=8, global_batch=64)
    0.0008
    """
    factor = {
        "none": 1.0,
        "linear": float(world_size),
        "sqrt": math.sqrt(world_size),
        "batch": global_batch / (config.reference_batch or 256),
    }[config.lr_scaling]
    return config.lr * factor


@dataclass(frozen=True, slots=True)
class Contract:
    """A run's batch plan and learning rate, fixed at its start and stored in checkpoints."""

    plan: BatchPlan
    base_lr: float
    lr_scaling: str
    effective_lr: float
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the contract as plain numbers and strings."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """Rebuild a contract from a checkpoint."""
        return cls(**{**stored, "plan": BatchPlan.from_json(stored["plan"])})

    def on_ranks(self, world_size: int) -> Self:
        """Return the contract with the same global batch and rate on this many ranks."""
        return replace(self, plan=self.plan.on_ranks(world_size))

    def describe(self) -> list[str]:
        """Return the lines printed at the start of every run."""
        plan = self.plan
        factor = self.effective_lr / self.base_lr
        return [
            f"Batch size: {plan.leaf_size} per GPU, "
            f"{plan.samples_at_once} total (x {plan.world_size}), "
            f"{plan.global_batch} effective (x {plan.accumulate} accumulated)",
            f"Steps per epoch: {plan.steps_per_epoch} "
            f"({plan.samples_per_epoch} of {plan.num_samples} samples, {plan.dropped} dropped)",
            f"Base LR: {self.base_lr:g}, rule: {self.lr_scaling}, factor: {factor:g}, "
            f"effective LR: {self.effective_lr:g}",
        ]


def plan_change(
    stored: BatchPlan, fresh: BatchPlan, *others: tuple[str, Any, Any], instead: str
) -> Change | None:
    """Return what a resume would change about a step, or None if it can keep the stored plan.

    A different number of ranks is no change, as long as a step has a sample for each. `others` are
    more numbers to compare, by name, old and new; `instead` is the remedy for training with the
    new ones.

    >>> stored, fewer = (plan_batches(BatchConfig(), 100, world_size) for world_size in (2, 1))
    >>> plan_change(stored, fewer, instead="start over") is None
    True
    >>> plan_change(stored, fewer, ("seed", 0, 1), instead="start over").problem
    'settings or data have changed since the checkpoint: seed 0 -> 1'
    """
    names = ["num_samples", "batch_size"]
    if fresh.world_size == stored.began_on:  # otherwise they follow from the old number of ranks
        names += ["global_batch", "samples_per_epoch"]
    pairs = [*((name, getattr(stored, name), getattr(fresh, name)) for name in names), *others]
    changed = ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)
    if changed:
        problem = f"settings or data have changed since the checkpoint: {changed}"
        return Change(problem, f"restore the old values, or {instead}")
    if fresh.world_size > stored.global_batch:
        return Change(
            f"a step has {stored.global_batch} samples, too few for {fresh.world_size} ranks",
            f"use at most {count_ranks(stored.global_batch)}, or {instead}",
        )
    return None


def contract_change(stored: Contract, fresh: Contract) -> Change | None:
    """Return what a resume would change about a step or its rate, or None."""
    names = ["base_lr", "lr_scaling", "seed"]
    if fresh.plan.world_size == stored.plan.began_on:
        names.append("effective_lr")
    pairs = [(name, getattr(stored, name), getattr(fresh, name)) for name in names]
    instead = "pass accept_changes=true to continue with the new ones"
    return plan_change(stored.plan, fresh.plan, *pairs, instead=instead)
