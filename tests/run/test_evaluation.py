"""Evaluation counts each sample once, whatever the ranks; a mean of means is seen to be wrong."""

import importlib
import math
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lockstep import PartialLoss, World
from lockstep.data.workers import LoaderConfig
from lockstep.randomness import seed_all
from lockstep.run.evaluation import evaluate, evaluating
from lockstep.task import Context
from lockstep.testing import FakeWorld, TinyTask, run_ranks

EXACT = 1e-12


class EvaluatedTask(TinyTask):
    """Returns sums and weights, and remembers which samples it was shown."""

    def __init__(self, num_held_out: int) -> None:
        super().__init__(num_held_out=num_held_out)
        self.seen: list[float] = []

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> Any:
        self.seen += batch["x"][:, 0].tolist()
        return super().evaluate(model, batch, context)


class NoisyTask(EvaluatedTask):
    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> Any:
        generator = context.generator("noise")
        noise = torch.randn(batch["x"].shape, generator=generator, dtype=torch.float64)
        return super().evaluate(model, {**batch, "x": batch["x"] + noise}, context)


class MeasuredTask(EvaluatedTask):
    """Measures with torchmetrics: one that adds up, and one that keeps every prediction."""

    def metrics(self) -> Mapping[str, Any]:
        if not hasattr(self, "held"):
            from torchmetrics import MeanSquaredError, SpearmanCorrCoef

            with warnings.catch_warnings(action="ignore"):  # it says that it keeps predictions
                spearman = SpearmanCorrCoef()
            self.held = {"mse": MeanSquaredError(), "spearman": spearman}
            for metric in self.held.values():
                metric.set_dtype(torch.float64)
        return self.held

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> Any:
        predicted = model(batch["x"])[:, 0].contiguous()
        for metric in self.metrics().values():
            metric.update(predicted, batch["y"][:, 0].contiguous())
        return super().evaluate(model, batch, context)


class RareTask(EvaluatedTask):
    """Reports a number only for the batch that has it, the last one."""

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> Any:
        found = {"loss": (torch.tensor(1.0), 1.0)}
        if context.place == 2:
            found["rare"] = (torch.tensor(6.0), 2.0)
        return found


class MeanOfMeansTask(EvaluatedTask):
    """Forgets its weights: every batch counts alike."""

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> Any:
        part = super().evaluate(model, batch, context)
        return {"loss": (part.loss_sum / part.weight, 1.0)}


class FractionTask(TinyTask):
    """Counts in hundredths, as importance weights may be: a batch has less than one of them."""

    def weights(self, batch: dict[str, Tensor], context: Context) -> dict[str, Tensor]:
        return {"units": batch["units"].sum() / 100}

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        part = super().loss(model, batch, context)
        return PartialLoss(part.loss_sum / 100 / context.weights["units"], 1.0)


class CountingTask(EvaluatedTask):
    """Counts in a table, and reports what follows from the table and from a mean."""

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> Any:
        signs = torch.stack([batch["x"][:, 0] > 0, batch["y"][:, 0] > 0], dim=1).long()
        table = torch.zeros(2, 2, dtype=torch.int64)
        for row, column in signs.tolist():
            table[row, column] += 1
        part = super().evaluate(model, batch, context)
        return {"loss": (part.loss_sum, part.weight), "table": (table, len(signs))}

    def derive(self, means: Mapping[str, Tensor]) -> Mapping[str, float]:
        assert means["table"].shape == (2, 2)
        derived = {"same_sign": float(means["table"].trace()), "exp": math.exp(means["loss"])}
        return {**super().derive(means), **derived}


def evaluate_here(kind: type[EvaluatedTask], num_held_out: int, times: int) -> Any:
    # torchmetrics says so of a rank that has no sample; its number is right all the same.
    warnings.filterwarnings("ignore", "The ``compute`` method of metric")
    with World.enter("cpu", timeout_s=20) as world:
        task = kind(num_held_out)
        seed_all(0, "weights")
        model = task.build_model()
        options = {"batch_size": 2, "seed": 0, "step": 3, "loader": LoaderConfig()}
        for _ in range(times):
            task.seen.clear()
            result = evaluate(task, model, task.eval_data(), world, **options)  # type: ignore[arg-type]
        assert model.training
        return result, task.seen


@cache
def evaluated(
    num_ranks: int, kind: type[EvaluatedTask] = EvaluatedTask, num_held_out: int = 5, times: int = 1
) -> tuple[dict[str, float], list[float]]:
    """Return what all ranks found, which must be the same, and the samples they were shown."""
    if kind is MeasuredTask:
        importlib.import_module("torchmetrics")  # here, or every rank takes its seconds for it
    results = run_ranks(num_ranks, evaluate_here, kind, num_held_out, times, timeout_s=30)
    assert all(result == results[0][0] for result, _ in results)
    return results[0][0], [x for _, seen in results for x in seen]


@cache
@torch.no_grad()
def by_hand(num_held_out: int = 5) -> float:
    """Compute the mean over all units at once."""
    task = TinyTask(num_held_out=num_held_out)
    seed_all(0, "weights")
    model = task.build_model()
    data = {k: torch.stack([s[k] for s in task.eval_data()]) for k in ("x", "y", "units")}
    error = (model(data["x"]) - data["y"]).square().sum(dim=1)
    return float((error * data["units"]).sum() / data["units"].sum())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_held_out_sample_counts_once(num_ranks: int) -> None:
    result, seen = evaluated(num_ranks)
    assert sorted(seen) == sorted(float(s["x"][0]) for s in TinyTask(num_held_out=5).eval_data())
    assert result["loss"] == pytest.approx(by_hand(), rel=EXACT)
    assert result.keys() == {"loss", "heavy"}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_there_may_be_more_ranks_than_samples(num_ranks: int) -> None:
    result, seen = evaluated(num_ranks, num_held_out=1)
    assert len(seen) == 1
    assert result["loss"] == pytest.approx(by_hand(1), rel=EXACT)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_noise_in_an_evaluation_does_not_depend_on_the_number_of_ranks(num_ranks: int) -> None:
    one = evaluated(1, NoisyTask)[0]
    assert one["loss"] != pytest.approx(by_hand(), rel=1e-3), "there is noise"
    assert evaluated(num_ranks, NoisyTask)[0] == pytest.approx(one, rel=EXACT)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_torchmetrics_measure_the_same_on_every_number_of_ranks(num_ranks: int) -> None:
    one, many = evaluated(1, MeasuredTask)[0], evaluated(num_ranks, MeasuredTask)[0]
    assert one.keys() == {"loss", "heavy", "mse", "spearman"}
    assert many == pytest.approx(one, rel=1e-10)


def test_torchmetrics_begin_anew_with_every_evaluation() -> None:
    assert evaluated(2, MeasuredTask, times=3)[0] == evaluated(2, MeasuredTask)[0]


def test_a_rank_without_samples_does_not_disturb_torchmetrics() -> None:
    one, many = evaluated(1, MeasuredTask, 3)[0], evaluated(3, MeasuredTask, 3)[0]
    assert many == pytest.approx(one, rel=1e-10)


def test_a_number_that_only_one_rank_has_is_not_lost() -> None:
    assert evaluated(1, RareTask)[0] == {"loss": 1.0, "rare": 3.0}
    assert evaluated(2, RareTask)[0] == {"loss": 1.0, "rare": 3.0}


@pytest.mark.parametrize(("num_ranks", "num_held_out"), [(1, 5), (2, 5), (3, 1)])
def test_what_is_no_mean_is_derived_from_the_means_of_all_ranks(num_ranks, num_held_out) -> None:
    result, _ = evaluated(num_ranks, CountingTask, num_held_out)
    held_out = TinyTask(num_held_out=num_held_out).eval_data()
    same = [bool(s["x"][0] > 0) == bool(s["y"][0] > 0) for s in held_out]
    assert result.keys() == {"loss", "same_sign", "exp"}, "the table itself is not reported"
    assert result["same_sign"] == pytest.approx(sum(same) / num_held_out, rel=EXACT)
    assert result["exp"] == pytest.approx(math.exp(by_hand(num_held_out)), rel=EXACT)


def test_every_module_goes_back_to_the_mode_it_was_in_also_after_an_error() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[1].eval()

    def fail() -> None:
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"), evaluating(model):
        fail()
    assert torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == [True, True, False, False]


def test_terms_are_divided_by_what_they_were_counted_to_be_also_below_one() -> None:
    task, options = FractionTask(num_held_out=5), {"batch_size": 5, "seed": 0, "step": 0}
    seed_all(0, "weights")
    model, world = task.build_model(), FakeWorld()
    found = evaluate(task, model, task.eval_data(), world, loader=LoaderConfig(), **options)
    assert found["loss"] == pytest.approx(by_hand(), rel=EXACT)


class TwoTermsTask(TinyTask):
    """A mean over units plus a mean over samples without any, which some batches lack."""

    seen: list[float] = []
    is_scalar = False

    def __init__(self, num_held_out: int) -> None:
        super().__init__(num_held_out=num_held_out)

    def weights(self, batch: dict[str, Tensor], context: Context) -> dict[str, Tensor]:
        return {"units": batch["units"].sum(), "idle": (batch["units"] == 0).sum()}

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> Any:
        error = (model(batch["x"]) - batch["y"]).square().sum(dim=1)
        busy, idle = (error * batch["units"]).sum(), error[batch["units"] == 0].sum()
        total = busy / context.weights["units"] + idle / context.weights["idle"]
        return total if self.is_scalar else PartialLoss(total, 1.0)


class TwoMeansTask(TwoTermsTask):
    is_scalar = True


@pytest.mark.parametrize("kind", [TwoTermsTask, TwoMeansTask])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_term_is_a_mean_over_all_held_out_units(
    num_ranks: int, kind: type[TwoTermsTask]
) -> None:
    result, _ = evaluated(num_ranks, kind, 7)  # type: ignore[arg-type]
    task = kind(7)
    seed_all(0, "weights")
    model, data = task.build_model(), default_collate(task.eval_data())
    whole = Context(FakeWorld(), 0, 0, 0, weights=task.weights(data, None))  # type: ignore[arg-type]
    with torch.no_grad():
        wanted = task.loss(model, data, whole)
    wanted = wanted if kind.is_scalar else wanted.loss_sum
    assert result["loss"] == pytest.approx(float(wanted), rel=EXACT)
    assert result == evaluated(1, kind, 7)[0], "to the last bit"  # type: ignore[arg-type]


def test_the_comparison_sees_a_mean_of_means() -> None:
    assert evaluated(2, MeanOfMeansTask)[0]["loss"] != pytest.approx(by_hand(), rel=1e-3)
