"""Saved runs: what they hold, how they reach the disk, how they are found again.

Owns: the names the rest of lockstep uses. Does not own: when to save, or what
a run should do when nothing can be loaded.
"""

from lockstep.checkpoint.layout import Checkpoint, Written
from lockstep.checkpoint.lock import FolderLock
from lockstep.checkpoint.state import (
    KERNELS,
    flatten,
    load_model_state,
    load_optimizer,
    share_of,
    snapshot,
    unflatten,
)
from lockstep.checkpoint.store import CheckpointStore
from lockstep.checkpoint.writer import BackgroundWriter

__all__ = [
    "KERNELS",
    "BackgroundWriter",
    "Checkpoint",
    "CheckpointStore",
    "FolderLock",
    "Written",
    "flatten",
    "load_model_state",
    "load_optimizer",
    "share_of",
    "snapshot",
    "unflatten",
]
