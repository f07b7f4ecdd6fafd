"""Callbacks, which watch or extend a run.

Owns: the methods of a callback, calling them in order, and their saved state. Does not own: when
they are called, which `trainer.py` decides, and `custom_loop.py` in a loop without a trainer.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.dist.agreement import (
    before_each_collective,
    call_together,
    check_same,
    is_shared,
    naming,
    together,
)
from lockstep.errors import ConfigError, shown

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.data.batch import StepBatch
    from lockstep.step.report import StepReport

SAME_CALLBACKS = (
    "pass the same callbacks on every rank (one that writes can check run.world.is_first), and "
    "set LOCKSTEP_CALLBACKS on every node"
)


class RunView(Protocol):
    """The attributes of a run that every callback can use, in `fit` and in a custom loop."""

    task: Any
    """None in a custom loop, as are `config` and `held_out`."""
    config: Any
    """The `RunConfig`."""
    held_out: Any
    """The held-out samples, or None."""
    world: Any
    model: nn.Module
    """The wrapped model: `lockstep.unwrap(model)` is the module that the task built."""
    optimizer: Optimizer

    @property
    def is_custom_loop(self) -> bool:
        """Whether the loop has no trainer, and only what this class lists."""

    @property
    def step(self) -> int:
        """Number of weight updates so far."""

    def log(self, name: str, value: Tensor | float) -> None:
        """Add a number to the next log line, as a mean over calls and ranks."""

    def stop(self, reason: str, *, save: bool = True) -> None:
        """Stop cleanly after this step, on every rank, as soon as one of them asks.

        With `save=False` the run ends without its last checkpoint, which is for a callback that
        has changed the weights. A custom loop saves as it likes.
        """


class Callback:
    """Base class whose methods do nothing: override the ones you need.

    The methods are called on every rank, in the same order. If one raises, the run saves the
    steps before and ends on all ranks.
    """

    communicates = False
    """Whether its methods call collectives of `run.world`. If so, the ranks vote after each of
    them, so that an error on one rank cannot leave the others waiting in a collective."""

    def configure(self, task: Any, config: "RunConfig", world: Any) -> "RunConfig":
        """Return the settings to run with, before anything is built; `world` is the `World`."""
        return config

    def on_run_start(self, run: RunView) -> None:
        """Called when the run is built and restored from its checkpoint, if there is one.

        You may still replace `run.config` by one that saves and evaluates at other times, and
        `run.held_out` by fewer samples.
        """

    def on_step_start(self, run: RunView, batch: "StepBatch") -> None:
        """Called before this rank's micro-batches are trained on; you may change the list."""

    def on_step_end(self, run: RunView, batch: "StepBatch", report: "StepReport") -> None:
        """Called after a step. Reading a number of `report` waits for the GPU."""

    def on_evaluation_end(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """Called with the metrics of an evaluation."""

    def on_checkpoint_saved(self, run: RunView, path: Path) -> None:
        """Called when a checkpoint is complete on disk."""

    def on_run_end(self, run: RunView, result: Any) -> None:
        """Called when the run has finished or stopped, and everything is saved."""

    def state_dict(self) -> dict[str, Any]:
        """Return state to save in checkpoints, the same on every rank."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; called before `on_run_start`."""


class Callbacks(Sequence[Callback]):
    """The callbacks of a run, in calling order."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"{callback!r:.80} is not a lockstep.Callback",
                    "pass instances of classes that derive from lockstep.Callback",
                )
            _check_methods(type(callback))
        self._callbacks = list(callbacks)
        self.error: Exception | None = None
        """The first error of a callback on this rank, until the ranks agree on it."""

    def __getitem__(self, index: Any) -> Any:
        return self._callbacks[index]

    def __len__(self) -> int:
        return len(self._callbacks)

    def overrides(self, method: str) -> bool:
        """Return whether a callback has a method of its own."""
        return any(_overrides(callback, method) for callback in self)

    def call(self, method: str, run: RunView, *args: Any) -> None:
        """Call one method of each callback. Collective if one communicates.

        If one raises, the others are still called, because other ranks call them too. The first
        exception is kept in `error`, with a note of the callback's name. One that all ranks share,
        because the callback communicates, is kept instead of one that only this rank has.
        """
        for name, callback in self.named():
            if not _overrides(callback, method):
                continue
            try:
                _call(callback, name, method, run, *args)
                if method == "on_step_start" and not args[0].micro_batches:
                    raise ConfigError(
                        f"callback {name} removed every micro-batch of the step",
                        "keep at least one; to train on nothing, return 0 * output.sum() as loss",
                    )
            except Exception as error:
                error.add_note(f"in callback {name}.{method}")
                if self.error is None or (is_shared(error) and not is_shared(self.error)):
                    self.error = error

    def configure(self, task: Any, config: "RunConfig", world: Any) -> "RunConfig":
        """Pass the settings through each callback's `configure` in turn and return the result."""
        kind = type(config)
        for name, callback in self.named():
            config = naming(
                f"callback {name}.configure", partial(callback.configure, task, config, world)
            )
            if type(config) is not kind:
                raise ConfigError(
                    f"{name}.configure returned {config!r:.80}, not a {kind.__name__}",
                    "return the config that it was given, or config.with_overrides([...])",
                )
        return config

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of every callback that has one, by name."""
        states = {
            name: naming(f"callback {name}.state_dict", callback.state_dict)
            for name, callback in self.named()
        }
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Restore each callback's state; return the names of states without a callback."""
        unclaimed = dict(states)
        for name, callback in self.named():
            if name in states:
                load = partial(callback.load_state_dict, unclaimed.pop(name))
                naming(f"callback {name}.load_state_dict", load)
        return sorted(unclaimed)

    def named(self) -> Iterator[tuple[str, Callback]]:
        """Yield each callback with its class name, numbered if a class occurs again."""
        seen: dict[str, int] = {}
        for callback in self._callbacks:
            name = type(callback).__name__
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name}_{seen[name]}"), callback


def _check_methods(kind: type[Callback]) -> None:
    """Refuse a method whose name looks as if it were called."""
    known = [name for name in dir(Callback) if name.startswith("on_")]
    own = [name for name in dir(kind) if name.startswith("on_") and callable(getattr(kind, name))]
    if unknown := set(own) - set(known):
        raise ConfigError(
            f"{kind.__name__} has a method {min(unknown)}, which lockstep never calls",
            f"rename it, or override one of {', '.join(known)}",
        )


def listed(callbacks: Any) -> list[Callback]:
    """Return the callbacks of an argument that must be a list or another iterable of them."""
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        raise ConfigError(
            f"callbacks is {shown(callbacks)}, not a list", "pass a list: callbacks=[MyCallback()]"
        )
    return list(callbacks)


def _overrides(callback: Callback, method: str) -> bool:
    bound = getattr(callback, method)
    return getattr(bound, "__func__", bound) is not getattr(Callback, method)


def _call(callback: Callback, name: str, method: str, run: RunView, *args: Any) -> None:
    """Call a method; if the callback communicates, an error is raised on all ranks."""
    world = run.world
    if world.size == 1:
        getattr(callback, method)(run, *args)
    elif callback.communicates:
        call_together(world, lambda: getattr(callback, method)(run, *args))
    else:
        with before_each_collective(world, lambda: _refuse(name, method)):
            getattr(callback, method)(run, *args)


def _refuse(name: str, method: str) -> NoReturn:
    raise ConfigError(
        f"callback {name} calls a collective in {method}: if it failed on one rank, the others "
        "would wait",
        f"set communicates = True in class {name}",
    )


def collect_callbacks(world: Any, collect: Callable[[], Iterable[Callback]]) -> Callbacks:
    """Return the same callbacks on every rank, or refuse. Collective."""
    callbacks = together(world, lambda: Callbacks([*collect()]), every_exception=True)
    names = ", ".join(name for name, _ in callbacks.named())
    check_same("callbacks", names or "none", world, SAME_CALLBACKS)
    return callbacks


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
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"LOCKSTEP_CALLBACKS={name}: {error}",
            "write module:Class, with the module's folder on PYTHONPATH",
        ) from error
    if not (inspect.isclass(kind) and issubclass(kind, Callback)):
        raise ConfigError(
            f"LOCKSTEP_CALLBACKS={name}: {attribute} is not a subclass of lockstep.Callback",
            "name a class that derives from lockstep.Callback and is built without arguments",
        )
    return naming(f"LOCKSTEP_CALLBACKS={name}", kind)
