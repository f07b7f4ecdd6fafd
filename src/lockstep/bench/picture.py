"""Draw a scaling report: the speed-up, the parts of a step, the all-reduce.

Owns: the layout of the picture. Does not own: any number.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.bench.report import Scaling
from lockstep.observe.curves import HELD_OUT, INK, TRAIN, new_figure, save_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_scaling(report: Scaling, path: Path) -> None:
    """Draw a report into the picture `path`."""
    has_link = report.measured_link is not None
    figure, panels = new_figure(1, 3 if has_link else 2)
    _draw_efficiency(panels[0], report)
    _draw_step(panels[1], report)
    if has_link:
        _draw_link(panels[2], report)
    save_figure(figure, path)


def _draw_efficiency(axes: "Axes", report: Scaling) -> None:
    """Draw the measured and the forecast speed-up, as a share of the theoretical one."""
    _prepare(axes, "Speed-up, % of the theoretical", "processes", "%")
    for number, (link, at) in enumerate(report.forecasts):
        # The shortest step has the highest speed-up.
        above = [100 * made.efficiency * (made.step_s / made.low_s - 1) for made in at]
        below = [100 * made.efficiency * (1 - made.step_s / made.high_s) for made in at]
        axes.errorbar(
            [made.ranks for made in at],
            [100 * made.efficiency for made in at],
            yerr=[below, above],
            color=HELD_OUT[number],
            linewidth=1.4,
            linestyle="--",
            marker="o",
            markersize=4.5,
            capsize=4,
            label=f"forecast, {link.name}",
        )
    measured = [row.ranks for row in report.rows]
    efficiency = [100 * row.efficiency for row in report.rows]
    axes.plot(
        measured, efficiency, color=TRAIN, linewidth=1.9, marker="o", markersize=5, label="measured"
    )
    ticks = sorted({*measured, *(made.ranks for _, at in report.forecasts for made in at)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{ranks:,}" for ranks in ticks])
    axes.set_ylim(0, 112)
    axes.legend(framealpha=0.75, edgecolor="none", fontsize=9, labelcolor=INK, loc="lower left")


def _draw_step(axes: "Axes", report: Scaling) -> None:
    """Draw the parts of a step, for each number of processes."""
    _prepare(axes, "A step", "processes", "ms")
    waiting = [row.input * row.step_ms for row in report.rows]
    sending = [row.communication * row.step_ms for row in report.rows]
    alone = [min(row.alone_ms, row.step_ms) for row in report.rows]
    spent = zip(report.rows, waiting, sending, alone, strict=True)
    slower = [max(0.0, row.step_ms - sum(parts)) for row, *parts in spent]
    parts = {
        "as on one process": (TRAIN, alone),
        "slower beside others": (HELD_OUT[2], slower),
        "waiting for data": (HELD_OUT[3], waiting),
        "communication": (HELD_OUT[0], sending),
    }
    places, bottom = [str(row.ranks) for row in report.rows], [0.0] * len(report.rows)
    for label, (color, heights) in parts.items():
        axes.bar(places, heights, bottom=bottom, width=0.55, color=color, label=label)
        bottom = [base + height for base, height in zip(bottom, heights, strict=True)]
    for row in report.rows:
        axes.annotate(
            f"{row.actual:.2f} x",
            (str(row.ranks), max(row.step_ms, bottom[report.rows.index(row)])),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            color=INK,
            fontsize=9,
        )
    axes.set_xlim(-0.6, len(places) - 0.4)
    axes.set_ylim(0, 1.45 * max(bottom))
    axes.legend(framealpha=0.75, edgecolor="none", fontsize=9, labelcolor=INK, loc="upper left")


def _draw_link(axes: "Axes", report: Scaling) -> None:
    """Draw the times of all-reduces of many sizes, and the fit."""
    assert report.measured_link is not None
    _prepare(axes, "All-reduce", "bytes", "ms")
    for number, each in enumerate(each for each in report.found if each.sizes):
        sizes = [size for size, _ in each.sizes]
        axes.plot(
            sizes,
            [1e3 * seconds for _, seconds in each.sizes],
            color=(TRAIN, *HELD_OUT)[number % 9],
            linestyle="none",
            marker="o",
            markersize=5,
            label=f"{each.ranks} processes",
        )
        if link := each.link():
            fit = [1e3 * link.ring_s(size, each.ranks) for size in sizes]
            axes.plot(sizes, fit, color=(TRAIN, *HELD_OUT)[number % 9], linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.legend(framealpha=0.75, edgecolor="none", fontsize=9, labelcolor=INK)


def _prepare(axes: "Axes", title: str, across: str, up: str) -> None:
    style_axes(axes, title, across)
    axes.set_ylabel(up, color=INK)
