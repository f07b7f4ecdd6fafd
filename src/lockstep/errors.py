"""Every error lockstep raises on purpose.

LockstepError
├── ConfigError        wrong settings; no weight has changed
│   └── TrainedParametersError   `requires_grad` changed after the model was replicated
├── LaunchError        the processes do not form one group
├── DataError          a sample, a file or a folder cannot be used
├── NonFiniteError     non-finite (NaN or Inf) loss or gradient
├── OutOfMemoryError   a step did not fit in the memory of a rank
├── CheckpointError    a checkpoint cannot be read, or belongs to another run
│   └── TakenOverError another run now saves into this folder
├── NotSavedError      the run was interrupted, and steps will be repeated
├── LeftEarlyError     the script called exit() inside a run
├── OtherRankError     another rank raised an exception that is not one of these
└── FolderInUseError   another live run writes into the folder

StopRequested stands apart: it is no error, and carries a stop to every rank.

Owns: the classes, the wording of their messages, and their exit codes. Does not own: raising them
on every rank (`dist/agreement.py`).
"""

import difflib
import re
import reprlib
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath
from typing import Any

from lockstep.torch_compat.error_texts import is_peer_gone

MAX_MESSAGE = 4000
"""Longest message, in characters."""
MAX_SHOWN = 80
EXIT_DELAY_S = 3.0
"""How long other ranks wait before they exit with a shared error: launchers end all ranks when
the first one has exited, and the rank that prints the error must not be cut short."""

PEER_GONE_TEXT = (
    "lockstep: rank {rank} lost its connection to another rank, which ended\n"
    "  try: read that rank's error above or in its log; set LOCKSTEP_TRACEBACK=1 to see the "
    "traceback of this one\n"
)
"""Printed instead of a traceback, which would hide that of the rank that failed."""

_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


class LockstepError(Exception):
    """A problem, stated with its numbers, and a remedy that starts with a verb.

    Both parts are in `args`, so the error survives pickling from a worker process.
    `exit_code` is the exit code of a command that ends with this error.
    """

    exit_code = 2
    is_shared = False
    """Whether every rank raises it with the same text: then one rank prints it."""
    is_before_update = False
    """Whether a step raised it before changing any weight."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem = printable(problem)
        self.remedy = printable(remedy)
        super().__init__(self.problem, self.remedy)

    def __str__(self) -> str:
        return f"{self.problem}\n  try: {self.remedy}"


class ConfigError(LockstepError):
    """Wrong settings; no weight has changed."""


class TrainedParametersError(ConfigError):
    """The set of trained parameters changed after the model was replicated."""


class LaunchError(LockstepError):
    """The processes do not form one group."""


class DataError(LockstepError):
    """A sample, a file or a folder cannot be used."""


class NonFiniteError(LockstepError):
    """Non-finite (NaN or Inf) loss or gradient."""

    exit_code = 3


class OutOfMemoryError(LockstepError):
    """A step did not fit in the memory of a rank."""


class CheckpointError(LockstepError):
    """A checkpoint cannot be read, or belongs to another run."""


class TakenOverError(CheckpointError):
    """Another run has taken over the checkpoint folder, so this one must not save any more."""


class NotSavedError(LockstepError):
    """The run was stopped before it could save: steps since the last checkpoint are repeated."""

    exit_code = 5


class LeftEarlyError(LockstepError):
    """The script called exit(), with no code or with 0, inside a run that had not finished."""

    exit_code = 6


class OtherRankError(LockstepError):
    """Another rank raised an exception that is not a LockstepError, a bug in a task for example.

    That rank raises the exception itself, with its traceback.
    """

    exit_code = 1


class FolderInUseError(LockstepError):
    """Another live run writes into the folder."""


class StopRequested(BaseException):
    """Leaves an evaluation on every rank, because one of them was asked to stop.

    Derived from BaseException so that a task's `except Exception` does not swallow it.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def hide_tracebacks() -> None:
    """Print uncaught lockstep errors of a script without a traceback.

    The script exits with the error's exit code instead of 1. A rank that failed only because
    another one ended prints that instead of a traceback. Other exceptions go to the previous
    `sys.excepthook`; so do lockstep errors, if a user has replaced python's own hook.
    """
    if getattr(sys.excepthook, "func", None) is not _end:
        sys.excepthook = partial(_end, sys.excepthook)


@contextmanager
def own_exit_code() -> Iterator[None]:
    """Call `hide_tracebacks` if the block raises a lockstep error."""
    try:
        yield
    except LockstepError:
        hide_tracebacks()
        raise


def sentence(error: LockstepError) -> str:
    r"""Return the text printed for an error instead of a traceback: problem, remedy, place.

    >>> sentence(ConfigError("batch_size is 0", "pass batch_size=1"))
    'lockstep: batch_size is 0\n  try: pass batch_size=1\n'
    """
    notes = "".join(f"  {note}\n" for note in getattr(error, "__notes__", []))
    return f"lockstep: {error}\n{notes}"


def _end(say: Any, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    runtime = sys.modules.get("lockstep.dist.environment")  # not imported: there are no ranks
    shows_traceback = runtime is not None and runtime.shows_traceback()
    is_typed = hasattr(sys, "ps1")  # keep the traceback and the session at a prompt
    # torch wraps python's hook to prefix each line of a traceback with the rank.
    is_plain = say is sys.__excepthook__ or say.__module__.startswith("torch.distributed")
    is_brief = is_plain and not (is_typed or shows_traceback)
    if isinstance(error, LockstepError) and is_brief:
        _print_once(error, runtime.launched_rank() if runtime else 0)
    elif is_peer_gone(error) and is_brief:
        rank = runtime.launched_rank() if runtime else 0
        write_stderr(PEER_GONE_TEXT.format(rank=rank))
    else:
        say(kind, error, trace)
    hook: Any = sys.excepthook
    is_outermost = getattr(hook, "func", None) is _end and hook.args == (say,)
    if isinstance(error, LockstepError) and is_outermost and not is_typed:
        raise SystemExit(error.exit_code)


def _print_once(error: LockstepError, rank: int) -> None:
    """Print an error; one that every rank raises is printed on the first rank only."""
    if rank:
        time.sleep(EXIT_DELAY_S)
    if not rank or not error.is_shared:
        write_stderr(sentence(error))


def write_stderr(text: str) -> None:
    """Write to stderr and flush it."""
    sys.stderr.write(text)
    sys.stderr.flush()


def printable(text: str) -> str:
    r"""Return a message safe for terminals: control characters escaped, and shortened.

    >>> printable("a bell: \a")
    'a bell: \\x07'
    """
    if len(text) > MAX_MESSAGE:
        half = MAX_MESSAGE // 2
        text = f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
    return _UNPRINTABLE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    r"""Return a value for use in a message: on one line, and shortened.

    >>> shown("two\nlines"), shown(3), shown("x" * 1000, limit=11), shown(PurePath("a/b.yaml"))
    ("'two\\nlines'", '3', "'xxx...xxx'", 'a/b.yaml')
    """
    if isinstance(value, PurePath):
        return plain(str(value), limit=4 * limit)
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = limit
    try:
        text = short.repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        text = f"a {type(value).__name__} with too many digits to print"
    return printable(text.replace("\n", " "))


def plain(text: str, limit: int = MAX_SHOWN) -> str:
    r"""Return a text without quotes if it is short and printable, else as `shown` does.

    >>> plain("--gpus"), plain("two\nlines"), plain("")
    ('--gpus', "'two\\nlines'", "''")
    """
    is_plain = text.isprintable() and 0 < len(text) <= limit
    return text if is_plain else shown(text, limit)


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word closest to a mistyped one, if any is close.

    >>> closest("batch_sise", ["epochs", "batch_size"])
    'batch_size'
    """
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None
