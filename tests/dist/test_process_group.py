"""The life of the process group: made once, used by every run of a process, left at its end."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep import LockstepError, RunConfig, World, fit
from lockstep.errors import DataError
from lockstep.task import Context, PartialLoss
from lockstep.testing import TinyTask, free_port, run_ranks

LIMIT_S = 100.0


def config_for(folder: Path, **more: Any) -> RunConfig:
    settings = {"epochs": 1, "batch": {"batch_size": 4}, "timeout_s": 20, **more}
    return RunConfig(output_dir=str(folder), device="cpu", **settings)


class NoData(TinyTask):
    """Has no training data: refused on all ranks, in the same words."""

    def train_data(self) -> Any:
        raise DataError("there are no training data", "try: another folder")


class Mistaken(TinyTask):
    """A bug in the loss: every rank meets it by itself, and nobody else knows."""

    def loss(self, model: nn.Module, batch: Any, context: Context) -> PartialLoss:
        if context.step == 1:
            raise ValueError("a bug")
        return super().loss(model, batch, context)


def weights_after(*tasks: TinyTask, folder: Path) -> list[float | str]:
    """Train each task in turn; return what became of each."""
    found: list[float | str] = []
    for number, task in enumerate(tasks):
        try:
            fit(task, config_for(folder / str(number)))
        except (LockstepError, ValueError) as error:
            found.append(str(error).splitlines()[0])
        else:
            found.append(f"trained {task.num_samples} samples")
    return found


def in_turn(folder: Path) -> tuple[list[float | str], bool]:
    tasks = TinyTask(), TinyTask(num_samples=32), TinyTask(num_samples=16)
    return weights_after(*tasks, folder=folder), dist.is_initialized()


def test_several_runs_in_one_process_train_one_after_the_other(tmp_path: Path) -> None:
    expected = [f"trained {num} samples" for num in (48, 32, 16)]
    assert run_ranks(2, in_turn, tmp_path) == [(expected, True)] * 2


def after_failures(folder: Path) -> list[float | str]:
    return weights_after(NoData(), TinyTask(), Mistaken(), TinyTask(num_samples=32), folder=folder)


def test_a_run_after_one_that_failed_trains(tmp_path: Path) -> None:
    told = ["there are no training data", "trained 48 samples", "a bug", "trained 32 samples"]
    assert run_ranks(2, after_failures, tmp_path) == [told] * 2


def beside_a_group_of_the_users(folder: Path) -> tuple[float, bool]:
    dist.init_process_group("gloo")
    made = dist.group.WORLD
    fit(TinyTask(), config_for(folder))
    with World.enter("cpu"):
        pass
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total), dist.group.WORLD is made


def test_a_group_that_the_script_made_is_left_alone(tmp_path: Path) -> None:
    assert run_ranks(2, beside_a_group_of_the_users, tmp_path) == [(2.0, True)] * 2


def enter_and_leave(times: int) -> list[int]:
    found = []
    for number in range(times):
        with World.enter("cpu", timeout_s=20) as world:
            with World.enter("cpu"):  # it did not make the group, and so does not leave it
                pass
            found.append(world.all_max(10 * number + world.rank)[0])
        assert not dist.is_initialized()
        world.leave()
    return found


def test_a_world_that_was_left_can_be_entered_again() -> None:
    assert run_ranks(2, enter_and_leave, 4) == [[1, 11, 21, 31]] * 2


def with_other_timeouts() -> list[str]:
    logged: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logging.getLogger("lockstep").addHandler(Keep())
    World.enter("cpu", timeout_s=20)
    World.enter("cpu")
    World.enter("cpu", timeout_s=20)
    World.enter("cpu", timeout_s=30)
    return logged


def test_another_time_limit_for_an_existing_group_is_reported_once() -> None:
    said = "timeout_s=30 has no effect: the process group already has timeout_s=20"
    assert run_ranks(2, with_other_timeouts) == [[said], []]


# --- How a process ends ----------------------------------------------------------------------

TRAINS = """
import sys
from lockstep import RunConfig, fit
from lockstep.testing import TinyTask
for name in "ab":
    fit(TinyTask(), RunConfig(output_dir=f"{sys.argv[1]}/{name}", device="cpu", epochs=1,
                              batch={"batch_size": 4}, timeout_s=60))
"""

FAILS = """
import sys, time, torch, torch.distributed as dist
from lockstep import World
world = World.enter("cpu", timeout_s=600)
if world.rank == 1:
    sys.stdin.read()  # busy elsewhere until the other rank has ended
else:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    raise ValueError("a bug")
"""


@contextmanager
def two_ranks(script: str, *arguments: object) -> Iterator[list[subprocess.Popen[str]]]:
    port = str(free_port())
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_a_script_that_trained_ends_without_a_word_on_stderr(tmp_path: Path) -> None:
    with two_ranks(TRAINS, tmp_path) as ranks:
        told = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], told
        assert told == ["", ""]


def test_a_rank_that_failed_does_not_wait_for_collectives_the_others_never_join() -> None:
    with two_ranks(FAILS) as (first, _):
        assert first.wait(LIMIT_S) == 1  # the group itself would wait for 600 s
        assert first.stderr is not None
        assert "ValueError: a bug" in first.stderr.read()
