"""Every launcher's variables are understood, and what contradicts itself is refused by name."""

import re
from typing import Any

import pytest
import torch

from lockstep.dist.detect import Launch, _first_host, check_size, detect_launch
from lockstep.dist.environment import group_timeout_s, launched_rank
from lockstep.errors import LaunchError
from lockstep.world import choose_device

MEETING = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29400"}
BY_HAND = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **MEETING}
TORCHRUN = {**BY_HAND, "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "node[1-2]",
}
SRUN = {
    **BATCH_SCRIPT,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[1-2]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


# --- The size that was asked for ---------------------------------------------


def test_a_group_of_the_size_that_was_asked_for_is_accepted() -> None:
    check_size(detect_launch(TORCHRUN), {"LOCKSTEP_EXPECTED_RANKS": "8"})
    check_size(detect_launch(TORCHRUN), {})


@pytest.mark.parametrize("asked", ["16", "eight"])
def test_a_group_of_another_size_is_refused_with_both_numbers(asked: str) -> None:
    said = rf"the group has 8 ranks, and {asked} were asked for"
    with pytest.raises(LaunchError, match=said):
        check_size(detect_launch(TORCHRUN), {"LOCKSTEP_EXPECTED_RANKS": asked})


def test_a_helper_that_a_rank_starts_may_be_alone() -> None:
    check_size(detect_launch({}), {"LOCKSTEP_EXPECTED_RANKS": "8"})


def test_srun_on_one_node_meets_on_loopback() -> None:
    one_node = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    one_node |= {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}
    assert detect_launch(one_node).head == "localhost"
    assert detect_launch(SRUN).head == "node1"


# --- Each launcher -----------------------------------------------------------


def test_plain_python_is_one_process() -> None:
    assert detect_launch({}) == Launch(0, 1, 0, 1, "localhost", None, "python")


def test_torchrun_is_taken_at_its_word() -> None:
    said = Launch(5, 8, 1, 4, "10.0.0.7", 29400, "torchrun", "none", has_agent=True)
    assert detect_launch(TORCHRUN) == said


def test_our_launcher_is_named_and_a_torchrun_below_it_too() -> None:
    ours = detect_launch({**TORCHRUN, "LOCKSTEP_LAUNCH_ID": TORCHRUN["TORCHELASTIC_RUN_ID"]})
    assert (ours.launcher, ours.has_agent) == ("lockstep launch", True)
    below = detect_launch({**TORCHRUN, "LOCKSTEP_LAUNCH_ID": "another"})
    assert (below.launcher, below.has_agent) == ("torchrun", True)


def test_launches_of_torchrun_that_have_no_id_are_told_apart_on_one_machine() -> None:
    def job(launch: str, attempt: int, rank: int, size: int = 2) -> str:
        file = f"/tmp/torchelastic_{launch}/none_{launch}/attempt_{attempt}/{rank}/error.json"
        told = {"TORCHELASTIC_ERROR_FILE": file, "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": str(size)}
        return detect_launch({**TORCHRUN, **told, "RANK": str(rank), "LOCAL_RANK": str(rank)}).job

    assert job("a", 0, 0) == job("a", 0, 1) == job("a", 1, 0) != job("b", 0, 0)
    assert job("a", 0, 0, size=4) == job("b", 0, 0, size=4), "machines have logs of their own"


def test_the_five_variables_by_hand_are_enough() -> None:
    assert detect_launch(BY_HAND) == Launch(5, 8, 1, 8, "10.0.0.7", 29400, "env")


def test_by_hand_the_local_rank_may_be_left_out() -> None:
    four = {name: BY_HAND[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert detect_launch(four).local_rank == 5


def test_srun_needs_no_variable_of_ours() -> None:
    launch = detect_launch(SRUN)
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (3, 4, 1, 2)
    assert (launch.head, launch.launcher) == ("node1", "srun")


def test_all_tasks_of_a_step_derive_the_same_port_and_two_jobs_differ() -> None:
    def port(**changed: str) -> int | None:
        return detect_launch({**SRUN, **changed}).port

    assert port(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0") == port()
    assert port(SLURM_JOB_ID="4712") != port()
    assert port(SLURM_STEP_ID="1") != port()
    assert 20_000 <= (port() or 0) < 32_000  # the kernel hands out ports from 32768 on


def test_a_head_and_port_the_user_set_win_over_derived_ones() -> None:
    launch = detect_launch({**SRUN, **MEETING})
    assert (launch.head, launch.port) == ("10.0.0.7", 29400)


def test_a_batch_script_without_srun_is_one_process() -> None:
    assert detect_launch(BATCH_SCRIPT).size == 1


def test_torchrun_below_srun_knows_its_own_ranks_better() -> None:
    launch = detect_launch({**SRUN, **TORCHRUN})
    assert (launch.rank, launch.size, launch.launcher) == (5, 8, "torchrun")


def test_the_shell_of_an_allocation_is_a_step_that_proves_nothing() -> None:
    shell = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert detect_launch(shell).size == 1
    assert detect_launch({**shell, **BY_HAND}).rank == 5
    assert detect_launch({**shell, **OPEN_MPI, **MEETING}).rank == 1


def test_mpirun_whose_daemons_are_tasks_of_a_step_counts_its_own_processes() -> None:
    launch = detect_launch({**SRUN, **OPEN_MPI, **MEETING})
    assert (launch.rank, launch.size, launch.launcher) == (1, 2, "mpi")


def test_srun_that_also_sets_the_mpi_variables_is_still_srun() -> None:
    launch = detect_launch({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"})
    assert (launch.rank, launch.head, launch.launcher) == (3, "node1", "srun")


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH], ids=["Open MPI", "MPICH"])
def test_mpi_variables_are_understood(variables: dict[str, str]) -> None:
    launch = detect_launch({**variables, **MEETING})
    assert launch == Launch(1, 2, 1, 2, "10.0.0.7", 29400, "mpi")


def test_open_mpi_on_one_host_finds_its_own_meeting_point() -> None:
    launch = detect_launch({**OPEN_MPI, "OMPI_MCA_ess_base_jobid": "3141599233"})
    assert launch.head == "localhost"
    assert launch.port is not None


@pytest.mark.parametrize(
    ("environment", "argument", "local_rank"),
    [
        ({}, None, 0),
        ({}, 1, 1),
        ({}, -1, 0),
        (BY_HAND, 3, 1),
        ({n: v for n, v in BY_HAND.items() if n != "LOCAL_RANK"}, 2, 2),
        ({n: v for n, v in BY_HAND.items() if n != "LOCAL_RANK"}, -1, 5),
    ],
)
def test_the_argument_counts_only_where_the_environment_is_silent(
    environment: dict[str, str], argument: int | None, local_rank: int
) -> None:
    assert detect_launch(environment, argument).local_rank == local_rank


# --- Contradictions ----------------------------------------------------------

CONTRADICTIONS: dict[str, tuple[dict[str, str], str]] = {
    "rank without size": ({"RANK": "0"}, "RANK=0"),
    "size without rank": ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
    "size without rank below srun": ({**SRUN, "WORLD_SIZE": "2"}, "WORLD_SIZE=2 .*SLURM_PROCID=3"),
    "rank as large as size": ({**BY_HAND, "RANK": "8"}, "RANK=8 WORLD_SIZE=8"),
    "no processes": ({**BY_HAND, "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
    "left-over size below srun": (
        {**SRUN, "RANK": "0", "WORLD_SIZE": "2", **MEETING},
        "RANK=0 WORLD_SIZE=2 .*SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4",
    ),
    "two kinds of MPI": ({**OPEN_MPI, **MPICH, "PMI_RANK": "0", **MEETING}, "PMI_RANK=0"),
    "local rank as large as local size": (
        {**TORCHRUN, "LOCAL_RANK": "4"},
        "LOCAL_RANK=4 LOCAL_WORLD_SIZE=4",
    ),
    "no address": ({**BY_HAND, "MASTER_ADDR": ""}, "MASTER_PORT=29400"),
    "no port": ({n: v for n, v in BY_HAND.items() if n != "MASTER_PORT"}, "MASTER_ADDR=10.0.0.7"),
    "a port that is a word": ({**BY_HAND, "MASTER_PORT": "auto"}, "MASTER_PORT=auto"),
    "a port that is too large": ({**BY_HAND, "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
    "a port that is a word, alone": (
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "auto"},
        "MASTER_PORT=auto",
    ),
    "MPI on several hosts": ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"} | {}, "OMPI_COMM"),
    "rank is a word": ({**BY_HAND, "RANK": "first"}, "RANK='first'"),
    "rank is negative": ({**BY_HAND, "RANK": "-1"}, "RANK='-1'"),
    "rank is empty": ({**BY_HAND, "RANK": ""}, "RANK=''"),
    "a task number with a tail": ({**SRUN, "SLURM_PROCID": "3x"}, "SLURM_PROCID='3x'"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused_with_its_variables_and_a_remedy(name: str) -> None:
    variables, listed = CONTRADICTIONS[name]
    with pytest.raises(LaunchError) as caught:
        detect_launch(variables)
    assert re.search(listed, caught.value.problem), caught.value.problem
    assert re.search(r"torchrun|unset", caught.value.remedy)


def test_a_process_with_contradicting_variables_speaks_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "3")
    assert launched_rank() == 0
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29400")
    assert launched_rank() == 3


# --- SLURM's spellings -------------------------------------------------------


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node3", "node3"),
        ("node3,node4", "node3"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[12,14]", "gpu12"),
        ("login1,gpu[07-09]", "login1"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("n[1-2]-ib0", "n1-ib0"),
        ("node-a.cluster.org", "node-a.cluster.org"),
        ("", "localhost"),
    ],
)
def test_the_first_host_of_a_node_list_is_where_ranks_meet(nodelist: str, host: str) -> None:
    assert _first_host(nodelist) == host


@pytest.mark.parametrize(
    ("tasks_per_node", "node", "local_rank", "local_size"),
    [("2(x2)", "1", "1", 2), ("1,3", "1", "2", 3), ("3,1", "1", "0", 1), ("1(x2),2", "2", "1", 2)],
)
def test_nodes_of_a_step_may_hold_different_numbers_of_tasks(
    tasks_per_node: str, node: str, local_rank: str, local_size: int
) -> None:
    variables = {
        **SRUN,
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "SLURM_NODEID": node,
        "SLURM_LOCALID": local_rank,
    }
    assert detect_launch(variables).local_size == local_size


# --- Devices and time --------------------------------------------------------


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("gpus", "local_rank", "device"), [(0, 1, "cpu"), (1, 3, "cuda:0"), (4, 3, "cuda:3")]
)
def test_a_rank_takes_its_local_rank_modulo_the_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, local_rank: int, device: str
) -> None:
    pretend_gpus(monkeypatch, gpus)
    assert str(choose_device(Launch(local_rank=local_rank))) == device


def test_the_cpu_may_be_asked_for_and_a_missing_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpus(monkeypatch, 2)
    assert str(choose_device(Launch(), "cpu")) == "cpu"
    pretend_gpus(monkeypatch, 0)
    with pytest.raises(LaunchError, match="no GPU"):
        choose_device(Launch(), "cuda")


def test_nccl_timeout_in_seconds_wins_over_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    assert group_timeout_s(1800) == 1800
    monkeypatch.setenv("NCCL_TIMEOUT", "")
    assert group_timeout_s(1800) == 1800
    monkeypatch.setenv("NCCL_TIMEOUT", "90.5")
    assert group_timeout_s(1800) == 90.5


@pytest.mark.parametrize("text", ["30min", "nan", "inf", "0", "-1"])
def test_nccl_timeout_that_is_no_time_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("NCCL_TIMEOUT", text)
    with pytest.raises(LaunchError, match=f"NCCL_TIMEOUT='{text}'"):
        group_timeout_s(1800)


def test_the_representation_of_a_world_names_rank_device_and_host() -> None:
    from lockstep.testing import FakeWorld

    words: Any = repr(FakeWorld(rank=1, size=2))
    assert words.startswith("World(rank 1 of 2, local rank 1 of 2, cpu, fake on ")
