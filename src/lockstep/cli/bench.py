"""`lockstep bench scaling|collectives|input|step`: measured speed-up, and where the time goes.

Owns: the verbs, and what is printed. Does not own: any run or measurement (`bench/`).
"""

import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.words import AS_TYPED, Limit, Words, read_counts

if TYPE_CHECKING:
    from lockstep.bench.runs import BenchRuns

benching = typer.Typer(
    help="Measure speed-up and where the time goes; forecast it for the GPUs you don't have.",
    no_args_is_help=True,
)
BUSY = 0.5
"""Load per core above which a remark says that the machine is busy."""
Steps = Annotated[
    int,
    typer.Option(help="steps to time, and as many again without the gradient exchange", min=4),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="write all numbers to this file")]


@benching.command(
    "scaling",
    epilog="Example: lockstep bench scaling --gpus 1,2,4 --interconnect nvlink4 -- python train.py",
    context_settings=AS_TYPED,
)
def scaling(
    words: Words,
    gpus: Annotated[str, typer.Option(help="numbers of processes to measure")] = "1,2",
    steps: Steps = 24,
    interconnect: Annotated[
        str, typer.Option(help="forecast for pcie4, nvlink4, ethernet100, ethernet400, ...")
    ] = "",
    link: Annotated[
        str, typer.Option(help="forecast for a link with this bandwidth and latency: 12.5GB/s,10us")
    ] = "",
    picture: Annotated[Path | None, typer.Option(help="draw the report into this file")] = None,
    limit: Limit = 300,
    json_file: JsonFile = None,
) -> None:
    """Run a command on one and on several processes; compare; forecast 8, 64 and 1,024 GPUs."""
    from lockstep.bench.link import choose_link
    from lockstep.bench.report import Scaling
    from lockstep.harness.ranks import threads_of_each

    sizes, chosen_link = read_sizes(gpus), choose_link(interconnect, link)
    check_places(json_file, picture)
    with measuring(words, limit, "scaling", threads_of_each(sizes[-1])) as runs:
        measured = [runs.measure(ranks, steps) for ranks in sizes]
        report = Scaling.of(words, measured, chosen_link)
    print("\n".join(report.lines()), flush=True)
    if picture:
        from lockstep.bench.picture import draw_scaling

        draw_scaling(report, picture)
    write(json_file, report.to_json())


@benching.command(
    "collectives", epilog="Example: lockstep bench collectives --gpus 2", context_settings=AS_TYPED
)
def collectives(
    gpus: Annotated[
        int, typer.Option(help="number of processes; by default all GPUs, or 2 without GPUs")
    ] = 0,
    json_file: JsonFile = None,
) -> None:
    """Time all-reduces of many sizes on this machine, and fit latency and bandwidth."""
    from dataclasses import asdict

    from lockstep.bench.collectives import choose_ranks, measure_collectives

    check_places(json_file)
    times = measure_collectives(choose_ranks(gpus))
    print("\n".join(times.lines()), flush=True)
    write(json_file, asdict(times))


@benching.command(
    "input", epilog="Example: lockstep bench input -- python train.py", context_settings=AS_TYPED
)
def bench_input(
    words: Words, steps: Steps = 12, limit: Limit = 300, json_file: JsonFile = None
) -> None:
    """See whether the loader is as fast as the steps of a command."""
    from lockstep.bench.report import input_lines

    show(words, "input", steps, limit, json_file, input_lines, profiles=False)


@benching.command(
    "step",
    epilog="Example: lockstep bench step -- torchrun --nproc_per_node=2 train.py",
    context_settings=AS_TYPED,
)
def bench_step(
    words: Words, steps: Steps = 24, limit: Limit = 300, json_file: JsonFile = None
) -> None:
    """Show where the time goes in a step of a command."""
    from lockstep.bench.report import step_lines

    show(words, "step", steps, limit, json_file, step_lines)


def show(
    words: Sequence[str],
    what: str,
    steps: int,
    limit_s: float,
    json_file: Path | None,
    lay_out: Any,
    profiles: bool = True,
) -> None:
    """Measure a command as it was typed, and print the figures as `lay_out` says."""
    from dataclasses import asdict

    check_places(json_file)
    with measuring(words, limit_s, what) as runs:
        measured = runs.measure(0, steps, profiles=profiles)
    remarks = [f"  remark: {remark}" for remark in measured.facts["remarks"]]
    print("\n".join([*lay_out(measured), *remarks]), flush=True)
    write(json_file, asdict(measured))


@contextmanager
def measuring(
    words: Sequence[str], limit_s: float, what: str, threads: int = 0
) -> "Iterator[BenchRuns]":
    """Yield the runs of a command, and print what is being run."""
    from lockstep.bench.runs import bench_runs

    print(f"measuring {what}: {' '.join(words)}", flush=True)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cores:
        print(
            f"  remark: the machine is busy already: load {load:.1f} on {cores} cores", flush=True
        )

    def report(name: str, seconds: float) -> None:
        print(f"  {name:<10}{seconds:>7.1f} s", flush=True)

    with bench_runs(words, limit_s, threads, report) as runs:
        yield runs


def read_sizes(gpus: str) -> list[int]:
    """Return the numbers of processes to measure; one is always among them, to compare with.

    >>> read_sizes("4,2")
    [1, 2, 4]
    """
    return sorted({1, *read_counts(gpus)})


def check_places(json_file: Path | None, picture: Path | None = None) -> None:
    """Refuse, before minutes of measuring, files that could not be written afterwards."""
    from lockstep.errors import ConfigError

    for path in (json_file, picture):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} is in a folder that does not exist", "create the folder")
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--picture needs matplotlib", "install it: pip install 'lockstep-train[plots]'"
        )


def write(path: Path | None, numbers: dict[str, Any]) -> None:
    """Write all numbers to a file, if one was asked for."""
    if path is not None:
        path.write_text(json.dumps(numbers, indent=2) + "\n")
