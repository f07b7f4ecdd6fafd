"""Arguments that several commands share: the user's command line, seconds, numbers of GPUs.

Owns: passing the user's command on as typed, and refusing mistyped options and impossible numbers.
Does not own: any command of `lockstep`.
"""

import os
from typing import Annotated, TypeVar

import typer

from lockstep.dist.detect import MAX_TIMEOUT_S
from lockstep.errors import ConfigError, closest, plain
from lockstep.text_input import whole_number

AS_TYPED = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""With these settings typer takes an unknown option as the first word: see `check_words`."""
MAX_PROCESSES = 1024
"""Per machine: starting more would exhaust it."""
Typed = TypeVar("Typed", bound=list[str] | None)


def check_words(context: typer.Context, words: Typed) -> Typed:
    """Refuse a command that begins with an option: a mistyped option of lockstep's own."""
    first = words[0].partition("=")[0] if words is not None and words else ""
    if not first.startswith("-") or first == "-m" or os.path.exists(first):
        return words
    verb = context.command_path.removeprefix(f"{context.find_root().command_path} ")
    options = {"--help"}
    for parameter in context.command.params:
        options |= {*parameter.opts, *parameter.secondary_opts}
    known = sorted(name for name in options if name.startswith("--"))
    near = closest(f"--{first.lstrip('-')}", known)
    raise ConfigError(
        f"{verb} has no option {plain(first)}",
        f"use {near}" if near else f"run lockstep {verb} --help for its options",
    )


Words = Annotated[
    list[str],
    typer.Argument(
        callback=check_words, metavar="-- COMMAND ...", help="the command, as you would type it"
    ),
]
ScriptWords = Annotated[
    list[str],
    typer.Argument(
        callback=check_words, metavar="SCRIPT ...", help="a script, or -m MODULE, and its flags"
    ),
]


def check_seconds(option: typer.CallbackParam, value: float) -> float:
    """Refuse a time that is negative, NaN, infinite or too long to wait for."""
    if not 0 < value <= MAX_TIMEOUT_S:
        raise ConfigError(
            f"{option.opts[0]} {value} is not a time between 0 and {MAX_TIMEOUT_S:,.0f} seconds",
            f"pass {option.opts[0]} in seconds: 120",
        )
    return value


Limit = Annotated[
    float,
    typer.Option(
        callback=check_seconds,
        help="treat the command as hung after this many seconds without progress",
    ),
]


def read_counts(gpus: str, most: int = MAX_PROCESSES) -> list[int]:
    """Return the numbers of processes in `--gpus 1,2,4`.

    >>> read_counts("4,1,2")
    [4, 1, 2]
    """
    counts = [whole_number(word.strip(), most) or 0 for word in gpus.split(",")]
    if 0 in counts:
        raise ConfigError(
            f"--gpus {plain(gpus)} is not a list of numbers from 1 to {most:,}",
            "pass --gpus 1,2,4",
        )
    return counts
