"""Try a job: start its script for a few steps with the doctor's callback attached.

Owns: the ranks that are started, their variables and time limit, and removing the files they
leave. Does not own: the measurements (`callback.py`), or the verdicts (`job.py`).
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.doctor.command import Command
from lockstep.doctor.findings import Findings, findings_file
from lockstep.doctor.network import without_launch
from lockstep.harness.attach import write_settings
from lockstep.harness.command import RunningCommand, follow
from lockstep.harness.failure import CommandFailure
from lockstep.harness.ranks import given_threads
from lockstep.harness.runs import CommandRuns

CALLBACK = "lockstep.doctor.callback:DoctorCallback"
"""A name, not an import: `lockstep doctor` itself does not import torch."""


def try_job(
    command: Command, env: Mapping[str, str], seconds: float, num_gpus: int = 0
) -> Findings:
    """Start the command's script for a few steps, and return what was found.

    One rank is started. A job whose ranks share more than gradients (sharded weights, batch
    normalisation over all ranks) is started again as several.
    """
    if refusal := _refusal(command):
        return refusal
    deadline = time.monotonic() + seconds
    found = _try_ranks(command, env, 0, deadline)
    if found.needs_group:
        found = _try_ranks(command, env, num_trial_ranks(command, num_gpus), deadline)
    if found.timed_out_s:
        found.timed_out_s = seconds
    return found


def num_trial_ranks(command: Command, num_gpus: int) -> int:
    """Return the number of ranks to start: those of the job on this machine, if they fit.

    >>> num_trial_ranks(Command("torchrun", num_processes=8, num_nodes=2), num_gpus=4)
    4
    """
    most = max(2, num_gpus or os.cpu_count() or 1)
    return min(max(2, command.num_processes), most)


def _try_ranks(
    command: Command, env: Mapping[str, str], num_ranks: int, deadline: float
) -> Findings:
    """Start one process without a group (0 ranks), or several ranks, and wait until they end."""
    with tempfile.TemporaryDirectory(prefix="lockstep_doctor_") as made:
        folder = Path(made)
        base = without_launch({**env, **command.env})
        base["LOCKSTEP_PLANNED_RANKS"] = str(command.world_size)
        base.setdefault("OMP_NUM_THREADS", str(_threads(command)))
        runs = CommandRuns(
            [sys.executable, *command.script],
            folder,
            CALLBACK,
            limit_s=0,
            threads=given_threads(base) or 1,
            base=base,
            work_folder=command.folder,
        )
        write_settings(folder, world_size=command.world_size)
        try:
            commands = runs.start(folder, num_ranks)
            try:
                left_s = deadline - time.monotonic()
                has_ended = follow(commands, lambda: (None, left_s)) is not None
            finally:
                for started in commands:
                    started.close()
            return _read(folder, commands, has_ended)
        finally:
            remove_scratch(folder)


def _read(folder: Path, commands: Sequence[RunningCommand], has_ended: bool) -> Findings:
    """Return the ranks' findings, and why they ended if they did not write it down."""
    ranks = [Findings.read(findings_file(folder, rank)) for rank in range(len(commands))]
    found = Findings.merged(ranks)
    if not has_ended:
        found.timed_out_s = 1.0
        return found
    failed = next((command for command in commands if command.code), None)
    is_through = {*found.passed, *found.problems} - {"script", "folder"}
    if found.failed_at or found.needs_group:
        return found
    if failed is None and not is_through:
        problem = "it ended without calling lockstep.fit or train_step"
        found.problems["script"] = [problem, "pass a script that trains"]
    elif failed is not None and failed.code == -signal.SIGKILL:
        problem = "it was killed (SIGKILL), probably because it ran out of memory"
        remedy = "free memory, or lower batch_size or num_workers"
        found.problems["step" if is_through else "script"] = [problem, remedy]
    elif failed is not None:
        failure = CommandFailure.read(failed.text)
        found.problems[found.phase] = [failure.problem, failure.advice]
    return found


def remove_scratch(folder: Path) -> None:
    """Remove the folder in which the ranks saved, even if they were killed."""
    scratch = Findings.read(findings_file(folder, 0)).scratch
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)


def _threads(command: Command) -> int:
    """Return the number of CPU threads per rank that the launcher sets."""
    cores = os.cpu_count() or 1
    if command.num_processes == 1:
        return cores
    return max(1, cores // command.num_processes) if command.launcher == "lockstep" else 1


def _refusal(command: Command) -> Findings | None:
    """Refuse a missing script, and one that does not use lockstep and would really train."""
    is_module = command.script[0] == "-m"
    name = command.script[1] if is_module else command.script[0]
    if is_module and name.startswith("lockstep_recipes."):
        return None
    base = command.folder / name.replace(".", "/") if is_module else command.folder / name
    places = [base.with_suffix(".py"), base / "__main__.py"] if is_module else [base]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        if is_module:
            return Findings(unchecked=f"module {name} is not in this folder: not started")
        problem = f"there is no such file in {command.folder}"
        return Findings(problems={"script": [problem, "pass the path of an existing script"]})
    if not uses_lockstep(path):
        return Findings(unchecked="does not use lockstep: not started, or it would train")
    return None


def uses_lockstep(path: Path, seen: frozenset[Path] = frozenset()) -> bool:
    """Return whether a script imports lockstep, directly or through a module next to it."""
    text = path.read_text(errors="replace")
    names = re.findall(r"^\s*(?:from|import)\s+([\w.]+)", text, re.MULTILINE)
    if any(name.split(".")[0] in ("lockstep", "lockstep_recipes") for name in names):
        return True
    beside = {path.parent / f"{name.replace('.', '/')}.py" for name in names} - seen
    return any(uses_lockstep(p, seen | beside) for p in beside if p.is_file())
