"""What the commands of all recipes share: strict flags, errors without tracebacks, exit codes.

Owns: the way from `sys.argv` to an exit code. Does not own: any flag; each
recipe's `flags.py` lists its own.
"""

import argparse
import io
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from lockstep.config import RunConfig
from lockstep.errors import ConfigError, LockstepError, closest
from lockstep.runtime import launched_rank, leave_process
from lockstep.task import Task
from lockstep.trainer import RunResult, fit

Build = Callable[[Sequence[str]], tuple[Task, RunConfig]]

EXIT_CODES = """exit codes: 0 finished; 2 the request or the data cannot work (what was trained
is saved); 3 the loss is no longer a number; 130, 143, 138, 129 saved and left after Ctrl-C,
SIGTERM, SIGUSR1, SIGHUP"""


SPEAK_FIRST_S = 3.0
"""What all ranks share, the first says, and its launcher then ends the others; what only another
rank meets (no GPU for it, say), that one says, should it live so long."""


class Flags(argparse.ArgumentParser):
    """Flags that refuse what they do not know and suggest what was meant.

    `--batch-size` and `--batch_size` are the same flag, for every flag.
    """

    def __init__(self, recipe: str, description: str, example: str) -> None:
        super().__init__(
            prog=f"lockstep run {recipe}",
            description=description,
            epilog=f"example: {example}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse `argv`.

        Raises:
            ConfigError: for an unknown flag or a value that does not fit.
        """
        known, unknown = self.parse_known_args([_underscored(word) for word in argv])
        if unknown:
            flag = unknown[0].split("=")[0]
            near = closest(flag, self._option_string_actions)
            raise ConfigError(f"unknown argument {flag}", near or "--help for the list")
        return known

    def error(self, message: str) -> NoReturn:
        """Say it as every other error is said."""
        raise ConfigError(message, "--help for the list of flags and their values")


def _underscored(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def train(build: Build, argv: Sequence[str]) -> NoReturn:
    """Build a task and a config from `argv`, train, and end the process with the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may not know every letter
    try:
        code = _say(fit(*build(argv)))
    except LockstepError as error:
        code = error.exit_code
        if launched_rank() != 0:
            time.sleep(SPEAK_FIRST_S)
        if launched_rank() == 0 or not error.is_shared:
            print(f"lockstep: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as finished:  # --help
        code = int(finished.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    leave_process(code)


def _say(result: RunResult) -> int:
    """Say what was made and where, once."""
    if launched_rank() == 0:
        made = {
            "curves": result.folder / "curves.png",
            "samples": max((result.folder / "samples").glob("*.png"), default=None),
            "checkpoint": max((result.folder / "checkpoints").glob("step_*"), default=None),
            "events": result.folder / "events",
        }
        lines = [f"  {name:<11}{path}" for name, path in made.items() if path and path.exists()]
        print("\n".join([f"made in {result.folder}:", *lines]), flush=True)
    return result.exit_code
