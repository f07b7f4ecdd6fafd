"""The loss is the one of the paper, for all nine pairs of prediction and loss."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.task import Context
from lockstep.testing import FakeWorld
from lockstep_recipes.jit.evaluate import from_bytes
from lockstep_recipes.jit.model import JiT
from lockstep_recipes.jit.task import TIME_BINS, JiTConfig, JiTTask, error_factor, velocity_of

MakeTask = Callable[..., JiTTask]
ReadBatch = Callable[..., dict[str, Tensor]]
QUANTITIES = ("x", "eps", "v")
NINE = list(itertools.product(QUANTITIES, QUANTITIES))


class Oracle(nn.Module):
    """Knows the clean images, and predicts the truth (plus `error`) in the quantity asked for."""

    def __init__(self, x: Tensor, pred: str, scale: float, error: float = 0.0) -> None:
        super().__init__()
        self.x, self.pred, self.scale, self.error = x, pred, scale, error

    def forward(self, x_t: Tensor, t: Tensor, label: Tensor) -> Tensor:
        wide = t[:, None, None, None]
        eps = (x_t - wide * self.x) / ((1 - wide) * self.scale)
        truth = {"x": self.x, "eps": eps, "v": self.x - self.scale * eps}[self.pred]
        return truth + self.error


@pytest.mark.parametrize(("pred", "loss"), NINE)
def test_the_perfect_prediction_has_no_loss(
    pred: str, loss: str, make_task: MakeTask, read_batch: ReadBatch, context: Context
) -> None:
    task = make_task(pred=pred, loss=loss, noise_scale=1.5)
    batch = read_batch(task, 32)
    x = from_bytes(batch["image"])
    result = task.loss(Oracle(x, pred, 1.5), batch, context)
    wrong = task.loss(Oracle(x, pred, 1.5, error=0.1), batch, context)
    assert result.loss_sum.item() < 1e-6
    assert wrong.loss_sum.item() > 1e-2


@pytest.mark.parametrize(("pred", "loss"), NINE)
def test_the_factor_is_what_converting_both_sides_gives(pred: Any, loss: Any) -> None:
    scale, tiny = 2.0, 0.05
    t = torch.linspace(0, 1, 101, dtype=torch.float64)  # beyond the clamp on both sides
    x_t, truth, guess = torch.randn(3, 101, dtype=torch.float64)
    far, near = (1 - t).clamp(min=tiny), t.clamp(min=tiny)

    def convert(value: Tensor) -> Tensor:
        """Write out each conversion, as the definitions of x_t and v give them."""
        table: dict[tuple[str, str], Tensor] = {
            ("x", "eps"): (x_t - t * value) / (scale * far),
            ("x", "v"): (value - x_t) / far,
            ("eps", "x"): (x_t - (1 - t) * scale * value) / near,
            ("eps", "v"): (x_t - scale * value) / near,
            ("v", "x"): x_t + (1 - t) * value,
            ("v", "eps"): (x_t - t * value) / scale,
        }
        return table.get((pred, loss), value)

    squared = (error_factor(t, pred, loss, scale, tiny) * (truth - guess)).square()
    torch.testing.assert_close(squared, (convert(truth) - convert(guess)).square())


@pytest.mark.parametrize("pred", QUANTITIES)
def test_the_velocity_of_a_true_prediction_is_the_true_velocity(pred: Any) -> None:
    scale = 2.0
    t = torch.rand(64, 1, 1, 1) * 0.8 + 0.1  # inside the clamp
    x, eps = torch.randn(2, 64, 3, 4, 4)
    x_t = t * x + (1 - t) * scale * eps
    truth = {"x": x, "eps": eps, "v": x - scale * eps}[pred]
    velocity = velocity_of(truth, x_t, t, pred, scale, 0.05)
    torch.testing.assert_close(velocity, x - scale * eps, rtol=1e-4, atol=1e-4)


def test_the_first_loss_is_2_96_times_the_mean_square(
    make_task: MakeTask, read_batch: ReadBatch, make_mini: Callable[..., JiT]
) -> None:
    task, model = make_task(), make_mini()
    batch = read_batch(task, 1024)
    mean_square = float(from_bytes(batch["image"]).square().mean())
    total = weight = 0.0
    with torch.no_grad():
        for place in range(48):
            part = task.loss(model, batch, Context(FakeWorld(), 0, step=0, place=place))
            total, weight = total + float(part.loss_sum), weight + float(part.weight)
    # E[1/(1-t)^2] for 1/(1-t) = 1 + e^z and z ~ N(-0.8, 0.8^2)
    closed_form = 1 + 2 * math.exp(-0.48) + math.exp(-0.32)
    assert closed_form == pytest.approx(2.96, abs=0.005)
    assert total / weight == pytest.approx(closed_form * mean_square, rel=0.02)


def test_the_loss_of_a_zero_prediction_is_exact(
    make_task: MakeTask, read_batch: ReadBatch, context: Context, make_mini: Callable[..., JiT]
) -> None:
    task = make_task()
    batch = read_batch(task, 64)
    part = task.loss(make_mini(), batch, context)
    z = torch.randn(64, generator=context.generator("t"))
    t = torch.sigmoid(-0.8 + 0.8 * z)
    per_image = from_bytes(batch["image"]).square().mean(dim=(1, 2, 3)) / (1 - t) ** 2
    torch.testing.assert_close(part.loss_sum, per_image.sum())
    assert float(part.weight) == 64
    low, high = TIME_BINS["loss_t_mid"]
    inside = (t >= low) & (t < high)
    torch.testing.assert_close(part.parts["loss_t_mid"][0], per_image[inside].sum())
    assert float(part.parts["loss_t_mid"][1]) == int(inside.sum())


def test_the_parts_add_up_and_keep_their_names(
    make_task: MakeTask, read_batch: ReadBatch, context: Context, constant: nn.Module
) -> None:
    task = make_task()
    for num in (1, 33):
        part = task.loss(constant, read_batch(task, num), context)
        assert list(part.parts) == list(TIME_BINS)
        assert sum(float(weight) for _, weight in part.parts.values()) == num
        total = sum(float(value) for value, _ in part.parts.values())
        assert total == pytest.approx(part.loss_sum.item(), rel=1e-5)


def test_one_label_in_ten_is_dropped_in_training_and_none_in_evaluation(
    make_task: MakeTask, read_batch: ReadBatch, context: Context, constant: Any
) -> None:
    task = make_task()
    batch = read_batch(task, 8000)
    task.loss(constant, batch, context)
    task.evaluate(constant, batch, context)
    trained, evaluated = constant.labels
    dropped = trained == task.num_classes
    assert float(dropped.float().mean()) == pytest.approx(0.1, abs=0.01)  # 3 sigma
    assert torch.equal(trained[~dropped], batch["label"][~dropped])
    assert torch.equal(evaluated, batch["label"])


@pytest.mark.parametrize("pred", ["x", "eps"])  # of a constant, only these show t and noise alone
def test_time_and_noise_are_streams_of_place_and_step_and_not_of_the_rank(
    pred: str, make_task: MakeTask, read_batch: ReadBatch, constant: nn.Module
) -> None:
    task = make_task(pred=pred, loss="v" if pred == "x" else "eps")
    batch = read_batch(task, 16)

    def loss(**changes: Any) -> float:
        context = replace(Context(FakeWorld(), seed=0, step=3, place=1), **changes)
        return task.loss(constant, batch, context).loss_sum.item()

    assert loss() == loss(world=FakeWorld(rank=1, size=2))
    assert len({loss(), loss(step=4), loss(place=2), loss(seed=1)}) == 4


def test_evaluation_depends_on_the_place_alone_and_restores_training(
    make_task: MakeTask, read_batch: ReadBatch, make_mini: Callable[..., JiT]
) -> None:
    task, model = make_task(), make_mini(random=True).train()
    batch = read_batch(task, 16)

    def loss(step: int, place: int, size: int) -> float:
        context = Context(FakeWorld(0, size), seed=0, step=step, place=place, training=False)
        result = task.evaluate(model, batch, context)
        assert not result.loss_sum.requires_grad
        return float(result.loss_sum)

    assert loss(0, 0, 1) == loss(50, 0, 8)
    assert loss(0, 0, 1) != loss(0, 1, 1)
    assert all(module.training for module in model.modules())


def test_evaluation_has_no_dropout(
    make_task: MakeTask, read_batch: ReadBatch, context: Context
) -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
            assert not self.training
            return x

    task, model = make_task(), Dropping()
    task.evaluate(model, read_batch(task, 2), context)
    assert model.training


def test_text_counts_valid_pixels_only(
    make_task: MakeTask, text_folder: Path, context: Context, constant: nn.Module
) -> None:
    task = make_task(data=text_folder, image_size=8)
    data = task.train_data()
    batch = task.collate([data[i] for i in range(6)])
    part = task.loss(constant, batch, context)
    t = torch.sigmoid(-0.8 + 0.8 * torch.randn(6, generator=context.generator("t")))
    squared = from_bytes(batch["image"]).square().mean(dim=1) / (1 - t[:, None, None]) ** 2
    torch.testing.assert_close(part.loss_sum, squared[batch["mask"]].sum())
    assert 0 < float(part.weight) == int(batch["mask"].sum()) < 6 * 64
    assert task.num_classes == 0


def test_a_tiny_model_overfits_eight_images(
    make_task: MakeTask, read_batch: ReadBatch, context: Context
) -> None:
    task = make_task(label_drop=0.0, flip=False, image_size=16)
    model = task.build_model()
    optimizer = task.build_optimizer(model, lr=1e-3)
    batch = read_batch(task, 8)

    def held_still() -> float:
        places = [replace(context, place=place, training=False) for place in range(4)]
        return sum(float(task.evaluate(model, batch, place).loss_sum) for place in places) / 32

    before = held_still()
    for step in range(70):
        task.loss(model, batch, replace(context, step=step)).loss_sum.div(8).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert held_still() < before / 5


def test_weights_depend_on_the_seed_alone(make_task: MakeTask) -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first = make_task().build_model()
    assert torch.equal(torch.rand(1), expected)  # the global stream was not moved
    second, other = make_task().build_model(), make_task(seed=1).build_model()
    assert torch.equal(first.patch_in.weight, second.patch_in.weight)
    assert not torch.equal(first.patch_in.weight, other.patch_in.weight)


def test_vectors_never_decay(make_task: MakeTask, make_mini: Callable[..., JiT]) -> None:
    model = make_mini()
    optimizer = make_task(weight_decay=0.1).build_optimizer(model, lr=1e-3)
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert matrices["betas"] == (0.9, 0.95)
    assert {p.ndim for p in vectors["params"]} == {1}
    num_grouped = len(matrices["params"]) + len(vectors["params"])
    assert num_grouped == len(list(model.parameters()))


def test_the_config_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValidationError, match="learning_rate"):
        JiTConfig.model_validate({"learning_rate": 1.0})
    with pytest.raises(ConfigError, match="JiT-B/5"):
        JiTConfig(variant="JiT-B/5")
    with pytest.raises(ConfigError, match="image_size=30"):
        JiTConfig(image_size=30)
    with pytest.raises(ConfigError, match="guidance_interval"):
        JiTConfig(guidance_interval=(0.5, 0.1))
    with pytest.raises(ConfigError, match="num_fid_samples"):
        JiTConfig(num_fid_samples=1)


def test_large_images_get_twice_the_noise() -> None:
    assert JiTConfig().resolved_noise_scale == 1.0
    assert JiTConfig(variant="JiT-B/32", image_size=512).resolved_noise_scale == 2.0
    assert JiTConfig(noise_scale=1.3).resolved_noise_scale == 1.3
