"""Read the output of a command that failed, or whose processes printed their stacks.

Owns: finding the error, and its place in the user's code. Does not own: why the command was ended.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class CommandFailure:
    """The first error of a command that failed, or the place where it hangs."""

    error: str
    place: str = ""
    functions: tuple[str, ...] = ()
    advice: str = ""
    """The remedy that the command printed."""

    @property
    def problem(self) -> str:
        """Return the error without the name of a class of ours."""
        return re.sub(r"^lockstep\.errors\.\w+: ", "", self.error)

    @property
    def is_about_saving(self) -> bool:
        """Return whether it happened while saving a checkpoint."""
        return bool({"_save", "save", "state", "snapshot"} & set(self.functions))

    @classmethod
    def read(cls, text: str) -> "CommandFailure":
        r"""Find the first error in the output of any launcher.

        >>> failure = CommandFailure.read(
        ...     "[rank1]: Traceback (most recent call last):\n"
        ...     '[rank1]:   File "/home/me/train.py", line 7, in evaluate\n'
        ...     "[rank1]:     1 / 0\n[rank1]: ZeroDivisionError: by zero\n"
        ... )
        >>> failure.error, failure.place
        ('ZeroDivisionError: by zero', 'train.py:7 in evaluate')
        """
        found = cls._first_error(text)
        advice = re.search(r"^\s*try: (.*)$", text, re.MULTILINE)
        return replace(found, advice=advice[1]) if advice else found

    @classmethod
    def _first_error(cls, text: str) -> "CommandFailure":
        lines = [re.sub(r"^(\[[^\]]*\]:?\s?)+", "", line) for line in text.splitlines()]
        for number, line in enumerate(lines):
            if line.startswith("Traceback (most recent call last)"):
                return cls._from_traceback(lines[number + 1 :])
            if line.startswith("lockstep: ") and "  try: " in "".join(
                lines[number + 1 : number + 2]
            ):
                return cls(line.removeprefix("lockstep: "))
        printed = [line.strip() for line in lines if line.strip()]
        return cls(printed[-1][:200] if printed else "it printed nothing")

    @classmethod
    def _from_traceback(cls, lines: list[str]) -> "CommandFailure":
        frames = []
        for line in lines:
            if found := re.match(r'  File "(.*)", line (\d+), in (\S+)', line):
                frames.append(found.groups())
            elif line and not line.startswith(" "):
                return cls(line[:300], _place(frames[::-1]), tuple(name for *_, name in frames))
        return cls("a truncated traceback", _place(frames[::-1]))

    @classmethod
    def read_stacks(cls, text: str) -> "CommandFailure":
        """Return the place of the rank that hangs, not of the ranks that wait for it."""
        _, *stacks = re.split(r"^Current thread .*most recent call first.*\n", text, flags=re.M)
        found = [cls._from_dump(stack.splitlines()) for stack in stacks]
        ranks = [one for one in found if one.functions and "_worker_loop" not in one.functions]
        own = [one for one in ranks if not {"all_reduce", "all_max"} & set(one.functions)]
        return (own or ranks or [cls("")])[0]

    @classmethod
    def _from_dump(cls, lines: list[str]) -> "CommandFailure":
        frames = []
        for line in lines:
            found = re.match(r'  File "(.*)", line (\d+) in (\S+)', line)
            if not found:
                break
            frames.append(found.groups())
        return cls("", _place(frames), tuple(name for *_, name in frames))


def _place(frames: Sequence[tuple[str | Any, ...]]) -> str:
    """Return the innermost place in the user's code, of frames from the innermost outwards."""
    for file, line, function in frames:
        if not re.search(r"/lib/python3|/site-packages/|/lockstep/|^<", file):
            return f"{Path(file).name}:{line} in {function}"
    return f"{Path(frames[0][0]).name}:{frames[0][1]} in {frames[0][2]}" if frames else ""
