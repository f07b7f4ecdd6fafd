"""Starting, watching and ending real processes: scripts under launchers, and forked ranks.

Whatever a test starts is in a process group of its own, and is ended with it.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lockstep.cli.main import main
from lockstep.harness.forked import warm_up
from lockstep.testing import free_port

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
LOCKSTEP = "lockstep"
LAUNCH = (LOCKSTEP, "launch", "--gpus")
LIMIT_S = 90.0
LAUNCH_AFRESH = (
    "import sys; from lockstep.launch.local import launch; "
    "from lockstep.launch.request import LaunchRequest; "
    "sys.exit(launch(LaunchRequest(tuple(sys.argv[1:]), 2)))"
)


def wait_until(is_so: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.02)


def last_step(folder: Path, rank: int = 0) -> int:
    """Return the last step that a rank of a run wrote down, or -1."""
    path = folder / "events" / f"rank_{rank}.jsonl"
    if not path.exists():
        return -1
    steps = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return max((event["step"] for event in steps if event["event"] == "step"), default=-1)


class Forked:
    """`lockstep WORDS` in a process forked from here, where torch is imported already.

    That is most of what starting the program would take; `tests/test_docs.py` starts it.
    """

    def __init__(self, words: Sequence[str], output: Path, env: Mapping[str, str]) -> None:
        self.args = ["lockstep", *words]
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=_be_lockstep, args=(self.args, output, env))
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid
        with contextlib.suppress(OSError):  # who of the two is first, does it
            os.setpgid(self.pid, self.pid)

    def poll(self) -> int | None:
        """Return the exit code, if there is one."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.process.exitcode


def _be_lockstep(words: Sequence[str], output: Path, env: Mapping[str, str]) -> None:
    """Be as the program is when it starts: without what pytest has put up, or other tests."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    write_to(output)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    warnings.simplefilter("ignore")
    logging.getLogger().handlers.clear()
    for handler in logging.getLogger("torch").handlers:  # it keeps the stream it was made with
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    vars(forkserver._forkserver).update(vars(forkserver.ForkServer()))  # type: ignore[attr-defined]
    os.environ.update(env)
    sys.argv = list(words)
    main()


def write_to(output: Path) -> None:
    """Put a file in the place of both streams."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)


class Started:
    """A command that runs in a process group of its own, with its output in a file."""

    def __init__(self, command: Sequence[str | Path], output: Path, env: Mapping[str, str]) -> None:
        self.output = output
        # A machine's proxies or threads are no business of these tests; one thread per rank is.
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        words = [str(word) for word in command]
        self.process: Forked | subprocess.Popen[bytes]
        if words[0] == LOCKSTEP:
            output.touch()
            self.process = Forked(words[1:], output, variables)
        else:
            with output.open("wb") as file:
                self.process = subprocess.Popen(
                    words,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=variables,
                    start_new_session=True,
                )
        self.pid = self.process.pid
        self.family: set[psutil.Process] = set()

    @property
    def text(self) -> str:
        return self.output.read_text()

    def look_around(self) -> set[psutil.Process]:
        """Remember who descends from this process by now; workers leave its group."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.family |= set(psutil.Process(self.pid).children(recursive=True))
        return self.family

    def finish(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.look_around()
            pytest.fail(f"{self.process.args} ran for over {limit_s:g} s:\n{self.text}")

    def orphans(self, within_s: float = 30.0) -> list[str]:
        """Return who of the family is still alive after a while."""
        _, alive = psutil.wait_procs(self.family, timeout=within_s)
        return [" ".join(process.cmdline()) for process in alive]

    def end(self) -> None:
        """End what is left of it."""
        self.look_around()
        if self.process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.process.wait()
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class Ranks:
    """Forked processes with the launch variables of ranks; each ends with a command's exit code."""

    def __init__(
        self, actions: Sequence[Callable[[], Any]], output: Path, env: Mapping[str, str]
    ) -> None:
        self.output = output
        warm_up()
        fork = multiprocessing.get_context("fork")
        port = free_port()
        self.processes: list[BaseProcess] = []
        for rank, action in enumerate(actions):
            variables = (
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(actions)),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(len(actions)),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
                if not env
                else {name: value.replace("{rank}", str(rank)) for name, value in env.items()}
            )
            process = fork.Process(target=_be_rank, args=(action, output, variables))
            process.start()
            self.processes.append(process)

    @property
    def text(self) -> str:
        return self.output.read_text()

    def send(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def exit_code(self, rank: int, limit_s: float = 60.0) -> int:
        self.processes[rank].join(limit_s)
        code = self.processes[rank].exitcode
        if code is None:
            pytest.fail(f"rank {rank} ran for over {limit_s:g} s:\n{self.text}")
        return code

    def exit_codes(self, limit_s: float = 60.0) -> list[int]:
        return [self.exit_code(rank, limit_s) for rank in range(len(self.processes))]

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()


def _be_rank(action: Callable[[], Any], output: Path, variables: Mapping[str, str]) -> None:
    from lockstep.dist.environment import leave_process

    torch.set_num_threads(1)
    write_to(output)
    os.environ.update(variables)
    leave_process(action() or 0)


Start = Callable[..., Started]
Fork = Callable[..., Ranks]
