"""A command started by a tool.

Owns: the process and all its descendants, none of which outlives the tool, and waiting for its end.
Does not own: why the command was started, or what counts as progress.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from lockstep.errors import LaunchError
from lockstep.parent import end_with_parent

POLL_S = 0.05
"""How often a tool checks a command."""
START_S = 60.0
"""The least time that a command gets to its first sign of life, since it imports torch."""
LAUNCHER_S = 40.0
"""How long a launcher may take to detect that a rank has died."""
GRACE_S = 5.0
"""How long ranks may continue after one of them has failed."""


ENDING_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""The signals on which a tool ends its commands."""


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


@contextlib.contextmanager
def _held_signals() -> Iterator[set[Any]]:
    """Let signals that end a tool wait inside the block; yield the mask from before it.

    An exception of a handler inside `Popen` would leave a process that nobody knows.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(mask: set[Any]) -> None:
    """Prepare the process of a command, before it becomes the command."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    end_with_parent()


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
        with output.open("ab") as file, _held_signals() as before:
            self._offset = file.tell()
            try:
                self.process = subprocess.Popen(
                    list(words),
                    cwd=work_folder,
                    env={**(os.environ if base is None else base), **env},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=partial(_begin, before),
                )
            except OSError as error:
                raise LaunchError(
                    f"{words[0]} cannot be started: {error.strerror}",
                    "write the command after -- as you would type it; for a shell line, write "
                    "bash -c 'LINE'",
                ) from None
            if signal.sigpending() & ENDING_SIGNALS:  # this process ends when they are released
                self.close()

    @property
    def code(self) -> int | None:
        """Return the exit code, or None while it runs.

        An exception of a signal handler inside `Popen.poll` may leave its lock taken, and then
        `Popen.wait` never returns. So `poll` is not called.
        """
        with contextlib.suppress(ChildProcessError):  # it was reaped, and its code was lost
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            is_ended = self.process.returncode is not None
            if not (is_ended or os.waitid(os.P_PID, self.process.pid, options)):
                return None
        return self.process.wait()

    @property
    def text(self) -> str:
        """Return the output so far."""
        return self.output.read_bytes()[self._offset :].decode(errors="replace")

    def note_children(self) -> None:
        """List descendants now: a re-parented process cannot be found later."""
        if self.code is None:
            self.family |= descendants(psutil.Process(self.process.pid))

    def close(self) -> None:
        """Kill all processes that are still running."""
        self.note_children()
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.code is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def follow(
    commands: Sequence[RunningCommand],
    progress: Callable[[], tuple[object, float]],
    is_enough: Callable[[], bool] = lambda: False,
) -> int | None:
    """Wait until all commands have ended, one has failed, or `is_enough()`.

    Args:
        commands: The commands to watch. After a failure the others may report their errors.
        progress: Returns a value that changes with progress, and how long it may stay the same.
        is_enough: Called after `progress`.

    Returns:
        The exit code of the first command that failed, or 0; None without progress.
    """
    value: object = None
    last = time.monotonic()
    while True:
        codes = [command.code for command in commands]
        for command in commands:
            command.note_children()
        now_value, limit_s = progress()
        if now_value != value:
            value = now_value
            last = time.monotonic()
        if None not in codes or any(codes) or is_enough():
            break
        if time.monotonic() - last > limit_s:
            return None
        time.sleep(POLL_S)
    deadline = min(time.monotonic() + GRACE_S, last + limit_s)
    while any(codes) and time.monotonic() < deadline and None in [one.code for one in commands]:
        time.sleep(POLL_S)
    return next(filter(None, codes), 0)


def descendants(process: psutil.Process | None = None) -> set[psutil.Process]:
    """Return all descendants of a process, by default of this one; none if it has ended."""
    with contextlib.suppress(psutil.Error):
        return set((process or psutil.Process()).children(recursive=True))
    return set()
