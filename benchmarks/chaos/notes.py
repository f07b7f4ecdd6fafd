"""What rig and run tell each other: lines appended to files, which survive any kill.

Owns: the files under FOLDER/chaos. Does not own: what the lines mean.
"""

import json
import os
import time
from pathlib import Path
from typing import Any


def append(path: Path, line: str) -> None:
    """Append a line with one write."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def note(folder: Path, kind: str, **facts: Any) -> None:
    """Write down what happened, when, and in which process."""
    told = {"kind": kind, "time": time.time(), "pid": os.getpid(), **facts}
    append(folder / "chaos" / "notes.jsonl", json.dumps(told))


def claim(folder: Path, name: str) -> bool:
    """Say whether this process is the first to ask; a fault strikes once."""
    try:
        os.close(os.open(folder / "chaos" / f"claimed_{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Tail:
    """Reads what was appended to a file since the last look."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open()
        self._rest = ""

    def lines(self) -> list[str]:
        *whole, self._rest = (self._rest + self._file.read()).split("\n")
        return whole

    def close(self) -> None:
        self._file.close()
