"""The memory that ranks used, the memory there is, and whether the kernel killed a rank for it.

Owns: reading this from /proc and from this process's control group, version 1 or 2. Does not own:
messages about it.
"""

import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The memory control group of this process, which its ranks inherit."""

    events: Path
    """The file that counts the processes killed by the out-of-memory killer."""
    limit: Path
    current: Path
    """The file with the memory that the group uses."""

    @classmethod
    def own(
        cls, root: Path = Path("/sys/fs/cgroup"), listed: Path = Path("/proc/self/cgroup")
    ) -> Self | None:
        """Return the group, or None if the kernel has no memory control groups."""
        try:
            lines = listed.read_text().splitlines()
        except OSError:
            return None
        for line in sorted(lines, reverse=True):  # version 1, which names "memory", goes first
            _, controllers, path = line.split(":", 2)
            inner = path.lstrip("/")
            # In a container the group's own files are at the root of the mount.
            if controllers == "memory":
                folders = [root / "memory" / inner, root / "memory"]
                names = ("oom_control", "limit_in_bytes", "usage_in_bytes")
            else:
                folders = [] if controllers else [root / inner, root / "unified" / inner, root]
                names = ("events", "max", "current")
            for folder in folders:
                if (folder / f"memory.{names[0]}").exists():
                    return cls(*(folder / f"memory.{name}" for name in names))
        return None

    def num_kills(self) -> int | None:
        """Return how many processes of the group the out-of-memory killer has killed so far."""
        try:
            counts = dict(line.split() for line in self.events.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            return None

    def num_bytes(self) -> int | None:
        """Return the memory limit of the group; None if there is none."""
        try:
            return int(self.limit.read_text())
        except (OSError, ValueError):  # "max"
            return None

    def num_free_bytes(self) -> int | None:
        """Return how much more memory the group may use; None if it has no limit."""
        try:
            return int(self.limit.read_text()) - int(self.current.read_text())
        except (OSError, ValueError):
            return None


@dataclass
class MemoryWatch:
    """The memory that the ranks of one attempt used, as last seen before they ended."""

    group: ControlGroup | None = field(default_factory=ControlGroup.own)
    peaks: dict[int, int] = field(default_factory=dict)
    """The largest resident size in bytes, by process id."""

    def __post_init__(self) -> None:
        self._kills_before = self.group.num_kills() if self.group else None

    def look(self, pids: Iterable[int]) -> None:
        """Note the peaks of running processes."""
        for pid in pids:
            peak = peak_bytes(pid)
            if peak is not None:
                self.peaks[pid] = peak

    @property
    def was_out_of_memory(self) -> bool | None:
        """Return whether the out-of-memory killer has killed a process; None if unknown."""
        kills = self.group.num_kills() if self.group else None
        if kills is None or self._kills_before is None:
            return None
        return kills > self._kills_before

    def text(self, pid: int) -> str:
        """Return a process's peak and the available memory: "peak memory 12.3 GiB of 24.0 GiB"."""
        peak = self.peaks.get(pid)
        if peak is None:
            return ""
        limit = self.group.num_bytes() if self.group else None
        there = min(limit or psutil.virtual_memory().total, psutil.virtual_memory().total)
        return f"peak memory {size_text(peak)} of {size_text(there)}"


def free_host_bytes(group: ControlGroup | None) -> int:
    """Return the memory that is free on this machine, within the limit of a group."""
    available = int(psutil.virtual_memory().available)
    left = group.num_free_bytes() if group else None
    return available if left is None else min(available, left)


def own_peak_bytes() -> int:
    """Return the largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_bytes(pid: int) -> int | None:
    """Return the largest resident size of a running process so far."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    values: Mapping[str, str] = dict(line.split(":", 1) for line in lines)
    peak = values.get("VmHWM", "").split()  # a zombie has none
    return int(peak[0]) * 1024 if peak else None


def size_text(num_bytes: int) -> str:
    """Return a size in GiB or MiB, as memory is requested.

    >>> size_text(13_207_024_435), size_text(209_715_200)
    ('12.3 GiB', '200 MiB')
    """
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / (1 << 20):.0f} MiB"
