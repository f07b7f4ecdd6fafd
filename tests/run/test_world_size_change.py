"""A run that grows: 1 -> 2 -> 4 ranks and back, with the settings it began with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import (
    CheckpointStore,
    Loader,
    PartialLoss,
    RunConfig,
    World,
    fit,
    read_events,
    train_step,
)
from lockstep.errors import ConfigError, LockstepError
from lockstep.plan import BatchConfig, plan_batches
from lockstep.randomness import seed_all
from lockstep.task import Context
from lockstep.testing import TinyTask, run_ranks

GROWTH = ((1, 3), (2, 7), (4, 11), (1, 13), (3, 15))
"""Ranks, and the step at which each part of the run ends: five steps an epoch."""


class Tiny(TinyTask):
    """38 samples: with a batch of 8 the last step of an epoch has 6."""

    def __init__(self, num_samples: int = 38) -> None:
        super().__init__(num_samples, num_held_out=0)


class Comparing(Tiny):
    """Compares each sample with all that meet in a micro-batch."""

    gathers = True

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        rows = model(batch["x"])
        away = (rows - context.gather(rows).mean(dim=0)).square().sum()
        return PartialLoss(away + (rows - batch["y"]).square().sum(), float(len(rows)))


class Normed(Tiny):
    """Has batch normalisation; before it a bias would have no gradient but rounding."""

    def build_model(self) -> nn.Module:
        layers = (nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3))
        return nn.Sequential(*layers).double()


def config_for(folder: Path, **changes: Any) -> RunConfig:
    batch = {"batch_size": 8, "drop_last": False, **changes.pop("batch", {})}
    values = {
        "output_dir": str(folder),
        "max_steps": GROWTH[-1][1],
        "batch": batch,
        "rate": {"lr": 0.05, "lr_scaling": "linear"},
        "sinks": {"curves": False},
        "device": "cpu",
        "timeout_s": 30,
    }
    return RunConfig.parse(values | changes)


def train(build: Callable[[], Tiny], folder: Path, changes: dict[str, Any]) -> Any:
    try:
        return fit(build(), config_for(folder, **changes)).step
    except LockstepError as error:
        return error.problem, error.remedy, error.exit_code


def grow(build: Callable[[], Tiny], folder: Path, **changes: Any) -> None:
    for num_ranks, stop in GROWTH:
        steps = run_ranks(num_ranks, train, build, folder, {**changes, "max_steps": stop})
        assert steps == [stop] * num_ranks


def checkpoint_of(folder: Path) -> Any:
    checkpoint, _ = CheckpointStore(folder / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    return checkpoint


def distance(a: Path, b: Path) -> float:
    mine, theirs = (checkpoint_of(folder).load("model") for folder in (a, b))
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def check_epochs(folder: Path, num_samples: int) -> None:
    epochs = [event for event in read_events(folder, 0) if event["event"] == "epoch"]
    said = f"{num_samples} of {num_samples} samples, each once"
    assert [event["message"] for event in epochs] == [said] * 3


@pytest.mark.parametrize("task", [Tiny, Comparing])
def test_a_run_that_grows_and_shrinks_ends_where_one_rank_does(
    task: Callable[[], Tiny], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A loss that compares samples may grow too: all of a step met on one rank, and still do."""
    straight, grown = tmp_path / "straight", tmp_path / "grown"
    assert run_ranks(1, train, task, straight, {}) == [15]
    capfd.readouterr()
    grow(task, grown)
    said = capfd.readouterr().out
    assert distance(straight, grown) < 1e-12
    check_epochs(grown, 38)
    contract = checkpoint_of(grown).meta["contract"]
    assert contract["effective_lr"] == 0.05, "the rate of the one rank it began on"
    starts = [e["plan"] for e in read_events(grown, 0, raw=True) if e["event"] == "run_start"]
    assert [plan["batch_size"] * plan["leaves_per_step"] for plan in starts] == [8] * 5
    assert "Batch size: 4 per GPU, 8 total (x 2), 8 effective (x 1 accumulated)" in said
    assert (
        "saved on 1 rank, resumed on 2 ranks: micro-batches of 4 samples instead of 8, "
        "still 8 samples a step"
    ) in said
    assert (
        "saved on 4 ranks, resumed on 1 rank: micro-batches of 8 samples instead of 2, "
        "still 8 samples a step"
    ) in said
    assert "linear scaling multiplies" not in said


@pytest.mark.parametrize("batch", [{"batch_size": 5}, {"batch_size": 8, "global_batch_size": 8}])
def test_odd_and_stated_batches_grow_too(batch: dict[str, int], tmp_path: Path) -> None:
    """Five samples on two ranks are three and two, on four two, two, one and none."""
    straight, grown = tmp_path / "straight", tmp_path / "grown"
    assert run_ranks(1, train, Tiny, straight, {"batch": batch}) == [15]
    grow(Tiny, grown, batch=batch)
    assert distance(straight, grown) < 1e-12


def test_growing_needs_no_more_samples_than_a_step_has(tmp_path: Path) -> None:
    """Twelve samples, dropped to eight: four ranks of eight would need 32 by themselves."""

    def few() -> Tiny:
        return Tiny(num_samples=12)

    straight, grown = tmp_path / "straight", tmp_path / "grown"
    changes = {"batch": {"drop_last": True}}
    assert run_ranks(1, train, few, straight, {**changes, "max_steps": 6}) == [6]
    assert run_ranks(1, train, few, grown, {**changes, "max_steps": 2}) == [2]
    assert run_ranks(4, train, few, grown, {**changes, "max_steps": 6}) == [6] * 4
    assert distance(straight, grown) < 1e-12


def test_more_ranks_than_samples_in_a_step_are_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"batch": {"batch_size": 2}}
    run_ranks(1, train, Tiny, tmp_path, {**changes, "max_steps": 2})
    refused = run_ranks(3, train, Tiny, tmp_path, changes)
    assert refused[0] == refused[1] == refused[2]
    assert refused[0] == (
        "a step has 2 samples, too few for 3 ranks",
        "use at most 2 ranks, or pass accept_changes=true to continue with the new ones",
        2,
    )


def test_exact_mode_keeps_its_bits_or_asks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        run_ranks(1, train, Tiny, folder, {"exact": True, "max_steps": 3})
    problem, remedy, code = run_ranks(2, train, Tiny, two, {"exact": True})[0]
    assert problem == (
        "a step has 1 x 8 samples, too few micro-batches for 2 ranks: smaller ones would change "
        "the bits of exact mode"
    )
    assert remedy.startswith("use at most 1 rank, or pass accept_changes=true")
    assert code == 2
    accepted = {"exact": True, "accept_changes": True}
    capfd.readouterr()
    run_ranks(2, train, Tiny, two, {**accepted, "max_steps": 5})
    assert (
        "saved on 1 rank, resumed on 2 ranks: micro-batches of 4 samples instead of 8, "
        "still 8 samples a step; warning: the bits differ from here on"
    ) in capfd.readouterr().out
    # From there on the bits belong to the step again: the smaller micro-batches stay.
    plan = checkpoint_of(two).meta["contract"]["plan"]
    assert (plan["halvings"], plan["split_for_ranks"]) == (1, 0)
    run_ranks(1, train, Tiny, two, {"exact": True})
    run_ranks(2, train, Tiny, one, {**accepted, "max_steps": 5})
    run_ranks(2, train, Tiny, one, {"exact": True})
    assert distance(one, two) == 0.0


def test_batch_norm_over_a_micro_batch_is_refused_with_what_it_would_see(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(1, train, Normed, tmp_path, {"max_steps": 3})
    refused = run_ranks(2, train, Normed, tmp_path, {})
    assert refused[0] == refused[1]
    assert refused[0] == (
        "batch normalisation would see 4 samples at a time on 2 ranks; the checkpoint was trained "
        "with 8 on 1 rank",
        "use 1 rank, or pass accept_changes=true; together with sync_batch_norm=true statistics "
        "see 8 samples",
        2,
    )
    capfd.readouterr()
    assert run_ranks(2, train, Normed, tmp_path, {"accept_changes": True}) == [15, 15]
    said = capfd.readouterr().out
    assert "warning: batch normalisation sees 4 samples at a time instead of 8" in said


def test_synchronised_batch_norm_sees_the_same_samples(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    straight, grown = tmp_path / "straight", tmp_path / "grown"
    changes = {"sync_batch_norm": True, "batch": {"drop_last": True}}
    run_ranks(1, train, Normed, straight, changes)
    capfd.readouterr()
    grow(Normed, grown, **changes)
    assert "batch normalisation sees" not in capfd.readouterr().out
    assert distance(straight, grown) < 1e-12


def test_synchronised_batch_norm_on_fewer_ranks_is_refused_with_what_it_would_see(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"sync_batch_norm": True, "batch": {"drop_last": True}}
    run_ranks(2, train, Normed, tmp_path, {**changes, "max_steps": 2})
    assert run_ranks(1, train, Normed, tmp_path, changes) == [
        (
            "batch normalisation would see 8 samples at a time on 1 rank; the checkpoint was "
            "trained with 16 on 2 ranks",
            "use 2 ranks, set batch.batch_size=16 (still 16 samples a step), or pass "
            "accept_changes=true",
            2,
        )
    ]
    capfd.readouterr()
    accepted = {**changes, "accept_changes": True, "max_steps": 3}
    assert run_ranks(1, train, Normed, tmp_path, accepted) == [3]
    said = capfd.readouterr().out
    assert "warning: batch normalisation sees 8 samples at a time instead of 16" in said


@pytest.mark.parametrize("ends_on", [1, 2])
def test_a_cut_that_keeps_the_samples_of_a_normalisation_is_the_same_run(
    ends_on: int, tmp_path: Path
) -> None:
    """2 ranks x 8 samples, 1 rank x 16 and back: the rate too is that of the two it began on."""

    def changes(num_ranks: int, stop: int) -> dict[str, Any]:
        batch = {"batch_size": 16 // num_ranks, "drop_last": True}
        return {"sync_batch_norm": True, "batch": batch, "max_steps": stop}

    straight, cut = tmp_path / "straight", tmp_path / "cut"
    run_ranks(2, train, Normed, straight, changes(2, 6))
    for num_ranks, stop in ((2, 2), (1, 3), (1, 4), (ends_on, 6)):
        assert run_ranks(num_ranks, train, Normed, cut, changes(num_ranks, stop))[0] == stop
    assert distance(straight, cut) < 1e-12
    assert checkpoint_of(cut).meta["contract"]["effective_lr"] == 0.1


def test_another_global_batch_is_still_refused_with_synchronised_batch_norm(
    tmp_path: Path,
) -> None:
    changes: dict[str, Any] = {"sync_batch_norm": True}
    run_ranks(2, train, Normed, tmp_path, {**changes, "max_steps": 2})
    larger = {**changes, "batch": {"batch_size": 16, "accumulate": 2}}
    problem, *_ = run_ranks(1, train, Normed, tmp_path, larger)[0]
    assert "batch_size 8 -> 16" in problem


def test_a_comparing_loss_is_refused_where_others_would_meet(tmp_path: Path) -> None:
    """Two micro-batches a step: on two ranks they would meet, on one they did not."""
    changes: dict[str, Any] = {"batch": {"accumulate": 2}}
    run_ranks(1, train, Comparing, tmp_path, {**changes, "max_steps": 2})
    refused = run_ranks(2, train, Comparing, tmp_path, changes)
    assert refused[0][0] == (
        "the loss compares the samples of all ranks: the checkpoint was trained with 8 at a time "
        "(8 x 1 ranks), this run would have 16"
    )
    assert ConfigError.exit_code == refused[0][2]


# --- Five lines in place of fit ---------------------------------------------------------------


def five_lines(build: Callable[[], Tiny], folder: Path, options: dict[str, Any]) -> Any:
    """Train two steps more than the checkpoint has; return the step, or why it is refused."""
    task = build()
    with World.enter("cpu", timeout_s=20) as world:
        seed_all(0, "weights")
        model = world.replicate(task.build_model())
        optimizer = task.build_optimizer(model, 0.05)
        loader = Loader(task.train_data(), world, epochs=9, **options)
        store = CheckpointStore(folder)
        step = store.load_into(model=model, optimizer=optimizer, loader=loader)
        before = [p.detach().clone() for p in model.parameters()]
        try:
            for batch in loader:
                train_step(task.loss, model, optimizer, batch, world)
                if loader.step == step + 2:
                    break
        except LockstepError as error:
            kept = all(map(torch.equal, before, model.parameters()))
            return error.problem, error.remedy, "nothing has moved" if kept else "moved"
        store.save_from(world, loader.step, model=model, optimizer=optimizer, loader=loader)
        return loader.step


BN_REFUSED = (
    "batch normalisation would see 4 samples at a time on 2 ranks; the checkpoint was trained "
    "with 8 on 1 rank"
)


def test_five_lines_refuse_what_fit_refuses(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 8}
    assert run_ranks(1, five_lines, Normed, tmp_path, options) == [2]
    remedy = "use 1 rank, or pass accept_changes=true to Loader"
    refused = (BN_REFUSED, remedy, "nothing has moved")
    assert run_ranks(2, five_lines, Normed, tmp_path, options) == [refused] * 2
    accepted = {**options, "accept_changes": True}
    assert run_ranks(2, five_lines, Normed, tmp_path, accepted) == [4, 4]
    assert run_ranks(2, five_lines, Normed, tmp_path, options) == [6, 6], "nothing changes again"


class Gathering(Comparing):
    """Does not say that its loss gathers: a custom loop has nobody to say it to."""

    gathers = False


def test_five_lines_refuse_a_comparing_loss_where_others_would_meet(tmp_path: Path) -> None:
    plan = plan_batches(BatchConfig(batch_size=8, accumulate=2), 38, 1)
    assert run_ranks(1, five_lines, Gathering, tmp_path, {"plan": plan}) == [2]
    options = {"plan": plan.on_ranks(2)}
    problem = (
        "the loss compares the samples of all ranks: the checkpoint was trained with 8 at a time "
        "(8 x 1 ranks), this run would have 16"
    )
    remedy = "use 1 rank, or pass accept_changes=true"
    refused = (problem, remedy, "nothing has moved")
    assert run_ranks(2, five_lines, Gathering, tmp_path, options) == [refused] * 2


@pytest.mark.parametrize("task", [Tiny, Gathering])
def test_five_lines_grow_where_the_loss_stays_the_same(
    task: Callable[[], Tiny], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"batch_size": 8}
    assert run_ranks(1, five_lines, task, tmp_path, options) == [2]
    assert run_ranks(2, five_lines, task, tmp_path, options) == [4, 4]
