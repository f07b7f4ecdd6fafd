"""Losses whose terms have units of their own, and batch normalisation, on ranks as on one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep import PartialLoss, RunConfig, fit
from lockstep.batch_norm import SyncBatchNorm
from lockstep.task import Context
from lockstep.testing import FakeWorld, TinyTask, run_ranks


class TwoTerms(TinyTask):
    """A mean over units plus half a mean over the samples that have none."""

    def weights(self, batch: dict[str, Tensor], context: Context) -> dict[str, Tensor]:
        return {"units": batch["units"].sum(), "idle": (batch["units"] == 0).sum()}

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        error = (model(batch["x"]) - batch["y"]).square().sum(dim=1)
        idle = (batch["units"] == 0).double()
        terms = {"units": (error * batch["units"]).sum(), "idle": (error * idle).sum()}
        weights = self.weights(batch, context)
        if not context.training:
            return PartialLoss(terms["units"], weights["units"])
        total = (
            terms["units"] / context.weights["units"]
            + 0.5 * terms["idle"] / context.weights["idle"]
        )
        return PartialLoss(total, 1.0, {n: (terms[n].detach(), weights[n]) for n in terms})


class OwnMeans(TwoTerms):
    """The same, each micro-batch dividing by its own counts: what the totals are for."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        counted = {name: value.clamp(min=1) for name, value in self.weights(batch, context).items()}
        own = Context(context.world, 0, context.step, 0, context.training, weights=counted)
        return super().loss(model, batch, own)


class Normalised(TinyTask):
    """A network with batch normalisation in it."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
        ).double()

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train(folder: Path, task: TinyTask, **values: object) -> None:
    settings = {
        "output_dir": str(folder),
        "max_steps": 6,
        "epochs": 9,
        "rate": {"lr": 0.05},
        "sinks": {"curves": False},
        "max_grad_norm": None,
    }
    fit(task, RunConfig.parse(settings | values))


def farthest(folder: Path, reference: Path) -> float:
    a, b = (
        load_file(path / "checkpoints" / "step_00000006" / "model.safetensors")
        for path in (folder, reference)
    )
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def spread(tmp_path: Path, task: TinyTask, ranks: int) -> float:
    batch = {"batch_size": 3, "global_batch_size": 12}
    for count in (1, ranks):
        train_on(count, tmp_path / str(count), task, batch=batch)
    return farthest(tmp_path / str(ranks), tmp_path / "1")


def train_on(count: int, folder: Path, task: TinyTask, **values: object) -> None:
    def action() -> None:
        train(folder, task, **values)

    run_ranks(count, action)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_terms_with_units_of_their_own_are_ranks_as_one(tmp_path: Path, ranks: int) -> None:
    assert spread(tmp_path, TwoTerms(), ranks) < 1e-12


def test_without_the_steps_totals_accumulation_would_matter(tmp_path: Path) -> None:
    for task, name in ((TwoTerms(), "totals"), (OwnMeans(), "own")):
        for size in (3, 12):
            batch = {"batch_size": size, "global_batch_size": 12}
            train_on(1, tmp_path / f"{name}{size}", task, batch=batch)
    assert farthest(tmp_path / "totals3", tmp_path / "totals12") < 1e-12
    assert farthest(tmp_path / "own3", tmp_path / "own12") > 1e-3


@pytest.mark.parametrize("ranks", [2, 4])
def test_synchronised_batch_norm_on_ranks_equals_one_larger_batch(
    tmp_path: Path, ranks: int
) -> None:
    train_on(1, tmp_path / "one", Normalised(), batch={"batch_size": 12})
    for name, sync in (("sync", True), ("apart", False)):
        batch = {"batch_size": 12 // ranks}
        train_on(ranks, tmp_path / name, Normalised(), batch=batch, sync_batch_norm=sync)
    assert farthest(tmp_path / "sync", tmp_path / "one") < 1e-12
    assert farthest(tmp_path / "apart", tmp_path / "one") > 1e-3, "the comparison can fail"


def test_running_statistics_do_not_hold_on_to_earlier_steps() -> None:
    norm = SyncBatchNorm(nn.BatchNorm1d(8), FakeWorld())
    model = nn.Sequential(nn.Linear(5, 8), norm)
    lengths = []
    for _ in range(3):
        model(torch.rand(4, 5)).sum().backward()
        lengths.append([chain_length(norm.running_mean), chain_length(norm.running_var)])
    assert lengths == [[0, 0]] * 3


def chain_length(tensor: Tensor | None) -> int:
    """Count the operations that autograd would go back through from `tensor`."""
    assert tensor is not None
    found, new = set(), {tensor.grad_fn} - {None}
    while new:
        found |= new
        new = {above for node in new for above, _ in node.next_functions} - {None} - found
    return len(found)
