"""Parse the text of SLURM's options and commands: time limits, signals, answers.

Owns: parsing such text, and running a SLURM command for it. Text that cannot be parsed gives None,
never a guess. Does not own: decisions based on it.
"""

import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import shown
from lockstep.text_input import whole_number

UNLIMITED = ("UNLIMITED", "INFINITE")
KILL_WAIT_S = 30
"""SLURM's default between SIGTERM and SIGKILL."""
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The output and the exit code of a SLURM command."""

    code: int
    out: str
    err: str


def run_command(words: Sequence[str], timeout_s: float | None = None) -> Answer | None:
    """Run a SLURM command; return None if it is not installed or does not end in time."""
    try:
        ended = subprocess.run(words, capture_output=True, timeout=timeout_s, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired):  # ValueError: a NUL in a word
        return None
    out, err = (part.decode(errors="replace") for part in (ended.stdout, ended.stderr))
    return Answer(ended.returncode, out, err)


def parse_time_limit(text: str) -> int | None:
    """Return a time limit in seconds; None if SLURM would not understand it.

    The caller checks for the words of `UNLIMITED`.

    >>> [parse_time_limit(text) for text in ("90", "1:30", "2:00:00", "1-12", "1-0:30", "soon")]
    [5400, 90, 7200, 129600, 88200, None]
    """
    shape = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if shape is None:
        return None
    numbers = [whole_number(part) for part in shape.groups() if part is not None]
    if None in numbers:
        return None
    given = [number for number in numbers if number is not None]
    days = given.pop(0) if shape[1] is not None else 0
    # After days come hours; without, one number is minutes, two are minutes and seconds.
    units = (3600, 60, 1) if shape[1] is not None or len(given) == 3 else (60, 1)
    rest = sum(number * unit for number, unit in zip(given, units, strict=False))
    return days * 86_400 + rest


@dataclass(frozen=True, slots=True)
class SignalOption:
    """The parts of the option `--signal`."""

    to_shell: bool
    """Whether the signal goes to the batch shell alone."""
    name: str
    seconds: int
    """How long before the time limit it is sent."""


def parse_signal(text: str) -> SignalOption | None:
    """Parse the value of `--signal`; None if SLURM would not understand it.

    >>> parse_signal("B:USR1@120")
    SignalOption(to_shell=True, name='USR1', seconds=120)
    >>> parse_signal("SIGTERM").seconds, parse_signal("R:10@30").name, parse_signal("TERM@soon")
    (60, 'USR1', None)
    """
    shape = re.fullmatch(r"(?:([A-Z]+):)?([A-Za-z0-9+-]{1,20})(?:@([0-9]+))?", text, re.ASCII)
    seconds = whole_number(shape[3] or "60") if shape else None
    if shape is None or seconds is None:
        return None
    name = shape[2]
    number = whole_number(name)
    if number is not None and number in set(signal.Signals):
        name = signal.Signals(number).name
    return SignalOption("B" in (shape[1] or ""), name.upper().removeprefix("SIG"), seconds)


def parse_kill_wait(config: str) -> int | None:
    """Return the time between SIGTERM and SIGKILL from the output of `scontrol show config`.

    >>> parse_kill_wait("KillWait                = 60 sec"), parse_kill_wait("")
    (60, None)
    """
    found = re.search(r"^KillWait[ \t]*=[ \t]*([0-9]+)", config, re.MULTILINE)
    return whole_number(found[1]) if found else None


def kill_wait_s() -> float:
    """Return the time between SLURM's SIGTERM and SIGKILL; the default if it is unknown."""
    answer = run_command(["scontrol", "show", "config"], ANSWER_S)
    known = parse_kill_wait(answer.out) if answer else None
    return KILL_WAIT_S if known is None else known


def one_line(text: str) -> str:
    """Return a command's output as one line for a message."""
    return shown(" ".join(text.split()), limit=200)
