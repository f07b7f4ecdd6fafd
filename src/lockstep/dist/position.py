"""Where this rank stands, in a small file that its launcher can read after the rank was killed.

Owns: the counters of this process, and their place in the file. Does not own: when they change
(`world.py` counts joining the group, `run/build.py` and `trainer.py` count runs and steps), nor
what a launcher concludes from them.

The file is mapped into memory, so that writing a counter costs no system call. Without a launcher
that asks for the file, the counters lie in memory of this process alone.
"""

import mmap
import struct
from pathlib import Path
from typing import Self

_LAYOUT = struct.Struct("=6q")
_JOINS_BEGUN, _JOINS_DONE, _RUNS_BEGUN, _RUNS_LEFT, _RUNS_FINISHED, _STEP = range(6)
NO_STEP = -1
_START = _LAYOUT.pack(0, 0, 0, 0, 0, NO_STEP)


class Position:
    """The counters of one rank, which writes them; a launcher reads a copy."""

    def __init__(self, values: bytes = _START) -> None:
        self._values = memoryview(bytearray(values)).cast("q")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the counters that a rank has shared; those of the start if it has not."""
        try:
            values = path.read_bytes()
        except OSError:
            values = b""
        return cls(values if len(values) == _LAYOUT.size else _START)

    def share(self, path: Path) -> None:
        """Keep the counters in a file from now on.

        Raises:
            OSError: if there is no room for it.
        """
        # Written, and not merely made longer: a write into a mapped hole of a full disk is SIGBUS.
        path.write_bytes(self._values)
        with path.open("r+b") as file:
            self._values = memoryview(mmap.mmap(file.fileno(), _LAYOUT.size)).cast("q")

    # --- What a rank counts ------------------------------------------------------

    def begin_join(self) -> None:
        """Count that this rank waits for the others to form a group."""
        self._values[_JOINS_BEGUN] += 1

    def end_join(self) -> None:
        """Count that the group is there."""
        self._values[_JOINS_DONE] = self._values[_JOINS_BEGUN]

    def begin_run(self) -> None:
        """Count a run that all ranks must finish together."""
        self._values[_STEP] = NO_STEP
        self._values[_RUNS_BEGUN] += 1

    def reach(self, step: int) -> None:
        """Note how many steps the run has taken."""
        self._values[_STEP] = step

    def finish_run(self) -> None:
        """Note that the run has saved, and needs the other ranks no more."""
        self._values[_RUNS_FINISHED] = self._values[_RUNS_BEGUN]
        self.leave_run()

    def leave_run(self) -> None:
        """Note that the run was left, finished or not."""
        self._values[_RUNS_LEFT] = self._values[_RUNS_BEGUN]

    # --- What a launcher reads ---------------------------------------------------

    @property
    def step(self) -> int | None:
        """Return the number of steps taken, if the rank has said it."""
        step = self._values[_STEP]
        return None if step == NO_STEP else step

    @property
    def is_joining(self) -> bool:
        """Say whether the rank waits for the others to form a group."""
        return self._values[_JOINS_DONE] < self._values[_JOINS_BEGUN]

    @property
    def has_joined(self) -> bool:
        """Say whether the rank has ever begun to join the others."""
        return self._values[_JOINS_BEGUN] > 0

    @property
    def has_begun(self) -> bool:
        """Say whether the rank has ever begun a run."""
        return self._values[_RUNS_BEGUN] > 0

    @property
    def num_runs(self) -> int:
        """Return how many runs the rank has begun."""
        return self._values[_RUNS_BEGUN]

    @property
    def is_in_run(self) -> bool:
        """Say whether the rank is inside a run."""
        return self._values[_RUNS_LEFT] < self._values[_RUNS_BEGUN]

    @property
    def has_finished(self) -> bool:
        """Say whether the rank has begun a run, and finished all that it has begun."""
        return self.has_begun and self._values[_RUNS_FINISHED] == self._values[_RUNS_BEGUN]

    def needs(self, other: "Position") -> bool:
        """Say whether this rank's last join or run cannot succeed if `other` does nothing more."""
        if self.is_joining:
            return other._values[_JOINS_BEGUN] < self._values[_JOINS_BEGUN]
        is_unfinished = self._values[_RUNS_FINISHED] < self._values[_RUNS_BEGUN]
        return is_unfinished and other._values[_RUNS_FINISHED] < self._values[_RUNS_BEGUN]

    def text(self) -> str:
        """Say it in words: "after step 3"."""
        if self.step is not None:
            return f"after step {self.step}"
        if self.has_begun:
            return "before its first step"
        if self.is_joining:
            return "at the start, where ranks meet"
        return "" if self.has_joined else "before it joined the others"


own = Position()
"""Where this process stands."""
