"""Ranks hold the same model, optimizer and weights, or the run is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lockstep import CheckpointStore, Loader, PartialLoss, RunConfig, fit, train_step
from lockstep.dist.ddp import unwrap
from lockstep.dist.environment import launched_rank
from lockstep.dist.same_state import checksum
from lockstep.errors import LockstepError
from lockstep.task import Context
from lockstep.testing import TinyTask, run_ranks
from lockstep.world import World


def told(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except LockstepError as error:
        return type(error).__name__, str(error), error.exit_code


def train(folder: Path, task: TinyTask, changes: dict[str, Any]) -> Any:
    config: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "batch": {"batch_size": 2},
        "evaluation": {"save_best": False},
        "checkpoint": {"every_steps": 2, "keep_last": 9},
        "sinks": {"curves": False},
        "device": "cpu",
        "timeout_s": 60,
    }
    return told(lambda: fit(task, RunConfig.parse(config | changes)).exit_code)


def run(folder: Path, task: TinyTask, num_ranks: int = 2, **changes: Any) -> list[Any]:
    return run_ranks(num_ranks, train, folder, task, changes)


def refused(results: list[Any]) -> str:
    """Return what all ranks said when they refused, which must be the same."""
    assert all(result == results[0] for result in results), results
    assert isinstance(results[0], tuple), results
    kind, said, exit_code = results[0]
    assert (kind, exit_code) == ("ConfigError", 2)
    return str(said)


# --- Before the first step ----------------------------------------------------------------------


class OtherRate(TinyTask):
    def build_optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        return SGD(model.parameters(), lr=0.01 * (1 + launched_rank()))


class OtherDecay(TinyTask):
    def build_optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        decay = 0.1 if launched_rank() else 0.0
        return SGD(model.parameters(), lr=torch.tensor(0.01), weight_decay=decay)


class MissingParameter(TinyTask):
    def build_optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        parameters = list(model.parameters())
        return SGD(parameters[: len(parameters) - launched_rank()], lr=0.01)


class OtherOrder(TinyTask):
    def build_optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        parameters = list(model.parameters())
        return SGD(parameters[::-1] if launched_rank() else parameters, lr=0.01)


class FrozenOnOne(TinyTask):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[0].weight.requires_grad_(launched_rank() == 0)  # type: ignore[index]
        return model


class WiderOnOne(TinyTask):
    def build_model(self) -> nn.Module:
        width = 8 + launched_rank()
        return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)).double()


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (OtherRate, "lr of group 0 of the optimizer is 0.01 on rank 0 and 0.02 on rank 1"),
        (OtherDecay, "weight_decay of group 0 of the optimizer is 0.0 on rank 0 and 0.1 on rank 1"),
        (MissingParameter, "number 3 of group 0 of the optimizer (3.bias) is on rank 0 and not on"),
        (OtherOrder, "number 0 of group 0 of the optimizer is 0.weight on rank 0 and 3.bias on"),
        (FrozenOnOne, "parameter 0.weight is float64 of shape (8, 5), trained on rank 0 and "),
        (WiderOnOne, "float64 of shape (9, 5), trained on rank 1"),
    ],
)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_that_build_something_else_are_refused(
    task: type[TinyTask], said: str, parallel: str, tmp_path: Path
) -> None:
    assert said in refused(run(tmp_path, task(), parallel=parallel))


def replicate_frozen_on_one(all_frozen: bool) -> Any:
    with World.enter("cpu", timeout_s=20) as world:
        model = nn.Linear(2, 2)
        if world.rank == 1:
            model.weight.requires_grad_(False)
            model.bias.requires_grad_(not all_frozen)
        return told(lambda: world.replicate(model))


@pytest.mark.parametrize("all_frozen", [False, True])
def test_replicate_refuses_a_parameter_that_one_rank_has_frozen(all_frozen: bool) -> None:
    said = refused(run_ranks(2, replicate_frozen_on_one, all_frozen))
    assert "parameter weight is float32 of shape (2, 2), trained on rank 0 and " in said
    assert "frozen on rank 1" in said


# --- Parameters outside of the model ------------------------------------------------------------


class Temperature(TinyTask):
    """Trains a parameter of the task itself."""

    def build_optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        self.temperature = nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = SGD(model.parameters(), lr=0.01)
        optimizer.add_param_group({"params": [self.temperature]})
        return optimizer

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        own = super().loss(model, batch, context)
        return PartialLoss(own.loss_sum * self.temperature.sum(), own.weight)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_parameter_outside_of_the_model_is_refused(num_ranks: int, tmp_path: Path) -> None:
    said = refused(run(tmp_path, Temperature(), num_ranks))
    assert "group 1 of the optimizer holds a tensor of shape (1,) that is not a parameter" in said
    assert "try: register it in the module that build_model returns" in said


def custom_loop(folder: Path, saves: bool) -> Any:
    with World.enter("cpu", timeout_s=20) as world:
        task = Temperature()
        model = world.replicate(task.build_model())
        optimizer = task.build_optimizer(model, 0.01)
        store = CheckpointStore(folder)

        def loop() -> int:
            loader = Loader(task.train_data(), world, batch_size=2, max_steps=2)
            for batch in loader:
                train_step(task.loss, model, optimizer, batch, world)
            if saves:
                store.save_from(world, loader.step, model=model, optimizer=optimizer)
            return loader.step

        return told(loop)


def test_a_custom_loop_on_two_ranks_refuses_it_in_its_first_step(tmp_path: Path) -> None:
    said = refused(run_ranks(2, custom_loop, tmp_path, False))
    assert "group 1 of the optimizer holds a tensor of shape (1,)" in said


def test_a_custom_loop_on_one_rank_refuses_to_save_without_it(tmp_path: Path) -> None:
    said = refused(run_ranks(1, custom_loop, tmp_path, True))
    assert "not a parameter of what is saved with optimizer" in said
    assert not list(tmp_path.glob("step_*"))


def test_load_into_refuses_it_too(tmp_path: Path) -> None:
    task = Temperature()
    model = task.build_model()
    optimizer = task.build_optimizer(model, 0.01)
    store = CheckpointStore(tmp_path)
    said = refused([told(lambda: store.load_into(model=model, optimizer=optimizer))])
    assert "not a parameter of what is saved with optimizer" in said


class Holder:
    """Holds a parameter without being a module."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    def state_dict(self) -> dict[str, Any]:
        return {"deep": [{"parameter": self.parameter.detach()}]}


def test_a_parameter_that_any_saved_object_holds_is_accepted(tmp_path: Path) -> None:
    task = Temperature()
    model = task.build_model()
    optimizer = task.build_optimizer(model, 0.01)
    with World.enter("cpu") as world:
        holder = Holder(task.temperature)
        CheckpointStore(tmp_path).save_from(
            world, 1, model=model, optimizer=optimizer, holder=holder
        )
    assert list(tmp_path.glob("step_*"))


# --- Weights ------------------------------------------------------------------------------------


class Drifting(nn.Module):
    """Moves a frozen parameter by the mean of the rank's own batch, from a call on."""

    def __init__(self, from_call: int) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.centre = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.from_call = from_call
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += self.training
        if self.training and self.num_calls >= self.from_call:
            with torch.no_grad():
                self.centre.lerp_(x.mean(dim=0), 0.1)
        return self.inner(x - self.centre)  # type: ignore[no-any-return]


class DriftingTask(TinyTask):
    def __init__(self, from_call: int) -> None:
        super().__init__()
        self.from_call = from_call

    def build_model(self) -> nn.Module:
        return Drifting(self.from_call).double()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("from_call", "kept"), [(1, []), (3, [2])])
def test_a_frozen_parameter_that_each_rank_moves_is_refused_and_not_saved(
    from_call: int, kept: list[int], sharded: bool, tmp_path: Path
) -> None:
    saving = {"every_steps": 2, "sharded": sharded}
    said = refused(run(tmp_path, DriftingTask(from_call), checkpoint=saving))
    assert "ranks have diverged: parameter centre is checksum " in said
    assert "on rank 0 and checksum " in said
    assert "try: change weights by the same values on every rank" in said
    assert CheckpointStore(tmp_path / "checkpoints", recipe="tiny").steps() == kept


class ChangedOnOne(TinyTask):
    """Changes a weight on the second rank in the third step."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        if context.training and context.step == 2 and context.world.rank == 1:
            with torch.no_grad():
                unwrap(model)[3].bias[0] += 1e-12  # type: ignore[index]
        return super().loss(model, batch, context)


def test_a_weight_that_one_rank_changes_is_refused_at_the_next_save(tmp_path: Path) -> None:
    said = refused(run(tmp_path, ChangedOnOne()))
    assert "parameter 3.bias is checksum " in said
    assert "step 4 is not saved" in said
    assert CheckpointStore(tmp_path / "checkpoints", recipe="tiny").steps() == [2]


def plateau_loop(folder: Path, averages: bool) -> Any:
    """Train five lines with a scheduler that is fed with this rank's loss, or with all ranks'."""
    with World.enter("cpu", timeout_s=20) as world:
        task = TinyTask()
        model = world.replicate(task.build_model())
        optimizer = SGD(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        loader = Loader(task.train_data(), world, batch_size=2, max_steps=2)
        store = CheckpointStore(folder)
        for batch in loader:
            train_step(task.loss, model, optimizer, batch, world)
            local = torch.tensor(float(batch.step if world.rank else -batch.step))
            scheduler.step(float(world.all_sum(local) if averages else local))
        return told(lambda: store.save_from(world, 2, model=model, optimizer=optimizer))


def test_a_scheduler_that_follows_each_ranks_own_loss_is_refused(tmp_path: Path) -> None:
    said = refused(run_ranks(2, plateau_loop, tmp_path, False))
    assert "lr of group 0 of optimizer is 0.01 on rank 0 and 0.001 on rank 1" in said
    assert "try: build the same optimizer on every rank" in said
    assert not list(tmp_path.glob("step_*"))


def test_a_scheduler_that_follows_the_loss_of_all_ranks_is_not(tmp_path: Path) -> None:
    assert run_ranks(2, plateau_loop, tmp_path, True) == [None, None]
    assert list(tmp_path.glob("step_*"))


def save_after_a_change(folder: Path) -> Any:
    with World.enter("cpu", timeout_s=20) as world:
        model = world.replicate(nn.Linear(2, 2))
        with torch.no_grad():
            unwrap(model).weight[1, 1] += world.rank  # type: ignore[index, operator]
        return told(lambda: CheckpointStore(folder).save_from(world, 1, net=model))


def test_save_from_refuses_a_weight_that_changed_after_replicate(tmp_path: Path) -> None:
    said = refused(run_ranks(2, save_after_a_change, tmp_path))
    assert "ranks have diverged: parameter net.weight is checksum " in said
    assert not list(tmp_path.glob("step_*"))


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int16, torch.int64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 4), (), (1,), (3, 5), (2, 3, 4, 5)], ids=str)
def test_a_checksum_changes_with_any_byte(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.zeros(shape, dtype=dtype)
    before = checksum(value)
    assert torch.equal(checksum(value.clone()), before)
    for byte in range(value.numel() * value.element_size()):
        changed = value.clone()
        changed.reshape(-1).view(torch.uint8)[byte] ^= 1
        assert not torch.equal(checksum(changed), before)


def test_a_checksum_sees_values_and_not_how_they_lie_in_memory() -> None:
    value = torch.randn(2, 3, 4, 4)
    expected = checksum(value)
    assert torch.equal(checksum(value.to(memory_format=torch.channels_last)), expected)
    assert torch.equal(checksum(value.transpose(0, 1).contiguous().transpose(0, 1)), expected)
    shifted = torch.cat([torch.zeros(1), value.flatten()])[1:].view_as(value)
    assert torch.equal(checksum(shifted), expected)
    assert not torch.equal(checksum(value.flip(0)), expected)
    assert torch.equal(checksum(torch.ones(1).expand(9)), checksum(torch.ones(9)))


def test_a_checksum_reaches_to_the_end_of_a_large_tensor() -> None:
    value = torch.zeros(2**21 + 3)
    expected = checksum(value)
    value[-4] = 1e-45
    assert not torch.equal(checksum(value), expected)


def test_a_model_without_shapes_yet_is_replicated_on_one_rank() -> None:
    with World.enter("cpu") as world:
        model = world.replicate(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1)))
        assert model(torch.ones(2, 5)).shape == (2, 1)


def step_compiled() -> list[float]:
    task = TinyTask()
    with World.enter("cpu", timeout_s=60) as world:
        model = torch.compile(world.replicate(task.build_model()), backend="eager")
        optimizer = SGD(model.parameters(), lr=0.1)
        loader = Loader(task.train_data(), world, batch_size=4, max_steps=2)
        for batch in loader:
            train_step(task.loss, model, optimizer, batch, world)
        return [float(p.detach().sum()) for p in unwrap(model).parameters()]


def test_a_replica_may_be_compiled() -> None:
    first, second = run_ranks(2, step_compiled)
    assert first == second
