"""The batch and learning-rate contract: what a step consumes, and at which rate.

Owns: the arithmetic of micro-batch x accumulation x ranks, steps per epoch,
dropped samples, and the scaling rules. Pure: the same numbers are printed by
`lockstep plan` before a run, at its start, and stored in its checkpoints.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from lockstep.errors import ConfigError

Rule = Literal["none", "linear", "sqrt", "batch"]


class BatchConfig(BaseModel):
    """How many samples a step consumes.

    State `batch_size` (one micro-batch on one GPU) and `accumulate`, or
    `batch_size` and `global_batch_size`, from which accumulation follows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: PositiveInt = 32
    accumulate: PositiveInt = 1
    global_batch_size: PositiveInt | None = None
    drop_last: bool = True

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> Self:
        if self.global_batch_size is not None and self.accumulate != 1:
            raise ValueError("give accumulate or global_batch_size, not both")
        return self


class RateConfig(BaseModel):
    """The base learning rate and the rule that adapts it to the number of GPUs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: PositiveFloat = Field(default=1e-4, allow_inf_nan=False)
    lr_scaling: Rule = "none"
    reference_batch: PositiveInt | None = None
    """The global batch that `lr` was found at; `batch` scales from it, or from 256."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step's global batch, cut into leaves: micro-batches of a fixed size.

    Leaves belong to the step, not to a rank. Ranks take contiguous runs of them,
    so the same leaves are computed for every number of ranks, divisor or not, as
    long as there is one for each rank. More ranks get smaller leaves.
    """

    num_samples: int
    batch_size: int
    leaves_per_step: int
    samples_per_epoch: int
    world_size: int
    halvings: int = 0
    """How often leaves have been halved for good: for want of memory, or in exact mode for more
    ranks than the step had leaves."""
    planned_for: int = 0
    """How many ranks the run began on; 0 in checkpoints of 0.1."""
    cut_for_ranks: int = 0
    """Samples of a leaf where there are more ranks than leaves of the batch size, or 0."""

    @property
    def leaf_size(self) -> int:
        """Return the samples of one leaf: the batch size, or less if it was cut."""
        halved = math.ceil(self.batch_size / (1 << self.halvings))
        return min(halved, self.cut_for_ranks or halved)

    @property
    def began_on(self) -> int:
        """Return the number of ranks that the numbers follow from."""
        return self.planned_for or self.world_size

    @property
    def total_batch(self) -> int:
        """Return the samples of one micro-batch on every rank: those that can meet in a loss."""
        return min(self.leaf_size * self.world_size, self.global_batch)

    @property
    def global_batch(self) -> int:
        """Return the samples of one step, also called the effective batch."""
        return self.batch_size * self.leaves_per_step

    @property
    def accumulate(self) -> int:
        """Return the most micro-batches a rank computes in one step."""
        return math.ceil(self.num_leaves / self.world_size)

    @property
    def num_leaves(self) -> int:
        """Return the micro-batches of a whole step, on all ranks together."""
        return math.ceil(self.global_batch / self.leaf_size)

    @property
    def steps_per_epoch(self) -> int:
        """Return the weight updates of an epoch; its last step may be smaller."""
        return math.ceil(self.samples_per_epoch / self.global_batch)

    @property
    def dropped(self) -> int:
        """Return the samples an epoch leaves out; the next epoch's shuffle leaves out others."""
        return self.num_samples - self.samples_per_epoch

    def halved(self) -> Self:
        """Return the plan with the next smaller leaves, for good; the global batch stays."""
        smaller = replace(self, halvings=self.halvings + 1)
        while smaller.leaf_size == self.leaf_size > 1:  # they may be smaller already, for the ranks
            smaller = replace(smaller, halvings=smaller.halvings + 1)
        return smaller

    def on_ranks(self, world_size: int) -> Self:
        """Return the plan with the same global batch on another number of ranks.

        Where a step has too few leaves, it is cut into one for each rank.
        """
        plan = replace(self, world_size=world_size, planned_for=self.began_on, cut_for_ranks=0)
        if plan.num_leaves >= world_size:
            return plan
        return replace(plan, cut_for_ranks=math.ceil(plan.global_batch / world_size))

    def with_cut_of(self, other: "BatchPlan") -> Self:
        """Return the plan with the micro-batches of `other`, if as many samples meet at a time.

        That matters where samples of all ranks meet: 2 ranks x 4 samples are then 1 rank x 8.
        """
        mine, theirs = (
            (self.total_batch, self.global_batch),
            (other.total_batch, other.global_batch),
        )
        if mine != theirs:
            return self
        return replace(
            self,
            batch_size=other.batch_size,
            leaves_per_step=other.leaves_per_step,
            planned_for=self.began_on,
            halvings=0,
            cut_for_ranks=0,
        )

    def halved_for_ranks(self) -> Self:
        """Return the plan with leaves halved for good until there is one for each rank."""
        plan = replace(self, cut_for_ranks=0)
        while plan.num_leaves < plan.world_size:
            plan = plan.halved()
        return plan


@dataclass(frozen=True, slots=True)
class CutChange:
    """A step that is cut for other ranks than the checkpoint's: what a loss may notice of it."""

    was: BatchPlan
    now: BatchPlan

    @property
    def matters(self) -> bool:
        """Say whether any samples meet now that did not meet before, or the other way round."""
        was, now = self.was, self.now
        return (was.leaf_size, was.total_batch) != (now.leaf_size, now.total_batch)

    def raise_for_batch_norm(
        self, before: int, now: int, instead: str = "", also: str = ""
    ) -> None:
        """Refuse batch normalisation over `now` samples at a time where it was `before`.

        `instead` is another remedy than the old number of ranks; `also` is added at the end.

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

    def raise_for_gather(self) -> None:
        """Refuse a loss that compares the samples of all ranks, where others would meet now.

        Raises:
            ConfigError: with the samples that met, and would meet.
        """
        was = self.was
        if self.now.total_batch != was.total_batch:
            raise ConfigError(
                f"the loss compares the samples of all ranks: the checkpoint was trained with "
                f"{was.total_batch} at a time ({was.leaf_size} x {was.world_size} ranks), this run "
                f"would have {self.now.total_batch}",
                f"use {count_ranks(was.world_size)}, or pass accept_changes=true",
            )


def count_ranks(num: int) -> str:
    """Return a number of ranks in words.

    >>> count_ranks(1), count_ranks(2)
    ('1 rank', '2 ranks')
    """
    return "1 rank" if num == 1 else f"{num} ranks"


def plan_batches(config: BatchConfig, num_samples: int, world_size: int) -> BatchPlan:
    """Solve micro-batch x accumulation x ranks for a data set of `num_samples`.

    >>> plan = plan_batches(BatchConfig(batch_size=4), num_samples=29_500, world_size=8)
    >>> plan.steps_per_epoch, plan.dropped, plan.global_batch
    (921, 28, 32)

    Raises:
        ConfigError: if the numbers do not fit, with ones that do.
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
        raise ConfigError("there are 0 samples to train on", "look at the data folder and filters")
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
    """What a run promised when it began: its batch plan and its rate. Stored in checkpoints."""

    plan: BatchPlan
    base_lr: float
    lr_scaling: str
    effective_lr: float
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it as plain numbers and words."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """Rebuild it from a checkpoint."""
        return cls(**{**stored, "plan": BatchPlan(**stored["plan"])})

    def describe(self) -> list[str]:
        """Return the lines printed at the start of every run."""
        plan = self.plan
        factor = self.effective_lr / self.base_lr
        return [
            f"Batch size: {plan.leaf_size} per GPU, "
            f"{plan.total_batch} total (x {plan.world_size}), "
            f"{plan.global_batch} effective (x {plan.accumulate} accumulated)",
            f"Steps per epoch: {plan.steps_per_epoch} "
            f"({plan.samples_per_epoch} of {plan.num_samples} samples, {plan.dropped} dropped)",
            f"Base LR: {self.base_lr:g}, rule: {self.lr_scaling}, factor: {factor:g}, "
            f"effective LR: {self.effective_lr:g}",
        ]


FROM_SCRATCH = "use another folder to start from scratch"


def resume_plan(
    stored: BatchPlan, fresh: BatchPlan, *others: tuple[str, Any, Any], instead: str = FROM_SCRATCH
) -> BatchPlan:
    """Return the plan of a resumed run: the stored global batch, on the ranks there are now.

    `others` are further numbers, by name, as they were and are; `instead` says what to do to
    train with the new ones.

    >>> stored = plan_batches(BatchConfig(batch_size=4), num_samples=100, world_size=4)
    >>> fewer = plan_batches(BatchConfig(batch_size=4), num_samples=100, world_size=2)
    >>> resume_plan(stored, fewer).accumulate
    2
    >>> more = plan_batches(BatchConfig(batch_size=4), num_samples=100, world_size=8)
    >>> resume_plan(stored, more).leaf_size
    2

    Raises:
        ConfigError: with each changed number, old and new.
    """
    changes = [*_plan_changes(stored, fresh), *others]
    changed = ", ".join(f"{name} {old} -> {new}" for name, old, new in changes if old != new)
    if changed:
        problem = f"the checkpoint was trained with other numbers: {changed}"
        raise ConfigError(problem, f"use the old numbers, or {instead}")
    if fresh.world_size > stored.global_batch:
        raise ConfigError(
            f"{fresh.world_size} ranks, but a step has {stored.global_batch} samples",
            f"use {stored.global_batch} ranks or fewer, or {instead}",
        )
    return stored.on_ranks(fresh.world_size)


def resume_contract(stored: Contract, fresh: Contract, accept_changes: bool) -> Contract:
    """Return the contract a resumed run trains under.

    Another number of ranks keeps the stored global batch and rate. Anything else
    that changes what a step does needs the user's word.

    Raises:
        ConfigError: with each changed number, old and new.
    """
    also = ["effective_lr"] if fresh.plan.world_size == stored.plan.began_on else []
    names = ["base_lr", "lr_scaling", "seed", *also]
    own = [(name, getattr(stored, name), getattr(fresh, name)) for name in names]
    changes = [*_plan_changes(stored.plan, fresh.plan), *own]
    too_many = fresh.plan.world_size > stored.plan.global_batch
    if accept_changes and (too_many or any(old != new for _, old, new in changes)):
        return fresh
    instead = "pass accept_changes=true to train on with the new ones"
    return replace(stored, plan=resume_plan(stored.plan, fresh.plan, *own, instead=instead))


def _plan_changes(stored: BatchPlan, fresh: BatchPlan) -> list[tuple[str, Any, Any]]:
    names = ["num_samples", "batch_size"]
    if fresh.world_size == stored.began_on:  # else they follow from the ranks there were
        names += ["global_batch", "samples_per_epoch"]
    return [(name, getattr(stored, name), getattr(fresh, name)) for name in names]
