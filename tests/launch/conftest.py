"""What the launch tests share: fixtures that start processes and end them with the test."""

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

# The scripts beside this file are imported by the tests and run by launchers.
sys.path.insert(0, str(Path(__file__).parent))

from processes import Fork, Ranks, Start, Started


@pytest.fixture(autouse=True)
def job_token(monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the nodes of a test a token of their own: no key file is read, and none is made."""
    token = secrets.token_hex(16)
    monkeypatch.setenv("LOCKSTEP_JOB_TOKEN", token)
    return token


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start commands; end them with the test."""
    started: list[Started] = []

    def begin(*command: str | Path, env: Mapping[str, str] | None = None) -> Started:
        one = Started(command, tmp_path / f"output_{len(started)}.txt", env or {})
        started.append(one)
        return one

    yield begin
    for one in started:
        one.end()


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Fork]:
    """Fork ranks; end them with the test."""
    forked: list[Ranks] = []

    def begin(*actions: Callable[[], Any], env: Mapping[str, str] | None = None) -> Ranks:
        output = tmp_path / f"ranks_{len(forked)}.txt"
        output.touch()
        ranks = Ranks(actions, output, env or {})
        forked.append(ranks)
        return ranks

    yield begin
    for ranks in forked:
        ranks.end()
