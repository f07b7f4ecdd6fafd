"""What a process of a measured command does differently.

Owns: the config such a run gets (enough steps, a folder of its own, nothing saved or
evaluated), and the places of lockstep at which `lockstep bench` steps in. Does not own: how a
process is reached (`cli/stage.py`), or what is measured (`probe.py`).

Imports nothing but what it needs at once: it is read at the start of every Python process.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.cli.stage import OnImport
from lockstep.dist import position
from lockstep.errors import ConfigError
from lockstep.harness.attach import TRACE, read_settings

WARMUP_STEPS = 4
"""The first steps build buckets, choose kernels and fill caches."""
NEVER = 10**9
SHARDED = "a sharded model exchanges inside its passes: that is not told apart, nor forecast"


@dataclass(frozen=True, slots=True)
class BenchPart:
    """How much is measured."""

    steps: int
    """As they are, and as many with gradients kept local."""
    looks: bool = True
    """Whether further steps are counted and traced."""


def set_up(folder: str) -> None:
    """Have the parts of lockstep play along as soon as this process imports them."""
    sys.meta_path.insert(0, OnImport(Actor(Path(folder)).scenes))


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
    """One process's share of a measurement."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.part = BenchPart(**read_settings(folder))
        self.probe: Any = None

    @property
    def scenes(self) -> dict[str, Callable[[ModuleType], None]]:
        """Return what to do to which module once it is imported."""
        return {
            "lockstep.run.build": self.enter_setup,
            "lockstep.step.train_step": self.enter_step,
            "lockstep.trainer": self.enter_trainer,
        }

    def config(self, config: Any) -> Any:
        """Return the config to measure under."""
        from lockstep.observe.sinks import SinkConfig

        seldom = {"every_epochs": None, "every_steps": NEVER}
        return config.model_copy(
            update={
                "output_dir": str(self.folder / "run"),
                "resume": "auto",
                "epochs": None,
                "max_steps": NEVER,
                "exact": False,  # its sums are not an all-reduce
                "sinks": SinkConfig(curves=False),
                "evaluation": config.evaluation.model_copy(update=seldom),
                "checkpoint": config.checkpoint.model_copy(update=seldom),
            }
        )

    def enter_setup(self, module: ModuleType) -> None:
        """Give the run its config, and a probe."""
        prepare = module.prepare
        module.rehearsed = lambda config: config  # type: ignore[attr-defined]  # as many steps as we say

        def staged(task: Any, config: Any, world: Any, stack: Any, *more: Any) -> Any:
            from lockstep.bench.probe import Probe

            if world.device.type == "cuda" and world.backend == "gloo":
                raise ConfigError(
                    f"{world.size} processes would share a GPU, which says nothing of {world.size}",
                    "--gpus with no more than there are; the forecast is for the others",
                )
            self.probe = Probe(self.part, self.folder / TRACE)
            self.probe.attach(world)
            run = prepare(task, self.config(config), world, stack, *more)
            run.held_out = None
            if config.exact:
                self.probe.remarks.append("measured without exact mode")
            if config.parallel == "fsdp":
                self.probe.remarks.append(SHARDED)
            return run

        module.prepare = staged  # type: ignore[attr-defined]

    def enter_step(self, module: ModuleType) -> None:
        """Refuse a loop that would train for real, and to its end."""
        only_within_a_run(module, lambda: self.probe is not None, "cannot be measured")

    def enter_trainer(self, module: ModuleType) -> None:
        """Measure so many steps, then what they are made of, and leave."""
        actor, kind = self, module.Trainer
        steps, fetch = kind.steps, kind._fetch

        def measured_steps(self: Any) -> Iterator[Any]:
            probe = actor.probe
            probe.begin(self.run)
            taking = steps(self)
            for batch in taking:
                if probe.next_step():
                    break
                with probe.looking():
                    yield batch
                probe.step_done()
            taking.close()
            probe.finish()
            position.own.finish_run()  # as much of it as is measured
            sys.exit(0)

        def measured_fetch(self: Any, batches: Any) -> Any:
            with actor.probe.waiting():
                return fetch(self, batches)

        kind.steps, kind._fetch = measured_steps, measured_fetch
