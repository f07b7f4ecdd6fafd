"""`lockstep new`: a project that trains at once, on one process and on two, and goes on."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import read_events
from lockstep.cli.new import new
from lockstep.errors import ConfigError

BIN = Path(sys.executable).parent

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said = new("circles", force=False)
    assert said == [
        "wrote circles/train.py",
        "wrote circles/README.md",
        "  use: python circles/train.py",
        "  use: lockstep launch --gpus 2 circles/train.py",
    ]
    return tmp_path


def run(command: str) -> str:
    ended = subprocess.run(command.split(), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_it_trains_alone_and_learns(project: Path) -> None:
    out = run("python circles/train.py --epochs 3 --batch 128 --output run")
    assert "lockstep: circles on 1 x " in out
    measured = [e["metrics"] for e in read_events(project / "run") if e["event"] == "evaluation"]
    assert measured[-1]["accuracy"] > 0.9


def test_killed_on_two_processes_it_goes_on(project: Path) -> None:
    command = "lockstep launch --gpus 2 circles/train.py --epochs 8 --output run"
    first = subprocess.Popen(command.split(), stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    while "checkpoint at step 32 " not in first.stdout.readline():
        assert first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    out = run(command)
    resumed = re.search(r"resumed at step (\d+)", out)
    assert resumed, out
    assert int(resumed[1]) >= 32, "the line was true"
    epochs = [event for event in read_events(project / "run") if event["event"] == "epoch"]
    assert [event["epoch"] for event in epochs] == list(range(1, 9))
    assert all(event["each_once"] for event in epochs)


def test_it_is_short_and_a_project_that_is_there_is_left_alone(project: Path) -> None:
    assert len((project / "circles" / "train.py").read_text().splitlines()) < 70
    assert len((project / "circles" / "README.md").read_text().splitlines()) <= 12
    (project / "circles" / "train.py").write_text("mine")
    with pytest.raises(ConfigError, match="exist already\n  try: pass --force"):
        new("circles", force=False)
    assert (project / "circles" / "train.py").read_text() == "mine"
    with pytest.raises(ConfigError, match="is not a valid project name"):
        new("a b", force=False)
