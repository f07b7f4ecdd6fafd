"""The list of checks in order, and the measurements they judge.

Owns: the list below, and asking for torch's versions in another process. Does not own:
any verdict, or the trial of a job (`trial.py`).
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.doctor import grace, job, machine, network
from lockstep.doctor.command import Command, read_command
from lockstep.doctor.findings import Findings
from lockstep.doctor.machine import Driver, read_driver, visible_gpus
from lockstep.doctor.report import Result
from lockstep.doctor.trial import try_job
from lockstep.errors import LockstepError
from lockstep.harness.command import RunningCommand, follow

MEASURE_S = 90.0
MAX_RANKS = 8


@dataclass(frozen=True, slots=True)
class Examination:
    """The known facts about the machine and, with `command`, about the job."""

    env: Mapping[str, str]
    driver: Driver = field(default_factory=Driver)
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Torch's versions, and the result of a sum over ranks."""
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
        problem = Result("command", "fail", error.problem, error.remedy)
    wanted = command.num_processes if command else num_gpus
    most = max(2, num_gpus) if num_gpus else 2
    num_ranks = min(max(2, wanted), most, MAX_RANKS)
    job_env = {**env, **command.env} if command else env
    is_sound = network.names_resolve(command, job_env).status != "fail"
    facts = measure(network.without_launch(job_env), num_ranks if is_sound else 0)
    if command is not None and command.script:
        found = try_job(command, env, seconds, len(visible_gpus(driver, job_env)))
    results = verdicts(Examination(env, driver, facts, command, found))
    return [problem, *results] if problem else results


def verdicts(examination: Examination) -> list[Result]:
    """Return the result of every check, in the order of printing."""
    env, driver, facts = examination.env, examination.driver, examination.facts
    command, found = examination.command, examination.found
    here = command.num_processes if command else 0
    job_env = {**env, **command.env} if command else env
    network_found = network.names_resolve(command, job_env)
    results = {
        "versions": machine.versions(facts),
        "gpus": machine.gpus(driver, job_env, here),
        "gpus idle": machine.gpus_idle(driver, job_env),
        "cuda": machine.cuda_stack(driver, facts),
        "shared memory": machine.shared_memory(found, max(1, here)),
        "open files": machine.open_files(found),
        "variables": network.launch_variables(job_env, command),
        "port": network.port_free(command, job_env),
        "network": network_found,
        "all-reduce": network.sum_over_ranks(facts, network_found.status != "fail"),
    }
    if command is not None:
        results["command"] = job.command_read(command)
    if command is not None and found is not None:
        num_gpus = len(visible_gpus(driver, job_env))
        results |= {
            "script": job.script(command, found),
            "data": job.data(found),
            "batch and rate": job.batch_and_rate(found, command.world_size),
            "resume": job.resume(found),
            "output folder": job.output_folder(found),
            "room": job.room(found),
            "step": job.step(found),
            "memory": job.memory(found, command, num_gpus),
            "loader": job.loader_speed(found, here),
            "workers": job.workers(found, here),
            "communication": job.communication(found, facts, command.world_size),
            "trackers": job.sinks(found, job_env),
        }
    results["grace time"] = grace.grace_time(command, found, job_env)
    return [replace(result, name=name) for name, result in results.items()]


def measure(env: Mapping[str, str], num_ranks: int) -> dict[str, Any]:
    """Get torch's versions and the time of a sum over `num_ranks` ranks, in other processes."""
    with tempfile.TemporaryDirectory(prefix="lockstep_doctor_") as folder:
        file, output = Path(folder) / "facts.json", Path(folder) / "output.txt"
        words = [sys.executable, "-m", "lockstep.doctor.collective", str(file), str(num_ranks)]
        command = RunningCommand(words, {}, output, base=env)
        try:
            follow([command], lambda: (None, MEASURE_S))
            try:
                return dict(json.loads(file.read_text()))
            except (OSError, ValueError):
                lines = command.text.strip().splitlines()
                return {"error": lines[-1] if lines else f"exit code {command.code}"}
        finally:
            command.close()
