"""What surprised users of others under SLURM: variables that look like a rank and are none.

Each row is what a process really finds, by how it was started. `tests/dist/test_detect.py` has
the plain cases.
"""

from dataclasses import replace

import pytest

from lockstep.dist.detect import detect_launch
from lockstep.errors import LaunchError

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
# sbatch gives its script the numbers of a task, and there is none: the tokenspeed case.
SCRIPT = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}


def task(rank: int, size: int, per_node: str, node: int, local: int, **more: str) -> dict[str, str]:
    return {
        **JOB,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_STEP_NODELIST": "node[1-2]",
        **more,
    }


ALONE = {
    "a batch script of several tasks": {**SCRIPT, "SLURM_NTASKS": "8", "SLURM_NPROCS": "8"},
    "a batch script with ntasks-per-node": {**SCRIPT, "SLURM_NTASKS_PER_NODE": "4"},
    "a shell after salloc": {**JOB, "SLURM_NTASKS": "8"},
    "a shell that srun --pty opened": {
        **task(0, 1, "1", 0, 0, SLURM_NTASKS="8", SLURM_PTY_PORT="33333"),
        "SLURM_STEP_NODELIST": "node1",
    },
    "a job named bash": {**SCRIPT, "SLURM_JOB_NAME": "bash", "SLURM_NTASKS": "2"},
    "a job named interactive": {**JOB, "SLURM_JOB_NAME": "interactive", "SLURM_NTASKS": "2"},
}


@pytest.mark.parametrize("name", ALONE)
def test_no_task_of_a_step_is_one_process(name: str) -> None:
    launch = detect_launch(ALONE[name])
    assert (launch.rank, launch.size) == (0, 1)


@pytest.mark.parametrize("name", ["bash", "interactive", "train"])
def test_what_a_job_is_called_decides_nothing(name: str) -> None:
    launch = detect_launch(task(5, 8, "4(x2)", 1, 1, SLURM_JOB_NAME=name))
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (5, 8, 1, 4)


def test_a_step_smaller_than_the_job_counts_its_own_tasks() -> None:
    launch = detect_launch(task(1, 2, "1(x2)", 1, 0, SLURM_NTASKS="8", SLURM_NPROCS="8"))
    assert (launch.rank, launch.size, launch.local_size) == (1, 2, 1)


def test_ntasks_without_ntasks_per_node_is_as_good() -> None:
    launch = detect_launch(task(6, 7, "4,3", 1, 2, SLURM_NTASKS="7"))
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (6, 7, 2, 3)


def test_tasks_dealt_out_in_turn_keep_the_ranks_slurm_gave() -> None:
    # --distribution=cyclic: rank 3 is the second task of the second node.
    launch = detect_launch(task(3, 4, "2(x2)", 1, 1, SLURM_DISTRIBUTION="cyclic"))
    assert (launch.rank, launch.local_rank, launch.head) == (3, 1, "node1")


def test_a_gpu_bound_to_each_task_does_not_change_who_it_is() -> None:
    bound = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_PER_TASK": "1", "SLURM_STEP_GPUS": "3"}
    assert detect_launch(task(3, 4, "4", 0, 3, **bound)).local_rank == 3


def test_ranks_of_two_nodes_never_meet_only_themselves() -> None:
    # The pith-train case: a fallback to localhost, and each node waits for itself.
    heads = {detect_launch(task(n, 2, "1(x2)", n, 0)).head for n in (0, 1)}
    ports = {detect_launch(task(n, 2, "1(x2)", n, 0)).port for n in (0, 1)}
    assert heads == {"node1"}
    assert len(ports) == 1


def test_tasks_of_an_array_do_not_meet_each_other() -> None:
    def port(job_id: str, task_id: str) -> int | None:
        array = {"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": task_id}
        return detect_launch({**task(0, 2, "2", 0, 0, **array), "SLURM_JOB_ID": job_id}).port

    assert port("4711", "3") != port("4712", "0")


def test_a_job_queued_again_meets_where_it_met_before() -> None:
    first, again = (task(1, 2, "1(x2)", 1, 0, SLURM_RESTART_COUNT=n) for n in ("0", "1"))
    assert detect_launch(again).is_again
    assert replace(detect_launch(again), is_again=False) == detect_launch(first)


def test_a_size_that_an_sbatch_script_exported_for_torchrun_is_named() -> None:
    # `export WORLD_SIZE=...` copied from a guide, then plain srun python.
    with pytest.raises(LaunchError, match=r"WORLD_SIZE=8 .*SLURM_PROCID=1"):
        detect_launch(task(1, 8, "4(x2)", 0, 1, WORLD_SIZE="8", MASTER_ADDR="node1"))


def test_ranks_exported_in_the_script_contradict_those_of_the_step() -> None:
    exported = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    assert detect_launch(task(0, 8, "4(x2)", 0, 0, **exported)).rank == 0
    with pytest.raises(LaunchError, match="disagree"):
        detect_launch(task(1, 8, "4(x2)", 0, 1, **exported))
