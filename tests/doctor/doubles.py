"""The doubles of these tests: a fake NVML, fake facts, and short words for verdicts."""

import multiprocessing
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.config import RunConfig
from lockstep.doctor.findings import Findings, findings_file
from lockstep.doctor.report import Result
from lockstep.doctor.trial import CALLBACK, remove_scratch
from lockstep.harness.attach import attached, write_settings
from lockstep.harness.ranks import free_port, rank_variables
from lockstep.task import Task
from lockstep.trainer import fit

SUM = {
    "num_ranks": 2,
    "device": "cpu",
    "backend": "gloo",
    "num_bytes": 2**24,
    "seconds": 0.02,
    "is_right": True,
}
FAKE_FACTS: dict[str, Any] = {
    "torch": "2.13.0",
    "cuda": "13.0",
    "nccl": "2.27.7",
    "num_visible": 2,
    "sum": SUM,
}


class FakeNvml:
    """NVML of a machine with two idle GPUs; what differs is given."""

    def __init__(self, *, cuda: int = 13000, pids: Sequence[int] = (), used: int = 2**28) -> None:
        self.cuda, self.pids, self.used, self.ecc = cuda, pids, used, 0

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.65.06"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=141 * 2**30, used=self.used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in self.pids] if handle == 0 else []

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}abc"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "Fake H200"

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return self.ecc if handle == 1 else 0


def red(results: Sequence[Result]) -> set[str]:
    """Return the names of the checks that failed; each must say what to try."""
    failed = [result for result in results if result.status == "fail"]
    assert all(result.evidence and result.fix for result in failed), failed
    return {result.name for result in failed}


def yellow(results: Sequence[Result]) -> set[str]:
    return {result.name for result in results if result.status == "warn"}


def named(results: Sequence[Result], name: str) -> Result:
    (result,) = [result for result in results if result.name == name]
    return result


def config_in(folder: Path, **values: Any) -> RunConfig:
    own = {"output_dir": str(folder / "out"), "epochs": 3, "batch": {"batch_size": 4}}
    return RunConfig.parse(own | values)


def try_task(
    task: Task, config: RunConfig, folder: Path, world_size: int = 2, num_ranks: int = 1
) -> Findings:
    """Try a job of `world_size` ranks as `num_ranks` of them, forked from this process."""
    made = Path(tempfile.mkdtemp(prefix="lockstep_doctor_", dir=folder))
    write_settings(made, world_size=world_size)
    context, port = multiprocessing.get_context("fork"), free_port()
    ranks = [context.Process(target=_fit, args=(task, config, made, rank, num_ranks, port))
             for rank in range(num_ranks)]  # fmt: skip
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    found = Findings.merged([Findings.read(findings_file(made, rank)) for rank in range(num_ranks)])
    remove_scratch(made)
    shutil.rmtree(made)
    return found


def _fit(task: Task, config: RunConfig, made: Path, rank: int, num_ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(attached(made, CALLBACK))
    if num_ranks > 1:
        os.environ.update(rank_variables(rank, num_ranks, port))
    fit(task, config)
    raise AssertionError("nothing of the script runs after a trial")


IN_CHILD = """
import json, sys
from pathlib import Path
from lockstep.doctor.checks import Examination, verdicts
from lockstep.doctor.command import Command
from lockstep.doctor.findings import Findings
from lockstep.doctor.machine import Driver
facts, found = json.loads(Path(sys.argv[1]).read_text()), Findings.read(Path(sys.argv[2]))
command = Command("lockstep", ("train.py",), 2)
results = verdicts(Examination({}, Driver(problem="none"), facts, command, found))
print(json.dumps([[r.name, r.status, r.evidence, r.fix] for r in results]))
"""


def can_mount() -> bool:
    """Say whether a file system may be mounted in a namespace of one's own."""
    shell = "mount -t tmpfs -o size=64k none /mnt"
    done = subprocess.run(["unshare", "-m", "sh", "-c", shell], capture_output=True, check=False)
    return done.returncode == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="may not mount a tmpfs here")
