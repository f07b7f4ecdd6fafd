"""Callbacks watch and extend a run: on every rank, in the same order, and through a resume."""

import importlib.util
import json
import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from lockstep import (
    Callback,
    CheckpointStore,
    Loader,
    RunConfig,
    StopSignals,
    Trainer,
    World,
    fit,
    prepare,
    read_events,
    train_step,
    unwrap,
)
from lockstep.callback import Callbacks, RunView, load_callbacks
from lockstep.custom_loop import CustomLoop
from lockstep.data.batch import StepBatch
from lockstep.errors import ConfigError
from lockstep.phases import BuildPhase
from lockstep.step.report import StepReport
from lockstep.testing import FakeWorld, TinyTask, run_ranks

NUM_STEPS = 6
EXAMPLE = Path(__file__).parents[1] / "examples" / "callbacks.py"


def config_for(folder: Path, **more: Any) -> RunConfig:
    values = {
        "output_dir": str(folder),
        "max_steps": NUM_STEPS,
        "batch": {"batch_size": 2, "global_batch_size": 4},
        "rate": {"lr": 0.05},
        "evaluation": {"every_steps": 3, "save_best": False},
        "checkpoint": {"every_steps": 2},
        "log_every": 2,
        "sinks": {"curves": False},
        "device": "cpu",
        "timeout_s": 20,
    }
    return RunConfig.parse({**values, **more})


class Witness(Callback):
    """Writes down what it is called with."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_run_start(self, run: RunView) -> None:
        self.seen.append(f"start at {run.step}")

    def on_step_start(self, run: RunView, batch: StepBatch) -> None:
        self.seen.append(f"step {run.step}")

    def on_step_end(self, run: RunView, batch: StepBatch, report: StepReport) -> None:
        self.seen.append(f"done {run.step}")

    def on_evaluation_end(self, run: RunView, metrics: Mapping[str, float]) -> None:
        self.seen.append(f"evaluated {sorted(metrics)}")

    def on_checkpoint_saved(self, run: RunView, path: Path) -> None:
        assert (path / "manifest.json").exists()
        self.seen.append(f"saved {path.name}")

    def on_run_end(self, run: RunView, result: Any) -> None:
        self.seen.append(f"end at {result.step}")


def witnessed(folder: Path) -> list[str]:
    witness = Witness()
    fit(
        TinyTask(),
        config_for(folder, checkpoint={"every_steps": 2, "background": False}),
        [witness],
    )
    return witness.seen


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_rank_sees_the_same_in_the_same_order(num_ranks: int, tmp_path: Path) -> None:
    seen = run_ranks(num_ranks, witnessed, tmp_path)
    assert seen == [seen[0]] * num_ranks
    assert seen[0][:3] == ["start at 0", "step 0", "done 1"]
    assert [line for line in seen[0] if line.startswith("saved")] == [
        f"saved step_0000000{step}" for step in (2, 4, 6)
    ]
    assert seen[0].count("evaluated ['heavy', 'loss']") == 2
    assert seen[0][-2:] == ["saved step_00000006", "end at 6"]


def test_a_checkpoint_saved_in_the_background_is_announced(tmp_path: Path) -> None:
    witness = Witness()
    fit(TinyTask(), config_for(tmp_path), [witness])
    assert "saved step_00000006" in witness.seen


class Counter(Callback):
    """Counts steps over resumes, and stops after so many."""

    def __init__(self, most: int = 99, save: bool = True) -> None:
        self.num = 0
        self.most = most
        self.save = save

    def on_step_end(self, run: RunView, batch: StepBatch, report: StepReport) -> None:
        self.num += 1
        run.log("counter/steps", self.num)
        if self.num == self.most:
            run.stop(f"{self.num} steps are enough", save=self.save)

    def state_dict(self) -> dict[str, Any]:
        return {"num": self.num}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num = state["num"]


def counted(folder: Path, most: int) -> list[Any]:
    counter = Counter(most)
    result = fit(TinyTask(), config_for(folder), [counter])
    return [result.step, result.exit_code, result.stop_reason, counter.num]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_callback_stops_a_run_and_resumes_with_its_state(num_ranks: int, tmp_path: Path) -> None:
    stopped = run_ranks(num_ranks, counted, tmp_path, 3)
    assert stopped == [[3, 0, "3 steps are enough", 3]] * num_ranks
    (stop,) = [e for e in read_events(tmp_path, raw=True) if e["event"] == "stop"]
    assert stop["reason"] == "3 steps are enough"
    assert CheckpointStore(tmp_path / "checkpoints", recipe="tiny").latest()[0].step == 3  # type: ignore[union-attr]
    assert run_ranks(num_ranks, counted, tmp_path, 99) == [[NUM_STEPS, 0, "", 6]] * num_ranks


def stopped_by_one(folder: Path) -> list[Any]:
    most = 2 if os.environ["RANK"] == "1" else 99
    return counted(folder, most)[:3]


def test_one_rank_that_wants_to_stop_stops_all(tmp_path: Path) -> None:
    assert run_ranks(2, stopped_by_one, tmp_path) == [[2, 0, "2 steps are enough"]] * 2


class Logger(Callback):
    """Logs numbers that differ between ranks."""

    def on_step_end(self, run: RunView, batch: StepBatch, report: StepReport) -> None:
        rank = run.world.rank
        run.log("rank", float(rank))
        run.log("loss", report.loss)
        if rank == 1:
            run.log("only_rank_1", 5.0)


def log(folder: Path) -> None:
    fit(TinyTask(), config_for(folder), [Logger()])


def test_logged_numbers_are_means_over_calls_and_ranks(tmp_path: Path) -> None:
    run_ranks(2, log, tmp_path)
    lines = [e for e in read_events(tmp_path) if e["event"] == "step"]
    assert [line["step"] for line in lines] == [2, 4, 6]
    for line in lines:
        assert line["logged"]["rank"] == 0.5
        assert line["logged"]["only_rank_1"] == 5.0
        assert line["logged"]["loss"] == pytest.approx(line["loss"], rel=0.5)


def test_a_run_without_callbacks_logs_and_saves_nothing_more(tmp_path: Path) -> None:
    fit(TinyTask(), config_for(tmp_path))
    assert not any("logged" in event for event in read_events(tmp_path))
    checkpoint, _ = CheckpointStore(tmp_path / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    assert "callbacks" not in checkpoint.parts


class Vectors(Callback):
    """Logs three numbers at once, on one rank."""

    def on_step_end(self, run: RunView, batch: StepBatch, report: StepReport) -> None:
        if run.world.rank == 1 and run.step == 3:
            run.log("v", torch.ones(3))


class Unstated(Callback):
    """Has no state to save, on one rank."""

    def state_dict(self) -> dict[str, Any]:
        if os.environ["RANK"] == "1":
            raise ValueError("no state")
        return {}


class UnstatedTask(TinyTask):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.num_calls = 0

    def state(self) -> dict[str, Any]:
        self.num_calls += 1
        if os.environ["RANK"] == "1" and (self.when == "first" or self.num_calls > 2):
            raise ValueError("no state")
        return {}


def end(folder: Path, task: TinyTask, *callbacks: Callback) -> list[str]:
    try:
        fit(task, config_for(folder, checkpoint={"every_steps": 2}), callbacks)
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", []))
        return [type(error).__name__, f"{error} {notes}"]
    return ["none", ""]


def test_several_numbers_in_one_log_call_are_refused_on_all_ranks(tmp_path: Path) -> None:
    ended = run_ranks(2, end, tmp_path, TinyTask(), Vectors())
    for kind, said in ended:
        assert kind == "ConfigError"
        assert "run.log('v', ...) got a tensor of shape (3,)" in said
    checkpoint, _ = CheckpointStore(tmp_path / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    assert checkpoint.step == 3


@pytest.mark.parametrize(
    ("task", "callbacks", "name"),
    [
        (TinyTask(), [Unstated()], "callback Unstated.state_dict"),
        (UnstatedTask("first"), [], "UnstatedTask.state"),
        (UnstatedTask("later"), [], "UnstatedTask.state"),
    ],
)
def test_a_state_that_one_rank_cannot_save_ends_all_ranks(
    task: TinyTask, callbacks: list[Callback], name: str, tmp_path: Path
) -> None:
    (first, said_first), (second, said) = run_ranks(2, end, tmp_path, task, *callbacks)
    assert (first, second) == ("OtherRankError", "ValueError")
    for text in (said_first, said):
        assert "no state" in text
        assert f"in {name}" in text


class Faulty(Callback):
    """Raises in one method, on some ranks, once the run is at step 3."""

    def __init__(self, method: str, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

        def fail(run: Any, *_: Any) -> None:
            if run.world.rank in ranks and run.step >= 3:
                raise ValueError(f"planted in {method}")

        setattr(self, method, fail)


def fail(folder: Path, method: str, ranks: tuple[int, ...]) -> list[str]:
    try:
        fit(TinyTask(), config_for(folder), [Faulty(method, ranks)])
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", []))
        return [type(error).__name__, f"{error} {notes}"]
    return ["none", ""]


@pytest.mark.parametrize(
    "method",
    [
        "on_step_start",
        "on_step_end",
        "on_evaluation_end",
        "on_checkpoint_saved",
        "on_run_end",
    ],
)
@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_a_callback_that_raises_ends_the_run_on_all_ranks(
    method: str, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    (first, said_first), (second, said) = run_ranks(2, fail, tmp_path, method, ranks)
    assert second == "ValueError"
    assert f"planted in {method}" in said
    assert f"in callback Faulty.{method}" in said
    assert first == ("ValueError" if 0 in ranks else "OtherRankError")
    assert f"planted in {method}" in said_first
    checkpoint, _ = CheckpointStore(tmp_path / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    assert checkpoint.step >= 3  # the steps before are saved


class Summing(Callback):
    """Sums something over ranks after each step."""

    def __init__(self, communicates: bool, fails_on: int | None = None) -> None:
        self.communicates = communicates
        self.fails_on = fails_on

    def on_step_end(self, run: Any, batch: Any, report: Any) -> None:
        if run.step == 3 and run.world.rank == self.fails_on:
            raise ValueError("planted in on_step_end")
        run.world.all_sum(torch.ones(3))


def fail_beside(folder: Path, callbacks: list[Callback]) -> list[str]:
    try:
        fit(TinyTask(), config_for(folder), callbacks)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


@pytest.mark.parametrize(
    "callbacks",
    [
        [Faulty("on_step_end", (1,)), Summing(communicates=True)],
        [Summing(communicates=True), Faulty("on_step_end", (1,))],
        [Summing(communicates=True, fails_on=1)],
    ],
    ids=["before", "after", "itself"],
)
def test_a_callback_that_raises_beside_one_that_communicates_ends_the_run_on_all_ranks(
    callbacks: list[Callback], tmp_path: Path
) -> None:
    first, second = run_ranks(2, fail_beside, tmp_path, callbacks)
    assert second == ["ValueError", "planted in on_step_end"]
    assert first[0] == "OtherRankError"
    assert "planted in on_step_end" in first[1]
    checkpoint, _ = CheckpointStore(tmp_path / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    assert checkpoint.step == 3


def test_an_error_that_all_ranks_share_is_raised_before_one_of_a_single_rank(
    tmp_path: Path,
) -> None:
    """Otherwise rank 1, whose first error is its own, would ask the others for theirs."""
    callbacks = [Faulty("on_step_end", (1,)), Summing(communicates=True, fails_on=0)]
    first, second = run_ranks(2, fail_beside, tmp_path, callbacks)
    assert first == ["ValueError", "planted in on_step_end"]
    assert second[0] == "OtherRankError"
    assert "rank 0: ValueError: planted in on_step_end" in second[1]


class Unready(Callback):
    """Raises on rank 1 before the run has begun, or while it is restored."""

    def __init__(self, method: str = "") -> None:
        if not method:
            fail_on_rank_1()
        self.method = method

    def configure(self, task: Any, config: RunConfig, world: Any) -> RunConfig:
        if self.method == "configure":
            fail_on_rank_1()
        return config

    def state_dict(self) -> dict[str, Any]:
        return {"some": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.method == "load_state_dict":
            fail_on_rank_1()


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise RuntimeError("planted")


class UnreadyTask(TinyTask):
    def load_state(self, state: Mapping[str, Any]) -> None:
        fail_on_rank_1()


@pytest.mark.parametrize(
    ("task", "methods", "place"),
    [
        (TinyTask(), ["configure"], "in callback Unready.configure"),
        (TinyTask(), [], f"in LOCKSTEP_CALLBACKS={__name__}:Unready"),
        (TinyTask(), ["load_state_dict"], "in callback Unready.load_state_dict"),
        (UnreadyTask(), ["none"], ""),
    ],
    ids=["configure", "constructor", "load_state_dict", "task"],
)
def test_a_callback_or_task_that_one_rank_cannot_set_up_ends_all_ranks(
    task: TinyTask,
    methods: list[str],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit(TinyTask(), config_for(tmp_path, max_steps=2), [Unready("none")])
    if not methods:
        monkeypatch.setenv("LOCKSTEP_CALLBACKS", f"{__name__}:Unready")
    (first, said_first), (second, said) = run_ranks(2, end, tmp_path, task, *map(Unready, methods))
    assert (first, second) == ("OtherRankError", "RuntimeError")
    assert "rank 1: RuntimeError: planted" in said_first
    assert place in said_first
    assert place in said


def test_a_callback_that_communicates_without_saying_so_is_refused(tmp_path: Path) -> None:
    for kind, text in run_ranks(2, fail_beside, tmp_path, [Summing(communicates=False)]):
        assert kind == "ConfigError"
        assert "callback Summing calls a collective in on_step_end" in text
        assert "try: set communicates = True in class Summing" in text
    assert run_ranks(1, fail_beside, tmp_path / "alone", [Summing(communicates=False)]) == [
        ["none", ""]
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_whose_start_failed_is_not_trained_on(num_ranks: int, tmp_path: Path) -> None:
    run_ranks(num_ranks, fail, tmp_path, "on_step_start", (num_ranks - 1,))
    checkpoint, _ = CheckpointStore(tmp_path / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    assert checkpoint.step == 3  # it raised before the fourth


def differ(folder: Path) -> str:
    callbacks = [Witness()] if os.environ["RANK"] == "0" else []
    try:
        fit(TinyTask(), config_for(folder), callbacks)
    except ConfigError as error:
        return f"{error.problem}; {error.remedy}"
    return ""


def test_ranks_with_different_callbacks_are_refused(tmp_path: Path) -> None:
    """They would meet each other's votes at different places."""
    for said in run_ranks(2, differ, tmp_path):
        assert "ranks 0 and 1 see different callbacks: Witness vs none" in said
        assert "pass the same callbacks on every rank" in said


def save_slowly(folder: Path) -> list[str]:
    plain = CheckpointStore.save

    def slow(*args: Any) -> Path:
        time.sleep(0.1)
        return plain(*args)

    CheckpointStore.save = slow  # type: ignore[method-assign]
    witness = Witness()
    fit(TinyTask(), config_for(folder, checkpoint={"every_steps": 1, "keep_last": 9}), [witness])
    return [line for line in witness.seen if line.startswith("saved")]


def test_every_checkpoint_is_announced_although_the_disk_is_slow(tmp_path: Path) -> None:
    saved = [f"saved step_0000000{step}" for step in range(1, NUM_STEPS + 1)]
    assert run_ranks(2, save_slowly, tmp_path) == [saved] * 2


class Shorter(Callback):
    """Overrides a setting from outside."""

    def configure(self, task: Any, config: RunConfig, world: Any) -> RunConfig:
        return config.with_overrides(["max_steps=2"])


def test_a_callback_is_attached_by_a_variable_and_may_change_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CALLBACKS", f"{__name__}:Shorter")
    assert fit(TinyTask(), config_for(tmp_path)).step == 2
    assert json.loads((tmp_path / "config.json").read_text())["config"]["max_steps"] == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:Thing", "No module named 'no_such_module'"),
        ("json:NoSuchThing", "has no attribute 'NoSuchThing'"),
        ("json:JSONDecoder", "JSONDecoder is not a subclass of lockstep.Callback"),
        ("json", "has no attribute ''"),
        (".x:Y", "the 'package' argument is required"),
    ],
)
def test_what_cannot_be_attached_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_callbacks(name)


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a lockstep.Callback"):
        Callbacks([Witness])  # type: ignore[list-item]


def test_a_method_that_is_never_called_is_refused() -> None:
    class Epochs(Callback):
        def on_epoch_end(self, run: RunView) -> None: ...

    said = "Epochs has a method on_epoch_end, which lockstep never calls"
    with pytest.raises(ConfigError, match=said) as caught:
        Callbacks([Epochs()])
    assert "on_evaluation_end, on_run_end" in caught.value.remedy


@pytest.mark.parametrize("callbacks", [Witness(), None])
def test_callbacks_that_are_not_a_list_are_refused(callbacks: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="callbacks is .*, not a list"):
        fit(TinyTask(), config_for(tmp_path), callbacks)


class Emptying(Callback):
    def on_step_start(self, run: RunView, batch: StepBatch) -> None:
        if run.step == 3 and run.world.is_first:
            batch.micro_batches.clear()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_callback_that_leaves_no_micro_batch_is_refused(num_ranks: int, tmp_path: Path) -> None:
    for kind, said in run_ranks(num_ranks, end, tmp_path, TinyTask(), Emptying()):
        assert kind == "ConfigError"
        assert "removed every micro-batch" in said


class Interrupting(Callback):
    def on_checkpoint_saved(self, run: RunView, path: Path) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_after_everything_was_saved_is_not_reported_as_a_loss(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 2, "evaluation": {"every_steps": 9}}
    with pytest.raises(KeyboardInterrupt):
        fit(TinyTask(), config_for(tmp_path, **settings), [Interrupting()])


class Rated(Callback):
    """Sets the learning rate at step 3."""

    def __init__(self, method: str, rate: Any) -> None:
        def set_rate(run: Any, *_: Any) -> None:
            if run.step == 3:
                run.optimizer.param_groups[0]["lr"] = rate

        setattr(self, method, set_rate)


@pytest.mark.parametrize("method", ["on_step_start", "on_step_end"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_learning_rate_that_would_be_overridden_is_refused(
    num_ranks: int, method: str, tmp_path: Path
) -> None:
    for kind, said in run_ranks(num_ranks, end, tmp_path, TinyTask(), Rated(method, 0.5)):
        assert kind == "ConfigError"
        assert "parameter group 0 was set to 0.5" in said
        assert "had set 0.05" in said
    checkpoint, _ = CheckpointStore(tmp_path / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    assert checkpoint.step == 3
    fit(TinyTask(), config_for(tmp_path))


class Repairing(TinyTask):
    """A non-finite step, before which a warm-up has set another rate at every step."""

    def loss(self, model: Any, batch: Any, context: Any) -> Any:
        made = super().loss(model, batch, context)
        is_bad = context.training and context.step == 3
        return replace(made, loss_sum=made.loss_sum * (float("nan") if is_bad else 1))


def test_a_rewind_in_a_warm_up_is_not_taken_for_another_rate(tmp_path: Path) -> None:
    schedule = {"warmup_epochs": 0, "warmup_steps": 6}
    config = config_for(tmp_path, on_non_finite="rewind", schedule=schedule)
    assert fit(Repairing(), config).step == NUM_STEPS


def test_states_are_kept_by_class_and_number() -> None:
    first, second, other = Counter(), Counter(), Witness()
    first.num, second.num = 1, 2
    states = Callbacks([first, other, second]).state_dict()
    assert states == {"Counter": {"num": 1}, "Counter_2": {"num": 2}}
    again = Counter()
    assert Callbacks([again]).load_state_dict(states) == ["Counter_2"]
    assert again.num == 1


# --- The example ---------------------------------------------------------------------------------


def example() -> Any:
    spec = importlib.util.spec_from_file_location("callbacks_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(folder: Path, patience: int) -> list[Any]:
    module = example()
    os.chdir(folder)
    config = RunConfig(output_dir="run", epochs=4, log_every=4, device="cpu")
    config = config.with_overrides(["sinks.curves=false", "rate.lr=1e-30"])  # so it never improves
    callbacks = [
        module.EarlyStopping(patience=patience),
        module.LearningRates(),
        module.GradientHistogram(),
        module.InputNoise(),
        module.LibraryLogger(module.write_line, every=2),
        module.TextLog(every=2),
    ]
    result = fit(module.Waves(), config, callbacks)
    return [result.step, result.stop_reason]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_examples_of_the_documentation_work(num_ranks: int, tmp_path: Path) -> None:
    stopped = run_ranks(num_ranks, run_example, tmp_path, 2)
    assert stopped == [stopped[0]] * num_ranks
    step, reason = stopped[0]
    assert "has not improved" in reason
    assert run_ranks(num_ranks, run_example, tmp_path, 2) == stopped  # and stays stopped
    logged = next(e["logged"] for e in read_events(tmp_path / "run") if "logged" in e)
    assert logged["learning_rate/group_0"] == 1e-30
    shares = [value for name, value in logged.items() if name.startswith("gradient/")]
    assert len(shares) == 10
    assert sum(shares) == pytest.approx(1)
    lines = (tmp_path / "metrics.txt").read_text().splitlines()
    assert lines[0].startswith("2 {'train/loss'")
    assert any(line.startswith(f"{step // 3} {{'held_out/loss'") for line in lines)


def train_with_noise(folder: Path, max_steps: int) -> list[float]:
    module = example()
    config = config_for(folder, max_steps=max_steps, log_every=1)
    fit(module.Waves(), config, [module.InputNoise(scale=1.0)])
    return [event["loss"] for event in read_events(folder) if event["event"] == "step"]


def test_the_noise_of_the_example_is_the_same_on_two_ranks_and_after_a_resume(
    tmp_path: Path,
) -> None:
    losses = train_with_noise(tmp_path / "one", NUM_STEPS)
    run_ranks(2, train_with_noise, tmp_path / "two", NUM_STEPS // 2)
    resumed, _ = run_ranks(2, train_with_noise, tmp_path / "two", NUM_STEPS)
    assert resumed == pytest.approx(losses, rel=1e-5)


def test_the_text_log_of_a_run_that_was_killed_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "losses.txt"
    path.write_text("7 0.5\n")  # of an earlier run
    text_log = example().TextLog
    fit(TinyTask(), config_for(tmp_path / "run", max_steps=4), [text_log(path, every=1)])
    before = path.read_text()
    path.write_text(before + "5 0.25\n6 0.125\n1")  # steps after the last save, and a cut line
    fit(TinyTask(), config_for(tmp_path / "run"), [text_log(path, every=1)])
    assert path.read_text().startswith(before)
    steps = [line.split()[0] for line in path.read_text().splitlines()]
    assert steps == ["1", "2", "3", "4", "5", "6"]


def test_the_documentation_shows_the_examples_as_they_are() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "callbacks.md").read_text()
    shown = re.findall(r"^```python\n(class .*?)^```", page, re.MULTILINE | re.DOTALL)
    code = EXAMPLE.read_text()
    classes = set(re.findall(r"^class (\w+)\(Callback\)", code, re.MULTILINE))
    assert {re.match(r"class (\w+)", block)[1] for block in shown} == classes  # type: ignore[index]
    assert all(f"\n{block}" in code for block in shown)


# --- A loop around train_step, without a trainer -----------------------------------


class Unsaved(Callback):
    """Changes the weights on one rank, and stops there without a checkpoint."""

    def on_step_end(self, run: RunView, batch: StepBatch, report: StepReport) -> None:
        if run.step == 3 and run.world.rank == run.world.size - 1:
            for parameter in run.model.parameters():
                parameter.data.add_(run.world.rank + 1)
            run.stop("looked at", save=False)


def stopped_unsaved(folder: Path) -> list[Any]:
    result = fit(TinyTask(), config_for(folder, evaluation={"every_steps": 99}), [Unsaved()])
    return [result.step, result.exit_code, result.stop_reason]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_callback_stops_a_run_without_its_last_checkpoint(num_ranks: int, tmp_path: Path) -> None:
    """One rank asks for it: its weights differ, and a save would be refused."""
    results = run_ranks(num_ranks, stopped_unsaved, tmp_path)
    assert results == [[3, 0, "looked at"]] * num_ranks
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert saved == ["step_00000002"]


@pytest.mark.parametrize("step", [2, 3, 6])
def test_a_stop_without_a_checkpoint_saves_none_where_one_is_due(step: int, tmp_path: Path) -> None:
    """Step 2 is due to be saved, step 3 to be evaluated, and step 6 is the last."""
    witness, stopping = Witness(), Counter(step, save=False)
    fit(TinyTask(), config_for(tmp_path), [witness, stopping])
    saved = [said for said in witness.seen if said.startswith("saved")]
    assert saved == [f"saved step_{number:08}" for number in range(2, step, 2)]
    assert sum(said.startswith("evaluated") for said in witness.seen) == (step - 1) // 3


class Ranked(Callback):
    """Keeps a state that differs between ranks."""

    rank = 7

    def on_run_start(self, run: RunView) -> None:
        self.rank = run.world.rank

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "ranks": torch.tensor([self.rank])}


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_checkpoint_has_the_states_of_the_first_rank(is_sharded: bool, tmp_path: Path) -> None:
    config = config_for(tmp_path, checkpoint={"every_steps": 2, "sharded": is_sharded})
    run_ranks(2, fit, TinyTask(), config, [Ranked()])
    checkpoint, _ = CheckpointStore(tmp_path / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    (state,) = checkpoint.load("callbacks").values()
    assert (state["rank"], state["ranks"].tolist()) == (0, [0])


class Changing(Callback):
    """Sets another setting on the second rank."""

    def on_run_start(self, run: RunView) -> None:
        if run.world.rank == 1:
            run.config = run.config.with_overrides(["evaluation.every_steps=2"])


def test_a_start_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    for _, text in run_ranks(2, fail_beside, tmp_path, [Changing()]):
        assert "ranks 0 and 1 see different settings" in text
        assert "try: set the same run.config and run.held_out on every rank" in text


class Interrupted(TinyTask):
    """Is asked to stop whenever it evaluates."""

    num_evaluations = 0

    def evaluate(self, *args: Any) -> Any:
        self.num_evaluations += 1
        os.kill(os.getpid(), signal.SIGTERM)
        return super().evaluate(*args)


def fail_owing_an_evaluation(folder: Path) -> list[Any]:
    """Stop in the first evaluation; resume with a callback that fails before it is repeated."""
    fit(Interrupted(), config_for(folder))
    task = Interrupted()
    try:
        fit(task, config_for(folder), [Faulty("on_run_start", (1,))])
    except Exception as error:
        return [type(error).__name__, task.num_evaluations]
    return ["none", task.num_evaluations]


def test_a_run_whose_start_failed_does_not_evaluate(tmp_path: Path) -> None:
    assert run_ranks(2, fail_owing_an_evaluation, tmp_path) == [
        ["OtherRankError", 0],
        ["ValueError", 0],
    ]


class Observer(Witness):
    """Notes what a custom loop calls; may stop it or raise on one rank, and counts over resumes."""

    def __init__(self, stop_at: int = -1, fails_in: str = "", rank: int = 1) -> None:
        super().__init__()
        self.stop_at, self.fails_in, self.rank = stop_at, fails_in, rank
        self.num_steps = 0

    def on_step_end(self, run: RunView, batch: StepBatch, report: StepReport) -> None:
        super().on_step_end(run, batch, report)
        self.num_steps += 1
        run.log("loss", report.loss)
        if run.step == self.stop_at and run.world.rank == self.rank % run.world.size:
            run.stop("enough")

    def on_run_end(self, run: RunView, result: Any) -> None:
        self.seen.append(f"end at {result.step}: {result.stop_reason}")

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_steps = state["num_steps"]

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("on_") and name == self.fails_in:

            def fail(run: RunView, *args: Any) -> None:
                if run.world.rank == self.rank % run.world.size:
                    raise ValueError("planted")

            return fail
        return value


def custom_loop(folder: Path, observer: Callback | None = None) -> list[Any]:
    """Two epochs of two steps, saved after each epoch; the validation loader is no training."""
    world = World.enter("cpu", 20, callbacks=[observer] if observer else [])
    torch.manual_seed(0)
    model = world.replicate(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    samples = [torch.full((2,), float(number)) for number in range(8 * world.size)]
    loader = Loader(samples, world, batch_size=4, epochs=2)
    store = CheckpointStore(folder / "store")
    store.load_into(model=model, optimizer=optimizer, loader=loader)
    began_at, steps = loader.step, []
    for batch in loader:
        train_step(square, model, optimizer, batch, world)
        steps.append(batch.step)
        if loader.at_epoch_end:
            list(Loader(samples, world, batch_size=4, epochs=1))
            store.save_from(world, loader.step, model=model, optimizer=optimizer, loader=loader)
    seen = observer.seen if isinstance(observer, Witness) else []
    count = getattr(observer, "num_steps", None)
    weights = [p.tolist() for p in unwrap(model).parameters()]
    store.save_from(world, loader.step, model=model, optimizer=optimizer, loader=loader)
    return [seen, steps, count, weights, began_at]


def square(model: Any, data: torch.Tensor, context: Any) -> torch.Tensor:
    return model(data).square().mean()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_custom_loop_calls_its_callbacks_on_every_rank(num_ranks: int, tmp_path: Path) -> None:
    told = run_ranks(num_ranks, partial(custom_loop, observer=Observer()), tmp_path)
    silent = run_ranks(num_ranks, custom_loop, tmp_path / "silent")
    expected = ["start at 0", "step 0", "done 1", "step 1", "done 2", "saved step_00000002"]
    expected += ["step 2", "done 3", "step 3", "done 4", "saved step_00000004", "end at 4: "]
    for rank, (seen, steps, count, weights, _) in enumerate(told):
        assert seen == expected
        assert (steps, count) == ([0, 1, 2, 3], 4)
        assert weights == silent[rank][3], "watching changed the weights"


def test_a_custom_loop_has_every_attribute_that_callbacks_are_promised() -> None:
    loop: RunView = CustomLoop(FakeWorld(), Callbacks())
    promised = {*get_type_hints(RunView), *(n for n in vars(RunView) if not n.startswith("_"))}
    assert {"config", "held_out", "is_custom_loop", "step", "stop"} < promised
    assert [name for name in promised if not hasattr(loop, name)] == []
    assert loop.is_custom_loop
    assert (loop.task, loop.config, loop.held_out) == (None, None, None)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_custom_loop_is_stopped_by_one_rank_and_resumes(num_ranks: int, tmp_path: Path) -> None:
    stopping = partial(custom_loop, observer=Observer(stop_at=2))
    for seen, steps, *_ in run_ranks(num_ranks, stopping, tmp_path):
        assert steps == [0, 1]
        assert seen.count("end at 2: enough") == 1
    for seen, steps, count, _, began_at in run_ranks(
        num_ranks, partial(custom_loop, observer=Observer()), tmp_path
    ):
        assert (steps, count, began_at) == ([2, 3], 4, 2)
        assert seen[0] == "start at 2"


class Kept(Callback):
    """Keeps the run, for a loop that stops it between two steps."""

    def on_run_start(self, run: RunView) -> None:
        self.run = run


def loop_that_stops_itself(folder: Path | None) -> list[int]:
    callback = Kept()
    world = World.enter("cpu", 20, callbacks=[callback])
    model = world.replicate(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = []
    for _ in range(2):
        loader = Loader([torch.ones(2)] * 40, world, batch_size=4, epochs=1)
        for batch in loader:
            train_step(square, model, optimizer, batch, world)
            steps.append(batch.step)
            if batch.step == 1 and world.is_first:  # it alone validates
                callback.run.stop("no better")
            if batch.step == 1 and folder:
                CheckpointStore(folder).save_from(world, loader.step, model=model)
        folder = None
    return steps


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_custom_loop_that_one_rank_stops_between_steps_ends_on_all(
    num_ranks: int, tmp_path: Path
) -> None:
    """Ranks agree on it in the next step, or in a save."""
    stopped = run_ranks(num_ranks, loop_that_stops_itself, None)
    assert stopped == [[0, 1, 2, 0, 1, 2]] * num_ranks
    stopped = run_ranks(num_ranks, loop_that_stops_itself, tmp_path)
    assert stopped == [[0, 1, 0, 1, 2]] * num_ranks


def test_a_state_that_one_rank_of_a_custom_loop_cannot_save_ends_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no state") as raised:
        run_ranks(2, partial(custom_loop, observer=Unstated()), tmp_path)
    assert "OtherRankError" in str(raised.value), "rank 0 was not told"


@pytest.mark.parametrize(
    "method", ["on_run_start", "on_step_start", "on_step_end", "on_checkpoint_saved", "on_run_end"]
)
def test_a_callback_that_raises_ends_a_custom_loop_on_all_ranks(
    method: str, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)planted.*") as raised:
        run_ranks(2, partial(custom_loop, observer=Observer(fails_in=method)), tmp_path)
    assert "OtherRankError" in str(raised.value), "rank 0 was not told"


def outer_and_inner(folder: Path) -> list[str]:
    observer = Observer()
    world = World.enter("cpu", 20, callbacks=[observer])
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        run = prepare(TinyTask(), config_for(folder), world, stack)
        trainer = Trainer(run, signals, stack)
        for batch in trainer.steps():
            trainer.record_step(
                train_step(run.task.loss, run.model, run.optimizer, batch, world), batch
            )
        trainer.finish()
    assert world.custom_loop is not None
    return observer.seen


def two_loops(folder: Path) -> list[Any]:
    """The first loop is stopped after two steps; the second should not be."""
    observer = Observer(stop_at=2)
    world = World.enter("cpu", 20, callbacks=[observer])
    model = world.replicate(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = [torch.full((2,), float(number)) for number in range(16)]
    steps = []
    for _ in range(2):
        for batch in Loader(samples, world, batch_size=4, epochs=1):
            train_step(square, model, optimizer, batch, world)
            steps.append(batch.step)
        observer.stop_at = -1
    return [steps, [said for said in observer.seen if "at" in said]]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_stop_in_one_loop_leaves_the_next_alone(num_ranks: int, tmp_path: Path) -> None:
    per_loop = 4 // num_ranks
    for steps, seen in run_ranks(num_ranks, two_loops, tmp_path):
        assert steps == [0, 1, *range(per_loop)]
        assert seen == ["start at 0", "end at 2: enough", "start at 0", f"end at {per_loop}: "]


def test_the_callbacks_of_a_world_are_called_once_in_a_run(tmp_path: Path) -> None:
    (seen,) = run_ranks(1, outer_and_inner, tmp_path)
    steps = [said for said in seen if said.startswith("done")]
    assert steps == [f"done {step + 1}" for step in range(NUM_STEPS)]


def test_a_custom_loop_is_rehearsed_in_two_epochs_of_two_steps_beside_the_real_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_REHEARSAL", "1")
    monkeypatch.setenv("LOCKSTEP_REHEARSAL_FOLDER", str(tmp_path / "rehearsal"))
    ((_, steps, _, _, _),) = run_ranks(1, many_samples, tmp_path)
    assert steps == [0, 1, 2, 3]
    assert not (tmp_path / "store").exists()
    assert list((tmp_path / "rehearsal").rglob("step_00000004"))
    ((_, steps, _, _, began_at),) = run_ranks(1, many_samples, tmp_path)
    assert (steps, began_at) == ([], 4)


def many_samples(folder: Path) -> list[Any]:
    world = World.enter("cpu", 20)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = Loader([torch.ones(2)] * 500, world, batch_size=4, epochs=90)
    store = CheckpointStore(folder / "store")
    store.load_into(model=model, optimizer=optimizer, loader=loader)
    began_at, steps = loader.step, []
    for batch in loader:
        train_step(square, model, optimizer, batch, world)
        steps.append(batch.step)
    store.save_from(world, loader.step, model=model, optimizer=optimizer, loader=loader)
    return [[], steps, None, None, began_at]


def listen(folder: Path) -> list[Any]:
    heard: list[tuple[str, bool]] = []
    world = World.enter("cpu", 20)
    world.phase.listeners.append(lambda phase, begins: heard.append((phase, begins)))
    fit_with(world, folder)
    return heard


def fit_with(world: World, folder: Path) -> None:
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        run = prepare(TinyTask(), config_for(folder), world, stack)
        trainer = Trainer(run, signals, stack)
        for batch in trainer.steps():
            trainer.step(batch)
        trainer.finish()


def test_listeners_are_told_of_every_phase_in_order(tmp_path: Path) -> None:
    (heard,) = run_ranks(1, listen, tmp_path)
    begun = [phase for phase, begins in heard if begins]
    assert begun.count("update") == NUM_STEPS
    assert begun.count("evaluate") == 2
    assert begun.count("save") == 3
    assert begun[:5] == list(get_args(BuildPhase))
    assert begun[5:11] == ["data", "forward", "backward", "forward", "backward", "exchange"]
    depth = 0
    for _, begins in heard:
        depth += 1 if begins else -1
        assert depth >= 0
    assert depth == 0
