"""What is saved, what is kept and called the best, and what becomes of a save that fails."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from whole_run import NUM_SAMPLES, config_for, run, store, weights

from lockstep import CheckpointStore, PartialLoss, fit, read_events
from lockstep.errors import (
    CheckpointError,
    NonFiniteError,
)
from lockstep.task import Context
from lockstep.testing import TinyTask, run_ranks


class ExplodingTask(TinyTask):
    """Loses its numbers in step 4 (counted from 1), on one micro-batch of one rank."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        part = super().loss(model, batch, context)
        bad = context.training and (context.step, context.place) == (3, 1)
        return PartialLoss(part.loss_sum * (float("nan") if bad else 1), part.weight, part.parts)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loss_that_is_no_number_ends_all_ranks_and_is_not_saved(
    num_ranks: int, tmp_path: Path
) -> None:
    run(tmp_path / "before", num_ranks, max_steps=2)
    errors = run(tmp_path / "run", num_ranks, lambda: ExplodingTask(NUM_SAMPLES))
    assert errors == errors[:1] * num_ranks
    kind, text, exit_code = errors[0]
    assert (kind, exit_code) == (NonFiniteError.__name__, 3)
    assert text.startswith("step 4: loss nan")
    checkpoint, rejected = store(tmp_path / "run").latest()
    assert checkpoint is not None
    assert (checkpoint.step, rejected) == (2, [])
    for name, tensor in weights(tmp_path / "before").items():
        assert torch.equal(checkpoint.load("model")[name], tensor)
    assert not any(event["step"] > 3 for event in read_events(tmp_path / "run"))


def break_saving() -> None:
    def save(self: CheckpointStore, step: int, *_: object) -> Path:
        if step == 2:
            raise CheckpointError("disk quota exceeded", "make room")
        raise AssertionError("nobody looked after the first failure")

    CheckpointStore.save = save  # type: ignore[method-assign]


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_save_that_fails_is_raised_on_all_ranks(
    num_ranks: int, background: bool, tmp_path: Path
) -> None:
    errors = run(
        tmp_path,
        num_ranks,
        before=break_saving,
        checkpoint={"every_steps": 2, "background": background},
    )
    assert errors == errors[:1] * num_ranks
    assert errors[0][0] == "CheckpointError"
    assert "disk quota exceeded" in errors[0][1]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_save_that_fails_late_is_raised_on_all_ranks(num_ranks: int, tmp_path: Path) -> None:
    """It is noticed where the next save waits for it, not at the next step."""

    def plant() -> None:
        def save(*_: object) -> Path:
            time.sleep(1)
            raise CheckpointError("disk quota exceeded", "make room")

        CheckpointStore.save = save  # type: ignore[method-assign]

    errors = run(tmp_path, num_ranks, before=plant, checkpoint={"every_steps": 1})
    assert errors == errors[:1] * num_ranks
    assert errors[0][0] == "CheckpointError"


@pytest.mark.parametrize("sharded", [False, True])
def test_a_save_that_fails_with_any_exception_ends_all_ranks(sharded: bool, tmp_path: Path) -> None:
    """Only the first rank writes, or commits the shares of all."""

    def save(*_: object) -> Path:
        raise RuntimeError("planted")

    def one_rank() -> tuple[str, str]:
        CheckpointStore.save = save  # type: ignore[method-assign]
        try:
            fit(TinyTask(), config_for(tmp_path, checkpoint={"every_steps": 2, "sharded": sharded}))
        except Exception as error:
            return type(error).__name__, str(error)
        return "", ""

    first, second = run_ranks(2, one_rank)
    assert first == ("RuntimeError", "planted")
    assert second[0] == "OtherRankError"
    assert "rank 0: RuntimeError: planted" in second[1]


class Scored(TinyTask):
    """Reports a metric that is best in the second evaluation, and no number in the third."""

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> dict[str, float]:
        return {"score": {2: 0.5, 4: 0.1, 6: float("nan"), 8: 0.3}.get(context.step, 9.0)}


def test_the_best_evaluation_is_saved_and_named_whenever_it_comes(tmp_path: Path) -> None:
    best = {"every_steps": 2, "best_metric": "score", "save_best": True}
    run(tmp_path, 2, lambda: Scored(NUM_SAMPLES), evaluation=best, checkpoint={"every_steps": 3})
    assert store(tmp_path).open("best_model.pt").step == 4


@pytest.mark.parametrize(
    ("failing", "scores", "best"),
    [(2, (0.1, 0.3, 0.5), 4), (4, (0.3, 0.1, 0.2), 6), (6, (0.5, 0.3, 0.1), 6)],
)
def test_a_best_checkpoint_that_could_not_be_saved_hides_no_other(
    failing: int, scores: tuple[float, ...], best: int, tmp_path: Path
) -> None:
    """Its weights are gone, unless it was the last: then it is saved again, under its name."""

    class Scores(TinyTask):
        def finish_evaluation(self, model: Any, context: Context, folder: str) -> dict[str, float]:
            return {"score": scores[context.step // 2 - 1]}

    def fail_once() -> None:
        real, left = CheckpointStore.save, [failing]

        def save(store: CheckpointStore, step: int, *rest: Any) -> Path:
            if step in left:
                left.remove(step)
                raise CheckpointError(f"no room for step {step}", "more")
            return real(store, step, *rest)

        CheckpointStore.save = save  # type: ignore[method-assign]

    evaluation = {"every_steps": 2, "best_metric": "score", "save_best": True}
    saving = {"every_steps": 2, "on_failed_save": "continue", "background": False}
    changes = {"evaluation": evaluation, "checkpoint": saving}
    run(tmp_path, 1, lambda: Scores(NUM_SAMPLES), fail_once, **changes)
    checkpoint = store(tmp_path).open("best_model.pt")
    assert checkpoint.step == best
    assert checkpoint.load("progress")["best"] == scores[best // 2 - 1]


class Unlike(Scored):
    """The ranks do not agree on the metric, and later only the first has it."""

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> dict[str, float]:
        if context.world.is_first:
            return super().finish_evaluation(model, context, folder)
        return {"score": 9.0 - context.step} if context.step < 6 else {}


def test_what_is_best_is_the_first_ranks_word_and_all_ranks_save(tmp_path: Path) -> None:
    best = {"every_steps": 1, "best_metric": "score", "save_best": True}
    done = run(tmp_path, 2, lambda: Unlike(NUM_SAMPLES), evaluation=best)
    assert [result.step for result in done] == [6, 6]
    assert store(tmp_path).open("best_model.pt").step == 4


def test_checkpoints_of_epochs_and_of_steps_have_names_and_are_kept(tmp_path: Path) -> None:
    saving = {"every_epochs": 1, "every_steps": 2, "keep_last": 1}
    run(tmp_path, 2, checkpoint=saving | {"name_epochs": True, "name_steps": True})
    assert store(tmp_path).aliases() == {
        "checkpoint_step_2.pt": "step_00000002",
        "checkpoint_epoch_1.pt": "step_00000003",
        "checkpoint_step_4.pt": "step_00000004",
        "checkpoint_step_6.pt": "step_00000006",
        "checkpoint_epoch_2.pt": "step_00000006",
    }


def test_a_best_metric_that_is_not_measured_is_refused(tmp_path: Path) -> None:
    best = {"every_steps": 2, "best_metric": "scoer", "save_best": True}
    errors = run(tmp_path, 2, lambda: Scored(NUM_SAMPLES), evaluation=best)
    assert errors[0][0] == errors[1][0] == "ConfigError"
    assert "'scoer' is not measured" in errors[0][1]


def test_a_wrong_best_metric_can_be_corrected_until_one_is_the_best(tmp_path: Path) -> None:
    def build() -> TinyTask:
        return Scored(NUM_SAMPLES)

    wrong = {"every_steps": 2, "best_metric": "scoer", "save_best": True}
    right = {**wrong, "best_metric": "score", "best_is": "highest"}
    assert run(tmp_path, 2, build, evaluation=wrong)[0][0] == "ConfigError"
    assert [r.step for r in run(tmp_path, 2, build, evaluation=right, max_steps=4)] == [4, 4]
    later = run(tmp_path, 2, build, evaluation={**right, "best_is": "lowest"}, max_steps=6)
    assert later[0][0] == "ConfigError"
    assert "evaluation.best_is highest -> lowest" in later[0][1]
