"""Signals to the launcher: the first lets the ranks save, the second ends them at once.

`lockstep.signals` decides which signal counts as the second: SLURM's own notices do not.

Owns: passing signals on, how long ranks may save, ending every process that descends from the
launcher. Does not own: saving (each rank does, `lockstep.signals`), or the meaning of a rank's exit
(`failure.py`).

A separate thread listens, so that a second signal is handled while the main thread waits.
"""

import math
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker, util
from types import FrameType
from typing import NoReturn, Self

import psutil

from lockstep.harness.command import descendants
from lockstep.launch.ranks import Ranks, has_work
from lockstep.signals import (
    DUPLICATE_S,
    EXIT_CODES,
    EXIT_NOT_SAVED,
    SLURM_NOTICES,
    SignalHistory,
    SignalMeaning,
    SignalPipe,
)
from lockstep.text_input import whole_number

SIGNALS = tuple(number.name for number in EXIT_CODES)
"""Signals that are passed on to every rank; SLURM announces the time limit with SIGUSR1."""
SAVE_S = 90.0
"""Time that ranks get to save and exit after a signal, unless SLURM sets the limit."""
START_S = 5.0
"""Time that a launcher without ranks gets to exit."""
REPORT_S = 10.0
"""Time that the launcher gets after that, to report how its ranks ended."""
MARGIN_S = 5.0
"""The launcher ends its ranks, and reports it, this long before SLURM kills everything."""
LATEST = 2**32
"""The latest plausible end of a job, in seconds since 1970; `select` has a limit too."""
ORPHANS_S = 1.0
"""How long processes that ranks have started may outlive them after a stop."""
TIDY_S = 0.3
"""Time to remove temporary files when the launcher must exit at once."""
KILLED_S = 0.3
"""Time to wait until killed processes are gone."""


class Stopped(BaseException):
    """Raised in the main thread of a launcher that was told to stop.

    Not an `Exception`, so that the interrupted code does not handle it as one of its own errors.
    """


class StopRequest:
    """Listen for signals inside a `with` block, in the main thread only.

    Args:
        names: The names of the signals, without those that the launcher was told to ignore.
        environment: Shows whether SLURM may kill the launcher, and when.
        kill_wait_s: Asks SLURM for the time between its SIGTERM and its SIGKILL.
    """

    def __init__(
        self,
        names: Sequence[str],
        environment: Mapping[str, str],
        kill_wait_s: Callable[[], float],
    ) -> None:
        self.requested: signal.Signals | None = None
        self.deadline = math.inf
        """The time of the monotonic clock until which ranks may save."""
        self.log_folder = ""
        """Removed if the launcher is ended by the listening thread."""
        self._numbers = [signal.Signals[name] for name in names]
        self._environment = environment
        self._kill_wait_s = kill_wait_s
        self._ranks: Ranks | None = None
        self._family: set[psutil.Process] | None = None
        """The descendants of this process when the first signal arrived."""
        self._had_ranks = False
        self._lock = threading.Lock()
        self._pipe: SignalPipe | None = None
        self._is_raised = False
        self._is_over = False
        self._is_forced = False

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        handlers = dict.fromkeys(self._numbers, self._interrupt)
        self._pipe = SignalPipe(handlers, self._listen, "stop-request")
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is not None:
            self._is_over = True
            self._pipe.close()

    def watch(self, ranks: Ranks) -> None:
        """Set the ranks that were just started as those to stop."""
        self._ranks = ranks

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Interrupt the main thread, once; the listening thread does the rest."""
        if self._is_raised or self._is_over:
            return
        self._is_raised = True
        self._note(signal.Signals(number))
        raise Stopped

    def _note(self, number: signal.Signals) -> None:
        """List the processes to stop before any rank is told: orphans cannot be found later."""
        with self._lock:
            if self._family is None:
                self.requested = number
                self._had_ranks = bool(self._living())
                self._family = descendants()

    def _listen(self, reader: int) -> None:
        leave_by: float | None = None
        history = SignalHistory("SLURM_JOB_ID" in self._environment)
        while True:
            left_s = None if leave_by is None else max(0.0, leave_by - time.monotonic())
            if not select.select([reader], (), (), left_s)[0]:
                self._end_now()
            number = os.read(reader, 1)[0]
            if number == 0:
                return
            if number not in self._numbers:
                continue
            match history.add(signal.Signals(number)):
                case SignalMeaning.FIRST | SignalMeaning.NOTICE:
                    leave_by = time.monotonic() + self._begin(signal.Signals(number))
                case SignalMeaning.SECOND:
                    self._end_now()

    def _begin(self, number: signal.Signals) -> float:
        """Report the stop, and return how long it may take."""
        self._note(number)
        if not self._had_ranks:
            write_line(f"lockstep: stopped by {number.name}; no rank was running")
            return START_S
        grace_s = save_time_s(number, self._environment, self._kill_wait_s)
        self.deadline = time.monotonic() + grace_s
        again = "press Ctrl-C again" if number == signal.SIGINT else f"send {number.name} again"
        again += f", {DUPLICATE_S:g} s or more from now,"
        by_slurm = ""
        if "SLURM_JOB_ID" in self._environment:
            by_slurm = " (SLURM may kill them earlier)"
            if number in SLURM_NOTICES:
                again = f"send SIGINT twice, {DUPLICATE_S:g} s or more apart,"
        write_line(
            f"lockstep: stopping: ranks may save for up to {grace_s:.0f} s{by_slurm}; "
            f"{again} to end them without saving"
        )
        return grace_s + REPORT_S

    def _living(self) -> list[int]:
        """Return the local ranks that are running.

        This asks the kernel, because the main thread may be using `multiprocessing` right now.
        """
        ranks = self._ranks
        if ranks is None:
            return []
        return [
            local for local, process in enumerate(ranks.processes) if is_alive(process.pid or 0)
        ]

    def _end_now(self) -> None:
        """End every process that descends from the launcher, and the launcher."""
        assert self.requested is not None
        self._is_forced = True
        ranks = self._ranks
        lost = [local for local in self._living() if ranks and has_work(ranks.position(local))]
        text = self.not_saved_text(ranks) if ranks and lost else ""
        kill_all((self._family or set()) | descendants())
        write_line(text.rstrip("\n"))
        # In a thread: the main thread may hold a lock that this needs, or a disk may hang.
        tidying = threading.Thread(target=self._tidy, daemon=True)
        tidying.start()
        tidying.join(TIDY_S)
        os._exit(EXIT_NOT_SAVED if text else 128 + self.requested)

    def _tidy(self) -> None:
        if self.log_folder:
            shutil.rmtree(self.log_folder, ignore_errors=True)
        remove_semaphores()

    def end_orphans(self) -> None:
        """End the processes that ranks have started and left behind, after the ranks have ended.

        They get a moment to end by themselves. Processes that the launcher itself has started are
        spared.
        """
        family = self._family or set()
        own = set(psutil.Process().children())
        _, alive = psutil.wait_procs(family - own, timeout=ORPHANS_S)
        for process in alive:
            with suppress(psutil.Error):
                process.kill()

    def wait_if_forced(self) -> None:
        """Wait for ever if the listening thread is ending everything."""
        if self._is_forced:
            threading.Event().wait()

    def not_saved_text(self, ranks: Ranks) -> str:
        """Return the message that ranks were killed before they saved."""
        steps = [ranks.position(local).step for local in range(len(ranks.processes))]
        known = [step for step in steps if step is not None]
        at = f" at step {min(known)}" if known else ""
        return (
            f"lockstep: not saved: ranks were killed{at}; the steps since the last checkpoint will "
            "be repeated\n"
        )


def save_time_s(
    number: signal.Signals, environment: Mapping[str, str], kill_wait_s: Callable[[], float]
) -> float:
    """Return how long ranks may save; under SLURM, until just before the job is killed.

    SLURM sends SIGTERM as a warning (`--signal=TERM@120`), at the time limit, at a preemption and
    for `scancel`. If the job has time left, the launcher cannot know the reason, and gives the
    ranks all of that time: after a preemption or `scancel` SLURM kills the job earlier by itself,
    whereas a stricter launcher would kill ranks that are saving.
    """
    if "SLURM_JOB_ID" not in environment or number not in (signal.SIGTERM, signal.SIGUSR1):
        return SAVE_S
    end_time = whole_number(environment.get("SLURM_JOB_END_TIME", ""), most=LATEST)
    left_s = None if end_time is None else end_time - time.time()
    if number == signal.SIGTERM:
        limit_s = kill_wait_s()  # time from the limit to SLURM's SIGKILL
        if left_s is not None and left_s > limit_s:
            limit_s = left_s
    else:
        limit_s = SAVE_S + MARGIN_S if left_s is None else left_s
    return max(MARGIN_S, limit_s - MARGIN_S)


def leave(code: int) -> NoReturn:
    """End the launcher's process after its launch, without tearing down the interpreter.

    On a busy machine Python needs seconds to tear down torch, and a signal in that time would
    change the exit code.
    """
    for name in SIGNALS:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    # The process that forks ranks would end by itself, but only after it has imported torch.
    kill_all(descendants())
    remove_semaphores()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def remove_semaphores() -> None:
    """Remove the named semaphores and sockets, as `multiprocessing` does when Python ends."""
    with suppress(Exception):
        util._run_finalizers()  # type: ignore[attr-defined]


def kill_all(family: set[psutil.Process]) -> None:
    """Kill processes and all descendants of this one, and wait until they are gone."""
    # Spare the resource tracker: it removes named semaphores, and ends with this process.
    kept = getattr(resource_tracker._resource_tracker, "_pid", None)
    for _ in range(3):
        family = {process for process in family | descendants() if process.pid != kept}
        for process in family:
            with suppress(psutil.Error):
                process.kill()
        _, alive = psutil.wait_procs(family, timeout=KILLED_S / 3)
        if not alive:
            return


def is_alive(pid: int) -> bool:
    """Return whether a process is running or stopped, and not a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def write_line(line: str) -> None:
    """Write to stderr without its lock, which the main thread may hold."""
    if line:
        with suppress(OSError):
            os.write(2, f"{line}\n".encode())
