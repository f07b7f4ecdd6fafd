"""On a real cluster of two nodes: a job trains, is warned, killed, cut off, and goes on."""

import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from cluster import Cluster, wait_until
from safetensors.torch import load
from submitted import (
    Submit,
    Submitted,
    events,
    processes_of,
    resumed_at,
    weights,
)
from train_steps import EVALUATED_STEP, NUM_STEPS, SAVE_EVERY, SlowTask, config

from lockstep.testing import run_ranks
from lockstep.trainer import fit

pytestmark = pytest.mark.timeout(240)


def train_here(folder: Path, num_ranks: int) -> bytes:
    """Return the weights of the same run on processes of this machine, never stopped."""
    run_ranks(num_ranks, fit, SlowTask(), config(str(folder)))
    return weights(folder, NUM_STEPS)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the weights of a run on two ranks that nobody disturbed."""
    return train_here(tmp_path_factory.mktemp("uninterrupted"), 2)


def check_whole(job: Submitted, uninterrupted: bytes) -> None:
    """Check that a run is what it would have been, and that nothing of it is left running."""
    assert "done at step 30" in job.text
    assert weights(job.folder / "run", NUM_STEPS) == uninterrupted
    wait_until(lambda: not processes_of(job.folder), "every process has ended", 10)
    assert not list(job.folder.glob("lockstep_jobs/*.first"))


def test_two_nodes_of_two_processes_train_what_one_process_trains(
    submit: Submit, tmp_path: Path
) -> None:
    job = submit("--processes-per-node", "2", "train_steps.py", "run")
    assert job.finish() == 0, job.text
    check_whole(job, train_here(tmp_path / "four", 4))
    assert "tiny on 4 x cpu (started by srun, gloo)" in job.text
    first = next(one for one in events(tmp_path / "run") if one["event"] == "step")
    print(f"submit to first step: {float(str(first['time'])) - job.began:.1f} s")
    assert {path.name for path in (tmp_path / "lockstep_jobs").iterdir()} == {
        f"train_steps_{job.job_id}.sh",
        f"train_steps_{job.job_id}.log",
    }

    alone = load(train_here(tmp_path / "alone", 1))
    for name, value in load(weights(tmp_path / "run", NUM_STEPS)).items():
        torch.testing.assert_close(value, alone[name], rtol=1e-12, atol=1e-13)


def test_warned_of_the_time_limit_it_saves_and_queues_itself_again_once(
    cluster: Cluster, submit: Submit, uninterrupted: bytes
) -> None:
    job = submit("train_steps.py", "run", "0.1")
    job.wait_for_step(6)
    cluster.ask("scancel", "--signal=USR1", job.job_id)  # as SLURM does: to the steps of the job
    assert job.finish() == 0, job.text
    check_whole(job, uninterrupted)
    assert job.text.count("saved before the time limit; the job is back in the queue") == 1
    (step,) = resumed_at(job.folder / "run")
    stops = [one for one in events(job.folder / "run") if one["event"] == "stop"]
    assert [(one["step"], one["exit_code"]) for one in stops] == [(step, 138)]
    assert step % SAVE_EVERY or step >= 6


def test_warned_in_a_long_evaluation_it_saves_and_begins_with_it_when_it_returns(
    cluster: Cluster, submit: Submit, uninterrupted: bytes
) -> None:
    """The evaluation would take four minutes; what it is warned by leaves it less."""
    job = submit("train_steps.py", "run", "2", "evaluation")
    job.wait_for_step(EVALUATED_STEP)
    cluster.ask("scancel", "--signal=USR1", job.job_id)
    assert job.finish() == 0, job.text
    check_whole(job, uninterrupted)
    assert resumed_at(job.folder / "run") == [EVALUATED_STEP]
    written = events(job.folder / "run")
    stops = [one for one in written if one["event"] == "stop"]
    assert [(one["step"], one["exit_code"]) for one in stops] == [(EVALUATED_STEP, 138)]
    kinds = [one["event"] for one in written]
    assert "evaluation" not in kinds[: kinds.index("resume")]
    assert kinds[kinds.index("resume") + 1] == "evaluation"


def test_requeued_by_an_operator_it_goes_on(
    cluster: Cluster, submit: Submit, uninterrupted: bytes
) -> None:
    job = submit("train_steps.py", "run", "0.1", "none", "discard")
    job.wait_for_step(6)
    cluster.ask("scontrol", "requeue", job.job_id)
    assert job.finish() == 0, job.text
    check_whole(job, uninterrupted)
    assert len(resumed_at(job.folder / "run")) == 1
    assert "queue" not in job.text.replace("waits in the queue", "")


def test_cancelled_it_ends_and_submitted_again_it_goes_on(
    cluster: Cluster, submit: Submit, uninterrupted: bytes
) -> None:
    job = submit("train_steps.py", "run", "0.1")
    job.wait_for_step(6)
    began = time.monotonic()
    cluster.ask("scancel", job.job_id)
    assert job.finish() not in (0, 138), job.text
    print(f"scancel to the end of submit: {time.monotonic() - began:.1f} s")
    assert "CANCELLED" in job.text
    wait_until(lambda: not processes_of(job.folder), "every process has ended", 10)
    again = submit("train_steps.py", "run")
    assert again.finish() == 0, again.text
    check_whole(again, uninterrupted)
    assert len(resumed_at(again.folder / "run")) == 1


def test_a_killed_rank_is_started_again_with_the_others(
    cluster: Cluster, submit: Submit, uninterrupted: bytes
) -> None:
    job = submit("train_steps.py", "run", "0.1", "none", "discard")
    job.wait_for_step(6)
    rank = f"{sys.executable} -m lockstep.launch.worker train_steps.py run"
    assert cluster.kill_on("node2", signal.SIGKILL, rank) == 1
    assert job.finish() == 0, job.text
    check_whole(job, uninterrupted)
    assert "a rank ended with exit code 137; restarting all ranks (try 2 of 3)" in job.text
    assert len(resumed_at(job.folder / "run")) == 1


def test_a_lost_node_is_waited_for_and_the_job_goes_on(
    cluster: Cluster, submit: Submit, uninterrupted: bytes
) -> None:
    node = "node1"  # where the first rank is, and the store through which ranks meet
    job = submit("train_steps.py", "run", "0.1")
    job.wait_for_step(6)
    cluster.crash(node)
    cluster.wait_for_nodes("down", (node,))  # SLURM has found out by itself
    cluster.boot(node)
    assert job.finish() == 0, job.text
    check_whole(job, uninterrupted)
    assert len(resumed_at(job.folder / "run")) == 1


def test_a_request_that_cannot_work_is_not_tried_again(submit: Submit) -> None:
    job = submit("train_steps.py", "run", "0", "refused")
    assert job.finish() == 2, job.text
    assert job.text.count("the planted folder cannot be read") == 1
    assert "restarting" not in job.text
    assert f"job {job.job_id} ended: FAILED, exit code 2" in job.text


def test_a_bug_that_comes_back_ends_the_job_however_often_it_is_queued(
    cluster: Cluster, submit: Submit
) -> None:
    job = submit("--restarts", "9", "train_steps.py", "run", "0", "bug")
    job.wait_for_text("restarting all ranks (try 2 of 10)")
    cluster.ask("scontrol", "requeue", job.job_id)
    assert job.finish() == 4, job.text
    assert "the same error 3 times in the same place; not trying again" in job.text
    assert f"job {job.job_id} ended: FAILED, exit code 4" in job.text
    said = (job.folder / "lockstep_jobs" / f"train_steps_{job.job_id}.errors").read_text()
    assert said == "ZeroDivisionError: the planted bug on rank 1, after step 10\n" * 3
    assert job.text.count("Traceback (most recent call last):") == 3, "the first rank's, each time"


def test_a_job_that_goes_first_takes_its_place_and_then_it_goes_on(
    cluster: Cluster, submit: Submit, uninterrupted: bytes
) -> None:
    job = submit("--sbatch", "exclusive", "train_steps.py", "run", "0.1")
    job.wait_for_step(6)
    urgent = ("-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null")
    cluster.ask("sbatch", *urgent, "--wrap", "true")
    assert job.finish() == 0, job.text
    check_whole(job, uninterrupted)
    assert "saved: preempted by another job; the job is back in the queue" in job.text
    stops = [one for one in events(job.folder / "run") if one["event"] == "stop"]
    assert [one["exit_code"] for one in stops] == [143]


# --- What the user asks wrongly -------------------------------------------------


def test_an_unknown_partition_is_refused_in_slurms_own_words(
    cluster: Cluster, submit: Submit
) -> None:
    job = submit("--partition", "nowhere", "train_steps.py", "run")
    assert job.finish() == 2, job.text
    assert job.text.startswith("lockstep: SLURM refuses the job: invalid partition specified")
    assert cluster.ask("squeue", "-h") == ""
