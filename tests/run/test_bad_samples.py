"""A sample that cannot be read, or an error of the task's own, is met by all ranks together."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from whole_run import NUM_SAMPLES, config_for, events, run, store, verdicts, weights

from lockstep import CheckpointStore, PartialLoss, fit, read_events
from lockstep.data import loader
from lockstep.dist.agreement import together
from lockstep.errors import (
    CheckpointError,
    DataError,
    TakenOverError,
)
from lockstep.task import Context
from lockstep.testing import TinyTask, run_ranks
from lockstep.world import World


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
    changes = {"loader": {"num_workers": num_workers}, "timeout_s": 600}  # nobody waits for that
    errors = run(tmp_path, 2, lambda: OneHoleTask(NUM_SAMPLES), **changes)
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
    with pytest.raises(RuntimeError, match="ended without returning a result"):
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


@pytest.mark.parametrize("exact", [False, True])
def test_a_micro_batch_without_a_good_sample_has_no_weight(exact: bool, tmp_path: Path) -> None:
    batch = {"batch_size": 1, "global_batch_size": 4, "drop_last": False}
    changes = {"loader": {"on_bad_sample": "skip"}, "batch": batch, "exact": exact}
    found = {}
    for num_ranks in (1, 2, 3):
        folder = tmp_path / str(num_ranks)
        (result, *_) = run(folder, num_ranks, lambda: HoledTask(NUM_SAMPLES), **changes)
        assert result.step == 10
        found[num_ranks] = weights(folder)
        skipped = [
            e["sample"] for r in range(num_ranks) for e in events(folder, "sample_skipped", r)
        ]
        assert sorted(skipped) == [5, 5, 12, 12], "each in each epoch"
        assert verdicts(folder) == ["20 of 20 samples, each once"] * 2
    run(
        tmp_path / "larger",
        1,
        lambda: HoledTask(NUM_SAMPLES),
        **changes | {"batch": {"batch_size": 4, "drop_last": False}},
    )
    found[4] = weights(tmp_path / "larger")
    for other in (2, 3, 4):
        for name, tensor in found[1].items():
            limit = 0 if exact and other < 4 else 1e-12
            torch.testing.assert_close(found[other][name], tensor, rtol=0, atol=limit)


def test_a_contrastive_loss_leaves_a_stand_in_out(tmp_path: Path) -> None:
    class Contrastive(HoledTask):
        gathers = True

        def loss(self, model: nn.Module, batch: Any, context: Context) -> PartialLoss:
            rows = model(batch["x"])
            others = context.gather(rows)
            weight = len(rows) * len(others)
            return PartialLoss((rows @ others.T).square().sum() / 20, weight)

    batch = {"batch_size": 1, "global_batch_size": 4, "drop_last": False}
    skip = {"loader": {"on_bad_sample": "skip"}, "batch": batch, "exact": True}
    found = []
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        (result, *_) = run(
            folder, num_ranks, lambda: Contrastive(NUM_SAMPLES, num_held_out=0), **skip
        )
        assert result.step == 10
        found.append(weights(folder))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_held_out_batch_without_a_good_sample_is_skipped(num_ranks: int, tmp_path: Path) -> None:
    class Task(TinyTask):
        bad: tuple[int, ...] = (6, 7)

        def eval_data(self) -> Any:
            samples = super().eval_data()
            return Holed(samples, self.bad) if self.bad else samples[:6] + samples[8:]

    evaluation = {"every_steps": 3, "batch_size": 2}
    skip = {"loader": {"on_bad_sample": "skip"}, "evaluation": evaluation}
    (result, *_) = run(tmp_path / "skipped", num_ranks, lambda: Task(NUM_SAMPLES), **skip)
    Task.bad = ()
    (without, *_) = run(tmp_path / "without", num_ranks, lambda: Task(NUM_SAMPLES), **skip)
    assert result.metrics == pytest.approx(without.metrics, abs=1e-12)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_of_bad_samples_only_is_refused(num_workers: int, tmp_path: Path) -> None:
    class Task(HoledTask):
        bad = tuple(range(NUM_SAMPLES))

    loader = {"on_bad_sample": "skip", "num_workers": num_workers}
    (error,) = run(tmp_path, 1, lambda: Task(NUM_SAMPLES), loader=loader)
    assert error[0] == "DataError"
    assert "and so were the next 64" in error[1]


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


class StreamTask(TinyTask):
    """The ranks compare the first samples of a stream after reading them."""

    def train_data(self) -> Any:
        samples = super().train_data()

        class Stream(torch.utils.data.IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                return iter(samples)

        return Stream()


@pytest.mark.parametrize(
    ("kind", "at_copy", "saved"), [(TinyTask, 5, [2]), (TinyTask, 1, []), (StreamTask, 1, [])]
)
def test_a_batch_that_does_not_fit_on_one_device_is_raised_on_all(
    kind: type[TinyTask], at_copy: int, saved: list[int], tmp_path: Path
) -> None:
    """The copy to the device is a fake, as is its error: it is that of a GPU."""

    def plant() -> None:
        num_copied = 0

        def to_device(batch: Any, device: torch.device) -> Any:
            nonlocal num_copied
            num_copied += 1
            if os.environ["RANK"] == "1" and num_copied == at_copy:  # of two a step
                raise torch.OutOfMemoryError("CUDA out of memory.\nMore lines")
            return batch

        loader.to_device = to_device  # type: ignore[attr-defined]

    changes = {"checkpoint": {"every_steps": 100}, "max_steps": 4}
    said = run(tmp_path, 2, lambda: kind(NUM_SAMPLES), plant, **changes)
    problem = "rank 1: a batch could not be copied to cpu: CUDA out of memory."
    assert said == [("OutOfMemoryError", f"{problem}\n  try: lower batch_size", 2)] * 2
    assert store(tmp_path).steps() == saved


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
