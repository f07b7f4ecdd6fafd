"""The progress of this rank, in a small file that its launcher can read after the rank is killed.

Owns: the counters of this process, and the layout of the file. Does not own: when they change
(`world.py` counts joins, `run/build.py` and `trainer.py` count runs and steps), or what a launcher
concludes from them.

The file is mapped into memory, so that writing a counter costs no system call. If no launcher asks
for the file, the counters are only in this process's memory.
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
        """Return the counters in a rank's file, or the initial ones if there is none."""
        try:
            values = path.read_bytes()
        except OSError:
            values = b""
        return cls(values if len(values) == _LAYOUT.size else _START)

    def share(self, path: Path) -> None:
        """Keep the counters in a file from now on.

        Raises:
            OSError: if there is no space for it.
        """
        # Write the bytes, because a later write to a mapped hole on a full disk raises SIGBUS.
        path.write_bytes(self._values)
        with path.open("r+b") as file:
            self._values = memoryview(mmap.mmap(file.fileno(), _LAYOUT.size)).cast("q")

    # --- What a rank counts ------------------------------------------------------

    def begin_join(self) -> None:
        """Note that this rank waits for the others to form a group."""
        self._values[_JOINS_BEGUN] += 1

    def end_join(self) -> None:
        """Note that the group is formed."""
        self._values[_JOINS_DONE] = self._values[_JOINS_BEGUN]

    def begin_run(self) -> None:
        """Count a run that all ranks must finish together."""
        self._values[_STEP] = NO_STEP
        self._values[_RUNS_BEGUN] += 1

    def reach(self, step: int) -> None:
        """Note the number of steps that the run has taken."""
        self._values[_STEP] = step

    def finish_run(self) -> None:
        """Note that the run has saved, and no longer needs the other ranks."""
        self._values[_RUNS_FINISHED] = self._values[_RUNS_BEGUN]
        self.leave_run()

    def leave_run(self) -> None:
        """Note that the run was left, finished or not."""
        self._values[_RUNS_LEFT] = self._values[_RUNS_BEGUN]

    # --- What a launcher reads ---------------------------------------------------

    @property
    def step(self) -> int | None:
        """Return the number of steps taken, or None before a run has begun to step."""
        step = self._values[_STEP]
        return None if step == NO_STEP else step

    @property
    def is_joining(self) -> bool:
        """Return whether the rank waits for the others to form a group."""
        return self._values[_JOINS_DONE] < self._values[_JOINS_BEGUN]

    @property
    def has_joined(self) -> bool:
        """Return whether the rank has ever begun to join the others."""
        return self._values[_JOINS_BEGUN] > 0

    @property
    def has_begun(self) -> bool:
        """Return whether the rank has ever begun a run."""
        return self._values[_RUNS_BEGUN] > 0

    @property
    def num_runs(self) -> int:
        """Return the number of runs that the rank has begun."""
        return self._values[_RUNS_BEGUN]

    @property
    def is_in_run(self) -> bool:
        """Return whether the rank is inside a run."""
        return self._values[_RUNS_LEFT] < self._values[_RUNS_BEGUN]

    @property
    def has_finished(self) -> bool:
        """Return whether the rank has begun a run, and finished every one."""
        return self.has_begun and self._values[_RUNS_FINISHED] == self._values[_RUNS_BEGUN]

    def needs(self, other: "Position") -> bool:
        """Return whether this rank's last join or run cannot succeed if `other` has ended."""
        if self.is_joining:
            return other._values[_JOINS_BEGUN] < self._values[_JOINS_BEGUN]
        is_unfinished = self._values[_RUNS_FINISHED] < self._values[_RUNS_BEGUN]
        return is_unfinished and other._values[_RUNS_FINISHED] < self._values[_RUNS_BEGUN]

    def text(self) -> str:
        """Describe the progress, for example "after step 3"."""
        if self.step is not None:
            return f"after step {self.step}"
        if self.has_begun:
            return "before its first step"
        if self.is_joining:
            return "while the ranks formed a group"
        return "" if self.has_joined else "before it joined the others"


this_rank = Position()
"""The progress of this rank; there is one rank for each process."""
