"""How a certified run differs from the command as it was typed.

Owns: the settings that certify passes to its callback, and the config that follows from them: few
steps, a folder of its own and, in parity, the same global batch and learning rate for every number
of ranks. Does not own: when they take effect (`callback.py`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import RunConfig
from lockstep.dist.ddp import GradientConfig
from lockstep.errors import ConfigError
from lockstep.observe.sinks import SinkConfig
from lockstep.plan import RateConfig, scaled_rate
from lockstep.task import Task


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of one certified run."""

    steps: int
    most_ranks: int = 0
    """In parity, the largest number of ranks: its global batch and rate are those of all. Or 0."""
    kills: bool = False
    """Whether the first rank kills itself once, after the step behind the first save."""
    reverses: bool = False
    """Whether the micro-batches of each step come in reverse order, to see what rounding does."""
    exact: bool = False
    evaluates: bool = False
    """Whether a few held-out samples are evaluated at each save."""

    def save_step(self, steps_per_epoch: int = 1) -> int:
        """Return the step to save after: half-way, and not at the end of an epoch."""
        half = max(1, self.steps // 2)
        ends_epoch = steps_per_epoch > 1 and half % steps_per_epoch == 0
        return half - 1 if ends_epoch else half

    def config(self, task: Task, config: RunConfig, world_size: int, folder: Path) -> RunConfig:
        """Return the config of this run, which writes to `folder`."""
        update: dict[str, Any] = {
            "output_dir": str(folder),
            "resume": "auto",
            "epochs": None,
            "max_steps": self.steps,
            "log_every": 1,
            "sinks": SinkConfig(curves=False),
        }
        if self.exact:  # which excludes these
            update |= {"exact": True, "sync_batch_norm": False, "parallel": "ddp"}
            update["gradients"] = GradientConfig()
        config = config.model_copy(update=update)
        if self.most_ranks:
            config = config.model_copy(
                update=batch_and_rate(task, config, world_size, self.most_ranks)
            )
        return config


def batch_and_rate(
    task: Task, config: RunConfig, world_size: int, most_ranks: int
) -> dict[str, Any]:
    """Return a batch and a rate with which every number of ranks takes the same steps.

    Micro-batches stay the same, unless the samples of all ranks are combined: then fewer ranks
    have larger micro-batches, so that the same samples are combined.
    """
    batch = config.batch
    size = batch.batch_size
    total = batch.global_batch_size
    if combines_ranks(task, config):
        total = total or size * most_ranks
        if total % world_size:
            raise ConfigError(
                f"a batch of {total} cannot be divided among {world_size} ranks, whose samples "
                "are combined by the loss or batch normalisation",
                f"pass --gpus with divisors of {total}",
            )
        size = total // world_size
    total = total or size * batch.accumulate * most_ranks
    rate = scaled_rate(config.rate, most_ranks, total)
    update = {"batch_size": size, "accumulate": 1, "global_batch_size": total}
    # As typed, a run that accumulates drops no micro-batch; with global_batch_size it would.
    update["drop_last"] = batch.drop_last and batch.accumulate == 1
    return {"batch": batch.model_copy(update=update), "rate": RateConfig(lr=rate)}


def combines_ranks(task: Task, config: RunConfig) -> bool:
    """Return whether samples of several ranks are combined before the gradient is.

    In exact mode it makes no difference which rank holds a micro-batch.
    """
    return not config.exact and (task.gathers or config.sync_batch_norm)
