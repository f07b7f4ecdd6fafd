"""Gradients that are rounded for the way between ranks (`gradients.exchange_in`)."""

import gc
import math
import weakref
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.fsdp  # before ranks are forked, which would import it each
from torch import Tensor, nn

from lockstep import RunConfig, World, fit, read_events
from lockstep.dist.ddp import Averaging, replica_of, unwrap
from lockstep.errors import ConfigError
from lockstep.run.build import prepare
from lockstep.signals import StopSignals
from lockstep.testing import TinyTask, run_ranks
from lockstep.trainer import Trainer

KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""By how much one rounding changes a number at most, in parts of it."""
FINEST = {"bf16": 0.0, "fp16": 2.0**-39}
"""And at least, in parts of the largest: fp16 has no smaller numbers."""


# --- One exchange -------------------------------------------------------------------------------


def exchanged(kind: str, magnitude: float) -> list[Any]:
    """Average numbers that nearly cancel; return them as they are, rounded, and their size."""
    with World.enter("cpu", timeout_s=20) as world:
        common = torch.randn(4000, generator=torch.Generator().manual_seed(9))
        own = torch.randn(4000, generator=torch.Generator().manual_seed(world.rank))
        sign = 1 - 2 * (world.rank % 2)
        # A quarter each: equal and opposite, the same but far smaller, nothing, one's own.
        grads = torch.cat([sign * common[:1000] + 1e-3 * own[:1000], 1e-6 * own[1000:2000]])
        grads = magnitude * torch.cat([grads, torch.zeros(1000), own[3000:]])
        size = world.all_sum(grads.abs()) / world.size
        plain = Averaging(world).average(grads.clone()).wait()
        rounded = Averaging(world, KINDS[kind]).average(grads).wait()
        return [tensor.numpy().copy() for tensor in (plain, rounded, size)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_average_is_off_by_a_rounding_for_each_rank(kind: str) -> None:
    """Of what the ranks bring, not of what is left when it cancels; whatever its magnitude."""
    for num_ranks, magnitude in ((2, 1.0), (2, 1e9), (2, 1e-12), (3, 1.0)):
        results = run_ranks(num_ranks, exchanged, kind, magnitude)
        for plain, rounded, size in results:
            assert np.array_equal(rounded, results[0][1])
            off, once = np.abs(rounded - plain), ROUNDING[kind] * size + FINEST[kind] * size.max()
            assert (off <= num_ranks * once).all()
            assert off.max() > 0.1 * ROUNDING[kind] * size.max()
            assert off[2000:3000].max() == 0


def is_freed() -> bool:
    with World.enter("cpu", timeout_s=20) as world:
        first = world.replicate(nn.Linear(2, 1))
        inner, held = unwrap(first), weakref.ref(first)
        second = world.replicate(first)
        del first
        gc.collect()
        second(torch.ones(1, 2)).sum().backward()
        return held() is None and unwrap(second) is inner


def test_a_model_replicated_again_frees_its_first_replica() -> None:
    """A replica that stays keeps its hooks on the parameters and exchanges gradients, too."""
    assert run_ranks(2, is_freed) == [True, True]


def with_a_bad_number(kind: str, bad: float) -> list[float]:
    with World.enter("cpu", timeout_s=20) as world:
        grads = torch.tensor([1.0, bad if world.rank else 1.0, 0.0])
        return [float(n) for n in Averaging(world, KINDS[kind]).average(grads).wait()]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_number_stays_one(bad: float) -> None:
    for kind in KINDS:
        for result in run_ranks(2, with_a_bad_number, kind, bad):
            assert not torch.isfinite(torch.tensor(result)[1])


def collectives_of_an_exchange() -> tuple[int, int]:
    with World.enter("cpu", timeout_s=20) as world:
        before = world.num_collectives
        for dtype in (None, *KINDS.values()):
            Averaging(world, dtype).average(torch.ones(3)).wait()
        world.exchange(torch.ones(2, 3), [3, 3])[1].wait()  # these two in exact mode
        world.all_pieces(torch.ones(3))
        exchanged = world.num_collectives - before
        world.all_sum(torch.ones(3))
        return exchanged, world.num_collectives - before - exchanged


def test_gradients_are_not_counted_among_the_collectives() -> None:
    assert run_ranks(2, collectives_of_an_exchange) == [(0, 1)] * 2


def replicated_again() -> list[bool]:
    with World.enter("cpu", timeout_s=20) as world:
        averaging = Averaging(world, torch.bfloat16)
        bare = nn.Linear(2, 1)
        compiled: Any = torch.compile(world.replicate(bare, averaging))
        with torch.no_grad():
            bare.bias.fill_(world.rank)  # to see whether weights are sent again
        again = replica_of(world.replicate(compiled))
        assert again is not None
        return [again.exchanges is averaging, again.module is bare, bare.bias.item() == world.rank]


def test_a_compiled_replica_is_replicated_again_with_its_averaging_and_weights() -> None:
    assert run_ranks(2, replicated_again) == [[True] * 3] * 2


# --- Whole runs ---------------------------------------------------------------------------------


class Task(TinyTask):
    """In float32, with weights enough to tell gradients from other messages."""

    def __init__(self) -> None:
        super().__init__(num_samples=40)

    def build_model(self) -> nn.Module:
        layers = nn.ModuleList([nn.Linear(5, 64), nn.Sequential(nn.Tanh(), nn.Linear(64, 3))])
        return Stack(layers)

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        return {key: value.float() for key, value in super().collate(samples).items()}


class Stack(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class HeadOnly(Task):
    """Trains the last layer alone, without freezing the first; one loss is not finite."""

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.layers[1].parameters(), lr=lr)  # type: ignore[index]

    def loss(self, model: nn.Module, batch: Any, context: Any) -> Any:
        made = super().loss(model, batch, context)
        return replace(made, loss_sum=made.loss_sum * (math.nan if context.step == 2 else 1))


class Full(Task):
    """The second rank's memory is full in the third step, for more than two samples."""

    def loss(self, model: nn.Module, batch: Any, context: Any) -> Any:
        if context.training and context.step == 2 and context.world.rank and len(batch["x"]) > 2:
            raise MemoryError("it is full")
        return super().loss(model, batch, context)


def config_for(folder: Path, **more: Any) -> RunConfig:
    values = {
        "output_dir": str(folder),
        "max_steps": 6,
        "batch": {"batch_size": 4, "global_batch_size": 16},
        "rate": {"lr": 1e-2},
        "checkpoint": {"every_epochs": None, "every_steps": 3},
        "device": "cpu",
        "timeout_s": 20,
        "sinks": {"curves": False},
        **more,
    }
    return RunConfig.parse(values)


def train(task: Task, folder: Path, more: dict[str, Any]) -> tuple[Any, list[tuple[str, int]]]:
    """Train; return the weights, and kind and bytes of every large message of this rank."""
    sent: list[tuple[str, int]] = []

    def watch(name: str) -> None:
        call = getattr(torch.distributed, name)

        def noting(*args: Any, **named: Any) -> Any:
            tensor = named["input"] if "input" in named else args[0]
            if tensor.is_floating_point() and tensor.numel() > 100:
                sent.append((str(tensor.dtype), tensor.nbytes))
            return call(*args, **named)

        setattr(torch.distributed, name, noting)

    for name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single"):  # by version
        if hasattr(torch.distributed, name):
            watch(name)
    with ExitStack() as stack:
        world = stack.enter_context(World.enter("cpu", timeout_s=20))
        run = prepare(task, config_for(folder, **more), world, stack)
        trainer = Trainer(run, stack.enter_context(StopSignals()), stack)
        for batch in trainer.steps():
            trainer.step(batch)
        trainer.finish()
        weights = run.model.state_dict().values()
        whole = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in weights]
        return torch.cat([w.detach().flatten() for w in whole]).numpy().copy(), sent


def trained(
    folder: Path, exchange_in: str, task: Task | None = None, num_ranks: int = 2, **more: Any
) -> tuple[Any, list[tuple[str, int]]]:
    """Train on ranks that must all end with the same bits; return them, and what was sent."""
    more["gradients"] = {"exchange_in": exchange_in} | more.get("gradients", {})
    results = run_ranks(num_ranks, train, task or Task(), folder, more, timeout_s=40)
    for weights, _ in results:
        assert np.array_equal(weights, results[0][0])
    return results[0]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_half_the_bytes_nearly_the_same_weights(
    parallel: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain, sent = trained(tmp_path / "same", "same", parallel=parallel)
    assert {kind for kind, _ in sent} == {"torch.float32"}
    for exchange_in in ("bf16", "fp16") if parallel == "ddp" else ("bf16",):
        rounded, halved = trained(tmp_path / exchange_in, exchange_in, parallel=parallel)
        assert {kind for kind, _ in halved} == {str(KINDS[exchange_in])}
        assert [2 * num for _, num in halved] == [num for _, num in sent]
        assert f"gradients: exchanged in {exchange_in}" in capfd.readouterr().out
        # Six steps of at most 0.01 each: a hundredth of the way, and not the same.
        assert 0 < np.abs(rounded - plain).max() < 6e-4


def test_a_pause_does_not_show_in_a_bit(tmp_path: Path) -> None:
    for exchange_in in KINDS:
        straight, _ = trained(tmp_path / exchange_in, exchange_in)
        trained(tmp_path / f"{exchange_in}_paused", exchange_in, max_steps=3)
        paused, _ = trained(tmp_path / f"{exchange_in}_paused", exchange_in)
        assert np.array_equal(paused, straight)


def test_what_binds_a_resume_and_what_does_not(tmp_path: Path) -> None:
    trained(tmp_path, "same", max_steps=2)
    with pytest.raises(RuntimeError, match="gradients.exchange_in same -> bf16"):
        trained(tmp_path, "bf16", max_steps=3)
    trained(tmp_path, "same", max_steps=3, gradients={"bucket_mb": 1})


def test_alone_there_is_nothing_to_round(tmp_path: Path) -> None:
    plain, sent = trained(tmp_path / "same", "same", num_ranks=1)
    assert np.array_equal(trained(tmp_path / "bf16", "bf16", num_ranks=1)[0], plain)
    assert sent == []


def test_a_rank_out_of_memory_is_answered_all_the_same(tmp_path: Path) -> None:
    for exchange_in, off in (("same", 1e-6), ("fp16", 6e-4)):
        straight, _ = trained(tmp_path / f"{exchange_in}_straight", exchange_in)
        folder = tmp_path / exchange_in
        halved, _ = trained(folder, exchange_in, Full())
        assert [e for e in read_events(folder) if e["event"] == "out_of_memory"]
        assert np.abs(halved - straight).max() < off


def test_gradients_of_no_parameter_group_do_not_stay_in_the_bucket(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Their NaN would make the scale of the bucket NaN in all later steps."""
    weights, _ = trained(tmp_path, "fp16", HeadOnly(), on_non_finite="skip")
    assert np.isfinite(weights).all()
    assert [e["step"] for e in read_events(tmp_path) if e["event"] == "non_finite"] == [2]
    warning = (
        "warning: these parameters require a gradient, but no parameter group of the optimizer "
        "has them, so they are not trained: layers.0.weight, layers.0.bias\n"
    )
    assert warning in capfd.readouterr().out


# --- Buckets, and ways of one's own -------------------------------------------------------------


class Wide(Task):
    """Four megabytes of weights, in four parts."""

    def build_model(self) -> nn.Module:
        wide = [nn.Linear(512, 512) for _ in range(4)]
        return Stack(nn.ModuleList([nn.Linear(5, 512), *wide, nn.Linear(512, 3)]))


def test_buckets_are_as_large_as_one_says(tmp_path: Path) -> None:
    more: dict[str, Any] = {"max_steps": 2, "checkpoint": {"every_steps": 100}}
    sent = {
        mb: trained(tmp_path / str(mb), "same", Wide(), gradients={"bucket_mb": mb}, **more)[1]
        for mb in (1, 100)
    }
    # The second step is cut as it should be; the first knows no order yet.
    assert sum(num for _, num in sent[1]) == sum(num for _, num in sent[100])
    assert len(sent[100]) == 2
    assert len(sent[1]) > 4


class Doubling(Averaging):
    """Averages twice as much as there is, so that it shows."""

    def average(self, grads: Tensor) -> torch.futures.Future[Tensor]:
        return super().average(grads.mul_(2))


def train_in_my_own_way(folder: Path) -> float:
    """Return by which factor the gradient of the first step is another."""
    norms = []
    with ExitStack() as stack:
        world = stack.enter_context(World.enter("cpu", timeout_s=20))
        for own in (False, True):
            run = prepare(Task(), config_for(folder / str(own)), world, stack)
            if own:
                run.averaging = Doubling(world)
                run.replicate()
            trainer = Trainer(run, StopSignals(), stack)
            trainer.step(next(trainer.steps()))
            assert trainer.report
            norms.append(float(trainer.report.grad_norm))
    return norms[1] / norms[0]


def test_a_loop_of_ones_own_may_average_in_its_own_way(tmp_path: Path) -> None:
    assert run_ranks(2, train_in_my_own_way, tmp_path) == pytest.approx([2.0, 2.0])


# --- What cannot work ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"exact": True, "gradients": {"exchange_in": "bf16"}}, "exact=true decides itself how"),
        ({"exact": True, "gradients": {"bucket_mb": 1}}, "exact=true decides itself how"),
        (
            {"parallel": "fsdp", "gradients": {"exchange_in": "fp16"}},
            "does not scale gradients for fp16",
        ),
        ({"parallel": "fsdp", "gradients": {"bucket_mb": 1}}, "blocks, not buckets"),
        ({"gradients": {"exchange_in": "int8"}}, "gradients.exchange_in='int8'"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        fit(Task(), config_for(tmp_path, **settings))
