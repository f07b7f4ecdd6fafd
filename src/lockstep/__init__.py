"""Train a PyTorch model on one GPU, on all of a machine, or on many nodes, from one script.

Two entry points with the same parts: `fit(task, config)`, or your own loop around
`World`, `Loader`, `train_step` and `CheckpointStore`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.callback import Callback as Callback
    from lockstep.checkpoint.store import CheckpointStore as CheckpointStore
    from lockstep.config import RunConfig as RunConfig
    from lockstep.data.fingerprint import file_fingerprints as file_fingerprints
    from lockstep.data.loader import Loader as Loader
    from lockstep.data.loader import plan_for as plan_for
    from lockstep.dist.ddp import Averaging as Averaging
    from lockstep.dist.ddp import unwrap as unwrap
    from lockstep.dist.fsdp import shard as shard
    from lockstep.errors import LockstepError as LockstepError
    from lockstep.observe.events import read_events as read_events
    from lockstep.plan import BatchConfig as BatchConfig
    from lockstep.result import RunResult as RunResult
    from lockstep.run.build import prepare as prepare
    from lockstep.signals import StopSignals as StopSignals
    from lockstep.step.report import StepReport as StepReport
    from lockstep.step.train_step import train_step as train_step
    from lockstep.task import Context as Context
    from lockstep.task import PartialLoss as PartialLoss
    from lockstep.task import Task as Task
    from lockstep.trainer import Trainer as Trainer
    from lockstep.trainer import fit as fit
    from lockstep.world import World as World

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
    "RunResult": "lockstep.result",
    "StepReport": "lockstep.step.report",
    "StopSignals": "lockstep.signals",
    "Task": "lockstep.task",
    "Trainer": "lockstep.trainer",
    "World": "lockstep.world",
    "file_fingerprints": "lockstep.data.fingerprint",
    "fit": "lockstep.trainer",
    "plan_for": "lockstep.data.loader",
    "prepare": "lockstep.run.build",
    "read_events": "lockstep.observe.events",
    "shard": "lockstep.dist.fsdp",
    "train_step": "lockstep.step.train_step",
    "unwrap": "lockstep.dist.ddp",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: importing torch takes a second."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
