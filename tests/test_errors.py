"""Errors raised on purpose: a script that lets one through ends with the code it stands for."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
from lockstep import PartialLoss, RunConfig, fit
from lockstep.testing import TinyTask

class Broken(TinyTask):
    def loss(self, model, batch, context):
        part = super().loss(model, batch, context)
        return PartialLoss(part.loss_sum * float("nan"), part.weight)

try:
    fit(TinyTask(), RunConfig(output_dir="refused", epochs=1, batch={"batch_size": 1000}))
except Exception as refused:
    print(type(refused).__name__)
raise SystemExit(fit(Broken(), RunConfig(output_dir="broken", epochs=1)).exit_code)
"""


@pytest.mark.parametrize(
    ("code", "said", "env"),
    [
        (3, "weights unchanged, step not saved", {}),
        (2, "need MASTER_ADDR and MASTER_PORT", {"RANK": "0", "WORLD_SIZE": "2"}),
    ],
)
def test_a_script_without_a_launcher_ends_with_the_errors_own_code(
    code: int, said: str, env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert ended.stdout.startswith("LaunchError" if env else "ConfigError"), "and was caught"
    assert "Traceback" not in ended.stderr
    first, *others = ended.stderr.splitlines()
    assert first.startswith("lockstep: ")
    assert said in first
    assert others[0].startswith("  try: ")
    assert not env or len(others) == 1, "it has not come as far as a step that could be named"


Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_script(tmp_path: Path, warm_programs: Path) -> Script:
    """Run a script, with words before its name, by a Python that has imported torch already."""

    def run(code: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(code)
        python = str(warm_programs / "python")
        ended = subprocess.run(
            [python, *words, "train.py"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python, **env},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        ended.stderr = TRITON_REPORT.sub("", ended.stderr)
        return ended

    return run


TRITON_REPORT = re.compile(r"nanobind: leaked .*?/refleaks\.html\n?", re.DOTALL)
"""What triton prints when a process ends that has imported it, as torch 2.15 with CUDA does."""
REFUSED = """
from lockstep import RunConfig, fit
from lockstep.testing import TinyTask

fit(TinyTask(), RunConfig(output_dir="run", epochs=1, batch={"batch_size": 1000}))
"""
MISTYPED = """
from lockstep import RunConfig

RunConfig.parse({"epochs": "three"})
"""
FIVE_LINES = """
from lockstep import World
from lockstep.errors import DataError

world = World.enter()
raise DataError("sample 3 cannot be read", "remove it")
"""
LEAVING = """
import sys
from lockstep import RunConfig, fit
from lockstep.testing import TinyTask

class Leaving(TinyTask):
    def loss(self, model, batch, context):
        if context.training and context.step == 3:
            LEAVE
        return super().loss(model, batch, context)

checkpoint = {"every_steps": 2, "background": False}
config = RunConfig(output_dir="run", max_steps=6, device="cpu", checkpoint=checkpoint,
                   batch={"batch_size": 4}, sinks={"curves": False})
fit(Leaving(num_samples=64), config)
"""
REPEATED = "the steps since checkpoint step 2 will be repeated (the run was at 3)\n  try: "
TORCHRUN_TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
LAUNCH_TWO = ["-m", "lockstep.cli.entry", "launch", "--gpus", "2"]
SENTENCE = r"lockstep: [^\n]+\n  try: [^\n]+\n(  on rank 0, [^\n]+\n)?"


@pytest.mark.parametrize("code", [REFUSED, MISTYPED, FIVE_LINES])
def test_a_script_that_lets_an_error_through_says_one_sentence(
    code: str, run_script: Script
) -> None:
    ended = run_script(code)
    assert ended.returncode == 2, ended.stderr
    assert re.fullmatch(SENTENCE, ended.stderr), ended.stderr


def test_the_traceback_is_shown_to_whoever_asks_for_it(run_script: Script) -> None:
    ended = run_script(REFUSED, LOCKSTEP_TRACEBACK="1")
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("Traceback (most recent call last):\n")
    assert 'train.py", line 5, in <module>' in ended.stderr


def test_a_hook_that_somebody_installed_still_gets_the_error(run_script: Script) -> None:
    hook = "import sys\nsys.excepthook = lambda kind, *_: print('hook:', kind.__name__)\n"
    ended = run_script(hook + REFUSED)
    assert (ended.returncode, ended.stderr) == (2, "")
    assert ended.stdout.endswith("hook: ConfigError\n")


def test_other_exceptions_keep_their_traceback(run_script: Script) -> None:
    ended = run_script(FIVE_LINES.replace("DataError(", "ValueError("))
    assert ended.returncode == 1
    assert ended.stderr.startswith("Traceback (most recent call last):\n")
    assert ended.stderr.endswith("ValueError: ('sample 3 cannot be read', 'remove it')\n")


def test_ranks_that_a_foreign_launcher_started_say_a_shared_error_once(run_script: Script) -> None:
    ended = run_script(REFUSED, *TORCHRUN_TWO)
    said = ended.stderr + ended.stdout
    assert said.count("is larger than the") == 1, said
    assert 'train.py", line' not in said, "the traceback of a rank"
    assert "exitcode  : 2 " in said, said


@pytest.mark.parametrize("launcher", [["-m", "lockstep.launch.worker"], LAUNCH_TWO])
def test_a_rank_of_our_own_launchers_says_one_sentence_and_ends_in_good_order(
    launcher: list[str], tmp_path: Path, run_script: Script
) -> None:
    at_exit = "import atexit\natexit.register(open, 'at_exit', 'w')\n"
    ended = run_script(at_exit + FIVE_LINES, *launcher)
    assert ended.returncode == 2, ended.stderr
    assert re.fullmatch(SENTENCE, ended.stderr), ended.stderr
    assert (tmp_path / "at_exit").exists(), "what was registered with atexit did not run"


@pytest.mark.parametrize(
    ("leave", "code", "said"),
    [
        ("sys.exit()", 6, "called exit() inside a run that had not finished; " + REPEATED),
        ("sys.exit(0)", 6, "called exit() inside a run that had not finished; " + REPEATED),
        ("sys.exit(9)", 9, ""),
        ("raise KeyboardInterrupt", 5, "KeyboardInterrupt without saving: " + REPEATED),
    ],
)
def test_a_run_that_is_left_in_a_step_does_not_look_finished_or_saved(
    leave: str, code: int, said: str, run_script: Script
) -> None:
    ended = run_script(LEAVING.replace("LEAVE", leave))
    assert ended.returncode == code, ended.stderr
    assert said in ended.stderr
    assert re.fullmatch(SENTENCE if said else "", ended.stderr), ended.stderr


@pytest.mark.parametrize("leave", ["sys.exit()", "raise KeyboardInterrupt"])
def test_ranks_under_torchrun_that_all_leave_say_it_once(leave: str, run_script: Script) -> None:
    ended = run_script(LEAVING.replace("LEAVE", leave), *TORCHRUN_TWO)
    code = 6 if "exit" in leave else 5
    assert f"exitcode  : {code} " in ended.stderr, ended.stderr
    assert ended.stderr.count(REPEATED) == 1, ended.stderr
    assert 'train.py", line' not in ended.stderr, "the traceback of a rank"


READ = """
from lockstep import RunConfig, fit
from lockstep.testing import TinyTask

class Samples(list):
    def __getitem__(self, index):
        if INTERRUPTED in self.read:
            raise KeyboardInterrupt
        self.read.append(len(self.read))
        return super().__getitem__(index)

class Reading(TinyTask):
    def train_data(self):
        samples = Samples(super().train_data())
        samples.read = []
        return samples

checkpoint = {"every_steps": 10, "background": False}
config = RunConfig(output_dir="run", epochs=9, device="cpu", checkpoint=checkpoint,
                   batch={"batch_size": 4}, sinks={"curves": False}, log_every=1000)
result = fit(Reading(num_samples=64), config)
print(result.step, [path.name for path in sorted((result.folder / "checkpoints").iterdir())])
raise SystemExit(result.exit_code)
"""


def test_a_keyboard_interrupt_between_steps_saves_first(run_script: Script) -> None:
    ended = run_script(READ.replace("INTERRUPTED", "200"))
    assert ended.returncode == 130, ended.stderr
    step, _, saved = ended.stdout.splitlines()[-1].partition(" ")
    assert int(step) % 10, "a step that would be saved anyway"
    assert f"step_{int(step):08}" in saved
    assert ended.stderr == ""


TYPED = """
from lockstep.errors import ConfigError, own_exit_code
with own_exit_code():
    raise ConfigError("mistyped", "again")

print("still here")
"""


def test_somebody_who_types_is_not_thrown_out() -> None:
    command = [sys.executable, "-i"]
    ended = subprocess.run(command, input=TYPED, capture_output=True, text=True, check=False)
    assert "ConfigError: mistyped" in ended.stderr
    assert (ended.stdout, ended.returncode) == ("still here\n", 0)
