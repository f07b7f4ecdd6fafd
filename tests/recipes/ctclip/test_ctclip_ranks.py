"""Ranks equal one with negatives from all of them; resuming equals never stopping."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep import read_events
from lockstep.errors import ConfigError
from lockstep.task import Context
from lockstep.testing import FakeWorld, run_ranks
from lockstep_recipes.ctclip.config import CTClipConfig
from lockstep_recipes.ctclip.flags import SMALL_MODEL
from lockstep_recipes.ctclip.task import CTClipTask
from lockstep_recipes.ctclip.trainer import run

STEPS = 3  # 22 samples in steps of 8: the last has 6, which ranks cannot share evenly


class DoubleTask(CTClipTask):
    """The same in float64."""

    def build_model(self):
        return super().build_model().double()


class DetachedTask(DoubleTask):
    """A fault: other ranks' embeddings arrive without the way back."""

    def gather(self, local, context):
        everyone = context.gather(local.detach())
        start = context.gather_start(local)
        return torch.cat([everyone[:start], local, everyone[start + len(local) :]])


class OwnPairsTask(DoubleTask):
    """A fault, the origin's: only the pairs of this rank are told apart."""

    def loss(self, model, batch, context):
        alone = Context(FakeWorld(), context.seed, context.step, context.place)
        return super().loss(model, batch, alone)


def train(task: CTClipTask) -> dict[str, float]:
    return run(task.config, task).metrics


def weights(folder: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step_{step:08d}" / "model.safetensors")


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in read_events(folder) if event["event"] == "step"]


@pytest.fixture
def uneven(settings):
    def make(
        name: str, batch_size: int, loss: str = "softmax", codes=None, parallel="ddp"
    ) -> CTClipConfig:
        return settings(
            {
                "experiment": {"name": name},
                "data": {"batch_size": batch_size, "drop_last": False},
                "model": {"clip": {"loss": loss}, "image_encoder": {"codebook_size": codes}},
                "training": {"max_steps": STEPS},
                "lockstep": {"parallel": parallel},
            }
        )

    return make


@pytest.mark.parametrize(
    ("loss", "codes", "parallel"),
    [("softmax", None, "ddp"), ("siglip", None, "fsdp"), ("siglip", 8, "ddp")],
)
def test_ranks_equal_one_with_negatives_from_all_of_them(loss, codes, parallel, uneven) -> None:
    one = uneven("one", 8, loss, codes)
    metrics = run_ranks(1, train, DoubleTask(one))
    for ranks in (2, 4):
        mode = parallel if ranks == 2 else "ddp"
        many = uneven(f"ranks_{ranks}", 8 // ranks, loss, codes, mode)
        measured = run_ranks(ranks, train, DoubleTask(many))
        assert apart(weights(many.folder), weights(one.folder)) < 1e-10
        assert losses(many.folder) == pytest.approx(losses(one.folder), rel=1e-12)
        if codes is None:  # of volumes with the same codes, rounding decides which is ahead
            # Seven held-out volumes, each once, on however many ranks.
            assert all(m == pytest.approx(metrics[0], abs=1e-9) for m in measured)


@pytest.mark.parametrize("fault", [DetachedTask, OwnPairsTask])
def test_a_gather_that_drops_gradients_or_pairs_would_be_noticed(fault, uneven) -> None:
    one, many = uneven("one", 8), uneven("many", 4)
    run_ranks(1, train, DoubleTask(one))
    run_ranks(2, train, fault(many))
    assert apart(weights(many.folder), weights(one.folder)) > 1e-4
    first = [losses(config.folder)[0] for config in (one, many)]
    looks_right = first[1] == pytest.approx(first[0], rel=1e-12)
    assert looks_right == (fault is DetachedTask), "the loss alone does not tell"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_first_loss_is_the_logarithm_of_the_pairs_there_are(ranks, settings) -> None:
    config = settings({"training": {"max_steps": 1}, "validation": {"eval_samples": 2}})
    values = {**config.model_dump(), "model": SMALL_MODEL}
    config = CTClipConfig.parse(values)
    run_ranks(ranks, train, CTClipTask(config))
    assert losses(config.folder)[0] == pytest.approx(math.log(4 * ranks), rel=0.02)


class CompanyTask(DoubleTask):
    """The gather of a rank that borrows its batch: two pairs of others, none of its own."""

    def gather(self, local, context):
        others = torch.ones(2, local.shape[1], dtype=local.dtype)
        return torch.cat([super().gather(local, context), others])


def test_a_borrowed_batch_adds_nothing_and_waits_for_nobody(settings) -> None:
    task = CompanyTask(settings())
    data = task.train_data()
    batch = task.collate([data[index] for index in range(3)])
    model = task.build_model()
    context = Context(FakeWorld(), 0, 0, 0, counts=False)
    part = task.loss(model, batch, context)
    assert (part.loss_sum.item(), part.weight) == (0.0, 0.0)
    part.loss_sum.backward()
    assert all(p.grad is not None for p in model.parameters()), "its rank must meet the others"


def test_another_number_of_ranks_would_meet_other_pairs_and_is_refused(settings) -> None:
    config = settings({"training": {"max_steps": 2}})
    run_ranks(2, train, CTClipTask(config))

    def go_on() -> str:
        try:
            run(settings({"training": {"max_steps": 3}}))
        except ConfigError as error:
            return error.problem
        return ""

    (problem,) = run_ranks(1, go_on)
    assert "8 at a time (4 x 2 ranks), this run would have 4" in problem


def test_a_changed_batch_rate_or_decay_is_refused_with_old_and_new(settings) -> None:
    run_ranks(1, train, CTClipTask(settings({"training": {"max_steps": 2}})))

    def go_on(changes):
        try:
            return run(settings({"training": {"max_steps": 3}}, changes)).step
        except ConfigError as error:
            return error.problem

    assert "batch_size 4 -> 2" in run_ranks(1, go_on, {"data": {"batch_size": 2}})[0]
    rate = {"training": {"learning_rate": 2e-3}}
    assert "base_lr 0.001 -> 0.002" in run_ranks(1, go_on, rate)[0]
    decay = {"training": {"weight_decay": 0.5}}
    assert "weight_decay 0.01 -> 0.5" in run_ranks(1, go_on, decay)[0]
    assert run_ranks(1, go_on, rate | {"accept_changes": True}) == [3]


@pytest.mark.parametrize("ranks", [1, 2])
def test_resuming_in_mid_epoch_equals_never_stopping(ranks, settings) -> None:
    # Five steps an epoch alone, two in two; saved after every half epoch, and taken up from there.
    whole = settings({"training": {"max_steps": 7}, "experiment": {"name": "whole"}})
    run_ranks(ranks, train, CTClipTask(whole))
    saved = sorted((whole.folder / "checkpoints").glob("step_*"))[-3:]  # and perhaps the best
    assert [int(path.name[5:]) for path in saved] == {1: [3, 5, 7], 2: [5, 6, 7]}[ranks]
    resumed = settings(
        {"training": {"max_steps": 7}, "experiment": {"name": "resumed"}, "resume": str(saved[0])}
    )
    run_ranks(ranks, train, CTClipTask(resumed))
    names = ("model.safetensors", "optimizer.safetensors")
    for name in names:
        a, b = (c.folder / "checkpoints" / "step_00000007" / name for c in (whole, resumed))
        assert a.read_bytes() == b.read_bytes()
        assert (saved[0] / name).read_bytes() != a.read_bytes()
    (said,) = [e for e in read_events(resumed.folder, raw=True) if e["event"] == "resume"]
    assert said["step"] == int(saved[0].name[5:])
