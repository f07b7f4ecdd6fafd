"""The picture of a run: its losses, its held-out metrics, its rate and its speed.

Owns: how `curves.png` looks. Does not own: when it is drawn (`sinks.py`), nor any
number; it reads the record like everyone else, so kills and resumes leave no mark.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.observe.events import Event, read_events

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#33373d"
FAINT = "#d9dce1"
TRAIN = "#3b6fb6"
HELD_OUT = (
    "#d1603d", "#2f9e7f", "#8a5fb0", "#c79a1b", "#c2528b", "#5b8f29", "#2a9fc4", "#8c6d4f"
)  # fmt: skip
LOG_SCALE_FROM = 30.0
"""Curves that span more than this factor are drawn on a logarithmic axis."""

Series = tuple[list[int], list[float]]


def draw_curves(folder: Path | str, path: Path | str) -> Path:
    """Draw the run in `folder` into the picture `path`, replacing an earlier one at once.

    Left: the training loss and the held-out losses. Right: the learning rate and
    the speed. Other held-out metrics, if there are any, stand between the two.

    Raises:
        DataError: The folder holds no events.
    """
    # The object interface: pyplot keeps global state and must not leave the main thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    events = read_events(folder)
    steps = [event for event in events if event["event"] == "step"]
    metrics = _metrics(events)
    losses = {name: series for name, series in metrics.items() if name.endswith("loss")}
    others = {name: series for name, series in metrics.items() if name not in losses}

    num_panels = 3 if others else 2
    padded = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(5.6 * num_panels, 4.2), dpi=110, layout=padded)
    panels = list(figure.subplots(1, num_panels, sharex=True))

    _draw_losses(panels[0], _series(steps, "loss"), losses)
    if others:
        _prepare(panels[1], "Held-out metrics")
        _plot_held_out(panels[1], others)
        _fit_scale(panels[1], list(others.values()))
    _draw_pace(panels[-1], _series(steps, "learning_rate"), _series(steps, "samples_per_second"))

    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    FigureCanvasAgg(figure)
    figure.savefig(aside, format="png")
    os.replace(aside, path)
    return path


def _draw_losses(axes: "Axes", train: Series, held_out: dict[str, Series]) -> None:
    _prepare(axes, "Loss")
    if train[0]:
        axes.plot(*train, color=TRAIN, alpha=0.25, linewidth=1.0)
        smooth = train[0], _smoothed(train[1])
        axes.plot(
            *smooth,
            color=TRAIN,
            linewidth=1.9,
            marker=_marker(train),
            markersize=4.5,
            label="train",
        )
    _plot_held_out(axes, held_out)
    _fit_scale(axes, [train, *held_out.values()])


def _draw_pace(axes: "Axes", rate: Series, speed: Series) -> None:
    _prepare(axes, "Learning rate and speed")
    axes.plot(*rate, color=TRAIN, linewidth=1.9, marker=_marker(rate), markersize=4.5)
    axes.set_ylabel("learning rate", color=TRAIN)
    axes.tick_params(axis="y", labelcolor=TRAIN)
    axes.set_ylim(bottom=0.0)
    axes.yaxis.set_major_formatter("{x:.1e}")

    right = axes.twinx()
    right.plot(*speed, color=HELD_OUT[0], linewidth=1.4, marker=_marker(speed), markersize=4.5)
    right.set_ylabel("samples / s", color=HELD_OUT[0])
    right.tick_params(axis="y", labelcolor=HELD_OUT[0], labelsize=9, length=0)
    right.set_ylim(0.0, 1.2 * max(speed[1], default=1.0) or 1.0)
    for side in right.spines.values():
        side.set_visible(False)


def _plot_held_out(axes: "Axes", held_out: dict[str, Series]) -> None:
    for index, (name, series) in enumerate(held_out.items()):
        color = HELD_OUT[index % len(HELD_OUT)]
        axes.plot(
            *series, color=color, linewidth=1.6, marker=_marker(series), markersize=4.5, label=name
        )
    if axes.get_lines():
        axes.legend(framealpha=0.75, edgecolor="none", fontsize=9, labelcolor=INK)


def _fit_scale(axes: "Axes", drawn: Sequence[Series]) -> None:
    values = [value for series in drawn for value in series[1] if math.isfinite(value)]
    if values and min(values) > 0 and max(values) / min(values) > LOG_SCALE_FROM:
        axes.set_yscale("log")


def _marker(series: Series) -> str:
    return "o" if len(series[0]) <= 25 else "none"


def _prepare(axes: "Axes", title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=10)
    axes.set_xlabel("step", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.grid(color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    for name, side in axes.spines.items():
        side.set_visible(name == "bottom")
        side.set_color(FAINT)
    axes.margins(x=0.02)


def _series(events: Sequence[Event], name: str) -> Series:
    points = [(event["step"], event[name]) for event in events if _is_number(event.get(name))]
    return [step for step, _ in points], [value for _, value in points]


def _metrics(events: Sequence[Event]) -> dict[str, Series]:
    series: dict[str, Series] = {}
    for event in events:
        if event["event"] == "evaluation":
            for name, value in (event.get("metrics") or {}).items():
                if _is_number(value):
                    steps, values = series.setdefault(f"held-out {name}", ([], []))
                    steps.append(event["step"])
                    values.append(value)
    return series


def _smoothed(values: list[float]) -> list[float]:
    """Average over the last fiftieth of the curve; short curves stay as they are."""
    import numpy

    window = len(values) // 50
    if window < 2:
        return values
    is_finite = numpy.isfinite(values)
    sums = numpy.cumsum(numpy.where(is_finite, values, 0.0))
    counts = numpy.cumsum(is_finite).astype(float)
    sums[window:] -= sums[:-window].copy()
    counts[window:] -= counts[:-window].copy()
    means = numpy.where(counts > 0, sums / numpy.maximum(counts, 1), numpy.nan)
    return [float(mean) for mean in means]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
