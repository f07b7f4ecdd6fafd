"""`lockstep rehearse`: a fault is named by the phase it fires in, and a clean run passes."""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.rehearse import rehearse
from lockstep.errors import ConfigError, LaunchError
from lockstep.rehearse.rehearsal import REHEARSED, Report
from lockstep.testing import free_port

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PLANTED = Path(__file__).with_name("planted.py")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of the test's own, with the commands of this installation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def see(
    capsys: pytest.CaptureFixture[str], command: str, code: int, limit_s: float = 90, *without: str
) -> dict[str, Any]:
    """Rehearse, and return the report with its phases by name."""
    ended = rehearse(shlex.split(command), limit_s, without, as_json=True)
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    said = Path(report["output"]).read_text() if report["output"] else ""
    assert ended == code, f"{report}\n{said}"
    report["phases"] = {phase["phase"]: phase for phase in report["phases"]}
    return report


# --- Planted faults ----------------------------------------------------------

# fault: (the phase it is found in, what is said of it)
FAULTS = {
    "evaluate": ("validate", "ZeroDivisionError: planted in evaluate at planted.py:17 in evaluate"),
    "a bad state": ("save", "cannot save 'task.lock'"),
    "nothing held out, a bad state": ("save", "cannot save 'task.lock'"),
    "load_state": ("resume", "KeyError: 'planted in load_state' at planted.py:28 in load_state"),
    "end": ("finish", "ValueError: planted at the end at planted.py:32 in finish_evaluation"),
    "hang": ("finish", "no progress for 10 s at planted.py:34 in finish_evaluation"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_by_the_phase_it_fires_in(
    fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    phase, said = FAULTS[fault]
    limit_s = 10 if fault == "hang" else 90
    report = see(capsys, f"python '{PLANTED}' '{fault}' run", 1, limit_s)
    assert (report["verdict"], report["failed"]) == ("failed", phase), report
    assert said in report["phases"][phase]["evidence"], report
    before = [
        p for p in REHEARSED[: REHEARSED.index(phase)] if not ("held" in fault and p == "validate")
    ]
    assert all(report["phases"][name]["verdict"] == "ok" for name in before), report
    # The steps are saved before an exception in an evaluation ends the run.
    may_follow = ("save", "kill") if fault == "evaluate" else ()
    after = [p for p in REHEARSED[REHEARSED.index(phase) + 1 :] if p not in may_follow]
    assert all(report["phases"][name]["verdict"] == "not seen" for name in after), report


def test_a_clean_run_passes_and_the_real_ones_folder_is_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = tmp_path / "run"
    for name in ("config.json", "events/rank_0.jsonl", "checkpoints/step_00000007/manifest.json"):
        (real / name).parent.mkdir(parents=True, exist_ok=True)
        (real / name).write_text("the real run's")
    report = see(capsys, f"python {PLANTED} none run", 0)
    assert report["verdict"] == "passed"
    assert list(report["phases"]) == list(REHEARSED)
    said = {name: phase["evidence"] for name, phase in report["phases"].items()}
    assert said["start"] == f"1 process in {real / 'rehearsal'}"
    assert said["validate"].startswith("at step 2: loss ")
    assert said["save"].endswith("checkpoints/step_00000002")
    assert said["kill"].startswith("SIGKILL to rank 0 ")
    assert "at step 2; the command ended with -9" in said["kill"]
    assert said["resume"].startswith("at step 2 from ")
    assert said["finish"].startswith("step 4, exit code 0, saved ")
    assert all(phase["seconds"] >= 0 for phase in report["phases"].values())
    mine = [path for path in real.rglob("*") if path.is_file() and "rehearsal" not in path.parts]
    assert len(mine) == 3
    assert {path.read_text() for path in mine} == {"the real run's"}
    assert not list(tmp_path.glob("lockstep_rehearsal_*")), "nothing else is left"


# --- Launchers ---------------------------------------------------------------


def test_a_recipe_behind_a_shell_script_and_torchrun_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train.py", "train_multi_gpu.sh"):
        shutil.copy(ROOT / "recipes" / "jit" / name, tmp_path)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("BATCH_SIZE", "8")
    assert rehearse(["./train_multi_gpu.sh", "2"], 90, [], as_json=False) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "rehearsing: ./train_multi_gpu.sh 2"
    assert [line.split()[:2] for line in said[1:-1]] == [[name, "ok"] for name in REHEARSED]
    assert said[-1].startswith("passed: every phase was seen, in ")
    assert f"2 processes in {tmp_path}/output/rehearsal" in said[1]


def test_a_launcher_that_restarts_ranks_resumes_by_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = f"lockstep launch --gpus 2 --restarts 1 {PLANTED} none run"
    report = see(capsys, command, 0)
    assert "the launcher started the ranks again" in report["phases"]["kill"]["evidence"]


def test_of_a_loop_of_ones_own_what_can_be_seen_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"python {ROOT / 'examples' / 'five_lines.py'}"
    report = see(capsys, command, 1)
    assert report["verdict"] == "incomplete"
    assert report["missing"] == ["log", "validate"]
    assert not (tmp_path / "run").exists(), "its checkpoints went elsewhere"
    assert report["phases"]["resume"]["evidence"].startswith("at step 2 from ")
    assert report["phases"]["finish"]["evidence"].startswith("step 4, exit code 0")


# --- Requests ----------------------------------------------------------------


def test_what_cannot_be_rehearsed_is_one_line_and_something_to_try(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(LaunchError, match="nosuch cannot be started: No such file"):
        rehearse(["nosuch"], 9, [], as_json=True)
    with pytest.raises(ConfigError, match="there is no command"):
        rehearse([], 9, [], as_json=True)
    with pytest.raises(ConfigError, match="there is no phase 'validat'\n  try: pass validate"):
        rehearse(["true"], 9, ["validat"], as_json=True)
    report = see(capsys, "true", 1)
    assert report["missing"] == list(REHEARSED), "it ended well, and nothing was seen"


def test_what_a_command_does_not_do_may_be_left_out() -> None:
    report = Report(["x"], without=("log", "validate"))
    for phase in report.phases:
        phase.verdict = "not seen" if phase.phase in ("log", "validate") else "ok"
    assert report.verdict == "passed"
    report["save"].verdict = "not seen"
    assert (report.verdict, report.missing) == ("incomplete", ["save"])
