"""How a tool reaches every run of a command, under any launcher.

Owns: the variables that attach the tool's callback, the folder in which the tool and its callback
find each other's files, and the notes that callbacks leave there. Does not own: what the callback
does (`callback.py` of each tool), or the command (`command.py`).
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.dist.environment import callback_names, launched

NOTES = "notes.jsonl"
SETTINGS = "settings.json"
TRACE = "trace"
"""The folder to which callbacks add as a run goes on: `rank_N.jsonl`, one for each rank."""
KILLED = "killed"
"""The file that a callback leaves before it kills its process: the same command then resumes."""


def attached(folder: Path, callback: str) -> dict[str, str]:
    """Return the variables under which a command's runs call `callback`, a "module:Class".

    Callbacks that LOCKSTEP_CALLBACKS already names come first.
    """
    (folder / NOTES).touch()
    names = ",".join(name for name in (callback_names(), callback) if name)
    return {
        "LOCKSTEP_CALLBACKS": names,
        "LOCKSTEP_TOOL_FOLDER": str(folder),
        "PYTHONFAULTHANDLER": "1",  # a process that hangs can be asked for its stack
        "PYTHONUNBUFFERED": "1",
    }


def write_settings(folder: Path, **values: Any) -> None:
    """Leave what the tool asks of its callback in this run."""
    (folder / SETTINGS).write_text(json.dumps(values))


def read_settings(folder: Path) -> dict[str, Any]:
    """Return what the tool asks of its callback."""
    return dict(json.loads((folder / SETTINGS).read_text()))


def write_note(folder: Path, event: str, **values: Any) -> None:
    """Append a line to the notes: an event of this process, with its rank and the time."""
    launch = launched()
    own = {"event": event, "time": time.time(), "pid": os.getpid()}
    line = json.dumps({**own, "rank": launch.rank, "size": launch.size, **values}) + "\n"
    with (folder / NOTES).open("a") as file:
        file.write(line)  # short, so in one piece


def read_notes(folder: Path) -> list[Mapping[str, Any]]:
    """Return the notes that are complete."""
    *lines, _ = (folder / NOTES).read_text().split("\n")  # the last one may be being written
    return [json.loads(line) for line in lines]
