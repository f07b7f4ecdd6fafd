"""A task's state is the same on every rank, or the run is refused by the name of what differs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import CheckpointStore, PartialLoss, RunConfig, fit, read_events
from lockstep.data.order import Shuffled
from lockstep.dist.agreement import state_difference
from lockstep.errors import LockstepError
from lockstep.task import Context
from lockstep.testing import TinyTask, run_ranks
from lockstep.world import World


class Counting(TinyTask):
    """Counts the units it has seen, of its own micro-batches or of all ranks'."""

    sums = False
    begins_at = 0
    """The step from which on it counts."""

    def __init__(self) -> None:
        super().__init__(num_samples=32)
        self.seen = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        if context.training and context.step >= self.begins_at:
            units = batch["units"].sum()
            self.seen += int(context.world.all_sum(units) if self.sums else units)
        return super().loss(model, batch, context)

    def state(self) -> dict[str, Any]:
        return {"names": ["a", "b"], "seen": self.seen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


class CountingAll(Counting):
    sums = True


class CountingLate(Counting):
    begins_at = 2


class CountingLateAndBadSample(CountingLate):
    def train_data(self) -> Any:
        return Holed(super().train_data())


class Holed(list[Any]):
    """The first sample of the seventh step cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index == Shuffled(32, seed=0).ids(0, 24, 25)[0]:
            raise OSError("truncated file")
        return super().__getitem__(index)


def train(folder: Path, build: Callable[[], TinyTask], changes: dict[str, Any]) -> Any:
    config: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 8,
        "batch": {"batch_size": 2},
        "evaluation": {"save_best": False},
        "checkpoint": {"every_steps": 4},
        "sinks": {"curves": False},
        "device": "cpu",
        "timeout_s": 60,
    }
    task = build()
    try:
        fit(task, RunConfig.parse(config | changes))
    except LockstepError as error:
        return type(error).__name__, str(error), error.exit_code
    return getattr(task, "seen", None)


def run(folder: Path, build: Callable[[], TinyTask], **changes: Any) -> list[Any]:
    return run_ranks(2, train, folder, build, changes)


def steps_saved(folder: Path) -> list[int]:
    store = CheckpointStore(folder / "checkpoints", recipe="tiny")
    return [int(path.name.removeprefix("step_")) for path in sorted(store.folder.glob("step_*"))]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_state_of_each_rank_is_refused_after_the_first_step(
    sharded: bool, tmp_path: Path
) -> None:
    first, second = run(tmp_path, Counting, checkpoint={"every_steps": 4, "sharded": sharded})
    assert first == second
    kind, said, exit_code = first
    assert (kind, exit_code) == ("ConfigError", 2)
    assert "Task.state() differs between ranks: key 'seen' is " in said
    assert "on rank 0 and" in said
    assert "try: make it the same on every rank: sum it over ranks" in said


def test_a_state_that_differs_later_is_refused_once_the_steps_are_saved(tmp_path: Path) -> None:
    results = run(tmp_path, CountingLate)
    assert {result[0] for result in results} == {"ConfigError"}
    assert "key 'seen' is" in results[0][1]
    assert "step 4 was saved with rank 0's" in results[0][1]
    assert steps_saved(tmp_path) == [4]


def test_it_does_not_hide_what_ends_the_run(tmp_path: Path) -> None:
    """A bad sample has the good steps saved first; the difference is then a warning."""
    results = run(tmp_path, CountingLateAndBadSample, checkpoint={"every_steps": 100})
    assert {result[0] for result in results} == {"DataError"}
    warnings = [e["message"] for e in read_events(tmp_path, raw=True) if e["event"] == "warning"]
    assert any("Task.state() differs between ranks: key 'seen'" in text for text in warnings)
    assert len(steps_saved(tmp_path)) == 1


def test_a_state_that_is_summed_over_ranks_is_kept_and_resumed(tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", CountingAll)
    assert straight[0] == straight[1] > 0
    run(tmp_path / "resumed", CountingAll, max_steps=4)
    assert run(tmp_path / "resumed", CountingAll) == straight


# --- What is compared -----------------------------------------------------------------------


def differences(build: Callable[[int], dict[str, Any]]) -> list[str]:
    def compare() -> str:
        with World.enter("cpu", timeout_s=60) as world:
            return state_difference(build(world.rank), world)

    return run_ranks(3, compare)


def network(rank: int) -> dict[str, Any]:
    """Return a second network's state: the same weights, running statistics of each rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net(torch.full((2, 4), float(rank)) + torch.rand(2, 4))
    return {"network": net.state_dict()}


def network_with_other_weights(rank: int) -> dict[str, Any]:
    state = network(rank)
    state["network"]["0.weight"] += 0.01 * (rank == 2)
    return state


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda rank: {"words": ["a", "b"], "n": 1}, ""),
        (lambda rank: {"mean": 0.5 * (1 + 1e-9 * rank)}, ""),
        (network, ""),
        (network_with_other_weights, "key 'network.0.weight' is not the same on ranks 0 and 2"),
        (lambda rank: {"n": int(rank == 2)}, "key 'n' is 0 on rank 0 and 1 on rank 2"),
        (lambda rank: {"v": {"a": [1, rank]}}, "key 'v' is not the same on ranks 0 and 1"),
        (lambda rank: {"a": 1} if rank else {}, "key 'a' is on rank 1 and not on rank 0"),
        (lambda rank: {} if rank else {"a": 1}, "key 'a' is on rank 0 and not on rank 1"),
    ],
)
def test_the_first_key_that_differs_is_named(
    build: Callable[[int], dict[str, Any]], said: str
) -> None:
    assert differences(build) == [said] * 3
