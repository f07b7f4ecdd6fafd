"""Exact mode: any number of ranks, resumed on any other, gives the same bits."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from lockstep import RunConfig, Task, fit
from lockstep.data.order import share
from lockstep.errors import ConfigError
from lockstep.exact.determinism import raise_if_not_deterministic
from lockstep.exact.reducer import ExactReducer
from lockstep.exact.tree import TreeSum, cover
from lockstep.task import Context, PartialLoss
from lockstep.testing import FakeWorld, run_ranks

SIZES = {"mlp": (1, 2, 3, 4, 5, 8)}
SOME_SIZES = (1, 3, 8)
ELASTIC = {"mlp": ((4, 3), (1, 5), (3, 6), (2, 8))}
SOME_ELASTIC = ((4, 3), (2, 8))
"""Ranks, and up to which step."""


class Mlp(Task):
    """Weighted regression in float32, with noise from a stream and from NumPy's generator."""

    name = "mlp"

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 17), nn.GELU(), nn.Dropout(0.2), nn.Linear(17, 3))

    def train_data(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        return list(torch.randn(83, 9, generator=generator))

    def eval_data(self) -> list[Tensor]:
        return self.train_data()[:21]

    def loss(self, model: nn.Module, batch: Tensor, context: Context) -> PartialLoss:
        x, y = batch[:, :6], batch[:, 6:]
        noise = torch.randn(x.shape, generator=context.generator("noise"))
        shift = float(np.random.standard_normal()) * 0.01 if context.training else 0.0
        error = (model(x + 0.1 * noise) - y + shift).square().sum(dim=1)
        units = (y > 0).sum(dim=1)
        return PartialLoss((error * units).sum(), units.sum(), {"plain": (error.sum(), len(error))})


class Transformer(Mlp):
    """Attention with dropout over tokens of uneven numbers."""

    name = "transformer"

    def build_model(self) -> nn.Module:
        return Net()

    def train_data(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(4)
        return list(torch.randint(0, 11, (83, 7), generator=generator))

    def loss(self, model: nn.Module, batch: Tensor, context: Context) -> PartialLoss:
        made = model(batch)
        counted = batch[:, 1:] > 3
        each = functional.cross_entropy(
            made[:, :-1].transpose(1, 2), batch[:, 1:], reduction="none"
        )
        return PartialLoss((each * counted).sum(), counted.sum())


class Net(nn.Module):
    """The transformer's two parts behind one forward, so that it can be replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.tokens(tokens)) @ self.tokens.weight.T


class Conv(Mlp):
    """Convolutions with batch normalisation, one with momentum and one that averages."""

    name = "conv"

    def build_model(self) -> nn.Module:
        layers = (
            nn.Unflatten(1, (1, 3, 3)),
            nn.Conv2d(1, 5, 2, bias=False),  # which would have no gradient, but for rounding
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Conv2d(5, 6, 2, bias=False),
            nn.Flatten(),
            nn.BatchNorm1d(6, momentum=None),
            nn.Linear(6, 4),
        )
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def loss(self, model: nn.Module, batch: Tensor, context: Context) -> PartialLoss:
        loss = functional.cross_entropy(model(batch), (batch[:, 0] > 0).long(), reduction="sum")
        return PartialLoss(loss, len(batch))


class Contrast(Mlp):
    """Every sample of a step against every other, with a learned temperature."""

    name = "contrast"
    gathers = True

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 4))
        model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
        return Scaled(model)

    def loss(self, model: nn.Module, batch: Tensor, context: Context) -> PartialLoss:
        made, scale = model(batch)
        shown = context.gather(made) if context.training else made
        start = context.gather_start(made) if context.training else 0
        target = torch.arange(len(made)) + start
        if not context.counts:
            made, target = made[:0], target[:0]
        logits = made @ shown.T * scale
        return PartialLoss(functional.cross_entropy(logits, target, reduction="sum"), len(made))


class Scaled(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), self.body.scale


TASKS: dict[str, Callable[[], Task]] = {
    "mlp": Mlp,
    "transformer": Transformer,
    "conv": Conv,
    "contrast": Contrast,
}


def config_for(folder: Path, **more: Any) -> RunConfig:
    values = {
        "output_dir": str(folder),
        "max_steps": 8,
        "batch": {"batch_size": 3, "global_batch_size": 24, "drop_last": False},
        "rate": {"lr": 3e-3},
        "evaluation": {"every_steps": 4},
        "checkpoint": {"every_steps": 4},
        "averages": (0.9,),
        "exact": True,
        "device": "cpu",
        "log_every": 1,
        "timeout_s": 30,
        "sinks": {"curves": False},
        **more,
    }
    return RunConfig.parse(values)


def state_of(folder: Path) -> str:
    """Hash all that a checkpoint's tensor files hold."""
    newest = sorted((folder / "checkpoints").glob("step_*"))[-1]
    digest = hashlib.sha256()
    for file in sorted(newest.glob("*.safetensors")):
        digest.update(file.name.encode() + file.read_bytes())
    return f"{newest.name} {digest.hexdigest()}"


def train(task: str, folder: Path, max_steps: int) -> None:
    fit(TASKS[task](), config_for(folder, max_steps=max_steps))


def train_task(task: Task, folder: Path, more: dict[str, Any]) -> None:
    fit(task, config_for(folder, **more))


def final_state(task: str, folder: Path, stages: Sequence[tuple[int, int]]) -> str:
    """Train in stages of (ranks, up to which step), and return the hash of what is left."""
    for num_ranks, stop in stages:
        run_ranks(num_ranks, train, task, folder, stop)
    return state_of(folder)


@pytest.mark.parametrize("task", ["mlp", "transformer", "conv", "contrast"])
def test_one_hash_for_every_number_of_ranks(task: str, tmp_path: Path) -> None:
    plans = {str(size): ((size, 8),) for size in SIZES.get(task, SOME_SIZES)}
    plans["elastic"] = ELASTIC.get(task, SOME_ELASTIC)
    hashes = {plan: final_state(task, tmp_path / plan, plans[plan]) for plan in plans}
    assert len(set(hashes.values())) == 1, hashes


# --- It is the same training, but for rounding ------------------------------------------------


class Quiet(Mlp):
    """Draws from torch's streams alone, which plain mode keys by micro-batch, too."""

    def loss(self, model: nn.Module, batch: Tensor, context: Context) -> PartialLoss:
        noise = torch.randn(batch.shape, generator=context.generator("noise"))
        error = (model(batch[:, :6] + 0.1 * noise[:, :6]) - batch[:, 6:]).square().sum(dim=1)
        units = (batch[:, 6:] > 0).sum(dim=1)
        return PartialLoss((error * units).sum(), units.sum())


TASKS["quiet"] = Quiet


class Reticent(Quiet):
    gathers = True


def test_a_loss_that_might_gather_and_does_not_is_trained_like_any_other(tmp_path: Path) -> None:
    for task in (Quiet(), Reticent()):
        run_ranks(2, train_task, task, tmp_path / type(task).__name__, {"max_steps": 2})
    assert state_of(tmp_path / "Reticent") == state_of(tmp_path / "Quiet")


def momentum_of(folder: Path) -> Tensor:
    """Return Adam's mean gradients and the running statistics, which do not forgive a factor."""
    newest = sorted((folder / "checkpoints").glob("step_*"))[-1]
    held = load_file(newest / "optimizer.safetensors") | load_file(newest / "model.safetensors")
    kept = [held[name] for name in sorted(held) if "exp_avg" in name or "running" in name]
    return torch.cat([tensor.double().flatten() for tensor in kept])


@pytest.mark.parametrize(
    ("task", "plain_ranks"), [("quiet", 1), ("transformer", 1), ("conv", 1), ("contrast", 8)]
)
def test_exact_differs_from_plain_by_rounding(task: str, plain_ranks: int, tmp_path: Path) -> None:
    """A contrastive loss compares the samples of all ranks: eight are the whole step."""
    more = {"max_steps": 3, "batch": {"batch_size": 3, "global_batch_size": 24}}
    run_ranks(1, train_task, TASKS[task](), tmp_path / "exact", more)
    run_ranks(plain_ranks, train_task, TASKS[task](), tmp_path / "plain", {**more, "exact": False})
    exact, plain = momentum_of(tmp_path / "exact"), momentum_of(tmp_path / "plain")
    assert (exact - plain).abs().max() < 1e-6 * plain.abs().max()


# --- It can fail ----------------------------------------------------------------------------


def plainly(folder: Path) -> None:
    fit(Mlp(), config_for(folder, exact=False))


def test_without_it_the_number_of_ranks_shows(tmp_path: Path) -> None:
    hashes = set()
    for size in (1, 2):
        run_ranks(size, plainly, tmp_path / str(size))
        hashes.add(state_of(tmp_path / str(size)))
    assert len(hashes) == 2


class RankNoise(Mlp):
    """A fault: noise from a stream that knows its rank."""

    def loss(self, model: nn.Module, batch: Tensor, context: Context) -> PartialLoss:
        torch.manual_seed(context.world.rank)
        return super().loss(model, batch + 0.01 * torch.randn(batch.shape), context)


class OwnBuffer(Mlp):
    """A forward pass that remembers something of its own."""

    def build_model(self) -> nn.Module:
        return Remembers()


class HiddenBuffer(Mlp):
    """A forward pass that remembers through `.data`, in every third micro-batch."""

    def build_model(self) -> nn.Module:
        return RemembersInData()


class AssignedBuffer(Mlp):
    """A forward pass that remembers in a new tensor."""

    def build_model(self) -> nn.Module:
        return RemembersAnew()


class CachedBuffer(Mlp):
    """A forward pass that makes a constant again, and a longer cache."""

    def build_model(self) -> nn.Module:
        return Caches()


class OwnStatistics(Mlp):
    """Running statistics that do not count how often they moved."""

    def build_model(self) -> nn.Module:
        norm = nn.InstanceNorm1d(2, track_running_stats=True)
        return nn.Sequential(
            nn.Linear(6, 8), nn.Unflatten(1, (2, 4)), norm, nn.Flatten(), nn.Linear(8, 3)
        )


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        return self.linear(x)


class RemembersInData(Remembers):
    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += self.training
        if self.training and self.num_calls % 3 == 0:
            self.seen.data += len(x)
        return self.linear(x)


class RemembersAnew(Remembers):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + len(x)
        return self.linear(x)


class Caches(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.zeros(())
        self.cache = torch.cat([self.cache, self.cache[:1]])
        return self.linear(x) * self.cache[-1]


class Unannounced(Contrast):
    gathers = False


def test_a_stream_that_knows_its_rank_is_seen(tmp_path: Path) -> None:
    hashes = set()
    for size in (1, 2):
        run_ranks(size, train_task, RankNoise(), tmp_path / str(size), {})
        hashes.add(state_of(tmp_path / str(size)))
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        (OwnBuffer(), {}, "the forward pass changes seen"),
        (AssignedBuffer(), {}, "the forward pass changes seen"),
        (HiddenBuffer(), {}, "the forward pass changes seen"),
        (OwnStatistics(), {}, "the forward pass changes 2.running_mean, 2.running_var"),
        (Unannounced(), {}, "gathers = True"),
        (Mlp(), {"sync_batch_norm": True}, "unset exact or sync_batch_norm"),
    ],
)
def test_what_cannot_be_exact_is_refused(
    task: Task, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train_task(task, tmp_path, more)


def test_a_cache_that_is_made_again_or_grows_is_not_refused(tmp_path: Path) -> None:
    train_task(CachedBuffer(), tmp_path, {})


def test_a_kernel_that_does_not_repeat_itself_is_named() -> None:
    error = RuntimeError("nll_loss2d does not have a deterministic implementation, but you set ...")
    said = "exact=true: nll_loss2d adds in a different order each time"
    with pytest.raises(ConfigError, match=said):
        raise_if_not_deterministic(error)
    raise_if_not_deterministic(RuntimeError("something else"))


def test_other_numerics_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(Mlp(), config_for(tmp_path, max_steps=2))
    assert "threads 1" in capsys.readouterr().out
    fit(Mlp(), config_for(tmp_path, max_steps=4, num_threads=2, accept_changes=True))
    assert "the bits may differ from here on: threads 1 -> 2" in capsys.readouterr().out


# --- The tree, without processes --------------------------------------------------------------


STRANGE = [0.0, -0.0, 1e-42, -1e-42, 3e38, -3e38, float("inf"), float("nan"), 1.0, -1.0, 1e-8]


@given(
    num_leaves=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=150)
def test_the_tree_adds_alike_however_leaves_are_shared(
    num_leaves: int, seed: int, sizes: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    leaves = torch.randn(num_leaves, 13, generator=generator)
    chosen = torch.randint(0, len(STRANGE), (num_leaves, 11), generator=generator)
    leaves[:, :11] = torch.tensor(STRANGE)[chosen]
    totals = set()
    for size in [1, *sizes]:
        whole = TreeSum(num_leaves)
        for rank in range(size):
            own = TreeSum(num_leaves)
            for place in share(num_leaves, rank, size):
                own.add((0, place), [leaves[place].clone()])
            assert tuple(node for node, _ in own.nodes) == cover(num_leaves, rank, size)
            for node, value in own.nodes:
                whole.add(node, value)
        totals.add(whole.total[0].numpy().tobytes())
    assert len(totals) == 1


class LostOnTheWay(FakeWorld):
    """Its exchanges begin, and fail."""

    def exchange(
        self, sent: Tensor, lengths: list[int]
    ) -> tuple[Tensor, torch.futures.Future[Tensor]]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_exception(RuntimeError("the other end is gone"))
        return sent.new_empty(sum(lengths)), future


def test_an_exchange_that_failed_is_not_added_up() -> None:
    model = nn.Linear(2, 2, bias=False)
    buffer = torch.zeros(4)
    bucket: Any = SimpleNamespace(
        buffer=lambda: buffer,
        gradients=lambda: [buffer.view(2, 2)],
        parameters=lambda: [model.weight],
    )
    exact_reducer = ExactReducer(model, LostOnTheWay(rank=0, size=2))
    exact_reducer.begin(2)
    with pytest.raises(RuntimeError, match="the other end is gone"):
        exact_reducer.exchange(bucket).wait()


# --- What a resume must bring back as it was ----------------------------------------------------


class Kept(Conv):
    """Lets us look at its optimizer."""

    made: torch.optim.Optimizer

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        self.made = super().build_optimizer(model, lr)
        return self.made


def test_optimizer_state_comes_back_in_the_layout_of_its_parameter(tmp_path: Path) -> None:
    """A fused optimizer on a GPU refuses moments that are laid out otherwise."""
    fit(Kept(), config_for(tmp_path, max_steps=2))
    task = Kept()
    fit(task, config_for(tmp_path, max_steps=2))
    kernels = [p for group in task.made.param_groups for p in group["params"] if p.ndim == 4]
    assert any(not kernel.is_contiguous() for kernel in kernels)
    for kernel in kernels:
        assert task.made.state[kernel]["exp_avg"].stride() == kernel.stride()


class Wave(nn.Module):
    """Two complex parameters, in one bucket, and a real one."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((6, 5), (5, 3))
        self.first, self.second = (
            nn.Parameter(torch.randn(s) + 1j * torch.randn(s)) for s in sizes
        )
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.first.dtype) @ self.first @ self.second).abs() * self.scale


class Complex(Mlp):
    def build_model(self) -> nn.Module:
        return Wave()


def test_complex_parameters_have_the_same_bits_on_several_ranks(tmp_path: Path) -> None:
    def end(folder: Path) -> str:
        batch = {"batch_size": 4, "global_batch_size": 16}
        values = {"output_dir": str(folder), "max_steps": 3, "exact": True, "device": "cpu"}
        fit(Complex(), RunConfig.parse({**values, "batch": batch, "rate": {"lr": 0.01}}))
        path = next(folder.glob("checkpoints/step_*/model.safetensors"))
        return hashlib.sha256(path.read_bytes()).hexdigest()

    ends = {run_ranks(num_ranks, end, tmp_path / str(num_ranks))[0] for num_ranks in (1, 3)}
    assert len(ends) == 1
