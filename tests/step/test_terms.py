"""The terms of a loss with units of their own: what `weights` returns is the same on every rank."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import CheckpointStore, Loader, PartialLoss, RunConfig, World, fit, train_step
from lockstep.errors import ConfigError
from lockstep.task import Context
from lockstep.testing import FakeWorld, TinyTask, run_ranks

FAULTS: dict[str, tuple[Any, str]] = {
    "another name": ({"unit": 1.0}, "different terms from weights() in one step: "),
    "one more": ({"units": 1.0, "idle": 0, "more": 1}, "different terms from weights() in one "),
    "none": ({}, "different terms from weights() in one step: idle, units and none"),
    "NaN": ({"units": torch.tensor(float("nan")), "idle": 0}, "'units' is nan"),
    "infinite": ({"units": float("inf"), "idle": 0}, "'units' is inf"),
    "negative": ({"units": 9.0, "idle": torch.tensor(-1)}, "'idle' is -1"),
    "two numbers": ({"units": torch.ones(2), "idle": 0}, "'units' is tensor([1., 1.])"),
    "complex": ({"units": torch.tensor(1j), "idle": 0}, "'units' is tensor(0.+1.j)"),
    "a text": ({"units": "many", "idle": 0}, "'units' is 'many'"),
    "no mapping": ([3.0, 1.0], "weights() returned [3.0, 1.0]"),
}


class Terms(TinyTask):
    """A mean over units plus half a mean over the samples that have none.

    On one rank, from one step on and in its second micro-batch, `weights` does something else.
    """

    def __init__(
        self, fault: Callable[[Mapping[str, Any]], Any] | None = None, step: int = 2, place: int = 3
    ) -> None:
        super().__init__(num_samples=48, num_held_out=0)
        self.fault, self.at_step, self.place = fault, step, place

    def weights(self, batch: dict[str, Tensor], context: Context) -> Any:
        counted = {"units": batch["units"].sum(), "idle": (batch["units"] == 0).sum()}
        if self.fault and context.step >= self.at_step and context.place >= self.place:
            return self.fault(counted)
        return counted

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        error = (model(batch["x"]) - batch["y"]).square().sum(dim=1)
        means = (error * batch["units"]).sum() / context.weights["units"]
        idle = (error * (batch["units"] == 0)).sum() / context.weights["idle"]
        return PartialLoss(means + 0.5 * idle, 1.0)


def settings(folder: Path, **more: Any) -> RunConfig:
    values = {
        "output_dir": str(folder),
        "max_steps": 6,
        "batch": {"batch_size": 4, "global_batch_size": 16, "drop_last": False},
        "rate": {"lr": 1e-2},
        "checkpoint": {"every_steps": 100},
        "device": "cpu",
        "timeout_s": 20,
        "sinks": {"curves": False},
        **more,
    }
    return RunConfig.parse(values)


def end_of(task: TinyTask, folder: Path, more: dict[str, Any]) -> str:
    """Return how a run ends: its last step, or its error."""
    try:
        return str(fit(task, settings(folder, **more)).step)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def saved(folder: Path) -> tuple[int, Tensor]:
    checkpoint, _ = CheckpointStore(folder / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    weights = checkpoint.load("model").values()
    return checkpoint.step, torch.cat([weight.flatten() for weight in weights])


@pytest.mark.parametrize("place", [2, 3], ids=["on one rank", "in one micro-batch"])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_one_rank_is_refused_on_all(kind: str, place: int, tmp_path: Path) -> None:
    result, said = FAULTS[kind]
    if "different" in said and place == 3:
        said = "rank 1: two micro-batches of a step have different terms from weights(): "
    task = Terms(lambda counted: result, place=place)
    first, second = run_ranks(2, end_of, task, tmp_path, {"on_non_finite": "skip"})
    assert first == second
    assert first.startswith("ConfigError: ")
    assert said in first
    assert saved(tmp_path)[0] == 2, "the steps before are saved"


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("units", [float("nan"), float("inf"), -1.0])
def test_a_count_on_a_gpu_is_refused_without_waiting_for_it(
    units: float, policy: str, tmp_path: Path
) -> None:
    """It is no number on any rank then, and no weight moves."""

    def end_on_device(*run: Any) -> str:
        torch.Tensor.is_cpu = False  # type: ignore[misc, assignment]
        return end_of(*run)

    task = Terms(lambda counted: {"units": torch.tensor(units), "idle": torch.tensor(99.0)})
    more = {"on_non_finite": policy, "max_steps": 3}
    first, second = run_ranks(2, end_on_device, task, tmp_path, more)
    assert first == second
    if policy == "stop":
        assert "step 3: the total weight of the loss is nan, not 0 or more" in first
        assert "return a weight of 0 or more for every micro-batch" in first
    else:
        assert first == "3"
        assert saved(tmp_path)[1].isfinite().all()


@pytest.mark.parametrize("more", [{}, {"exact": True}], ids=["plain", "exact"])
def test_the_order_of_names_means_nothing(more: dict[str, Any], tmp_path: Path) -> None:
    straight, turned = tmp_path / "straight", tmp_path / "turned"
    assert run_ranks(2, end_of, Terms(), straight, more) == ["6", "6"]
    task = Terms(lambda counted: dict(reversed(counted.items())))
    assert run_ranks(2, end_of, task, turned, more) == ["6", "6"]
    assert torch.equal(saved(turned)[1], saved(straight)[1])


def fail(error: Exception) -> Callable[[Mapping[str, Any]], Any]:
    def fault(counted: Mapping[str, Any]) -> Any:
        raise error

    return fault


@pytest.mark.parametrize("more", [{}, {"on_out_of_memory": "stop"}], ids=["together", "alone"])
def test_an_error_in_weights_on_one_rank_ends_all_with_it(
    more: dict[str, Any], tmp_path: Path
) -> None:
    task = Terms(fail(ZeroDivisionError("planted")))
    first, second = run_ranks(2, end_of, task, tmp_path, more)
    assert first.startswith("OtherRankError: rank 1: ZeroDivisionError: planted (test_terms.py:")
    assert second == "ZeroDivisionError: planted"
    assert saved(tmp_path)[0] == 2
    stop = ConfigError("planted", "remove it")
    assert (
        run_ranks(2, end_of, Terms(fail(stop)), tmp_path, {**more, "resume": "discard"})
        == ["ConfigError: rank 1: planted\n  try: remove it"] * 2
    )


def test_a_count_that_does_not_fit_in_memory_halves_micro_batches(tmp_path: Path) -> None:
    class Hungry(Terms):
        def weights(self, batch: dict[str, Tensor], context: Context) -> Any:
            if context.world.rank == 1 and len(batch["x"]) > 2:
                raise torch.OutOfMemoryError("planted")
            return super().weights(batch, context)

    straight, hit = tmp_path / "straight", tmp_path / "hit"
    assert run_ranks(2, end_of, Terms(), straight, {}) == ["6", "6"]
    assert run_ranks(2, end_of, Hungry(), hit, {}) == ["6", "6"]
    assert (saved(hit)[1] - saved(straight)[1]).abs().max() < 1e-13
    stopped = run_ranks(2, end_of, Hungry(), hit, {"on_out_of_memory": "stop", "resume": "discard"})
    assert stopped[0].startswith("OtherRankError: rank 1: OutOfMemoryError: planted")
    assert stopped[1] == "OutOfMemoryError: planted"


# --- A custom loop ------------------------------------------------------------------------


def own_loop(task: Terms) -> str:
    with World.enter("cpu", timeout_s=20) as world:
        model = world.replicate(task.build_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = Loader(task.train_data(), world, batch_size=4, epochs=1)
        try:
            for batch in loader:
                train_step(task.loss, model, optimizer, batch, world, weights=task.weights)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "trained"


def test_a_custom_loop_refuses_the_same() -> None:
    task = Terms(lambda counted: {"units": 1.0}, place=1)
    said = "ConfigError: ranks have different terms from weights() in one step: idle, units and "
    assert all(text.startswith(said) for text in run_ranks(2, own_loop, task))
    first, second = run_ranks(2, own_loop, Terms(fail(KeyError("planted")), place=1))
    assert first.startswith("OtherRankError: rank 1: KeyError: 'planted'")
    assert second == "KeyError: 'planted'"


@pytest.mark.parametrize(("task", "num"), [(TinyTask(), 0), (Terms(), 2)])
def test_only_a_task_with_terms_communicates_for_them(task: TinyTask, num: int) -> None:
    """It takes a vote, on names and failures, and a sum."""
    called: list[str] = []

    class Counted(FakeWorld):
        def all_max(self, *values: int) -> list[int]:
            called.append("vote")
            return super().all_max(*values)

        def all_sum(self, value: Tensor) -> Tensor:
            called.append("sum")
            return super().all_sum(value)

    world = Counted()
    batch = next(iter(Loader(task.train_data(), world, batch_size=4, epochs=1)))

    def collectives(task: TinyTask, **more: Any) -> list[str]:
        model = task.build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        called.clear()
        train_step(task.loss, model, optimizer, batch, world, **more)
        return called.copy()

    expected = ["vote", "sum"][:num] + collectives(TinyTask())
    assert collectives(task, weights=task.weights) == expected
