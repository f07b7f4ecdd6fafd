"""The launch environment of this process: its rank, its device, its settings.

Owns: reading and setting environment variables. Does not own: what the launch variables mean
(`detect.py`).
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

from lockstep.dist import detect
from lockstep.dist.detect import Launch, collective_timeout_s, detect_launch
from lockstep.errors import LaunchError
from lockstep.text_input import whole_number


def is_rehearsal() -> bool:
    """Say whether LOCKSTEP_REHEARSAL=1 asks for the run in miniature."""
    return os.environ.get("LOCKSTEP_REHEARSAL", "0") not in ("", "0")


def rehearsal_folder() -> Path | None:
    """Return where `lockstep rehearse` keeps what a loop without a trainer saves."""
    folder = os.environ.get("LOCKSTEP_REHEARSAL_FOLDER", "")
    return Path(folder) if is_rehearsal() and folder else None


def shows_traceback() -> bool:
    """Say whether LOCKSTEP_TRACEBACK=1 asks for the traceback of errors raised on purpose."""
    return detect.shows_traceback(os.environ)


def inside_slurm_job() -> bool:
    """Say whether SLURM may send this process signals."""
    return "SLURM_JOB_ID" in os.environ


def callback_names() -> str:
    """Return what LOCKSTEP_CALLBACKS names: `module:Class`, separated by commas."""
    return os.environ.get("LOCKSTEP_CALLBACKS", "")


def tool_folder() -> Path:
    """Return LOCKSTEP_TOOL_FOLDER, where a tool and the callback it attached exchange files.

    Raises:
        LaunchError: it is not set.
    """
    folder = os.environ.get("LOCKSTEP_TOOL_FOLDER", "")
    if not folder:
        raise LaunchError(
            "LOCKSTEP_TOOL_FOLDER is not set, which this callback reads",
            "start the command through the tool: lockstep rehearse, certify, bench or doctor",
        )
    return Path(folder)


def default_variable(name: str, value: str) -> None:
    """Set an environment variable that nobody has set, for libraries that read no other way."""
    os.environ.setdefault(name, value)


def launched() -> Launch:
    """Return who this process is without joining anything; alone if the variables make no sense."""
    try:
        return detect_launch(os.environ)
    except LaunchError:
        return Launch()


def launched_rank() -> int:
    """Return this process's rank without joining anything."""
    return launched().rank


def planned_size() -> int:
    """Return the job's world size: more than were launched where `lockstep doctor` tries a job.

    For a script that generates data for all ranks, or compares the number with a flag.
    """
    return whole_number(os.environ.get("LOCKSTEP_PLANNED_RANKS", "")) or launched().size


def group_timeout_s(configured: float) -> float:
    """Return how long a collective may wait: NCCL_TIMEOUT (seconds) if set, else the config's."""
    return collective_timeout_s(os.environ, configured)


def leave_process(code: int) -> NoReturn:
    """End this process now, after flushing.

    A gloo group may still abort the interpreter on its way out although it was
    destroyed; a command that has nothing left to do leaves before that.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
