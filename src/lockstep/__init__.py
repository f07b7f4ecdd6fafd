"""Train a PyTorch model on one GPU, on all of a machine, or on many nodes, from one script.

Two entry points with the same parts: `fit(task, config)`, or your own loop around
`World`, `Loader`, `train_step` and `CheckpointStore`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.callback import Callback
    from lockstep.checkpoint.store import CheckpointStore
    from lockstep.config import RunConfig
    from lockstep.data.fingerprint import file_fingerprints
    from lockstep.data.loader import Loader, plan_for
    from lockstep.dist.ddp import Averaging, unwrap
    from lockstep.dist.fsdp import shard
    from lockstep.dist.world import World
    from lockstep.errors import LockstepError
    from lockstep.observe.events import read_events
    from lockstep.plan import BatchConfig
    from lockstep.run.build import prepare
    from lockstep.run.result import RunResult
    from lockstep.signals import StopSignals
    from lockstep.step.report import StepReport
    from lockstep.step.train_step import train_step
    from lockstep.task import Context, PartialLoss, Task
    from lockstep.trainer import Trainer, fit

__version__ = "0.1.0"

_HOMES = {
    "Averaging": "lockstep.dist.ddp",
    "BatchConfig": "lockstep.plan",
    "Callback": "lockstep.callback",
    "CheckpointStore": "lockstep.checkpoint.store",
    "Context": "lockstep.task",
    "Loader": "lockstep.data.loader",
    "LockstepError": "lockstep.errors",
    "PartialLoss": "lockstep.task",
    "RunConfig": "lockstep.config",
    "RunResult": "lockstep.run.result",
    "StepReport": "lockstep.step.report",
    "StopSignals": "lockstep.signals",
    "Task": "lockstep.task",
    "Trainer": "lockstep.trainer",
    "World": "lockstep.dist.world",
    "file_fingerprints": "lockstep.data.fingerprint",
    "fit": "lockstep.trainer",
    "plan_for": "lockstep.data.loader",
    "prepare": "lockstep.run.build",
    "read_events": "lockstep.observe.events",
    "shard": "lockstep.dist.fsdp",
    "train_step": "lockstep.step.train_step",
    "unwrap": "lockstep.dist.ddp",
}

__all__ = [
    "Averaging",
    "BatchConfig",
    "Callback",
    "CheckpointStore",
    "Context",
    "Loader",
    "LockstepError",
    "PartialLoss",
    "RunConfig",
    "RunResult",
    "StepReport",
    "StopSignals",
    "Task",
    "Trainer",
    "World",
    "file_fingerprints",
    "fit",
    "plan_for",
    "prepare",
    "read_events",
    "shard",
    "train_step",
    "unwrap",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: importing torch takes a second."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
