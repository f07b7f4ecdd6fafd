"""Every error lockstep raises on purpose.

LockstepError
├── ConfigError        the request makes no sense; no weight has moved
├── LaunchError        the processes do not add up to one group
├── DataError          a sample, a file or a folder cannot be used
├── NonFiniteError     the loss or the gradient stopped being a number
├── CheckpointError    a saved run cannot be read back, or does not belong to this one
└── FolderInUseError   a live run already writes here
"""

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


class LockstepError(Exception):
    """Say what is wrong, with the numbers, and what to try next.

    Both parts stay in `args`, so the error survives pickling from a worker
    process. `exit_code` is what a command ends with when it reaches the top.
    """

    exit_code = 2
    is_shared = False
    """Whether every rank raises it, in the same words: then one of them need say it."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}\n  try: {self.remedy}"


class ConfigError(LockstepError):
    """The request makes no sense; no weight has moved."""


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


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word nearest to a mistyped one, if any is near.

    >>> closest("batch_sise", ["epochs", "batch_size"])
    'batch_size'
    """
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None
