"""What a run writes down: each sample once, how fast, and which rank the others wait for."""

import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from whole_run import NUM_SAMPLES, config_for, events, run, verdicts

from lockstep import PartialLoss, fit, read_events
from lockstep.data.order import Ids, Leaf, Order, Shuffled, leaves_of
from lockstep.plan import BatchPlan
from lockstep.run.progress import Progress
from lockstep.task import Context
from lockstep.testing import TinyTask


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_an_epoch_says_that_each_sample_was_used_once(num_ranks: int, tmp_path: Path) -> None:
    run(tmp_path, num_ranks)
    assert verdicts(tmp_path) == ["20 of 20 samples, each once"] * 2


def test_the_rate_counts_the_samples_of_steps_that_are_smaller(tmp_path: Path) -> None:
    run(tmp_path, 2, log_every=3, evaluation={"every_epochs": 9})
    logged = events(tmp_path, "step")
    assert [e["samples"] for e in logged] == [20, 40]
    for event in logged:  # steps of 8, 8 and 4 samples
        assert event["samples_per_second"] * 3 * event["step_time_s"] == pytest.approx(20)


def test_waiting_for_the_device_is_training_although_an_epoch_ends_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, which is waited for when its numbers are read: here, 50 ms a step."""
    real = Progress.sum_pending

    def waiting(progress: Progress) -> Any:
        time.sleep(0.05 * len(progress.pending))
        return real(progress)

    monkeypatch.setattr(Progress, "sum_pending", waiting)
    seldom = {"every_steps": 5}
    changes = {"log_every": 4, "epochs": 4, "evaluation": seldom, "checkpoint": seldom}
    fit(TinyTask(NUM_SAMPLES), config_for(tmp_path, **changes))
    steps = [event for event in read_events(tmp_path) if event["event"] == "step"]
    assert [event["step"] for event in steps] == [4, 8, 12]  # three steps an epoch
    assert min(event["step_time_s"] for event in steps) > 0.05


class SlowDiskTask(TinyTask):
    """Reads slowly on the second rank."""

    def collate(self, samples: list[Any]) -> Any:
        time.sleep(0.1 * (os.environ["RANK"] == "1"))
        return super().collate(samples)


def test_the_rank_that_the_others_wait_for_is_named(tmp_path: Path) -> None:
    said = tmp_path / "said.txt"
    sinks = {"curves": False, "log_file": str(said)}
    run(tmp_path, 2, lambda: SlowDiskTask(NUM_SAMPLES), log_every=2, max_steps=2, sinks=sinks)
    assert re.search(r"data wait \d+%  on rank 1  ETA", said.read_text()), said.read_text()


class SlowTask(TinyTask):
    """Computes slowly on the last rank, forward or backward."""

    def __init__(self, where: str) -> None:
        super().__init__(NUM_SAMPLES)
        self.where = where

    def loss(self, model: nn.Module, batch: Any, context: Context) -> PartialLoss:
        last = context.world.rank == context.world.size - 1
        if last and self.where == "forward":
            time.sleep(0.05)
        own = super().loss(model, batch, context)
        if last and self.where == "backward" and context.training:
            own.loss_sum.register_hook(lambda gradient: time.sleep(0.05))
        return own


@pytest.mark.parametrize(
    ("where", "ranks", "more"),
    [
        ("forward", 2, {}),
        ("backward", 3, {}),
        ("backward", 2, {"exact": True}),
        ("backward", 2, {"batch": {"batch_size": 1, "accumulate": 2}}),
    ],
)
def test_the_rank_that_computes_slowly_is_named_the_second_time(
    where: str, ranks: int, more: dict[str, Any], tmp_path: Path
) -> None:
    said = tmp_path / "said.txt"
    sinks = {"curves": False, "log_file": str(said)}
    run(tmp_path, ranks, lambda: SlowTask(where), log_every=3, max_steps=6, sinks=sinks, **more)
    lines = [line for line in said.read_text().splitlines() if line.startswith("step ")]
    told = rf"rank {ranks - 1} is slow:  \d+\.\d x the others' time  ETA"
    assert [bool(re.search(told, line)) for line in lines] == [False, True], lines


def test_what_is_dropped_is_said(tmp_path: Path) -> None:
    run(tmp_path, 2, batch={"batch_size": 2, "global_batch_size": 8})
    assert verdicts(tmp_path) == ["16 of 16 samples, each once"] * 2


class RepeatingOrder:
    """Visits sample 7 twice and sample 8 never."""

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        ids = Shuffled(NUM_SAMPLES, seed=0).ids(epoch, start, stop)
        return np.where(ids == 8, 7, ids)


class RepeatingTask(TinyTask):
    def order(self, data: Any, seed: int) -> Order | None:
        return RepeatingOrder()


def test_an_order_that_repeats_a_sample_is_found_out(tmp_path: Path) -> None:
    run(tmp_path, 2, lambda: RepeatingTask(NUM_SAMPLES))
    assert verdicts(tmp_path) == ["20 of 20 samples, NOT each once"] * 2


def test_an_order_that_repeats_a_sample_is_found_out_where_others_are_dropped(
    tmp_path: Path,
) -> None:
    batch = {"batch_size": 2, "global_batch_size": 6}
    run(tmp_path, 1, lambda: RepeatingTask(NUM_SAMPLES), batch=batch)
    honest = [len(set(RepeatingOrder().ids(e, 0, 18).tolist())) == 18 for e in range(2)]
    assert not any(honest)
    assert [e["each_once"] for e in events(tmp_path, "epoch")] == honest


def test_a_loader_that_reads_a_micro_batch_twice_is_found_out(tmp_path: Path) -> None:
    def stutter(plan: BatchPlan, step: int, rank: int) -> list[Leaf]:
        leaves = leaves_of(plan, step, rank)
        return leaves_of(plan, 0, rank)[: len(leaves)] if step == 1 else leaves

    def plant() -> None:
        import lockstep.data.loader

        lockstep.data.loader.leaves_of = stutter

    run(tmp_path, 2, before=plant)
    assert verdicts(tmp_path) == ["20 of 20 samples, NOT each once", "20 of 20 samples, each once"]


class CompiledTask(TinyTask):
    """Takes its time over the first step, as a compiler does."""

    def compile(self, model: nn.Module) -> None:
        """Leave the model as it is: what is tested is the clock."""

    def loss(self, model: nn.Module, batch: Any, context: Context) -> PartialLoss:
        time.sleep(0.3 if context.step == 0 else 0)
        return super().loss(model, batch, context)


def test_the_time_to_compile_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(CompiledTask(NUM_SAMPLES), config_for(tmp_path, max_steps=3, compile=True))
    (event,) = [e for e in read_events(tmp_path) if e["event"] == "compiled"]
    assert event["step"] == 0
    assert 0.3 < event["local_seconds"] < 60
    said = f"the first step took {event['local_seconds']:.1f} s, most of it to compile"
    assert capsys.readouterr().out.count(said) == 1
