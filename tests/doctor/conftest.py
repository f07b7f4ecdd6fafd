"""A healthy machine and a healthy job, for tests that each break one thing."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from doubles import FAKE_FACTS, IN_CHILD, FakeNvml, config_in, try_task

from lockstep.doctor.checks import Examination
from lockstep.doctor.command import Command
from lockstep.doctor.findings import Findings
from lockstep.doctor.machine import Driver, read_driver
from lockstep.doctor.report import Result
from lockstep.testing import TinyTask


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Return what a real trial of a healthy job finds, with its times set to steady ones."""
    folder = tmp_path_factory.mktemp("healthy")
    config = config_in(folder, loader={"num_workers": 1})
    found = try_task(TinyTask(), config, folder)
    assert found.problems == {}
    assert found.passed[-1] == "save"
    assert not list(folder.glob(".lockstep_doctor*"))
    assert not (folder / "out").exists()
    assert min(found.read_s, found.step_s, found.save_s, found.memory_bytes) > 0
    return dataclasses.replace(found, read_s=0.001, step_s=0.01, save_s=0.05)


@pytest.fixture
def healthy(measured: Findings, tmp_path: Path) -> Examination:
    """Return an examination with two fake GPUs and a job nothing is wrong with."""
    command = Command("lockstep", ("train.py",), 2, folder=tmp_path)
    found = dataclasses.replace(measured, problems=dict(measured.problems))
    return Examination({}, read_driver(FakeNvml()), FAKE_FACTS, command, found)


@pytest.fixture
def without_gpu(healthy: Examination) -> Examination:
    """Return the same examination on a machine without a GPU."""
    facts = {**FAKE_FACTS, "cuda": None, "num_visible": 0}
    return dataclasses.replace(healthy, driver=Driver(problem="no NVIDIA driver"), facts=facts)


@pytest.fixture
def in_child(without_gpu: Examination, tmp_path: Path) -> Callable[..., list[Result]]:
    """Return a function that has the verdicts given in a child that a shell prepares first."""

    def give(shell: str, **changes: Any) -> list[Result]:
        assert without_gpu.found is not None
        dataclasses.replace(without_gpu.found, **changes).write(tmp_path / "found.json")
        (tmp_path / "facts.json").write_text(json.dumps(without_gpu.facts))
        files = [str(tmp_path / "facts.json"), str(tmp_path / "found.json")]
        prepared = f'{shell} && exec "$@"'
        words = ["sh", "-c", prepared, "sh", sys.executable, "-c", IN_CHILD, *files]
        if "mount" in shell:
            words = ["unshare", "-m", *words]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr
        return [Result(*row) for row in json.loads(ended.stdout)]

    return give
