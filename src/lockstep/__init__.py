"""Train a PyTorch model on one GPU, on all of a machine, or on many nodes, from one script.

Two entrances, same parts: `fit(task, config)`, or a loop of your own around
`World`, `Loader`, `train_step` and `CheckpointStore`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.checkpoint.store import CheckpointStore
    from lockstep.config import RunConfig
    from lockstep.data.loader import Loader
    from lockstep.errors import LockstepError
    from lockstep.observe.events import read_events
    from lockstep.runtime import World
    from lockstep.step import train_step
    from lockstep.task import PartialLoss, Task
    from lockstep.trainer import fit

__version__ = "0.1.0"

_HOMES = {
    "CheckpointStore": "lockstep.checkpoint.store",
    "Loader": "lockstep.data.loader",
    "LockstepError": "lockstep.errors",
    "PartialLoss": "lockstep.task",
    "RunConfig": "lockstep.config",
    "Task": "lockstep.task",
    "World": "lockstep.runtime",
    "fit": "lockstep.trainer",
    "read_events": "lockstep.observe.events",
    "train_step": "lockstep.step",
}

__all__ = [
    "CheckpointStore",
    "Loader",
    "LockstepError",
    "PartialLoss",
    "RunConfig",
    "Task",
    "World",
    "fit",
    "read_events",
    "train_step",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: importing torch takes a second."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
