"""What LOCKSTEP_REHEARSAL=1 makes of a config."""

from pathlib import Path

import pytest

from lockstep import RunConfig, fit
from lockstep.run.rehearsal import rehearsed
from lockstep.testing import TinyTask


def test_outside_a_rehearsal_a_config_is_left_alone() -> None:
    config = RunConfig(epochs=3)
    assert rehearsed(config) is config


def test_a_rehearsed_config_keeps_batch_and_rate_and_leaves_the_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCKSTEP_REHEARSAL", "1")
    asked = RunConfig.parse(
        {
            "output_dir": "runs/a",
            "epochs": 300,
            "batch": {"batch_size": 48, "accumulate": 3},
            "loader": {"num_workers": 8},
            "sinks": {"log_file": "logs/train.log"},
            "resume": "checkpoints/x",
        }
    )
    small = rehearsed(asked)
    assert (small.batch, small.rate, small.precision) == (asked.batch, asked.rate, asked.precision)
    assert (small.output_dir, small.max_steps, small.epochs) == ("runs/a/rehearsal", 4, None)
    assert (small.loader.num_workers, small.resume) == (1, "discard")
    assert small.sinks.log_file == "runs/a/rehearsal/train.log"
    assert small.loader.timeout_s == 60
    assert rehearsed(small) is small, "once is enough"
    patient = small.loader.model_copy(update={"timeout_s": 300.0})
    assert rehearsed(small.model_copy(update={"loader": patient})) == small, "a recipe's own, too"
    named_so = rehearsed(asked.model_copy(update={"output_dir": "rehearsal"}))
    assert (named_so.output_dir, named_so.max_steps) == ("rehearsal/rehearsal", 4), "a real run's"


@pytest.mark.parametrize("variable", ["1", "0"])
def test_a_run_says_in_its_banner_that_it_is_a_rehearsal(
    variable: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LOCKSTEP_REHEARSAL", variable)
    fit(TinyTask(), RunConfig(output_dir=str(tmp_path), max_steps=9, device="cpu"))
    lines = [line for line in capsys.readouterr().out.splitlines() if "REHEARSAL" in line]
    line = (
        f"rehearsal: the run ends after 4 steps, in {tmp_path}/rehearsal, "
        "because LOCKSTEP_REHEARSAL=1 is set"
    )
    assert lines == ([line] if variable == "1" else [])
