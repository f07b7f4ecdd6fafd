"""Ranks equal one, resuming equals never stopping, and every held-out pixel counts once."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from lockstep import RunConfig, fit, read_events
from lockstep.data.order import Sequential
from lockstep.testing import run_ranks
from lockstep_recipes.segmentation.evaluate import normalise
from lockstep_recipes.segmentation.sample_data import make_shapes
from lockstep_recipes.segmentation.task import SegmentationTask

FIRST_EMPTY = 4


class DoubleTask(SegmentationTask):
    """The same in float64 and in file order; the first samples have not one scribble."""

    def build_model(self):
        return super().build_model().double()

    def order(self, data, seed):
        return Sequential(len(data))


class OwnMeans(DoubleTask):
    """A fault: each rank divides by its own counts, as if they were the step's."""

    def loss(self, model, batch, context):
        own = {n: torch.as_tensor(c).clamp(min=1) for n, c in self.weights(batch, context).items()}
        made = super().loss(model, batch, replace(context, weights=own))
        return replace(made, loss_sum=made.loss_sum / context.world.size)


class StillTask(SegmentationTask):
    """A network whose statistics do not move, so that every run evaluates the same one."""

    def build_model(self):
        model = super().build_model()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.0
        return model


@pytest.fixture(scope="module")
def half_scribbled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_shapes(tmp_path_factory.mktemp("half") / "VOC2012", num=24, num_val=2, size=36)
    for number in range(FIRST_EMPTY):
        path = root / "pascal_2012_scribble" / f"shapes_{number:05d}.png"
        with Image.open(path) as scribble:
            blank = np.full_like(np.asarray(scribble), 255)
        Image.fromarray(blank).save(path)
    return root


def train(task: SegmentationTask, config: RunConfig) -> None:
    fit(task, config)


def weights(folder: Path, step: int = 4) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step_{step:08d}" / "model.safetensors")


def apart(folder: Path, reference: Path) -> float:
    a, b = weights(folder), weights(reference)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.fixture
def one(tmp_path, half_scribbled, make_task, settings):
    task = make_task(DoubleTask, data=half_scribbled)
    run_ranks(1, train, task, settings(tmp_path / "one", batch={"batch_size": 8}))
    return tmp_path / "one"


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_one_also_where_one_has_no_scribble(
    ranks, one, tmp_path, half_scribbled, make_task, settings
) -> None:
    task = make_task(DoubleTask, data=half_scribbled)
    config = settings(tmp_path / "many", batch={"batch_size": 8 // ranks})
    run_ranks(ranks, train, task, config)
    assert apart(tmp_path / "many", one) < 1e-10
    first = [e for e in read_events(tmp_path / "many") if e["event"] == "step"]
    assert set(first[0]["parts"]) == {"segs", "pesudo", "ds", "dc", "lorm"}


def test_means_of_each_ranks_own_would_be_noticed(
    one, tmp_path, half_scribbled, make_task, settings
) -> None:
    task = make_task(OwnMeans, data=half_scribbled)
    run_ranks(2, train, task, settings(tmp_path / "own", batch={"batch_size": 4}))
    assert apart(tmp_path / "own", one) > 1e-4


def test_statistics_of_each_ranks_own_would_be_noticed(
    one, tmp_path, half_scribbled, make_task, settings
) -> None:
    task = make_task(DoubleTask, data=half_scribbled)
    config = settings(tmp_path / "own", batch={"batch_size": 4}, sync_batch_norm=False)
    run_ranks(2, train, task, config)
    assert apart(tmp_path / "own", one) > 1e-4


def test_resuming_in_mid_epoch_equals_never_stopping(tmp_path, make_task, settings) -> None:
    task = make_task()
    values = {"batch": {"batch_size": 8}, "max_steps": 9, "checkpoint": {"every_steps": 4}}
    whole = settings(tmp_path / "whole", **values)  # six steps an epoch
    run_ranks(1, train, task, whole)
    stored = tmp_path / "whole" / "checkpoints" / "step_00000004"
    resumed = settings(tmp_path / "resumed", resume=str(stored), **values)
    run_ranks(1, train, task, resumed)
    a, b = weights(tmp_path / "whole", 9), weights(tmp_path / "resumed", 9)
    assert all(torch.equal(a[name], b[name]) for name in a)
    before = weights(tmp_path / "whole", 4)
    assert any(not torch.equal(a[name], before[name]) for name in a)


def evaluate_on(ranks: int, task: SegmentationTask, config: RunConfig) -> dict[str, float]:
    def action():
        return fit(task, config).metrics

    results = run_ranks(ranks, action)
    assert all(result == results[0] for result in results), "every rank knows the same"
    return results[0]


@pytest.mark.parametrize("num_val", [5, 2])
def test_every_pixel_counts_once_on_uneven_shards(num_val, tmp_path, make_task, settings) -> None:
    root = make_shapes(tmp_path / "shapes", num=6, num_val=num_val, size=36)
    task = make_task(StillTask, data=root)
    measured = []
    for ranks in (1, 2, 3):
        batch = {"batch_size": 2, "global_batch_size": 6}
        config = settings(
            tmp_path / str(ranks),
            batch=batch,
            max_steps=1,
            rate={"lr": 1e-30},
        )
        measured.append(evaluate_on(ranks, task, config))
    for other in measured[1:]:
        assert other == pytest.approx(measured[0], rel=1e-12)

    # and by hand, pixel by pixel, with the weights that were evaluated
    model = task.build_model()
    model.load_state_dict(weights(tmp_path / "1", 1))
    model.eval()
    hit, union, right, seen = np.zeros(5), np.zeros(5), 0, 0
    data = task.eval_data()
    for index in range(len(data)):
        sample = data[index]
        batch = {name: plane[None] for name, plane in sample.items()}
        with torch.no_grad():
            guess = model(normalise(batch["image"], torch.float32))[0].argmax(1)[0].numpy()
        truth = sample["label"].numpy()
        right, seen = right + (guess == truth).sum(), seen + truth.size
        for label in range(5):
            hit[label] += ((guess == label) & (truth == label)).sum()
            union[label] += ((guess == label) | (truth == label)).sum()
    iou = hit[union > 0] / union[union > 0]
    assert measured[0]["miou"] == pytest.approx(iou.mean(), rel=1e-9)
    assert measured[0]["pixel_accuracy"] == pytest.approx(right / seen, rel=1e-9)
