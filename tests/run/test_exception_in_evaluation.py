"""A bug of the task in an evaluation: the steps are saved before the run ends with it."""

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from lockstep import CheckpointStore, RunConfig, fit, read_events
from lockstep import trainer as trainer_module
from lockstep.task import Context
from lockstep.testing import TinyTask, run_ranks

NUM_STEPS = 4
EVALUATE_AT = 3


class Faulty(TinyTask):
    """Raises a plain exception at one place of an evaluation, on some ranks."""

    def __init__(self, place: str = "", ranks: tuple[int, ...] = ()) -> None:
        super().__init__(num_samples=24, num_held_out=10)
        self.place = place
        self.ranks = ranks
        self.rank = -1

    def reach(self, place: str) -> None:
        if place == self.place and self.rank in self.ranks:
            raise ValueError(f"planted in {place} of rank {self.rank}")

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> Any:
        self.rank = context.world.rank
        return super().loss(model, batch, context)

    def metrics(self) -> Mapping[str, Any]:
        self.reach("metrics")
        return {}

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> Any:
        self.rank = context.world.rank
        self.reach("evaluate")
        return super().evaluate(model, batch, context)

    def derive(self, means: Mapping[str, Tensor]) -> Mapping[str, float]:
        self.reach("derive")
        return super().derive(means)

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> dict[str, float]:
        self.reach("finish_evaluation")
        total = context.world.all_sum(next(model.parameters()).detach().sum())
        self.reach("after a sum")
        return {"total": float(total)}


def run(folder: Path, num_ranks: int, build: Callable[[], TinyTask], **changes: Any) -> list[Any]:
    """Run `fit`; return each rank's step, or its exception as (kind, text, traceback)."""
    values = {
        "output_dir": str(folder),
        "max_steps": NUM_STEPS,
        "batch": {"batch_size": 2, "global_batch_size": 4},
        "rate": {"lr": 0.05},
        "evaluation": {"every_steps": EVALUATE_AT},
        "checkpoint": {"every_epochs": None, "keep_last": 100},
        "sinks": {"curves": False},
        "device": "cpu",
        "timeout_s": 20,
    }

    def one_rank() -> Any:
        trainer_module.EXIT_DELAY_S = 0.0
        try:
            return fit(build(), RunConfig.parse(values | changes)).step
        except Exception as error:
            return type(error).__name__, str(error), traceback.format_exc()

    return run_ranks(num_ranks, one_rank)


def newest(folder: Path) -> Any:
    return CheckpointStore(folder / "checkpoints", recipe="tiny").latest()[0]


PLACES = ("metrics", "evaluate", "derive", "finish_evaluation", "after a sum")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("num_ranks", "failing"), [(1, (0,)), (2, (0,)), (2, (1,)), (2, (0, 1))])
def test_a_bug_in_an_evaluation_does_not_lose_the_steps_before(
    num_ranks: int, failing: tuple[int, ...], place: str, tmp_path: Path
) -> None:
    ended = run(tmp_path, num_ranks, lambda: Faulty(place, failing))
    for rank, (kind, text, trace) in enumerate(ended):
        said = f"planted in {place} of rank {failing[0] if rank not in failing else rank}"
        if rank in failing:
            assert (kind, text) == ("ValueError", said)
            assert "in reach" in trace
            assert f"on rank {rank}, after step {EVALUATE_AT}" in trace
        else:
            assert kind == "OtherRankError"
            assert f"rank {failing[0]}: ValueError: {said}" in text
    saved = newest(tmp_path)
    assert saved is not None, "the steps are lost"
    assert saved.step == EVALUATE_AT
    assert saved.load("progress")["evaluation_pending"] is True

    again = run(tmp_path, num_ranks, lambda: Faulty("evaluate", failing))
    for rank, (kind, _, _) in enumerate(again):
        assert kind == ("ValueError" if rank in failing else "OtherRankError")
    assert newest(tmp_path).load("progress")["evaluation_pending"] is True

    assert run(tmp_path, num_ranks, Faulty) == [NUM_STEPS] * num_ranks
    evaluated = [e["step"] for e in read_events(tmp_path) if e["event"] == "evaluation"]
    assert evaluated == [EVALUATE_AT, NUM_STEPS]


def test_a_script_that_catches_the_exception_may_call_fit_again(tmp_path: Path) -> None:
    """All ranks left at the same place, so the process group is still good."""

    def one_rank() -> list[Any]:
        trainer_module.EXIT_DELAY_S = 0.0
        config = RunConfig.parse(
            {
                "output_dir": str(tmp_path),
                "max_steps": NUM_STEPS,
                "batch": {"batch_size": 2},
                "evaluation": {"every_steps": EVALUATE_AT},
                "sinks": {"curves": False},
                "device": "cpu",
                "timeout_s": 20,
            }
        )
        try:
            fit(Faulty("evaluate", (1,)), config)
        except Exception as error:
            kind = type(error).__name__
        return [kind, fit(Faulty(), config).step]

    assert run_ranks(2, one_rank) == [["OtherRankError", NUM_STEPS], ["ValueError", NUM_STEPS]]


def test_a_sharded_model_ends_at_once_as_its_ranks_cannot_agree(tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 in a forward pass; a vote of rank 1 would be taken for that."""
    with pytest.raises(RuntimeError, match="planted in evaluate of rank 1|by peer"):
        run_unsafely(tmp_path)
    assert newest(tmp_path) is None


def run_unsafely(folder: Path) -> None:
    def one_rank() -> None:
        values = {
            "output_dir": str(folder),
            "max_steps": NUM_STEPS,
            "batch": {"batch_size": 2, "global_batch_size": 4},
            "evaluation": {"every_steps": EVALUATE_AT},
            "checkpoint": {"every_epochs": None},
            "sinks": {"curves": False},
            "device": "cpu",
            "timeout_s": 20,
            "parallel": "fsdp",
        }
        fit(Faulty("evaluate", (1,)), RunConfig.parse(values))

    run_ranks(2, one_rank)
