"""Samples depend on their index and the weights; the distance knows equal from different."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from stopping import NEVER, finish_on
from torch import Tensor

from lockstep.run.evaluation import evaluating
from lockstep.task import Context
from lockstep.testing import FakeWorld
from lockstep_recipes.jit.evaluate import (
    Moments,
    RandomFeatures,
    SamplerSettings,
    frechet_distance,
    frechet_of_moments,
    from_bytes,
    image_moments,
    sample,
    sample_noise,
    sample_share,
    share,
    tile,
    to_bytes,
)
from lockstep_recipes.jit.model import JiT
from lockstep_recipes.jit.sample_data import make_images
from lockstep_recipes.jit.task import JiTTask

MakeTask = Callable[..., JiTTask]
FAST = {"sample_steps": 3, "grid": 5, "num_fid_samples": 7, "sample_batch_size": 2}


def draw_picture(task: JiTTask, model: JiT, world: FakeWorld, folder: Path) -> dict[str, float]:
    context = Context(world, seed=0, step=12, place=0, training=False)
    made = task.finish_evaluation(model, context, str(folder))
    return {name: value for name, value in made.items() if isinstance(value, float)}


def read_picture(folder: Path) -> np.ndarray:
    return np.asarray(Image.open(folder / "samples" / "step_00000012.png"))


def test_the_same_seed_draws_the_same_picture(
    make_task: MakeTask, make_mini: Callable[..., JiT], tmp_path: Path
) -> None:
    for folder in ("a", "b"):
        model = make_mini(random=True).train()
        metrics = draw_picture(make_task(**FAST), model, FakeWorld(), tmp_path / folder)
        assert list(metrics) == ["frechet_random_features"]
        assert all(module.training for module in model.modules())
        assert all(parameter.grad is None for parameter in model.parameters())
    assert np.array_equal(read_picture(tmp_path / "a"), read_picture(tmp_path / "b"))
    assert sorted(p.name for p in (tmp_path / "a" / "samples").iterdir()) == ["step_00000012.png"]


@pytest.mark.parametrize("size", [2, 3])
def test_the_shares_of_several_ranks_equal_one_ranks_work(
    size: int,
    make_task: MakeTask,
    make_mini: Callable[..., JiT],
    tmp_path: Path,
    run_ranks: Callable[..., list[Any]],
) -> None:
    alone = draw_picture(make_task(**FAST), make_mini(random=True), FakeWorld(), tmp_path / "one")
    models = [make_mini(random=True) for _ in range(size)]
    tasks = [make_task(**FAST) for _ in range(size)]

    def work(world: FakeWorld) -> dict[str, float]:
        return draw_picture(tasks[world.rank], models[world.rank], world, tmp_path / "many")

    results = run_ranks(size, work)
    for result in results:
        assert result == results[0]
        assert result == pytest.approx(alone, rel=1e-3)
    together, one = read_picture(tmp_path / "many"), read_picture(tmp_path / "one")
    assert np.abs(together.astype(int) - one).max() <= 1  # other batches round otherwise


def test_every_rank_draws_equally_often() -> None:
    for num, size, batch_size in itertools.product((1, 5, 8, 13), (1, 2, 3, 8), (1, 2, 64)):
        shapes, kept = set(), []
        for rank in range(size):
            calls: list[int] = []

            def draw(indices: range, calls: list[int] = calls) -> Tensor:
                calls.append(len(indices))
                return torch.tensor(indices)

            parts = list(sample_share(draw, num, batch_size, FakeWorld(rank, size)))
            kept += [int(index) for part in parts for index in part]
            shapes.add(tuple(calls))
        assert kept == list(range(num))
        assert len(shapes) == 1


def test_shares_are_contiguous_and_complete() -> None:
    for num, size in itertools.product((0, 1, 7, 16), (1, 2, 5)):
        parts = [share(num, FakeWorld(rank, size)) for rank in range(size)]
        assert [i for part in parts for i in part] == list(range(num))


def test_noise_belongs_to_the_index() -> None:
    whole = sample_noise(0, range(6), 4)
    assert torch.equal(whole[2:5], sample_noise(0, range(2, 5), 4))
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole, sample_noise(1, range(6), 4))


def test_guidance_acts_inside_its_interval_only() -> None:
    seen: dict[float, int] = {}

    def velocity(x: Tensor, t: float, labels: Tensor) -> Tensor:
        seen[t] = len(x)
        return torch.where(labels == 9, 0.0, 0.1)[:, None, None, None].expand_as(x)

    settings = SamplerSettings(steps=10, guidance=3.0, guidance_interval=(0.1, 0.75))
    out = sample(velocity, torch.zeros(2, 3, 4, 4), torch.tensor([1, 2]), 9, settings)
    guided = sorted(t for t, num in seen.items() if num == 4)
    assert guided == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    # The trapezoid rule on 0.1 (outside) and 0.3 (inside), and Euler from 0.9 on.
    strength = [0.3 if t in guided else 0.1 for t in (step / 10 for step in range(10))]
    pairs = itertools.pairwise(strength)
    expected = sum((a + b) / 2 for a, b in pairs) * 0.1 + strength[-1] * 0.1
    torch.testing.assert_close(out, torch.full_like(out, expected))


def test_without_classes_nothing_is_guided() -> None:
    sizes = []

    def velocity(x: Tensor, t: float, labels: Tensor) -> Tensor:
        sizes.append(len(x))
        return x

    sample(velocity, torch.zeros(2, 3, 4, 4), torch.tensor([0, 0]), 0, SamplerSettings(steps=5))
    assert set(sizes) == {2}
    assert len(sizes) == 9  # two per Heun step, one for the last


def test_heun_is_of_second_order() -> None:
    def velocity(x: Tensor, t: float, labels: Tensor) -> Tensor:
        return x * (t - 2)  # exact: x(1) = x(0) exp(-1.5)

    noise, label = torch.full((1, 3, 2, 2), 0.5, dtype=torch.float64), torch.tensor([0])
    errors = []
    for steps in (25, 50, 100):
        # Euler's last step is of first order: leave it out by looking at what Heun alone leaves.
        out = sample(velocity, noise, label, 0, SamplerSettings(steps=steps))
        step = 1 / steps
        before_last = out / (1 + step * (1 - step - 2))
        t = 1 - step
        errors.append(float((before_last - 0.5 * math.exp(t * t / 2 - 2 * t)).abs().max()))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.15)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.15)


def test_a_model_that_knows_the_image_draws_it(make_task: MakeTask, tmp_path: Path) -> None:
    target = torch.linspace(-1, 1, 3 * 8 * 8).reshape(1, 3, 8, 8)

    class Knowing(torch.nn.Module):
        def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
            return target.expand_as(x)

    settings: dict[str, Any] = {"sample_steps": 50, "grid": 1, "num_fid_samples": 0}
    task = make_task(**settings)
    draw_picture(task, Knowing(), FakeWorld(), tmp_path)  # type: ignore[arg-type]
    drawn = read_picture(tmp_path)[2:66:8, 2:66:8].transpose(2, 0, 1)
    # The clamp of 1-t leaves about a fiftieth of the noise in it.
    assert np.abs(drawn.astype(int) - to_bytes(target[0]).numpy()).max() <= 10


def test_one_image_of_each_class_is_learned_by_heart_and_drawn(
    make_task: MakeTask, context: Context
) -> None:
    task = make_task(
        label_drop=0.0, flip=False, guidance=1.0, sample_steps=20, grid=0, num_fid_samples=0
    )
    data, labels = task.train_data(), task.listings[0].labels
    batch = task.collate([data[labels.index(number)] for number in [0, 1, 2, 3] * 2])
    model = task.build_model()
    optimizer = task.build_optimizer(model, lr=3e-3)
    for step in range(90):
        task.loss(model, batch, replace(context, step=step)).loss_sum.div(8).backward()
        optimizer.step()
        optimizer.zero_grad()

    with evaluating(model):
        drawn = torch.cat(list(task._samples(model, context, num=8)))
    distance = from_bytes(drawn)[:, None] - from_bytes(batch["image"][:4])
    distance = distance.square().mean(dim=(2, 3, 4))  # (8 samples, 4 images)
    assert distance.argmin(dim=1).tolist() == [0, 1, 2, 3] * 2, "the class that was asked for"
    assert distance.min(dim=1).values.max() < 0.02, "the images are 0.14 and more apart"


def test_text_samples_are_written_as_text(
    make_task: MakeTask, make_mini: Callable[..., JiT], text_folder: Path, tmp_path: Path
) -> None:
    task = make_task(**FAST | {"num_fid_samples": 0}, data=text_folder)
    draw_picture(task, make_mini(num_classes=0, random=True), FakeWorld(), tmp_path)
    lines = (tmp_path / "samples" / "step_00000012.txt").read_text()
    assert lines.count("\n") >= 5


def test_a_picture_that_cannot_be_saved_is_a_warning(
    make_task: MakeTask, make_mini: Callable[..., JiT], tmp_path: Path
) -> None:
    (tmp_path / "samples").write_text("in the way")
    task = make_task(**FAST | {"num_fid_samples": 0})
    with pytest.warns(UserWarning, match="not saved"):
        draw_picture(task, make_mini(), FakeWorld(), tmp_path)


def test_bytes_survive_the_round_trip() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_bytes(from_bytes(every)), every)
    assert to_bytes(torch.tensor([-1.2, 1.2])).tolist() == [0, 255]


def test_a_column_of_tiles_is_a_class() -> None:
    images = np.zeros((10, 3, 64, 64), dtype=np.uint8)
    assert tile(images, num_classes=3, gap=0).shape == (2 * 64, 6 * 64, 3)
    assert tile(images, num_classes=20, gap=0).shape == (3 * 64, 4 * 64, 3)


def test_tiles_hold_the_images_in_order() -> None:
    images = np.arange(5, dtype=np.uint8)[:, None, None, None].repeat(3, 1)
    picture = tile(images.repeat(2, 2).repeat(2, 3), gap=1)
    assert picture.shape == (7, 10, 3)
    assert [picture[1, 1, 0], picture[1, 4, 0], picture[4, 4, 0]] == [0, 1, 4]


# --- the distance ---------------------------------------------------------------------------------


def test_the_distance_of_known_gaussians() -> None:
    # In one dimension it is (m - n)^2 + (s - r)^2; independent axes add.
    mean_a, mean_b = torch.tensor([0.0, 1.0]), torch.tensor([3.0, 1.0])
    a, b = torch.diag(torch.tensor([4.0, 1.0])), torch.diag(torch.tensor([1.0, 9.0]))
    assert frechet_distance(mean_a, a, mean_b, b) == pytest.approx(9 + 1 + 4)
    # Turning both by the same rotation changes nothing, and the covariances no longer commute
    # with the axes.
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
    turned = frechet_distance(turn @ mean_a, turn @ a @ turn.T, turn @ mean_b, turn @ b @ turn.T)
    assert turned == pytest.approx(14, rel=1e-5)


def test_covariances_that_do_not_commute() -> None:
    # tr (AB)^(1/2) of 2 x 2 matrices is sqrt(tr AB + 2 sqrt(det AB)).
    a, b = torch.tensor([[2.0, 0.5], [0.5, 1.0]]), torch.tensor([[1.0, -0.3], [-0.3, 3.0]])
    root = torch.sqrt((a @ b).trace() + 2 * torch.sqrt(torch.det(a @ b)))
    expected = float(a.trace() + b.trace() - 2 * root)
    zero = torch.zeros(2)
    assert frechet_distance(zero, a, zero, b) == pytest.approx(expected, rel=1e-5)


def moments_of(features: Tensor) -> Moments:
    return Moments.empty(features.shape[1], torch.device("cpu")).add(features)


def test_moments_are_those_of_torch() -> None:
    features = torch.randn(50, 6) + 3
    mean, covariance = moments_of(features[:20]).add(features[20:]).mean_and_covariance()
    torch.testing.assert_close(mean, features.double().mean(dim=0))
    torch.testing.assert_close(covariance, features.double().T.cov())


def one_by_one(images: Tensor) -> Iterator[Tensor]:
    return iter(images.chunk(25))


def test_equal_sets_are_at_distance_zero_and_different_ones_further() -> None:
    torch.manual_seed(0)
    world = FakeWorld()
    smooth = torch.randint(0, 256, (200, 3, 1, 1), dtype=torch.uint8).expand(-1, -1, 8, 8)
    other_smooth = torch.randint(0, 256, (200, 3, 1, 1), dtype=torch.uint8).expand(-1, -1, 8, 8)
    noisy = torch.randint(0, 256, (200, 3, 8, 8), dtype=torch.uint8)
    features = RandomFeatures()
    a, b, c = (image_moments(one_by_one(x), features, world) for x in (smooth, other_smooth, noisy))
    same, alike, unlike = (frechet_of_moments(a, x, world) for x in (a, b, c))
    assert same < 1e-4 * unlike
    assert same < alike < 0.2 * unlike


def test_random_features_are_the_same_in_every_run() -> None:
    torch.manual_seed(1)
    first = RandomFeatures()
    torch.manual_seed(2)
    image = torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16)
    assert torch.equal(first(image), RandomFeatures()(image))
    assert first(image).shape == (1, first.num_features)


def test_ranks_ask_equally_often_whether_to_stop_and_leave_together(
    make_task: MakeTask, make_mini: Callable[..., JiT], tmp_path: Path
) -> None:
    """Seven images to compare with fall unevenly on three ranks: 3, 3 and 1, in batches of two."""
    task, model = make_task(**FAST), make_mini(random=True)
    # A batch of the picture and two of what is compared make five steps each; two of the reference.
    ended = finish_on(3, task, model, tmp_path, NEVER)
    assert ended == [("finished", 5 + 2 + 2 * 5)] * 3
    for stop_at in (0, 6, 9):
        ended = finish_on(3, task, model, tmp_path, stop_at)
        assert ended == [("stopped", stop_at + 1)] * 3


def test_the_reference_is_read_once(
    make_task: MakeTask,
    make_mini: Callable[..., JiT],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, model = make_task(**FAST), make_mini(random=True)
    first = draw_picture(task, model, FakeWorld(), tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr("lockstep_recipes.jit.data.read_image", refuse)
    assert draw_picture(task, model, FakeWorld(), tmp_path) == first


@pytest.mark.parametrize("num_fid_samples", [10, 40])
def test_what_is_compared_has_the_classes_of_what_it_is_compared_with(
    num_fid_samples: int, make_task: MakeTask, tmp_path: Path
) -> None:
    for name, number, grey in (("few", 4, 255), ("many", 36, 0)):
        (tmp_path / name).mkdir()
        for index in range(number):
            Image.new("RGB", (8, 8), (grey,) * 3).save(tmp_path / name / f"{index:02d}.png")

    class Perfect(torch.nn.Module):
        def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
            return (1 - 2.0 * label)[:, None, None, None].expand_as(x)

    changes = {"val_fraction": 0, "num_fid_samples": num_fid_samples, "guidance": 1.0}
    task = make_task(**FAST | changes, data=tmp_path)
    (distance,) = draw_picture(task, Perfect(), FakeWorld(), tmp_path / "run").values()  # type: ignore[arg-type]
    assert distance < 1e-3


def test_of_more_classes_than_samples_not_only_the_first_are_drawn(
    make_task: MakeTask, constant: Any, tmp_path: Path
) -> None:
    make_images(tmp_path / "data", num=40, size=8, classes=10)
    changes = {"val_fraction": 0, "grid": 0, "num_fid_samples": 5, "guidance": 1.0}
    task = make_task(**FAST | changes, data=tmp_path / "data")
    draw_picture(task, constant, FakeWorld(), tmp_path / "run")  # type: ignore[arg-type]
    assert set(torch.cat(constant.labels).tolist()) == {0, 2, 4, 6, 8}


def test_a_bad_reference_image_is_left_out_with_a_warning(
    make_task: MakeTask, make_mini: Callable[..., JiT], tmp_path: Path
) -> None:
    for index in range(20):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{index:02d}.png")
    task = make_task(**FAST | {"num_fid_samples": 12}, data=tmp_path)
    (tmp_path / task.listings[0].names[0]).write_bytes(b"no image")
    with pytest.warns(UserWarning, match=task.listings[0].names[0]):
        metrics = draw_picture(task, make_mini(num_classes=0), FakeWorld(), tmp_path / "run")
    assert list(metrics) == ["frechet_random_features"]


@pytest.mark.parametrize("num_readable", [0, 1])
def test_without_two_reference_images_there_is_no_distance(
    num_readable: int, make_task: MakeTask, make_mini: Callable[..., JiT], tmp_path: Path
) -> None:
    for index in range(3):
        (tmp_path / f"{index}.png").write_bytes(b"no image")
    if num_readable:
        Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    task = make_task(**FAST, data=tmp_path, val_fraction=0)
    with pytest.warns(UserWarning, match="skipped in the reference"):
        assert draw_picture(task, make_mini(num_classes=0), FakeWorld(), tmp_path / "run") == {}
