"""Every error lockstep raises on purpose.

LockstepError
├── ConfigError        the request makes no sense; no weight has moved
│   └── TrainedParametersError   `requires_grad` changed after the model was replicated
├── LaunchError        the processes do not add up to one group
├── DataError          a sample, a file or a folder cannot be used
├── NonFiniteError     the loss or the gradient stopped being a number
├── CheckpointError    a saved run cannot be read back, or does not belong to this one
│   └── TakenOverError another run saves into this folder now
├── NotSavedError      the run was interrupted, and steps will be repeated
├── LeftEarlyError     the script called exit() inside a run
├── OtherRankError     another rank raised an exception that is not one of these
└── FolderInUseError   a live run already writes here

StopRequested stands apart: it is no error, and carries a stop to every rank.
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
"""Characters of a message; more of a value that somebody handed in helps nobody."""
MAX_SHOWN = 80
SPEAK_FIRST_S = 3.0
"""How long a rank waits before it ends because of an error that another rank prints: launchers
end all ranks when the first one has ended."""

PEER_GONE_TEXT = (
    "lockstep: rank {rank} lost its connection: another rank ended\n"
    "  try: read the error of that rank above or in its log; LOCKSTEP_TRACEBACK=1 shows this one\n"
)
"""In place of a traceback that says no more, and would hide the one of the rank that failed."""

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
    is_before_update = False
    """Whether a step raised it before it changed any weight."""

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
    """A live run already writes here."""


class StopRequested(BaseException):
    """Leaves an evaluation on every rank, because one of them was asked to stop.

    Derived from BaseException so that a task's `except Exception` does not swallow it.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def say_errors_in_a_sentence() -> None:
    """Have a script that lets an error of ours through say it without a traceback.

    It ends with the error's exit code, where python would say 1. A rank that fails because another
    has ended says so, in place of the traceback. Other exceptions go to whatever
    `sys.excepthook` was before; so do ours if somebody has replaced python's own.
    """
    if getattr(sys.excepthook, "func", None) is not _end:
        sys.excepthook = partial(_end, sys.excepthook)


@contextmanager
def own_exit_code() -> Iterator[None]:
    """Call `say_errors_in_a_sentence` if the block raises an error of ours."""
    try:
        yield
    except LockstepError:
        say_errors_in_a_sentence()
        raise


def sentence(error: LockstepError) -> str:
    r"""Return what is said of an error in place of a traceback: what is wrong, what to try, where.

    >>> sentence(ConfigError("batch_size is 0", "pass batch_size=1"))
    'lockstep: batch_size is 0\n  try: pass batch_size=1\n'
    """
    notes = "".join(f"  {note}\n" for note in getattr(error, "__notes__", []))
    return f"lockstep: {error}\n{notes}"


def _end(say: Any, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    runtime = sys.modules.get("lockstep.dist.environment")  # never imported: there are no ranks
    shows_traceback = runtime is not None and runtime.shows_traceback()
    is_typed = hasattr(sys, "ps1")  # somebody at a prompt wants to see where, and to go on
    # torch puts a hook before python's that writes the rank before each line of a traceback.
    is_plain = say is sys.__excepthook__ or say.__module__.startswith("torch.distributed")
    is_brief = is_plain and not (is_typed or shows_traceback)
    if isinstance(error, LockstepError) and is_brief:
        _say_once(error, runtime.launched_rank() if runtime else 0)
    elif is_peer_gone(error) and is_brief:
        rank = runtime.launched_rank() if runtime else 0
        sys.stderr.write(PEER_GONE_TEXT.format(rank=rank))
        sys.stderr.flush()
    else:
        say(kind, error, trace)
    hook: Any = sys.excepthook
    is_outermost = getattr(hook, "func", None) is _end and hook.args == (say,)
    if isinstance(error, LockstepError) and is_outermost and not is_typed:
        raise SystemExit(error.exit_code)


def _say_once(error: LockstepError, rank: int) -> None:
    """Print an error: what every rank raises, on the first rank alone."""
    if rank:
        time.sleep(SPEAK_FIRST_S)
    if not rank or not error.is_shared:
        sys.stderr.write(sentence(error))
        sys.stderr.flush()


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
