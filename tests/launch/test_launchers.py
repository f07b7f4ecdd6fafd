"""Really started, in every way the guides show: who is who, and one real sum over all ranks."""

import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from meet import meet
from processes import BIN, HERE, LAUNCH, Fork, Start

from lockstep.dist.environment import group_timeout_s
from lockstep.errors import LaunchError
from lockstep.testing import free_port
from lockstep.world import World

MEET = HERE / "meet.py"
SLURM = {
    "SLURM_JOB_ID": "{job}",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "localhost",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "{job}",
}


def story(rank: int, size: int, launcher: str) -> dict[str, object]:
    """Return what a rank must say of itself on a machine without a GPU."""
    return {
        "rank": rank,
        "size": size,
        "local_rank": rank,
        "local_size": size,
        "device": "cpu" if not torch.cuda.is_available() else f"cuda:{rank}",
        "launcher": launcher,
        "sum": size * (size + 1) / 2,
    }


def stories(text: str) -> list[dict[str, object]]:
    """Return what the ranks said, in rank order, past what launchers print."""
    lines = [line.removeprefix("[rank1]:") for line in text.splitlines()]
    told = [json.loads(line) for line in lines if line.startswith("{")]
    return sorted(told, key=lambda one: one["rank"])


def two(launcher: str) -> list[dict[str, object]]:
    return [story(0, 2, launcher), story(1, 2, launcher)]


# --- Launchers ---------------------------------------------------------------


def test_plain_python_is_one_rank_without_a_group(start: Start) -> None:
    alone = start(sys.executable, MEET)
    assert alone.finish() == 0, alone.text
    assert stories(alone.text) == [story(0, 1, "python")]


ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
num_processes: 2
mixed_precision: "no"
use_cpu: false
"""
TORCHRUN = (BIN / "torchrun", "--nproc_per_node=2")
OLD_LAUNCH = (sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2")
LAUNCHERS = {
    "torchrun": (*TORCHRUN, "--master_port={port}"),
    "torchrun --standalone": (*TORCHRUN, "--standalone"),
    "torch.distributed.launch": (*OLD_LAUNCH, "--master_port={port}"),
    "torch.distributed.launch --use_env": (*OLD_LAUNCH, "--use_env", "--master_port={port}"),
    "accelerate launch": (
        *(BIN / "accelerate", "launch", "--config_file", "{folder}/accelerate.yaml"),
        "--main_process_port={port}",
    ),
    "lockstep": (*LAUNCH, "2"),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_starts_two_ranks_that_meet(name: str, tmp_path: Path, start: Start) -> None:
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
    port = free_port()
    words = [str(word).format(port=port, folder=tmp_path) for word in LAUNCHERS[name]]
    ranks = start(*words, MEET)
    assert ranks.finish() == 0, ranks.text
    launcher = "lockstep launch" if name == "lockstep" else "torchrun"
    assert stories(ranks.text) == two(launcher), ranks.text


def test_torchrun_below_our_launcher_is_torchrun(tmp_path: Path, start: Start) -> None:
    inner = [*map(str, TORCHRUN), "--standalone", str(MEET)]
    script = tmp_path / "below.py"
    script.write_text(
        "import os, subprocess\n"
        "del os.environ['LOCKSTEP_EXPECTED_RANKS']\n"
        f"subprocess.run({inner}, check=True)\n"
    )
    ranks = start(*LAUNCH, "1", script)
    assert ranks.finish() == 0, ranks.text
    assert stories(ranks.text) == two("torchrun"), ranks.text


def test_a_group_that_is_there_already_is_taken(start: Start) -> None:
    ranks = start(*TORCHRUN, "--standalone", MEET, "--group_first")
    assert ranks.finish() == 0, ranks.text
    assert stories(ranks.text) == two("torchrun"), ranks.text


def test_a_group_of_another_size_than_was_launched_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        with pytest.raises(LaunchError, match="rank 0 of 1, the launch variables say rank 1 of 2"):
            World.enter()
    finally:
        dist.destroy_process_group()


def test_the_five_variables_by_hand_start_two_ranks_that_meet(start: Start) -> None:
    port = str(free_port())
    both = [
        start(
            sys.executable,
            MEET,
            env={
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": port,
            },
        )
        for rank in range(2)
    ]
    assert [one.finish() for one in both] == [0, 0], both[0].text + both[1].text
    assert stories(both[0].text + both[1].text) == two("env")


@pytest.mark.parametrize(("variables", "launcher"), [(SLURM, "srun"), (OPEN_MPI, "mpi")])
def test_a_schedulers_own_variables_are_enough_to_meet(
    variables: dict[str, str], launcher: str, fork: Fork
) -> None:
    def tell() -> None:
        os.write(1, (json.dumps(meet()) + "\n").encode())

    # A real job id is nobody else's; here another session may run this very test.
    mine = {name: value.replace("{job}", str(os.getpid())) for name, value in variables.items()}
    ranks = fork(tell, tell, env=mine)
    assert ranks.exit_codes() == [0, 0], ranks.text
    assert stories(ranks.text) == two(launcher)


def test_the_planted_fault_a_launcher_that_starts_one_process_is_seen(start: Start) -> None:
    # `accelerate launch --cpu --num_processes 2` says two and starts one.
    one = start(BIN / "accelerate", "launch", "--cpu", "--num_processes", "2", MEET)
    assert one.finish() == 0, one.text
    assert len(stories(one.text)) == 1
    assert stories(one.text) != two("torchrun")


# --- Time limits and ports ---------------------------------------------------


def wait_in_vain() -> int:
    """Return the tenths of a second after which a rank gives up on one that does not come."""
    world = World.enter()
    if world.rank == 1:
        time.sleep(60)
        return 0
    began = time.monotonic()
    try:
        world.all_max(1)
    except RuntimeError:
        return round(10 * (time.monotonic() - began))
    return 0


def test_nccl_timeout_limits_how_long_a_collective_waits(fork: Fork) -> None:
    ranks = fork(
        wait_in_vain,
        wait_in_vain,
        env={
            "RANK": "{rank}",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "NCCL_TIMEOUT": "1.5",
        },
    )
    assert 12 <= ranks.exit_code(0) <= 250, ranks.text  # rank 1 is there for 60 s


def test_nccl_timeout_that_is_no_number_is_refused_before_anyone_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "NCCL_TIMEOUT": "half an hour"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(LaunchError, match="NCCL_TIMEOUT='half an hour'"):
        World.enter()


def test_nccl_timeout_may_say_for_ever(monkeypatch: pytest.MonkeyPatch, fork: Fork) -> None:
    """A time longer than `timedelta`, or torch's milliseconds, can hold becomes one they can."""

    def tell() -> None:
        os.write(1, (json.dumps(meet()) + "\n").encode())

    monkeypatch.setenv("NCCL_TIMEOUT", "1e300")
    assert timedelta(seconds=group_timeout_s(60)) > timedelta(days=365)
    ranks = fork(tell, tell)
    assert ranks.exit_codes() == [0, 0], ranks.text
    assert stories(ranks.text) == two("env")


def enter_as_first_of_two(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "NCCL_TIMEOUT": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    World.enter()


def test_a_taken_port_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LaunchError) as caught:
            enter_as_first_of_two(monkeypatch, port)
    assert f"127.0.0.1:{port}" in caught.value.problem
    assert "\n" not in caught.value.problem
    assert "MASTER_PORT" in caught.value.remedy


def test_a_rank_that_nobody_joins_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with pytest.raises(LaunchError, match="rank 0 of 2 could not join the process group") as caught:
        enter_as_first_of_two(monkeypatch, free_port())
    assert "GLOO_SOCKET_IFNAME" in caught.value.remedy, "it may have come, and not be seen"
    assert time.monotonic() - began < 20
