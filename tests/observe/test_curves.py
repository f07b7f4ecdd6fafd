"""The picture of a run is made, whole, and from the record alone."""

import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from lockstep.errors import DataError
from lockstep.observe.curves import _grouped, draw_curves
from lockstep.observe.events import EventLog


def write_run(folder: Path, *, num_steps: int, metrics: tuple[str, ...] = ("loss",)) -> None:
    log = EventLog(folder, rank=0, clock=lambda: 0.0)
    for step in range(1, num_steps + 1):
        loss = math.nan if step % 7 == 0 else 2 / step
        log.write("step", step, loss=loss, learning_rate=1e-4 / step, samples_per_second=100 + step)
        if step % 10 == 0:
            log.write("evaluation", step, metrics=dict.fromkeys(metrics, 3 / step))


def test_losses_and_pace_stand_side_by_side_and_other_metrics_between_them(tmp_path: Path) -> None:
    write_run(tmp_path / "two", num_steps=300)
    write_run(tmp_path / "three", num_steps=300, metrics=("loss", "ema_loss", "mean_iou"))
    sizes = []
    for name in ("two", "three"):
        path = draw_curves(tmp_path / name, tmp_path / f"{name}.png")
        with Image.open(path) as image:
            image.load()
            sizes.append(image.size)
            colors = image.convert("RGB").getcolors(1 << 20)
            assert colors is not None
            assert {(59, 111, 182), (209, 96, 61)} <= {color for _, color in colors}
    assert sizes[1][0] == pytest.approx(1.5 * sizes[0][0], abs=2)


def test_many_metrics_get_panels_by_the_words_they_share_and_no_panel_too_many_lines() -> None:
    names = [f"held-out {ema}iou_{n}" for ema in ("", "ema_") for n in range(4)]
    names += ["held-out recovery", "held-out unigram_recovery", "held-out elbo", "held-out fid"]
    names += [f"held-out {ema}loss_t_{part}" for ema in ("", "ema_") for part in ("low", "high")]
    groups = [(title, list(drawn)) for title, drawn in _grouped({n: ([], []) for n in names})]
    assert groups == [
        ("Held-out: iou", names[:6]),
        ("Held-out: iou", names[6:8]),
        ("Held-out: recovery", names[8:10]),
        ("Held-out: others", names[10:12]),
        ("Held-out: loss_t", names[12:]),
    ]
    assert [title for title, _ in _grouped({n: ([], []) for n in names[:6]})] == [
        "Held-out metrics"
    ]


def test_many_panels_stand_in_rows_of_three(tmp_path: Path) -> None:
    write_run(tmp_path / "few", num_steps=30, metrics=("loss", "miou"))
    write_run(tmp_path / "many", num_steps=30, metrics=tuple(f"iou_{n}" for n in range(21)))
    sizes = []
    for name in ("few", "many"):
        with Image.open(draw_curves(tmp_path / name, tmp_path / f"{name}.png")) as image:
            sizes.append(image.size)
    assert sizes[1] == (sizes[0][0], 2 * sizes[0][1]), "loss, four of IoUs, pace"


@pytest.mark.parametrize("num_steps", [0, 1, 2, 100])
def test_a_run_of_any_length_can_be_drawn(tmp_path: Path, num_steps: int) -> None:
    EventLog(tmp_path, rank=0).write("run_start", 0)
    write_run(tmp_path, num_steps=num_steps)
    assert draw_curves(tmp_path, tmp_path / "curves.png").stat().st_size > 1000


def test_a_resumed_run_is_drawn_like_a_straight_one(tmp_path: Path) -> None:
    write_run(tmp_path / "straight", num_steps=30)
    write_run(tmp_path / "killed", num_steps=20)
    log = EventLog(tmp_path / "killed", rank=0)
    log.write("step", 21, loss=50.0, learning_rate=1.0, samples_per_second=1.0)
    log.write("run_start", 0)
    write_run(tmp_path / "killed", num_steps=30)
    pictures = [
        draw_curves(tmp_path / name, tmp_path / f"{name}.png").read_bytes()
        for name in ("straight", "killed")
    ]
    assert pictures[0] == pictures[1]


def test_nothing_but_the_picture_is_left_behind(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=3)
    draw_curves(tmp_path, tmp_path / "curves.png")
    assert {path.name for path in tmp_path.iterdir()} == {"events", "curves.png"}


def test_a_folder_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        draw_curves(tmp_path, tmp_path / "curves.png")


@pytest.mark.parametrize("name", ["iou", "intersection_over_union_of_the_class"])
def test_no_legend_hides_a_curve_and_every_number_on_an_axis_is_true(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: drawn.append(f) or save(f, *a, **k))
    log = EventLog(tmp_path, rank=0, clock=lambda: 0.0)
    for step in range(1, 40):
        log.write("step", step, loss=step, learning_rate=2e-2 / step, samples_per_second=step)
        metrics = {f"{name}_{n}": n + step % 2 for n in range(6)}  # all over the panel
        log.write("evaluation", step, metrics=metrics)
    draw_curves(tmp_path, tmp_path / "curves.png")
    panels = [axes for axes in drawn[0].axes if axes.get_legend()]
    assert len(panels) == 2
    for axes in panels:
        assert not axes.get_legend().get_window_extent().overlaps(axes.get_window_extent())
        assert axes.get_legend().get_window_extent().width <= axes.get_window_extent().width
    (rate,) = (axes for axes in drawn[0].axes if axes.get_ylabel() == "learning rate")
    for place, label in zip(rate.get_yticks(), rate.get_yticklabels(), strict=True):
        assert float(label.get_text().replace("\u2212", "-")) == pytest.approx(place)
