"""In an ordinary step the ranks communicate through gradient buckets and one sum, and no more."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Callback, Loader, PartialLoss, RunConfig, World, fit, signals, train_step
from lockstep.dist.ddp import Replica
from lockstep.errors import ConfigError, LockstepError
from lockstep.step import votes
from lockstep.task import Context
from lockstep.testing import TinyTask, run_ranks

SMALL = ["sinks.curves=false", "batch.batch_size=4", "log_every=1000"]


class Counting(TinyTask):
    """Notes how many collectives there were before each step, and how many buckets are sent."""

    def __init__(self) -> None:
        super().__init__(num_samples=48, num_held_out=0)
        self.before: list[int] = []
        self.buckets: set[int] = set()

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        self.before.append(context.world.num_collectives)
        if isinstance(model, Replica) and context.step > 1:
            self.buckets.add(model.sent.num)
        return super().loss(model, batch, context)


class Asked(Callback):
    """A callback that may stop the run in every step."""

    def on_step_end(self, run: Any, batch: Any, report: Any) -> None:
        pass


def collectives_of_steps(folder: str, settings: list[str], asked: bool = False) -> list[int]:
    task = Counting()
    config = RunConfig(output_dir=folder, max_steps=6, device="cpu")
    fit(task, config.with_overrides([*SMALL, *settings]), [Asked()] if asked else [])
    return [after - before for before, after in zip(task.before, task.before[1:], strict=False)]


def test_an_ordinary_step_has_one_collective_beside_its_gradients(tmp_path: Path) -> None:
    for steps in run_ranks(2, collectives_of_steps, str(tmp_path / "run"), []):
        first, *later = steps
        assert later == [1] * 4
        assert first > 1  # ranks compare the names of parts, and what they trained


@pytest.mark.parametrize(
    ("settings", "asked", "number"),
    [([], True, 2), (["exact=true"], False, 2), (["parallel=fsdp"], False, 1)],
)
def test_other_steps_have_a_vote_of_their_own(
    settings: list[str], asked: bool, number: int, tmp_path: Path
) -> None:
    found = run_ranks(2, collectives_of_steps, str(tmp_path / "run"), settings, asked)
    if "exact=true" in settings:  # the tree's sums are collectives of their own
        assert all(min(steps[1:]) == max(steps[1:]) for steps in found)
    else:
        assert [steps[1:] for steps in found] == [[number] * 4] * 2


def collectives_of_a_custom_loop() -> list[int]:
    with World.enter("cpu", timeout_s=20) as world:
        task = Counting()
        model = world.replicate(task.build_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in Loader(task.train_data(), world, batch_size=4, epochs=1):
            train_step(task.loss, model, optimizer, batch, world)
        return [b - a for a, b in zip(task.before, task.before[1:], strict=False)]


def test_a_step_of_a_custom_loop_has_one_collective_too() -> None:
    for first, *later in run_ranks(2, collectives_of_a_custom_loop):
        assert first > 1
        assert set(later) == {1}


class ChangingParts(TinyTask):
    """The names of its parts change at a step: on every rank, or on one."""

    def __init__(self, only_rank: int | None) -> None:
        super().__init__(num_samples=48, num_held_out=0)
        self.only_rank = only_rank

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        made = super().loss(model, batch, context)
        if context.step < 3 or self.only_rank not in (None, context.world.rank):
            return made
        return PartialLoss(made.loss_sum, made.weight, {"a": (1.0, 2.0), "b": (3.0, 4.0)})


class Reports(Callback):
    def __init__(self) -> None:
        self.parts: list[dict[str, list[float]]] = []

    def on_step_end(self, run: Any, batch: Any, report: Any) -> None:
        self.parts.append({k: [float(n) for n in pair] for k, pair in report.parts.items()})


def train_with_changing_parts(folder: str, only_rank: int | None) -> Any:
    reports = Reports()
    config = RunConfig(output_dir=folder, max_steps=5, device="cpu").with_overrides(SMALL)
    try:
        fit(ChangingParts(only_rank), config, [reports])
    except ConfigError as error:
        return error.problem
    return [sorted(parts) for parts in reports.parts], reports.parts[-1]


def test_other_parts_from_a_step_on_are_agreed_on_again(tmp_path: Path) -> None:
    names = [["heavy"]] * 3 + [["a", "b"]] * 2
    both = {"a": [2.0, 4.0], "b": [6.0, 8.0]}
    found = run_ranks(2, train_with_changing_parts, str(tmp_path / "run"), None)
    assert found == [(names, both)] * 2


def test_other_parts_on_one_rank_are_refused_on_all(tmp_path: Path) -> None:
    found = run_ranks(2, train_with_changing_parts, str(tmp_path / "run"), 1)
    assert found == ["ranks have different parts of the loss in one step: a, b and heavy"] * 2


def ask_to_stop() -> None:
    """Send this process a signal, and wait until its run has heard it."""
    signal.raise_signal(signal.SIGTERM)
    deadline = time.monotonic() + 60
    while signals._active is None or signals._active.requested is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Surprise(TinyTask):
    """On one rank, at its fourth step: a signal, or a sample that cannot be read."""

    def __init__(self, kind: str, rank: int) -> None:
        super().__init__(num_samples=48, num_held_out=0)
        self.kind, self.rank = kind, rank

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        if (context.step, context.world.rank, self.kind) == (3, self.rank, "signal"):
            ask_to_stop()
        return super().loss(model, batch, context)

    def train_data(self) -> Any:
        return BadSample(super().train_data(), self.kind == "sample")


class BadSample(list[Any]):
    def __init__(self, samples: list[Any], is_bad: bool) -> None:
        super().__init__(samples)
        self.num_left = 10 if is_bad else 10**9

    def __getitem__(self, index: Any) -> Any:
        self.num_left -= 1
        if self.num_left < 0 and torch.initial_seed() >= 0 and not index:
            raise ValueError("unreadable")
        return super().__getitem__(index)


def train_into_a_surprise(folder: str, kind: str, rank: int) -> tuple[str, int]:
    config = RunConfig(output_dir=folder, max_steps=12, device="cpu", epochs=None)
    try:
        result = fit(Surprise(kind, rank), config.with_overrides(SMALL))
    except LockstepError as error:
        return error.problem, 0
    assert result.exit_code in (0, 143)
    return "", result.step


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_after_the_step(rank: int, tmp_path: Path) -> None:
    found = run_ranks(2, train_into_a_surprise, str(tmp_path), "signal", rank)
    assert found == [("", 4)] * 2
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_00000004"]


def test_an_unreadable_sample_ends_all_ranks_with_the_steps_before_saved(tmp_path: Path) -> None:
    found = run_ranks(2, train_into_a_surprise, str(tmp_path), "sample", 0)
    problems = {problem for problem, _ in found}
    assert len(problems) == 1
    assert "unreadable" in problems.pop()
    (saved,) = (tmp_path / "checkpoints").glob("step_*")
    assert saved.name > "step_00000000"


def test_a_lost_vote_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the column is sent, and its sum is not looked at."""

    def deaf(self: Any, passed: Any, grads: Any, batch: Any) -> Any:
        sums, norm = whole(self, passed, grads, batch)
        self.needs_attention = False
        return sums, norm

    whole = votes.SumsVotes.sums_and_norm
    monkeypatch.setattr(votes.SumsVotes, "sums_and_norm", deaf)
    found = run_ranks(2, train_into_a_surprise, str(tmp_path), "signal", 1)
    assert found == [("", 6)] * 2  # at the end of the epoch, ranks always agree
