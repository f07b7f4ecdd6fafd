"""One writer to a folder.

Owns: the lock file, and saying who holds it. Does not own: what the holder
does with the folder.
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
    """Keep a second run from writing into a folder while the first one lives.

    The kernel drops the lock when its holder dies, however it dies, and loader
    workers forked from the holder do not inherit it. It is also dropped when
    the holder closes *any* descriptor of the file: nothing else may open it.
    """

    # The kernel would let one process take its own lock twice, and then lose
    # it at the first release.
    _held: ClassVar[dict[Path, int]] = {}

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "lock"
        self._key = Path()
        self._descriptor = -1

    def acquire(self) -> "FolderLock":
        """Take the lock.

        Raises:
            FolderInUseError: names the host and process that hold it, and since when.
            CheckpointError: the file cannot be made, or its file system has no locks.
        """
        try:
            self._key = self.path.resolve()
            if self._held.get(self._key) == os.getpid():
                raise self._in_use(f"this very process, {os.getpid()}")
            self._descriptor = open_to_update(self.path.parent, self.path.name)
            self._lock()
        except OSError as error:
            remedy = "use a folder you may write to, on a file system with locks (Lustre: -o flock)"
            if self.path.is_symlink():
                remedy = f"remove {self.path}: a run locks its own file and follows no link"
            raise CheckpointError(f"cannot lock {self.path}: {error}", remedy) from error
        self._held[self._key] = os.getpid()
        me = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(sys.argv),
        }
        with contextlib.suppress(OSError):  # on a full disk the lock holds, without a name
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(me).encode(), 0)
        return self

    def release(self) -> None:
        """Give the lock back; nothing happens in a process that does not hold it."""
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
                    raise self._in_use(holder or "a run that has not said who it is") from None
            time.sleep(0.01)  # it has just taken the lock and is about to write its name

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
