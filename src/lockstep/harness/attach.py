"""Attach a tool's callback to every run of a command, under any launcher.

Owns: the variables that attach the callback, the folder in which tool and callback exchange files,
and the notes that callbacks write there. Does not own: the callback (`callback.py` of each tool),
or the command (`command.py`).
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
"""The folder for files that callbacks append to during a run: `rank_N.jsonl` for each rank."""
KILLED = "killed"
"""The file that marks a kill: started again, the same command then resumes."""


def attached(folder: Path, callback: str) -> dict[str, str]:
    """Return the variables under which a command's runs call `callback`, a "module:Class".

    Callbacks that LOCKSTEP_CALLBACKS already names come first.
    """
    (folder / NOTES).touch()
    names = ",".join(name for name in (callback_names(), callback) if name)
    return {
        "LOCKSTEP_CALLBACKS": names,
        "LOCKSTEP_TOOL_FOLDER": str(folder),
        "PYTHONFAULTHANDLER": "1",  # a hung process prints its stack on a signal
        "PYTHONUNBUFFERED": "1",
    }


def write_settings(folder: Path, **values: Any) -> None:
    """Write the tool's settings for its callback in this run."""
    (folder / SETTINGS).write_text(json.dumps(values))


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the tool's settings for its callback."""
    return dict(json.loads((folder / SETTINGS).read_text()))


def write_note(folder: Path, event: str, **values: Any) -> None:
    """Append a line to the notes: an event of this process, with its rank and the time."""
    launch = launched()
    own = {"event": event, "time": time.time(), "pid": os.getpid()}
    line = json.dumps({**own, "rank": launch.rank, "size": launch.size, **values}) + "\n"
    with (folder / NOTES).open("a") as file:
        file.write(line)  # one write call, because a line is short


def read_notes(folder: Path) -> list[Mapping[str, Any]]:
    """Return the notes that are complete."""
    *lines, _ = (folder / NOTES).read_text().split("\n")  # the last one may be incomplete
    return [json.loads(line) for line in lines]
