"""A folder that holds a run: complete, discarded, taken up again, or refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from whole_run import NUM_SAMPLES, events, files, run, store, weights

from lockstep import CheckpointStore, RunConfig, read_events
from lockstep.errors import (
    ConfigError,
)
from lockstep.run.resume import resume_if_restarted
from lockstep.testing import TinyTask


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
    assert "holds checkpoints but no config.json" in refused[1]
    assert store(tmp_path).steps() == [2]


def test_a_longer_run_goes_on_from_a_complete_one(of_one: Path, tmp_path: Path) -> None:
    run(tmp_path, 1, epochs=1)
    assert run(tmp_path, 1, epochs=2)[0].step == 6
    for name, tensor in weights(of_one).items():
        assert torch.equal(weights(tmp_path)[name], tensor)


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


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_failed_before_its_first_step_binds_no_later_one(
    num_ranks: int, tmp_path: Path
) -> None:
    class Ragged(TinyTask):
        def collate(self, samples: list[dict[str, Tensor]]) -> Any:
            raise ValueError("ragged")

    errors = run(tmp_path, num_ranks, lambda: Ragged(NUM_SAMPLES))
    assert {error[0] for error in errors} == {"DataError"}
    assert not files(tmp_path)
    changed = {"resume": "never", "batch": {"batch_size": 5}, "precision": "bf16"}
    results = run(tmp_path, num_ranks, lambda: TinyTask(NUM_SAMPLES + 10), **changed)
    assert results[0].step == 2 * (NUM_SAMPLES + 10) // (5 * num_ranks)


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
        config = resume_if_restarted(RunConfig(resume="discard"), folder, ours)
        assert config.resume == resume, (theirs, ours)
