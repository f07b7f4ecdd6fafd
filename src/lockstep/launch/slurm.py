"""Run a script as a SLURM job: write the batch script, submit it, follow it to its exit code.

Owns: the contents of the batch script, and the calls of SLURM's commands. Does not own:
restarting, saving and requeueing. The batch script does that (`job.sh`, its constant part) together
with the ranks, which find each other through SLURM's step variables.
"""

import codecs
import os
import re
import shlex
import shutil
import string
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import LaunchError, plain, printable, shown
from lockstep.launch import worker
from lockstep.launch.failure import CRASH_LOOP
from lockstep.launch.slurm_text import UNLIMITED, one_line, parse_time_limit, run_command
from lockstep.text_input import LARGEST, check_line, whole_number

ASK_EVERY_S = 2.0
"""How often SLURM is asked for a job's state; its log is read more often."""
LOOK_EVERY_S = 0.2
ANSWER_S = 60.0
"""Time limit of a SLURM command."""
LIVING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING"}
LIVING |= {"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESIZING", "STAGE_OUT"}
ENDED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"}
ENDED |= {"DEADLINE", "OUT_OF_MEMORY", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED"}
OWN_OPTIONS = {"nodes", "ntasks-per-node", "signal", "output", "error", "open-mode", "array"}
"""Options that the script relies on; the user may set all others."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to run, on which resources, and for how long."""

    words: tuple[str, ...]
    """A script, or -m and a module, and its arguments."""
    num_nodes: int = 1
    gpus_per_node: int = 1
    """0 to train on CPUs."""
    processes_per_node: int = 1
    cpus_per_process: int | None = None
    partition: str = ""
    account: str = ""
    time: str = ""
    """In SLURM's format; empty for the partition's limit."""
    warn_s: int = 120
    """How many seconds before the time limit the ranks are told to save."""
    requeues: int = 100
    restarts: int = 2
    name: str = ""
    folder: str = "lockstep_jobs"
    array: str = ""
    setup: tuple[str, ...] = ()
    """Shell lines that run before the ranks, such as `module load cuda`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further sbatch options by their long names; an empty value for those that take none."""

    @property
    def title(self) -> str:
        """Return the name of the job in the queue and of its files in the folder."""
        script, *rest = self.words
        given = self.name or (rest[0] if script == "-m" else Path(script).stem)
        return re.sub(r"[^\w.-]", "_", given)

    @property
    def script(self) -> Path:
        """Return the path of the script before SLURM has given the job an id."""
        return Path(self.folder) / f"{self.title}.sh"

    def file(self, job_id: str, kind: str) -> Path:
        """Return the path of a submitted job's script or log."""
        return Path(self.folder) / f"{self.title}_{job_id}.{kind}"


def check(job: Job) -> None:
    """Refuse a job that cannot run, before anything is written.

    Raises:
        LaunchError: for a script or an option that cannot work.
    """
    worker.check_script(job.words)
    for flag, text in _texts(job):
        check_line(flag, text)
    for flag, value, least in (
        ("--nodes", job.num_nodes, 1),
        ("--gpus-per-node", job.gpus_per_node, 0),
        ("--processes-per-node", job.processes_per_node, 1),
        ("--cpus-per-process", job.cpus_per_process or 1, 1),
        ("--warn", job.warn_s, 1),
        ("--requeues", job.requeues, 0),
        ("--restarts", job.restarts, 0),
    ):
        if value < least:
            raise LaunchError(
                f"{flag} {value} is less than {least}", f"pass {flag} {least} or more"
            )
        if value > LARGEST:
            raise LaunchError(
                f"{flag} {shown(value)} is more than {LARGEST}", f"pass {flag} {LARGEST} or less"
            )
    limit_s = seconds_of(job.time) if job.time else None
    if limit_s is not None and job.warn_s >= limit_s:
        raise LaunchError(
            f"--warn {job.warn_s} leaves no time to train: --time {job.time} is {limit_s} s",
            "pass a longer --time, or a shorter --warn",
        )
    if job.warn_s > 65_535:
        raise LaunchError(
            f"--warn {job.warn_s} is more than SLURM's maximum of 65535",
            "pass --warn 65535 or less",
        )
    for option in job.options:
        if option in OWN_OPTIONS:
            raise LaunchError(
                f"--sbatch {option}=... is not allowed: lockstep sets this option itself",
                "use lockstep's own flag: see lockstep submit --help",
            )


def seconds_of(time_limit: str) -> int | None:
    """Return the seconds of `--time`; None for an unlimited time.

    Raises:
        LaunchError: if SLURM would not understand it.
    """
    if time_limit.upper() in UNLIMITED:
        return None
    seconds = parse_time_limit(time_limit)
    if not seconds:
        raise LaunchError(
            f"--time {plain(time_limit)} is not a time limit",
            "pass minutes (90), hours:minutes:seconds (12:00:00) or days-hours (2-12)",
        )
    return seconds


def _texts(job: Job) -> list[tuple[str, str]]:
    """Return the values that are copied into the script unchanged, each with its flag."""
    flags = {
        "--partition": job.partition,
        "--account": job.account,
        "--time": job.time,
        "--name": job.name,
        "--folder": job.folder,
        "--array": job.array,
    }
    return [
        *flags.items(),
        *(("--setup", line) for line in job.setup),
        *((f"--sbatch {name}", value) for name, value in job.options.items()),
    ]


def job_script(job: Job, python: str) -> str:
    """Return the batch script, which people read too. Pure."""
    wanted = {
        "job-name": job.title,
        "partition": job.partition,
        "account": job.account,
        "nodes": str(job.num_nodes),
        "ntasks-per-node": str(job.processes_per_node),
        "gpus-per-node": str(job.gpus_per_node) if job.gpus_per_node else "",
        "cpus-per-task": str(job.cpus_per_process or ""),
        "time": job.time,
        "array": job.array,
        "signal": f"USR1@{job.warn_s}",
        "output": f"{job.folder}/{job.title}_%j.log",
        "open-mode": "append",
    }
    meant = {
        "signal": "tell ranks to save this many seconds before the limit",
        "open-mode": "keep one log when the job is requeued",
        "ntasks-per-node": "one task per GPU" if job.gpus_per_node else "one task per process",
    }
    lines = ["#!/usr/bin/env bash"]
    lines += ["# Written by `lockstep submit`. You may edit it, and submit it with sbatch."]
    for option, value in wanted.items():
        line = f"#SBATCH --{option}={shlex.quote(value)}" if value else ""
        if option in meant and line:
            line = f"{line:<32} # {meant[option]}"
        lines += [line] if line else []
    lines += ["#SBATCH --requeue" if job.requeues else "#SBATCH --no-requeue"]
    for option, value in job.options.items():
        lines += [f"#SBATCH --{option}={shlex.quote(value)}" if value else f"#SBATCH --{option}"]
    cpus = [f"--cpus-per-task={job.cpus_per_process}"] if job.cpus_per_process else []
    # The worker starts the user's script, and tells this one with which error it failed.
    start = [_shell_word(python), "-m", worker.__name__]
    command = " ".join([*start, *(_quoted(word, job) for word in job.words)])
    lines += [
        "",
        f"restarts={job.restarts} # maximum number after failures, in this allocation",
        f"requeues={job.requeues} # maximum number of returns to the queue",
        f"warn={job.warn_s} # ranks are told to save this many seconds before the time limit",
        f"crash_loop={CRASH_LOOP} # give up after so many times the same error at the same step",
        f"record={shlex.quote(f'{job.folder}/{job.title}')}",
        f"srun_options=({' '.join(cpus)})",
        *job.setup,
        f"command=({command})",
        "",
    ]
    return "\n".join(lines) + "\n" + Path(__file__).with_name("job.sh").read_text()


def _quoted(word: str, job: Job) -> str:
    """Quote a word for the shell; in a job array `%a` becomes the task's index.

    >>> _quoted("runs/%a", Job(("train.py",), array="0-3"))
    'runs/"$SLURM_ARRAY_TASK_ID"'
    """
    if not job.array:
        return _shell_word(word)
    parts = [_shell_word(part) if part else "" for part in word.split("%a")]
    return '"$SLURM_ARRAY_TASK_ID"'.join(parts) or "''"


def _shell_word(word: str) -> str:
    r"""Quote a word for bash on one line, whatever bytes it contains.

    >>> print(_shell_word("two words"), _shell_word("two\nlines"), _shell_word("\udcff"))
    'two words' $'two\x0alines' $'\xff'
    """
    if word.isprintable():
        return shlex.quote(word)
    plain = string.ascii_letters + string.digits + " _-./=:,"
    encoded = os.fsencode(word)
    return "$'" + "".join(chr(b) if chr(b) in plain else f"\\x{b:02x}" for b in encoded) + "'"


def submit(job: Job, python: str) -> str:
    """Write the script, submit it, and return the job's id.

    Raises:
        LaunchError: SLURM is not installed here, or refuses the job.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "SLURM is not installed on this machine: there is no sbatch",
            "run the command on a login node of a cluster, or pass --dry-run to see the script",
        )
    try:
        job.script.parent.mkdir(parents=True, exist_ok=True)  # or SLURM drops the log
        job.script.write_text(job_script(job, python))
    except OSError as error:
        raise LaunchError(
            f"{shown(job.script)} cannot be written: {error.strerror}",
            "pass another folder with --folder",
        ) from None
    asked = run_command(["sbatch", "--parsable", str(job.script)])
    if asked is None or asked.code:
        lines = asked.err.splitlines() if asked else ["sbatch cannot be started"]
        reasons = [re.sub(r"^sbatch: (error: )?", "", line) for line in lines]
        raise LaunchError(
            f"SLURM refuses the job: {'; '.join(reasons)}",
            "check partition, account and limits with sinfo and scontrol; the script is "
            f"{job.script}",
        )
    sys.stderr.write(asked.err)  # messages of the site
    job_id = asked.out.strip().split(";")[0]
    if whole_number(job_id) is None:
        raise LaunchError(
            f"sbatch accepted the job but printed no job id: {one_line(asked.out)}",
            f"look for the job with squeue --me; its script is {job.script}",
        )
    job.script.rename(job.file(job_id, "sh"))
    return job_id


@dataclass(frozen=True, slots=True)
class Status:
    """SLURM's record of a job."""

    state: str
    reason: str = ""
    exit_code: int = 0
    nodes: str = ""

    @property
    def has_ended(self) -> bool:
        """Return whether the job has ended for good."""
        return self.state not in LIVING

    def text(self, job_id: str) -> str:
        """Return the state as a log line."""
        details = {
            "PENDING": f"waits in the queue ({self.reason})",
            "RUNNING": f"runs on {self.nodes}",
            "COMPLETED": "has finished",
        }
        ended = f"ended: {self.state}, exit code {self.exit_code}"
        return printable(f"lockstep: job {job_id} {details.get(self.state, ended)}")


def read_status(answer: str) -> Status | None:
    """Parse the output of `scontrol show job --oneliner`; None if it has no known state. Pure.

    >>> read_status("JobId=7 JobState=FAILED Reason=NonZeroExitCode ExitCode=2:0 NodeList=n[1-2]")
    Status(state='FAILED', reason='NonZeroExitCode', exit_code=2, nodes='n[1-2]')
    """
    values = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", answer))
    state = values.get("JobState", "")
    if state not in LIVING | ENDED:
        return None
    code, _, number = values.get("ExitCode", "").partition(":")
    ended_by = whole_number(number, most=127) or 0
    # A job that was ended by a lost node or a limit has no exit code, and has not succeeded.
    exit_code = (
        whole_number(code, most=255)
        or (128 + ended_by if ended_by else 0)
        or int(state not in {"COMPLETED", *LIVING})
    )
    return Status(state, values.get("Reason", ""), exit_code, values.get("NodeList", ""))


def ask(job_id: str) -> Status | None:
    """Ask SLURM about a job; return None if there is no usable answer.

    Raises:
        LaunchError: SLURM no longer knows the job.
    """
    asked = run_command(["scontrol", "show", "job", "--oneliner", job_id], ANSWER_S)
    if asked is None:
        return None
    if asked.code == 0:
        return read_status(asked.out)
    if "Invalid job id" in asked.err:
        raise LaunchError(
            f"SLURM no longer knows job {job_id}", f"read its log, or run sacct -j {job_id}"
        )
    return None


class Follower:
    """Shows a job's log as it grows, and the job's state when it changes."""

    def __init__(self, job_id: str, log: Path) -> None:
        self.job_id = job_id
        self.log = log
        self._read = 0
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def follow(self) -> int:
        """Return the job's exit code once it has ended for good."""
        shown_state = ""
        ended = 0
        while True:
            status = ask(self.job_id)
            if status is not None:
                ended = ended + 1 if status.has_ended else 0
                if status.state != shown_state and (status.state in ("PENDING", "RUNNING")):
                    shown_state = status.state
                    sys.stderr.write(f"{status.text(self.job_id)}\n")
            # A transition between two states may look like an end, and the log may arrive late.
            if status is not None and ended > 1:
                self._show()
                sys.stderr.write(f"{status.text(self.job_id)}\n")
                return status.exit_code
            pause_s = LOOK_EVERY_S if ended else ASK_EVERY_S
            until = time.monotonic() + pause_s
            while time.monotonic() < until:
                self._show()
                time.sleep(LOOK_EVERY_S)

    def _show(self) -> None:
        try:
            with self.log.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except OSError:  # not there yet
            return
        self._read += len(new)
        sys.stdout.write(self._decode(new))
        sys.stdout.flush()
