"""Each fault of a machine turns one check red, and only that one."""

import dataclasses
import json
import os
import shutil
import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from doubles import FAKE_FACTS, SUM, FakeNvml, named, needs_mount, red, yellow

from lockstep.doctor import checks, collective, machine
from lockstep.doctor.checks import Examination, measure, verdicts
from lockstep.doctor.command import Command
from lockstep.doctor.machine import read_driver
from lockstep.doctor.network import port_free
from lockstep.doctor.report import Result
from lockstep.testing import free_port

replace = dataclasses.replace
ROOT = Path(__file__).parents[2]


def test_nothing_is_red_on_a_healthy_machine(
    healthy: Examination, without_gpu: Examination, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one that guides name, another test may have.
    monkeypatch.setattr("lockstep.doctor.network.DEFAULT_PORT", free_port())
    for examination in (healthy, without_gpu, replace(healthy, command=None, found=None)):
        results = verdicts(examination)
        assert red(results) == set(), results
        assert yellow(results) == set(), results


# --- GPUs, by a fake NVML ----------------------------------------------------------


def test_a_gpu_that_is_not_there(healthy: Examination) -> None:
    results = verdicts(replace(healthy, env={"CUDA_VISIBLE_DEVICES": "0,7"}))
    assert red(results) == {"gpus"}
    assert "2 are" in named(results, "gpus").evidence


def test_memory_errors_of_a_gpu(healthy: Examination) -> None:
    nvml = FakeNvml()
    nvml.ecc = 3
    results = verdicts(replace(healthy, driver=read_driver(nvml)))
    assert red(results) == {"gpus"}
    assert "GPU 1: 3" in named(results, "gpus").evidence


@pytest.mark.parametrize("fake", [FakeNvml(pids=[4242]), FakeNvml(used=100 * 2**30)])
def test_a_gpu_in_use(fake: FakeNvml, healthy: Examination) -> None:
    results = verdicts(replace(healthy, driver=read_driver(fake)))
    assert red(results) == {"gpus idle"}
    told = named(results, "gpus idle").evidence
    assert "4242" in told if fake.pids else "100.0 GB in use, no process shown" in told


def test_more_processes_than_gpus_is_a_warning(healthy: Examination) -> None:
    assert healthy.command is not None
    command = replace(healthy.command, num_processes=8)
    results = verdicts(replace(healthy, command=command))
    assert "gpus" in yellow(results)
    assert red(results) == set()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cuda": None}, "built for the CPU alone"),
        ({"num_visible": 0}, "sees none of 2"),
        ({"nccl": ""}, "no NCCL"),
    ],
)
def test_a_torch_that_cannot_use_the_gpus(
    change: dict[str, Any], words: str, healthy: Examination
) -> None:
    results = verdicts(replace(healthy, facts={**FAKE_FACTS, **change}))
    assert red(results) == {"cuda"}
    assert words in named(results, "cuda").evidence


def test_a_driver_too_old_for_torch(healthy: Examination) -> None:
    results = verdicts(replace(healthy, driver=read_driver(FakeNvml(cuda=12040))))
    assert red(results) == {"cuda"}
    assert "needs CUDA 13.0" in named(results, "cuda").evidence
    assert "up to 12.4" in named(results, "cuda").evidence


def test_a_torch_that_does_not_import(without_gpu: Examination, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    facts = measure({**os.environ, "PYTHONPATH": str(tmp_path)}, num_ranks=0)
    results = verdicts(replace(without_gpu, facts=facts))
    assert red(results) == {"cuda"}
    assert "libcudart.so.13" in named(results, "cuda").evidence


def test_a_package_that_is_missing(healthy: Examination, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=2.11", "not-a-package-at-all"]
    monkeypatch.setattr(metadata, "requires", lambda name: wanted)
    results = verdicts(healthy)
    assert red(results) == {"versions"}
    assert "not-a-package-at-all" in named(results, "versions").evidence


def test_versions_are_compared_as_numbers() -> None:
    def find(name: str) -> str:
        return "2.9.1+cpu"

    assert machine.versions({}, ["torch>=2.11"], find).status == "fail"
    assert machine.versions({}, ["torch>=2.9"], find).status == "ok"
    assert machine.versions({}, [], find, python="3.10.4").status == "fail"
    extra = machine.versions({}, ["no-such-thing; extra == 'wandb'"])
    assert extra.status == "ok"
    assert "without no-such-thing" in extra.evidence


@pytest.fixture
def uninstalled(tmp_path: Path, in_child: Callable[..., list[Result]]) -> Callable[[], Result]:
    """Return a function that examines a copy of the source tree, beside all packages but lockstep.

    What it returns is the verdict on versions; there is one on everything else, too.
    """
    tree, packages = tmp_path / "tree", tmp_path / "packages"
    shutil.copytree(ROOT / "src" / "lockstep", tree / "src" / "lockstep")
    shutil.copy(ROOT / "pyproject.toml", tree)
    packages.mkdir()
    for path in Path(pytest.__file__).parents[1].iterdir():
        if "lockstep" not in path.name:
            (packages / path.name).symlink_to(path)
    # -S leaves out the folder that they, and lockstep's own entry, really lie in.
    without_site = 'python=$1; shift; set -- "$python" -S "$@"'
    shell = f"export PYTHONPATH={tree / 'src'}:{packages}; {without_site}"

    def examine() -> Result:
        results = in_child(shell)
        assert len(results) == 24
        return named(results, "versions")

    return examine


def test_a_source_tree_that_is_not_installed(
    uninstalled: Callable[[], Result], tmp_path: Path
) -> None:
    told = uninstalled()
    assert told.status == "warn"
    assert told.evidence.endswith(f"; lockstep is not installed, but used from {tmp_path / 'tree'}")
    assert told.fix == "run pip install -e ."

    list(tmp_path.glob("packages/safetensors-*.dist-info"))[0].unlink()
    list(tmp_path.glob("packages/wandb-*.dist-info"))[0].unlink()
    told = uninstalled()
    assert told.status == "fail"
    assert told.evidence.startswith("missing or too old: safetensors; lockstep is not installed")


def test_a_source_tree_without_its_list_of_packages(
    uninstalled: Callable[[], Result], tmp_path: Path
) -> None:
    (tmp_path / "tree" / "pyproject.toml").unlink()
    told = uninstalled()
    assert told.status == "warn"
    assert "every extra" not in told.evidence, "nothing was looked for"
    assert "without its pyproject.toml" in told.evidence


# --- Limits of the machine, really lowered ------------------------------------------


def test_too_few_open_files(in_child: Callable[..., list[Result]]) -> None:
    results = in_child("ulimit -n 100")
    assert red(results) == {"open files"}
    assert named(results, "open files").fix == "run ulimit -n 65536"
    assert red(in_child("ulimit -n 20000")) == set()


@needs_mount
def test_a_tiny_shared_memory(in_child: Callable[..., list[Result]]) -> None:
    results = in_child("mount -t tmpfs -o size=64k none /dev/shm", batch_bytes=2**20)
    assert red(results) == {"shared memory"}
    assert "64.0 KB free" in named(results, "shared memory").evidence
    assert "6.0 MB for 6 batches" in named(results, "shared memory").evidence


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    assert machine.shared_memory(folder=tmp_path / "nothing").status == "fail"


# --- Variables, port, names, a real sum ---------------------------------------------


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0"}, "one is missing"),
        ({"RANK": "3", "WORLD_SIZE": "2"}, "rank 3 does not fit"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "need MASTER_ADDR"),
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "1",
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "4",
            },
            "disagree",
        ),
        ({"NCCL_TIMEOUT": "long"}, "not a time"),
    ],
)
def test_variables_that_contradict_each_other(
    env: dict[str, str], words: str, healthy: Examination
) -> None:
    command = Command("python", ("train.py",))
    results = verdicts(replace(healthy, env=env, command=command))
    assert red(results) == {"variables"}
    assert words in named(results, "variables").evidence


def test_a_launcher_replaces_what_another_left_behind(healthy: Examination) -> None:
    results = verdicts(replace(healthy, env={"RANK": "3", "WORLD_SIZE": "2"}))
    assert red(results) == set()
    assert "replaces RANK, WORLD_SIZE" in named(results, "variables").evidence


def test_kernels_that_wait_are_a_warning(healthy: Examination) -> None:
    results = verdicts(replace(healthy, env={"CUDA_LAUNCH_BLOCKING": "1"}))
    assert yellow(results) == {"variables"}


def test_a_port_that_is_taken(healthy: Examination) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        command = Command("torchrun", ("train.py",), 2, port=port)
        results = verdicts(replace(healthy, command=command))
        assert red(results) == {"port"}
        assert f"port {port} is taken by process {os.getpid()}" in named(results, "port").evidence
        assert "--master_port=" in named(results, "port").fix
        # Without a command it is only the port one might use, unless the environment says so.
        assert port_free(None, {"MASTER_PORT": str(port)}).status == "fail"
    assert red(verdicts(replace(healthy, command=command))) == set()


def test_a_port_that_only_guides_name_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        monkeypatch.setattr("lockstep.doctor.network.DEFAULT_PORT", holder.getsockname()[1])
        assert port_free(None, {}).status == "warn"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"GLOO_SOCKET_IFNAME": "nope0"}, "no such interface"),
        ({"NCCL_SOCKET_IFNAME": "=l"}, "no such interface"),
        ({"MASTER_ADDR": "no-such-host.invalid"}, "does not resolve"),
    ],
)
def test_a_network_that_is_not_there(env: dict[str, str], words: str, healthy: Examination) -> None:
    results = verdicts(replace(healthy, env=env, command=None, found=None))
    assert red(results) == {"network"}
    assert words in named(results, "network").evidence
    assert named(results, "all-reduce").status == "skip"


def test_a_host_that_does_not_know_itself(
    healthy: Examination, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert yellow(verdicts(healthy)) == {"network"}
    assert healthy.command is not None
    several = replace(healthy.command, num_nodes=2)
    assert red(verdicts(replace(healthy, command=several))) == {"network"}


def test_ranks_really_add_up_and_a_broken_group_is_named(
    without_gpu: Examination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def really() -> list[Result]:
        collective.main([str(tmp_path / "facts.json"), "2"])
        facts = json.loads((tmp_path / "facts.json").read_text())
        return verdicts(replace(without_gpu, facts=facts))

    results = really()
    assert red(results) == set()
    assert "2 ranks, gloo on cpu: 16.0 MB in " in named(results, "all-reduce").evidence

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    results = really()
    assert red(results) == {"all-reduce"}
    assert "nope0" in named(results, "all-reduce").evidence


def test_a_wrong_or_slow_sum(healthy: Examination) -> None:
    wrong = {**FAKE_FACTS, "sum": {**SUM, "is_right": False}}
    assert red(verdicts(replace(healthy, facts=wrong))) == {"all-reduce"}
    slow = {**FAKE_FACTS, "sum": {**SUM, "seconds": 60.0}}
    assert "all-reduce" in yellow(verdicts(replace(healthy, facts=slow)))


def test_the_list_is_the_list_of_the_page() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text()
    examination = Examination({}, facts=FAKE_FACTS, command=Command("python", ("t.py",)))
    found = checks.Findings(phase="script", unchecked="nothing")
    names = [result.name for result in verdicts(replace(examination, found=found))]
    assert len(names) == len(set(names)) == 24
    for name in names:
        assert f"`{name}`" in text, name
