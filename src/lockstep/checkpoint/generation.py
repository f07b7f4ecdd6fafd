"""Which group of processes may save into a folder of checkpoints: a fencing token.

Owns: the numbered claims in the folder, who holds the newest, and which checkpoints that group
found there. Does not own: the checkpoints, or the lock that keeps a second run on the same host
away (`lock.py`); a claim holds where no lock reaches, on another host or after a lost lock.

    checkpoints/
      generation_00000002.json    the second group that trains here, and the steps it found

Every group that takes the folder over creates the file of the next number exclusively, so no two
groups have the same. A group may save as long as nobody has a higher number. That is looked up just
before the rename that commits, and a process may be suspended between the look and the rename; so
readers look too: a checkpoint of an earlier generation counts only if the newest one lists it.
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
"""Claims, and what a group that was killed had begun to write."""
MAX_BYTES: Final = 2**20


@dataclass(frozen=True)
class Generation:
    """One group's claim to a folder of checkpoints."""

    number: int
    steps: tuple[int, ...]
    """The checkpoints that were there when the group took over, and that it may go back to."""
    host: str
    pid: int
    since: str


def file_name(number: int) -> str:
    """Return the name of the file that holds a claim."""
    return f"generation_{number:08d}.json"


def is_claim(name: str) -> bool:
    """Say whether a file of that name is a claim."""
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
    """Return the newest group that has taken the folder over.

    A claim without content is that of a group that died, or is still, between claiming the number
    and writing down what it found: it has saved nothing yet, and changes nothing for a reader.

    Raises:
        OSError: the folder cannot be listed.
    """
    found = (_read(folder, number) for number in reversed(claims(folder)))
    return next((generation for generation in found if generation is not None), None)


def claim(folder: Path, above: int, steps: Iterable[int]) -> Generation:
    """Take a folder over, with a number that is higher than `above` and every other claim.

    Raises:
        TakenOverError: another group has already taken it over from this one.
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
        with suppress(FileNotFoundError):  # the number was another group's, and removed since
            os.unlink(folder / file_name(number))
    since = datetime.now(UTC).isoformat(timespec="seconds")
    own = Generation(number, tuple(sorted(steps)), socket.gethostname(), os.getpid(), since)
    try:
        with replacing(folder, file_name(number)) as file:
            file.write(json.dumps(asdict(own)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except FileNotFoundError:
        raise_if_taken_over(folder, number)  # by a group that removes what earlier ones had begun
        raise
    flush_folder(folder)
    for name in os.listdir(folder):
        older = _ANY_NAME.match(name)
        if older and int(older[1]) < number:
            with suppress(OSError):
                os.unlink(folder / name)
    return own


def raise_if_taken_over(folder: Path, own: int) -> None:
    """Refuse to go on writing to a folder that another group has claimed since.

    Raises:
        TakenOverError: with who did, and when.
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
    """Return what a claim says, or None if it is empty or not one."""
    try:
        said = json.loads(read_bytes(folder, file_name(number), MAX_BYTES))
        steps = tuple(step for step in said["steps"] if type(step) is int)
        return Generation(
            number, steps, str(said["host"])[:200], int(said["pid"]), str(said["since"])[:40]
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
