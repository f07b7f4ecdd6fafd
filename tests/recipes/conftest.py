"""What all recipes' tests share: a context, a batch, commands run on forked ranks.

A command ends with its exit codes and what it printed.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# The files beside this one are imported by the tests.
sys.path.insert(0, str(Path(__file__).parent))

from lockstep.harness.forked import warm_up
from lockstep.task import Context, Task
from lockstep.testing import FakeWorld, free_port
from lockstep_recipes.command import train


@dataclass
class Ended:
    codes: list[int]
    out: str
    err: str

    @property
    def code(self) -> int:
        assert len(set(self.codes)) == 1, f"ranks disagree: {self.codes}\n{self.err}"
        return self.codes[0]


Command = Callable[..., Ended]


@pytest.fixture
def context() -> Context:
    return Context(FakeWorld(), seed=0, step=0, place=0)


@pytest.fixture
def read_batch() -> Callable[..., dict[str, Any]]:
    """Return a function that collates the first training samples of a task."""

    def read(task: Task, num: int = 4) -> dict[str, Any]:
        data = task.train_data()
        batch: dict[str, Any] = task.collate([data[index % len(data)] for index in range(num)])
        return batch

    return read


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Return a function that runs `lockstep run RECIPE ARGV` on N ranks and waits for it."""

    def run(build: Callable[..., object], argv: Sequence[str], ranks: int = 1, **env: str) -> Ended:
        warm_up()
        port = free_port()
        children = []
        for rank in range(ranks):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | env
            child = os.fork()
            if child == 0:
                _become(tmp_path, variables if ranks > 1 else env)
                train(build, list(argv))  # type: ignore[arg-type]  # ends the process
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        ended = Ended(codes, (tmp_path / "out").read_text(), (tmp_path / "err").read_text())
        (tmp_path / "out").unlink()
        (tmp_path / "err").unlink()
        return ended

    return run


def _become(folder: Path, env: dict[str, str]) -> None:
    os.environ.update(env)
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
