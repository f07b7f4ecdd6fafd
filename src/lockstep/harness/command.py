"""A command started by a tool.

Owns: the process and all its descendants, none of which outlives the tool. Does not own: why the
command was started, or when it has done enough.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from lockstep.errors import LaunchError
from lockstep.parent import end_with_parent

POLL_S = 0.05
"""How often a tool checks a command."""
START_S = 60.0
"""The least time that a command gets to its first sign of life, since it imports torch."""
LAUNCHER_S = 40.0
"""How long a launcher may take to detect that a rank has died."""


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Leave the block on SIGTERM or SIGHUP as on Ctrl-C, so that its commands are ended."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class RunningCommand:
    """A started command with all its descendants.

    Args:
        words: The command.
        env: Variables to add to those of `base`.
        output: The file that gets what it prints.
        base: The variables to start from; by default those of this process.
        work_folder: Where it runs; by default where this process does.
    """

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        output: Path,
        *,
        base: Mapping[str, str] | None = None,
        work_folder: Path | None = None,
    ) -> None:
        self.began = time.time()
        self.output = output
        self.family: set[psutil.Process] = set()
        with output.open("ab") as file:
            try:
                self.process = subprocess.Popen(
                    list(words),
                    cwd=work_folder,
                    env={**(os.environ if base is None else base), **env},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            except OSError as error:
                raise LaunchError(
                    f"{words[0]} cannot be started: {error.strerror}",
                    "write the command after -- as you would type it; for a shell line, write "
                    "bash -c 'LINE'",
                ) from None
        self._offset = output.stat().st_size

    @property
    def code(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.process.poll()

    @property
    def text(self) -> str:
        """Return the output so far."""
        return self.output.read_bytes()[self._offset :].decode(errors="replace")

    def note_children(self) -> None:
        """List descendants now: a re-parented process cannot be found later."""
        if self.code is None:
            self.family |= set(children_of(psutil.Process(self.process.pid)))

    def close(self) -> None:
        """Kill all processes that are still running."""
        self.note_children()
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def children_of(process: psutil.Process) -> list[psutil.Process]:
    """Return all descendants of a process, or [] if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(process.children(recursive=True))
    return []
