"""A whole run: the same numbers on every rank and for every number of them; failing together."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep import CheckpointStore, PartialLoss, RunConfig, fit, read_events
from lockstep.dist.agreement import together
from lockstep.checkpoint.generation import is_claim
from lockstep.data.order import Ids, Leaf, Order, Shuffled, leaves_of
from lockstep.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LockstepError,
    NonFiniteError,
    TakenOverError,
)
from lockstep.plan import BatchPlan
from lockstep.run.progress import Progress
from lockstep.run.resume import settled
from lockstep.dist.world import World
from lockstep.run.build import prepare
from lockstep.signals import StopSignals
from lockstep.step.train_step import train_step
from lockstep.task import Context
from lockstep.testing import TinyTask, run_ranks
from lockstep.trainer import RunResult, Trainer

NUM_SAMPLES = 20
TIMES = re.compile(r"time|.*_s|samples_per_second|.*_share|data_wait_rank|slow_.*|path")


def config_for(folder: Path, **changes: Any) -> RunConfig:
    values = {
        "output_dir": str(folder),
        "epochs": 2,
        "batch": {"batch_size": 2, "global_batch_size": 8, "drop_last": False},
        "rate": {"lr": 0.05},
        "evaluation": {"every_steps": 3, "save_best": False},
        "checkpoint": {"every_steps": 2},
        "sinks": {"curves": False},
        "log_every": 1,
        "device": "cpu",
        "timeout_s": 20,
    }
    return RunConfig.parse(values | changes)


def run(
    folder: Path,
    num_ranks: int,
    build: Callable[[], TinyTask] = lambda: TinyTask(NUM_SAMPLES),
    before: Callable[[], None] = lambda: None,
    **changes: Any,
) -> list[Any]:
    """Run `fit`; return each rank's result, or its error as (class, text, exit code)."""

    def one_rank() -> Any:
        before()
        try:
            return fit(build(), config_for(folder, **changes))
        except LockstepError as error:
            return type(error).__name__, str(error), error.exit_code

    return run_ranks(num_ranks, one_rank, timeout_s=30)


def weights(folder: Path) -> dict[str, Tensor]:
    checkpoint, _ = store(folder).latest()
    assert checkpoint is not None
    return checkpoint.load("model")


def store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", recipe="tiny")


def events(folder: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    return [event for event in read_events(folder, rank) if event["event"] == kind]


def verdicts(folder: Path) -> list[str]:
    return [event["message"] for event in events(folder, "epoch")]


def files(folder: Path) -> dict[str, bytes]:
    """Return what the checkpoints consist of."""
    found = (path for path in (folder / "checkpoints").rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in found if not is_claim(path.name)}


# --- The same numbers everywhere --------------------------------------------------------


@pytest.fixture(scope="module")
def of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run(folder, 1)
    return folder


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_number_in_the_log_is_that_of_the_whole_run(
    num_ranks: int, of_one: Path, tmp_path: Path
) -> None:
    run(tmp_path, num_ranks)
    for kind in ("step", "epoch", "evaluation"):
        first = events(tmp_path, kind)
        for rank in range(1, num_ranks):
            for ours, theirs in zip(first, events(tmp_path, kind, rank), strict=True):
                ours, theirs = (
                    {k: v for k, v in e.items() if k != "time" and not k.startswith("local_")}
                    for e in (ours, theirs)
                )
                assert ours == theirs, "no rank prints a number of its own"
        for many, one in zip(first, events(of_one, kind), strict=True):
            many, one = (
                {k: v for k, v in e.items() if not TIMES.fullmatch(k)} for e in (many, one)
            )
            many.pop("local_step_time_s", None)
            assert many.keys() == one.keys()
            for name, value in one.items():
                exact = isinstance(value, str | int) or value is None
                expected = value if exact else pytest.approx(value, rel=1e-12, nan_ok=True)
                assert many[name] == expected, (kind, name)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_whole_run_ends_with_the_weights_of_one_rank(
    num_ranks: int, of_one: Path, tmp_path: Path
) -> None:
    run(tmp_path, num_ranks)
    for name, tensor in weights(of_one).items():
        torch.testing.assert_close(weights(tmp_path)[name], tensor, rtol=0, atol=1e-12)


# --- Each sample once -------------------------------------------------------------------


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
    real = Progress.settle

    def waiting(progress: Progress) -> Any:
        time.sleep(0.05 * len(progress.pending))
        return real(progress)

    monkeypatch.setattr(Progress, "settle", waiting)
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


# --- Bad samples ------------------------------------------------------------------------


class Holed:
    def __init__(self, samples: list[Any], bad: tuple[int, ...]) -> None:
        self.samples, self.bad = samples, bad

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise OSError("truncated file")
        return self.samples[index]


class HoledTask(TinyTask):
    bad: tuple[int, ...] = (5, 12)

    def train_data(self) -> Any:
        return Holed(super().train_data(), self.bad)


class OneHoleTask(HoledTask):
    bad = (5,)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_sample_that_one_rank_meets_is_raised_on_all(
    num_workers: int, tmp_path: Path
) -> None:
    began = time.monotonic()
    errors = run(tmp_path, 2, lambda: OneHoleTask(NUM_SAMPLES), loader={"num_workers": num_workers})
    assert time.monotonic() - began < 10
    assert errors[0] == errors[1]
    kind, text, exit_code = errors[0]
    assert (kind, exit_code) == ("DataError", 2)
    assert re.match(r"rank [01]: sample 5 cannot be read: OSError: truncated file", text)


def fail_alone(folder: Path) -> str:
    """Fail on the first rank once the other one has gone, and return what is raised."""

    def fail() -> None:
        raise TakenOverError("another run took over the folder", "let it continue")

    with World.enter("cpu", timeout_s=5) as world:
        world.barrier()
        if not world.is_first:
            os._exit(0)
        with pytest.raises(TakenOverError) as raised:
            together(world, lambda: together(world, fail))
        (folder / "said").write_text(str(raised.value))
        os._exit(0)


def test_an_error_is_not_hidden_by_ranks_that_cannot_be_told_of_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="died without a word"):
        run_ranks(2, fail_alone, tmp_path)
    assert "another run took over the folder" in (tmp_path / "said").read_text()


def test_a_batch_that_one_rank_cannot_put_together_is_raised_on_all(tmp_path: Path) -> None:
    class RaggedTask(TinyTask):
        def collate(self, samples: list[Any]) -> Any:
            if any(
                float(s["x"][0]) == float(TinyTask(20).train_data()[5]["x"][0]) for s in samples
            ):
                raise ValueError("ragged")
            return super().collate(samples)

    errors = run(tmp_path, 2, lambda: RaggedTask(NUM_SAMPLES))
    assert errors[0] == errors[1]
    assert errors[0][0] == "DataError"
    assert "sample 5" in errors[0][1]


def test_bad_samples_are_skipped_alike_for_every_number_of_ranks(tmp_path: Path) -> None:
    found = {}
    for num_ranks in (1, 2, 3):
        folder = tmp_path / str(num_ranks)
        skip = {"on_bad_sample": "skip"}
        results = run(folder, num_ranks, lambda: HoledTask(NUM_SAMPLES), loader=skip)
        assert [result.step for result in results] == [6] * num_ranks
        found[num_ranks] = weights(folder)
        skipped = [
            event["sample"]
            for rank in range(num_ranks)
            for event in events(folder, "sample_skipped", rank)
        ]
        assert sorted(skipped) == [5, 5, 12, 12], "each in each epoch"
        assert verdicts(folder) == ["20 of 20 samples, each once"] * 2
    for num_ranks in (2, 3):
        for name, tensor in found[1].items():
            torch.testing.assert_close(found[num_ranks][name], tensor, rtol=0, atol=1e-12)


# --- Streams ----------------------------------------------------------------------------


class TheirError(DataError):
    """An error of a task's own."""


class BrokenTask(TinyTask):
    """A task whose data one rank cannot read, and says so in its own way."""

    def train_data(self) -> list[dict[str, Tensor]]:
        if os.environ["RANK"] == "1":
            raise TheirError("row 7 is broken", "mend it")
        return super().train_data()


def test_an_error_that_a_task_derived_is_raised_on_all_ranks(tmp_path: Path) -> None:
    errors = run(tmp_path, 2, BrokenTask)
    assert errors == [("DataError", "rank 1: row 7 is broken\n  try: mend it", 2)] * 2


class StreamTask(TinyTask):
    def train_data(self) -> Any:
        samples = super().train_data()

        class Stream:
            def __iter__(self) -> Iterator[Any]:
                return iter(samples)

        return Stream()


def test_a_stream_trains_the_same_on_every_number_of_ranks(tmp_path: Path) -> None:
    for num_ranks in (1, 2):
        changes = {"epochs": None, "max_steps": 4}
        results = run(
            tmp_path / str(num_ranks), num_ranks, lambda: StreamTask(NUM_SAMPLES), **changes
        )
        assert [result.step for result in results] == [4] * num_ranks
    for name, tensor in weights(tmp_path / "1").items():
        torch.testing.assert_close(weights(tmp_path / "2")[name], tensor, rtol=0, atol=1e-12)


def test_a_stream_without_a_number_of_steps_is_refused(tmp_path: Path) -> None:
    errors = run(tmp_path, 2, lambda: StreamTask(NUM_SAMPLES))
    assert errors[0] == errors[1]
    assert errors[0][0] == "ConfigError"
    assert "max_steps=" in errors[0][1]


# --- No longer a number -----------------------------------------------------------------


class ExplodingTask(TinyTask):
    """Loses its numbers in step 4 (counted from 1), on one micro-batch of one rank."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        part = super().loss(model, batch, context)
        bad = context.training and (context.step, context.place) == (3, 1)
        return PartialLoss(part.loss_sum * (float("nan") if bad else 1), part.weight, part.parts)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loss_that_is_no_number_ends_all_ranks_and_is_not_saved(
    num_ranks: int, tmp_path: Path
) -> None:
    run(tmp_path / "before", num_ranks, max_steps=2)
    errors = run(tmp_path / "run", num_ranks, lambda: ExplodingTask(NUM_SAMPLES))
    assert errors == errors[:1] * num_ranks
    kind, text, exit_code = errors[0]
    assert (kind, exit_code) == (NonFiniteError.__name__, 3)
    assert text.startswith("step 4: loss nan")
    checkpoint, rejected = store(tmp_path / "run").latest()
    assert checkpoint is not None
    assert (checkpoint.step, rejected) == (2, [])
    for name, tensor in weights(tmp_path / "before").items():
        assert torch.equal(checkpoint.load("model")[name], tensor)
    assert not any(event["step"] > 3 for event in read_events(tmp_path / "run"))


# --- A save that fails ------------------------------------------------------------------


def break_saving() -> None:
    def save(self: CheckpointStore, step: int, *_: object) -> Path:
        if step == 2:
            raise CheckpointError("disk quota exceeded", "make room")
        raise AssertionError("nobody looked after the first failure")

    CheckpointStore.save = save  # type: ignore[method-assign]


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_save_that_fails_is_raised_on_all_ranks(
    num_ranks: int, background: bool, tmp_path: Path
) -> None:
    errors = run(
        tmp_path,
        num_ranks,
        before=break_saving,
        checkpoint={"every_steps": 2, "background": background},
    )
    assert errors == errors[:1] * num_ranks
    assert errors[0][0] == "CheckpointError"
    assert "disk quota exceeded" in errors[0][1]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_save_that_fails_late_is_raised_on_all_ranks(num_ranks: int, tmp_path: Path) -> None:
    """It is noticed where the next save waits for it, not at the next step."""

    def plant() -> None:
        def save(*_: object) -> Path:
            time.sleep(1)
            raise CheckpointError("disk quota exceeded", "make room")

        CheckpointStore.save = save  # type: ignore[method-assign]

    errors = run(tmp_path, num_ranks, before=plant, checkpoint={"every_steps": 1})
    assert errors == errors[:1] * num_ranks
    assert errors[0][0] == "CheckpointError"


# --- Complete, never, discard -----------------------------------------------------------


def test_a_complete_run_says_so_and_changes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    finished = run(tmp_path, 2)
    before, read = files(tmp_path), read_events(tmp_path)
    capfd.readouterr()
    results = run(tmp_path, 2)
    assert [(result.step, result.exit_code) for result in results] == [(6, 0)] * 2
    assert finished[0].metrics.keys() == {"loss", "heavy"}
    assert [result.metrics for result in results] == [finished[0].metrics] * 2
    assert "nothing to do: the run is complete at step 6" in capfd.readouterr().out
    assert files(tmp_path) == before
    assert read_events(tmp_path) == read


def test_never_refuses_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    run(tmp_path, 2)
    before = files(tmp_path)
    errors = run(tmp_path, 2, resume="never")
    assert errors[0] == errors[1]
    assert errors[0][0] == ConfigError.__name__
    assert "resume is 'never'" in errors[0][1]
    assert files(tmp_path) == before
    assert run(tmp_path / "new", 1, resume="never")[0].step == 6


def test_discard_starts_over(of_one: Path, tmp_path: Path) -> None:
    run(tmp_path, 1, rate={"lr": 0.01})
    other = weights(tmp_path)
    assert run(tmp_path, 1, resume="discard")[0].step == 6
    for name, tensor in weights(of_one).items():
        assert torch.equal(weights(tmp_path)[name], tensor)
        assert not torch.equal(other[name], tensor)
    assert len(events(tmp_path, "epoch")) == 2


def test_discard_takes_nothing_that_may_not_be_a_run_s(tmp_path: Path) -> None:
    """And does not begin beside it: a later resume would go on from what was to be gone."""
    run(tmp_path, 1, max_steps=2)
    (tmp_path / "config.json").unlink()
    (refused,) = run(tmp_path, 1, resume="discard", max_steps=1)
    assert "holds checkpoints and no config.json" in refused[1]
    assert store(tmp_path).steps() == [2]


def test_a_longer_run_goes_on_from_a_complete_one(of_one: Path, tmp_path: Path) -> None:
    run(tmp_path, 1, epochs=1)
    assert run(tmp_path, 1, epochs=2)[0].step == 6
    for name, tensor in weights(of_one).items():
        assert torch.equal(weights(tmp_path)[name], tensor)


class Unseeded(TinyTask):
    """First weights that no seed decides, and a look at the average in the end."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(os.getpid()))
        return model

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> dict[str, float]:
        return {"seen": float(model[0].weight.detach().sum())}  # of the average


def test_averages_begin_with_the_first_rank_s_weights_on_every_rank(tmp_path: Path) -> None:
    first, second = run(tmp_path, 2, lambda: Unseeded(NUM_SAMPLES), averages=[0.9], max_steps=3)
    assert first.metrics["seen"] == second.metrics["seen"]


# --- Changed numbers --------------------------------------------------------------------


def test_a_changed_batch_is_refused_on_all_ranks_and_nothing_is_touched(tmp_path: Path) -> None:
    run(tmp_path, 2, epochs=1)
    before = files(tmp_path)
    errors = run(tmp_path, 2, batch={"batch_size": 4, "global_batch_size": 8, "drop_last": False})
    assert errors[0] == errors[1]
    assert errors[0][0] == "ConfigError"
    assert "batch_size 2 -> 4" in errors[0][1]
    assert files(tmp_path) == before


def test_an_accepted_larger_batch_finishes_the_epochs_that_were_asked_for(tmp_path: Path) -> None:
    """Steps get fewer; what was consumed stays consumed."""
    run(tmp_path, 1, epochs=1, batch={"batch_size": 2, "drop_last": False})
    assert store(tmp_path).steps()[-1] == 10
    batch = {"batch_size": 4, "drop_last": False}
    run(tmp_path, 1, batch=batch, accept_changes=True)
    checkpoint, _ = store(tmp_path).latest()
    assert checkpoint is not None
    assert checkpoint.meta["consumed"] == 2 * NUM_SAMPLES
    assert events(tmp_path, "epoch")[-1]["message"] == "20 of 20 samples, each once"


def test_an_accepted_global_batch_is_taken_on_other_ranks_too(tmp_path: Path) -> None:
    run(tmp_path, 2, max_steps=2)
    batch = {"batch_size": 2, "global_batch_size": 4, "drop_last": False}
    (refused,) = run(tmp_path, 1, batch=batch)
    assert "trained with global_batch_size 8, this run asks for 4" in refused[1]
    run(tmp_path, 1, batch=batch, accept_changes=True)
    checkpoint, _ = store(tmp_path).latest()
    assert checkpoint is not None
    assert checkpoint.meta["contract"]["plan"]["leaves_per_step"] == 2


def test_a_run_sent_back_to_an_older_checkpoint_is_not_overtaken_by_what_it_left(
    of_one: Path, tmp_path: Path
) -> None:
    run(tmp_path, 1)
    changes = {"rate": {"lr": 0.01}, "accept_changes": True}
    run(tmp_path, 1, resume=str(store(tmp_path).path(2)), **changes)
    sent_back = weights(tmp_path)
    assert store(tmp_path).steps()[-1] == 6
    name = "0.weight"
    assert not torch.equal(sent_back[name], weights(of_one)[name])


def test_a_run_sent_to_what_it_had_left_can_always_go_on_from_there(tmp_path: Path) -> None:
    """By a name that followed its checkpoint aside; and before anything is saved anew."""
    saving = {"checkpoint": {"every_epochs": 1, "name_epochs": True}}
    run(tmp_path, 1, **saving)
    left = weights(tmp_path)
    for epoch, step in ((1, 3), (2, 6)):
        (result,) = run(
            tmp_path, 1, resume=f"checkpoint_epoch_{epoch}.pt", max_steps=step, **saving
        )
        assert isinstance(result, RunResult), result
        assert store(tmp_path).steps()[-1] == result.step == step
    assert (tmp_path / "checkpoints" / "checkpoint_epoch_2.pt").resolve().name == "step_00000006"
    assert all(torch.equal(weights(tmp_path)[name], tensor) for name, tensor in left.items())
    run(tmp_path / "new", 1, resume=str(store(tmp_path).path(6)))  # nothing is left to do
    assert store(tmp_path / "new").steps() == [6]
    store(tmp_path / "new").set_aside_after(-1)  # as far as a kill might let it come
    assert "superseded_1_step_00000006: set aside" in run(tmp_path / "new", 1)[0][1]


def test_another_seed_in_mid_epoch_is_refused(tmp_path: Path) -> None:
    """It would be another order: some samples twice, some never."""
    run(tmp_path, 1, max_steps=2)
    (refused,) = run(tmp_path, 1, seed=1)
    assert isinstance(refused, tuple), "it went on"
    assert refused[0] == "ConfigError"
    assert "seed 0 -> 1" in refused[1]


class Scored(TinyTask):
    """Reports a metric that is best in the second evaluation, and no number in the third."""

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> dict[str, float]:
        return {"score": {2: 0.5, 4: 0.1, 6: float("nan"), 8: 0.3}.get(context.step, 9.0)}


def test_the_best_evaluation_is_saved_and_named_whenever_it_comes(tmp_path: Path) -> None:
    best = {"every_steps": 2, "best_metric": "score", "save_best": True}
    run(tmp_path, 2, lambda: Scored(NUM_SAMPLES), evaluation=best, checkpoint={"every_steps": 3})
    assert store(tmp_path).open("best_model.pt").step == 4


@pytest.mark.parametrize(
    ("failing", "scores", "best"),
    [(2, (0.1, 0.3, 0.5), 4), (4, (0.3, 0.1, 0.2), 6), (6, (0.5, 0.3, 0.1), 6)],
)
def test_a_best_checkpoint_that_could_not_be_saved_hides_no_other(
    failing: int, scores: tuple[float, ...], best: int, tmp_path: Path
) -> None:
    """Its weights are gone, unless it was the last: then it is saved again, under its name."""

    class Scores(TinyTask):
        def finish_evaluation(self, model: Any, context: Context, folder: str) -> dict[str, float]:
            return {"score": scores[context.step // 2 - 1]}

    def fail_once() -> None:
        real, left = CheckpointStore.save, [failing]

        def save(store: CheckpointStore, step: int, *rest: Any) -> Path:
            if step in left:
                left.remove(step)
                raise CheckpointError(f"no room for step {step}", "more")
            return real(store, step, *rest)

        CheckpointStore.save = save  # type: ignore[method-assign]

    evaluation = {"every_steps": 2, "best_metric": "score", "save_best": True}
    saving = {"every_steps": 2, "on_failed_save": "go_on", "background": False}
    changes = {"evaluation": evaluation, "checkpoint": saving}
    run(tmp_path, 1, lambda: Scores(NUM_SAMPLES), fail_once, **changes)
    checkpoint = store(tmp_path).open("best_model.pt")
    assert checkpoint.step == best
    assert checkpoint.load("progress")["best"] == scores[best // 2 - 1]


class Unlike(Scored):
    """The ranks do not agree on the metric, and later only the first has it."""

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> dict[str, float]:
        if context.world.is_first:
            return super().finish_evaluation(model, context, folder)
        return {"score": 9.0 - context.step} if context.step < 6 else {}


def test_what_is_best_is_the_first_ranks_word_and_all_ranks_save(tmp_path: Path) -> None:
    best = {"every_steps": 1, "best_metric": "score", "save_best": True}
    done = run(tmp_path, 2, lambda: Unlike(NUM_SAMPLES), evaluation=best)
    assert [result.step for result in done] == [6, 6]
    assert store(tmp_path).open("best_model.pt").step == 4


def test_checkpoints_of_epochs_and_of_steps_have_names_and_are_kept(tmp_path: Path) -> None:
    saving = {"every_epochs": 1, "every_steps": 2, "keep_last": 1}
    run(tmp_path, 2, checkpoint=saving | {"name_epochs": True, "name_steps": True})
    assert store(tmp_path).aliases() == {
        "checkpoint_step_2.pt": "step_00000002",
        "checkpoint_epoch_1.pt": "step_00000003",
        "checkpoint_step_4.pt": "step_00000004",
        "checkpoint_step_6.pt": "step_00000006",
        "checkpoint_epoch_2.pt": "step_00000006",
    }


def test_a_best_metric_that_is_not_measured_is_refused(tmp_path: Path) -> None:
    best = {"every_steps": 2, "best_metric": "scoer", "save_best": True}
    errors = run(tmp_path, 2, lambda: Scored(NUM_SAMPLES), evaluation=best)
    assert errors[0][0] == errors[1][0] == "ConfigError"
    assert "'scoer' is not measured" in errors[0][1]


def test_a_wrong_best_metric_can_be_corrected_until_one_is_the_best(tmp_path: Path) -> None:
    def build() -> TinyTask:
        return Scored(NUM_SAMPLES)

    wrong = {"every_steps": 2, "best_metric": "scoer", "save_best": True}
    right = {**wrong, "best_metric": "score", "best_is": "highest"}
    assert run(tmp_path, 2, build, evaluation=wrong)[0][0] == "ConfigError"
    assert [r.step for r in run(tmp_path, 2, build, evaluation=right, max_steps=4)] == [4, 4]
    later = run(tmp_path, 2, build, evaluation={**right, "best_is": "lowest"}, max_steps=6)
    assert later[0][0] == "ConfigError"
    assert "evaluation.best_is highest -> lowest" in later[0][1]


class Torn(TinyTask):
    """A held-out sample cannot be read until it is mended."""

    is_mended = False

    def eval_data(self) -> Any:
        data = super().eval_data()
        return data if self.is_mended else TornList(data)


class TornList(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        if index == 3:
            raise OSError("torn")
        return super().__getitem__(index)


def test_an_evaluation_that_fails_loses_no_step_and_is_made_up_for(tmp_path: Path) -> None:
    evaluation = {"every_epochs": 2, "save_best": True}
    rare: dict[str, Any] = {"checkpoint": {"every_epochs": 9}, "evaluation": evaluation}
    errors = run(tmp_path, 2, lambda: Torn(NUM_SAMPLES), **rare)
    assert {(kind, code) for kind, _, code in errors} == {("DataError", 2)}
    assert "sample 3 cannot be read" in errors[0][1]
    saved, _ = store(tmp_path).latest()
    assert saved is not None
    assert (saved.step, saved.meta["metrics"]) == (6, {})

    Torn.is_mended = True
    try:
        done = run(tmp_path, 2, lambda: Torn(NUM_SAMPLES), **rare, accept_changes=True)
    finally:
        Torn.is_mended = False
    assert [result.step for result in done] == [6, 6]
    assert done[0].metrics.keys() >= {"loss"}
    assert store(tmp_path).open("best_model.pt").step == 6


class Frozen(TinyTask):
    """A part of the model is in evaluation mode, for good."""

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        model[1].eval()
        return model


def test_a_part_in_evaluation_mode_stays_there_after_an_evaluation(tmp_path: Path) -> None:
    for name, every in (("evaluated", 1), ("not", 100)):
        changes = {"evaluation": {"every_steps": every, "save_best": False}, "max_steps": 5}
        run(tmp_path / name, 1, lambda: Frozen(NUM_SAMPLES), **changes)
    for name, weight in weights(tmp_path / "not").items():
        assert torch.equal(weights(tmp_path / "evaluated")[name], weight), name


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


def test_ranks_that_were_told_different_things_are_refused(tmp_path: Path) -> None:
    def one_rank() -> str:
        lr = 0.1 if os.environ["RANK"] == "0" else 0.2
        try:
            fit(TinyTask(NUM_SAMPLES), config_for(tmp_path, rate={"lr": lr}))
        except LockstepError as error:
            return str(error)
        return "finished"

    for said in run_ranks(2, one_rank, timeout_s=30):
        assert "ranks 0 and 1 see different settings" in said


def test_changed_optimizer_settings_need_a_word(tmp_path: Path) -> None:
    class Decayed(TinyTask):
        def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
            return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.3)

    run(tmp_path, 1, max_steps=2)
    (refused,) = run(tmp_path, 1, lambda: Decayed(NUM_SAMPLES))
    assert refused[0] == "ConfigError"
    assert "weight_decay 0.01 -> 0.3" in refused[1]
    run(tmp_path, 1, lambda: Decayed(NUM_SAMPLES), accept_changes=True)
    checkpoint, _ = store(tmp_path).latest()
    assert checkpoint is not None
    assert checkpoint.load("optimizer")["param_groups"][0]["weight_decay"] == 0.3


@pytest.mark.parametrize(
    ("old", "new", "says", "after"),
    [
        ("AdamW", "RMSprop", "alpha None -> 0.99", "RMSprop goes on"),
        ("SGD", "AdamW", "saved state does not fit", "saved state does not fit"),
    ],
)
def test_another_kind_of_optimizer_is_refused_or_begins_anew(
    old: str, new: str, says: str, after: str, tmp_path: Path
) -> None:
    class Moved(TinyTask):
        kind = old

        def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
            more = {"momentum": 0.9} if self.kind == "SGD" else {}
            kind: type[torch.optim.Optimizer] = getattr(torch.optim, self.kind)
            return kind(model.parameters(), lr=lr, **more)  # type: ignore[call-arg]

    run(tmp_path, 1, lambda: Moved(NUM_SAMPLES), max_steps=2)
    Moved.kind = new
    (refused,) = run(tmp_path, 1, lambda: Moved(NUM_SAMPLES))
    assert says in refused[1]
    (result,) = run(tmp_path, 1, lambda: Moved(NUM_SAMPLES), accept_changes=True)
    assert after in (f"{new} goes on" if isinstance(result, RunResult) else result[1])


def test_a_refused_run_discards_and_overwrites_nothing(tmp_path: Path) -> None:
    class Missing(TinyTask):
        def train_data(self) -> list[dict[str, Tensor]]:
            raise ConfigError("no such folder", "another")

    run(tmp_path, 1, max_steps=2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (refused,) = run(tmp_path, 1, lambda: Missing(NUM_SAMPLES), resume="discard", seed=5)
    assert refused[0] == "ConfigError"
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_good_steps_are_saved_before_a_bad_sample_ends_the_run(tmp_path: Path) -> None:
    class Holed(list[dict[str, Tensor]]):
        def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]
            if index == 7:
                raise ValueError("torn")
            return super().__getitem__(index)

    class Task(TinyTask):
        def train_data(self) -> list[dict[str, Tensor]]:
            return Holed(super().train_data())

    errors = run(tmp_path, 2, lambda: Task(NUM_SAMPLES), checkpoint={"every_steps": 100})
    assert {error[0] for error in errors} == {"DataError"}
    checkpoint, _ = store(tmp_path).latest()
    assert checkpoint is not None
    assert checkpoint.step == events(tmp_path, "step")[-1]["step"] > 0


# --- A loop of one's own around the same parts ---------------------------------------------


def own_loop(folder: Path, counts: bool = True, **more: Any) -> RunResult:
    """Train as `fit` does, with a constant rate, and an extra line in the banner."""
    config, task = config_for(folder, **more), TinyTask(NUM_SAMPLES)
    with ExitStack() as stack:
        world = stack.enter_context(World.enter(config.device, config.timeout_s))
        signals = stack.enter_context(StopSignals())
        run = prepare(task, config, world, stack)
        trainer = Trainer(run, signals, stack, also_say=["a loop of its own"])
        for batch in trainer.steps():
            report = train_step(task.loss, run.model, run.optimizer, batch, world)
            if counts:
                trainer.took(report, batch)
        return trainer.finish()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loop_of_ones_own_is_fit_to_the_last_bit(num_ranks: int, tmp_path: Path) -> None:
    run(tmp_path / "fit", num_ranks)
    results = run_ranks(num_ranks, own_loop, tmp_path / "own")
    assert {result.step for result in results} == {6}
    a, b = weights(tmp_path / "fit"), weights(tmp_path / "own")
    assert all(torch.equal(a[name], b[name]) for name in a)
    kinds = [[e["event"] for e in read_events(tmp_path / name)] for name in ("fit", "own")]
    assert kinds[0] == kinds[1]
    assert verdicts(tmp_path / "own") == verdicts(tmp_path / "fit")


@pytest.mark.parametrize(
    ("limit", "said"),
    [(None, "Gradient clipping: none\n"), (0.5, "Gradient clipping: at norm 0.5\n")],
)
def test_the_banner_says_whether_gradients_are_clipped(
    limit: float | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(TinyTask(NUM_SAMPLES), config_for(tmp_path, max_grad_norm=limit, max_steps=1))
    assert said in capsys.readouterr().out


def test_a_loop_that_does_not_count_its_steps_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"took\(report, batch\)"):
        run_ranks(1, own_loop, tmp_path, False)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_that_leaves_out_exact_mode_is_refused(num_ranks: int, tmp_path: Path) -> None:
    """Nobody would sum the gradients of two ranks, which would go apart, and save."""
    with pytest.raises(RuntimeError, match=r"(?s)exact=true.*leaf_sum=run.leaf_sum"):
        run_ranks(num_ranks, partial(own_loop, exact=True), tmp_path)


def test_a_save_that_fails_at_the_end_does_not_hide_what_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mistaken(TinyTask):
        def loss(self, model: nn.Module, batch: Any, context: Context) -> PartialLoss:
            if context.step == 2:
                raise ValueError("the user's own mistake")
            return super().loss(model, batch, context)

    def write_late(*_: Any) -> None:
        time.sleep(0.3)
        raise CheckpointError("the disk is full", "room")

    monkeypatch.setattr(CheckpointStore, "write_share", write_late)
    with pytest.raises(ValueError, match="the user's own mistake"):
        fit(Mistaken(NUM_SAMPLES), config_for(tmp_path, evaluation={"every_epochs": 9}))
    said = [e["message"] for e in read_events(tmp_path, raw=True) if e["event"] == "warning"]
    assert said == ["NOT SAVED: the disk is full"]


def test_a_bad_sample_is_named_though_the_disk_is_full(tmp_path: Path) -> None:
    def fill_disk() -> None:
        def write_share(*_: Any) -> None:
            raise CheckpointError("the disk is full", "room")

        CheckpointStore.write_share = write_share  # type: ignore[method-assign]

    for said in run(tmp_path, 2, lambda: OneHoleTask(NUM_SAMPLES), fill_disk, checkpoint={}):
        assert said[0] == "DataError"
        assert "sample 5 cannot be read" in said[1]
    warned = [e["message"] for e in read_events(tmp_path, raw=True) if e["event"] == "warning"]
    assert warned == ["NOT SAVED: rank 0: the disk is full"]


def test_what_ends_a_run_says_on_which_rank_and_after_which_step(tmp_path: Path) -> None:
    class Broken(TinyTask):
        def loss(self, model: nn.Module, batch: Any, context: Context) -> PartialLoss:
            if context.training and context.step == 2:
                raise ZeroDivisionError("a bug")
            return super().loss(model, batch, context)

    def one_rank() -> list[str]:
        with pytest.raises(ZeroDivisionError) as caught:
            fit(Broken(NUM_SAMPLES), config_for(tmp_path))
        return caught.value.__notes__

    assert run_ranks(1, one_rank) == [["on rank 0, after step 2"]]


def test_evaluations_and_saves_may_come_within_an_epoch(tmp_path: Path) -> None:
    # Three steps an epoch, of 8, 8 and 4 samples: halves lie in the second and the third.
    half = {"every_epochs": 0.5}
    run(tmp_path, 2, evaluation=half | {"save_best": False}, checkpoint=half)
    for kind in ("evaluation", "saving"):
        assert [event["step"] for event in events(tmp_path, kind)] == [2, 3, 5, 6]


# --- What a task may ask for -----------------------------------------------------------------


class Growing(TinyTask):
    """As wide as the words it knows, of which a resumed run's data have more."""

    def __init__(self, num_words: int) -> None:
        super().__init__(NUM_SAMPLES)
        self.num_words = num_words

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, self.num_words), nn.Linear(self.num_words, 3)).double()

    def state(self) -> dict[str, Any]:
        return {"num_words": self.num_words}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.num_words = state["num_words"]


def test_a_task_remembers_before_it_builds_its_model(tmp_path: Path) -> None:
    run(tmp_path, 1, lambda: Growing(4), max_steps=2)
    (result,) = run(tmp_path, 1, lambda: Growing(7), max_steps=4)
    assert result.step == 4, result
    assert weights(tmp_path)["0.weight"].shape == (4, 5)


class Gathering(TinyTask):
    """Says that its loss compares the samples of all ranks."""

    gathers = True


def test_a_loss_that_gathers_goes_on_with_as_many_samples_at_a_time(tmp_path: Path) -> None:
    def go_on(num_ranks: int, max_steps: int, **changes: Any) -> Any:
        (first, *_) = run(
            tmp_path, num_ranks, lambda: Gathering(NUM_SAMPLES), max_steps=max_steps, **changes
        )
        return first

    assert go_on(2, 2).step == 2
    kind, text, _ = go_on(1, 3)
    assert kind == "ConfigError"
    assert "4 at a time (2 x 2 ranks), this run would have 2" in text
    assert go_on(2, 3).step == 3
    assert go_on(1, 4, accept_changes=True).step == 4


class Settled(TinyTask):
    """Was built with something that ranks must agree on."""

    def settings(self) -> dict[str, Any]:
        return {"width": 3 + int(os.environ["RANK"]) * self.num_held_out}


def test_a_tasks_settings_are_recorded_and_alike_on_all_ranks(tmp_path: Path) -> None:
    errors = run(tmp_path, 2, lambda: Settled(NUM_SAMPLES, num_held_out=1))
    assert {error[0] for error in errors} == {"ConfigError"}
    assert "different settings" in errors[0][1]
    run(tmp_path, 2, lambda: Settled(NUM_SAMPLES, num_held_out=0), max_steps=1)
    assert json.loads((tmp_path / "config.json").read_text())["task"] == {"width": 3}


@pytest.mark.parametrize("resume", ["discard", "never", "step_00000002"])
def test_a_job_that_starts_a_run_again_goes_on_whatever_it_asked_for_at_first(
    resume: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else it would discard, refuse, or go back from, what it has trained itself."""
    env, saving = {"SLURM_JOB_ID": "7"}, {"every_steps": 1, "keep_last": 1}

    def start(**changes: Any) -> Any:
        return run(tmp_path, 1, before=lambda: os.environ.update(env), resume=resume, **changes)[0]

    if resume.startswith("step"):
        run(tmp_path, 1, max_steps=2)
    assert start(max_steps=5, checkpoint=saving).step == 5
    env["SLURM_RESTART_COUNT"] = "1"
    capfd.readouterr()
    assert start().step == 6
    assert "resumed at step 5" in capfd.readouterr().out
    env["SLURM_JOB_ID"] = "8"
    assert resume != "never" or start()[0] == "ConfigError", "another job's is not its own"


def test_a_launch_that_was_or_is_on_several_machines_may_be_the_same(tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path / "checkpoints")
    for theirs, ours, resume in (
        ("none_a", "none_a", "auto"),
        ("none_a", "none", "auto"),
        ("none", "none_b", "auto"),
        ("none_a", "none_b", "discard"),
        ("7", "none_a", "discard"),
        ("", "none_a", "discard"),
    ):
        shutil.rmtree(tmp_path, ignore_errors=True)
        folder.save(1, {"model": {}}, {"job": theirs})
        assert settled(RunConfig(resume="discard"), folder, ours).resume == resume, (theirs, ours)
