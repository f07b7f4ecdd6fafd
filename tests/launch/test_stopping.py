"""Asked to stop, a run stops on all ranks at one step, saved; asked twice, it leaves at once."""

import contextlib
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from evaluate_slowly import STEP as EVALUATED_STEP
from processes import (
    BIN,
    HERE,
    LAUNCH,
    LAUNCH_AFRESH,
    Fork,
    Ranks,
    Start,
    Started,
    last_step,
    wait_until,
)
from train_slowly import TIMEOUT_S as SLOW_RUN_TIMEOUT_S
from train_slowly import main

from lockstep.checkpoint import CheckpointStore
from lockstep.launch.local import _held_back
from lockstep.launch.worker import work
from lockstep.observe.events import read_events
from lockstep.signals import EXIT_NOT_SAVED

TRAIN = HERE / "train_slowly.py"
EVALUATE = HERE / "evaluate_slowly.py"


def slow_run(folder: Path, *arguments: str) -> partial[None]:
    return partial(main, [str(folder), *arguments])


def wait_for_step(folder: Path, step: int, ranks: Ranks | Started) -> None:
    try:
        wait_until(lambda: last_step(folder) >= step, f"step {step}")
    except TimeoutError as late:
        pytest.fail(f"{late}:\n{ranks.text}")


def saved_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, all of it checked against its digests."""
    checkpoint, rejected = CheckpointStore(folder / "checkpoints", recipe="tiny").latest()
    assert rejected == []
    assert checkpoint is not None
    assert {"model", "optimizer", "progress"} <= set(checkpoint.parts)
    for part in checkpoint.parts:
        checkpoint.load(part)
    return checkpoint.step


# --- Signals to one rank -----------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)]
)
def test_a_signal_to_one_rank_stops_all_at_the_same_step_saved(
    number: signal.Signals, code: int, tmp_path: Path, fork: Fork
) -> None:
    ranks = fork(slow_run(tmp_path), slow_run(tmp_path))
    wait_for_step(tmp_path, 2, ranks)
    ranks.send(1, number)
    assert ranks.exit_codes() == [code, code], ranks.text
    steps = [last_step(tmp_path, rank) for rank in range(2)]
    assert steps == [saved_step(tmp_path)] * 2
    for rank in range(2):
        stop = next(e for e in read_events(tmp_path, rank, raw=True) if e["event"] == "stop")
        assert (stop["reason"], stop["exit_code"]) == (number.name, code)
    assert "Traceback" not in ranks.text


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, fork: Fork) -> None:
    first = fork(slow_run(tmp_path), slow_run(tmp_path))
    wait_for_step(tmp_path, 2, first)
    first.send(0, signal.SIGTERM)
    assert first.exit_codes() == [143, 143]
    stopped_at = saved_step(tmp_path)
    second = fork(slow_run(tmp_path), slow_run(tmp_path))
    wait_for_step(tmp_path, stopped_at + 2, second)
    second.send(0, signal.SIGTERM)
    assert second.exit_codes() == [143, 143], second.text
    resumed = [e for e in read_events(tmp_path, raw=True) if e["event"] == "resume"]
    assert [event["step"] for event in resumed] == [stopped_at]


def test_an_echo_within_a_second_counts_as_one_signal(tmp_path: Path, fork: Fork) -> None:
    ranks = fork(slow_run(tmp_path, "0.3"), slow_run(tmp_path, "0.3"))
    wait_for_step(tmp_path, 1, ranks)
    for _ in range(3):
        for rank in range(2):
            ranks.send(rank, signal.SIGINT)
        time.sleep(0.02)
    assert ranks.exit_codes() == [130, 130], ranks.text
    assert saved_step(tmp_path) == last_step(tmp_path)


def impatient_run(folder: Path) -> None:
    os.environ["NCCL_TIMEOUT"] = "15"
    main([str(folder)])


def test_a_second_signal_leaves_at_once_out_of_a_collective(tmp_path: Path, fork: Fork) -> None:
    ranks = fork(partial(impatient_run, tmp_path), partial(impatient_run, tmp_path))
    wait_for_step(tmp_path, 2, ranks)
    ranks.send(1, signal.SIGSTOP)
    step = last_step(tmp_path)
    time.sleep(0.5)
    assert last_step(tmp_path) <= step + 1  # rank 0 waits for rank 1, in a collective
    ranks.send(0, signal.SIGTERM)
    time.sleep(2.5)  # the second must come more than a second after the first was heard
    assert ranks.processes[0].is_alive()  # asked once, it still waits
    ranks.send(0, signal.SIGTERM)
    assert ranks.exit_code(0) == EXIT_NOT_SAVED  # nothing but a second signal ends with this
    assert psutil.Process(ranks.processes[1].pid).status() == psutil.STATUS_STOPPED
    said = (
        "lockstep: stopped by SIGTERM without saving: there is no checkpoint yet, and the run, at"
    )
    assert said in ranks.text
    # The other one finds the first gone, and ends by itself too. Gloo misses it in some of a
    # hundred cases (docs/log.md): then the collective's own limit ends it.
    ranks.send(1, signal.SIGCONT)
    assert ranks.exit_code(1, 30) != 0


# --- Signals to everyone -----------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_loader_workers_do_not_die_before_the_run_has_saved(
    number: signal.Signals, tmp_path: Path, fork: Fork
) -> None:
    """A launcher signals a rank's whole process group, its loader workers included."""

    def own_group() -> None:
        os.setpgid(0, 0)
        main([str(tmp_path), "0.05", "1"])

    ranks = fork(own_group, own_group)
    wait_for_step(tmp_path, 2, ranks)
    groups = [process.pid for process in ranks.processes if process.pid is not None]
    assert all(len(psutil.Process(pid).children()) == 1 for pid in groups)
    workers = [worker for pid in groups for worker in psutil.Process(pid).children()]
    for pid in groups:
        os.killpg(pid, number)
    try:
        assert ranks.exit_codes() == [{2: 130, 15: 143}[number]] * 2, ranks.text
        assert saved_step(tmp_path) == last_step(tmp_path) == last_step(tmp_path, 1)
        assert psutil.wait_procs(workers, timeout=7)[1] == []
    finally:
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()


@pytest.mark.parametrize("by", ["torchrun", "lockstep"])
def test_ctrl_c_at_the_terminal_saves_and_leaves_no_one_behind(
    by: str, tmp_path: Path, start: Start
) -> None:
    launcher = [BIN / "torchrun", "--standalone", "--nproc_per_node=2"]
    if by == "lockstep":
        launcher = [*LAUNCH, "2"]
    ranks = start(*launcher, TRAIN, tmp_path, "0.05", "1")
    wait_for_step(tmp_path, 2, ranks)
    assert len(ranks.look_around()) >= 4  # two ranks, each with a loader worker
    os.killpg(ranks.pid, signal.SIGINT)
    code = ranks.finish()
    assert code == (130 if by == "lockstep" else 1), ranks.text
    assert saved_step(tmp_path) == last_step(tmp_path) == last_step(tmp_path, 1)
    assert ranks.orphans() == []


@pytest.mark.parametrize(
    ("number", "reaches_all"),
    [
        (signal.SIGTERM, False),
        (signal.SIGUSR1, True),
        (signal.SIGHUP, True),
        (signal.SIGQUIT, False),
        (signal.SIGQUIT, True),
    ],
)
def test_our_launcher_passes_a_signal_on_and_keeps_its_exit_code(
    number: signal.Signals, reaches_all: bool, tmp_path: Path, start: Start
) -> None:
    """SLURM signals every process of a step, and so does a terminal that is closed."""
    ranks = start(*LAUNCH, "2", TRAIN, tmp_path, "0.05", "1")
    wait_for_step(tmp_path, 2, ranks)
    for process in ranks.look_around() if reaches_all else ():
        process.send_signal(number)
    os.kill(ranks.pid, number)
    assert ranks.finish() == 128 + number, ranks.text
    assert "\ndone at step" in ranks.text
    assert saved_step(tmp_path) == last_step(tmp_path)
    assert ranks.orphans() == []
    assert "Traceback" not in ranks.text
    assert "resource_tracker" not in ranks.text


@pytest.mark.parametrize("whom", ["the launcher", "one rank"])
def test_a_stop_in_a_long_evaluation_saves_first_and_evaluates_on_resume(
    whom: str, tmp_path: Path, start: Start
) -> None:
    ranks = start(*LAUNCH, "2", EVALUATE, tmp_path)  # 25 s of evaluation
    marks = [tmp_path / f"evaluating_{rank}" for rank in range(2)]
    wait_until(lambda: all(mark.exists() and mark.read_text() for mark in marks), "evaluating")
    ranks.look_around()
    os.kill(ranks.pid if whom == "the launcher" else int(marks[1].read_text()), signal.SIGTERM)
    assert ranks.finish() == 143, ranks.text
    assert ranks.orphans() == []
    assert saved_step(tmp_path) == EVALUATED_STEP
    assert f"evaluation at step {EVALUATED_STEP} interrupted: a resume begins with it" in ranks.text
    assert [e for e in read_events(tmp_path, raw=True) if e["event"] == "evaluation"] == []

    again = start(*LAUNCH, "2", EVALUATE, tmp_path, "0")
    assert again.finish() == 0, again.text
    assert f"evaluating first: the evaluation at step {EVALUATED_STEP} is missing" in again.text
    assert [e["step"] for e in read_events(tmp_path) if e["event"] == "evaluation"] == [
        EVALUATED_STEP,
        EVALUATED_STEP + 1,
    ]


def test_a_signal_to_a_rank_that_was_only_just_forked_is_not_lost(
    tmp_path: Path, fork: Fork
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(7)  # it trains, for as long as its launcher is patient")

    def begin() -> None:
        os.environ |= {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), "LOCAL_RANK": "1"}
        with _held_back(["SIGTERM"]):  # as the process that forks ranks was started
            os.kill(os.getpid(), signal.SIGTERM)
            work(str(script))

    ranks = fork(begin)
    assert ranks.exit_codes() == [-signal.SIGTERM], ranks.text


def test_our_launcher_lives_through_the_hangup_that_nohup_is_for(
    tmp_path: Path, start: Start
) -> None:
    words = (HERE / "train_and_save.py", tmp_path, "--step_s=0.05")
    ranks = start("nohup", sys.executable, "-c", LAUNCH_AFRESH, *words)
    wait_for_step(tmp_path, 2, ranks)
    os.killpg(ranks.pid, signal.SIGHUP)
    assert ranks.finish(60) == 0, ranks.text
    assert saved_step(tmp_path) == 24


# --- Failures ----------------------------------------------------------------


def test_one_failing_rank_ends_all_within_seconds(tmp_path: Path, start: Start) -> None:
    ranks = start(*LAUNCH, "2", TRAIN, tmp_path, "0.01", "0", "3")
    wait_for_step(tmp_path, 3, ranks)
    ranks.look_around()
    assert ranks.finish(SLOW_RUN_TIMEOUT_S / 2) == 1, ranks.text  # nobody waited in a collective
    assert ranks.orphans() == []
    assert "ZeroDivisionError: the planted fault" in ranks.text


def test_an_error_on_all_ranks_is_said_once_without_a_traceback(
    tmp_path: Path, start: Start
) -> None:
    ranks = start(*LAUNCH, "2", TRAIN, tmp_path, "refused")
    assert ranks.finish() == 2, ranks.text
    assert ranks.text.count("the planted folder cannot be read") == 1, ranks.text
    assert "lockstep: the planted folder cannot be read\n  try: another folder\n" in ranks.text
    assert "Traceback" not in ranks.text


# --- One run per folder ------------------------------------------------------


def test_a_folder_in_use_is_refused_and_the_run_in_it_goes_on(tmp_path: Path, fork: Fork) -> None:
    first = fork(slow_run(tmp_path))
    wait_for_step(tmp_path, 2, first)
    second = fork(slow_run(tmp_path))
    assert second.exit_codes() == [2], second.text
    assert f"in use by process {first.processes[0].pid} on " in second.text
    assert "Traceback" not in second.text
    wait_for_step(tmp_path, last_step(tmp_path) + 3, first)
    first.send(0, signal.SIGTERM)
    assert first.exit_codes() == [143], first.text


def test_after_kill_9_the_next_run_starts_at_once_and_resumes(tmp_path: Path, fork: Fork) -> None:
    def saving() -> None:
        from train_slowly import SlowTask, config

        from lockstep_recipes.command import train

        task = SlowTask(0.02)
        train(lambda argv: (task, config(str(tmp_path), checkpoint={"every_steps": 2})), [])

    first = fork(saving)
    wait_for_step(tmp_path, 5, first)
    first.send(0, signal.SIGKILL)
    assert first.exit_codes() == [-signal.SIGKILL]
    killed_at = last_step(tmp_path)
    second = fork(saving)
    wait_for_step(tmp_path, killed_at + 2, second)
    second.send(0, signal.SIGTERM)
    assert second.exit_codes() == [143], second.text
    resumed = [e for e in read_events(tmp_path, raw=True) if e["event"] == "resume"]
    assert [event["step"] for event in resumed] >= [killed_at - killed_at % 2 - 2]
    assert json.loads((tmp_path / "config.json").read_text())["world_size"] == 1
