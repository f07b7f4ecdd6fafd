"""Faults of the input change no bit of a run, and a run whose input changed is not taken up."""

import hashlib
import json
import logging
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import CheckpointStore, PartialLoss, RunConfig, fit, read_events
from lockstep.checkpoint import Checkpoint
from lockstep.data import workers
from lockstep.errors import ConfigError
from lockstep.run import resume as resuming
from lockstep.run.resume import changed_settings, flat_settings, is_among
from lockstep.task import Context
from lockstep.testing import TinyTask, run_ranks


class NoisyData:
    """The tiny task's samples, augmented from a global generator; some may be bad."""

    def __init__(self, samples: list[dict[str, Tensor]], bad: tuple[int, ...] = ()) -> None:
        self.samples, self.bad = samples, bad

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index in self.bad:
            raise OSError("truncated file")
        sample = self.samples[index]
        return {**sample, "x": sample["x"] + torch.rand(5, dtype=torch.float64)}


class FaultyTask(TinyTask):
    """Sends a signal to its loader workers at some steps of training and of evaluation."""

    def __init__(
        self,
        in_training: tuple[int, ...] = (),
        in_evaluation: tuple[int, ...] = (),
        number: int = signal.SIGKILL,
        bad: tuple[int, ...] = (),
    ) -> None:
        super().__init__(num_held_out=24)
        self.steps = {True: set(in_training), False: set(in_evaluation)}
        self.number, self.bad = number, bad
        self.hits: list[int] = []

    def train_data(self) -> Any:
        return NoisyData(super().train_data(), self.bad)

    def eval_data(self) -> Any:
        return NoisyData(super().eval_data())

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        if context.step in self.steps[context.training]:
            self.steps[context.training].discard(context.step)
            for worker in multiprocessing.active_children():
                self.hits.append(worker.pid or 0)
                os.kill(worker.pid or 0, self.number)
        return super().loss(model, batch, context)


def config_for(folder: Path, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 12,
        "batch": {"batch_size": 2, "global_batch_size": 8},
        "rate": {"lr": 0.02},
        "evaluation": {"every_steps": 6, "save_best": False},
        "checkpoint": {"every_steps": 6},
        "sinks": {"curves": False},
        "exact": True,
        "device": "cpu",
        "timeout_s": 30,
    }
    return RunConfig.parse(values | changes)


def newest(folder: Path) -> Checkpoint:
    checkpoint, _ = CheckpointStore(folder / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    return checkpoint


def hash_of(folder: Path) -> str:
    """Return one hash over weights, ledger and what was measured."""
    checkpoint = newest(folder)
    said = [checkpoint.step, checkpoint.meta["ledger"], checkpoint.meta["metrics"]]
    digest = hashlib.sha256(json.dumps(said).encode())
    for name, tensor in sorted(checkpoint.load("model").items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def live(folder: Path, task: TinyTask, changes: dict[str, Any]) -> tuple[int, list[int]]:
    logging.getLogger("lockstep").addHandler(logging.FileHandler(folder / "warned", delay=True))
    step = fit(task, config_for(folder, **changes)).step
    return step, getattr(task, "hits", [])


def run(folder: Path, num_ranks: int, task: TinyTask, **changes: Any) -> list[int]:
    """Run to the end and return the workers that were hit, of all ranks."""
    ends = run_ranks(num_ranks, live, folder, task, changes)
    assert {step for step, _ in ends} == {changes.get("max_steps", 12)}
    return [pid for _, hits in ends for pid in hits]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the hash of a run without workers and without faults."""
    folder = tmp_path_factory.mktemp("calm")
    run(folder, 1, FaultyTask())
    return hash_of(folder)


# --- Workers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_workers_killed_in_mid_epoch_change_no_bit_and_are_told_of(
    num_workers: int, calm: str, tmp_path: Path
) -> None:
    said = tmp_path / "said.txt"
    sinks = {"curves": False, "log_file": str(said)}
    settings = {"loader": {"num_workers": num_workers}, "sinks": sinks}
    hits = run(tmp_path, 1, FaultyTask((2, 7), (6, 12)), **settings)
    assert len(hits) >= 4
    assert hash_of(tmp_path) == calm
    told = [event for event in read_events(tmp_path) if event["event"] == "worker_lost"]
    assert len(told) >= 2
    for event in told:
        assert event["pid"] in hits
        assert event["happened"].startswith("was killed (SIGKILL)")
        assert event["message"].startswith(f"loader worker {event['pid']} was killed")
        assert f"warning: {event['message']}\n" in said.read_text()
        assert 0 < event["seconds"] < 30


def test_a_stopped_worker_changes_no_bit_on_two_ranks(
    calm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "STOPPED_S", 0.25)
    task = FaultyTask((3,), number=signal.SIGSTOP)
    hits = run(tmp_path, 2, task, loader={"num_workers": 1})
    assert len(hits) >= 2
    assert hash_of(tmp_path) == calm
    warned = (tmp_path / "warned").read_text()
    assert f"rank 1: loader worker {hits[-1]} was stopped" in warned, "its console is the first's"


# --- Bad samples ------------------------------------------------------------------------------


def test_skipping_gives_the_same_bits_on_any_ranks_and_after_a_resume(
    calm: str, tmp_path: Path
) -> None:
    hashes = set()
    skip = {"loader": {"on_bad_sample": "skip"}}
    for num_ranks in (1, 2, 4):
        run(tmp_path / str(num_ranks), num_ranks, FaultyTask(bad=(5, 31)), **skip)
        hashes.add(hash_of(tmp_path / str(num_ranks)))
    run(tmp_path / "resumed", 2, FaultyTask(bad=(5, 31)), max_steps=5, **skip)
    run(tmp_path / "resumed", 1, FaultyTask(bad=(5, 31)), **skip)
    hashes.add(hash_of(tmp_path / "resumed"))
    assert len(hashes) == 1
    assert hashes != {calm}


# --- Data that changed ------------------------------------------------------------------------


class EditedTask(FaultyTask):
    def train_data(self) -> Any:
        data = super().train_data()
        data.samples[0]["x"] += 1
        return data


class ReversedTask(FaultyTask):
    def train_data(self) -> Any:
        data = super().train_data()
        data.samples.reverse()
        return data


class LongerTask(FaultyTask):
    def train_data(self) -> Any:
        data = super().train_data()
        data.samples += data.samples[:8]
        return data


class OtherHeldOutTask(FaultyTask):
    def eval_data(self) -> Any:
        data = super().eval_data()
        data.samples[0]["y"] += 1
        return data


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (EditedTask, "training data: different contents: sample 0"),
        (ReversedTask, "training data: different contents: sample 0"),
        (LongerTask, "training data: 8 added"),
        (OtherHeldOutTask, "held-out data: different contents: sample 0"),
    ],
)
def test_data_that_changed_are_refused_unless_accepted(
    kind: type[FaultyTask], said: str, tmp_path: Path
) -> None:
    fit(FaultyTask(), config_for(tmp_path, max_steps=2))
    with pytest.raises(ConfigError, match=said) as caught:
        fit(kind(), config_for(tmp_path, max_steps=4))
    assert "accept_changes=true" in caught.value.remedy
    assert newest(tmp_path).step == 2
    assert fit(kind(), config_for(tmp_path, max_steps=4, accept_changes=True)).step == 4


def test_data_that_changed_are_refused_on_all_ranks(tmp_path: Path) -> None:
    fit(FaultyTask(), config_for(tmp_path, max_steps=2))
    with pytest.raises(RuntimeError, match="training data: different contents: sample 0"):
        run(tmp_path, 2, EditedTask(), max_steps=4)


# --- Settings that changed --------------------------------------------------------------------

OTHER: dict[str, Any] = {
    "schedule.shape": "cosine",
    "evaluation.best_metric": "heavy",
    "evaluation.best_is": "highest",
    "precision": "bf16",
    "gradients.exchange_in": "bf16",
    "averages": [0.5],
    "device": "cuda",
    "parallel": "fsdp",
    "resume": "never",
    "loader.on_bad_sample": "skip",
    "rate.lr_scaling": "sqrt",
    "checkpoint.on_failed_save": "continue",
    "on_out_of_memory": "stop",
    "on_non_finite": "skip",
}
BOUND_ELSEWHERE: tuple[str, ...] = (
    "seed",
    "batch.batch_size",
    "batch.accumulate",
    "batch.global_batch_size",
    "rate",
    "averages",
)
"""Settings compared for what they amount to on the ranks there are: the contract, `restore`."""
FREE: tuple[str, ...] = (
    "output_dir",
    "epochs",
    "max_steps",
    "loader",
    "checkpoint",
    "sinks",
    "log_every",
    "device",
    "parallel",
    "evaluation.every_epochs",
    "evaluation.every_steps",
    "evaluation.batch_size",
    "evaluation.save_best",
    "on_out_of_memory",
    "on_non_finite",
    "timeout_s",
    "resume",
    "allow_shared_folder",
    "accept_changes",
)
"""Settings that may change at any time. Another length bends a cosine from there on: whoever
changes it has asked for that, and is told."""
KEYS = flat_settings(RunConfig().model_dump(mode="json"))


def mutated(key: str) -> Any:
    """Return a value that `key` does not have by default."""
    value = KEYS[key]
    if key in OTHER:
        return OTHER[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, str | list):
        return "other" if isinstance(value, str) else ["other"]
    if value is None:
        return "other" if key.startswith("sinks.") else 8
    return value + 1


def checkpoint_of(config: RunConfig, task: dict[str, Any]) -> Checkpoint:
    meta = {"config": config.model_dump(mode="json"), "task": task}
    return Checkpoint(Path("step"), 3, "tiny", meta, {}, {})


@pytest.mark.parametrize("key", KEYS)
def test_every_setting_either_binds_or_is_free(key: str) -> None:
    groups = resuming.BINDING, resuming.ROUNDING, BOUND_ELSEWHERE, FREE
    assert [is_among(key, group) for group in groups].count(True) == 1
    before = RunConfig()
    values = before.model_dump(mode="json")
    *sections, last = key.split(".")
    (values[sections[0]] if sections else values)[last] = mutated(key)
    now = RunConfig.parse(values)
    assert now != before
    found = changed_settings(checkpoint_of(before, {}), now, {})
    if is_among(key, resuming.BINDING):
        assert any(text.startswith(f"{key} {KEYS[key]} -> ") for text in found)
    else:
        assert found == []


def test_rounding_binds_in_exact_mode() -> None:
    before, now = RunConfig(exact=True), RunConfig(exact=True, compile=True)
    assert changed_settings(checkpoint_of(before, {}), now, {}) == ["compile False -> True"]


def test_a_tasks_settings_bind_but_for_those_it_lets_go() -> None:
    before = checkpoint_of(RunConfig(), {"width": 8, "paths": {"train": "a"}, "gone": 1})
    now = {"width": 9, "paths": {"train": "b"}}
    changes = changed_settings(before, RunConfig(), now, ["paths"])
    assert changes == ["task.gone 1 -> None", "task.width 8 -> 9"]
    assert len(changed_settings(before, RunConfig(), now)) == 3


def test_all_that_changed_is_in_one_error_before_the_first_step(tmp_path: Path) -> None:
    fit(FaultyTask(), config_for(tmp_path, max_steps=2, max_grad_norm=1.0))
    changes = {"max_steps": 4, "max_grad_norm": 2.0, "precision": "bf16", "rate": {"lr": 0.1}}
    with pytest.raises(ConfigError) as caught:
        fit(EditedTask(), config_for(tmp_path, **changes))
    for said in ("max_grad_norm 1.0 -> 2.0", "precision fp32 -> bf16", "base_lr 0.02 -> 0.1"):
        assert said in caught.value.problem
    assert "training data: different contents" in caught.value.problem


def test_a_cosine_that_ends_elsewhere_is_told_and_an_old_checkpoint_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cosine = {"schedule": {"shape": "cosine"}}
    fit(FaultyTask(), config_for(tmp_path, max_steps=2, **cosine))
    assert fit(FaultyTask(), config_for(tmp_path, max_steps=3, **cosine)).step == 3
    assert "the cosine schedule has a different length: max_steps 2 -> 3" in capsys.readouterr().out
    old = Checkpoint(Path("step_3"), 3, "tiny", {"contract": {}}, {}, {})
    said = resuming.warnings_of(old, RunConfig())
    assert said == ["step_3 has no fingerprints of its data: not compared"]
