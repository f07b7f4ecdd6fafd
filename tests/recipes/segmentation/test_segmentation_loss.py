"""Each term of the loss equals a slow reference, and has its own weight."""

import math
from dataclasses import replace

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.step.train_step import TrainStep
from lockstep.task import Context
from lockstep.testing import FakeWorld
from lockstep_recipes.segmentation.evaluate import normalise
from lockstep_recipes.segmentation.flags import check_launch, flags
from lockstep_recipes.segmentation.model import shrink_labels

TERMS = ("segs", "pesudo", "ds", "dc", "lorm")


def slow_terms(model, batch, smooth: float) -> dict[str, float]:
    """Compute each mean pixel by pixel, in plain Python."""
    image = normalise(batch["image"], torch.float32)
    with torch.no_grad():
        logits, _ = model(image)
        p = logits.double().softmax(dim=1)
    classes = p.shape[1]
    sums = dict.fromkeys(TERMS, 0.0)
    counts = dict.fromkeys(TERMS, 0)
    for b in range(len(image)):
        for row in range(image.shape[2]):
            for column in range(image.shape[3]):
                here = p[b, :, row, column].tolist()
                label = int(batch["label"][b, row, column])
                if label != 255:
                    sums["segs"] -= math.log(here[label])
                    counts["segs"] += 1
                pseudo = int(batch["pseudo"][b, row, column])
                if pseudo != 255:
                    target = [
                        smooth / classes + (1 - smooth) * (c == pseudo) for c in range(classes)
                    ]
                    sums["pesudo"] -= sum(
                        t * math.log(q) for t, q in zip(target, here, strict=True)
                    )
                    counts["pesudo"] += 1
                unsure = -sum(q * math.log(q) for q in here)
                for name in ("ds", "dc"):
                    d = int(batch[name][b, row, column])
                    sums[name] += d / 255 * unsure
                    counts[name] += d > 0
    small = shrink_labels(batch["pseudo"])
    foreground = (small != 255) & (small != 0)
    with torch.no_grad():
        sums["lorm"] = float(model.lorm(model.backbone(image), foreground))
    counts["lorm"] = int(foreground.sum())
    return {name: sums[name] / counts[name] for name in TERMS}


@pytest.fixture
def model_and_batch(make_task, read_batch):
    torch.manual_seed(1)
    task = make_task(label_smooth=0.2)
    model = task.build_model().eval()  # running statistics, so that both passes see the same
    return task, model, read_batch(task, 3)


def loss_of(task, model, batch, context):
    counted = {
        name: torch.as_tensor(n).double() for name, n in task.weights(batch, context).items()
    }
    return task.loss(model, batch, Context(context.world, 0, 0, 0, weights=counted))


def test_each_term_equals_a_slow_reference(model_and_batch, context) -> None:
    task, model, batch = model_and_batch
    expected = slow_terms(model, batch, smooth=0.2)
    made = loss_of(task, model, batch, context)
    assert set(made.parts) == set(TERMS)
    for name, (total, weight) in made.parts.items():
        assert float(total / weight) == pytest.approx(expected[name], rel=1e-4), name
    assert float(made.loss_sum.detach()) == pytest.approx(sum(expected.values()), rel=1e-4)
    assert made.weight == 1.0


@pytest.mark.parametrize("term", TERMS)
def test_each_term_has_its_own_weight(term, make_task, model_and_batch, context) -> None:
    _, model, batch = model_and_batch
    off = {f"l_{name}": 0.0 for name in TERMS}
    alone = loss_of(make_task(**off | {f"l_{term}": 3.0}), model, batch, context)
    total, weight = alone.parts[term]
    assert float(alone.loss_sum.detach()) == pytest.approx(3 * float(total / weight), rel=1e-5)


def test_label_smooth_zero_keeps_the_pseudo_term(make_task, model_and_batch, context) -> None:
    _, model, batch = model_and_batch
    made = loss_of(make_task(label_smooth=0.0), model, batch, context)
    total, weight = made.parts["pesudo"]
    expected = slow_terms(model, batch, smooth=0.0)["pesudo"]
    assert float(total / weight) == pytest.approx(expected, rel=1e-4)
    assert expected > 0


@pytest.mark.parametrize(
    ("mode", "terms"),
    [
        ("ScribbleOnly", {"segs", "lorm"}),
        ("PseudoOnly", {"pesudo", "lorm"}),
        ("ScribblePseudo", {"segs", "pesudo", "lorm"}),
        ("ScribblePseudoDs", {"segs", "pesudo", "ds", "lorm"}),
        ("ScribblePseudoDc", {"segs", "pesudo", "dc", "lorm"}),
        ("ScribblePseudoDsDc", set(TERMS)),
        ("Full", {"segs", "lorm"}),
    ],
)
def test_a_mode_trains_on_what_its_name_says(mode, terms, make_task, read_batch, context) -> None:
    task = make_task(mode=mode)
    batch = read_batch(task, 2)
    made = loss_of(task, task.build_model(), batch, context)
    assert set(made.parts) == terms
    without = make_task(mode=mode, lorm=False)
    assert set(without.weights(batch, context)) == terms - {"lorm"}


def test_lorm_sees_objects_only_and_every_label_where_there_is_no_background(
    make_task, read_batch, context, tmp_path
) -> None:
    task = make_task(mode="Full")
    batch = read_batch(task, 2)
    small = shrink_labels(batch["label"])
    assert int(task.weights(batch, context)["lorm"]) == int(((small != 0) & (small != 255)).sum())
    task.listings = tuple(replace(listing, background=None) for listing in task.listings)
    assert int(task.weights(batch, context)["lorm"]) == int((small != 255).sum())


def test_a_term_without_a_unit_is_zero_and_keeps_its_graph(make_task, read_batch, context) -> None:
    task = make_task()
    batch = read_batch(task, 2)
    empty = {"label": 255, "pseudo": 255, "ds": 0, "dc": 0}
    batch |= {kind: torch.full_like(batch[kind], value) for kind, value in empty.items()}

    class Step:
        micro_batches = [
            type("M", (), {"data": batch, "counts": True, "leaf": type("L", (), {"place": 0})})
        ]
        step = 0

    model = task.build_model()
    optimizer = task.build_optimizer(model, 0.1)
    step = TrainStep(task.loss, model, optimizer, FakeWorld(), weights=task.weights)
    totals = step.total_weights(Step)
    made = task.loss(model, batch, Context(FakeWorld(), 0, 0, 0, weights=totals))
    made.loss_sum.backward()
    assert float(made.loss_sum.detach()) == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_processes_without_the_flag_are_refused_by_its_name(monkeypatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="2 processes were started without --distributed"):
        check_launch(flags().read([]))
    check_launch(flags().read(["--distributed"]))
    with pytest.raises(ConfigError, match="--world_size 4, but 2 processes"):
        check_launch(flags().read(["--distributed", "--world_size", "4"]))
