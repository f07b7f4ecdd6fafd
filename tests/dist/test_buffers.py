"""Buffers of a model: what training or an evaluation reads is the first rank's on every rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import (
    Callback,
    CheckpointStore,
    Context,
    Loader,
    PartialLoss,
    RunConfig,
    World,
    fit,
    train_step,
)
from lockstep.dist.buffer_places import BufferChanges
from lockstep.dist.ddp import unwrap
from lockstep.dist.same_state import checksums
from lockstep.dist.training_buffers import TrainingBuffers
from lockstep.testing import FakeWorld, TinyTask, run_ranks

PROBE = torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5)


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def five_lines(num_steps: int, folder: Path | None = None, **options: Any) -> list[list[Any]]:
    """Train without a word about buffers; return what each rank's own evaluations found."""
    found = []
    with World.enter("cpu", timeout_s=20) as world:
        model = world.replicate(normalised())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = Loader(TinyTask().train_data(), world, batch_size=4, epochs=1)
        for batch in loader:
            if batch.step == num_steps:
                break
            train_step(TinyTask().loss, model, optimizer, batch, world, **options)
            if folder is not None:
                CheckpointStore(folder).save_from(world, loader.step, model=model)
            found.append(evaluated(unwrap(model)))
        if options:
            world.sync_buffers(model)
            found.append(evaluated(unwrap(model)))
    return found


def evaluated(model: nn.Module) -> list[Any]:
    """Evaluate on this rank alone; ranks need not do so together, nor equally often."""
    model.eval()
    with torch.no_grad():
        made = model(PROBE).tolist()
    model.train()
    return made + [buffer.tolist() for buffer in model.buffers()]


def test_every_rank_evaluates_the_same_model_after_every_step() -> None:
    first, second = run_ranks(2, five_lines, 3)
    assert first == second
    assert first[0] != first[1]  # the statistics move


def test_the_statistics_are_those_of_the_first_rank() -> None:
    # Another rank's forward passes leave no trace in them.
    synchronised = run_ranks(2, five_lines, 2)[0]
    own = run_ranks(2, lambda: five_lines(2, buffers_later=True))[0]
    assert own[:2] == synchronised


def test_statistics_that_are_left_for_later_differ_until_they_are_synchronised() -> None:
    first, second = run_ranks(2, lambda: five_lines(2, buffers_later=True))
    assert first[0] != second[0]
    assert first[-1] == second[-1]


def test_ranks_go_on_from_a_save_with_the_buffers_that_were_saved(tmp_path: Path) -> None:
    first, second = run_ranks(2, lambda: five_lines(2, tmp_path, buffers_later=True))
    assert first == second
    saved = CheckpointStore(tmp_path).latest()[0]
    assert saved is not None
    assert saved.load("model")["1.running_mean"].tolist() in first[1]


class Odd(nn.Module):
    """Buffers of all widths and shapes, with what depends on the rank in each."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        for number, dtype in enumerate(
            (torch.uint8, torch.float64, torch.bool, torch.bfloat16, torch.complex64, torch.int16)
        ):
            value = torch.full((3, number + 1), rank + number).to(dtype)
            self.register_buffer(f"of_{number}", value)
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("none", torch.zeros(0, 4))
        self.register_buffer("expanded", torch.zeros(1).expand(5))
        grid = torch.arange(48.0).view(2, 3, 2, 4) + rank
        self.register_buffer("transposed", grid.transpose(0, 3))
        self.register_buffer("channels_last", grid.to(memory_format=torch.channels_last))
        self.register_buffer("every_second", (torch.arange(10) + rank)[::2])


def odd_buffers() -> list[Any]:
    with World.enter("cpu", timeout_s=20) as world:
        model = Odd(world.rank)
        kept = [buffer.data_ptr() for buffer in model.buffers()]
        world.sync_buffers(model)
        assert kept == [buffer.data_ptr() for buffer in model.buffers()]  # in place
        return [(str(buffer.dtype), buffer.tolist()) for buffer in model.buffers()]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_buffers_of_every_kind_become_the_first_ranks(num_ranks: int) -> None:
    expected = [(str(buffer.dtype), buffer.tolist()) for buffer in Odd(0).buffers()]
    assert run_ranks(num_ranks, odd_buffers) == [expected] * num_ranks


# --- Buffers that training reads, in fit --------------------------------------------------------


class Centred(nn.Module):
    """Subtracts a running centre of its own batches, written in place or assigned."""

    def __init__(self, assigns: bool, from_call: int) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("constant", torch.ones(3))
        self.assigns = assigns
        self.from_call = from_call
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.inner(x)) * self.constant
        self.num_calls += self.training
        if self.training and self.num_calls >= self.from_call:
            moved = 0.5 * self.centre + 0.5 * out.detach().mean(dim=0)
            if self.assigns:
                self.centre = moved
            else:
                self.centre.copy_(moved)
        return out - self.centre


class CentredTask(TinyTask):
    def __init__(self, assigns: bool, from_call: int = 1) -> None:
        super().__init__()
        self.assigns = assigns
        self.from_call = from_call

    def build_model(self) -> nn.Module:
        self.model = Centred(self.assigns, self.from_call).double()
        return self.model


def fit_centred(
    folder: Path,
    task: CentredTask,
    max_steps: int,
    every_steps: int,
    sharded: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Any:
    config = {
        "output_dir": str(folder),
        "max_steps": max_steps,
        "batch": {"batch_size": 2},
        "evaluation": {"save_best": False, "every_steps": 100},
        "checkpoint": {"every_steps": every_steps, "sharded": sharded},
        "sinks": {"curves": False},
        "device": "cpu",
        "timeout_s": 60,
    }
    fit(task, RunConfig.parse(config), callbacks)
    state = task.model.state_dict()
    return {n: v.tolist() for n, v in state.items() if not n.startswith("norm.running")}


def fitted(
    folder: Path, assigns: bool, max_steps: int = 6, every_steps: int = 100, from_call: int = 1
) -> Any:
    task = CentredTask(assigns, from_call)
    first, second = run_ranks(2, fit_centred, folder, task, max_steps, every_steps)
    assert first == second
    return first


@pytest.mark.parametrize("assigns", [False, True])
def test_when_one_saves_or_stops_does_not_change_a_buffer_that_training_reads(
    assigns: bool, tmp_path: Path
) -> None:
    straight = fitted(tmp_path / "straight", assigns)
    assert fitted(tmp_path / "saving", assigns, every_steps=1) == straight
    fitted(tmp_path / "resumed", assigns, max_steps=3)
    assert fitted(tmp_path / "resumed", assigns) == straight


def test_a_buffer_that_changes_later_is_synchronised_from_then_on(tmp_path: Path) -> None:
    straight = fitted(tmp_path / "straight", False, from_call=4)
    assert fitted(tmp_path / "saving", False, every_steps=1, from_call=4) == straight


def test_running_statistics_and_constants_are_not_synchronised_at_every_step() -> None:
    model = Centred(assigns=False, from_call=2)
    changes = BufferChanges(model)
    buffers = TrainingBuffers(changes, FakeWorld(size=2))
    for news in (False, True):
        changes.begin_step()
        model(torch.randn(4, 5))
        changes.end_step()
        assert buffers.has_news is news


def test_a_buffer_in_a_module_that_a_step_has_assigned_is_synchronised_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.ModuleDict({"old": Centred(assigns=False, from_call=1)})
    changes = BufferChanges(model)
    buffers = TrainingBuffers(changes, FakeWorld(size=2))
    sent: list[Tensor] = []
    monkeypatch.setattr(
        "lockstep.dist.training_buffers.all_tensors_from_first",
        lambda tensors, world: sent.extend(tensors),
    )

    def step(name: str) -> None:
        changes.begin_step()
        model[name](torch.randn(4, 5))
        changes.end_step()
        sent.clear()
        if buffers.has_news:
            buffers.agree()
        buffers.synchronise()

    step("old")
    assert sent == [model["old"].centre]
    del model["old"]
    model["new"] = Centred(assigns=False, from_call=1)
    step("new")
    assert sent == [model["new"].centre]


class Cached(CentredTask):
    """Keeps a cache as long as the longest input so far, which differs between ranks."""

    width = 1

    def eval_data(self) -> Any:
        return None

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("cache", torch.zeros(1, self.width, dtype=torch.float64))
        return model

    def loss(self, model: nn.Module, batch: Any, context: Context) -> PartialLoss:
        length = 2 + context.world.rank + context.step
        unwrap(model).register_buffer("cache", torch.ones(length, self.width, dtype=torch.float64))
        return super().loss(model, batch, context)


def test_a_buffer_of_another_shape_on_each_rank_stays_its_own(tmp_path: Path) -> None:
    first, second = run_ranks(2, fit_centred, tmp_path, Cached(assigns=False), 3, 99)
    assert [len(first["cache"]), len(second["cache"])] == [4, 5]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_buffer_of_another_shape_on_each_rank_is_saved_from_the_first(
    sharded: bool, tmp_path: Path
) -> None:
    task = Cached(assigns=False)
    task.width = 100  # so that a share ends inside it
    run_ranks(2, fit_centred, tmp_path, task, 3, 99, sharded)
    saved, rejected = CheckpointStore(tmp_path / "checkpoints", recipe="tiny").latest()
    assert saved is not None, rejected
    assert len(saved.load("model")["cache"]) == 4
    resumed = run_ranks(2, fit_centred, tmp_path, task, 4, 99, sharded)
    assert [len(rank["cache"]) for rank in resumed] == [5, 6]


class Rescaling(Callback):
    """Writes another number on each rank before each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_start(self, run: Any, batch: Any) -> None:
        unwrap(run.model).constant.fill_(run.world.rank + batch.step)

    def on_step_end(self, run: Any, batch: Any, report: Any) -> None:
        self.found.append(unwrap(run.model).constant[0].item())


def rescaled(folder: Path) -> list[float]:
    callback = Rescaling()
    fit_centred(folder, CentredTask(assigns=False), 3, 99, callbacks=[callback])
    return callback.found


def test_a_buffer_that_a_callback_writes_before_each_step_stays_each_ranks_own(
    tmp_path: Path,
) -> None:
    assert run_ranks(2, rescaled, tmp_path) == [[0, 1, 2], [1, 2, 3]]


# --- Buffers of another size on each rank ---------------------------------------------------------


class Rotated(nn.Module):
    """Keeps a cache as long as the longest input so far, before a buffer of a fixed size."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("cos", torch.ones(length))
        self.register_buffer("scale", torch.full((4,), float(length)))


def synchronised_after_growth(lengths: list[int]) -> Any:
    with World.enter("cpu", timeout_s=20) as world:
        model = Rotated(4)
        replica = world.replicate(model)
        model.register_buffer("cos", torch.ones(lengths[world.rank]))
        model.scale.fill_(world.rank)
        model.norm.running_mean.fill_(world.rank)
        world.sync_buffers(replica)
        world.replicate(replica)  # as after unfreezing
        return [model.cos.tolist(), model.scale.tolist(), model.norm.running_mean.tolist()]


@pytest.mark.parametrize("lengths", [[4, 11], [11, 4]])
def test_a_buffer_that_grew_on_one_rank_is_left_and_the_others_are_synchronised(
    lengths: list[int],
) -> None:
    found = run_ranks(2, synchronised_after_growth, lengths)
    assert found == [[[1.0] * length, [0.0] * 4, [0.0] * 2] for length in lengths]


# --- Buffers that one rank alone has registered ---------------------------------------------------


class Lazy(nn.Module):
    """Registers a mask in its forward pass, on some ranks and from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x))  # type: ignore[no-any-return]


def synchronised_with_a_mask(masked_rank: int, replicates: bool) -> list[Any]:
    with World.enter("cpu", timeout_s=20) as world:
        replica = world.replicate(Lazy())
        model = unwrap(replica)
        model.norm.running_mean.fill_(world.rank)
        if world.rank == masked_rank:
            model.register_buffer("mask", torch.full((2,), 7.0))
        if replicates:
            world.replicate(replica)
        else:
            world.sync_buffers(replica)
        following = world.all_values(world.rank)  # would be paired with a comparison
        return [following, [b.tolist() for b in model.buffers()]]


@pytest.mark.parametrize("replicates", [False, True])
@pytest.mark.parametrize("masked_rank", [0, 1])
def test_a_buffer_that_only_one_rank_has_is_left_to_it(masked_rank: int, replicates: bool) -> None:
    found = run_ranks(2, synchronised_with_a_mask, masked_rank, replicates)
    statistics = [[0.0] * 3, [1.0] * 3, 0]
    for rank, buffers in enumerate(found):
        mask = [[7.0] * 2] if rank == masked_rank else []
        assert buffers == [[0, 1], [*mask, *statistics]] or buffers == [
            [0, 1],
            [*statistics, *mask],
        ]


def trained_with_a_mask(masked_rank: int, from_step: int) -> list[Any]:
    counts: list[int] = []

    def loss(model: nn.Module, batch: Any, context: Context) -> PartialLoss:
        counts.append(context.world.num_collectives)
        if context.step == from_step and masked_rank in (context.world.rank, -1):
            unwrap(model).register_buffer("mask", torch.full((2,), float(context.world.rank)))
        return TinyTask().loss(model, batch, context)

    with World.enter("cpu", timeout_s=20) as world:
        torch.manual_seed(0)
        model = world.replicate(Lazy().double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in Loader(TinyTask().train_data(), world, batch_size=4, epochs=1):
            train_step(loss, model, optimizer, batch, world)
        state = {name: value.tolist() for name, value in unwrap(model).state_dict().items()}
        numbers = [after - before for before, after in zip(counts, counts[1:], strict=False)]
        return [state.pop("mask", None), state, numbers]


@pytest.mark.parametrize("masked_rank", [0, 1])
def test_a_step_of_a_custom_loop_leaves_such_a_buffer_too(masked_rank: int) -> None:
    found = run_ranks(2, trained_with_a_mask, masked_rank, 2)
    assert found[0][1:] == found[1][1:]
    assert found[masked_rank][0] == [float(masked_rank)] * 2
    assert found[1 - masked_rank][0] is None


def test_a_step_compares_shapes_only_once_there_are_other_buffers_than_statistics() -> None:
    """The sums and the statistics; then a vote and a comparison, too."""
    (mask, _, numbers), (same, _, _) = run_ranks(2, trained_with_a_mask, -1, 2)
    assert mask == same == [0.0, 0.0]
    assert numbers[1:] == [2, 4, 4, 4]


# --- Writes through .data, which autograd does not count ------------------------------------------


class Hidden(Centred):
    """Moves its centre through `.data`, as many codebooks do, at every `every`-th call."""

    every = 1

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.inner(x)) * self.constant
        self.num_calls += self.training
        if self.training and self.num_calls % self.every == 0:
            self.centre.data.mul_(0.5).add_(0.5 * out.detach().mean(dim=0))
        return out - self.centre


class HiddenTask(CentredTask):
    def build_model(self) -> nn.Module:
        self.model = Hidden(False, 1).double()
        return self.model


def test_a_buffer_written_through_data_is_the_same_whenever_one_saves_or_stops(
    tmp_path: Path,
) -> None:
    def fitted_hidden(folder: str, max_steps: int = 6, every_steps: int = 100) -> Any:
        task = HiddenTask(assigns=False)
        ends = run_ranks(2, fit_centred, tmp_path / folder, task, max_steps, every_steps)
        assert ends[0] == ends[1]
        return ends[0]

    straight = fitted_hidden("straight")
    assert fitted_hidden("saving", every_steps=1) == straight
    fitted_hidden("resumed", max_steps=3)
    assert fitted_hidden("resumed") == straight


@pytest.mark.parametrize(("every", "noticed_after"), [(1, 1), (3, 4), (10, 16)])
def test_a_rare_write_through_data_is_noticed_after_a_power_of_two_of_steps(
    every: int, noticed_after: int
) -> None:
    model = Hidden(assigns=False, from_call=1)
    model.every = every
    changes = BufferChanges(model)
    buffers = TrainingBuffers(changes, FakeWorld(size=2))
    for step in range(1, 20):
        changes.begin_step()
        model(torch.randn(4, 5))
        changes.end_step()
        assert buffers.has_news is (step >= noticed_after), step


def test_contents_are_compared_after_powers_of_two_of_steps_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Centred(assigns=False, from_call=99)
    changes = BufferChanges(model)
    calls: list[Any] = []

    def note(named: Any) -> Any:
        calls.append(named)
        return checksums(named)

    monkeypatch.setattr("lockstep.dist.buffer_places.checksums", note)
    compared = []
    for step in range(1, 40):
        calls.clear()
        changes.begin_step()
        changes.end_step()
        if calls:
            compared.append(step)
    assert compared == [1, 2, 4, 8, 16, 32]


def num_comparisons(folder: Path, task: CentredTask) -> int:
    calls: list[Any] = []

    def note(named: Any) -> Any:
        calls.append(named)
        return checksums(named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("lockstep.dist.buffer_places.checksums", note)
        fit_centred(folder, task, 6, 100)
    return len(calls)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_compares_contents_once_before_the_first_step_and_once_after_1_2_4(
    num_ranks: int, tmp_path: Path
) -> None:
    """Each comparison waits for the device."""
    counts = run_ranks(num_ranks, num_comparisons, tmp_path, CentredTask(assigns=False))
    assert counts == [4] * num_ranks


# --- Running statistics that training reads -------------------------------------------------------


class Teacher(CentredTask):
    """Learns from its own output in evaluation mode, which reads running statistics."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
        return self.model

    def loss(self, model: nn.Module, batch: Any, context: Context) -> PartialLoss:
        made = super().loss(model, batch, context)
        self.model.eval()
        with torch.no_grad():
            taught = self.model(batch["x"])
        self.model.train(context.training)
        off = (model(batch["x"]) - taught).square()
        return PartialLoss(made.loss_sum + 0.1 * off.sum(), made.weight)


def test_a_resume_equals_never_stopping_if_training_reads_running_statistics(
    tmp_path: Path,
) -> None:
    def taught(folder: str, max_steps: int = 6) -> Any:
        return run_ranks(2, fit_centred, tmp_path / folder, Teacher(False), max_steps, 3)

    straight = taught("straight")
    taught("resumed", max_steps=3)
    assert taught("resumed") == straight
