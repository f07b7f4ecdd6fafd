"""What a run has come to by its steps, added up only when somebody looks."""

import math
import weakref

import pytest
import torch

from lockstep.data.batch import StepBatch
from lockstep.run import progress as module
from lockstep.run.progress import Progress
from lockstep.step.report import StepReport


def report(loss: float, weight: float, norm: float = 1.0, part: float = 0.0) -> StepReport:
    sums = torch.tensor([loss, weight, part, weight], dtype=torch.float64)
    return StepReport(sums, ["part"], torch.tensor(norm), [sums])


def batch(step: int) -> StepBatch:
    return StepBatch(step, 0, [], 8 * (step + 1), 1)


def test_sums_and_weights_are_those_of_all_steps_pending_and_summed() -> None:
    progress = Progress()
    progress.count(report(3.0, 2.0, part=1.0), batch(0))
    progress.sum_pending()
    progress.count(report(5.0, 6.0, part=0.5), batch(1))
    assert progress.state()["interval"] == {"loss": [8.0, 8.0], "part": [1.5, 8.0]}
    assert progress.state()["epoch"] == progress.interval
    assert (progress.step, progress.consumed) == (2, 16)


def test_parts_that_come_and_go_from_step_to_step_are_kept_apart() -> None:
    progress = Progress()
    for step, names in enumerate((["a"], ["b"], [], ["a"])):
        sums = torch.tensor([1.0, 1.0, *([float(step + 1), 2.0] * len(names))])
        progress.count(StepReport(sums, names, torch.tensor(1.0), [sums]), batch(step))
    assert progress.state()["epoch"] == {"loss": [4.0, 4.0], "a": [5.0, 4.0], "b": [2.0, 2.0]}


def test_steps_do_not_pile_up_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 3)
    progress = Progress()
    for step in range(7):
        progress.count(report(1.0, 1.0), batch(step))
        assert len(progress.pending) < 3
    assert progress.state()["epoch"]["loss"] == [7.0, 7.0]


def test_a_pending_step_keeps_no_rows_of_its_micro_batches() -> None:
    progress, row = Progress(), torch.ones(4)
    progress.count(StepReport(torch.ones(4), ["part"], torch.tensor(1.0), [row]), batch(0))
    kept = weakref.ref(row)
    del row
    assert progress.pending
    assert kept() is None


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf), (1.0, math.nan)])
def test_the_first_step_that_is_no_arithmetic_is_named(loss: float, norm: float) -> None:
    progress = Progress()
    progress.count(report(2.0, 2.0), batch(4))
    progress.count(report(loss, 2.0, norm), batch(5))
    progress.count(report(math.nan, 1.0), batch(6))
    progress.sum_pending()
    assert progress.non_finite_step is not None
    assert str(progress.non_finite_step) == str((5, loss / 2, norm, 2.0))


def test_a_saved_state_comes_back_also_with_sums_that_are_tensors() -> None:
    progress = Progress()
    progress.count(report(3.0, 2.0), batch(0))
    saved = progress.state()
    assert not {"pending", "bad"} & set(saved)
    assert Progress.from_state(dict(saved)) == progress
    saved["epoch"] = {name: torch.tensor(sums) for name, sums in saved["epoch"].items()}
    assert Progress.from_state(saved) == progress
