"""Ranks equal one, resuming equals never stopping, and what is frozen does not move."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep import PartialLoss, RunConfig, fit, read_events
from lockstep.testing import run_ranks
from lockstep_recipes.atlas.task import AtlasTask


class DoubleTask(AtlasTask):
    """The same in float64."""

    def build_model(self):
        return super().build_model().double()


class MeanTask(DoubleTask):
    """A fault: a micro-batch's mean, said to weigh 1, whatever its size."""

    def loss(self, model, batch, context):
        made = super().loss(model, batch, context)
        return PartialLoss(made.loss_sum / made.weight, 1.0, made.parts)


def train(task: AtlasTask, config: RunConfig) -> dict[str, float]:
    return fit(task, config).metrics


def weights(folder: Path, step: int = 4) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step_{step:08d}" / "model.safetensors")


def apart(folder: Path, reference: Path) -> float:
    a, b = weights(folder), weights(reference)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


# 24 samples, 20 of them in full steps of 8: the last step of an epoch is half as large.
UNEVEN = {"drop_last": False, "global_batch_size": 8}
ALL_INPUTS = {"use_state": True, "use_last_action": True, "num_temporal_frames": 2}


@pytest.fixture
def one(tmp_path, make_task, settings):
    task = make_task(DoubleTask, data=ALL_INPUTS | {"max_frames": 20})
    (measured,) = run_ranks(
        1, train, task, settings(tmp_path / "one", batch={"batch_size": 2, **UNEVEN})
    )
    return tmp_path / "one", measured


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2), (1, 8)])
def test_ranks_equal_one_however_the_batch_is_cut(
    ranks, size, one, tmp_path, make_task, settings
) -> None:
    folder, measured = one
    task = make_task(DoubleTask, data=ALL_INPUTS | {"max_frames": 20})
    config = settings(tmp_path / "many", batch={"batch_size": size, **UNEVEN})
    results = run_ranks(ranks, train, task, config)
    assert apart(tmp_path / "many", folder) < 1e-10
    for result in results:
        assert result == pytest.approx(measured, rel=1e-9)
    first = next(e for e in read_events(tmp_path / "many") if e["event"] == "step")
    assert set(first["parts"]) == {"pose", "gripper"}


def test_a_mean_of_means_would_be_noticed(tmp_path, make_task, settings) -> None:
    batch = {"batch_size": 3, "global_batch_size": 9, "drop_last": False}
    for kind in (DoubleTask, MeanTask):  # the third step has 3 + 1 samples
        task = make_task(kind, data={"max_frames": 22})
        run_ranks(1, train, task, settings(tmp_path / kind.__name__, batch=batch))
    assert apart(tmp_path / "DoubleTask", tmp_path / "MeanTask") > 1e-6


def test_resuming_in_mid_epoch_equals_never_stopping(tmp_path, make_task, settings) -> None:
    changes = {"random_shift": 2, "color_jitter": 0.2}
    task = make_task(model={"dropout": 0.1, "freeze_vggt": False}, data=changes)
    values = {"batch": {"batch_size": 8}, "max_steps": 5, "checkpoint": {"every_steps": 2}}
    run_ranks(1, train, task, settings(tmp_path / "whole", **values))  # three steps an epoch
    stored = tmp_path / "whole" / "checkpoints" / "step_00000002"
    run_ranks(1, train, task, settings(tmp_path / "resumed", resume=str(stored), **values))
    a, b = weights(tmp_path / "whole", 5), weights(tmp_path / "resumed", 5)
    assert all(torch.equal(a[name], b[name]) for name in a)
    before = weights(tmp_path / "whole", 2)
    assert any(not torch.equal(a[name], before[name]) for name in a)


def digest(state: Mapping[str, torch.Tensor], prefix: str) -> str:
    made = hashlib.sha256()
    for name in sorted(state):
        if name.startswith(prefix):
            made.update(name.encode() + state[name].numpy().tobytes())
    return made.hexdigest()


BACKBONES = {"freeze_vggt": "geometry.backbone.", "freeze_lang_encoder": "language."}


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_frozen_backbone_has_the_same_hash_before_and_after(
    is_frozen, tmp_path, make_task, settings
) -> None:
    """Under DDP, which is told of no unused parameters and complains of none."""
    task = make_task(model=dict.fromkeys(BACKBONES, is_frozen))
    config = settings(
        tmp_path, batch={"batch_size": 4}, checkpoint={"every_steps": 1, "keep_last": 9}
    )

    def action():
        seen = []
        model = task.build_model()
        optimizer = task.build_optimizer(model, 1e-3)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in model.named_parameters():
            is_backbone = name.startswith(tuple(BACKBONES.values()))
            assert (id(parameter) in held) != (is_frozen and is_backbone), name
        build = AtlasTask.build_model

        def remember(self):
            made = build(self)
            seen.append({name: value.clone() for name, value in made.state_dict().items()})
            return made

        AtlasTask.build_model = remember
        fit(task, config)
        return {prefix: digest(seen[0], prefix) for prefix in ("", *BACKBONES.values())}

    before = run_ranks(2, action)[0]
    after = weights(tmp_path)
    for prefix in BACKBONES.values():
        assert any(name.startswith(prefix) for name in after)
        assert (digest(after, prefix) == before[prefix]) == is_frozen, prefix
    assert digest(after, "") != before[""], "the rest has moved"


def test_statistics_travel_with_the_checkpoint(tmp_path, make_task, settings) -> None:
    values = {"batch": {"batch_size": 8}, "max_steps": 2}
    run_ranks(1, train, make_task(), settings(tmp_path / "run", **values))
    (tmp_path / "stats.json").write_text('{"mean": [9,9,9,9,9,9,9], "std": [5,5,5,5,5,5,5]}')
    other = make_task(data={"action_stats_path": tmp_path / "stats.json"})
    assert other.statistics.mean.tolist() == [9] * 7

    def resume():
        config = settings(tmp_path / "run", **values | {"max_steps": 3})
        fit(other, config)
        return other.statistics.to_json()

    (after,) = run_ranks(1, resume)
    assert after == make_task().statistics.to_json(), "a policy goes on as it was trained"
