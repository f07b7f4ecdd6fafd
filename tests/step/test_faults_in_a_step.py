"""What may go wrong inside a step: memory, and numbers that are none."""

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Loader, RunConfig, World, fit, read_events, train_step
from lockstep.checkpoint import CheckpointStore
from lockstep.dist.ddp import unwrap
from lockstep.errors import ConfigError, NonFiniteError, OutOfMemoryError
from lockstep.run.build import prepare
from lockstep.run.run import Run
from lockstep.task import Context, PartialLoss
from lockstep.testing import FakeWorld, TinyTask, run_ranks

TOO_MUCH = 1 << 60
"""Bytes: what no machine's allocator will give."""


class Exhaust(torch.autograd.Function):
    """Passes a value on; asks for more memory than there is in the pass it is told."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, when: str) -> Tensor:
        ctx.when = when
        if when == "forward":
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.when == "backward":
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        return grads[0], None


class Hungry(TinyTask):
    """Runs out of memory on one rank, at one step, with more than `most` samples at a time."""

    def __init__(self, when: str = "", rank: int = 0, step: int = 3, most: int = 2) -> None:
        super().__init__(num_samples=40, num_held_out=0)
        self.when, self.rank, self.at_step, self.most = when, rank, step, most

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        here = context.step >= self.at_step and context.world.rank == self.rank
        when = self.when if here and len(batch["x"]) > self.most else ""
        when = "" if when == "midway" and context.place < 3 else when
        if when == "midway":  # the last layer's gradients are on their way by then
            hook = unwrap(model)[1].register_forward_hook(
                lambda *a: Exhaust.apply(a[2], "backward")
            )
        made = super().loss(model, {**batch, "x": batch["x"]}, context)
        if when == "midway":
            hook.remove()
        return PartialLoss(Exhaust.apply(made.loss_sum, when), made.weight, made.parts)


class Poisoned(TinyTask):
    """One sample makes the loss no number, on whatever rank it falls."""

    poison = float("nan")

    def __init__(self) -> None:
        super().__init__(num_samples=40, num_held_out=0)

    def train_data(self) -> list[dict[str, Tensor]]:
        data = super().train_data()
        data[17]["y"] = torch.full((3,), self.poison, dtype=torch.float64)
        data[17]["units"] = torch.tensor(2.0, dtype=torch.float64)
        return data


class Half(Poisoned):
    """In float32, for a scaler to scale."""

    def build_model(self) -> nn.Module:
        return super().build_model().float()

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        return {key: value.float() for key, value in super().collate(samples).items()}


class Normed(Poisoned):
    """The bad sample is no number itself, and reaches the running statistics."""

    def build_model(self) -> nn.Module:
        layers = (nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        return nn.Sequential(*layers).double()

    def train_data(self) -> list[dict[str, Tensor]]:
        data = super().train_data()
        data[17]["x"] = torch.full((5,), self.poison, dtype=torch.float64)
        return data


class Momentum(Half):
    """In half precision, where the first steps overflow until the scaler has come down."""

    poison = 0.0
    fused = False

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr, momentum=0.9, fused=self.fused)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        made = super().loss(model, batch, context)
        return PartialLoss(20 * made.loss_sum, made.weight)


class HungryStream(Hungry):
    """Its samples come one after the other."""

    def train_data(self) -> Any:
        return Stream(super().train_data())

    def eval_data(self) -> Any:
        return None


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    def __init__(self, samples: list[dict[str, Tensor]]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.samples)


def config_for(folder: Path, **more: Any) -> RunConfig:
    values = {
        "output_dir": str(folder),
        "max_steps": 10,
        "batch": {"batch_size": 4, "global_batch_size": 16, "drop_last": False},
        "rate": {"lr": 1e-2},
        "checkpoint": {"every_steps": 4},
        "device": "cpu",
        "log_every": 1,
        "timeout_s": 30,
        "sinks": {"curves": False},
        **more,
    }
    return RunConfig.parse(values)


def weights_of(folder: Path) -> Tensor:
    checkpoint, _ = CheckpointStore(folder / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    return torch.cat([t.flatten() for t in checkpoint.load("model").values()])


def train(task: TinyTask, folder: Path, more: dict[str, Any]) -> int:
    return fit(task, config_for(folder, **more)).step


def train_in_dirty_memory(task: TinyTask, folder: Path) -> None:
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN
    fit(task, config_for(folder, precision="fp16", rate={"lr": 1e-4}))


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_events(folder) if e["event"] == kind]


# --- Parts of the loss --------------------------------------------------------------------


class Kinds(TinyTask):
    """From the second step on, the second micro-batch brings other parts than the first."""

    def __init__(self, *others: str) -> None:
        super().__init__(num_samples=16, num_held_out=0)
        self.others = others

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        made = super().loss(model, batch, context)
        names = self.others if context.step and context.place else ("ct",)
        return PartialLoss(made.loss_sum, made.weight, dict.fromkeys(names, (torch.ones(()), 1.0)))


@pytest.mark.parametrize("others", [("mri",), ("ct", "mri")])
def test_parts_that_differ_between_ranks_are_refused(
    others: tuple[str, ...], tmp_path: Path
) -> None:
    def refused() -> str:
        batch = {"batch_size": 4, "global_batch_size": 8}
        with pytest.raises(ConfigError) as caught:
            fit(Kinds(*others), config_for(tmp_path, batch=batch))
        return caught.value.problem

    said = f"different parts of the loss in one step: ct and {', '.join(others)}"
    assert all(said in problem for problem in run_ranks(2, refused))


def step_with_other_parts(others: tuple[str, ...]) -> tuple[str, bool]:
    task = Kinds(*others)
    with World.enter("cpu", timeout_s=20) as world:
        model = world.replicate(task.build_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = Loader(task.train_data(), world, batch_size=4, epochs=2)
        problem = "trained"
        before: list[Tensor] = []
        try:
            for batch in loader:
                before = [p.detach().clone() for p in model.parameters()]
                train_step(task.loss, model, optimizer, batch, world)
        except ConfigError as error:
            problem = error.problem
        return problem, all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("others", [("mri",), ("ct", "mri")])
def test_a_custom_loop_refuses_parts_that_differ_between_ranks(others: tuple[str, ...]) -> None:
    """The same number of them would be added up by place, another number ends in C++."""
    said = f"ranks have different parts of the loss in one step: ct and {', '.join(others)}"
    assert run_ranks(2, step_with_other_parts, others) == [(said, True)] * 2


class Parted(TinyTask):
    """Returns given parts, and a weight if there is one."""

    def __init__(self, parts: Any, weight: Any = None) -> None:
        super().__init__(num_samples=16, num_held_out=0)
        self.parts = parts
        self.weight = weight

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        made = super().loss(model, batch, context)
        return PartialLoss(made.loss_sum, self.weight or made.weight, self.parts)


PAIR = (torch.ones(()), 1.0)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Parted({"loss": PAIR}), "a part of the loss is named 'loss', as the loss itself is"),
        (Parted({"a": PAIR, 3: PAIR}), "a part of the loss is named 3, which is not a string"),
        (
            Parted({"a": (torch.ones(3), 1.0)}),
            "part 'a' of the loss is (tensor([1., 1., 1.]), 1.0)",
        ),
        (Parted({"a": torch.ones(())}), "part 'a' of the loss is tensor(1.), not a pair"),
        (Parted({}, torch.ones(4).tolist()), "the weight of the loss is [1.0, 1.0, 1.0, 1.0]"),
    ],
)
def test_a_part_that_cannot_be_added_up_is_refused(
    task: TinyTask, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        fit(task, config_for(tmp_path))
    assert caught.value.problem.startswith(said)
    assert not events_of(tmp_path, "step")


class Elusive(TinyTask):
    """Leaves gradients where the other ranks do not get them."""

    def __init__(self, how: str) -> None:
        super().__init__(num_samples=8, num_held_out=0)
        self.how = how

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        if self.how == "inside":
            return super().loss(getattr(model, "module", model), batch, context)
        made = super().loss(model, batch, context)
        if self.how == "everywhere" or context.world.rank:
            return PartialLoss(list(model.parameters())[-1].sum(), made.weight, made.parts)
        return made


@pytest.mark.parametrize(
    ("how", "exact", "said"),
    [
        ("inside", False, "the loss called model.module directly"),
        ("everywhere", False, "no gradient for 0.weight, 0.bias, 3.weight;"),
        ("on one rank", True, "rank 1: a micro-batch has no gradient for 0.weight"),
    ],
)
def test_gradients_that_do_not_reach_other_ranks_are_refused(
    how: str, exact: bool, said: str, tmp_path: Path
) -> None:
    def refused() -> str:
        batch = {"batch_size": 4, "global_batch_size": 8}
        with pytest.raises(ConfigError) as caught:
            fit(Elusive(how), config_for(tmp_path, batch=batch, exact=exact, max_steps=1))
        return caught.value.problem

    assert all(said in problem for problem in run_ranks(2, refused))


# --- Memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("when", ["forward", "midway"])
def test_a_rank_out_of_memory_goes_on_with_half(when: str, exact: bool, tmp_path: Path) -> None:
    """It was one rank's trouble; all drop the step, take it again, and end where they would."""
    straight, hit = tmp_path / "straight", tmp_path / "hit"
    run_ranks(2, train, Hungry(), straight, {"exact": exact})
    assert run_ranks(2, train, Hungry(when, rank=1), hit, {"exact": exact}) == [10, 10]
    (event,) = {json.dumps([e["step"], e["batch_size"]]) for e in events_of(hit, "out_of_memory")}
    assert json.loads(event) == [3, 2]
    difference = (weights_of(hit) - weights_of(straight)).abs().max()
    assert difference < 1e-13, difference
    epochs = events_of(hit, "epoch")
    assert epochs
    assert all(e["each_once"] for e in epochs)


def test_what_was_halved_stays_so_after_a_resume(tmp_path: Path) -> None:
    straight, hit = tmp_path / "straight", tmp_path / "hit"
    run_ranks(2, train, Hungry(), straight, {})
    run_ranks(2, train, Hungry("backward"), hit, {"max_steps": 6})
    assert run_ranks(3, train, Hungry("backward"), hit, {}) == [10, 10, 10]
    assert len(events_of(hit, "out_of_memory")) == 1  # by the first rank, in the first part
    assert (weights_of(hit) - weights_of(straight)).abs().max() < 1e-13


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_sample_that_does_not_fit_ends_the_run(num_ranks: int, tmp_path: Path) -> None:
    def refused() -> tuple[int, str, bool]:
        with pytest.raises(OutOfMemoryError, match="one sample does not fit in memory") as caught:
            fit(Hungry("forward", most=0), config_for(tmp_path))
        return caught.value.exit_code, caught.value.problem, caught.value.is_shared

    said = run_ranks(num_ranks, refused)
    assert said == [(2, said[0][1], True)] * num_ranks
    saved, _ = CheckpointStore(tmp_path / "checkpoints", recipe="tiny").latest()
    assert saved is not None
    assert saved.step == 3  # the steps before it are not lost


def test_stop_means_stop(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="DefaultCPUAllocator"):
        run_ranks(1, train, Hungry("forward"), tmp_path, {"on_out_of_memory": "stop"})


class Comparing(Hungry):
    """Weighs samples by how many it sees together."""

    gathers = True

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        made = super().loss(model, batch, context)
        return PartialLoss(made.loss_sum * len(context.gather(batch["x"])), made.weight, made.parts)


def test_a_loss_that_compares_samples_is_not_halved(tmp_path: Path) -> None:
    """It would compare each with half as many: another loss, on one rank too."""
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        fit(Comparing("forward"), config_for(tmp_path / "plain"))
    exact = config_for(tmp_path / "exact", exact=True)
    assert fit(Comparing("forward"), exact).step == 10, "there all of a step meet"


class Summing(Hungry):
    """Sums over ranks in its forward pass, without a word to the run."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        if context.step == self.at_step and self.when == "frozen":
            unwrap(model)[0].weight.requires_grad_(False)
        made = super().loss(model, batch, context)
        context.world.all_sum(made.loss_sum.detach())
        return made


def failure(task: Hungry, folder: Path) -> str:
    with pytest.raises(RuntimeError) as caught:
        train(task, folder, {})
    return str(caught.value)


def test_a_loss_that_communicates_is_not_halved_on_several_ranks(tmp_path: Path) -> None:
    """The zeros that the rank sent would be paired with the sum that the others wait in."""
    other, failed = run_ranks(2, failure, Summing("forward", rank=1), tmp_path / "two")
    assert "DefaultCPUAllocator" in failed
    assert "Connection closed by peer" in other, "at once, and not after a time limit"
    assert not events_of(tmp_path / "two", "out_of_memory")
    assert fit(Summing("forward"), config_for(tmp_path / "one")).step == 10


def test_such_a_loss_may_freeze_parameters(tmp_path: Path) -> None:
    assert run_ranks(2, train, Summing("frozen"), tmp_path, {}) == [10, 10]


class Synchronised(TinyTask):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 3), nn.SyncBatchNorm(3)).double()


def test_nor_is_a_model_with_torchs_own_synchronised_batch_normalisation(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = stack.enter_context(World.enter("cpu"))
        run = prepare(Synchronised(), config_for(tmp_path), world, stack)
        assert run.agrees_on_memory
        run.world = FakeWorld(size=2)  # torch replicates such a model on GPUs only
        assert not run.agrees_on_memory


def test_a_stream_is_walked_again_for_a_step_taken_again(tmp_path: Path) -> None:
    straight, hit = tmp_path / "straight", tmp_path / "hit"
    assert fit(HungryStream(), config_for(straight)).step == 10
    assert fit(HungryStream("backward", most=2), config_for(hit)).step == 10
    assert events_of(hit, "out_of_memory")
    difference = (weights_of(hit) - weights_of(straight)).abs().max()
    assert difference < 1e-13, difference


# --- Numbers that are none ----------------------------------------------------------------


def test_a_bad_step_moves_nothing_and_can_be_met_again(tmp_path: Path) -> None:
    """The state that met it is kept; one process meets the same numbers there."""
    with pytest.raises(Exception, match="weights unchanged, step not saved") as first:
        run_ranks(2, train, Poisoned(), tmp_path / "run", {"exact": True})
    (evidence,) = (tmp_path / "run" / "non_finite").glob("step_*")
    step = int(evidence.name.removeprefix("step_"))
    checkpoint = CheckpointStore(tmp_path, recipe="tiny").open(evidence)
    assert all(torch.isfinite(t).all() for t in checkpoint.load("model").values())
    config = config_for(tmp_path / "again", exact=True, resume=str(evidence))
    with pytest.raises(NonFiniteError) as again:
        fit(Poisoned(), config)
    said = f"step {step + 1}: loss nan, gradient norm nan"
    assert said in str(first.value)
    assert said in str(again.value)


def test_the_state_before_a_bad_step_has_the_running_statistics_of_before(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="weights unchanged, step not saved"):
        run_ranks(1, train, Normed(), tmp_path, {})
    (evidence,) = (tmp_path / "non_finite").glob("step_*")
    state = CheckpointStore(tmp_path, recipe="tiny").open(evidence).load("model")
    assert all(torch.isfinite(value).all() for value in state.values())
    assert evidence.name == "step_00000001"
    assert state["1.num_batches_tracked"] == 4


class Tracked(Normed):
    """Fails once, in the fourth step, after its forward pass has updated running statistics."""

    poison = 0.0

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error: Exception | None = error

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        made = super().loss(model, batch, context)
        if context.training and context.step == 3 and self.error:
            error, self.error = self.error, None
            raise error
        return made


def num_tracked(folder: Path) -> tuple[int, int]:
    checkpoint, _ = CheckpointStore(folder / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    return checkpoint.step, int(checkpoint.load("model")["1.num_batches_tracked"])


def test_a_checkpoint_after_a_failed_step_holds_nothing_of_it(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="planted"):
        run_ranks(1, train, Tracked(ConfigError("planted", "remove it")), tmp_path, {})
    assert num_tracked(tmp_path) == (3, 4 + 4 + 2)


def test_a_step_repeated_for_want_of_memory_counts_once(tmp_path: Path) -> None:
    task = Tracked(torch.OutOfMemoryError("planted"))
    assert run_ranks(1, train, task, tmp_path, {"batch": {"batch_size": 8}}) == [10]
    step, tracked = num_tracked(tmp_path)
    assert (step, tracked) == (10, 3 + 2 * 7)  # halves from the fourth step on


def test_what_a_bad_step_met_is_that_run_s_or_is_not_kept(tmp_path: Path) -> None:
    """A disk without room for it neither hides the step nor ends a run that may go on."""

    def meet(lr: float, **changes: Any) -> NonFiniteError:
        with pytest.raises(NonFiniteError) as met:
            fit(Poisoned(), config_for(tmp_path, resume="discard", rate={"lr": lr}, **changes))
        return met.value

    evidence = [Path(meet(lr).remedy.partition("resume=")[2]) for lr in (0.01, 0.02)][1]
    config = CheckpointStore(tmp_path, recipe="tiny").open(evidence).meta["config"]
    assert config["rate"]["lr"] == 0.02
    shutil.rmtree(evidence.parent)
    evidence.parent.write_text("in the way")
    met = meet(0.01)
    assert "the state before it could not be saved: cannot save" in met.problem
    assert "saved" not in met.remedy
    skipped = fit(Poisoned(), config_for(tmp_path, resume="discard", on_non_finite="skip"))
    assert skipped.step == 10


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_skipping_leaves_the_step_out_on_all_ranks(poison: float, tmp_path: Path) -> None:
    task = Poisoned()
    task.poison = poison
    steps = run_ranks(2, train, task, tmp_path / "two", {"on_non_finite": "skip", "exact": True})
    assert steps == [10, 10]
    run_ranks(1, train, task, tmp_path / "one", {"on_non_finite": "skip", "exact": True})
    assert torch.equal(weights_of(tmp_path / "two"), weights_of(tmp_path / "one"))
    assert torch.isfinite(weights_of(tmp_path / "two")).all()
    skipped_steps = {e["step"] for e in events_of(tmp_path / "two", "non_finite")}
    assert len(skipped_steps) >= 3  # once an epoch
    losses = {e["step"] - 1: e["loss"] for e in events_of(tmp_path / "two", "step")}
    assert {step for step, loss in losses.items() if math.isnan(loss)} == skipped_steps
    assert all(e["each_once"] for e in events_of(tmp_path / "two", "epoch"))


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_left_out_leaves_running_statistics_alone(exact: bool, tmp_path: Path) -> None:
    """They are part of the model that is evaluated and saved."""
    more = {"on_non_finite": "skip", "exact": exact}
    run_ranks(2, train, Normed(), tmp_path, more)
    assert events_of(tmp_path, "non_finite")
    assert torch.isfinite(weights_of(tmp_path)).all()


def test_a_fused_optimizer_whose_first_steps_are_left_out_ends_as_any_other(tmp_path: Path) -> None:
    """Its momentum begins with nothing, and not with what lay in memory."""
    ends = []
    for fused in (False, True):
        task, folder = Momentum(), tmp_path / str(fused)
        task.fused = fused
        run_ranks(1, train_in_dirty_memory, task, folder)
        ends.append(weights_of(folder))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-7)


def test_rewinding_takes_the_newest_checkpoint_s_weights(tmp_path: Path) -> None:
    more = {"on_non_finite": "rewind", "checkpoint": {"every_steps": 1}}
    run_ranks(2, train, Poisoned(), tmp_path / "often", more)
    run_ranks(2, train, Poisoned(), tmp_path / "skip", {"on_non_finite": "skip"})
    # With a checkpoint of every step, rewinding takes back nothing but the bad step.
    assert torch.equal(weights_of(tmp_path / "often"), weights_of(tmp_path / "skip"))


def test_rewinding_further_leaves_out_more(tmp_path: Path) -> None:
    """The bad sample comes in steps 3 and 6; the newest checkpoints are of steps 2 and 4."""
    more = {"on_non_finite": "rewind", "seed": 45, "checkpoint": {"every_steps": 2}}
    run_ranks(2, train, Poisoned(), tmp_path / "seldom", more)
    back = [e["message"] for e in events_of(tmp_path / "seldom", "non_finite")]
    assert "weights of step 2 restored" in back[0]
    assert "weights of step 4 restored" in back[1]
    assert torch.isfinite(weights_of(tmp_path / "seldom")).all()
    run_ranks(2, train, Poisoned(), tmp_path / "skip", {**more, "on_non_finite": "skip"})
    assert not torch.equal(weights_of(tmp_path / "seldom"), weights_of(tmp_path / "skip"))


def test_ranks_that_find_different_checkpoints_to_rewind_to_are_refused(tmp_path: Path) -> None:
    """The planted fault: the second rank's node lists the folder as it was a step ago."""

    def listed_late(store: CheckpointStore, *check: Any) -> Any:
        newest, rejected = listed(store, *check)
        return newest and store.open(store.path(newest.step - 1)), rejected

    def refused() -> str:
        if os.environ["RANK"] == "1":
            CheckpointStore.latest = listed_late  # type: ignore[method-assign]
        more = {"on_non_finite": "rewind", "seed": 45, "checkpoint": {"every_steps": 1}}
        with pytest.raises(ConfigError) as caught:
            fit(Poisoned(), config_for(tmp_path, **more))
        return caught.value.problem

    listed = CheckpointStore.latest
    first, second = run_ranks(2, refused)
    assert first == second
    assert "ranks 0 and 1 see different checkpoints to rewind to: " in first
    assert "step_00000002" in first
    assert "step_00000001" in first


def test_there_must_be_something_to_rewind_to(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="no checkpoint to rewind to"):
        fit(Poisoned(), config_for(tmp_path, on_non_finite="rewind", checkpoint={"every_steps": 9}))


def test_a_scaler_does_not_hide_a_loss_that_is_no_number(tmp_path: Path) -> None:
    """It leaves out steps whose gradient overflows, and would leave out all of these."""
    with pytest.raises(NonFiniteError, match="loss nan"):
        fit(Half(), config_for(tmp_path, precision="fp16"))


class Negative(Half):
    """One sample has a negative weight, larger than all others of its step together."""

    poison = 0.0

    def train_data(self) -> list[dict[str, Tensor]]:
        data = super().train_data()
        data[17]["units"] = torch.tensor(-100.0, dtype=torch.float64)
        return data


@pytest.mark.parametrize("more", [{}, {"precision": "fp16"}, {"exact": True}])
def test_a_negative_total_weight_moves_nothing_and_is_named(
    more: dict[str, Any], tmp_path: Path
) -> None:
    def refused() -> str:
        with pytest.raises(NonFiniteError, match="the total weight of the loss is -") as met:
            fit(Negative(), config_for(tmp_path, **more))
        assert met.value.remedy.startswith("return a weight of 0 or more")
        return met.value.problem

    first, second = run_ranks(2, refused)
    assert first == second
    skipped = fit(Negative(), config_for(tmp_path, resume="discard", on_non_finite="skip", **more))
    assert skipped.step == 10
    assert weights_of(tmp_path).isfinite().all()
    assert "total weight of the loss is -" in events_of(tmp_path, "non_finite")[0]["message"]


def test_too_many_bad_steps_are_no_accident(tmp_path: Path) -> None:
    task = Poisoned()
    task.train_data = lambda: [  # type: ignore[method-assign]
        {**sample, "y": sample["y"] * float("inf")} for sample in TinyTask.train_data(task)
    ]
    with pytest.raises(NonFiniteError, match="11 such steps by now"):
        fit(task, config_for(tmp_path, on_non_finite="skip", max_steps=20))


class Words(nn.Module):
    """Looks rows of a table up, with a layer or by a function."""

    def __init__(self, is_layer: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 4, sparse=is_layer)
        self.is_layer = is_layer

    def forward(self, x: Tensor) -> Tensor:
        if self.is_layer:
            return self.rows(x)  # type: ignore[no-any-return]
        return nn.functional.embedding(x, self.rows.weight, sparse=True)


def train_words(is_layer: bool) -> str:
    with World.enter("cpu", timeout_s=20) as world:
        try:
            model = world.replicate(Words(is_layer))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data = [torch.tensor(index % 10) for index in range(32)]
            for batch in Loader(data, world, batch_size=4, epochs=1):
                train_step(lambda m, x, _: m(x).square().mean(), model, optimizer, batch, world)
        except ConfigError as error:
            return str(error)
        return "trained"


@pytest.mark.parametrize(("num_ranks", "is_layer"), [(1, True), (2, True), (1, False)])
def test_sparse_gradients_are_refused_in_a_sentence(num_ranks: int, is_layer: bool) -> None:
    said = run_ranks(num_ranks, train_words, is_layer)
    problem = "rows is an nn.Embedding with sparse=True: sparse gradients cannot be summed over"
    remedy = "try: build it with sparse=False"
    if not is_layer:
        problem = "a parameter of shape [10, 4] has a sparse gradient, which cannot be summed"
        remedy = "try: make it dense"
    assert all(text.startswith(problem) and remedy in text for text in said), said


def step_without_replicating() -> str:
    with World.enter("cpu", timeout_s=20) as world:
        model = TinyTask().build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = Loader(TinyTask().train_data(), world, batch_size=4, epochs=1)
        try:
            train_step(TinyTask().loss, model, optimizer, next(iter(loader)), world)
        except ConfigError as error:
            return f"{error.problem}; {error.remedy}"
        return ""


def test_a_model_that_was_not_replicated_is_refused() -> None:
    """Each rank would train a model of its own, and say nothing."""
    for said in run_ranks(2, step_without_replicating):
        assert "each of the 2 ranks would train its own" in said
        assert "call model = world.replicate(model)" in said
    assert run_ranks(1, step_without_replicating) == [""]


class Evaluated(Poisoned):
    """Has held-out samples to evaluate."""

    def eval_data(self) -> Any:
        return TinyTask().train_data()[:4]


def test_a_run_that_checks_late_evaluates_no_weights_after_a_non_finite_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the flag is read at a log line or before a save. The GPU is a fake."""

    def build_step(run: Any) -> Any:
        step = whole(run)
        step.update.is_sticky = True
        step.non_finite = step.update.flag
        return step

    whole = Run._build_step
    monkeypatch.setattr(Run, "_build_step", build_step)
    config = config_for(tmp_path, log_every=1000, evaluation={"every_steps": 1})
    with pytest.raises(NonFiniteError) as caught:
        fit(Evaluated(), config.with_overrides(["checkpoint.every_steps=1000"]))
    bad = int(re.findall(r"step (\d+): loss", caught.value.problem)[0])
    assert [event["step"] for event in events_of(tmp_path, "evaluation")] == list(range(1, bad))
