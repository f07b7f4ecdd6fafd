"""N ranks equal one, by parameters and not by loss; and each way to get it wrong is seen."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep import Loader, PartialLoss, Task, World, train_step
from lockstep.data.order import Shuffled, leaves_of
from lockstep.dist.ddp import unwrap
from lockstep.plan import BatchConfig, plan_batches
from lockstep.randomness import keyed_generator, seed_all
from lockstep.task import Context
from lockstep.testing import TinyTask, run_ranks

EXACT = 1e-12


# --- Training on N ranks ----------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Everything but the number of ranks."""

    task: Callable[[], Task]
    batch_size: int = 2
    global_batch: int = 8
    steps: int = 6
    optimizer: str = "sgd"
    lr: float = 0.2
    max_grad_norm: float | None = None
    world_seen: Callable[[World], Any] = lambda world: world


@dataclass(frozen=True)
class Trained:
    """What came of it."""

    weights: np.ndarray
    losses: list[float]
    weight_sums: list[float]
    norms: list[float]
    parts: list[list[float]]


def train_here(setting: Setting) -> Trained:
    """Train on the rank this process is."""
    with World.enter("cpu", timeout_s=20) as world:
        task = setting.task()
        data = task.train_data()
        config = BatchConfig(
            batch_size=setting.batch_size, global_batch_size=setting.global_batch, drop_last=False
        )
        plan = plan_batches(config, len(data), world.size)
        seed_all(0, "weights")
        model = world.replicate(task.build_model())
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[setting.optimizer]
        optimizer = kind(model.parameters(), lr=setting.lr)
        loader = Loader(data, world, plan=plan, max_steps=setting.steps, collate=task.collate)
        seen: Any = setting.world_seen(world)
        reports = [
            train_step(
                task.loss, model, optimizer, batch, seen, max_grad_norm=setting.max_grad_norm
            )
            for batch in loader
        ]
        weights = torch.cat([p.detach().flatten() for p in unwrap(model).parameters()])
        return Trained(
            weights.numpy().copy(),
            [float(report.loss) for report in reports],
            [float(report.weight) for report in reports],
            [float(report.grad_norm) for report in reports],
            [[float(v) for pair in report.parts.values() for v in pair] for report in reports],
        )


@cache
def trained(num_ranks: int, setting: Setting) -> Trained:
    """Train on `num_ranks` ranks, which must all end up with the same weights."""
    results = run_ranks(num_ranks, train_here, setting, timeout_s=30)
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].weights, other.weights)
    return results[0]


def difference(a: Trained, b: Trained) -> float:
    """Return the largest difference of a weight; weights that are not numbers differ."""
    return float(np.nan_to_num(np.abs(a.weights - b.weights), nan=np.inf).max())


# --- Tasks ------------------------------------------------------------------------


class UnevenTask(TinyTask):
    """Uneven weights, a tail step of fewer leaves than ranks, and one leaf without any unit."""

    def __init__(self, num_samples: int = 21, dropout: float = 0.0) -> None:
        super().__init__(num_samples, dropout=dropout)

    def train_data(self) -> list[dict[str, Tensor]]:
        data = super().train_data()
        for sample in Shuffled(self.num_samples, seed=0).ids(0, 10, 12):  # step 1, place 1
            data[sample]["units"] = torch.zeros_like(data[sample]["units"])
        return data


class ShortTask(UnevenTask):
    """Leaves one sample for the last step of an epoch: all ranks but one borrow."""

    def __init__(self) -> None:
        super().__init__(num_samples=17)


class NoisyTask(UnevenTask):
    """Dropout from torch's own generator, and noise from a named stream."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def noise(self, shape: torch.Size, context: Context) -> Tensor:
        generator = context.generator("noise")
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        noisy = batch["x"] + 0.5 * self.noise(batch["x"].shape, context)
        return super().loss(model, {**batch, "x": noisy}, context)


class ContrastiveTask(TinyTask):
    """Each sample must find its partner among those of all ranks, in both directions."""

    scale = 3.0

    def build_model(self) -> nn.Module:
        return nn.Linear(5, 4).double()

    def gather(self, local: Tensor, context: Context) -> Tensor:
        return context.gather(local)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        pair = torch.stack([batch["x"], batch["x"].roll(1, dims=1)], dim=1)
        local = functional.normalize(model(pair), dim=-1)  # one forward: DDP counts them
        everyone = self.gather(local, context)
        mine = context.gather(batch["x"][:, 0])
        first = int((mine == batch["x"][0, 0]).nonzero()[0])
        target = torch.arange(len(local)) + first
        there = self.scale * local[:, 0] @ everyone[:, 1].T
        back = self.scale * local[:, 1] @ everyone[:, 0].T
        loss = functional.cross_entropy(there, target, reduction="sum")
        loss = loss + functional.cross_entropy(back, target, reduction="sum")
        return PartialLoss(loss, float(len(local)))


# --- N ranks equal one --------------------------------------------------------------


@pytest.mark.parametrize("task", [UnevenTask, ShortTask])
@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.2), ("adamw", 0.05)])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_n_ranks_end_with_the_weights_of_one(
    num_ranks: int, optimizer: str, lr: float, task: Callable[[], Task]
) -> None:
    setting = Setting(task, optimizer=optimizer, lr=lr)
    one, many = trained(1, setting), trained(num_ranks, setting)
    assert difference(one, many) < EXACT
    np.testing.assert_allclose(one.losses, many.losses, rtol=EXACT)
    np.testing.assert_allclose(one.norms, many.norms, rtol=EXACT)
    np.testing.assert_allclose(one.parts, many.parts, rtol=EXACT)
    assert one.weight_sums == many.weight_sums


def test_the_comparison_has_what_is_hard_in_it() -> None:
    """An empty micro-batch, ranks that only borrow, and weights that moved a good way."""
    config = BatchConfig(batch_size=2, global_batch_size=8, drop_last=False)
    four = [plan_batches(config, n, 4) for n in (21, 17)]
    padding = [[leaf.is_padding for r in range(4) for leaf in leaves_of(p, 2, r)] for p in four]
    assert [sum(flags) for flags in padding] == [1, 3]
    data = UnevenTask().train_data()
    assert sum(float(data[i]["units"]) for i in Shuffled(21, seed=0).ids(0, 10, 12)) == 0
    still = trained(1, Setting(UnevenTask, steps=1, lr=1e-300))
    assert difference(still, trained(1, Setting(UnevenTask))) > 0.1


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_accumulation_changes_nothing(num_ranks: int, batch_size: int) -> None:
    whole = Setting(UnevenTask, batch_size=12, global_batch=12)
    cut = replace(whole, batch_size=batch_size)
    assert difference(trained(1, whole), trained(num_ranks, cut)) < EXACT


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_dropout_and_noise_do_not_depend_on_the_number_of_ranks(num_ranks: int) -> None:
    setting = Setting(NoisyTask)
    assert difference(trained(1, setting), trained(num_ranks, setting)) < EXACT


def test_dropout_and_noise_are_really_there() -> None:
    assert difference(trained(1, Setting(NoisyTask)), trained(1, Setting(UnevenTask))) > 1e-3


# --- Planted faults: each must be seen ------------------------------------------------


class OneAmongMany:
    """A world that forgets its size where the gradient is scaled."""

    def __init__(self, world: World) -> None:
        self.size, self.rank, self.device = 1, world.rank, world.device
        self.all_sum, self.all_gather = world.all_sum, world.all_gather
        self.custom_loop, self.phase = None, world.phase


class MeansTask(UnevenTask):
    """Averages each micro-batch for itself, as most hand-written loops do."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        part = super().loss(model, batch, context)
        weight = torch.as_tensor(part.weight)
        return PartialLoss(part.loss_sum / weight.clamp(min=1), 1.0, part.parts)


class RankMeansTask(UnevenTask):
    """Averages over the rank's units, then over ranks: exact only if all ranks hold as many."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        part = super().loss(model, batch, context)
        share = context.world.all_sum(torch.as_tensor(part.weight)) / context.world.size
        return PartialLoss(part.loss_sum / torch.as_tensor(part.weight).clamp(min=1) * share, share)


class RankNoiseTask(NoisyTask):
    """Keys its noise by the rank instead of the place."""

    def noise(self, shape: torch.Size, context: Context) -> Tensor:
        generator = keyed_generator(torch.device("cpu"), 0, context.step, context.world.rank)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


class GlobalNoiseTask(NoisyTask):
    """Draws from a generator that runs on, so it depends on what this rank drew before."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def noise(self, shape: torch.Size, context: Context) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(Setting(UnevenTask, world_seen=OneAmongMany), id="no world size factor"),
        pytest.param(Setting(MeansTask, global_batch=4), id="means of micro-batches"),
        pytest.param(Setting(RankMeansTask, global_batch=4), id="means of ranks"),
        pytest.param(Setting(RankNoiseTask), id="noise keyed by rank"),
        pytest.param(Setting(GlobalNoiseTask), id="noise from a running generator"),
    ],
)
def test_the_comparison_can_fail(planted: Setting) -> None:
    right = planted.task in (MeansTask, RankMeansTask)
    one = trained(1, replace(planted, task=UnevenTask) if right else planted)
    assert difference(one, trained(2, planted)) > 1e-3


# --- A gather inside the loss -----------------------------------------------------------


def contrastive(num_ranks: int, num_samples: int, task: type[ContrastiveTask]) -> Trained:
    """Train on batches of 8, cut into one micro-batch per rank: the same negatives for all."""
    cut = Setting(
        _Sized(task, num_samples), batch_size=8 // num_ranks, steps=-(-num_samples // 8) * 2
    )
    return trained(num_ranks, cut)


@dataclass(frozen=True)
class _Sized:
    task: type[ContrastiveTask]
    num_samples: int

    def __call__(self) -> Task:
        return self.task(self.num_samples)


@pytest.mark.parametrize(("num_ranks", "num_samples"), [(2, 24), (4, 24), (2, 22), (4, 23)])
def test_a_gather_with_gradients_gives_the_step_of_one_rank(
    num_ranks: int, num_samples: int
) -> None:
    one = contrastive(1, num_samples, ContrastiveTask)
    many = contrastive(num_ranks, num_samples, ContrastiveTask)
    np.testing.assert_allclose(one.losses, many.losses, rtol=1e-11)
    assert difference(one, many) < EXACT


def test_a_rank_that_only_borrows_adds_nothing_to_a_gather() -> None:
    one, many = contrastive(1, 22, ContrastiveTask), contrastive(4, 22, ContrastiveTask)
    assert difference(one, many) < EXACT


def test_a_gather_meets_where_ranks_hold_different_numbers_of_micro_batches() -> None:
    """Four micro-batches on three ranks: one rank calls once more than the others."""
    setting = Setting(_Sized(ContrastiveTask, 24), steps=2)
    result = trained(3, setting)
    assert np.isfinite(result.weights).all()


class DetachedTask(ContrastiveTask):
    """Gathers without gradients: the right loss, the wrong step."""

    def gather(self, local: Tensor, context: Context) -> Tensor:
        if context.world.size == 1:
            return local
        everyone = context.gather(local).detach().clone()
        first = int((everyone == local[0].detach()).flatten(1).all(dim=1).nonzero()[0])
        everyone[first : first + len(local)] = local
        return everyone


def test_a_detached_gather_keeps_the_loss_and_breaks_the_step() -> None:
    one, many = contrastive(1, 24, ContrastiveTask), contrastive(2, 24, DetachedTask)
    assert one.losses[0] == pytest.approx(many.losses[0], rel=EXACT)
    assert difference(one, many) > 1e-3


# --- Clipping, and steps without any unit ---------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_clipping_does_not_depend_on_the_number_of_ranks(num_ranks: int) -> None:
    setting = Setting(UnevenTask, lr=2.0, max_grad_norm=0.3)
    one, many = trained(1, setting), trained(num_ranks, setting)
    assert min(one.norms) > 0.3, "every step is clipped"
    assert difference(one, many) < EXACT
    np.testing.assert_allclose(one.norms, many.norms, rtol=EXACT)


class BarrenTask(UnevenTask):
    """No sample has any unit."""

    dtype = torch.float64

    def train_data(self) -> list[dict[str, Tensor]]:
        data = super().train_data()
        return [
            {k: (v if k != "units" else v * 0).to(self.dtype) for k, v in s.items()} for s in data
        ]

    def build_model(self) -> nn.Module:
        return super().build_model().to(self.dtype)


class BarrenFloatTask(BarrenTask):
    dtype = torch.float32


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("task", [BarrenTask, BarrenFloatTask])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_step_without_any_unit_leaves_the_weights_alone(
    num_ranks: int, task: Callable[[], Task], max_grad_norm: float | None
) -> None:
    setting = Setting(task, steps=2, max_grad_norm=max_grad_norm)
    seed_all(0, "weights")
    first = torch.cat([p.detach().flatten() for p in task().build_model().parameters()])
    after = trained(num_ranks, setting)
    assert after.norms == [0.0, 0.0]
    np.testing.assert_array_equal(after.weights, first.numpy())


# --- And then it ends ---------------------------------------------------------------------


def train_and_let_go() -> bool:
    # The interpreter is not asked to pass its lock on: what needs it meanwhile has to wait.
    sys.setswitchinterval(100)
    train_here(Setting(UnevenTask))
    return True


def test_a_rank_that_left_the_group_can_let_go_of_its_model() -> None:
    """The model holds the group too; letting go of it must not wait for the group's thread."""
    for _ in range(4):
        assert run_ranks(2, train_and_let_go, timeout_s=10) == [True, True]
