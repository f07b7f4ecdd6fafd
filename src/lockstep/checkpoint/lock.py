"""A lock that allows one writer per folder.

Owns: the lock file, and naming its holder. Does not own: the use of the folder.
"""

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from lockstep.errors import CheckpointError, FolderInUseError
from lockstep.run_files import open_to_update


class FolderLock:
    """Prevents a second run from writing into a folder while the first one lives.

    The kernel releases the lock when its holder ends in any way, and loader workers forked from
    the holder do not inherit it. It also releases the lock when the holder closes *any*
    descriptor of the file, so nothing else may open it.
    """

    # The kernel would let one process take its own lock twice, and release it the first time.
    _held: ClassVar[dict[Path, int]] = {}

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "lock"
        self._key = Path()
        self._descriptor = -1

    def acquire(self) -> "FolderLock":
        """Take the lock.

        Raises:
            FolderInUseError: names the host and process that hold it, and since when.
            CheckpointError: the file cannot be created, or its file system has no locks.
        """
        try:
            self._key = self.path.resolve()
            if self._held.get(self._key) == os.getpid():
                raise self._in_use(f"this process, {os.getpid()}")
            self._descriptor = open_to_update(self.path.parent, self.path.name)
            self._lock()
        except OSError as error:
            remedy = "use a folder you may write to, on a file system with locks (Lustre: -o flock)"
            if self.path.is_symlink():
                remedy = f"remove {self.path}: a run does not follow a link to its lock"
            raise CheckpointError(f"cannot lock {self.path}: {error}", remedy) from error
        self._held[self._key] = os.getpid()
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(sys.argv),
        }
        with contextlib.suppress(OSError):  # the lock is held even if a full disk has no room
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)
        return self

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        if self._descriptor >= 0 and self._held.get(self._key) == os.getpid():
            del self._held[self._key]
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> "FolderLock":
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _lock(self) -> None:
        deadline = time.monotonic() + 0.5
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError):  # POSIX allows either for "held"
                holder = _read_holder(self._descriptor)
                if holder or time.monotonic() > deadline:
                    os.close(self._descriptor)
                    self._descriptor = -1
                    raise self._in_use(holder or "a run that has not written its name") from None
            time.sleep(0.01)  # the holder may be about to write its name

    def _in_use(self, holder: str) -> FolderInUseError:
        return FolderInUseError(
            f"{self.path.parent} is in use by {holder}",
            "wait for that run, stop it, or use another folder",
        )


def _read_holder(descriptor: int) -> str | None:
    try:
        holder = json.loads(os.pread(descriptor, 65536, 0))
        return "process {pid} on {host}, since {started}: {command:.200}".format(**holder)
    except (ValueError, KeyError, TypeError):
        return None
