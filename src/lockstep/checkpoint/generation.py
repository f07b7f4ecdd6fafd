"""A fencing token: the group of processes that may save into a folder of checkpoints.

Owns: the numbered claims in the folder, the holder of the newest, and the checkpoints that it
found. Does not own: the checkpoints, or the lock against a second run on the same host (`lock.py`).
A claim also works on another host, or after a lock is lost.

    checkpoints/
      generation_00000002.json    the second group that trains here, and the steps it found

Every group that takes over the folder creates the file of the next number exclusively, so no two
groups have the same number. A group may save as long as there is no higher number. It checks this
just before the rename that commits. Since a process may be suspended between the check and the
rename, readers check, too: a checkpoint of an earlier generation is valid only if the newest
claim lists it.
"""

import json
import os
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from lockstep.checkpoint.layout import flush_folder
from lockstep.errors import TakenOverError
from lockstep.run_files import FOLDER_MODE, read_bytes, replacing

_NAME: Final = re.compile(r"generation_(\d{8,18})\.json", re.ASCII)
_ANY_NAME: Final = re.compile(r"\.?generation_(\d{8,18})\.json", re.ASCII)
"""Claims, and unfinished files of killed groups."""
MAX_BYTES: Final = 2**20


@dataclass(frozen=True)
class Generation:
    """One group's claim to a folder of checkpoints."""

    number: int
    steps: tuple[int, ...]
    """The checkpoints that were valid when the group took over, up to its own start."""
    host: str
    pid: int
    since: str


def file_name(number: int) -> str:
    """Return the file name of a claim."""
    return f"generation_{number:08d}.json"


def is_claim(name: str) -> bool:
    """Return whether a file of that name is a claim."""
    return _NAME.fullmatch(name) is not None


def claims(folder: Path) -> list[int]:
    """Return the numbers that groups have claimed, in ascending order.

    Raises:
        OSError: the folder cannot be listed.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def newest(folder: Path) -> Generation | None:
    """Return the newest group that has taken over the folder.

    A claim without content is ignored: its group has claimed the number, but not yet written the
    steps that it found, so it has not saved anything.

    Raises:
        OSError: the folder cannot be listed.
    """
    found = (_read(folder, number) for number in reversed(claims(folder)))
    return next((generation for generation in found if generation is not None), None)


def claim(folder: Path, above: int, steps: Iterable[int]) -> Generation:
    """Take over a folder, with a number that is higher than `above` and every other claim.

    Raises:
        TakenOverError: another group has taken over the folder in the meantime.
        OSError: the claim cannot be written.
    """
    folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    while True:
        number = max([above, *claims(folder)]) + 1
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            os.close(os.open(folder / file_name(number), flags, 0o666))
        except FileExistsError:  # another group was faster
            continue
        if max(claims(folder), default=0) == number:
            break
        with suppress(FileNotFoundError):  # another group had the number, and removed the file
            os.unlink(folder / file_name(number))
    since = datetime.now(UTC).isoformat(timespec="seconds")
    own = Generation(number, tuple(sorted(steps)), socket.gethostname(), os.getpid(), since)
    try:
        with replacing(folder, file_name(number)) as file:
            file.write(json.dumps(asdict(own)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except FileNotFoundError:
        raise_if_taken_over(folder, number)  # a later group removes unfinished files
        raise
    flush_folder(folder)
    for name in os.listdir(folder):
        older = _ANY_NAME.match(name)
        if older and int(older[1]) < number:
            with suppress(OSError):
                os.unlink(folder / name)
    return own


def raise_if_taken_over(folder: Path, own: int) -> None:
    """Refuse to write to a folder that another group has claimed since.

    Raises:
        TakenOverError: names the other group, and when it did.
        OSError: the folder cannot be listed.
    """
    highest = max(claims(folder), default=0)
    if highest <= own:
        return
    taken = _read(folder, highest)
    by = f" at {taken.since} (process {taken.pid} on {taken.host})" if taken else ""
    raise TakenOverError(
        f"another run took over {folder}{by}; this one may not save any more",
        "let the other run continue, or stop it and start this one again",
    )


def _read(folder: Path, number: int) -> Generation | None:
    """Return the contents of a claim, or None if it is empty or invalid."""
    try:
        facts = json.loads(read_bytes(folder, file_name(number), MAX_BYTES))
        steps = tuple(step for step in facts["steps"] if type(step) is int)
        return Generation(
            number, steps, str(facts["host"])[:200], int(facts["pid"]), str(facts["since"])[:40]
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
