"""What several verbs have in common: a command after them, and options in seconds.

Owns: that the command is taken as it was typed, flags and all, and that a time is a time. Does
not own: any verb.
"""

from typing import Annotated

import typer

from lockstep.detect import MAX_TIMEOUT_S
from lockstep.errors import ConfigError

AS_TYPED = {"allow_interspersed_args": False, "ignore_unknown_options": True}
Words = Annotated[list[str], typer.Argument(metavar="-- COMMAND ...", help="as you would type it")]


def check_seconds(option: typer.CallbackParam, value: float) -> float:
    """Refuse an option in seconds that is no time one could wait: negative, NaN, infinite."""
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
