"""The callback of `lockstep bench` in real runs: which steps it takes, and what it leaves."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep import Averaging, Callback, RunConfig, StopSignals, Trainer, World, fit, prepare
from lockstep.bench.callback import NOT_EXACT, BenchCallback, measured_config
from lockstep.bench.measured import Measured
from lockstep.bench.probe import LocalAveraging
from lockstep.bench.runs import BenchRuns
from lockstep.dist.collectives import GradBucket
from lockstep.errors import LaunchError
from lockstep.harness.attach import write_settings
from lockstep.testing import TinyTask, run_ranks

pytestmark = pytest.mark.timeout(120)

STEPS = 4


def config_for(folder: Path, **more: Any) -> RunConfig:
    values = {
        "output_dir": str(folder / "own"),
        "max_steps": 2,
        "batch": {"batch_size": 2},
        "log_every": 10**6,
        "device": "cpu",
        "timeout_s": 20,
    }
    return RunConfig.parse({**values, **more})


def measure(folder: Path, more: dict[str, Any], callbacks: list[Any]) -> str:
    """Run `fit` under the callback of the tool; return how the process was left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_TOOL_FOLDER", str(folder))
        try:
            fit(
                TinyTask(num_samples=480), config_for(folder, **more), [*callbacks, BenchCallback()]
            )
        except SystemExit as left:
            return f"exit {left.code}"
    return "returned"


def measured(folder: Path, num_ranks: int, profiles: bool = False, **more: Any) -> Measured:
    write_settings(folder, steps=STEPS, profiles=profiles)
    left = run_ranks(num_ranks, measure, folder, more, [])
    assert left == ["exit 0"] * num_ranks
    return Measured.read(folder, num_ranks)


def test_both_kinds_of_steps_are_timed_and_nothing_is_saved(tmp_path: Path) -> None:
    """Ranks whose gradients were kept local have different weights, which no save would take."""
    found = measured(tmp_path, 2, profiles=True)
    assert (len(found.whole_s), len(found.local_s)) == (STEPS, STEPS)
    assert 0 < found.backward_s < found.backward_end_s < found.compute_s
    assert found.backward_end_s + found.after_s < found.compute_s
    assert found.wait_s > 0
    assert found.exchange_s > 0
    (bucket,) = found.buckets
    assert bucket.size_bytes == 8 * found.facts["parameters"]
    assert found.work is not None
    assert len(found.work.operations_each[0]) == 4
    assert not (tmp_path / "own").exists()
    assert not list((tmp_path / "run" / "checkpoints").glob("*step_*"))


@pytest.mark.parametrize(("log_every", "num_sums"), [(10**6, 2), (1, 5)])
def test_the_sums_of_a_step_are_counted_without_its_gradients(
    log_every: int, num_sums: int, tmp_path: Path
) -> None:
    """The vote that a callback costs, and the sums of the losses; a log line has three more."""
    found = measured(tmp_path, 2, log_every=log_every)
    assert found.sums_per_step == num_sums


def test_exact_mode_is_left_out_and_named(tmp_path: Path) -> None:
    found = measured(tmp_path, 1, exact=True)
    assert found.facts["remarks"] == [NOT_EXACT]


class Halver(Callback):
    """Runs out of memory once, in a timed step."""

    def on_step_start(self, run: Any, batch: Any) -> None:
        if batch.step == 6 and len(batch.micro_batches[0].ids) == 2:
            batch.micro_batches[0].data["x"] = OutOfMemory()


class OutOfMemory:
    """Data with which no model can work."""

    @classmethod
    def __torch_function__(cls, *args: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("planted")


def test_a_step_that_is_taken_again_in_smaller_pieces_is_timed_once(tmp_path: Path) -> None:
    write_settings(tmp_path, steps=STEPS, profiles=False)
    more = {"batch": {"batch_size": 2, "global_batch_size": 2}, "on_out_of_memory": "halve"}
    assert run_ranks(1, measure, tmp_path, more, [Halver()]) == ["exit 0"]
    found = Measured.read(tmp_path, 1)
    assert (len(found.whole_s), len(found.local_s)) == (STEPS, STEPS)
    assert "out_of_memory" in (tmp_path / "run" / "events" / "rank_0.jsonl").read_text()


# --- Gradients that are kept local ------------------------------------------------------------


class Doubling(Averaging):
    """A user's own averaging."""

    def average(self, grads: Tensor) -> torch.futures.Future[Tensor]:
        return super().average(grads * 2)


class OneBucket:
    """Stands in for a bucket of DDP."""

    def __init__(self, grads: Tensor) -> None:
        self.grads = grads

    def buffer(self) -> Tensor:
        return self.grads


def exchanged(is_local: bool) -> list[float]:
    with World.enter("cpu", timeout_s=20) as world:
        averaging = LocalAveraging(Doubling(world))
        averaging.is_local = is_local
        bucket: Any = OneBucket(torch.tensor([1.0 + world.rank]))
        own: GradBucket = bucket
        numbers: list[float] = averaging.exchange(own).wait().tolist()
        return numbers


def test_the_users_own_averaging_is_measured() -> None:
    assert run_ranks(2, exchanged, False) == [[3.0], [3.0]]
    assert run_ranks(2, exchanged, True) == [[1.0], [2.0]]


def train_with_own_averaging(folder: Path) -> list[str]:
    """Measure a loop of its own that sets an averaging; return what each exchange was."""
    seen: list[str] = []

    class Noting(Averaging):
        def average(self, grads: Tensor) -> torch.futures.Future[Tensor]:
            seen.append("averaged")
            return super().average(grads)

    class Marking(Callback):
        def on_step_start(self, run: Any, batch: Any) -> None:
            seen.append("step")

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("LOCKSTEP_TOOL_FOLDER", str(folder))
        world = World.enter("cpu", timeout_s=20)
        callbacks = [BenchCallback(), Marking()]
        signals = stack.enter_context(StopSignals())
        run = prepare(TinyTask(), config_for(folder), world, stack, callbacks)
        run.averaging = Noting(world)
        run.replicate()
        trainer = Trainer(run, signals, stack)
        for batch in trainer.steps():
            trainer.step(batch)
        with pytest.raises(SystemExit):
            trainer.finish()
    return seen


def test_every_fourth_to_seventh_step_keeps_its_gradients(tmp_path: Path) -> None:
    write_settings(tmp_path, steps=STEPS, profiles=False)
    (first, _) = run_ranks(2, train_with_own_averaging, tmp_path)
    steps = "".join(word[0] for word in first).split("s")[1:]
    assert steps[:13] == ["a"] * 8 + [""] * 4 + ["a" + steps[12][1:]]  # 4 to warm up, 4, 4 local
    assert len(steps[12]) > 1  # buckets by themselves, at the end


# --- Commands ---------------------------------------------------------------------------------

SCRIPT = """
import pathlib
import sys

sys.path.insert(0, {tests!r})
from lockstep import RunConfig, fit
from lockstep.testing import TinyTask

fit(TinyTask(), RunConfig.parse({{"max_steps": 2, "batch": {{"batch_size": 2}}, "device": "cpu"}}))
pathlib.Path("written_after_fit").touch()
"""
OWN_LOOP = """
from lockstep import Loader, World, train_step
from lockstep.testing import TinyTask
import torch

task = TinyTask()
with World.enter("cpu") as world:
    model = task.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in Loader(task.train_data(), world, batch_size=4, epochs=1):
        train_step(task.loss, model, optimizer, batch, world)
        print("trained")
"""


def test_a_measured_command_writes_nothing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, folder = tmp_path / "place", tmp_path / "folder"
    place.mkdir()
    folder.mkdir()
    monkeypatch.chdir(place)
    script = SCRIPT.format(tests=str(Path(__file__).parent))
    words = [sys.executable, "-c", script]
    found = BenchRuns(words, folder).measure(0, STEPS, profiles=False)
    assert len(found.whole_s) == STEPS
    assert found.input_samples_per_s > 0
    assert list(place.iterdir()) == []


def test_a_loop_around_train_step_alone_is_refused(tmp_path: Path) -> None:
    runs = BenchRuns([sys.executable, "-c", OWN_LOOP], tmp_path, limit_s=60)
    with pytest.raises(LaunchError) as refused:
        runs.measure(0, STEPS)
    assert "a loop around train_step alone cannot be measured" in str(refused.value)
    assert "write the loop with prepare and a Trainer" in str(refused.value)
    assert "trained" not in (tmp_path / "as_typed" / "output.txt").read_text()


def test_a_measured_config_saves_and_evaluates_nothing(tmp_path: Path) -> None:
    config = measured_config(
        config_for(tmp_path, resume="never", epochs=3, max_steps=None), tmp_path
    )
    assert config.output_dir == str(tmp_path / "run")
    assert config.epochs is None
    assert not config.exact
    for when in (config.evaluation, config.checkpoint):
        assert when.every_epochs is None
        assert when.every_steps == config.max_steps
    assert json.loads(config.model_dump_json())["sinks"]["curves"] is False
