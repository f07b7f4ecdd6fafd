"""A step that is dropped leaves no trace in buffers, whenever a step first writes to them."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Callback, CheckpointStore, Context, PartialLoss, RunConfig, World, fit
from lockstep.dist.buffer_places import BufferChanges
from lockstep.errors import ConfigError
from lockstep.run.kept_buffers import KeptBuffers
from lockstep.testing import TinyTask, run_ranks

HOWS = ["written", "assigned", "grown", "detached", "inferred", "inferred in place", "data"]


class Counting(nn.Module):
    """Counts its calls in a buffer from one step on, in one of several ways; has a constant."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.how = how
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("constant", torch.arange(1000.0))

    def add(self) -> None:
        if self.how == "written":
            self.count += 1
        elif self.how == "assigned":
            self.count = self.count + 1
        elif self.how == "grown":
            self.count = torch.cat([self.count + 1, self.count])
        elif self.how == "detached":
            self.count.detach().add_(1)
        elif self.how == "data":
            self.count.data += 1
        else:
            is_new = self.how == "inferred" or not self.count.is_inference()
            with torch.inference_mode():
                self.count = self.count + 1 if is_new else self.count.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class CountingTask(TinyTask):
    """Its first buffer moves from the third step on; the fifth step is dropped."""

    def __init__(self, how: str, fault: str) -> None:
        super().__init__(num_samples=40, num_held_out=0)
        self.how, self.fault = how, fault

    def build_model(self) -> nn.Module:
        self.module = Counting(self.how).double()
        return self.module

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        made = super().loss(model, batch, context)
        if context.step >= 2:
            self.module.add()
        if context.step == 4:
            if self.fault == "memory" and len(batch["x"]) == 4:
                raise torch.OutOfMemoryError("planted")
            if self.fault == "error":
                raise ConfigError("planted", "remove it")
            if self.fault == "nan":
                return PartialLoss(made.loss_sum * float("nan"), made.weight, made.parts)
        return made


def count_after(task: CountingTask, folder: Path) -> tuple[int, float]:
    """Return the step that a run ends with and what its newest checkpoint counts."""
    values = {
        "output_dir": str(folder),
        "max_steps": 6,
        "batch": {"batch_size": 4, "global_batch_size": 8, "drop_last": False},
        "on_non_finite": "skip",
        "device": "cpu",
        "timeout_s": 30,
        "sinks": {"curves": False},
    }
    planted = pytest.raises(ConfigError, match="planted")
    with planted if task.fault == "error" else nullcontext():
        fit(task, RunConfig.parse(values))
    checkpoint, _ = CheckpointStore(folder / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    state = checkpoint.load("model")
    assert torch.equal(state["constant"], torch.arange(1000.0).double())
    return checkpoint.step, float(state["count"].flatten()[0])


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("fault", "expected"), [("nan", (6, 6.0)), ("memory", (6, 12.0)), ("error", (4, 4.0))]
)
def test_a_dropped_step_leaves_no_trace_in_a_buffer_that_changed_late(
    how: str, fault: str, expected: tuple[int, float], tmp_path: Path
) -> None:
    """Two calls in each counted step, and four in each of half micro-batches."""
    assert run_ranks(1, count_after, CountingTask(how, fault), tmp_path) == [expected]


def test_also_if_the_first_write_through_data_is_in_the_dropped_step() -> None:
    model = Several()
    changes = BufferChanges(model)
    kept = KeptBuffers(changes)
    before = values(model)
    changes.begin_step()
    kept.keep(None)
    model.get_buffer("a").data += 1
    kept.restore()
    assert values(model) == before


def test_also_on_two_ranks(tmp_path: Path) -> None:
    ends = run_ranks(2, count_after, CountingTask("written", "nan"), tmp_path)
    assert ends == [(6, 3.0)] * 2


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(2))
        self.register_buffer("b", torch.zeros(3))
        self.register_buffer("whole", torch.zeros(2, 2, dtype=torch.int64))
        self.register_buffer("expanded", torch.zeros(1).expand(4))
        self.norm = nn.BatchNorm1d(3)


def values(model: nn.Module) -> list[Any]:
    return [buffer.tolist() for buffer in model.buffers()]


def test_steps_after_one_that_the_gpu_has_dropped_change_no_copy() -> None:
    """The host learns of it later, and restores what was before the first of them."""
    model, flag = Several(), torch.zeros(())
    changes = BufferChanges(model)
    kept = KeptBuffers(changes)

    def step(*names: str) -> None:
        changes.begin_step()
        kept.keep(flag)
        model.norm(torch.randn(8, 3))
        for name in names:
            model.get_buffer(name).add_(1)
        changes.end_step()

    step()
    step("a")
    step("a", "whole")
    before = values(model)
    step("a", "b")  # the first step that writes to b: dropped
    flag.fill_(1)
    step("a")
    step("b", "whole")
    assert values(model) != before
    kept.restore()
    assert values(model) == before
    flag.zero_()
    step("a", "b", "whole")
    kept.restore()
    assert values(model) == before


def test_only_buffers_that_steps_change_are_copied_before_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Several()
    changes = BufferChanges(model)
    kept = KeptBuffers(changes)
    copied: list[int] = []
    cat = torch.cat

    def note(tensors: Any, *more: Any) -> Tensor:
        copied.extend(len(tensor) for tensor in tensors)
        return cat(tensors, *more)

    monkeypatch.setattr(torch, "cat", note)
    for names, expected in (("", [3, 3, 1]), ("b", [3, 3, 1]), ("", [3, 3, 3, 1])):
        copied.clear()
        changes.begin_step()
        kept.keep(None)
        assert sorted(copied) == sorted(expected)
        for name in names:
            model.get_buffer(name).add_(1)


def copied_after_a_synchronisation() -> tuple[list[int], set[str]]:
    model = Several()
    del model.expanded  # DDP cannot send it
    copied: list[int] = []
    cat = torch.cat

    def note(tensors: Any, *more: Any) -> Tensor:
        copied.extend(len(tensor) for tensor in tensors)
        return cat(tensors, *more)

    with World.enter("cpu", timeout_s=20) as world, pytest.MonkeyPatch.context() as patched:
        replica = world.replicate(model)
        changes = BufferChanges(model)
        kept = KeptBuffers(changes)
        for _ in range(2):
            changes.begin_step()
            kept.keep(None)
            model.norm(torch.randn(8, 3))
            world.sync_buffers(replica)  # in the step, as when `requires_grad` has changed
            changes.end_step()
            world.sync_buffers(replica)  # and after it, as for an evaluation or a save
        changes.begin_step()
        patched.setattr(torch, "cat", note)
        kept.keep(None)
    return sorted(copied), changes.changed_in_steps


def test_a_synchronisation_does_not_make_constants_change() -> None:
    assert run_ranks(2, copied_after_a_synchronisation) == [([1, 3, 3], set())] * 2


class Tempered(TinyTask):
    """Its callback sets a temperature before the third step, which is dropped or repeated."""

    def __init__(self, fault: str) -> None:
        super().__init__(num_samples=40, num_held_out=0)
        self.fault = fault
        self.seen: list[float] = []

    def build_model(self) -> nn.Module:
        self.module = Counting("").double()
        return self.module

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        made = super().loss(model, batch, context)
        self.seen.append(self.module.count.item())
        if context.step == 2 and self.fault == "frozen":
            self.module.inner.bias.requires_grad_(False)
        scale = float("nan") if context.step == 2 and self.fault == "nan" else 1.0
        return PartialLoss(made.loss_sum * scale, made.weight, made.parts)


class Tempering(Callback):
    def on_step_start(self, run: Any, batch: Any) -> None:
        if batch.step == 2:
            run.task.module.count.fill_(0.5)


@pytest.mark.parametrize(("fault", "num_calls"), [("nan", 4), ("frozen", 5)])
def test_a_buffer_that_a_callback_has_set_before_a_dropped_step_stays_set(
    fault: str, num_calls: int, tmp_path: Path
) -> None:
    task = Tempered(fault)
    values = {
        "output_dir": str(tmp_path),
        "max_steps": 4,
        "batch": {"batch_size": 4},
        "on_non_finite": "skip",
        "device": "cpu",
        "sinks": {"curves": False},
    }
    fit(task, RunConfig.parse(values), [Tempering()])
    assert task.seen == [0.0, 0.0] + [0.5] * (num_calls - 2)


def test_without_a_counter_of_writes_every_buffer_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Several()
    changes = BufferChanges(model)
    kept = KeptBuffers(changes)
    monkeypatch.setattr("lockstep.dist.buffer_places.num_writes", lambda tensor: -1)
    before = values(model)
    for _ in range(3):
        changes.begin_step()
        kept.keep(None)
        model.get_buffer("whole").add_(1)
        kept.restore()
        assert values(model) == before
