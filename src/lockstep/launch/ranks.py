"""The ranks that a launcher has started on its machine, seen from outside.

Owns: their exit codes and what they leave behind, asking where they are, ending them. Does not
own: starting them (torch's elastic agent does), or what is said of a failure (`failure.py`).
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
"""How long a rank may take to write down where it is."""
FRAMES = 6
LOOK_S = 1.0
"""How often positions and memory are looked at."""
ABANDONED_S = 10.0
"""How long a rank may stay where it needs another whose script has ended. It needs a moment: both
may be on their way out, one faster than the other."""
JOINING_S = 1.0
"""How long a rank that is to stop may wait for others to start. It has nothing to save."""
SLOW_S = 10.0
"""Ranks that have not stopped so long after they were asked to are named, with where they are."""
REAP_S = 5.0
"""How long the kernel may take to end a killed process: a stuck disk or GPU may hold it."""


class Process(Protocol):
    """What is asked of a rank's process."""

    @property
    def pid(self) -> int | None:
        """Its number."""

    @property
    def exitcode(self) -> int | None:
        """Minus the signal that ended it, or its exit code; None while it lives."""

    @property
    def sentinel(self) -> int:
        """A descriptor that is ready when the process has ended."""


class Ranks:
    """The ranks of one attempt on this machine.

    Args:
        processes: By local rank.
        folders: By local rank, where it leaves its records.
        first: The global rank of the first.
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
        """Return the exit codes: minus the signal if killed, None while it lives."""
        return [process.exitcode for process in self.processes]

    @property
    def living(self) -> list[int]:
        """Return the local ranks that have not ended."""
        return [local for local, code in enumerate(self.codes) if code is None]

    def record(self, local: int) -> dict[str, Any] | None:
        """Return what a rank wrote down when its script ended, if it could."""
        try:
            return dict(json.loads((self.folders[local] / RECORD).read_text()))
        except (OSError, ValueError):
            return None

    def records(self) -> list[dict[str, Any]]:
        """Return what the ranks that failed left, the first to fail first."""
        left = (self.record(local) for local in range(len(self.processes)))
        failed = [record for record in left if record and record["code"]]
        return sorted(failed, key=lambda record: float(record["time"]))

    def position(self, local: int) -> Position:
        """Return how far a rank has come."""
        return Position.read(self.folders[local] / POSITION)

    def look(self) -> None:
        """Note, once in a while, what must be known after a rank has ended."""
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
        """Say whether all ranks that live need one that has ended."""
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
        """Say whether no rank that lives can finish, for want of one that has ended."""
        since = self._abandoned_since
        return since is not None and time.monotonic() - since > ABANDONED_S

    def where(self) -> str:
        """Ask the ranks that have not ended where they are, and say it."""
        places = self._ask_places()
        return "".join(
            f"lockstep: rank {self.first + local} had not ended; it was at\n{place}"
            for local, place in places.items()
        )

    def not_stopped(self) -> str:
        """Say which ranks have not stopped, after which step, and where they are."""
        text = ""
        for local, place in self._ask_places().items():
            who = f"rank {self.first + local} has not stopped yet"
            said = ", ".join(filter(None, [who, self.position(local).text()]))
            text += f"lockstep: {said}; it is at\n{place}"
        return text

    def _ask_places(self) -> dict[int, str]:
        """Return the innermost calls of the ranks that have not ended, by local rank."""
        asked = [local for local in self.living if (self.folders[local] / PLACE).exists()]
        sizes = {local: (self.folders[local] / PLACE).stat().st_size for local in asked}
        for local in asked:
            pid = self.processes[local].pid
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(pid or 0, signal.SIGUSR2)
        time.sleep(ANSWER_S)
        places = {}
        for local in asked:
            # A rank adds to the file each time it is asked.
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
        """Ask the ranks to end, wait until `deadline`, and kill those that are left.

        A rank that needs another which has ended cannot save, and a rank that waits for others to
        start has nothing to save: neither is waited for so long.

        Args:
            number: The signal to ask with.
            deadline: Returns a time of the monotonic clock; it may change meanwhile.
            report_slow: Told once, after SLOW_S, which ranks have not stopped, and where they are.
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
        """Wait until one more rank has ended, but not for longer than `limit_s`."""
        codes = self.codes
        alive = [p.sentinel for p, code in zip(self.processes, codes, strict=True) if code is None]
        if alive:
            connection.wait(alive, max(0.0, limit_s))

    def unsaved(self) -> list[int]:
        """Return the ranks that were killed before they had saved."""
        return [
            self.first + local
            for local, code in enumerate(self.codes)
            if code in (None, -signal.SIGKILL) and has_work(self.position(local))
        ]


def has_work(position: Position) -> bool:
    """Say whether a rank that is killed there may lose steps."""
    return not (position.is_joining or position.has_finished)
