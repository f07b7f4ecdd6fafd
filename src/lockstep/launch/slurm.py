"""Run a script as a SLURM job: write the batch script, submit it, follow it to its exit code.

Owns: what stands in the batch script, and what SLURM's commands are asked. Does not own: who
restarts, saves or requeues; the script does (`job.sh`, the part of it that is always the
same), together with the ranks, which find each other through SLURM's step variables.
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
"""How often SLURM is asked for a job's state; its log is looked at more often."""
LOOK_EVERY_S = 0.2
ANSWER_S = 60.0
"""A command of SLURM's that takes longer has not answered."""
LIVING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING"}
LIVING |= {"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESIZING", "STAGE_OUT"}
ENDED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"}
ENDED |= {"DEADLINE", "OUT_OF_MEMORY", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED"}
OWN_OPTIONS = {"nodes", "ntasks-per-node", "signal", "output", "error", "open-mode", "array"}
"""What the script relies on; the rest of sbatch's options is the user's."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to run, on what, and for how long."""

    words: tuple[str, ...]
    """A script, or -m and a module, and its arguments."""
    num_nodes: int = 1
    gpus_per_node: int = 1
    """None where there is none: then ranks train on CPUs."""
    processes_per_node: int = 1
    cpus_per_process: int | None = None
    partition: str = ""
    account: str = ""
    time: str = ""
    """As SLURM writes it; empty: the partition's own limit."""
    warn_s: int = 120
    """So long before the limit the ranks are told to save."""
    requeues: int = 100
    restarts: int = 2
    name: str = ""
    folder: str = "lockstep_jobs"
    array: str = ""
    setup: tuple[str, ...] = ()
    """Lines of shell that run before the ranks: `module load cuda`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further options of sbatch, by their long names; empty for those that take no value."""

    @property
    def title(self) -> str:
        """What the job is called in the queue, and its files in the folder."""
        script, *rest = self.words
        given = self.name or (rest[0] if script == "-m" else Path(script).stem)
        return re.sub(r"[^\w.-]", "_", given)

    @property
    def script(self) -> Path:
        """Where the script is written before SLURM has given the job a number."""
        return Path(self.folder) / f"{self.title}.sh"

    def file(self, job_id: str, kind: str) -> Path:
        """Return where a submitted job keeps its script and its log."""
        return Path(self.folder) / f"{self.title}_{job_id}.{kind}"


def check(job: Job) -> None:
    """Refuse what cannot run, before anything is written.

    Raises:
        LaunchError: with what is wrong and what to try.
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
            raise LaunchError(f"{flag} {value} is too few", f"pass {flag} {least}, or more")
        if value > LARGEST:
            raise LaunchError(
                f"{flag} {shown(value)} is too many", f"pass {flag} {LARGEST}, or less"
            )
    limit_s = seconds_of(job.time) if job.time else None
    if limit_s is not None and job.warn_s >= limit_s:
        raise LaunchError(
            f"--time {job.time} is {limit_s} s, and --warn {job.warn_s} of them are for saving",
            "pass a longer --time, or a shorter --warn",
        )
    if job.warn_s > 65_535:
        raise LaunchError(
            f"--warn {job.warn_s} is more than SLURM takes", "pass --warn 65535, or less"
        )
    for option in job.options:
        if option in OWN_OPTIONS:
            raise LaunchError(
                f"--sbatch {option}=... is set by lockstep", "use its own flag; --help lists them"
            )


def seconds_of(time_limit: str) -> int | None:
    """Return the seconds of `--time`; None if there is no end.

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
    """Return the values that reach the script as they are, each with the flag it came from."""
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
    """Return the batch script, to be read by people too. Pure."""
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
        "signal": "so many seconds before the limit: save, and leave",
        "open-mode": "one log, however often the job is queued",
        "ntasks-per-node": "one task per GPU" if job.gpus_per_node else "one task per process",
    }
    lines = ["#!/usr/bin/env bash"]
    lines += ["# Written by `lockstep submit`; may be changed and given to sbatch."]
    for option, value in wanted.items():
        line = f"#SBATCH --{option}={shlex.quote(value)}" if value else ""
        if option in meant and line:
            line = f"{line:<32} # {meant[option]}"
        lines += [line] if line else []
    lines += ["#SBATCH --requeue" if job.requeues else "#SBATCH --no-requeue"]
    for option, value in job.options.items():
        lines += [f"#SBATCH --{option}={shlex.quote(value)}" if value else f"#SBATCH --{option}"]
    cpus = [f"--cpus-per-task={job.cpus_per_process}"] if job.cpus_per_process else []
    # Started through the worker, a rank tells the script what it failed with.
    start = [_shell_word(python), "-m", worker.__name__]
    command = " ".join([*start, *(_quoted(word, job) for word in job.words)])
    lines += [
        "",
        f"restarts={job.restarts} # after a failure, in this allocation",
        f"requeues={job.requeues} # at most, at the time limit",
        f"warn={job.warn_s} # seconds before the time limit ranks are told to save",
        f"crash_loop={CRASH_LOOP} # so often the same error at the same step, and it is the end",
        f"record={shlex.quote(f'{job.folder}/{job.title}')}",
        f"srun_options=({' '.join(cpus)})",
        *job.setup,
        f"command=({command})",
        "",
    ]
    return "\n".join(lines) + "\n" + Path(__file__).with_name("job.sh").read_text()


def _quoted(word: str, job: Job) -> str:
    """Quote a word for the shell; in a job array `%a` is the number of the task.

    >>> _quoted("runs/%a", Job(("train.py",), array="0-3"))
    'runs/"$SLURM_ARRAY_TASK_ID"'
    """
    if not job.array:
        return _shell_word(word)
    parts = [_shell_word(part) if part else "" for part in word.split("%a")]
    return '"$SLURM_ARRAY_TASK_ID"'.join(parts) or "''"


def _shell_word(word: str) -> str:
    r"""Quote a word for bash on one line, whatever bytes it holds.

    >>> print(_shell_word("two words"), _shell_word("two\nlines"), _shell_word("\udcff"))
    'two words' $'two\x0alines' $'\xff'
    """
    if word.isprintable():
        return shlex.quote(word)
    plain = string.ascii_letters + string.digits + " _-./=:,"
    encoded = os.fsencode(word)
    return "$'" + "".join(chr(b) if chr(b) in plain else f"\\x{b:02x}" for b in encoded) + "'"


def submit(job: Job, python: str) -> str:
    """Write the script, hand it to SLURM, and return the job's number.

    Raises:
        LaunchError: if there is no SLURM here, or with its own words if it refuses.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "there is no SLURM on this machine: no sbatch",
            "run it on a login node of a cluster; --dry-run shows the script anywhere",
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
        said = [re.sub(r"^sbatch: (error: )?", "", line) for line in lines]
        raise LaunchError(
            f"SLURM refuses the job: {'; '.join(said)}",
            f"check the partition, account and limits with sinfo and scontrol; the script is {job.script}",
        )
    sys.stderr.write(asked.err)  # a site's own remarks
    job_id = asked.out.strip().split(";")[0]
    if whole_number(job_id) is None:
        raise LaunchError(
            f"sbatch took the job but printed no job number: {one_line(asked.out)}",
            f"look for the job with squeue --me; its script is {job.script}",
        )
    job.script.rename(job.file(job_id, "sh"))
    return job_id


@dataclass(frozen=True, slots=True)
class Status:
    """What SLURM says of a job."""

    state: str
    reason: str = ""
    exit_code: int = 0
    nodes: str = ""

    @property
    def has_ended(self) -> bool:
        """Say whether nothing more will happen."""
        return self.state not in LIVING

    def text(self, job_id: str) -> str:
        """Say it in a line."""
        details = {
            "PENDING": f"waits in the queue ({self.reason})",
            "RUNNING": f"runs on {self.nodes}",
            "COMPLETED": "has finished",
        }
        ended = f"ended: {self.state}, exit code {self.exit_code}"
        return printable(f"lockstep: job {job_id} {details.get(self.state, ended)}")


def read_status(said: str) -> Status | None:
    """Read what `scontrol show job --oneliner` prints; None if it does not say the state. Pure.

    >>> read_status("JobId=7 JobState=FAILED Reason=NonZeroExitCode ExitCode=2:0 NodeList=n[1-2]")
    Status(state='FAILED', reason='NonZeroExitCode', exit_code=2, nodes='n[1-2]')
    """
    values = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", said))
    state = values.get("JobState", "")
    if state not in LIVING | ENDED:
        return None
    code, _, number = values.get("ExitCode", "").partition(":")
    ended_by = whole_number(number, most=127) or 0
    # Whatever ended without an exit code of its own (a node, a limit) has not succeeded.
    exit_code = (
        whole_number(code, most=255)
        or (128 + ended_by if ended_by else 0)
        or int(state not in {"COMPLETED", *LIVING})
    )
    return Status(state, values.get("Reason", ""), exit_code, values.get("NodeList", ""))


def ask(job_id: str) -> Status | None:
    """Ask SLURM about a job; None while it gives no answer that can be read.

    Raises:
        LaunchError: if it no longer knows the job.
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
    """Shows a job's log as it grows, and what SLURM says when that changes."""

    def __init__(self, job_id: str, log: Path) -> None:
        self.job_id = job_id
        self.log = log
        self._read = 0
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def follow(self) -> int:
        """Return the job's exit code once it has ended for good."""
        told, ended = "", 0
        while True:
            status = ask(self.job_id)
            if status is not None:
                ended = ended + 1 if status.has_ended else 0
                if status.state != told and (status.state in ("PENDING", "RUNNING")):
                    told = status.state
                    sys.stderr.write(f"{status.text(self.job_id)}\n")
            # A state between two others may look like an end, and the log may come late.
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
