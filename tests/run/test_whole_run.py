"""A whole run: the same numbers on every rank and for every number of them, in any loop."""

from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from whole_run import NUM_SAMPLES, TIMES, config_for, events, run, verdicts, weights

from lockstep import fit, read_events
from lockstep.checkpoint import Checkpoint
from lockstep.run.build import prepare
from lockstep.signals import StopSignals
from lockstep.step.train_step import train_step
from lockstep.testing import TinyTask, run_ranks
from lockstep.trainer import RunResult, Trainer
from lockstep.world import World


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_number_in_the_log_is_that_of_the_whole_run(
    num_ranks: int, of_one: Path, tmp_path: Path
) -> None:
    run(tmp_path, num_ranks)
    for kind in ("step", "epoch", "evaluation"):
        first = events(tmp_path, kind)
        for rank in range(1, num_ranks):
            for ours, theirs in zip(first, events(tmp_path, kind, rank), strict=True):
                ours, theirs = (
                    {k: v for k, v in e.items() if k != "time" and not k.startswith("local_")}
                    for e in (ours, theirs)
                )
                assert ours == theirs, "no rank prints a number of its own"
        for many, one in zip(first, events(of_one, kind), strict=True):
            many, one = (
                {k: v for k, v in e.items() if not TIMES.fullmatch(k)} for e in (many, one)
            )
            many.pop("local_step_time_s", None)
            assert many.keys() == one.keys()
            for name, value in one.items():
                exact = isinstance(value, str | int) or value is None
                expected = value if exact else pytest.approx(value, rel=1e-12, nan_ok=True)
                assert many[name] == expected, (kind, name)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_whole_run_ends_with_the_weights_of_one_rank(
    num_ranks: int, of_one: Path, tmp_path: Path
) -> None:
    run(tmp_path, num_ranks)
    for name, tensor in weights(of_one).items():
        torch.testing.assert_close(weights(tmp_path)[name], tensor, rtol=0, atol=1e-12)


def own_loop(folder: Path, counts: bool = True, **more: Any) -> RunResult:
    """Train as `fit` does, with a constant rate."""
    config, task = config_for(folder, **more), TinyTask(NUM_SAMPLES)
    with ExitStack() as stack:
        world = stack.enter_context(World.enter(config.device, config.timeout_s))
        signals = stack.enter_context(StopSignals())
        run = prepare(task, config, world, stack)
        trainer = Trainer(run, signals, stack)
        for batch in trainer.steps():
            report = train_step(task.loss, run.model, run.optimizer, batch, world)
            if counts:
                trainer.record_step(report, batch)
        return trainer.finish()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loop_of_ones_own_is_fit_to_the_last_bit(num_ranks: int, tmp_path: Path) -> None:
    run(tmp_path / "fit", num_ranks)
    results = run_ranks(num_ranks, own_loop, tmp_path / "own")
    assert {result.step for result in results} == {6}
    a, b = weights(tmp_path / "fit"), weights(tmp_path / "own")
    assert all(torch.equal(a[name], b[name]) for name in a)
    kinds = [[e["event"] for e in read_events(tmp_path / name)] for name in ("fit", "own")]
    assert kinds[0] == kinds[1]
    assert verdicts(tmp_path / "own") == verdicts(tmp_path / "fit")


@pytest.mark.parametrize(
    ("limit", "said"),
    [(None, "Gradient clipping: none\n"), (0.5, "Gradient clipping: at norm 0.5\n")],
)
def test_the_banner_says_whether_gradients_are_clipped(
    limit: float | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(TinyTask(NUM_SAMPLES), config_for(tmp_path, max_grad_norm=limit, max_steps=1))
    assert said in capsys.readouterr().out


def test_a_loop_that_does_not_count_its_steps_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"record_step\(report, batch\)"):
        run_ranks(1, own_loop, tmp_path, False)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_that_leaves_out_exact_mode_is_refused(num_ranks: int, tmp_path: Path) -> None:
    """Nobody would sum the gradients of two ranks, which would go apart, and save."""
    with pytest.raises(RuntimeError, match=r"(?s)exact=true.*exact_reducer=run.exact_reducer"):
        run_ranks(num_ranks, partial(own_loop, exact=True), tmp_path)


def test_a_resume_reads_each_large_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(TinyTask(NUM_SAMPLES), config_for(tmp_path, averages=[0.9], max_steps=2))
    reads: Counter[str] = Counter()
    plain = Checkpoint._pieces

    def counted(checkpoint: Checkpoint, name: str) -> Any:
        reads[name] += 1
        return plain(checkpoint, name)

    monkeypatch.setattr(Checkpoint, "_pieces", counted)
    fit(TinyTask(NUM_SAMPLES), config_for(tmp_path, averages=[0.9], max_steps=3))
    large = {f"{part}.safetensors" for part in ("model", "optimizer", "average_0.9")}
    assert {name: reads[name] for name in large} == dict.fromkeys(large, 1)


def test_evaluations_and_saves_may_come_within_an_epoch(tmp_path: Path) -> None:
    # Three steps an epoch, of 8, 8 and 4 samples: halves lie in the second and the third.
    half = {"every_epochs": 0.5}
    run(tmp_path, 2, evaluation=half | {"save_best": False}, checkpoint=half)
    for kind in ("evaluation", "saving"):
        assert [event["step"] for event in events(tmp_path, kind)] == [2, 3, 5, 6]
