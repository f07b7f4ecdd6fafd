"""One run of a certificate: what a process of the command does differently in it.

Owns: the config such a run gets (few steps, a folder of its own, in parity one global batch
and one rate for every number of ranks), the kill, and where the trace is written. Does not
own: how a process is reached (`cli/stage.py`), or any verdict.

Imports nothing but what it needs at once: it is read at the start of every Python process.
"""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import ConfigError
from lockstep.harness.attach import KILLED, TRACE, read_settings

NUM_HELD_OUT = 8


@dataclass(frozen=True, slots=True)
class Part:
    """How one run differs from the command as it was typed."""

    steps: int
    most_ranks: int = 0
    """In parity the largest world: its batch and its rate are everyone's. 0: as typed."""
    kills: bool = False
    reorders: bool = False
    """Add up the same step in another order: what rounding alone does."""
    exact: bool = False
    evaluates: bool = False

    @property
    def save_at(self) -> int:
        """Return the step to save after, if no epoch ends there."""
        return max(1, self.steps // 2)

    def config(self, task: Any, config: Any, world_size: int, folder: Path) -> Any:
        """Return the config that this run trains under."""
        from lockstep.observe.sinks import SinkConfig

        update: dict[str, Any] = {
            "output_dir": str(folder / "run"),
            "resume": "auto",
            "epochs": None,
            "max_steps": self.steps,
            "log_every": 1,
            "sinks": SinkConfig(curves=False),
        }
        if self.exact:
            from lockstep.dist.ddp import GradientConfig

            # One or the other.
            update |= {"exact": True, "sync_batch_norm": False, "parallel": "ddp"}
            update["gradients"] = GradientConfig()
        config = config.model_copy(update=update)
        if self.most_ranks:
            same = one_batch(task, config, world_size, self.most_ranks)
            config = config.model_copy(update=same)
        return config


def one_batch(task: Any, config: Any, world_size: int, most_ranks: int) -> dict[str, Any]:
    """Return batch and rate such that every number of ranks takes the same steps.

    Where samples of all ranks meet, in a loss or in batch normalisation, the same step is the
    same samples at a time: then micro-batches grow as ranks get fewer. Else they stay.
    """
    from lockstep.plan import RateConfig, scaled_rate

    batch = config.batch
    size, total = batch.batch_size, batch.global_batch_size
    if is_joint(task, config):
        total = total or size * most_ranks
        if total % world_size:
            raise ConfigError(
                f"a batch of {total} cannot be shared out among {world_size} ranks, and its "
                "samples meet",
                f"pass --gpus with divisors of {total}",
            )
        size = total // world_size
    total = total or size * batch.accumulate * most_ranks
    rate = scaled_rate(config.rate, most_ranks, total)
    update = {"batch_size": size, "accumulate": 1, "global_batch_size": total}
    update["drop_last"] = batch.drop_last and batch.accumulate == 1  # it drops no leaf, as typed
    return {"batch": batch.model_copy(update=update), "rate": RateConfig(lr=rate)}


def is_joint(task: Any, config: Any) -> bool:
    """Say whether samples of several ranks meet before the gradient does.

    In exact mode the micro-batches of a step meet, whoever holds them.
    """
    return bool(not config.exact and (task.gathers or config.sync_batch_norm))


def only_within_a_run(module: ModuleType, is_in_run: Callable[[], bool], why: str) -> None:
    """Have `train_step` refuse a loop around it alone, which would train for real, to its end."""
    train_step = module.train_step

    def within_a_run(*args: Any, **named: Any) -> Any:
        if not is_in_run():
            raise ConfigError(
                f"a loop around train_step alone {why}",
                "write the loop with prepare and a Trainer, as docs/own_loop.md shows",
            )
        return train_step(*args, **named)

    module.train_step = within_a_run  # type: ignore[attr-defined]


class Actor:
    """One process's share of such a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.part = Part(**read_settings(folder))
        self.kill_at = 0
        self.is_joint = False
        self.is_in_run = False
        self.takes_own_steps = True
        """Whether the loop calls `train_step` itself: then with which loss is not known here."""
        self.tracer: Any = None

    @property
    def scenes(self) -> dict[str, Callable[[ModuleType], None]]:
        """Return what to do to which module once it is imported."""
        return {
            "lockstep.run.build": self.enter_setup,
            "lockstep.step.train_step": self.enter_step,
            "lockstep.trainer": self.enter_trainer,
        }

    def enter_setup(self, module: ModuleType) -> None:
        """Give the run its config, and a save in the middle of an epoch."""
        prepare = module.prepare
        module.rehearsed = lambda config: config  # type: ignore[attr-defined]  # as few steps as we say

        def staged(task: Any, config: Any, world: Any, stack: Any, *more: Any) -> Any:
            self.is_in_run = True
            config = self.part.config(task, config, world.size, self.folder)
            self.is_joint = self.part.most_ranks > 0 and is_joint(task, config)
            run = prepare(task, config, world, stack, *more)
            save_at, per_epoch = self.part.save_at, run.contract.plan.steps_per_epoch
            if per_epoch > 1 and save_at % per_epoch == 0:
                save_at -= 1
            self.kill_at = save_at + 1
            run.held_out = self._held_out(run.held_out)
            often = {"every_epochs": None, "every_steps": save_at}
            sections = {name: getattr(run.config, name) for name in ("checkpoint", "evaluation")}
            update = {name: s.model_copy(update=often) for name, s in sections.items()}
            if self.part.kills and not (self.folder / KILLED).exists():
                # Waited for, or there might be nothing to go on from.
                waited = update["checkpoint"].model_copy(update={"background": False})
                update["checkpoint"] = waited
            run.config = run.config.model_copy(update=update)
            return run

        module.prepare = staged  # type: ignore[attr-defined]

    def _held_out(self, data: Any) -> Any:
        if data is None or not self.part.evaluates:
            return None
        return [data[index] for index in range(min(NUM_HELD_OUT, len(data)))]

    def enter_step(self, module: ModuleType) -> None:
        """Refuse a loop that would train for real, to its end, and leave no trace."""
        only_within_a_run(module, lambda: self.is_in_run, "leaves nothing to compare")

    def enter_trainer(self, module: ModuleType) -> None:
        """Trace every step; end in mid-epoch as a power cut would."""
        from lockstep.certify.trace import Tracer

        actor, kind = self, module.Trainer
        steps, step, record_step = kind.steps, kind.step, kind.record_step

        def traced_steps(self: Any) -> Iterator[Any]:
            part = actor.part
            actor.tracer = Tracer(self.run, actor.folder / TRACE, part.steps, actor.is_joint)
            actor.tracer.begin()
            for batch in steps(self):
                given = reordered(batch) if part.reorders else batch
                actor.tracer.receive(given)
                yield given

        def traced_step(self: Any, batch: Any) -> None:
            actor.takes_own_steps = False
            step(self, batch)

        def traced_took(self: Any, report: Any, batch: Any) -> None:
            record_step(self, report, batch)
            actor.tracer.step(report, batch)
            actor.maybe_cut(self.run, batch)
            actor.maybe_die(self)

        kind.steps, kind.step, kind.record_step = traced_steps, traced_step, traced_took

    def maybe_cut(self, run: Any, batch: Any) -> None:
        """After the last step of parity on one rank, cut its micro-batches in another way."""
        from lockstep.certify.cut import Cut, measure_cut

        part = self.part
        if not part.most_ranks or part.reorders or run.world.size > 1:
            return
        if run.progress.step == part.steps:
            own = Cut("a custom loop takes its own steps")
            self.tracer.write_cut(own if self.takes_own_steps else measure_cut(run, batch))

    def maybe_die(self, trainer: Any) -> None:
        """Be killed, once, after the step behind the first save; nothing is told, or flushed."""
        run, killed = trainer.run, self.folder / KILLED
        is_time = self.part.kills and run.progress.step == self.kill_at
        if is_time and run.world.is_first and not killed.exists():
            killed.write_text(str(self.kill_at))
            os.kill(os.getpid(), signal.SIGKILL)


def reordered(batch: Any) -> Any:
    """Return the same step with its micro-batches, or the samples of its only one, reversed."""
    if len(batch.micro_batches) > 1:
        return replace(batch, micro_batches=batch.micro_batches[::-1])
    (only,) = batch.micro_batches
    flipped = replace(only, ids=only.ids[::-1].copy(), data=_flipped(only.data, len(only.ids)))
    return replace(batch, micro_batches=[flipped])


def _flipped(tree: Any, num: int) -> Any:
    import torch

    if isinstance(tree, torch.Tensor):
        return tree.flip(0) if tree.ndim and len(tree) == num else tree
    if isinstance(tree, dict):
        return {key: _flipped(value, num) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_flipped(value, num) for value in tree))
    if isinstance(tree, list) and len(tree) == num and not isinstance(tree[0], torch.Tensor):
        return tree[::-1]
    if isinstance(tree, list | tuple):
        return type(tree)(_flipped(value, num) for value in tree)
    return tree
