"""An evaluation that fails or changes modes: no step is lost, and it is made up for."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from whole_run import NUM_SAMPLES, run, store, weights

from lockstep.testing import TinyTask


class Torn(TinyTask):
    """A held-out sample cannot be read until it is mended."""

    is_mended = False

    def eval_data(self) -> Any:
        data = super().eval_data()
        return data if self.is_mended else TornList(data)


class TornList(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        if index == 3:
            raise OSError("torn")
        return super().__getitem__(index)


def test_an_evaluation_that_fails_loses_no_step_and_is_made_up_for(tmp_path: Path) -> None:
    evaluation = {"every_epochs": 2, "save_best": True}
    rare: dict[str, Any] = {"checkpoint": {"every_epochs": 9}, "evaluation": evaluation}
    errors = run(tmp_path, 2, lambda: Torn(NUM_SAMPLES), **rare)
    assert {(kind, code) for kind, _, code in errors} == {("DataError", 2)}
    assert "sample 3 cannot be read" in errors[0][1]
    saved, _ = store(tmp_path).latest()
    assert saved is not None
    assert (saved.step, saved.meta["metrics"]) == (6, {})

    Torn.is_mended = True
    try:
        done = run(tmp_path, 2, lambda: Torn(NUM_SAMPLES), **rare, accept_changes=True)
    finally:
        Torn.is_mended = False
    assert [result.step for result in done] == [6, 6]
    assert done[0].metrics.keys() >= {"loss"}
    assert store(tmp_path).open("best_model.pt").step == 6


class Frozen(TinyTask):
    """A part of the model is in evaluation mode, for good."""

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        model[1].eval()
        return model


def test_a_part_in_evaluation_mode_stays_there_after_an_evaluation(tmp_path: Path) -> None:
    for name, every in (("evaluated", 1), ("not", 100)):
        changes = {"evaluation": {"every_steps": every, "save_best": False}, "max_steps": 5}
        run(tmp_path / name, 1, lambda: Frozen(NUM_SAMPLES), **changes)
    for name, weight in weights(tmp_path / "not").items():
        assert torch.equal(weights(tmp_path / "evaluated")[name], weight), name
