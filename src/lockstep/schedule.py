"""Learning-rate schedules as pure functions of the step number.

Owns: the shape of a curve. Does not own: the optimizer, the base rate, or any
state. Because a schedule is a function and not an object, a resumed run needs
nothing from the checkpoint except the step. Steps are weight updates, whatever the
number of ranks or micro-batches.
"""

import math
from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt

Schedule = Callable[[int], float]
"""Maps a 0-based step to a multiplier of the base learning rate."""


class ScheduleConfig(BaseModel):
    """Warm up, then hold or decay. Warm-up epochs are converted with the real steps per epoch."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    shape: Literal["constant", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    warmup_epochs: float = Field(default=0.0, ge=0, le=1e6)
    floor: NonNegativeFloat = 0.0


def build_schedule(
    config: ScheduleConfig, steps_per_epoch: int | None, total_steps: int
) -> Schedule:
    """Return the schedule that `config` describes, for a run of `total_steps`."""
    warmup_steps = warmup_length(config, steps_per_epoch)
    if config.shape == "cosine":
        return warmup_cosine(warmup_steps, total_steps, config.floor)
    return warmup_constant(warmup_steps)


def warmup_length(config: ScheduleConfig, steps_per_epoch: int | None) -> int:
    """Return the warm-up in steps.

    >>> warmup_length(ScheduleConfig(warmup_epochs=5), steps_per_epoch=39)
    195
    """
    return config.warmup_steps or round(config.warmup_epochs * (steps_per_epoch or 0))


def warmup_constant(warmup_steps: int) -> Schedule:
    """Rise linearly for `warmup_steps`, then hold.

    The first step already trains: it gets `1 / warmup_steps`, not 0.

    >>> rate = warmup_constant(warmup_steps=4)
    >>> [rate(step) for step in (0, 3, 1000)]
    [0.25, 1.0, 1.0]
    """
    return lambda step: min(1.0, (step + 1) / max(1, warmup_steps))


def warmup_cosine(warmup_steps: int, total_steps: int, floor: float = 0.0) -> Schedule:
    """Rise linearly for `warmup_steps`, then fall as a half cosine to `floor` at the last step.

    >>> rate = warmup_cosine(warmup_steps=4, total_steps=10)
    >>> [round(rate(step), 2) for step in (0, 3, 4, 9)]
    [0.25, 1.0, 0.93, 0.0]
    """
    decay_steps = max(1, total_steps - warmup_steps)

    def rate(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step + 1 - warmup_steps) / decay_steps)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return rate
