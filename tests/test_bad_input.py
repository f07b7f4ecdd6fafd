"""Bad input is answered in one sentence, with exit code 2, in little time and memory.

The inputs and the judge are those of `benchmarks/bad_input.py`, which hands in many more.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from lockstep import RunConfig
from lockstep.dist.detect import detect_launch
from lockstep.doctor import grace
from lockstep.doctor.findings import Findings
from lockstep.errors import ConfigError, LaunchError, LockstepError
from lockstep.launch.slurm import Job, ask, check, job_script, read_status
from lockstep_recipes.settings import read_settings

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bad_input.py"


def load() -> ModuleType:
    """Import the benchmark, which is no package."""
    spec = importlib.util.spec_from_file_location("bad_input", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bad_input"] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


bad_input = load()


@pytest.mark.parametrize(
    ("campaign", "count"),
    [
        ("--set values", 300),
        ("recipe flags", 300),
        ("environments", 800),
        ("scontrol outputs", 200),
        ("settings files", 20),
        ("JSON files", 40),
        ("command lines", 240),
    ],
)
def test_no_input_ends_in_a_traceback(campaign: str, count: int) -> None:
    found = bad_input.run_campaign(campaign, seed=1, count=count)
    assert sum(found.counts.values()) >= count * 0.9
    assert not found.failed, "\n".join(found.examples[:20])


def test_the_judge_can_fail() -> None:
    def unreadable() -> None:
        raise ConfigError("a bell\a", "x" * 20_000)

    def unsaid() -> None:
        raise ConfigError("a problem", " ")

    assert bad_input.judge(lambda: 1 / 0)[0] == "traceback"
    assert bad_input.judge(unsaid)[0] == "badly worded"
    assert bad_input.judge(unreadable)[0] == "refused", "an error cleans its own words"
    assert bad_input.judge(lambda: RunConfig.parse({"epochs": 0}))[0] == "refused"
    assert bad_input.judge(lambda: sys.exit(1))[0] == "wrong code"


# --- YAML -------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path) -> Callable[[str], dict[str, object]]:
    """Return a function that reads a settings file with a text."""

    def read(text: str) -> dict[str, object]:
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return read_settings(path)

    return read


Settings = Callable[[str], dict[str, object]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-01-01", "2024-01-01"),  # the dates of YAML 1.1, which PyYAML reads
        ("2024-13-45", "2024-13-45"),
        ("12:30:00", "12:30:00"),  # to YAML 1.1, 45,000
        ("18446744073709551615", 2**64 - 1),
        ("0x10", 16),
        ("1.5", 1.5),
        ("1e-4", "1e-4"),
        ("[1, {a: b}]", [1, {"a": "b"}]),
        ("!!str 2024", "2024"),
        ("=", "="),
        ('"\\u00e9\\n"', "\u00e9\n"),
        ("", None),
    ],
)
def test_a_plain_value_is_read(text: str, expected: object, settings: Settings) -> None:
    assert settings(f"key: {text}") == {"key": expected}


def test_anchors_and_merges_work_within_the_limits(settings: Settings) -> None:
    text = "base: &base {lr: 0.1, steps: 5}\nmine: {<<: *base, steps: 7}\nalso: *base\n"
    assert settings(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (bad_input.BOMB, "aliases expand to more than 10,000 values"),
        (bad_input.MERGE_BOMB, "aliases expand to more than 10,000 values"),
        ("a: &a [*a]", "deep"),
        ("a: " + "[" * 9000, "line 1 is not YAML that can be used: values are nested"),
        ("a: " + "9" * 5000, "a number of 5,000 characters is too long"),
        ("a: 0x" + "f" * 90, "does not fit into 64 bits"),
        ("a: !!python/object/apply:os.system [id]", "tag"),
        ("a:\n\tb: 1", "line 2"),
        ("a: 1\nb: 2\na: 3", "line 3 is not YAML that can be used: 'a' is given twice"),
        ("? [1]\n: 2", "key [1] is not text"),
        ("on: 2", "key True is not text: put it in quotes"),
        ('a: "\\0"', r"'\x00'"),
        ('a: "\\UFFFFFFFF"', "cannot be converted"),
        ("- 1", "holds a value of type list instead of `key: value` pairs"),
        ("_base_: ${NOT_SET:3}", "_base_ is not a file name: 3"),
        ("a: '${NOT_SET:b: c: d}'", "becomes 'b: c: d', which cannot be used"),
    ],
)
def test_a_settings_file_is_refused_in_a_sentence(text: str, said: str, settings: Settings) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(text)
    assert said in caught.value.problem
    assert not bad_input.fault_in(caught.value)


def test_a_chain_of_bases_has_an_end(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.yaml").write_text(f"_base_: {number + 1}.yaml\nkey: {number}\n")
    (tmp_path / "38.yaml").write_text("other: 1\n")
    with pytest.raises(ConfigError, match="more than 20 files"):
        read_settings(tmp_path / "0.yaml")
    assert read_settings(tmp_path / "30.yaml") == {"key": 30, "other": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epochs=" + "9" * 5000, "too long"),
        ("epochs=[1", "cannot be used"),
        ("epochs", "does not set anything"),
        ("=3", "does not name a setting"),
        ("batch..batch_size=3", "does not name a setting"),
        ("epochs.number=3", "epochs in --set 'epochs.number=3' is a value, not a section"),
        ("checkpoint=3", "checkpoint=3"),
        ("max_grad_norm=.nan", "max_grad_norm=nan"),
        ("seed=0x" + "f" * 20, "64 bits"),
    ],
)
def test_a_bad_override_is_refused_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig().with_overrides([text])
    assert said in caught.value.problem
    assert not bad_input.fault_in(caught.value)


def test_a_date_that_is_set_stays_text() -> None:
    assert RunConfig().with_overrides(["output_dir=2024-01-01"]).output_dir == "2024-01-01"


# --- The environment ----------------------------------------------------------------

SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "7",
}


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"RANK": "9" * 5000, "WORLD_SIZE": "2"}, "RANK='9999"),
        ({"RANK": "\u0663", "WORLD_SIZE": "4"}, "is not a number of processes"),
        ({"RANK": "0", "WORLD_SIZE": "99999999999"}, "WORLD_SIZE='99999999999'"),
        ({**SRUN, "MASTER_PORT": "9" * 5000}, "is not a port"),
        ({**SRUN, "MASTER_ADDR": "a b\x1b[2J"}, r"'a b\x1b[2J' is not the name or address"),
    ],
)
def test_launch_variables_are_refused_in_a_sentence(env: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        detect_launch(env)
    assert said in caught.value.problem
    assert not bad_input.fault_in(caught.value)


@pytest.mark.parametrize("tasks", ["2(x999999999999)", "2(x" + "9" * 5000 + ")", "2(x2", ""])
def test_tasks_per_node_that_cannot_be_counted_take_no_memory(tasks: str) -> None:
    env = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": "1"}
    assert detect_launch(env).local_size == 4, "not known: as many as there are in all"


def test_a_job_id_that_is_not_utf_8_still_gives_a_port() -> None:
    env = {**SRUN, "SLURM_JOB_ID": "\udcff"}
    assert detect_launch(env).port == detect_launch(dict(env)).port


# --- What SLURM prints ----------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        "",
        "JobId=7 JobSt",
        "JobId=7 JobState=RUNN",
        "JobState=",
        "\ufffd\ufffd=\x00",
        "slurm_load_jobs error: Unable to contact slurm controller",
    ],
)
def test_a_state_that_cannot_be_read_is_not_known(said: str) -> None:
    assert read_status(said) is None


@pytest.mark.parametrize(
    ("code", "expected"),
    [("2:0", 2), ("0:9", 137), ("x:y", 1), ("0:" + "9" * 5000, 1), ("", 1), ("999:0", 1)],
)
def test_an_exit_code_that_cannot_be_read_is_a_failure(code: str, expected: int) -> None:
    status = read_status(f"JobId=7 JobState=FAILED ExitCode={code} NodeList=n1")
    assert status is not None
    assert status.exit_code == expected


def test_scontrol_may_print_bytes_of_any_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nprintf 'JobId=7 JobState=RUNNING Reason=\\377\\376\\000'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    status = ask("7")
    assert status is not None
    assert status.state == "RUNNING"
    assert grace.ask(["scontrol", "show", "config"]).startswith("JobId=7")


@pytest.mark.parametrize(
    ("script", "config", "said"),
    [
        ("#SBATCH --signal=TERM@soon", "", "--signal=TERM@soon is not a signal and a time"),
        ("#SBATCH --time=soon", "KillWait = 45 sec", "time limit not known, 45 s to save"),
        ("#SBATCH --time='1:00:00", "KillWait = many", "30 s to save"),
        ("#SBATCH -t 1-0", "KillWait = " + "9" * 5000, "the cluster's is not known"),
    ],
)
def test_the_grace_time_of_an_odd_script_is_a_verdict(script: str, config: str, said: str) -> None:
    def answer(words: list[str]) -> str:
        return config if words[1] == "show" else f"#!/bin/sh\n{script}\nsrun python t.py\n"

    found = Findings(step_s=1.0, save_s=2.0)
    result = grace.grace_time(None, found, {"SLURM_JOB_ID": "7"}, answer)
    assert said in result.evidence


# --- The batch script -------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Work in a folder that holds a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import sys\nprint(repr(sys.argv[1:]))\n")
    return "train.py"


@pytest.mark.parametrize("text", ["a\n#SBATCH --uid=0", "a\rb", "a\x1b[2J", "\udcff", "a\u2028b"])
@pytest.mark.parametrize("flag", ["partition", "account", "folder", "name", "array"])
def test_a_value_that_would_leave_its_line_of_the_script_is_refused(
    flag: str, text: str, script: str
) -> None:
    with pytest.raises(LockstepError) as caught:
        check(Job((script,), **{flag: text}))  # type: ignore[arg-type]
    assert caught.value.problem.startswith(f"--{flag} ")
    assert caught.value.exit_code == 2
    assert not bad_input.fault_in(caught.value)


def test_so_are_lines_of_setup_times_and_other_options(script: str) -> None:
    for job, flag in (
        (Job((script,), setup=("module load cuda\nrm x",)), "--setup"),
        (Job((script,), time="1:00\n2"), "--time"),
        (Job((script,), options={"qos": "high\n#SBATCH --uid=0"}), "--sbatch qos"),
    ):
        with pytest.raises(LockstepError, match=f"^{flag} "):
            check(job)


@pytest.mark.parametrize("word", ["two\nlines", "a'b\x1b", "\udcff.csv", "caf\u00e9 $HOME", "%a\n"])
def test_an_argument_of_the_script_arrives_whatever_it_holds(word: str, script: str) -> None:
    text = job_script(Job((script, word)), sys.executable)
    line = next(line for line in text.split("\n") if line.startswith("command=("))
    assert line.isprintable()
    ended = subprocess.run(
        ["bash", "-c", f'{line}\nexec "${{command[0]}}" "${{command[@]:3}}"'],
        capture_output=True,
        check=False,
    )
    assert ended.stdout.decode().strip() == repr([word])


def test_lockstep_init_refuses_a_script_that_would_leave_its_line(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.cli.main import main

    monkeypatch.setattr(sys, "argv", ["lockstep", "init", "slurm", "a\n#SBATCH --uid=0.py"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert r"'a\n#SBATCH --uid=0.py' contains a control character" in capsys.readouterr().err
    assert not Path("scripts").exists()


# --- Real commands ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["ctclip --config: alias bomb", "ctclip --config: endless", "launch --gpus 99999999999"]
)
def test_a_real_command_says_it_and_ends(name: str, tmp_path: Path) -> None:
    words, more = bad_input.real_commands(tmp_path)[name]
    code, said, seconds, most_bytes = bad_input._run(words, {**os.environ, **more}, tmp_path)
    assert code == 2, said
    assert "Traceback" not in said
    assert "\n  try: " in said
    assert most_bytes < bad_input.LIMIT_BYTES
    assert seconds < 60
