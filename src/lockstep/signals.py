"""Stop signals: the first asks for a clean stop, a second exits at once, SLURM's notices never do.

Owns: the signals in `EXIT_CODES` during a run. Does not own: stopping. The trainer reads
`exit_code` between steps and between the batches of an evaluation, and lets all ranks agree.
Nothing is saved or sent inside a handler.
"""

import enum
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn, Self

from lockstep.dist.environment import inside_slurm_job
from lockstep.errors import NotSavedError

DUPLICATE_S = 1.0
"""Signals this soon after the first are duplicates: Ctrl-C in a terminal reaches every
process, and a launcher that received it forwards it again."""

EXIT_CODES = {
    signal.SIGHUP: 129,
    signal.SIGINT: 130,
    signal.SIGQUIT: 131,
    signal.SIGTERM: 143,
    signal.SIGUSR1: 138,
}
"""The signals that ask a run to save and stop, and its exit codes: 128 + the signal's number.

A launcher forwards only these signals to its ranks."""

EXIT_NOT_SAVED = NotSavedError.exit_code
"""Exit code of a run that stopped before it could save: a resume repeats the steps since the last
checkpoint."""


SLURM_NOTICES = frozenset({signal.SIGTERM, signal.SIGUSR1})
"""Signals that SLURM sends, in any order: for `--signal`, at a preemption or requeue, for
`scancel`, and at the time limit. SIGKILL follows when the time is over."""


class SignalMeaning(enum.Enum):
    """The meaning of a stop signal, given the earlier ones."""

    FIRST = enum.auto()
    NOTICE = enum.auto()
    """The run is already stopping, and may use the time that is left."""
    DUPLICATE = enum.auto()
    SECOND = enum.auto()
    """Leave now."""


class SignalHistory:
    """Distinguishes a second request to stop from duplicates and from SLURM's notices.

    Inside a SLURM job, every SIGTERM and SIGUSR1 is a notice: with `--signal=TERM@20`, SLURM's
    own SIGTERM follows at the time limit, when a save may need the remaining seconds. There,
    only two of the other signals make a run exit at once: Ctrl-C twice.
    """

    def __init__(self, inside_slurm_job: bool) -> None:
        self.last_at = -math.inf
        """Monotonic time of the last signal that was not a duplicate."""
        self._last: signal.Signals | None = None
        self._asked_by: signal.Signals | None = None
        """The signal to compare the next one with: the first, or the one after a warning."""
        self._notices = SLURM_NOTICES if inside_slurm_job else frozenset()

    def add(self, number: signal.Signals) -> SignalMeaning:
        """Return the meaning of a signal."""
        now = time.monotonic()
        is_soon = now - self.last_at <= DUPLICATE_S
        warned = self._asked_by in (*self._notices, signal.SIGUSR1) and number != self._asked_by
        if self._asked_by is None:
            meaning = SignalMeaning.FIRST
            self._asked_by = number
        elif number in self._notices:
            is_repeated = is_soon and number == self._last
            meaning = SignalMeaning.DUPLICATE if is_repeated else SignalMeaning.NOTICE
        elif warned:
            meaning = SignalMeaning.NOTICE
            self._asked_by = number
        else:
            meaning = SignalMeaning.DUPLICATE if is_soon else SignalMeaning.SECOND
        if meaning is not SignalMeaning.DUPLICATE:
            self._last = number
            self.last_at = now
        return meaning


_last_exit_code = 0
_active: "StopSignals | None" = None
_fork_hook_set = False


def note_exit_code(code: int) -> None:
    """Remember the exit code of a run in this process: 0, or that of its signal."""
    global _last_exit_code
    _last_exit_code = code


def last_exit_code() -> int:
    """Return the last value of `note_exit_code`: the exit code for a script."""
    return _last_exit_code


class SignalPipe:
    """Lets a thread hear signals at once, whatever the main thread waits for.

    The interpreter writes each signal to a pipe, from which `listen` reads until it reads 0.
    Only the main thread may make and close one.
    """

    def __init__(
        self, handlers: Mapping[signal.Signals, Any], listen: Callable[[int], None], name: str
    ) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, do) for number, do in handlers.items()}
        self._thread = threading.Thread(target=listen, args=(self._reader,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore the handlers, and end the thread."""
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)


class StopSignals:
    """Listen for stop signals inside a `with` block, in the main thread only.

    They are noticed even while the main thread waits in a collective.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.unsaved: Callable[[], str] = lambda: "the run had not reached its first step"
        """Returns a description of what would be lost now, or "". Called from another thread."""
        self.is_quiet = False
        """Whether another rank reports what is lost."""
        self._history = SignalHistory(inside_slurm_job())
        self._pipe: SignalPipe | None = None

    def __enter__(self) -> Self:
        global _active, _fork_hook_set
        if threading.current_thread() is not threading.main_thread():
            return self
        # Those that are ignored stay so: that is the choice of `nohup`.
        handled = [n for n in EXIT_CODES if signal.getsignal(n) is not signal.SIG_IGN]
        self._pipe = SignalPipe(dict.fromkeys(handled, _do_nothing), self._listen, "stop-signals")
        _active = self
        if not _fork_hook_set:  # cannot be removed, so set it once
            os.register_at_fork(after_in_child=_forget_in_child)
            _fork_hook_set = True
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        if self._pipe is not None:
            _active = None
            self._pipe.close()

    @property
    def exit_code(self) -> int:
        """Return the exit code of the process: 128 + signal, or 0 without a signal."""
        return EXIT_CODES[self.requested] if self.requested else 0

    def _listen(self, reader: int) -> None:
        while True:
            number = os.read(reader, 1)[0]
            if number == 0:
                return
            if number in EXIT_CODES:
                self._receive(signal.Signals(number))

    def _receive(self, number: signal.Signals) -> None:
        """Remember a request to stop, or exit at once if it is the second."""
        is_soon = time.monotonic() - self._history.last_at <= DUPLICATE_S
        match self._history.add(number):
            case SignalMeaning.FIRST:
                self.requested = number
            case SignalMeaning.NOTICE if not is_soon:
                # Do not exit: a running save may need the seconds between SLURM's SIGTERM and
                # its SIGKILL at the time limit.
                self._say_unsaved(f"{number.name} came before the run could save; if killed now,")
            case SignalMeaning.SECOND:
                self._leave(number)

    def _leave(self, number: signal.Signals) -> NoReturn:
        """End the process now, with an exit code that says whether everything was saved."""
        is_saved = not self._say_unsaved(f"stopped by {number.name} without saving:")
        os._exit(self.exit_code if is_saved else EXIT_NOT_SAVED)

    def _say_unsaved(self, what: str) -> bool:
        """Report what is lost, if anything; return whether anything is."""
        unsaved = self.unsaved()
        if unsaved and not self.is_quiet:
            # Do not use sys.stderr: the main thread may hold its lock.
            os.write(2, f"lockstep: {what} {unsaved}\n".encode())
        return bool(unsaved)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Replace the default action; the pipe reports the signal."""


def leave_signals_to_parent() -> None:
    """Ignore stop signals in a loader worker, which ends with its parent.

    A scheduler signals every process of a job. If a worker died, its parent would miss the
    batches that it needs for a clean stop.
    """
    for number in EXIT_CODES:
        signal.signal(number, signal.SIG_IGN)


def _forget_in_child() -> None:
    """Restore the default actions in a forked child: it must not write to our pipe."""
    if _active is not None:
        signal.set_wakeup_fd(-1)
        for number in EXIT_CODES:
            signal.signal(number, signal.SIG_DFL)
