"""The examination: which checks there are, in which order, and the two processes that measure.

Owns: the plain list below, and starting `collective.py` and `probe.py` with a clean
environment and a time limit. Does not own: any verdict.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lockstep.doctor import grace, job, machine, network
from lockstep.doctor.command import DEFAULT_PORT, Command, read_command
from lockstep.doctor.findings import Findings
from lockstep.doctor.machine import Driver, read_driver, visible_gpus
from lockstep.doctor.report import Result, fail
from lockstep.errors import LockstepError
from lockstep.harness.command import children_of
from lockstep.harness.ranks import rank_variables
from lockstep.parent import end_with_parent

MEASURE_S = 90.0
MOST_RANKS = 8


@dataclass(frozen=True, slots=True)
class Patient:
    """What is examined: the machine, and with `command` the job."""

    env: Mapping[str, str]
    driver: Driver = field(default_factory=Driver)
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What torch said of itself, and how a sum over ranks went."""
    command: Command | None = None
    found: Findings | None = None


def examine(
    words: Sequence[str], env: Mapping[str, str], folder: Path, seconds: float
) -> list[Result]:
    """Examine this machine, and the job that `words` would start in `folder`."""
    driver = read_driver()
    num_gpus = len(visible_gpus(driver, env))
    command, found, problem = None, None, None
    try:
        command = read_command(words, env, folder, num_gpus) if words else None
    except LockstepError as error:
        problem = fail("command", error.problem, error.remedy)
    wanted = command.num_processes if command else num_gpus
    most = max(2, num_gpus) if num_gpus else 2
    num_ranks = min(max(2, wanted), most, MOST_RANKS)
    job_env = {**env, **command.env} if command else env
    is_sound = network.names_resolve(command, job_env).status != "fail"
    facts = measure(network.without_launch(job_env), num_ranks if is_sound else 0)
    if command is not None and command.script:
        found = look_into(command, env, seconds)
    results = verdicts(Patient(env, driver, facts, command, found))
    return [problem, *results] if problem else results


def verdicts(patient: Patient) -> list[Result]:
    """Return every check's verdict on what was measured, in the order they are printed."""
    env, driver, facts, command = patient.env, patient.driver, patient.facts, patient.command
    here = command.num_processes if command else 0
    found = patient.found
    job_env = {**env, **command.env} if command else env
    names = network.names_resolve(command, job_env)
    results = [
        machine.versions(facts),
        machine.gpus(driver, job_env, here),
        machine.gpus_idle(driver, job_env),
        machine.cuda_stack(driver, facts),
        machine.shared_memory(found, max(1, here)),
        machine.open_files(found),
        network.launch_variables(job_env, command),
        network.port_free(command, job_env),
        names,
        network.sum_over_ranks(facts, [names]),
    ]
    if command is None:
        return [*results, grace.grace_time(None, None, env)]
    results.append(job.command_read(command))
    if found is not None:
        num_gpus = len(visible_gpus(driver, job_env))
        results += [
            job.script(command, found),
            job.data(found),
            job.batch_and_rate(found, command.world_size),
            job.resume(found),
            job.output_folder(found),
            job.room(found),
            job.step(found),
            job.memory(found, here, num_gpus),
            job.loader_speed(found, here),
            job.workers(found, here),
            job.communication(found, facts, command.world_size),
            job.sinks(found, job_env),
        ]
    return [*results, grace.grace_time(command, found, job_env)]


def measure(env: Mapping[str, str], num_ranks: int) -> dict[str, Any]:
    """Ask torch what it is and let `num_ranks` ranks add up a tensor, in processes of their own."""
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        file = Path(folder) / "facts.json"
        words = ["-m", "lockstep.doctor.collective", str(file), str(num_ranks)]
        ended, said = _run_python(words, env, Path(), MEASURE_S)
        try:
            return dict(json.loads(file.read_text()))
        except (OSError, ValueError):
            return {"error": said or f"exit code {ended}"}


def look_into(command: Command, env: Mapping[str, str], seconds: float) -> Findings:
    """Run the command's script up to `fit` in one process, and return what was found."""
    if why := _cannot_look(command):
        return why
    clean = network.without_launch({**env, **command.env})
    clean.setdefault("OMP_NUM_THREADS", str(_threads(command)))
    if not _is_recipe(command):
        return _look(command, clean, seconds)
    # It joins no group here, and may size its sample data by the ranks.
    found = _look(command, {**clean, **_first_rank(command)}, seconds)
    joins_a_group = bool(found.unseen) and not found.task
    return _look(command, clean, seconds) if joins_a_group else found


def _look(command: Command, env: Mapping[str, str], seconds: float) -> Findings:
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        file = Path(folder) / "findings.json"
        sizes = [str(command.world_size), str(command.num_processes)]
        words = ["-m", "lockstep.doctor.probe", str(file), *sizes, *command.script]
        ended, said = _run_python(words, env, command.folder, seconds)
        found = Findings.read(file)
    if ended is None:
        found.timed_out_s = seconds
    elif ended == -signal.SIGKILL and found.stage in ("model", "loader", "step", "save"):
        found.problems["step"] = ["it was killed: out of memory", ""]
    elif ended != 0 and not found.problems:
        found.problems[found.stage] = [said or f"it ends with code {ended}", ""]
    if found.scratch:
        shutil.rmtree(found.scratch, ignore_errors=True)
    return found


def _is_recipe(command: Command) -> bool:
    """Say whether the command trains one of the recipes, by its module or its short script."""
    first, *rest = command.script
    if first == "-m":
        return rest[0].startswith("lockstep_recipes.")
    return "lockstep_recipes.command" in (command.folder / first).read_text(errors="replace")


def _first_rank(command: Command) -> dict[str, str]:
    """Return the variables that the first of the command's ranks will find."""
    size, local_size = command.world_size, command.num_processes
    return rank_variables(0, size, DEFAULT_PORT, local_size=local_size)


def _threads(command: Command) -> int:
    """Return how many threads each rank will compute with, as its launcher sets it."""
    cores = os.cpu_count() or 1
    if command.num_processes == 1:
        return cores
    return max(1, cores // command.num_processes) if command.launcher == "lockstep" else 1


def _cannot_look(command: Command) -> Findings | None:
    """Refuse a script that is not there, and one that would simply train: it must use lockstep."""
    is_module = command.script[0] == "-m"
    name = command.script[1] if is_module else command.script[0]
    if is_module and name.startswith("lockstep_recipes."):
        return None
    base = command.folder / name.replace(".", "/") if is_module else command.folder / name
    places = [base.with_suffix(".py"), base / "__main__.py"] if is_module else [base]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        if is_module:
            return Findings(unseen=f"module {name} is not in this folder: not looked into")
        problem = f"there is no such file in {command.folder}"
        return Findings(problems={"script": [problem, "its path from here"]})
    if not uses_lockstep(path):
        return Findings(unseen="does not use lockstep: not looked into, or it would train")
    return None


def uses_lockstep(path: Path, seen: frozenset[Path] = frozenset()) -> bool:
    """Say whether a script, or a module beside it that it imports, imports lockstep."""
    text = path.read_text(errors="replace")
    names = re.findall(r"^\s*(?:from|import)\s+([\w.]+)", text, re.MULTILINE)
    if any(name.split(".")[0] in ("lockstep", "lockstep_recipes") for name in names):
        return True
    beside = {path.parent / f"{name.replace('.', '/')}.py" for name in names} - seen
    return any(uses_lockstep(p, seen | beside) for p in beside if p.is_file())


def _run_python(
    words: Sequence[str], env: Mapping[str, str], folder: Path, seconds: float
) -> tuple[int | None, str]:
    """Run `python WORDS`; return its exit code, None if it took too long, and its last words.

    Whatever it started is ended with it.
    """
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        code: int | None
        try:
            code = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(psutil.NoSuchProcess):  # what it started, too
                for below in children_of(psutil.Process(child.pid)):
                    below.kill()
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    return code, lines[-1].strip() if lines else ""
