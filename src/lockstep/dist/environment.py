"""The environment variables of this process.

Owns: reading and setting them. Does not own: interpreting the launch variables (`detect.py`).
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

from lockstep.dist import detect
from lockstep.dist.detect import Launch, check_size, collective_timeout_s, detect_launch
from lockstep.errors import LaunchError
from lockstep.text_input import whole_number


def is_rehearsal() -> bool:
    """Return whether LOCKSTEP_REHEARSAL=1 asks for a rehearsal."""
    return os.environ.get("LOCKSTEP_REHEARSAL", "0") not in ("", "0")


def rehearsal_folder() -> Path | None:
    """Return the folder in which `lockstep rehearse` keeps the checkpoints of a custom loop."""
    folder = os.environ.get("LOCKSTEP_REHEARSAL_FOLDER", "")
    return Path(folder) if is_rehearsal() and folder else None


def shows_traceback() -> bool:
    """Return whether LOCKSTEP_TRACEBACK=1 asks for the traceback of lockstep errors."""
    return detect.shows_traceback(os.environ)


def inside_slurm_job() -> bool:
    """Return whether SLURM may send signals to this process."""
    return "SLURM_JOB_ID" in os.environ


def callback_names() -> str:
    """Return LOCKSTEP_CALLBACKS: `module:Class`, separated by commas."""
    return os.environ.get("LOCKSTEP_CALLBACKS", "")


def tool_folder() -> Path:
    """Return LOCKSTEP_TOOL_FOLDER, in which a tool and its callback exchange files.

    Raises:
        LaunchError: it is not set.
    """
    folder = os.environ.get("LOCKSTEP_TOOL_FOLDER", "")
    if not folder:
        raise LaunchError(
            "this callback needs LOCKSTEP_TOOL_FOLDER, which is not set",
            "start the command through the tool: lockstep rehearse, certify, bench or doctor",
        )
    return Path(folder)


def default_variable(name: str, value: str) -> None:
    """Set an environment variable if it is not set, for libraries that have no other option."""
    os.environ.setdefault(name, value)


def checked_launch(local_rank: int | None = None) -> Launch:
    """Return the launch variables to join a group with; `local_rank` is a script's own flag.

    Raises:
        LaunchError: they contradict each other, or the expected number of ranks.
    """
    launch = detect_launch(os.environ, local_rank)
    check_size(launch, os.environ)
    return launch


def launched() -> Launch:
    """Return the launch variables without joining a group; those of one process if invalid."""
    try:
        return detect_launch(os.environ)
    except LaunchError:
        return Launch()


def launched_rank() -> int:
    """Return this process's rank without joining a group."""
    return launched().rank


def planned_size() -> int:
    """Return the job's world size: more than were launched where `lockstep doctor` tries a job.

    For a script that generates data for all ranks, or compares the number with a flag.
    """
    return whole_number(os.environ.get("LOCKSTEP_PLANNED_RANKS", "")) or launched().size


def group_timeout_s(configured: float) -> float:
    """Return the timeout of collectives: NCCL_TIMEOUT (seconds) if set, else `configured`."""
    return collective_timeout_s(os.environ, configured)


def leave_process(code: int) -> NoReturn:
    """Flush the output and end this process now.

    A destroyed gloo group may still abort the interpreter at exit. A command that is done avoids
    this by skipping the exit functions.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
