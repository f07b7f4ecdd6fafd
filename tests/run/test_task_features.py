"""What a task may ask for: its own state, samples gathered, settings recorded."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from whole_run import NUM_SAMPLES, run, weights

from lockstep.testing import TinyTask


class Growing(TinyTask):
    """As wide as the words it knows, of which a resumed run's data have more."""

    def __init__(self, num_words: int) -> None:
        super().__init__(NUM_SAMPLES)
        self.num_words = num_words

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, self.num_words), nn.Linear(self.num_words, 3)).double()

    def state(self) -> dict[str, Any]:
        return {"num_words": self.num_words}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.num_words = state["num_words"]


def test_a_task_remembers_before_it_builds_its_model(tmp_path: Path) -> None:
    run(tmp_path, 1, lambda: Growing(4), max_steps=2)
    (result,) = run(tmp_path, 1, lambda: Growing(7), max_steps=4)
    assert result.step == 4, result
    assert weights(tmp_path)["0.weight"].shape == (4, 5)


class Gathering(TinyTask):
    """Says that its loss compares the samples of all ranks."""

    gathers = True


def test_a_loss_that_gathers_goes_on_with_as_many_samples_at_a_time(tmp_path: Path) -> None:
    def go_on(num_ranks: int, max_steps: int, **changes: Any) -> Any:
        (first, *_) = run(
            tmp_path, num_ranks, lambda: Gathering(NUM_SAMPLES), max_steps=max_steps, **changes
        )
        return first

    assert go_on(2, 2).step == 2
    kind, text, _ = go_on(1, 3)
    assert kind == "ConfigError"
    assert "4 at a time (2 x 2 ranks), this run would have 2" in text
    assert go_on(2, 3).step == 3
    assert go_on(1, 4, accept_changes=True).step == 4


class Settled(TinyTask):
    """Was built with something that ranks must agree on."""

    def settings(self) -> dict[str, Any]:
        return {"width": 3 + int(os.environ["RANK"]) * self.num_held_out}


def test_a_tasks_settings_are_recorded_and_alike_on_all_ranks(tmp_path: Path) -> None:
    errors = run(tmp_path, 2, lambda: Settled(NUM_SAMPLES, num_held_out=1))
    assert {error[0] for error in errors} == {"ConfigError"}
    assert "different settings" in errors[0][1]
    run(tmp_path, 2, lambda: Settled(NUM_SAMPLES, num_held_out=0), max_steps=1)
    assert json.loads((tmp_path / "config.json").read_text())["task"] == {"width": 3}


@pytest.mark.parametrize("resume", ["discard", "never", "step_00000002"])
def test_a_job_that_starts_a_run_again_goes_on_whatever_it_asked_for_at_first(
    resume: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else it would discard, refuse, or go back from, what it has trained itself."""
    env, saving = {"SLURM_JOB_ID": "7"}, {"every_steps": 1, "keep_last": 1}

    def start(**changes: Any) -> Any:
        return run(tmp_path, 1, before=lambda: os.environ.update(env), resume=resume, **changes)[0]

    if resume.startswith("step"):
        run(tmp_path, 1, max_steps=2)
    assert start(max_steps=5, checkpoint=saving).step == 5
    env["SLURM_RESTART_COUNT"] = "1"
    capfd.readouterr()
    assert start().step == 6
    assert "resumed at step 5" in capfd.readouterr().out
    env["SLURM_JOB_ID"] = "8"
    assert resume != "never" or start()[0] == "ConfigError", "another job's is not its own"
