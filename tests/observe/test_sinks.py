"""Sinks get everything, and nothing that happens to them reaches the training."""

import builtins
import contextlib
import importlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lockstep.observe import sinks as module
from lockstep.observe.curves import draw_curves
from lockstep.observe.events import Event, EventLog
from lockstep.observe.sinks import Sink, SinkConfig, Sinks


def step_event(step: int, **fields: Any) -> Event:
    return {"event": "step", "step": step, "time": 1e9 + step, "loss": 1 / (step + 1), **fields}


class Collected(Sink):
    """A sink that remembers, and fails or waits when told to."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_broken = False
        self.is_closed = False
        self.num_flushed = 0

    def send(self, event: Event) -> None:
        self.gate.wait()
        if self.is_broken:
            raise OSError(28, "No space left on device")
        self.steps.append(event["step"])

    def flush(self) -> None:
        self.num_flushed = len(self.steps)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collected]:
    """Put a remembering sink in the place of TensorBoard."""
    sink = Collected()
    monkeypatch.setattr(module, "TensorBoardSink", lambda *_: sink)
    yield sink
    sink.gate.set()


def open_sinks(folder: Path, warnings: list[str], **config: Any) -> Sinks:
    chosen = SinkConfig(**{"curves": False, **config})
    return Sinks(chosen, folder, {"seed": 1}, resume_step=None, warn=warnings.append)


def delay_s(sinks: Sinks) -> float:
    """Return how long an event takes, all but the few the machine itself interrupted."""
    delays = []
    for step in range(500):
        began = time.perf_counter()
        sinks(step_event(step))
        delays.append(time.perf_counter() - began)
    return sorted(delays)[490]


def test_the_configuration_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValidationError):
        SinkConfig(tensorbord=True)  # type: ignore[call-arg]


def test_close_drains_what_was_queued(tmp_path: Path, collected: Collected) -> None:
    warnings: list[str] = []
    sinks = open_sinks(tmp_path, warnings, tensorboard=True)
    for step in range(1000):
        sinks(step_event(step))
    sinks.close()
    sinks.close()
    assert collected.steps == list(range(1000))
    assert collected.is_closed
    assert warnings == []


def test_what_is_queued_is_flushed_without_waiting_for_more(
    tmp_path: Path, collected: Collected
) -> None:
    sinks = open_sinks(tmp_path, [], tensorboard=True)
    for step in range(3):
        sinks(step_event(step))
    deadline = time.monotonic() + 10
    while collected.num_flushed < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert collected.num_flushed == 3
    sinks.close()


def test_a_blocked_sink_delays_neither_the_training_nor_the_end(
    tmp_path: Path, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_LIMIT", 100)
    collected.gate.clear()
    warnings: list[str] = []
    sinks = open_sinks(tmp_path, warnings, tensorboard=True)
    assert delay_s(sinks) < 0.010
    began = time.perf_counter()
    sinks.close(timeout_s=0.2)
    assert time.perf_counter() - began < 5  # it would wait for 10 s if it were not told
    assert len(warnings) == 1
    assert "did not finish in time" in warnings[0]


def test_a_slow_sink_loses_events_and_says_how_many(
    tmp_path: Path, collected: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_LIMIT", 100)
    collected.gate.clear()
    warnings: list[str] = []
    sinks = open_sinks(tmp_path, warnings, tensorboard=True)
    for step in range(1000):
        sinks(step_event(step))
    collected.gate.set()
    sinks.close()
    num_lost = 1000 - len(collected.steps)
    assert num_lost >= 899
    assert warnings == [f"TensorBoard was too slow and lost {num_lost} events"]


def test_a_failing_sink_warns_once_and_the_others_go_on(
    tmp_path: Path, collected: Collected
) -> None:
    log = EventLog(tmp_path, rank=0)
    collected.is_broken = True
    warnings: list[str] = []
    sinks = open_sinks(tmp_path, warnings, tensorboard=True, curves=True)
    log.listeners.append(sinks)
    for step in range(5):
        log.write("step", step, loss=1.0)
    sinks.close()
    assert warnings == ["TensorBoard is switched off: OSError: [Errno 28] No space left on device"]
    assert (tmp_path / "curves.png").is_file()


def test_warning_through_the_event_log_does_not_recurse(
    tmp_path: Path, collected: Collected
) -> None:
    log = EventLog(tmp_path, rank=0)
    heard: list[Event] = []
    collected.is_broken = True

    def warn(message: str) -> None:
        log.write("warning", 0, message=message)

    config = SinkConfig(tensorboard=True, curves=False)
    sinks = Sinks(config, tmp_path, {}, resume_step=None, warn=warn)
    log.listeners += [sinks, heard.append]
    for step in range(100):
        log.write("step", step)
    sinks.close()
    assert sum(event["event"] == "warning" for event in heard) == 1


def test_a_warning_that_cannot_be_given_harms_no_one(tmp_path: Path, collected: Collected) -> None:
    collected.is_broken = True

    def warn(message: str) -> None:
        raise ValueError("closed")

    config = SinkConfig(tensorboard=True, curves=False)
    sinks = Sinks(config, tmp_path, {}, resume_step=None, warn=warn)
    sinks(step_event(1))
    sinks.close()


@pytest.mark.parametrize(
    ("package", "config"),
    [("wandb", {"wandb": True}), ("torch.utils.tensorboard", {"tensorboard": True})],
)
def test_a_missing_package_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, config: dict[str, bool]
) -> None:
    really_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return really_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    warnings: list[str] = []
    sinks = open_sinks(tmp_path, warnings, **config)
    for step in range(10):
        sinks(step_event(step))
    sinks.close()
    assert len(warnings) == 1
    assert f"the package {package} is not installed" in warnings[0]


def read_tensorboard(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=True)
    accumulator.Reload()
    return accumulator


def test_tensorboard_gets_every_number_under_its_name(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (8, 4), "red").save(tmp_path / "sample.png")
    warnings: list[str] = []
    sinks = open_sinks(tmp_path, warnings, tensorboard=True)
    numbers = {"learning_rate": 1e-4, "grad_norm": 0.5, "samples_per_second": 99.0}
    sinks(step_event(1, parts={"head": 0.25}, ledger="ab12", **numbers))
    sinks({"event": "epoch", "step": 1, "time": 1e9, "epoch": 1, "loss": 0.5, "samples": 8})
    sinks({"event": "evaluation", "step": 1, "time": 1e9, "metrics": {"loss": 1.0, "ema_loss": 2}})
    sinks({"event": "picture", "step": 1, "time": 1e9, "path": "sample.png"})
    shown = {"event": "picture", "time": 1e9, "path": str(tmp_path / "sample.png")}
    sinks({**shown, "step": 2, "name": "faces"})
    sinks({"event": "picture", "step": 2, "time": 1e9, "path": "gone.png"})
    sinks.close()
    assert warnings == []
    tags = read_tensorboard(tmp_path).Tags()
    assert set(tags["scalars"]) == {
        "train/loss",
        "train/head",
        "train/learning_rate",
        "train/grad_norm",
        "train/samples_per_second",
        "train/epoch_loss",
        "val/loss",
        "val/ema_loss",
    }
    assert set(tags["images"]) == {"picture", "picture/faces"}


def test_the_tensorboard_curve_has_each_step_once_after_resumes(tmp_path: Path) -> None:
    # Killed at 12 and resumed from 8; killed at 10 and resumed from 8 again.
    for first, last, resume_step in [(1, 12, None), (9, 10, 8), (9, 15, 8)]:
        config = SinkConfig(tensorboard=True, curves=False)
        sinks = Sinks(config, tmp_path, {}, resume_step=resume_step, warn=pytest.fail)
        for step in range(first, last + 1):
            sinks(step_event(step))
        sinks.close()
    points = read_tensorboard(tmp_path).Scalars("train/loss")
    assert [point.step for point in points] == list(range(1, 16))


def test_a_restart_within_the_same_second_still_comes_second(tmp_path: Path) -> None:
    for first, last, resume_step in [(1, 12, None), (9, 15, 8)]:
        config = SinkConfig(tensorboard=True, curves=False)
        sinks = Sinks(config, tmp_path, {}, resume_step=resume_step, warn=pytest.fail)
        for step in range(first, last + 1):
            sinks(step_event(step))
        sinks.close()
        if resume_step is None:  # as if from a host that sorts last, just now
            (file,) = (tmp_path / "tensorboard").iterdir()
            file.rename(file.with_name(f"events.out.tfevents.{int(time.time())}.zzz.9.9"))
    points = read_tensorboard(tmp_path).Scalars("train/loss")
    assert [point.step for point in points] == list(range(1, 16))


def test_a_run_from_the_start_begins_a_new_tensorboard_curve(tmp_path: Path) -> None:
    for last in (9, 4):
        sinks = open_sinks(tmp_path, [], tensorboard=True)
        for step in range(last + 1):
            sinks(step_event(step))
        sinks.close()
    points = read_tensorboard(tmp_path).Scalars("train/loss")
    assert [point.step for point in points] == [0, 1, 2, 3, 4]


def test_what_was_sent_is_on_disk_before_the_end(tmp_path: Path) -> None:
    sinks = open_sinks(tmp_path, [], tensorboard=True)
    found: list[int] = []
    for step in (1, 2):
        sinks(step_event(step))
        deadline = time.monotonic() + 10
        while step not in found and time.monotonic() < deadline:
            time.sleep(0.05)
            if (tmp_path / "tensorboard").is_dir():
                read = read_tensorboard(tmp_path)
                if "train/loss" in read.Tags()["scalars"]:
                    found = [point.step for point in read.Scalars("train/loss")]
    sinks.close()
    assert found == [1, 2]


@pytest.fixture
def wandb_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start from no login at all, and end the helper process W&B would keep until exit."""
    import wandb

    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb.teardown()
    yield
    wandb.teardown()
    os.environ.pop("WANDB_SERVICE", None)


def offline_runs(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


@pytest.mark.usefixtures("wandb_process")
def test_wandb_really_runs_offline_and_keeps_its_id_across_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WANDB_TIMEOUT_S", 600.0)  # it waits for no network
    warnings: list[str] = []
    ids = []
    for resume_step in (None, 5, None):
        sinks = Sinks(
            SinkConfig(wandb=True, wandb_name="a name", curves=False),
            tmp_path,
            {"seed": 1},
            resume_step=resume_step,
            warn=warnings.append,
        )
        for step in range(6, 9):
            sinks(step_event(step))
        sinks.close()
        ids.append((tmp_path / "wandb_id").read_text().strip())
    assert ids[0] == ids[1]
    assert ids[2] != ids[0], "a run from the start is a new one"
    assert len(warnings) == 3, "\n".join(warnings)
    assert all("no login and writes offline" in warning for warning in warnings)
    import wandb

    wandb.teardown()  # its process writes behind `finish`, and has written all once it has ended
    runs = offline_runs(tmp_path)
    assert {run.name.split("-")[3] for run in runs} == set(ids)
    assert all(b"train/loss" in log.read_bytes() for run in runs for log in run.glob("*.wandb"))
    assert list(runs[0].glob("*.wandb"))


@pytest.mark.usefixtures("wandb_process")
def test_wandb_without_a_network_falls_back_to_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(module, "WANDB_TIMEOUT_S", 2.0)
    warnings: list[str] = []
    sinks = open_sinks(tmp_path, warnings, wandb=True)
    sinks(step_event(1))
    sinks.close(timeout_s=15)
    assert len(warnings) == 1, warnings
    assert "cannot be reached and writes offline" in warnings[0]
    assert len(offline_runs(tmp_path)) == 1


@pytest.mark.usefixtures("wandb_process")
def test_a_hanging_wandb_costs_the_training_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    released = threading.Event()
    monkeypatch.setattr(wandb, "init", lambda **_: released.wait())
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    warnings: list[str] = []
    sinks = open_sinks(tmp_path, warnings, wandb=True)  # W&B hangs for ever
    assert delay_s(sinks) < 0.010
    began = time.perf_counter()
    sinks.close(timeout_s=0.3)
    assert time.perf_counter() - began < 5
    released.set()
    assert warnings == ["W&B did not finish in time; its last events may be missing there"]


def test_curves_are_drawn_at_evaluations_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def draw(folder: Path, path: Path) -> Path:
        drawn.append(1)
        return draw_curves(folder, path)

    monkeypatch.setattr(module, "draw_curves", draw)
    log = EventLog(tmp_path, rank=0)
    sinks = open_sinks(tmp_path, [], curves=True)
    log.listeners.append(sinks)
    for step in range(1, 200):
        log.write("step", step, loss=1 / step, learning_rate=1e-4, samples_per_second=10.0)
        if step % 2 == 0:
            log.write("evaluation", step, metrics={"loss": 1 / step})
    sinks.close(timeout_s=20)
    assert (tmp_path / "curves.png").is_file()
    assert len(drawn) == 2, "once soon, then sparingly, and at the end"


def test_a_run_without_training_draws_no_picture(tmp_path: Path) -> None:
    warnings: list[str] = []
    open_sinks(tmp_path, warnings, curves=True).close()
    assert not (tmp_path / "curves.png").exists()
    assert warnings == []


def test_no_heavy_package_is_imported_with_the_module() -> None:
    import subprocess

    program = (
        "import sys, lockstep.observe.sinks, lockstep.observe.console\n"
        "heavy = {'torch', 'tensorboard', 'wandb', 'matplotlib', 'rich', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


# --- Forking while a sink imports ----------------------------------------------------------------


def fork_during_import(tmp_path: Path, name: str, guard: Any) -> bool:
    """Import a slow module in a thread, fork, import it there too; say whether that ever ends."""
    (tmp_path / f"{name}.py").write_text("import time; time.sleep(0.5)")
    has_begun = threading.Event()

    def load() -> None:
        with guard:
            has_begun.set()
            importlib.import_module(name)

    thread = threading.Thread(target=load)
    thread.start()
    has_begun.wait()
    time.sleep(0.1)
    child = multiprocessing.get_context("fork").Process(
        target=importlib.import_module, args=(name,)
    )
    child.start()
    child.join(5)
    has_ended = not child.is_alive()
    child.kill()
    child.join()
    thread.join()
    return has_ended


def test_a_process_forked_while_a_sink_imports_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    open_sinks(tmp_path, []).close()
    assert fork_during_import(tmp_path, "slow_and_guarded", module.importing)


def test_the_planted_fault_without_the_guard_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert not fork_during_import(tmp_path, "slow_and_bare", contextlib.nullcontext())
