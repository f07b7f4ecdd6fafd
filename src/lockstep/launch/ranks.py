"""The ranks that a launcher has started on its machine, seen from outside.

Owns: their exit codes and records, asking for their stacks, ending them. Does not own: starting
them (torch's elastic agent does), or messages about a failure (`failure.py`).
"""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol

from lockstep.dist.position import Position
from lockstep.launch.memory import MemoryWatch
from lockstep.launch.worker import PLACE, POSITION, RECORD

ANSWER_S = 0.5
"""Time that a rank gets to write down its stack."""
FRAMES = 6
LOOK_S = 1.0
"""Interval at which positions and memory are read."""
ABANDONED_S = 10.0
"""How long a rank may need another rank whose script has ended. Not zero: both may be about to end,
one faster than the other."""
JOINING_S = 1.0
"""How long a rank that must stop may wait for others to start. It has nothing to save."""
SLOW_S = 10.0
"""Ranks that have not stopped this long after the request are named, with their stacks."""
REAP_S = 5.0
"""Time that the kernel gets to end a killed process, which a stuck disk or GPU may delay."""


class Process(Protocol):
    """The part of a rank's process that is used here."""

    @property
    def pid(self) -> int | None:
        """Return its process id."""

    @property
    def exitcode(self) -> int | None:
        """Return its exit code, or minus the signal that ended it; None while it runs."""

    @property
    def sentinel(self) -> int:
        """Return a descriptor that is ready when the process has ended."""


class Ranks:
    """The ranks of one attempt on this machine.

    Args:
        processes: The processes, by local rank.
        folders: The folders of their records, by local rank.
        first: The global rank of the first one.
    """

    def __init__(self, processes: Sequence[Process], folders: Sequence[Path], first: int) -> None:
        self.processes = processes
        self.folders = folders
        self.first = first
        self.memory = MemoryWatch()
        self._looked_at = 0.0
        self._abandoned_since: float | None = None

    @property
    def codes(self) -> list[int | None]:
        """Return the exit codes: minus the signal if killed, None while running."""
        return [process.exitcode for process in self.processes]

    @property
    def living(self) -> list[int]:
        """Return the local ranks that have not ended."""
        return [local for local, code in enumerate(self.codes) if code is None]

    def record(self, local: int) -> dict[str, Any] | None:
        """Return the record that a rank wrote when its script ended, if there is one."""
        try:
            return dict(json.loads((self.folders[local] / RECORD).read_text()))
        except (OSError, ValueError):
            return None

    def records(self) -> list[dict[str, Any]]:
        """Return the records of the ranks that failed, in the order of their failures."""
        left = (self.record(local) for local in range(len(self.processes)))
        failed = [record for record in left if record and record["code"]]
        return sorted(failed, key=lambda record: float(record["time"]))

    def position(self, local: int) -> Position:
        """Return how far a rank has got."""
        return Position.read(self.folders[local] / POSITION)

    def look(self) -> None:
        """Note, at intervals, what is needed after a rank has ended."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        self.memory.look(process.pid for process in self.processes if process.pid is not None)
        if not self._find_abandoned():
            self._abandoned_since = None
        elif self._abandoned_since is None:
            self._abandoned_since = now

    def _find_abandoned(self) -> bool:
        """Return whether every running rank needs one that has ended."""
        codes = self.codes
        ended = [self.position(local) for local, code in enumerate(codes) if code is not None]
        living = [self.position(local) for local, code in enumerate(codes) if code is None]
        if not ended or not living:
            return False
        return all(
            (one.is_joining or one.is_in_run) and any(one.needs(other) for other in ended)
            for one in living
        )

    @property
    def is_abandoned(self) -> bool:
        """Return whether no running rank can finish, because it needs one that has ended."""
        since = self._abandoned_since
        return since is not None and time.monotonic() - since > ABANDONED_S

    def where(self) -> str:
        """Return a message with the stacks of the ranks that have not ended."""
        places = self._ask_places()
        return "".join(
            f"lockstep: rank {self.first + local} was still running, at\n{place}"
            for local, place in places.items()
        )

    def not_stopped(self) -> str:
        """Return a message with the ranks that have not stopped, their last steps and stacks."""
        text = ""
        for local, place in self._ask_places().items():
            who = f"rank {self.first + local} has not stopped yet"
            progress = ", ".join(filter(None, [who, self.position(local).text()]))
            text += f"lockstep: {progress}; it is at\n{place}"
        return text

    def _ask_places(self) -> dict[int, str]:
        """Return the innermost calls of the ranks that have not ended, by local rank."""
        asked = [local for local in self.living if (self.folders[local] / PLACE).exists()]
        sizes = {local: (self.folders[local] / PLACE).stat().st_size for local in asked}
        for local in asked:
            pid = self.processes[local].pid
            with suppress(ProcessLookupError):  # it has ended in the meantime
                os.kill(pid or 0, signal.SIGUSR2)
        time.sleep(ANSWER_S)
        places = {}
        for local in asked:
            # A rank appends to the file each time it is asked.
            answer = (self.folders[local] / PLACE).read_bytes()[sizes[local] :]
            frames = answer.decode(errors="replace").splitlines()[1 : 1 + FRAMES]
            lines = frames or ["  (no answer: stopped or gone)"]
            places[local] = "".join(f"{line}\n" for line in lines)
        return places

    def send(self, number: signal.Signals, receivers: Sequence[int]) -> None:
        """Send a signal to local ranks."""
        for local in receivers:
            with suppress(ProcessLookupError):
                os.kill(self.processes[local].pid or 0, number)

    def end(
        self,
        number: signal.Signals,
        deadline: Callable[[], float],
        report_slow: Callable[[str], None] | None = None,
    ) -> None:
        """Ask the ranks to end, wait until `deadline`, and kill those still running.

        A rank that needs one that has ended cannot save, and a rank that waits for others to start
        has nothing to save: these are killed earlier.

        Args:
            number: The signal to send.
            deadline: Returns a time of the monotonic clock, which may change.
            report_slow: Called once, after SLOW_S, with a message about ranks still running.
        """
        began = time.monotonic()
        self.send(number, self.living)
        while self.living and not self.is_abandoned:
            left_s = deadline() - time.monotonic()
            if left_s <= 0:
                break
            self.wait(min(left_s, LOOK_S / 2))
            self.look()
            if time.monotonic() - began > JOINING_S:
                joining = [local for local in self.living if self.position(local).is_joining]
                self.send(signal.SIGKILL, joining)
            if report_slow is not None and time.monotonic() - began > SLOW_S:
                report_slow(self.not_stopped())
                report_slow = None
        self.send(signal.SIGKILL, self.living)
        until = time.monotonic() + REAP_S
        while self.living and time.monotonic() < until:
            self.wait(until - time.monotonic())

    def wait(self, limit_s: float) -> None:
        """Wait until one more rank has ended, for at most `limit_s`."""
        codes = self.codes
        alive = [p.sentinel for p, code in zip(self.processes, codes, strict=True) if code is None]
        if alive:
            connection.wait(alive, max(0.0, limit_s))

    def unsaved(self) -> list[int]:
        """Return the ranks that were killed before they saved."""
        return [
            self.first + local
            for local, code in enumerate(self.codes)
            if code in (None, -signal.SIGKILL) and has_work(self.position(local))
        ]


def has_work(position: Position) -> bool:
    """Return whether a rank that is killed at this position may lose steps."""
    return not (position.is_joining or position.has_finished)
