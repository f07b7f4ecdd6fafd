"""Callbacks: what may watch or extend a run.

Owns: the methods a callback may have, calling them in order, and their saved state. Does not own:
when they are called; `trainer.py` says so, and `custom_loop.py` in a loop without a trainer.
"""

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.data.batch import StepBatch
    from lockstep.dist.collectives import Collectives
    from lockstep.step.report import StepReport

SAME_CALLBACKS = (
    "pass the same callbacks on every rank (one that writes may look at run.world.is_first), and "
    "set LOCKSTEP_CALLBACKS on every node"
)


class RunView(Protocol):
    """What a callback may rely on of a run, in `fit` and in a custom loop."""

    world: Any
    model: nn.Module
    """As it is trained: `lockstep.unwrap(model)` is the module that the task built."""
    optimizer: Optimizer

    @property
    def step(self) -> int:
        """How many weight updates were made."""

    def log(self, name: str, value: Tensor | float) -> None:
        """Add a number to the next log line, as a mean over calls and ranks."""

    def stop(self, reason: str) -> None:
        """Ask for a clean stop after this step, on every rank, once one of them asks."""


class Callback:
    """Every method does nothing: override what you need.

    The methods are called on every rank, in the same order. One that raises ends the run on all
    ranks; the steps before are saved first.
    """

    def configure(self, task: Any, config: "RunConfig", world: "Collectives") -> "RunConfig":
        """Return the settings to run with, before anything is built."""
        return config

    def on_run_start(self, run: RunView) -> None:
        """Look at a run that is built, and restored from its checkpoint if there is one.

        `run.config` may still be replaced by one that saves and evaluates at other times, and
        `run.held_out` by fewer samples.
        """

    def on_step_start(self, run: RunView, batch: "StepBatch") -> None:
        """Look at this rank's micro-batches before they are trained on; the list may be changed."""

    def on_step_end(self, run: RunView, batch: "StepBatch", report: "StepReport") -> None:
        """Look at a step that is done. Reading a number of `report` waits for a GPU."""

    def on_evaluation_end(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """Look at what an evaluation found."""

    def on_checkpoint_saved(self, run: RunView, path: Path) -> None:
        """Look at a checkpoint that is complete on the disk."""

    def on_run_end(self, run: RunView, result: Any) -> None:
        """Look at how the run ended: with its last step, or by a stop. Everything is saved."""

    def state_dict(self) -> dict[str, Any]:
        """Return what to save in checkpoints: the same on every rank."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, before `on_run_start`."""


class Callbacks(Sequence[Callback]):
    """The callbacks of a run, in the order in which they are called."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"{callback!r:.80} is not a lockstep.Callback",
                    "pass instances of classes that derive from lockstep.Callback",
                )
        self._callbacks = list(callbacks)

    def __getitem__(self, index: Any) -> Any:
        return self._callbacks[index]

    def __len__(self) -> int:
        return len(self._callbacks)

    def call(self, method: str, *args: Any) -> None:
        """Call one method of each callback. What it raises says which callback did."""
        for name, callback in self.named():
            try:
                getattr(callback, method)(*args)
            except Exception as error:
                error.add_note(f"in callback {name}.{method}")
                raise

    def configure(self, task: Any, config: "RunConfig", world: "Collectives") -> "RunConfig":
        """Return the settings that all callbacks agree to, each given those of the one before."""
        kind = type(config)
        for name, callback in self.named():
            config = callback.configure(task, config, world)
            if type(config) is not kind:
                raise ConfigError(
                    f"{name}.configure returned {config!r:.80}, not a {kind.__name__}",
                    "return the config that it was given, or config.with_overrides([...])",
                )
        return config

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of every callback that has one, by name."""
        states = {name: callback.state_dict() for name, callback in self.named()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Give each callback its state back; return the names of states that nobody took."""
        names = dict(self.named())
        for name in states.keys() & names.keys():
            names[name].load_state_dict(states[name])
        return sorted(states.keys() - names.keys())

    def named(self) -> Iterator[tuple[str, Callback]]:
        """Yield each callback with its class's name, numbered from the second of a class on."""
        seen: dict[str, int] = {}
        for callback in self._callbacks:
            name = type(callback).__name__
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name}_{seen[name]}"), callback


def load_callbacks(names: str) -> list[Callback]:
    """Build the callbacks that LOCKSTEP_CALLBACKS names: `module:Class`, separated by commas.

    Raises:
        ConfigError: one cannot be imported or built.
    """
    return [_load(name.strip()) for name in names.split(",") if name.strip()]


def _load(name: str) -> Callback:
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"LOCKSTEP_CALLBACKS={name}: {error}",
            "write module:Class, with the module's folder on PYTHONPATH",
        ) from error
    if not (inspect.isclass(kind) and issubclass(kind, Callback)):
        raise ConfigError(
            f"LOCKSTEP_CALLBACKS={name}: {attribute} is not a subclass of lockstep.Callback",
            "name a class that derives from lockstep.Callback and is built without arguments",
        )
    return kind()
