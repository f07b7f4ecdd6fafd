"""Runs of a command, each in a folder of its own: as it was typed, or as ranks of one group.

Owns: starting the ranks, following them, starting them again after a kill, and why they failed.
Does not own: what a callback does in them (`callback.py` of each tool), or what is made of it.
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import LaunchError
from lockstep.harness.attach import KILLED, TRACE, write_settings
from lockstep.harness.command import LAUNCHER_S, POLL_S, START_S, RunningCommand
from lockstep.harness.failure import Failure
from lockstep.harness.ranks import free_port, rank_variables

OTHERS_S = 5.0
"""How long ranks may go on after one of them has failed."""


class CommandRuns:
    """Runs a command several times.

    Args:
        words: The command.
        folder: Gets a folder for each run.
        attach: Returns the variables that attach the tool's callback, given the run's folder.
        limit_s: How long a run may go without a sign of life.
        tell: Is told of each run that ended well, and its seconds.
        threads: What each of several ranks computes with; sums depend on it.
        base: The variables to start from; by default those of this process.
        work_folder: Where the command runs; by default where this process does.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        attach: Callable[[Path], Mapping[str, str]],
        *,
        limit_s: float,
        tell: Callable[[str, float], None] = lambda name, seconds: None,
        threads: int | None = None,
        base: Mapping[str, str] | None = None,
        work_folder: Path | None = None,
    ) -> None:
        self.words = list(words)
        self.folder = folder
        self.attach = attach
        self.limit_s = limit_s
        self.tell = tell
        self.base = base
        self.work_folder = work_folder
        given = int(os.environ.get("OMP_NUM_THREADS", "1"))
        self.threads = given if threads is None else threads

    def run(self, name: str, ranks: int, settings: Mapping[str, Any]) -> Path:
        """Run the command, and again after a kill; return the folder of its files.

        Args:
            name: What the run is called.
            ranks: As how many ranks it is started; 0: as it was typed.
            settings: What the callback is asked to do.

        Raises:
            LaunchError: it failed, or showed no sign of life.
        """
        folder, began = self.folder / name.replace(" ", "_"), time.monotonic()
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
        """Start the command as it was typed, or as so many ranks of one group."""
        env = dict(self.attach(folder))
        place: dict[str, Any] = {"base": self.base, "work_folder": self.work_folder}
        if not ranks:
            return [RunningCommand(self.words, env, folder / "output.txt", **place)]
        port, commands = free_port(), []
        for rank in range(ranks):
            own = rank_variables(rank, ranks, port, threads=self.threads)
            output = folder / f"output_{rank}.txt"
            commands.append(RunningCommand(self.words, env | own, output, **place))
        return commands

    def _follow(
        self, commands: Sequence[RunningCommand], folder: Path, may_be_killed: bool = False
    ) -> str:
        """Wait for the end; return how it ended, or nothing if it ended well.

        A launcher has time to notice the kill, and may start the ranks again by itself.
        """
        size, last = -1, time.monotonic()
        while True:
            codes = [command.code for command in commands]
            for command in commands:
                command.note_children()
            if all(code == 0 for code in codes):
                return ""
            if failed := [code for code in codes if code]:
                self._let_end(commands)
                return f"exit code {failed[0]}" if failed[0] > 0 else f"signal {-failed[0]}"
            traces = list((folder / TRACE).glob("rank_*.jsonl"))
            now = sum(path.stat().st_size for path in traces)
            if now != size:
                size, last = now, time.monotonic()
            limit_s = self.limit_s if traces else max(self.limit_s, START_S)
            if may_be_killed and (folder / KILLED).exists():
                limit_s = min(limit_s, LAUNCHER_S)
            if time.monotonic() - last > limit_s:
                return f"nothing for {limit_s:g} s"
            time.sleep(POLL_S)

    def _let_end(self, commands: Sequence[RunningCommand]) -> None:
        """Let the ranks that wait for a dead one say so, and not for long."""
        deadline = time.monotonic() + OTHERS_S
        while time.monotonic() < deadline and any(command.code is None for command in commands):
            time.sleep(POLL_S)

    def _failure(self, name: str, commands: Sequence[RunningCommand], ended: str) -> LaunchError:
        """Say why a run did not get to its end."""
        command = next((command for command in commands if command.code), commands[0])
        failure = Failure.read(command.text)
        advice = failure.advice or "run the command by itself"
        error = re.sub(r"^lockstep\.errors\.\w+: ", "", failure.error)
        where = f" at {failure.place}" if failure.place else ""
        return LaunchError(
            f"the command did not get through ({name}: {ended}): {error}{where}",
            f"read what it printed in {command.output}; {advice}",
        )
