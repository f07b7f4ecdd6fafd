"""An evaluation that fails or changes modes: no step is lost, and it is made up for."""

import random
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from whole_run import NUM_SAMPLES, events, run, store, weights

from lockstep.task import Context
from lockstep.testing import TinyTask


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


class Drawing(TinyTask):
    """Measures a random number at the end of each evaluation."""

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> dict[str, float]:
        drawn = torch.rand(1).item() + np.random.rand() + random.random()
        return {"drawn": drawn}


def test_random_numbers_of_finish_evaluation_depend_on_no_rank_and_no_resume(
    tmp_path: Path,
) -> None:
    found = []
    for num_ranks, lengths in ((1, [6]), (2, [6]), (2, [4, 6])):
        folder = tmp_path / f"{num_ranks}_{len(lengths)}"
        for max_steps in lengths:
            evaluation = {"every_steps": 6}  # the interrupted run has evaluated once more
            run(folder, num_ranks, Drawing, evaluation=evaluation, max_steps=max_steps)
        found.append([e["metrics"]["drawn"] for e in events(folder, "evaluation")][-1])
    assert found == found[:1] * 3


class Measured(TinyTask):
    """Derives a given metric, or returns it from `finish_evaluation`."""

    def __init__(self, value: Any, is_derived: bool) -> None:
        super().__init__(NUM_SAMPLES)
        self.value = value
        self.is_derived = is_derived

    def derive(self, means: Mapping[str, Tensor]) -> Any:
        return {**super().derive(means), **({"score": self.value} if self.is_derived else {})}

    def finish_evaluation(self, model: nn.Module, context: Context, folder: str) -> Any:
        return {} if self.is_derived else {"score": self.value}


class Shaped(TinyTask):
    """Its held-out batches have sums, or weights, of different shapes."""

    def __init__(self, is_sum: bool) -> None:
        super().__init__(NUM_SAMPLES)
        self.is_sum = is_sum

    def evaluate(self, model: nn.Module, batch: Any, context: Context) -> Any:
        long = torch.ones(1 + context.place)
        return {
            "loss": (torch.ones(()), 1.0),
            "counts": (long, 1.0) if self.is_sum else (1.0, long),
        }


@pytest.mark.parametrize(
    ("is_sum", "num_ranks", "batch_size", "said"),
    [
        (True, 1, 5, "'counts' has shape (1,) in one held-out batch and (2,) in another"),
        (True, 2, 5, "'counts' has shape (1,) on rank 0 and (2,) on rank 1"),
        (False, 2, 5, "the weight of 'counts' is tensor([1., 1.]"),
    ],
)
def test_sums_of_different_shapes_are_refused_on_all_ranks(
    is_sum: bool, num_ranks: int, batch_size: int, said: str, tmp_path: Path
) -> None:
    evaluation = {"every_steps": 3, "batch_size": batch_size}
    errors = run(tmp_path, num_ranks, lambda: Shaped(is_sum), evaluation=evaluation)
    for kind, text, _ in errors:
        assert kind == "ConfigError"
        assert said in text


NUMBERS = [np.mean([1.0, 2.0]), np.float32(1.5), torch.tensor(1.5), np.array([1.5]), Fraction(3, 2)]


@pytest.mark.parametrize("is_derived", [True, False])
@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: type(value).__name__)
def test_a_metric_may_be_any_real_number(value: Any, is_derived: bool, tmp_path: Path) -> None:
    evaluation = {"every_steps": 3, "best_metric": "score"}
    (result,) = run(tmp_path, 1, lambda: Measured(value, is_derived), evaluation=evaluation)
    assert result.metrics["score"] == 1.5
    assert type(result.metrics["score"]) is float
    assert store(tmp_path).open("best_model.pt").meta["metrics"]["score"] == 1.5


@pytest.mark.parametrize("is_derived", [True, False])
@pytest.mark.parametrize("value", ["1.5", None, torch.ones(2), 1j], ids=repr)
def test_a_metric_that_is_not_a_number_is_named(
    value: Any, is_derived: bool, tmp_path: Path
) -> None:
    errors = run(tmp_path, 2, lambda: Measured(value, is_derived))
    assert {error[0] for error in errors} == {"ConfigError"}
    assert "metric 'score' is" in errors[0][1]
    assert store(tmp_path).steps()[-1] == 3, "the steps before it are saved"
