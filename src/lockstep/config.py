"""RunConfig: everything that decides a run, checked before it starts.

Owns: gathering the sections, and those that say when to evaluate and save. Does not own: the other
sections, which are defined next to the code that reads them; turning text into values and reporting
bad ones (`parse.py`).
"""

import functools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from lockstep.data.workers import LoaderConfig
from lockstep.dist.ddp import GradientConfig
from lockstep.dist.detect import MAX_TIMEOUT_S
from lockstep.errors import ConfigError, own_exit_code, shown
from lockstep.observe.sinks import SinkConfig
from lockstep.parse import in_a_sentence, parse_model, parse_override, section_of, unknown_key
from lockstep.plan import BatchConfig, RateConfig
from lockstep.schedule import ScheduleConfig

_exactly = functools.cache(lambda number: Fraction(str(number)))
"""An exact number: 0.1 is a tenth, not the nearest float."""


class Cadence(BaseModel):
    """When to do something: every N epochs, every N steps, or both, and always at the end."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    every_epochs: PositiveFloat | None = Field(default=1, allow_inf_nan=False)
    """May be a fraction: 0.5 means twice per epoch."""
    every_steps: PositiveInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _steps_alone(cls, values: Any) -> Any:
        """Drop the default of one epoch if only `every_steps` is set."""
        if isinstance(values, Mapping) and values.get("every_steps"):
            return {"every_epochs": None, **values}
        return values

    def is_due(self, step: int, epochs: Fraction | int | None, since: Fraction | int = 1) -> bool:
        """Return whether it is due after `step` steps.

        `epochs` is the number of epochs done, `since` the number since the last call: it is
        due if a multiple of `every_epochs` lies between. None means epochs do not count.

        >>> Cadence(every_epochs=2).is_due(step=6, epochs=2), Cadence().is_due(step=7, epochs=None)
        (True, False)
        >>> tenths = [Fraction(step, 10) for step in range(1, 11)]
        >>> [Cadence(every_epochs=0.25).is_due(0, t, Fraction(1, 10)) for t in tenths].count(True)
        4
        """
        by_epochs = False
        if self.every_epochs and epochs is not None:
            every = _exactly(self.every_epochs)
            by_epochs = epochs // every > (epochs - since) // every
        return by_epochs or bool(self.every_steps and step % self.every_steps == 0)


class EvaluationConfig(Cadence):
    """When to evaluate, and how to choose the best checkpoint."""

    batch_size: PositiveInt | None = None
    save_best: bool = True
    """Save a checkpoint when an evaluation is the best so far, and name it `best_model.pt`."""
    best_metric: str = "loss"
    best_is: Literal["lowest", "highest"] = "lowest"


class CheckpointConfig(Cadence):
    """When to save, and how many unnamed checkpoints to keep."""

    keep_last: PositiveInt = 3
    """Named checkpoints (the best one, and those of `name_epochs`) are kept in addition."""
    name_epochs: bool = False
    """Name checkpoints at the end of an epoch `checkpoint_epoch_N.pt`, which keeps them."""
    name_steps: bool = False
    """Name checkpoints of `every_steps` `checkpoint_step_N.pt`, which keeps them."""
    background: bool = True
    sharded: bool = False
    """Let every rank write a share of the state, instead of the first rank all of it."""
    on_failed_save: Annotated[
        Literal["stop", "continue"],
        BeforeValidator(lambda value: "continue" if value == "go_on" else value),
    ] = "stop"
    """`stop`: a failed save ends the run, before it can lose much. `continue` (formerly `go_on`,
    which is still accepted): the run warns and tries again at the next save; only the last save of
    a run must succeed."""


class RunConfig(BaseModel):
    """How to train; the task defines what to train.

    >>> config = RunConfig.parse({"epochs": 3, "batch": {"batch_size": 8}})
    >>> config.with_overrides(["batch.batch_size=16"]).batch.batch_size
    16
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    output_dir: str = "output"
    seed: int = 0
    epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    batch: BatchConfig = Field(default_factory=BatchConfig)
    rate: RateConfig = Field(default_factory=RateConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    loader: LoaderConfig = Field(default_factory=LoaderConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    sinks: SinkConfig = Field(default_factory=SinkConfig)
    precision: Literal["fp32", "bf16", "fp16", "auto"] = "fp32"
    max_grad_norm: PositiveFloat | None = None
    """Clip the gradient norm over all parameters to this; None: no clipping."""
    averages: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()
    sync_batch_norm: bool = False
    """Batch normalisation over all ranks: over the first micro-batch of each rank together, then
    over the second ones, and so on."""
    gradients: GradientConfig = Field(default_factory=GradientConfig)
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """`ddp`: every rank has the whole model. `fsdp`: every rank has some rows of each parameter."""
    exact: bool = False
    """Sum everything in a fixed order, so that any number of ranks gives the same bits."""
    num_threads: PositiveInt | None = None
    """CPU threads of each process (default: torch's choice, or 1 in exact mode)."""
    on_out_of_memory: Literal["halve", "stop"] = "halve"
    """`halve`: repeat the step with micro-batches of half the size, and keep that size."""
    on_non_finite: Literal["stop", "skip", "rewind"] = "stop"
    """A non-finite loss or gradient changes no weight. `stop`: end the run. `skip`: skip the step.
    `rewind`: restore the newest checkpoint's weights and skip all steps since."""
    compile: bool | Literal["graphs"] = False
    """Compile the model. `graphs`: also replay each pass as a CUDA graph, which helps if launching
    kernels is the bottleneck; all batches need the same shape."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: float = Field(default=1800.0, gt=0, le=MAX_TIMEOUT_S)
    log_every: PositiveInt = 10
    resume: str = "auto"
    """`auto`: resume from the newest valid checkpoint, if any. `never`: refuse a folder that holds
    one. `discard`: delete the run in the folder (checkpoints, events, samples, TensorBoard files)
    and start from scratch. Or the path of a checkpoint."""
    allow_shared_folder: bool = False
    """Allow an `output_dir` that every user can write to, or that belongs to another user."""
    accept_changes: bool = False
    """Resume even if batch size, learning rate or data have changed since the checkpoint."""

    if not TYPE_CHECKING:  # type checkers take the fields as arguments

        @own_exit_code()
        def __init__(self, **values: Any) -> None:
            """Build a config from values or sections.

            Raises:
                ConfigError: naming each bad key, as `parse` does.
            """
            with in_a_sentence(type(self), values):
                super().__init__(**values)

    def saving_every(self, steps: int, *, waits: bool = False) -> Self:
        """Return a copy that evaluates and saves every `steps` steps, perhaps in the foreground."""
        every: dict[str, Any] = {"every_epochs": None, "every_steps": steps}
        saving = every | ({"background": False} if waits else {})
        return self.model_copy(
            update={
                "evaluation": self.evaluation.model_copy(update=every),
                "checkpoint": self.checkpoint.model_copy(update=saving),
            }
        )

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        self.gradients.raise_if_unfit(self.exact, self.parallel)
        if self.exact and self.parallel == "fsdp":
            raise ValueError(
                "exact=true sums whole gradients, and parallel=fsdp shards them\n"
                "  try: set parallel=ddp, or exact=false"
            )
        if self.compile == "graphs" and self.parallel == "fsdp":
            raise ValueError(
                "compile=graphs needs parameters at fixed addresses, and parallel=fsdp gathers "
                "them at new ones\n  try: set compile=true, or parallel=ddp"
            )
        if self.exact and self.sync_batch_norm:
            raise ValueError(
                "exact=true normalises over each micro-batch, and sync_batch_norm=true over those "
                "of all ranks\n  try: unset exact or sync_batch_norm"
            )
        return self

    @classmethod
    @own_exit_code()
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Build a config from plain values.

        Raises:
            ConfigError: naming the path of each bad key, and the nearest known one.
        """
        return parse_model(cls, values)

    @own_exit_code()
    def with_overrides(self, overrides: Sequence[str]) -> Self:
        """Return a copy with `section.key=value` texts applied, type-checked like the rest."""
        values = self.model_dump(mode="json", exclude_unset=True)
        for text in overrides:
            (*sections, key), value = parse_override(text)
            kind: type[BaseModel] = type(self)
            target = values
            for section in sections:
                if section not in kind.model_fields:
                    raise unknown_key(section, kind, f"in --set {shown(text)}")
                below = section_of(kind, section)
                target = target.setdefault(section, {})
                if below is None or not isinstance(target, dict):
                    raise ConfigError(
                        f"{section} in --set {shown(text)} is a value, not a section of settings",
                        f"write --set {section}=value",
                    )
                kind = below
            target[key] = value
        return self.parse(values)
