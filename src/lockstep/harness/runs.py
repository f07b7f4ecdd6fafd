"""Run a command several times, each run in a separate folder: as typed, or as ranks of one group.

Owns: starting the ranks, watching them, starting them again after a kill, and reporting a failure.
Does not own: the callbacks in them (`callback.py` of each tool), or the use of their results.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import LaunchError
from lockstep.harness.attach import KILLED, TRACE, attached, write_settings
from lockstep.harness.command import LAUNCHER_S, START_S, RunningCommand, follow
from lockstep.harness.failure import CommandFailure
from lockstep.harness.ranks import free_port, given_threads, rank_variables


@dataclass
class RunsFolder:
    """A temporary folder of a tool's runs."""

    path: Path
    is_kept: bool = False


@contextmanager
def runs_folder(tool: str) -> Iterator[RunsFolder]:
    """Yield a folder that is deleted at the end, unless it is to be kept or a command failed."""
    folder = RunsFolder(Path(tempfile.mkdtemp(prefix=f"lockstep_{tool}_")))
    try:
        yield folder
    except LaunchError:
        folder.is_kept = any(folder.path.glob("*/output*.txt"))
        raise
    finally:
        if not folder.is_kept:
            shutil.rmtree(folder.path, ignore_errors=True)


class CommandRuns:
    """Runs a command several times.

    Args:
        words: The command.
        folder: Gets a folder for each run.
        callback: The tool's callback, a "module:Class".
        limit_s: The longest time without progress of a run.
        tell: Called with the name and the seconds of each run that succeeds.
        threads: The CPU threads of each of several ranks; sums depend on it.
        base: The variables to start from; by default those of this process.
        work_folder: Where the command runs; by default where this process does.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        callback: str,
        *,
        limit_s: float,
        tell: Callable[[str, float], None] = lambda name, seconds: None,
        threads: int | None = None,
        base: Mapping[str, str] | None = None,
        work_folder: Path | None = None,
    ) -> None:
        self.words = list(words)
        self.folder = folder
        self.callback = callback
        self.limit_s = limit_s
        self.tell = tell
        self.base = base
        self.work_folder = work_folder
        self.threads = (given_threads(os.environ) or 1) if threads is None else threads

    def run(self, name: str, ranks: int, settings: Mapping[str, Any]) -> Path:
        """Run the command, and again after a kill; return the folder of its files.

        Args:
            name: The name of the run.
            ranks: The number of ranks to start; 0: run the command as typed.
            settings: The settings for the callback.

        Raises:
            LaunchError: the run failed, or made no progress.
        """
        folder = self.folder / name.replace(" ", "_")
        began = time.monotonic()
        folder.mkdir()
        write_settings(folder, **settings)
        self._run(name, folder, ranks)
        self.tell(name, time.monotonic() - began)
        return folder

    def _run(self, name: str, folder: Path, ranks: int) -> None:
        commands = self.start(folder, ranks)
        try:
            ended = self._follow(commands, folder, may_be_killed=True)
            if ended and (folder / KILLED).exists():
                for command in commands:
                    command.close()
                commands = self.start(folder, ranks)
                ended = self._follow(commands, folder)
            if ended:
                raise self._failure(name, commands, ended)
        finally:
            for command in commands:
                command.close()

    def start(self, folder: Path, ranks: int) -> list[RunningCommand]:
        """Start the command as typed, or as `ranks` ranks of one group."""
        env = attached(folder, self.callback)
        place: dict[str, Any] = {"base": self.base, "work_folder": self.work_folder}
        if not ranks:
            return [RunningCommand(self.words, env, folder / "output.txt", **place)]
        port = free_port()
        commands = []
        for rank in range(ranks):
            words = [*self.words_before(rank), *self.words]
            own = self.variables(rank, ranks, port)
            output = folder / f"output_{rank}.txt"
            commands.append(RunningCommand(words, env | own, output, **place))
        return commands

    def words_before(self, rank: int) -> list[str]:
        """Return what stands before the command of one rank; a subclass may start it elsewhere."""
        return []

    def variables(self, rank: int, ranks: int, port: int) -> dict[str, str]:
        """Return the environment of one rank of a group on this machine."""
        return rank_variables(rank, ranks, port, threads=self.threads)

    def _follow(
        self, commands: Sequence[RunningCommand], folder: Path, may_be_killed: bool = False
    ) -> str:
        """Wait for the end; return how the run failed, or "" if it succeeded.

        After a kill a launcher has time to react, and may restart the ranks.
        """
        limit_s = self.limit_s

        def progress() -> tuple[int, float]:
            nonlocal limit_s
            traces = list((folder / TRACE).glob("rank_*.jsonl"))
            limit_s = self.limit_s if traces else max(self.limit_s, START_S)
            if may_be_killed and (folder / KILLED).exists():
                limit_s = min(limit_s, LAUNCHER_S)
            return sum(path.stat().st_size for path in traces), limit_s

        code = follow(commands, progress)
        if code is None:
            return f"no progress for {limit_s:g} s"
        return f"exit code {code}" if code > 0 else f"signal {-code}" if code else ""

    def _failure(self, name: str, commands: Sequence[RunningCommand], ended: str) -> LaunchError:
        """Return the error for a run that failed."""
        command = next((command for command in commands if command.code), commands[0])
        failure = CommandFailure.read(command.text)
        advice = failure.advice or "run the command by itself"
        where = f" at {failure.place}" if failure.place else ""
        return LaunchError(
            f"the command failed ({name}: {ended}): {failure.problem}{where}",
            f"read its output in {command.output}; {advice}",
        )
