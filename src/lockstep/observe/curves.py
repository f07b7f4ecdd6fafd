"""The picture of a run: losses, held-out metrics, learning rate and speed.

Owns: the layout of `curves.png`. Does not own: when to draw it (`sinks.py`), or the numbers: it
reads the record, so kills and resumes are invisible.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.observe.events import Event, read_events
from lockstep.run_files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#33373d"
FAINT = "#d9dce1"
TRAIN = "#3b6fb6"
HELD_OUT = (
    "#d1603d", "#2f9e7f", "#8a5fb0", "#c79a1b", "#c2528b", "#5b8f29", "#2a9fc4", "#8c6d4f"
)  # fmt: skip
LOG_SCALE_FROM = 30.0
"""Curves that span more than this factor are drawn on a logarithmic axis."""

MAX_LINES = 6
"""Most held-out curves in one panel: more would be indistinguishable."""
NUM_COLUMNS = 3
MAX_LETTERS = 24
"""Names up to this length fit two in a row of a legend."""

Series = tuple[list[int], list[float]]


def draw_curves(folder: Path | str, path: Path | str) -> Path:
    """Draw the run in `folder` as the picture `path`, replacing an earlier one atomically.

    The first panel shows the training loss and the held-out losses, the last one the learning
    rate and the speed. Panels of other held-out metrics, if any, come between.

    Raises:
        DataError: The folder holds no events.
    """
    events = read_events(folder)
    steps = [event for event in events if event["event"] == "step"]
    metrics = _metrics(events)
    losses = {name: series for name, series in metrics.items() if name.endswith("loss")}
    groups = _grouped({name: metrics[name] for name in metrics if name not in losses})

    num_panels = len(groups) + 2
    num_columns = min(num_panels, NUM_COLUMNS)
    num_rows = math.ceil(num_panels / num_columns)
    figure, panels = new_figure(num_rows, num_columns, sharex=True)
    for unused in panels[num_panels:]:
        unused.remove()

    _draw_losses(panels[0], _series(steps, "loss"), losses)
    for axes, (title, drawn) in zip(panels[1:], groups, strict=False):
        _prepare(axes, title)
        _plot_held_out(axes, drawn)
        _fit_scale(axes, list(drawn.values()))
    _draw_pace(
        panels[num_panels - 1],
        _series(steps, "learning_rate"),
        _series(steps, "samples_per_second"),
    )

    path = Path(path)
    save_figure(figure, path)
    return path


def new_figure(num_rows: int, num_columns: int, **options: Any) -> tuple["Figure", Any]:
    """Return a figure and its panels, as an array.

    It has the object interface: pyplot keeps global state and must not leave the main thread.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    padded = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(5.6 * num_columns, 4.2 * num_rows), dpi=110, layout=padded)
    return figure, figure.subplots(num_rows, num_columns, squeeze=False, **options).ravel()


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure as the picture `path`, replacing an earlier one atomically."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    with replacing(path.parent, path.name) as file:
        figure.savefig(file, format="png")


def style_axes(axes: "Axes", title: str, x_label: str) -> None:
    """Set the title, the label and the looks of a panel."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=10)
    axes.set_xlabel(x_label, color=INK)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.grid(color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    for name, side in axes.spines.items():
        side.set_visible(name == "bottom")
        side.set_color(FAINT)


def _grouped(metrics: dict[str, Series]) -> list[tuple[str, dict[str, Series]]]:
    """Distribute curves over panels: if there are many, group those that share a word."""
    if len(metrics) <= MAX_LINES:
        return [("Held-out metrics", metrics)] if metrics else []
    words = {name: [word for word in _base(name).split("_") if word] for name in metrics}
    num_names = Counter(word for found in words.values() for word in set(found))
    groups: dict[str, list[str]] = {}
    for name, found in words.items():
        shared = max(reversed(found), key=lambda word: num_names[word])  # the last one, on a tie
        groups.setdefault(shared if num_names[shared] > 1 else "others", []).append(name)
    panels = []
    for word, names in groups.items():
        first = os.path.commonprefix([words[name] for name in names])
        title = "_".join(first) if word in first else word
        for start in range(0, len(names), MAX_LINES):
            drawn = {name: metrics[name] for name in names[start : start + MAX_LINES]}
            panels.append((f"Held-out: {title}", drawn))
    return panels


def _base(name: str) -> str:
    """Return the name of a metric without its prefixes for averages and held-out data."""
    return name.removeprefix("held-out ").removeprefix("ema_")


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
    axes.yaxis.set_major_formatter("{x:.3g}")

    right = axes.twinx()
    right.plot(*speed, color=HELD_OUT[0], linewidth=1.4, marker=_marker(speed), markersize=4.5)
    right.set_ylabel("samples / s", color=HELD_OUT[0])
    right.tick_params(axis="y", labelcolor=HELD_OUT[0], labelsize=9, length=0)
    right.set_ylim(0.0, 1.2 * max(speed[1], default=1.0) or 1.0)
    for side in right.spines.values():
        side.set_visible(False)


def _plot_held_out(axes: "Axes", held_out: dict[str, Series]) -> None:
    bases = list(dict.fromkeys(_base(name) for name in held_out))
    for name, series in held_out.items():
        axes.plot(
            *series,
            color=HELD_OUT[bases.index(_base(name)) % len(HELD_OUT)],
            linestyle="--" if "ema_" in name else "-",
            linewidth=1.6,
            marker=_marker(series),
            markersize=4.5,
            label=name,
        )
    if axes.get_lines():
        # Below the panel: inside, the legend might hide a curve.
        place = (0.0, -0.14)
        plain = {"frameon": False, "fontsize": 9, "labelcolor": INK}
        is_long = max(map(len, held_out), default=0) > MAX_LETTERS
        plain["ncols"] = 1 if is_long else 2  # a legend wider than the panel would shrink it
        axes.legend(loc="upper left", bbox_to_anchor=place, borderaxespad=0.0, **plain)


def _fit_scale(axes: "Axes", drawn: Sequence[Series]) -> None:
    values = [value for series in drawn for value in series[1] if math.isfinite(value)]
    if values and min(values) > 0 and max(values) / min(values) > LOG_SCALE_FROM:
        axes.set_yscale("log")


def _marker(series: Series) -> str:
    return "o" if len(series[0]) <= 25 else "none"


def _prepare(axes: "Axes", title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    style_axes(axes, title, "step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.tick_params(labelbottom=True)
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
    """Average over the last fiftieth of the curve; short curves are unchanged."""
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
