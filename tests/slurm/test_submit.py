"""The batch script, and what is asked wrongly: others stand in for SLURM's commands."""

import os
import signal
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.errors import LaunchError
from lockstep.launch.slurm import Job, Status, check, job_script, read_status, seconds_of
from lockstep.launch.worker import FIRST_FAILURE
from lockstep.launch.worker import __name__ as WORKER

BIN = Path(sys.executable).parent

SCRIPT = """
import sys
if not sys.argv[1].isdecimal():
    raise ZeroDivisionError(sys.argv[1])
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder that holds a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def say(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run `lockstep submit WORDS` here and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["lockstep", "submit", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


# --- The script ------------------------------------------------------------------

HEADER = """\
#!/usr/bin/env bash
# Written by `lockstep submit`. You may edit it, and submit it with sbatch.
#SBATCH --job-name=train
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8      # one task per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=12:00:00
#SBATCH --signal=USR1@120        # tell ranks to save this many seconds before the limit
#SBATCH --output=lockstep_jobs/train_%j.log
#SBATCH --open-mode=append       # keep one log when the job is requeued
#SBATCH --requeue
#SBATCH --qos=high
#SBATCH --exclusive

restarts=2 # maximum number after failures, in this allocation
requeues=100 # maximum number of returns to the queue
warn=120 # ranks are told to save this many seconds before the time limit
crash_loop=3 # give up after so many times the same error at the same step
record=lockstep_jobs/train
srun_options=(--cpus-per-task=12)
module load cuda
command=(python3 -m lockstep.launch.worker train.py --name 'two words' '$HOME')
"""


def test_the_script_says_what_was_asked_for() -> None:
    job = Job(
        ("train.py", "--name", "two words", "$HOME"),
        num_nodes=2,
        gpus_per_node=8,
        processes_per_node=8,
        cpus_per_process=12,
        partition="gpu",
        account="lab",
        time="12:00:00",
        setup=("module load cuda",),
        options={"qos": "high", "exclusive": ""},
    )
    header, rest = job_script(job, "python3").split("\nexport PYTHON", 1)
    assert header.strip() == HEADER.strip()
    assert "srun --kill-on-bad-exit=1" in rest


def test_without_gpus_none_are_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--nodes", "2", "--cpus-only", "--processes-per-node", "3", "--dry-run")
    assert say(monkeypatch, *flags, "-m", "mine.train", "--epochs", "3") == 0
    said = capsys.readouterr().out
    assert "gpus" not in said.split("export PYTHON")[0]
    assert "--ntasks-per-node=3" in said
    assert f"command=({sys.executable} -m {WORKER} -m mine.train --epochs 3)" in said
    assert "#SBATCH --job-name=mine.train" in said
    assert [path.name for path in folder.iterdir()] == ["train.py"], "a dry run leaves nothing"


# --- The script, run -------------------------------------------------------------


class Batch:
    """The script, run by bash, with commands in place of SLURM's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stand_in("srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
        self.stand_in("scontrol", 'echo "$*" >>asked; [[ $1 != show ]] || echo "$PREEMPT"')
        self.stand_in("sleep", "exit 0")
        (folder / "lockstep_jobs").mkdir()

    def stand_in(self, name: str, script: str) -> None:
        path = self.folder / "stand_ins" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def run(self, *words: str, restarts: int = 0, requeues: int = 3, **env: str) -> int:
        job = Job(("train.py", *words), restarts=restarts, requeues=requeues)
        script = self.folder / "job.sh"
        script.write_text(job_script(job, sys.executable))
        path = f"{self.folder / 'stand_ins'}:{os.environ['PATH']}"
        variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "PATH": path, **env}
        ended = subprocess.run(
            ["bash", str(script)],
            cwd=self.folder,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        self.said = ended.stdout + ended.stderr
        return ended.returncode

    @property
    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def errors(self) -> list[str]:
        return (self.folder / "lockstep_jobs" / "train_7.errors").read_text().splitlines()


@pytest.fixture
def batch(folder: Path) -> Batch:
    return Batch(folder)


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5, 6, 129, 130, 131])
def test_what_finished_or_cannot_work_is_neither_tried_nor_queued_again(
    code: int, batch: Batch
) -> None:
    assert batch.run(str(code), restarts=2) == code
    assert "restarting" not in batch.said
    assert batch.asked == []


def test_a_failure_is_tried_as_often_as_was_asked(batch: Batch) -> None:
    assert batch.run("1", restarts=2) == 1
    assert batch.said.count("restarting all ranks") == 2
    assert "a rank ended with exit code 1; restarting all ranks (try 3 of 3)" in batch.said


def test_ranks_can_tell_that_they_are_started_again(batch: Batch) -> None:
    told = 'echo "start $LOCKSTEP_RESTART_COUNT"'
    batch.stand_in("srun", f"[[ $1 != --kill* ]] || {{ {told}; exit 1; }}")
    batch.run("1", restarts=1)
    starts = [line for line in batch.said.splitlines() if line.startswith("start ")]
    assert starts == ["start 0", "start 1"]


# srun reports the highest exit code. After the rank of the script there is another.
SEVERAL = 'while [[ $1 == --* ]]; do shift; done; "$@"; "${@:1:4}" bash -c "exit %d"; exit 255'


def test_the_first_rank_to_fail_gives_the_exit_code(batch: Batch) -> None:
    batch.stand_in("srun", SEVERAL % 143)
    assert batch.run("2") == 2
    assert not list(batch.folder.glob("lockstep_jobs/*"))


def test_a_rank_that_ends_without_a_word_gives_the_exit_code_too(batch: Batch) -> None:
    batch.stand_in("srun", SEVERAL.replace('"$@"; ', "", 1) % 3)
    assert batch.run("2") == 3


def test_a_rank_that_was_killed_is_the_cause_whoever_was_first(batch: Batch) -> None:
    batch.stand_in("srun", SEVERAL % 137)
    assert batch.run("the connection is gone") == 137
    assert not list(batch.folder.glob("lockstep_jobs/*")), "which is no error to be counted"


def test_the_error_of_the_first_rank_is_shown_and_the_others_a_line(batch: Batch) -> None:
    batch.stand_in("srun", 'while [[ $1 == --* ]]; do shift; done; "$@"; "$@"')
    assert batch.run("the bug") == 1
    assert batch.said.count("Traceback (most recent call last):") == 1
    assert "worker.py" not in batch.said, "the author of a script knows its own frames"
    last = "ZeroDivisionError: the bug"
    assert f"\n{last}\n{last} (another rank had failed before)\n" in batch.said


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; sys.exit(2)", "2"),
        ("import sys; sys.exit('no')", "1"),
        ("raise ValueError('no')", "1\nValueError: no"),
        ("import lockstep.errors as e; raise e.DataError('no', 'a')", "2\nDataError: no try: a"),
        ("import os; os.fork() or os._exit(5); os.wait()", ""),
    ],
)
def test_a_rank_tells_its_end_before_the_others_can_notice_it(
    script: str, said: str, folder: Path
) -> None:
    (folder / "train.py").write_text(script)
    env = {**os.environ, FIRST_FAILURE: str(folder / "first")}
    one = subprocess.run([sys.executable, "-m", WORKER, "train.py"], env=env, check=False)
    assert one.returncode == int(said[:1] or 0)
    first_told = folder / "first"
    assert (first_told.read_text() if first_told.exists() else "").strip() == said
    first_told.write_text("9")
    again = subprocess.run([sys.executable, "-m", WORKER, "train.py"], env=env, check=False)
    assert again.returncode == one.returncode
    assert first_told.read_text() == "9", "another was first"


# --- A bug that comes back -------------------------------------------------------


STOPPED = """
import os, signal
from lockstep import RunConfig, fit
from lockstep.testing import TinyTask

class Task(TinyTask):
    def loss(self, model, batch, context):
        os.kill(os.getpid(), signal.SIGUSR1)
        return super().loss(model, batch, context)

sinks = {"curves": False}
fit(Task(), RunConfig.parse({"output_dir": "run", "epochs": 3, "device": "cpu", "sinks": sinks}))
"""


def test_a_script_that_does_not_say_it_was_stopped_is_queued_again(batch: Batch) -> None:
    (batch.folder / "train.py").write_text(STOPPED)
    assert batch.run() == 138, batch.said
    assert batch.asked == ["requeue 7"]


def test_the_same_error_three_times_is_not_tried_again(batch: Batch) -> None:
    assert batch.run("the bug", restarts=9) == 4
    assert batch.said.count("restarting all ranks") == 2
    assert "lockstep: the same error 3 times in the same place; not trying again" in batch.said
    assert batch.errors == ["ZeroDivisionError: the bug"] * 3


def test_what_it_failed_with_is_remembered_in_the_queue(batch: Batch) -> None:
    assert batch.run("the bug", restarts=1) == 1
    assert batch.run("the bug", restarts=9, SLURM_RESTART_COUNT="1") == 4
    assert "restarting" not in batch.said
    assert batch.run("the bug", restarts=9, SLURM_JOB_ID="8") == 4, "another job counts its own"
    assert batch.said.count("restarting all ranks") == 2


def test_different_errors_are_tried_as_often_as_was_asked(batch: Batch) -> None:
    batch.stand_in(
        "srun",
        "[[ $1 != --overlap ]] || exit 0; echo >>tries; while [[ $1 == --* ]]; do shift; done\n"
        'exec "$@" "at step $(wc -l <tries)"',
    )
    assert batch.run(restarts=5) == 1
    assert batch.said.count("restarting all ranks") == 5
    assert batch.errors == [f"ZeroDivisionError: at step {n}" for n in range(1, 7)]


# --- Time limits and other jobs --------------------------------------------------


def test_a_rank_that_saved_before_the_limit_queues_the_job_once(batch: Batch) -> None:
    assert batch.run("138") == 138
    assert batch.asked == ["requeue 7"]
    assert "saved before the time limit; the job is back in the queue" in batch.said


def test_a_job_ended_by_its_own_requeue_still_says_that_it_is_back_in_the_queue(
    batch: Batch,
) -> None:
    """SLURM's SIGTERM reaches every process of the job, also the command that asked for it."""
    batch.stand_in("scontrol", 'echo "$*" >>asked; kill -TERM $PPID $$; exit 0')
    assert batch.run("138") == 138
    assert batch.asked == ["requeue 7"]
    assert "saved before the time limit; the job is back in the queue" in batch.said
    assert "does not queue the job again" not in batch.said


@pytest.mark.parametrize(
    ("end", "asked"),
    [(100, ["show", "requeue"]), (900, ["show"]), (None, ["show"])],
)
def test_a_time_limit_that_comes_between_two_tries_queues_the_job(
    end: int | None, asked: list[str], batch: Batch
) -> None:
    """There is no rank that could be told."""
    when = datetime.now() + timedelta(seconds=end) if end else None
    text = f"{when:%Y-%m-%dT%H:%M:%S}" if when else "Unknown"
    assert batch.run("1", restarts=1, PREEMPT=f"JobState=RUNNING EndTime={text} Deadline=N/A") == 1
    assert [line.split()[0] for line in batch.asked] == asked


def test_it_is_not_queued_again_for_ever(batch: Batch) -> None:
    assert batch.run("138", requeues=3, SLURM_RESTART_COUNT="3") == 138
    assert batch.asked == []
    assert "not queued again: --requeues 3" in batch.said


def test_a_cluster_that_does_not_requeue_is_said(batch: Batch) -> None:
    batch.stand_in("scontrol", "echo 'Requested operation is presently disabled' >&2; exit 1")
    assert batch.run("138") == 138
    assert "presently disabled" in batch.said
    assert "submit it again to resume" in batch.said


def test_sigterm_is_the_end_unless_another_job_goes_first(batch: Batch) -> None:
    assert batch.run("143", PREEMPT="JobState=RUNNING PreemptTime=None") == 143
    first = "PreemptTime=2026-11-15T12:00:00"
    assert batch.run("143", PREEMPT=f"JobState=CANCELLED {first}") == 143
    assert set(batch.asked) == {"show job --oneliner 7"}
    assert batch.run("143", PREEMPT=f"JobState=RUNNING {first}") == 143
    assert batch.asked[2:] == ["show job --oneliner 7", "requeue 7"]


@pytest.mark.parametrize("code", ["1", "138"])
def test_a_job_that_slurm_takes_away_is_neither_tried_nor_queued_again(
    code: str, batch: Batch
) -> None:
    batch.stand_in("srun", 'kill -TERM $PPID; while [[ $1 == --* ]]; do shift; done; exec "$@"')
    assert batch.run(code, restarts=2) == int(code)
    assert "restarting" not in batch.said
    assert batch.asked == []


def test_nodes_that_do_not_answer_are_waited_for(batch: Batch) -> None:
    # The second question finds them all.
    batch.stand_in(
        "srun",
        "[[ $1 != --overlap ]] || { echo >>questions; (($(wc -l <questions) > 1)); exit; }\n"
        'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    )
    assert batch.run("1", restarts=1) == 1
    assert batch.said.count("not all nodes answer") == 1


def test_a_task_of_an_array_finds_its_number_in_the_words(folder: Path) -> None:
    job = Job(("train.py", "runs/%a", "it's %a", "100%"), array="0-3")
    script = job_script(job, "python").split("\nexport PYTHON")[0]
    assert "#SBATCH --array=0-3" in script
    told = subprocess.run(
        ["bash", "-c", script + '\nprintf "%s|" "${command[@]}"'],
        env={**os.environ, "SLURM_ARRAY_TASK_ID": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == f"python|-m|{WORKER}|train.py|runs/2|it's 2|100%|"


# --- What is asked wrongly -------------------------------------------------------

WRONG = {
    "no such script": (("nowhere.py",), "there is no script 'nowhere.py'"),
    "no module": (("-m",), "-m needs the name of a module"),
    "no nodes": (("--nodes", "0", "train.py"), "--nodes 0 is less than 1"),
    "no processes": (("--processes-per-node", "-2", "train.py"), "--processes-per-node -2"),
    "a time that is none": (("--time", "soon", "train.py"), "--time soon is not a time limit"),
    "no time": (("--time", "0:00", "train.py"), "--time 0:00 is not a time limit"),
    "all of it for saving": (
        ("--time", "2", "train.py"),
        "--warn 120 leaves no time to train: --time 2 is 120 s",
    ),
    "what lockstep sets": (("--sbatch", "signal=TERM@9", "train.py"), "--sbatch signal=..."),
    "no option": (("--sbatch", "=3", "train.py"), "--sbatch =3 is not an option"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_request_that_makes_no_sense_is_refused_before_anything_is_written(
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, problem = WRONG[name]
    assert say(monkeypatch, *words) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert "\n  try: " in said
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_without_slurm_it_says_so_and_names_the_dry_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert say(monkeypatch, "train.py") == 2
    said = capsys.readouterr().err
    assert said.startswith("lockstep: SLURM is not installed on this machine")
    assert "--dry-run" in said
    assert say(monkeypatch, "--dry-run", "train.py") == 0
    assert capsys.readouterr().out.startswith("#!/usr/bin/env bash")


@pytest.mark.parametrize("text", ["", "1:2:3:4", "-5", "5 min", "1-", "1.5", "٣"])
def test_what_slurm_would_not_take_for_a_time_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="is not a time limit"):
        seconds_of(text)


def test_an_endless_job_has_no_limit_to_be_warned_of(folder: Path) -> None:
    check(Job(("train.py",), time="UNLIMITED"))


# --- Following -------------------------------------------------------------------

# SLURM does not answer at first, then the job runs, then it has failed.
ANSWERS = """
echo >>questions
case $(wc -l <questions) in
  1) echo "Unable to contact slurm controller" >&2; exit 1 ;;
  2) echo "JobId=9 JobState=RUNNING Reason=None ExitCode=0:0 NodeList=n[1-2]" ;;
  *) echo "JobId=9 JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0 NodeList=n[1-2]" ;;
esac
"""


def follow(batch: Batch, answers: str) -> subprocess.Popen[str]:
    batch.stand_in("sbatch", 'printf "half a word \\xc3" >lockstep_jobs/train_9.log; echo "9;here"')
    batch.stand_in("scontrol", answers)
    path = f"{batch.folder / 'stand_ins'}:{os.environ['PATH']}"
    return subprocess.Popen(
        [BIN / "lockstep", "submit", "train.py"],
        cwd=batch.folder,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_followed_job_gives_its_log_and_its_exit_code(batch: Batch) -> None:
    one = follow(batch, ANSWERS)
    assert one.stdout is not None
    first = one.stdout.readline()
    with (batch.folder / "lockstep_jobs" / "train_9.log").open("ab") as log:
        log.write("é".encode()[1:] + b", whole\n")
    said, _ = one.communicate(timeout=60)
    assert one.returncode == 3, said
    assert first == "lockstep: job 9, log lockstep_jobs/train_9.log\n"
    assert "half a word é, whole" in said
    assert said.endswith("lockstep: job 9 ended: FAILED, exit code 3\n")
    assert said.count("runs on n[1-2]") == 1


def test_ctrl_c_stops_the_following_and_not_the_job(batch: Batch) -> None:
    one = follow(batch, 'echo "JobId=9 JobState=RUNNING Reason=None ExitCode=0:0 NodeList=n1"')
    batch.stand_in("scancel", "touch cancelled")
    assert one.stdout is not None
    while "runs on" not in one.stdout.readline():
        pass
    one.send_signal(signal.SIGINT)
    said, _ = one.communicate(timeout=60)
    assert one.returncode == 130, said
    assert said.endswith("lockstep: job 9 is still running; scancel 9 ends it\n")
    assert not (batch.folder / "cancelled").exists()


def test_a_job_that_slurm_has_forgotten_is_said(batch: Batch) -> None:
    one = follow(batch, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    said, _ = one.communicate(timeout=60)
    assert one.returncode == 2
    assert "SLURM no longer knows job 9\n  try: read its log" in said


# --- What SLURM says -------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "status", "is_over"),
    [
        ("JobState=PENDING Reason=Resources ExitCode=0:0", ("PENDING", "Resources", 0), False),
        ("JobState=RUNNING Reason=None ExitCode=0:0", ("RUNNING", "None", 0), False),
        ("JobState=COMPLETED Reason=None ExitCode=0:0", ("COMPLETED", "None", 0), True),
        ("JobState=CANCELLED Reason=None ExitCode=0:15", ("CANCELLED", "None", 143), True),
        ("JobState=TIMEOUT Reason=TimeLimit ExitCode=0:0", ("TIMEOUT", "TimeLimit", 1), True),
        ("JobState=NODE_FAIL Reason=NodeDown ExitCode=1:0", ("NODE_FAIL", "NodeDown", 1), True),
    ],
)
def test_a_job_that_did_not_finish_has_not_succeeded(
    said: str, status: tuple[str, str, int], is_over: bool
) -> None:
    read = read_status(f"JobId=7 JobName=a=b {said} Command=/x/JobState=y")
    assert read == Status(*status)
    assert read.has_ended == is_over
