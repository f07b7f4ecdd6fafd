"""The command line: quick, helpful, and one clear line for whatever cannot be done."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.cli.main import app, main

VERBS = [
    str(verb.name or getattr(verb.callback, "__name__", "")) for verb in app.registered_commands
]
GROUPS = [str(group.name) for group in app.registered_groups]


def say(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run `lockstep WORDS` in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["lockstep", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def really(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_package_is_the_command() -> None:
    words = [sys.executable, "-m", "lockstep", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert "python -m lockstep" in done.stdout
    assert "Train a PyTorch model" in done.stdout


# --- Help --------------------------------------------------------------------


def test_help_starts_without_torch_in_a_moment() -> None:
    began = os.times()
    clock = time.monotonic()
    code = (
        "import sys, runpy; sys.argv = ['lockstep', '--help']\n"
        "try: runpy.run_module('lockstep.cli.main', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print('HEAVY', [m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    wall_s, ended = time.monotonic() - clock, os.times()
    cpu_s = (
        ended.children_user + ended.children_system - (began.children_user + began.children_system)
    )
    assert "HEAVY []" in done.stdout
    assert cpu_s < 1, f"{cpu_s:.2f} s of CPU, {wall_s:.2f} s on the clock"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(monkeypatch, verb, "--help") == 0
    assert f"Example: lockstep {verb} " in capsys.readouterr().out


def test_the_help_lists_every_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(monkeypatch, "--help") == 0
    listed = re.findall(r"^│ (\w+) +\w", capsys.readouterr().out, re.MULTILINE)
    assert sorted(listed) == sorted([*VERBS, *GROUPS])
    assert {"run", "launch", "plan", "rehearse", "new", "init"} <= set(listed)


def test_help_of_a_recipe_lists_its_own_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(monkeypatch, "run", "jit", "--help") == 0
    said = capsys.readouterr().out
    assert "--data_path" in said
    assert "example: lockstep run jit" in said
    assert "exit codes: 0 finished; 2" in said


@pytest.mark.parametrize("words", [(), ("run",)])
def test_no_words_show_the_help_and_are_an_error(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(monkeypatch, *words) == 2
    assert "Usage: " in capsys.readouterr().out


# --- Mistakes ----------------------------------------------------------------

MISTAKES = {
    "an unknown verb": (["plna"], "Did you mean 'plan'"),
    "an unknown flag of a verb": (["plan", "--sampels", "3"], "--samples"),
    "an unknown flag of a recipe": (
        ["run", "jit", "--batch_sise", "3"],
        "try: use --batch_size",
    ),
    "a flag before the script, misspelt": (
        ["launch", "--gpu", "2", "train.py"],
        "lockstep: launch has no option --gpu\n  try: use --gpus",
    ),
    "the same with its value": (["launch", "--gpu=2", "train.py"], "try: use --gpus"),
    "the same with one dash": (["launch", "-gpus", "2", "a.py"], "try: use --gpus"),
    "a flag before the script of a job": (
        ["submit", "--no-folow", "train.py"],
        "submit has no option --no-folow\n  try: use --no-follow",
    ),
    "a flag that is near none": (
        ["launch", "--zzz", "train.py"],
        "launch has no option --zzz\n  try: run lockstep launch --help for its options",
    ),
    "a flag before a command": (
        ["certify", "resume", "--step", "3", "--", "python", "train.py"],
        "certify resume has no option --step\n  try: use --steps",
    ),
    "a flag before a job to examine": (
        ["doctor", "--second", "3", "--", "python", "train.py"],
        "doctor has no option --second\n  try: use --seconds",
    ),
    "a value that does not fit": (["run", "jit", "--batch_size", "many"], "--batch_size"),
    "an unknown recipe": (
        ["run", "nosuch"],
        "there is no recipe 'nosuch'\n  try: use one of atlas",
    ),
    "a recipe misspelt": (["run", "jitt"], "try: use jit"),
    "no processes": (["run", "jit", "--gpus", "0"], "--gpus 0 is not a number of processes"),
    "processes in words": (["run", "jit", "--gpus", "two"], "--gpus two is not a number"),
    "a batch larger than the data": (
        ["plan", "--samples", "10", "--batch-size", "16"],
        "16 x 1 = 16 is larger than the 10 samples there are",
    ),
    "world sizes in words": (
        ["plan", "--samples", "10", "--batch-size", "2", "--gpus", "abc"],
        "--gpus abc",
    ),
    "a world size of none": (
        ["plan", "--samples", "10", "--batch-size", "2", "--gpus", "1,0"],
        "--gpus 1,0",
    ),
    "an unknown rule": (
        ["plan", "--samples", "10", "--batch-size", "2", "--lr-scaling", "cubic"],
        "lr_scaling='cubic': Input should be 'none', 'linear', 'sqrt' or 'batch'",
    ),
    "no batch": (["plan", "--samples", "10", "--batch-size", "0"], "batch_size=0"),
    "no accumulation": (
        ["plan", "--samples", "10", "--batch-size", "2", "--accumulate", "0"],
        "accumulate=0",
    ),
    "a negative rate": (
        ["plan", "--samples", "10", "--batch-size", "2", "--lr", "-1"],
        "lr=-1.0",
    ),
    "no samples": (["plan", "--samples", "0", "--batch-size", "2"], "--samples 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_with_exit_code_2_and_says_what_to_try(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, expected = MISTAKES[name]
    assert say(monkeypatch, *words) == 2
    said = capsys.readouterr()
    assert expected in said.err, said.err
    assert said.out == ""
    assert "Traceback" not in said.err


def test_a_mistake_of_a_real_command_is_two_lines_on_stderr() -> None:
    done = really("run", "nosuch")
    assert done.returncode == 2
    assert done.stdout == ""
    names = "atlas, ctclip, jit, protein, segmentation"
    assert done.stderr == f"lockstep: there is no recipe 'nosuch'\n  try: use one of {names}\n"


# --- init --------------------------------------------------------------------


def test_the_words_of_init_stand_anywhere_and_the_others_are_the_scripts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    made = tmp_path / ".vscode" / "launch.json"
    assert say(monkeypatch, "init", "vscode", "--help") == 0
    assert "Example: lockstep init" in capsys.readouterr().out
    assert not made.exists()
    for _ in range(2):
        assert say(monkeypatch, "init", "vscode", "train.py", "--force", "--epochs", "3", "-v") == 0
    assert json.loads(made.read_text())["configurations"][0]["args"] == ["--epochs", "3", "-v"]


# --- plan --------------------------------------------------------------------


def rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> list[dict[str, float]]:
    assert say(monkeypatch, "plan", *words, "--json") == 0
    read: list[dict[str, float]] = json.loads(capsys.readouterr().out)
    return read


def test_a_rate_is_shown_whole_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("--samples", "29500", "--batch-size", "4", "--lr", "1.25e-6", "--lr-scaling", "batch")
    assert say(monkeypatch, "plan", *words) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "1.953e-08" in shown


def test_the_plan_of_the_guides_is_7375_3687_1843_921(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = rows(monkeypatch, capsys, "--samples", "29500", "--batch-size", "4")
    keys = "gpus,batch_size,total_batch,effective_batch,steps_per_epoch,dropped,lr"
    assert [",".join(row) for row in plan] == [keys] * 4
    assert [row["gpus"] for row in plan] == [1, 2, 4, 8]
    assert [row["total_batch"] for row in plan] == [4, 8, 16, 32]
    assert [row["steps_per_epoch"] for row in plan] == [7375, 3687, 1843, 921]
    assert [row["dropped"] for row in plan] == [0, 4, 12, 28]
    assert [row["lr"] for row in plan] == [None] * 4


def test_accumulation_makes_the_effective_batch_larger_and_steps_fewer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--samples", "1024", "--batch-size", "4", "--gpus", "2", "--accumulate", "8")
    (row,) = rows(monkeypatch, capsys, *words)
    assert (row["total_batch"], row["effective_batch"], row["steps_per_epoch"]) == (8, 64, 16)


@pytest.mark.parametrize(
    ("rule", "rates"),
    [
        ("none", [1e-4, 1e-4]),
        ("linear", [1e-4, 4e-4]),
        ("sqrt", [1e-4, 2e-4]),
        ("batch", [1e-4 * 64 / 256, 1e-4]),
    ],
)
def test_the_plan_shows_the_rate_each_rule_gives(
    rule: str,
    rates: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--samples", "4096", "--batch-size", "64", "--gpus", "1,4", "--lr", "1e-4")
    plan = rows(monkeypatch, capsys, *words, "--lr-scaling", rule)
    assert [row["lr"] for row in plan] == pytest.approx(rates)


def test_the_table_shows_the_same_numbers_as_the_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(monkeypatch, "plan", "--samples", "29500", "--batch-size", "4") == 0
    said = capsys.readouterr().out
    assert re.findall(r"\b(7375|3687|1843|921)\b", said) == ["7375", "3687", "1843", "921"]
