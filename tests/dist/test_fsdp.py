"""A model cut over ranks (`parallel: fsdp`) trains, saves and goes on as one that is not."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # before ranks are forked, which would import it each
from torch import Tensor, nn

from lockstep import PartialLoss, RunConfig, World, fit, read_events
from lockstep.checkpoint import Checkpoint, CheckpointStore, flatten
from lockstep.dist.fsdp import gathered, is_dtensor, local_rows, shard
from lockstep.errors import ConfigError, DataError
from lockstep.run.evaluation import evaluating
from lockstep.task import Context
from lockstep.testing import TinyTask, run_ranks

ROUNDING = 1e-12
MARK = 500.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)))


class Net(nn.Module):
    """Rows that four ranks cannot share evenly, a parameter of a single one, and one of none."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        normalised = nn.Sequential(nn.Tanh(), nn.BatchNorm1d(6))
        self.blocks = nn.ModuleList([Block(), normalised if norm else Block()])
        self.last = nn.Linear(6, 3)
        self.gain, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        made = self.last(self.features(x)) * self.gain + self.shift
        if x.max() >= MARK:  # adds nothing, and its gradient is no number, in this one row
            made = made + (self.gain - self.gain.detach()).sqrt()
        return made

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Seen:
    """A metric that adds up what it was shown, over ranks."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.num = 0

    def reset(self) -> None:
        self.num = 0

    def compute(self) -> float:
        assert self.world
        return sum(self.world.all_lengths(self.num))


class Deep(TinyTask):
    """Uneven weights; ten held-out samples; one rank that calls the model by itself at the end."""

    def __init__(self) -> None:
        super().__init__(num_samples=21)
        self.seen = Seen()

    def build_model(self) -> nn.Module:
        return Net().double()

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)  # as on a GPU

    def metrics(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def evaluate(self, model: nn.Module, batch: Any, context: Context) -> Any:
        self.seen.world, self.seen.num = context.world, self.seen.num + len(batch["x"])
        return self.loss(model, batch, context)

    def finish_evaluation(self, model: Any, context: Context, folder: str) -> dict[str, float]:
        value = torch.zeros((), dtype=torch.float64)
        if context.world.is_first:
            x = torch.ones(2, 5, dtype=torch.float64)
            with evaluating(model):
                value = model.features(x).sum() + model(x).sum() + model(x).sum()
        return {"drawn": float(context.world.all_sum(value))}


class Reaching(Deep):
    """Uses a block's weights without calling it."""

    def loss(self, model: Any, batch: Any, context: Context) -> PartialLoss:
        made = nn.functional.linear(batch["x"], model.first.weight)
        return PartialLoss(made.sum(), 1.0)


class Normalised(Deep):
    def build_model(self) -> nn.Module:
        return Net(norm=True).double()


class Marked(Deep):
    """One sample whose gradient is no number, although its loss is."""

    def train_data(self) -> list[dict[str, Tensor]]:
        data = super().train_data()
        data[7]["x"] = data[7]["x"].clone()
        data[7]["x"][0] = MARK
        data[7]["units"] = torch.ones_like(data[7]["units"])
        return data


class Full(Deep):
    """The memory of the second rank is full in the second step."""

    def loss(self, model: nn.Module, batch: Any, context: Context) -> PartialLoss:
        if context.training and context.step == 1 and context.world.rank == 1:
            raise MemoryError("it is full")
        return super().loss(model, batch, context)


class Held:
    """Held-out samples of which the last cannot be read."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index == len(self) - 1:
            raise DataError("sample 9 is torn", "another")
        return self.samples[index]


class Torn(Deep):
    def eval_data(self) -> Any:
        return Held(super().eval_data())


def config_for(folder: Path, **more: Any) -> RunConfig:
    values = {
        "output_dir": str(folder),
        "max_steps": 6,
        "batch": {"batch_size": 2, "global_batch_size": 12, "drop_last": False},
        "rate": {"lr": 1e-2},
        "evaluation": {"every_epochs": None, "every_steps": 100, "batch_size": 4},
        "checkpoint": {"every_epochs": None, "every_steps": 100, "sharded": False},
        "averages": (0.9,),
        "max_grad_norm": 0.05,
        "parallel": "fsdp",
        "device": "cpu",
        "timeout_s": 20,
        "log_every": 1,
        "sinks": {"curves": False},
        **more,
    }
    return RunConfig.parse(values)


def train_here(kind: Callable[[], Deep], folder: Path, more: dict[str, Any]) -> dict[str, float]:
    return fit(kind(), config_for(folder, **more)).metrics


def train(
    num_ranks: int,
    folder: Path,
    kind: Callable[[], Deep] = Deep,
    sharded: bool = False,
    **more: Any,
) -> dict[str, float]:
    """Train on so many ranks, which must all say the same."""
    more["checkpoint"] = {"every_epochs": None, "every_steps": 100, "sharded": sharded}
    said = run_ranks(num_ranks, train_here, kind, folder, more, timeout_s=40)
    assert all(metrics == said[0] for metrics in said)
    return dict(said[0])


def newest(folder: Path) -> Checkpoint:
    checkpoint, rejected = CheckpointStore(folder / "checkpoints", recipe="tiny").latest()
    assert checkpoint
    assert not rejected
    return checkpoint


def tensors_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return weights, moments and averages."""
    parts = ("model", "optimizer", "average_0.9")
    return {f"{p}.{n}": t for p in parts for n, t in flatten(checkpoint.load(p))[0].items()}


def apart(folder: Path, other: Path) -> float:
    """Return the largest difference of two runs' ends, relative to the largest of its tensor."""
    a, b = tensors_of(newest(folder)), tensors_of(newest(other))
    assert a.keys() == b.keys()
    found = [float((a[n] - b[n]).abs().max() / b[n].abs().max().clamp(min=1e-30)) for n in a]
    return float(torch.tensor(found).nan_to_num(nan=torch.inf).max())


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Path]:
    """Return where a run without a pause has ended, on so many ranks, and what it measured."""
    base = tmp_path_factory.mktemp("straight")

    @cache
    def run(num_ranks: int, parallel: str) -> Any:
        folder = base / f"{parallel}_{num_ranks}"
        return folder, train(num_ranks, folder, parallel=parallel)

    return run


@pytest.mark.parametrize(
    ("num_ranks", "parallel"), [(2, "ddp"), (1, "fsdp"), (2, "fsdp"), (4, "fsdp")]
)
def test_cut_over_ranks_is_the_same_training(num_ranks: int, parallel: str, straight: Any) -> None:
    """Accumulated, clipped, weighed unevenly; with averages; and held-out samples count once."""
    (alone, measured), (folder, other) = straight(1, "ddp"), straight(num_ranks, parallel)
    assert apart(folder, alone) < ROUNDING
    assert other.keys() == measured.keys() >= {"loss", "ema_loss", "seen", "drawn"}
    assert other == pytest.approx(measured, rel=ROUNDING)
    assert other["seen"] == 10


def test_a_run_goes_on_cut_or_not_on_any_number_of_ranks(
    straight: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(4, tmp_path, max_steps=2, sharded=True)
    assert "sharded over 4 ranks, 2 blocks gathered in turn" in capfd.readouterr().out
    assert len(list(newest(tmp_path).path.glob("model.*_of_4.safetensors"))) == 4
    train(2, tmp_path, max_steps=3, parallel="ddp")
    train(1, tmp_path, max_steps=4)
    train(3, tmp_path, max_steps=5)
    train(2, tmp_path, max_steps=6, parallel="ddp", sharded=True)
    assert apart(tmp_path, straight(1, "ddp")[0]) < ROUNDING


def test_a_pause_does_not_show_in_a_bit(straight: Any, tmp_path: Path) -> None:
    train(2, tmp_path, max_steps=2, sharded=True)
    train(2, tmp_path, max_steps=4)
    train(2, tmp_path, max_steps=6, sharded=True)
    assert apart(tmp_path, straight(2, "fsdp")[0]) == 0


def test_a_bad_number_in_one_ranks_rows_is_everybodys(tmp_path: Path) -> None:
    """The state that met it is whole, and one process meets it again."""
    for parallel in ("fsdp", "ddp"):
        train(2, tmp_path / parallel, Marked, parallel=parallel, on_non_finite="skip", max_steps=3)
    assert apart(tmp_path / "fsdp", tmp_path / "ddp") < ROUNDING
    events = read_events(tmp_path / "fsdp", rank=1)
    (path,) = [event["path"] for event in events if event["event"] == "non_finite"]
    again = train(1, tmp_path / "again", Marked, on_non_finite="skip", max_steps=3, resume=path)
    assert again
    assert apart(tmp_path / "again", tmp_path / "ddp") < ROUNDING


def test_batch_norm_over_ranks_works_in_a_cut_model(tmp_path: Path) -> None:
    """The second step has five micro-batches: one rank computes padding in its last round."""
    for parallel in ("fsdp", "ddp"):
        more = {"parallel": parallel, "sync_batch_norm": True, "max_steps": 3}
        train(2, tmp_path / parallel, EvenlyNormalised, **more)
    assert apart(tmp_path / "fsdp", tmp_path / "ddp") < ROUNDING


class EvenlyNormalised(Normalised):
    """No micro-batch of a single sample, which has no variance."""

    def train_data(self) -> Any:
        return super().train_data()[:20] + super().train_data()[:2]


class Own(Normalised):
    """Running statistics that differ between ranks, and lie in the second one's share."""

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr)

    def eval_data(self) -> Any:
        return None  # or the ranks' would be alike again by the end


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_shares_hold_the_first_ranks_running_statistics(parallel: str, tmp_path: Path) -> None:
    more = {"parallel": parallel, "averages": (), "max_steps": 2, "batch": {"batch_size": 4}}
    for sharded in (True, False):
        train(2, tmp_path / str(sharded), Own, sharded=sharded, **more)
    shared, whole = (newest(tmp_path / name).load("model") for name in ("True", "False"))
    assert [name for name in whole if not torch.equal(whole[name], shared[name])] == []


# --- What one rank holds ------------------------------------------------------------------------


def look_inside() -> tuple[float, bool, bool]:
    """Return which part of the numbers is here, whose they are, and if a block sees another."""
    with World.enter("cpu", timeout_s=20) as world:
        torch.manual_seed(0)
        of_first = [p.detach().clone() for p in Net().parameters()]
        torch.manual_seed(world.rank)
        model = Net()
        shard(model, world, model.blocks)
        mine = sum(t.numel() for t in local_rows(model.parameters())) / sum(
            t.numel() for t in of_first
        )
        is_firsts = all(map(torch.equal, map(gathered, model.parameters()), of_first))
        is_seen = []

        def look(block: Any, args: Any) -> None:
            is_seen.append(
                is_dtensor(block.wide.weight) or not is_dtensor(model.blocks[0].wide.weight)
            )  # type: ignore[union-attr]

        model.blocks[1].register_forward_pre_hook(look)
        model(torch.randn(2, 5))
        return mine, is_firsts, is_seen == [False]


def test_a_rank_has_its_rows_of_the_firsts_weights_and_one_block_at_a_time() -> None:
    for part, is_firsts, is_alone in run_ranks(2, look_inside):
        assert 0.4 < part < 0.6
        assert is_firsts
        assert is_alone


# --- What cannot work ---------------------------------------------------------------------------


def problem_of(action: Callable[..., Any], *args: Any) -> str:
    try:
        action(*args)
    except (ConfigError, DataError) as error:
        return error.problem
    return "none"


def shard_tied() -> None:
    with World.enter("cpu", timeout_s=20) as world:
        model = Net()
        model.blocks[1].wide.weight = model.blocks[0].wide.weight  # type: ignore[union-attr]
        shard(model, world, model.blocks)


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set parallel=ddp"):
        config_for(tmp_path, exact=True)
    with pytest.raises(ConfigError, match="set compile=true"):
        config_for(tmp_path, compile="graphs")
    more = {"precision": "fp16", "max_steps": 1}
    (said, _) = run_ranks(2, problem_of, train_here, Deep, tmp_path, more)
    assert said == "parallel=fsdp with precision=fp16 cannot train parameters without dimensions"
    said = run_ranks(2, problem_of, train_here, Reaching, tmp_path, {"max_steps": 1})
    assert said == ["parallel=fsdp: weights are used outside the forward pass of their block"] * 2
    said = run_ranks(2, problem_of, shard_tied)
    assert said == ["parallel=fsdp would shard blocks.1.wide.weight twice: blocks share it"] * 2


def test_a_held_out_sample_that_cannot_be_read_stops_all_ranks(tmp_path: Path) -> None:
    more = {"max_steps": 1, "loader": {"num_workers": 0}}
    said = run_ranks(2, problem_of, train_here, Torn, tmp_path, more, timeout_s=15)
    assert said[0] == said[1]
    assert "sample 9 is torn" in said[0]


def test_a_lack_of_memory_on_one_rank_ends_the_run(tmp_path: Path) -> None:
    """The others wait in a gather, and cannot be asked to take smaller pieces."""
    with pytest.raises(RuntimeError, match="MemoryError: it is full|Connection (reset|closed)"):
        train(2, tmp_path, Full)
