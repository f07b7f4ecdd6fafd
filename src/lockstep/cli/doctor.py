"""`lockstep doctor`: examine the machine, and the job about to run, and print what was found."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.doctor.checks import examine
from lockstep.doctor.report import Result, as_json, as_lines, exit_code, summary
from lockstep.errors import LaunchError
from lockstep.harness.command import ending_on_signals

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


@ending_on_signals()
def run_doctor(words: Sequence[str], as_json_text: bool, seconds: float) -> int:
    """Examine, print, and return the exit code: 1 if anything failed."""
    try:
        folder = Path.cwd()
    except OSError as error:
        raise LaunchError(
            f"this folder is gone: {error.strerror}", "change to a folder that exists"
        ) from None
    results = examine(words, dict(os.environ), folder, seconds)
    if as_json_text:
        print(as_json(results))
    else:
        show(results)
    return exit_code(results)


def show(results: Sequence[Result]) -> None:
    """Print a line per check: coloured and wrapped on a terminal, plain elsewhere."""
    if not sys.stdout.isatty():
        print("\n".join(line for _, line in as_lines(results)))
        print(summary(results))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for status, line in as_lines(results, console.width):
        text = Text(line)
        text.stylize(COLOURS[status], 0, len(line) if status == "skip" else 5)
        console.print(text, soft_wrap=True)
    console.print(summary(results))
