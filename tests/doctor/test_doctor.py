"""The command as a user meets it: lines, JSON, exit codes, and never a traceback."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doubles import FAKE_FACTS

from lockstep.cli import doctor
from lockstep.cli.main import main
from lockstep.doctor import checks

GOOD = """
from lockstep import RunConfig, fit
from lockstep.testing import TinyTask
fit(TinyTask(), RunConfig.parse({"epochs": 3, "output_dir": "out", "batch": {"batch_size": 4}}))
raise SystemExit("went on")
"""


@pytest.mark.timeout(240)
def test_a_healthy_job_passes_and_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GOOD)
    words = ["doctor", "--json", "--", "lockstep", "launch", "--gpus", "2", "train.py"]
    ended = subprocess.run(
        [sys.executable, "-m", "lockstep.cli.main", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(ended.stdout)
    status = {check["name"]: check["status"] for check in told["checks"]}
    assert told["exit_code"] == 0
    assert len(status) == 24
    assert {n for n, s in status.items() if s == "fail"} == set()
    assert {status[n] for n in ("script", "data", "step", "memory", "room", "all-reduce")} == {"ok"}
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def say(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    def measure(*args: Any) -> dict[str, Any]:
        return {**FAKE_FACTS, "cuda": None, "num_visible": 0}

    monkeypatch.setattr(checks, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["lockstep", "doctor", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "no-such-program", "train.py"], "there is no program 'no-such-program'"),
        (["--", "lockstep", "run", "jitt"], "there is no recipe 'jitt'"),
        (["--", "torchrun", "--nproc_per_node=0", "train.py"], "is not a number of processes"),
    ],
)
def test_a_command_that_cannot_start_is_the_one_failure(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert say(monkeypatch, *words) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [n for n, line in enumerate(lines) if line.startswith("fail")]
    assert len(failed) == 1
    assert said in lines[failed[0]]
    assert lines[failed[0] + 1].strip().startswith("try: ")
    assert ", 1 failed" in lines[-1]


def test_a_machine_alone_is_examined_without_a_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(monkeypatch) == 0
    names = {line[6:].split("  ")[0] for line in capsys.readouterr().out.splitlines()[:-1]}
    assert "shared memory" in names
    assert "data" not in names


def test_help_has_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(monkeypatch, "--help") == 0
    assert "Example: lockstep doctor -- torchrun" in capsys.readouterr().out


def test_a_terminal_gets_colours_and_no_line_too_wide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.doctor.report import Result, as_lines

    results = [Result("a", "ok", "word " * 60), Result("longer name", "fail", "x", "y " * 80)]
    assert max(len(line) for _, line in as_lines(results, 80)) <= 80
    assert len(as_lines(results)) == 3
    doctor.show(results)
    assert "\x1b[" not in capsys.readouterr().out
