"""Checkpoints: their contents, saving them, and finding them again.

Owns: the names that the rest of lockstep uses. Does not own: when to save, or the reaction when no
checkpoint can be loaded.
"""

from lockstep.checkpoint.layout import Checkpoint as Checkpoint
from lockstep.checkpoint.layout import Written as Written
from lockstep.checkpoint.lock import FolderLock as FolderLock
from lockstep.checkpoint.state import KERNELS as KERNELS
from lockstep.checkpoint.state import Share as Share
from lockstep.checkpoint.state import fit_groups as fit_groups
from lockstep.checkpoint.state import flatten as flatten
from lockstep.checkpoint.state import load_model_state as load_model_state
from lockstep.checkpoint.state import load_optimizer as load_optimizer
from lockstep.checkpoint.state import load_scaler as load_scaler
from lockstep.checkpoint.state import share_of as share_of
from lockstep.checkpoint.state import snapshot as snapshot
from lockstep.checkpoint.store import CheckpointStore as CheckpointStore
from lockstep.checkpoint.writer import BackgroundWriter as BackgroundWriter
