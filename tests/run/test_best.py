"""`best_model.pt` is the best evaluation, also after an error and under another metric."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from whole_run import NUM_SAMPLES, config_for

from lockstep import Callback, fit
from lockstep.callback import RunView
from lockstep.data.batch import StepBatch
from lockstep.step.report import StepReport
from lockstep.testing import TinyTask, run_ranks

EVALUATION: dict[str, Any] = {"every_steps": 2}


class Scripted(TinyTask):
    """Its evaluations measure the given losses, and a perplexity of ten times the loss."""

    def __init__(self, losses: Sequence[float]) -> None:
        super().__init__(NUM_SAMPLES)
        self.losses = list(losses)

    def derive(self, means: Mapping[str, Tensor]) -> dict[str, float]:
        loss = self.losses.pop(0)
        return {"loss": loss, "perplexity": 10 * loss}


class Failing(Callback):
    """Raises at step 4, in one method."""

    def __init__(self, method: str) -> None:
        self.method = method

    def on_evaluation_end(self, run: RunView, metrics: Mapping[str, float]) -> None:
        self.fail(run, "on_evaluation_end")

    def on_step_end(self, run: RunView, batch: StepBatch, report: StepReport) -> None:
        self.fail(run, "on_step_end")

    def fail(self, run: RunView, method: str) -> None:
        if run.step == 4 and method == self.method:
            raise ValueError("the logger is down")


def best(folder: Path) -> str:
    return os.readlink(folder / "checkpoints" / "best_model.pt")


def start(folder: Path, losses: Sequence[float], *callbacks: Callback, **changes: Any) -> None:
    settings = {"evaluation": EVALUATION, "checkpoint": {"every_steps": 100}, **changes}
    fit(Scripted(losses), config_for(folder, **settings), callbacks)


def fail_at_best(folder: Path, method: str) -> None:
    with pytest.raises(Exception, match="the logger is down"):
        start(folder, [5.0, 1.0], Failing(method))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("method", ["on_evaluation_end", "on_step_end"])
def test_a_callback_that_raises_at_the_best_evaluation_does_not_lose_it(
    method: str, num_ranks: int, tmp_path: Path
) -> None:
    run_ranks(num_ranks, fail_at_best, tmp_path, method)
    # After `on_step_end` the evaluation of step 4 is missing, and made when the run resumes.
    rest = [3.0] if method == "on_evaluation_end" else [1.0, 3.0]
    run_ranks(num_ranks, start, tmp_path, rest)
    assert best(tmp_path) == "step_00000004"


def test_the_best_of_another_metric_is_not_compared(tmp_path: Path) -> None:
    start(tmp_path, [5.0, 4.0], max_steps=4)
    other = {**EVALUATION, "best_metric": "perplexity"}
    start(tmp_path, [4.5], evaluation=other, accept_changes=True)
    assert best(tmp_path) == "step_00000006"


def test_the_best_in_the_other_direction_is_not_compared(tmp_path: Path) -> None:
    start(tmp_path, [5.0, 4.0], max_steps=4)
    other = {**EVALUATION, "best_is": "highest"}
    start(tmp_path, [3.0], evaluation=other, accept_changes=True)
    assert best(tmp_path) == "step_00000006"
