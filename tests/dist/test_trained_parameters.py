"""Freezing and unfreezing in the middle of a run: ranks stay the same, and equal to one rank."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep import CheckpointStore, Loader, LockstepError, RunConfig, World, fit, train_step
from lockstep import trainer as trainer_module
from lockstep.dist.ddp import unwrap
from lockstep.dist.fsdp import is_dtensor
from lockstep.randomness import seed_all
from lockstep.run.build import prepare
from lockstep.signals import StopSignals
from lockstep.task import Context, PartialLoss
from lockstep.testing import TinyTask, run_ranks
from lockstep.trainer import Trainer

AT_STEP = 4
NUM_STEPS = 9
ROUNDING = 1e-9
"""Of float64: ranks add up in another order."""


class Thawing(TinyTask):
    """Trains the last layer alone, and from a step on the first one too, or the other way round.

    Args:
        way: "unfreeze" or "freeze" the first layer, or "group": unfreeze it and add it to the
            optimizer, which does not have it before.
        rank: The only rank that does so; all, if it is None.
    """

    def __init__(self, way: str = "unfreeze", rank: int | None = None, once: bool = False) -> None:
        super().__init__(num_samples=72, num_held_out=8)
        self.way, self.rank, self.once = way, rank, once
        self.is_done = False
        self.optimizer: Optimizer | None = None

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[0].requires_grad_(self.way == "freeze")
        return model

    def build_optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        every = self.way in ("unfreeze", "freeze")
        chosen = [p for p in model.parameters() if every or p.requires_grad]
        self.optimizer = torch.optim.AdamW(chosen, lr=lr)
        return self.optimizer

    def change(self, model: nn.Module, context: Context) -> None:
        is_due = context.step == AT_STEP if self.once else context.step >= AT_STEP
        if self.is_done or not is_due or context.world.rank != (self.rank or context.world.rank):
            return
        self.is_done = True
        first = unwrap(model)[0]
        first.requires_grad_(self.way != "freeze")
        if self.way == "group":
            assert self.optimizer is not None
            self.optimizer.add_param_group({"params": list(first.parameters()), "lr": 3e-3})

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        if context.training:
            self.change(model, context)
        return super().loss(model, batch, context)


def config_for(folder: Path, **more: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "batch": {"global_batch_size": 8, "batch_size": 2},
        "rate": {"lr": 1e-2},
        "max_steps": NUM_STEPS,
        "log_every": 1,
        "timeout_s": 20,
        "averages": [0.9],
        "checkpoint": {"every_steps": 3},
    }
    return RunConfig(output_dir=str(folder), device="cpu", **{**settings, **more})


Weights = dict[str, np.ndarray[Any, Any]]


def copied(tensors: Mapping[str, Any]) -> Weights:
    """Return what another process can be sent."""
    whole = {n: t.full_tensor() if is_dtensor(t) else t for n, t in tensors.items()}
    return {name: tensor.numpy().copy() for name, tensor in whole.items()}


def loop(task: Thawing, config: RunConfig, when: str = "in the loss") -> dict[str, Any]:
    """Train as `fit` does; change what is trained before a step, after it, or in its loss."""
    outside, task.change = task.change, task.change if when == "in the loss" else ignore  # type: ignore[method-assign]
    with ExitStack() as stack:
        world = stack.enter_context(World.enter("cpu", timeout_s=20))
        signals = stack.enter_context(StopSignals())
        run = prepare(task, config, world, stack)
        trainer = Trainer(run, signals, stack)
        for batch in trainer.steps():
            if when == "before the step":
                outside(run.model, Context(world, 0, batch.step, 0))
            run.set_rate(1 / (1 + batch.step))
            trainer.step(batch)
            if when == "after the step":
                outside(run.model, Context(world, 0, batch.step + 1, 0))
        trainer.finish()
        return {
            "weights": copied(unwrap(run.model).state_dict()),
            "averages": copied(run.averages.state(0.9)),
            "rates": [group["lr"] for group in run.optimizer.param_groups],
        }


def ignore(*_: Any) -> None:
    """Change nothing."""


def assert_same(a: Weights, b: Weights, rtol: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=rtol, atol=rtol / 1000)


def trained(way: str, num_ranks: int, folder: Path, when: str, **more: Any) -> dict[str, Any]:
    """Return what a rank ends with, after seeing that all end with the same."""
    config = config_for(folder / f"{way}_{num_ranks}_{when}", **more)
    first, *others = run_ranks(num_ranks, loop, Thawing(way), config, when)
    for other in others:
        assert_same(first["weights"], other["weights"])
    return first


@pytest.mark.parametrize(
    ("way", "when"),
    [
        ("unfreeze", "in the loss"),
        ("unfreeze", "before the step"),
        ("freeze", "in the loss"),
        ("freeze", "after the step"),
        ("group", "in the loss"),
        ("group", "before the step"),
    ],
)
def test_ranks_that_train_other_parameters_from_a_step_on_equal_one(
    way: str, when: str, tmp_path: Path
) -> None:
    alone = trained(way, 1, tmp_path, when)
    both = trained(way, 2, tmp_path, when)
    assert_same(alone["weights"], both["weights"], ROUNDING)
    assert_same(alone["averages"], both["averages"], ROUNDING)
    assert alone["rates"] == both["rates"]
    if way == "group":
        assert both["rates"] == pytest.approx([1e-2 / NUM_STEPS, 3e-3 / NUM_STEPS])
    seed_all(RunConfig().seed, "weights")
    first = copied(TinyTask().build_model().state_dict())
    assert (both["weights"]["0.weight"] != first["0.weight"]).all()


def test_in_exact_mode_ranks_have_the_same_bits_after_unfreezing(tmp_path: Path) -> None:
    alone = trained("unfreeze", 1, tmp_path, "in the loss", exact=True)
    both = trained("unfreeze", 2, tmp_path, "in the loss", exact=True)
    assert_same(alone["weights"], both["weights"])


def test_a_sharded_model_follows_what_is_unfrozen_after_a_step(tmp_path: Path) -> None:
    whole = trained("unfreeze", 1, tmp_path, "after the step")
    cut = trained("unfreeze", 2, tmp_path, "after the step", parallel="fsdp")
    assert_same(whole["weights"], cut["weights"], ROUNDING)


# --- What cannot work is refused on all ranks ---------------------------------------------------


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except LockstepError as error:
        return str(error)
    return "not refused"


def train(task: Thawing, config: RunConfig) -> str:
    return refusal(lambda: fit(task, config))


def test_a_rank_that_unfreezes_alone_is_named_on_all(tmp_path: Path) -> None:
    said, *others = run_ranks(2, train, Thawing(rank=1), config_for(tmp_path))
    assert others == [said]
    assert "ranks 0 and 1 do not train the same parameters" in said
    assert "(rank 0: no change of requires_grad; rank 1: now trained: 0.weight, 0.bias" in said
    checkpoint, _ = CheckpointStore(tmp_path / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    assert checkpoint.step == AT_STEP  # the steps before it are not lost
    assert checkpoint.meta["trained"] == ["3.weight", "3.bias"]


class Forgotten(Thawing):
    """Unfreezes a layer that its optimizer does not have, nor gets."""

    def change(self, model: nn.Module, context: Context) -> None:
        unwrap(model)[0].requires_grad_(context.step >= AT_STEP)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_unfrozen_parameters_that_no_group_has_are_named(num_ranks: int, tmp_path: Path) -> None:
    said = run_ranks(num_ranks, train, Forgotten("group"), config_for(tmp_path))
    assert set(said) == {said[0]}
    problem = "these parameters now require a gradient, but no parameter group of the optimizer"
    assert f"{problem} has them: 0.weight, 0.bias" in said[0]


class Flickering(Thawing):
    """Changes what is trained whenever it is asked for a loss, from a step on."""

    def change(self, model: nn.Module, context: Context) -> None:
        if context.step >= AT_STEP:
            unwrap(model)[0].requires_grad_(not unwrap(model)[0].weight.requires_grad)


def test_a_loss_that_changes_what_is_trained_each_time_is_refused(tmp_path: Path) -> None:
    said = run_ranks(2, train, Flickering(), config_for(tmp_path, batch={"batch_size": 4}))
    saved, _ = CheckpointStore(tmp_path / "checkpoints", recipe="tiny").latest()
    assert saved is not None
    assert saved.step == AT_STEP  # the steps before it are not lost
    assert said == [said[0]] * 2
    assert "requires_grad changes each time the loss is computed" in said[0]


class Poisoned(Thawing):
    """Meets a loss that is not finite, once, after it has unfrozen a layer."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        made = super().loss(model, batch, context)
        factor = float("nan") if context.training and context.step == AT_STEP + 2 else 1.0
        return PartialLoss(made.loss_sum * factor, made.weight, made.parts)


def test_a_run_rewinds_to_a_checkpoint_from_before_it_unfroze(tmp_path: Path) -> None:
    config = config_for(tmp_path, on_non_finite="rewind", checkpoint={"every_steps": AT_STEP})
    first, second = run_ranks(2, loop, Poisoned("group"), config)
    assert_same(first["weights"], second["weights"])
    assert_same(first["averages"], second["averages"])
    assert np.isfinite(first["weights"]["0.weight"]).all()


# --- Resume --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "num_ranks"), [("group", 1), ("unfreeze", 2), ("freeze", 2), ("group", 2)]
)
def test_a_resume_after_unfreezing_has_the_bits_of_the_straight_run(
    way: str, num_ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    straight = trained(way, num_ranks, tmp_path, "in the loss")
    folder = tmp_path / "resumed"
    for steps in (6, NUM_STEPS):
        ended = run_ranks(num_ranks, loop, Thawing(way), config_for(folder, max_steps=steps))
    assert_same(straight["weights"], ended[0]["weights"])
    assert_same(straight["averages"], ended[0]["averages"])
    assert straight["rates"] == ended[0]["rates"]
    assert "they are not trained" not in capfd.readouterr().out  # the group is added again


def test_a_resume_restores_what_was_unfrozen_by_a_step_that_does_not_come_again(
    tmp_path: Path,
) -> None:
    straight = trained("unfreeze", 2, tmp_path, "in the loss")
    for steps in (6, NUM_STEPS):
        config = config_for(tmp_path / "resumed", max_steps=steps)
        ended = run_ranks(2, loop, Thawing(once=True), config)
    assert_same(straight["weights"], ended[0]["weights"])


def test_a_resume_that_does_not_add_its_parameter_group_again_is_refused(tmp_path: Path) -> None:
    said = [
        run_ranks(2, train, Thawing("group", once=True), config_for(tmp_path, max_steps=steps))
        for steps in (6, NUM_STEPS)
    ]
    assert said[0] == ["not refused"] * 2
    assert said[1] == [said[1][0]] * 2
    assert "had 2 parameter groups at the checkpoint and has 1 now" in said[1][0]
    assert "test for `step >= 40`" in said[1][0]


class Changed(Thawing):
    """A task that was edited: it never freezes anything."""

    def build_model(self) -> nn.Module:
        return TinyTask().build_model()

    def change(self, model: nn.Module, context: Context) -> None:
        """Leave it."""


def test_a_resume_of_a_task_that_now_trains_something_else_is_refused(tmp_path: Path) -> None:
    assert train(Thawing(), config_for(tmp_path, max_steps=3)) == "not refused"
    said = train(Changed(), config_for(tmp_path))
    assert "does not train the checkpoint's parameters: now trained: 0.weight, 0.bias" in said
    assert train(Changed(), config_for(tmp_path, accept_changes=True)) == "not refused"


# --- The five lines ------------------------------------------------------------------------------


def five_lines(again: bool) -> Weights | str:
    task = Thawing()
    data = task.train_data()
    with World.enter("cpu", timeout_s=20) as world:
        torch.manual_seed(0)
        model = world.replicate(task.build_model())
        optimizer = torch.optim.SGD(unwrap(model).parameters(), lr=0.1)
        loader = Loader(data, world, batch_size=4, epochs=1)

        def take(batch: Any) -> None:
            train_step(TinyTask().loss, model, optimizer, batch, world)

        for batch in loader:
            if batch.step == 3:
                unwrap(model)[0].requires_grad_(True)
                if again:
                    model = world.replicate(model)
            if said := refusal(partial(take, batch)).replace("not refused", ""):
                return said
        return copied(unwrap(model).state_dict())


def test_five_lines_that_unfreeze_without_replicating_again_are_refused_with_the_names() -> None:
    said, *others = run_ranks(2, five_lines, False)
    assert others == [said]
    assert "now trained: 0.weight, 0.bias" in said
    assert "try: call model = world.replicate(model) after changing requires_grad" in said


def resume_without_the_group(folder: Path) -> str:
    with World.enter("cpu", timeout_s=20) as world:
        model = Thawing().build_model()
        optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
        store = CheckpointStore(folder)
        grown = torch.optim.SGD(model[3].parameters(), lr=0.1)
        grown.add_param_group({"params": list(model[0].parameters())})
        store.save_from(world, 1, model=model, optimizer=grown)
        return refusal(lambda: store.load_into(optimizer=optimizer))


def test_five_lines_that_resume_without_an_added_group_are_told_so(tmp_path: Path) -> None:
    (said,) = run_ranks(1, resume_without_the_group, tmp_path)
    assert "the saved state of optimizer does not fit" in said
    assert "before load_into add the parameter groups that the saved run had added" in said


def test_five_lines_that_replicate_again_train_the_same_weights_on_all_ranks() -> None:
    a, b = run_ranks(2, five_lines, True)
    assert_same(a, b)
    torch.manual_seed(0)
    assert (a["0.weight"] != copied(TinyTask().build_model().state_dict())["0.weight"]).all()


# --- A loop with a step of its own ------------------------------------------------------------


def loop_with_train_step(task: Thawing, config: RunConfig) -> str:
    """Train as docs/own_loop.md does; the change in the loss is not followed."""
    trainer_module.ERROR_TIMEOUT_S = 5.0 if task.rank is None else 0.2
    try:
        with ExitStack() as stack:
            world = stack.enter_context(World.enter("cpu", timeout_s=20))
            signals = stack.enter_context(StopSignals())
            run = prepare(task, config, world, stack)
            trainer = Trainer(run, signals, stack)
            for batch in trainer.steps():
                run.set_rate(1.0)
                report = train_step(
                    task.loss, run.model, run.optimizer, batch, world, **run.step_options()
                )
                trainer.record_step(report, batch)
            trainer.finish()
    except LockstepError as error:
        return type(error).__name__
    return "finished"


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_refused_train_step_does_not_lose_the_steps_before_it(
    num_ranks: int, exact: bool, tmp_path: Path
) -> None:
    config = config_for(tmp_path, checkpoint={"every_epochs": None}, averages=(), exact=exact)
    kinds = run_ranks(num_ranks, loop_with_train_step, NormedThawing(), config)
    assert kinds == ["TrainedParametersError"] * num_ranks
    saved, _ = CheckpointStore(tmp_path / "checkpoints", recipe="tiny").latest()
    assert saved is not None, "the steps are lost"
    assert saved.step == AT_STEP
    statistics = saved.load("model")["1.running_var"]
    if exact:  # where statistics are merged after the step, the failed one leaves no trace
        straight = tmp_path / "straight"
        same = config_for(straight, max_steps=AT_STEP, averages=(), exact=exact)
        run_ranks(num_ranks, loop_with_train_step, NormedThawing(), same)
        undisturbed, _ = CheckpointStore(straight / "checkpoints", recipe="tiny").latest()
        assert undisturbed is not None
        assert torch.equal(statistics, undisturbed.load("model")["1.running_var"])


class NormedThawing(Thawing):
    """Has running statistics, which a forward pass changes before the step is refused."""

    def build_model(self) -> nn.Module:
        layers = (nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        model = nn.Sequential(*layers).double()
        model[0].requires_grad_(False)
        return model


def test_a_rank_whose_train_step_is_refused_alone_saves_nothing(tmp_path: Path) -> None:
    """The others wait in the sum of the step: a save would keep them waiting."""
    config = config_for(tmp_path, checkpoint={"every_epochs": None}, averages=())
    with pytest.raises(RuntimeError, match="rank 0 failed"):
        run_ranks(2, loop_with_train_step, Thawing(rank=1), config)
    assert CheckpointStore(tmp_path / "checkpoints", recipe="tiny").latest() == (None, [])
