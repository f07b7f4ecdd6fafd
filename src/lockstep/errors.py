"""Every error lockstep raises on purpose.

LockstepError
├── ConfigError        the request makes no sense; no weight has moved
│   └── TrainedParametersError   `requires_grad` changed after the model was replicated
├── LaunchError        the processes do not add up to one group
├── DataError          a sample, a file or a folder cannot be used
├── NonFiniteError     the loss or the gradient stopped being a number
├── CheckpointError    a saved run cannot be read back, or does not belong to this one
│   └── TakenOverError another run saves into this folder now
└── FolderInUseError   a live run already writes here
"""

import difflib
import re
import reprlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath
from typing import Any

MAX_MESSAGE = 4000
"""Characters of a message; more of a value that somebody handed in helps nobody."""
MAX_SHOWN = 80

_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


class LockstepError(Exception):
    """Say what is wrong, with the numbers, and what to try next.

    Both parts stay in `args`, so the error survives pickling from a worker
    process. `exit_code` is what a command ends with when it reaches the top.
    """

    exit_code = 2
    is_shared = False
    """Whether every rank raises it, in the same words: then one of them need say it."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem = printable(problem)
        self.remedy = printable(remedy)
        super().__init__(self.problem, self.remedy)

    def __str__(self) -> str:
        return f"{self.problem}\n  try: {self.remedy}"


class ConfigError(LockstepError):
    """The request makes no sense; no weight has moved."""


class TrainedParametersError(ConfigError):
    """The trained parameters are no longer those whose gradients are exchanged."""


class LaunchError(LockstepError):
    """The processes do not add up to one group."""


class DataError(LockstepError):
    """A sample, a file or a folder cannot be used."""


class NonFiniteError(LockstepError):
    """The loss or the gradient stopped being a number."""

    exit_code = 3


class OutOfMemoryError(LockstepError):
    """A step did not fit in the memory of a rank."""


class CheckpointError(LockstepError):
    """A saved run cannot be read back, or does not belong to this one."""


class TakenOverError(CheckpointError):
    """Another run has taken over the folder of checkpoints: this one may not save any more."""


class FolderInUseError(LockstepError):
    """A live run already writes here."""


@contextmanager
def own_exit_code() -> Iterator[None]:
    """Have a script that lets an error of ours through end with its code, where python says 1."""
    try:
        yield
    except LockstepError:
        if getattr(sys.excepthook, "func", None) is not _end:
            sys.excepthook = partial(_end, sys.excepthook)
        raise


def _end(say: Any, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    say(kind, error, trace)
    if isinstance(error, LockstepError) and not hasattr(sys, "ps1"):  # or somebody is typing
        raise SystemExit(error.exit_code)


def printable(text: str) -> str:
    r"""Return a message that a terminal shows as it is: control characters escaped, not too long.

    >>> printable("a bell: \a")
    'a bell: \\x07'
    """
    if len(text) > MAX_MESSAGE:
        half = MAX_MESSAGE // 2
        text = f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
    return _UNPRINTABLE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    r"""Return a value as a message quotes it: on one line, and shortened.

    >>> shown("two\nlines"), shown(3), shown("x" * 1000, limit=11), shown(PurePath("a/b.yaml"))
    ("'two\\nlines'", '3', "'xxx...xxx'", 'a/b.yaml')
    """
    if isinstance(value, PurePath):
        return plain(str(value), limit=4 * limit)
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = limit
    try:
        text = short.repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        text = f"a {type(value).__name__} with too many digits to print"
    return printable(text.replace("\n", " "))


def plain(text: str, limit: int = MAX_SHOWN) -> str:
    r"""Return a text without quotes where it is short and printable, else as `shown` does.

    >>> plain("--gpus"), plain("two\nlines"), plain("")
    ('--gpus', "'two\\nlines'", "''")
    """
    is_plain = text.isprintable() and 0 < len(text) <= limit
    return text if is_plain else shown(text, limit)


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word nearest to a mistyped one, if any is near.

    >>> closest("batch_sise", ["epochs", "batch_size"])
    'batch_size'
    """
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None
