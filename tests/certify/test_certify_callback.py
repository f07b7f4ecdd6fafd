"""What the callback of `lockstep certify` asks of a run, and that it changes nothing else."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep import CheckpointStore, RunConfig, fit, unwrap
from lockstep.certify.callback import CALLBACK, reversed_samples
from lockstep.certify.settings import RunSettings
from lockstep.certify.trace import hash_of
from lockstep.data.batch import MicroBatch
from lockstep.data.order import Leaf
from lockstep.harness.attach import TRACE, attached, write_settings
from lockstep.testing import TinyTask, run_ranks


def asked(folder: Path, **more: object) -> RunConfig:
    config = {"output_dir": str(folder), "epochs": 9, "batch": {"batch_size": 4}, "averages": [0.9]}
    return RunConfig.parse({**config, "sinks": {"curves": False}, **more})


def test_the_config_of_a_certified_run_is_valid(tmp_path: Path) -> None:
    settings = RunSettings(6, most_ranks=4, exact=True)
    config = settings.config(TinyTask(), asked(tmp_path, parallel="fsdp"), 2, tmp_path / "run")
    config = config.saving_every(settings.save_step(), waits=True)
    assert RunConfig.parse(json.loads(config.model_dump_json())) == config
    assert (config.max_steps, config.batch.global_batch_size, config.parallel) == (6, 16, "ddp")
    assert (config.checkpoint.every_steps, config.checkpoint.background) == (3, False)


@pytest.mark.parametrize(("steps_per_epoch", "expected"), [(1, 3), (2, 3), (3, 2), (12, 3)])
def test_the_save_is_not_at_the_end_of_an_epoch(steps_per_epoch: int, expected: int) -> None:
    """Unless every step ends one."""
    assert RunSettings(6).save_step(steps_per_epoch) == expected


def test_a_single_micro_batch_is_reversed_sample_by_sample() -> None:
    """Tensors, and lists of one string per sample; not a tensor that has no rows."""
    data = {
        "x": torch.arange(3),
        "text": ["a", "b", "c"],
        "pair": (torch.zeros(3, 2).index_fill(0, torch.tensor(0), 1.0), torch.tensor(7.0)),
        "other": torch.arange(4),
    }
    (turned,) = reversed_samples([MicroBatch(Leaf(0, 0, 0, 3), np.arange(3), data)])
    assert turned.ids.tolist() == turned.data["x"].tolist() == [2, 1, 0]
    assert turned.data["text"] == ["c", "b", "a"]
    assert turned.data["pair"][0][:, 0].tolist() == [0, 0, 1]
    assert turned.data["pair"][1] == 7
    assert turned.data["other"].tolist() == [0, 1, 2, 3]


def test_micro_batches_are_reversed_as_a_whole() -> None:
    two = [MicroBatch(Leaf(0, n, n, n + 1), np.array([n]), None) for n in range(2)]
    assert reversed_samples(two) == two[::-1]


class SeenBatches(TinyTask):
    """Notes the order in which micro-batches come."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.seen: list[float] = []

    def loss(self, model, batch, context):  # type: ignore[no-untyped-def]
        self.seen.append(float(batch["x"][0, 0]))
        return super().loss(model, batch, context)


class WithoutEvaluation(TinyTask):
    """Has no held-out samples."""

    def eval_data(self) -> None:  # type: ignore[override]
        pass


def checkpoints_of(folder: Path) -> dict[int, dict[str, str]]:
    """Return a hash of each part of each checkpoint."""
    store = CheckpointStore(folder / "checkpoints", recipe="tiny")
    found = {}
    for step in store.steps():
        checkpoint = store.open(store.path(step))
        found[step] = {part: hash_of(checkpoint.load(part)) for part in checkpoint.parts}
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_callback_leaves_checkpoints_as_they_are(num_ranks: int, tmp_path: Path) -> None:
    """No state of its own is saved, and none of its draws or hooks moves a weight."""
    settings = RunSettings(4)
    write_settings(tmp_path, **asdict(settings))

    def train(is_certified: bool) -> None:
        task = WithoutEvaluation(dropout=0.2)
        if is_certified:
            os.environ |= attached(tmp_path, CALLBACK)
            fit(task, asked(tmp_path / "unused"))
        else:
            config = settings.config(task, asked(tmp_path), num_ranks, tmp_path / "plain")
            fit(task, config.saving_every(2))

    run_ranks(num_ranks, train, True)
    run_ranks(num_ranks, train, False)
    certified = checkpoints_of(tmp_path / "run")
    assert sorted(certified) == [2, 4]
    assert "callbacks" not in certified[2]
    assert certified == checkpoints_of(tmp_path / "plain")
    assert not (tmp_path / "unused").exists()


def test_micro_batches_come_in_reverse_where_asked(tmp_path: Path) -> None:
    def seen(reverses: bool) -> list[float]:
        own = tmp_path / str(reverses)
        own.mkdir()
        write_settings(own, **asdict(RunSettings(2, most_ranks=2, reverses=reverses)))
        os.environ |= attached(own, CALLBACK)
        task = SeenBatches()
        fit(task, asked(tmp_path / "unused"))
        return task.seen

    (plain,), (turned,) = run_ranks(1, seen, False), run_ranks(1, seen, True)
    assert turned == [plain[1], plain[0], plain[3], plain[2]]
    first = json.loads((tmp_path / "True" / TRACE / "rank_0.jsonl").read_text().split("\n")[1])
    assert [leaf["place"] for leaf in first["leaves"]] == [1, 0]


class Unfrozen(TinyTask):
    """Trains its first layer from step 1 on, so that the step is taken again."""

    def loss(self, model, batch, context):  # type: ignore[no-untyped-def]
        unwrap(model)[0].requires_grad_(context.step > 0)
        return super().loss(model, batch, context)


def test_a_step_that_is_taken_again_is_recorded_once(tmp_path: Path) -> None:
    write_settings(tmp_path, **asdict(RunSettings(3)))

    def train() -> None:
        os.environ |= attached(tmp_path, CALLBACK)
        fit(Unfrozen(), asked(tmp_path / "unused"))

    run_ranks(1, train)
    lines = (tmp_path / TRACE / "rank_0.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record["event"] == "step"]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert [len(record["gradients"]) for record in steps] == [2, 4, 4]
    own = {"task.num_samples", "task.num_held_out", "task.dropout"}
    assert {n for n in steps[0]["state"]["attributes"] if not n.startswith("model.")} == own
