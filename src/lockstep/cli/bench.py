"""`lockstep bench scaling|collectives|input|step`: measured speed-up, and where the time goes.

Owns: the verbs, the folder of a measurement, and what is printed. Does not own: any
measurement (`bench/`).
"""

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.words import AS_TYPED, Limit, Words, read_counts
from lockstep.text_input import whole_number

if TYPE_CHECKING:
    from lockstep.bench.play import Bench

benching = typer.Typer(
    help="Measure speed-up and where the time goes; forecast it for the GPUs you don't have.",
    no_args_is_help=True,
)
BUSY = 0.5
"""Processes that run or wait, per core, from which on times are those of a busy machine."""
Steps = Annotated[int, typer.Option(help="measured steps of each kind", min=4)]
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
    link: Annotated[str, typer.Option(help="or for a link of your own: 12.5GB/s,10us")] = "",
    picture: Annotated[Path | None, typer.Option(help="draw it into this file")] = None,
    limit: Limit = 300,
    json_file: JsonFile = None,
) -> None:
    """Run the command of one process on several, compare, and forecast 8, 64 and 1,024 GPUs."""
    from lockstep.bench.link import choose_link
    from lockstep.bench.report import Scaling

    sizes, asked = read_sizes(gpus), choose_link(interconnect, link)
    check_places(json_file, picture)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    each = whole_number(threads) or max(1, (os.cpu_count() or 1) // sizes[-1])
    with measuring(words, limit, "scaling", each) as bench:
        found = Scaling.of(words, [bench.measure(ranks, steps) for ranks in sizes], asked)
    print("\n".join(found.lines()), flush=True)
    if picture:
        from lockstep.bench.picture import draw_scaling

        draw_scaling(found, picture)
    write(json_file, found.to_json())


@benching.command(
    "collectives", epilog="Example: lockstep bench collectives --gpus 2", context_settings=AS_TYPED
)
def collectives(
    gpus: Annotated[int, typer.Option(help="processes; all GPUs if not given, else 2")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Time all-reduces of many sizes on this machine, and fit latency and bandwidth."""
    import torch

    from lockstep.bench.collectives import measure_collectives
    from lockstep.errors import ConfigError

    check_places(json_file)
    there = torch.cuda.device_count()
    gpus = gpus or max(2, there)
    if gpus < 2 or 0 < there < gpus:
        raise ConfigError(
            f"--gpus {gpus} is no number of processes to measure between ({there} GPUs here)",
            f"--gpus 2 to {there}" if there > 1 else "--gpus 2, with CUDA_VISIBLE_DEVICES= on CPUs",
        )
    found = measure_collectives(gpus)
    print("\n".join(found.lines()), flush=True)
    write(json_file, found.to_json())


@benching.command(
    "input", epilog="Example: lockstep bench input -- python train.py", context_settings=AS_TYPED
)
def bench_input(
    words: Words, steps: Steps = 12, limit: Limit = 300, json_file: JsonFile = None
) -> None:
    """See whether data come as fast as a command's steps eat them."""
    from lockstep.bench.report import input_lines

    show(words, "input", steps, limit, json_file, input_lines, looks=False)


@benching.command(
    "step",
    epilog="Example: lockstep bench step -- torchrun --nproc_per_node=2 train.py",
    context_settings=AS_TYPED,
)
def bench_step(
    words: Words, steps: Steps = 24, limit: Limit = 300, json_file: JsonFile = None
) -> None:
    """See where the time of a command's step goes."""
    from lockstep.bench.report import step_lines

    show(words, "step", steps, limit, json_file, step_lines)


def show(
    words: Sequence[str],
    what: str,
    steps: int,
    limit_s: float,
    json_file: Path | None,
    lay_out: Any,
    looks: bool = True,
) -> None:
    """Measure a command as it was typed, and print what was found in one way or another."""
    from dataclasses import asdict

    check_places(json_file)
    with measuring(words, limit_s, what) as bench:
        found = bench.measure(0, steps, looks=looks)
    remarks = [f"  remark: {remark}" for remark in found.facts["remarks"]]
    print("\n".join([*lay_out(found), *remarks]), flush=True)
    write(json_file, asdict(found))


@contextmanager
def measuring(
    words: Sequence[str], limit_s: float, what: str, threads: int = 0
) -> "Iterator[Bench]":
    """Give a command a folder to be measured in; what it printed is kept only if it failed."""
    from lockstep.bench.play import Bench
    from lockstep.errors import LaunchError
    from lockstep.harness.command import ending_on_signals

    print(f"measuring {what}: {' '.join(words)}", flush=True)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cores:
        print(
            f"  remark: the machine is busy already: load {load:.1f} on {cores} cores", flush=True
        )

    def tell(name: str, seconds: float) -> None:
        print(f"  {name:<10}{seconds:>7.1f} s", flush=True)

    folder = Path(tempfile.mkdtemp(prefix="lockstep_bench_"))
    is_kept = False
    try:
        with ending_on_signals():
            yield Bench(words, folder, limit_s=limit_s, threads=threads, tell=tell)
    except LaunchError:
        is_kept = any(folder.glob("*/output*.txt"))
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


def read_sizes(gpus: str) -> list[int]:
    """Return the numbers of processes to measure; one is always among them, to compare with.

    >>> read_sizes("4,2")
    [1, 2, 4]
    """
    return sorted({1, *read_counts(gpus)})


def check_places(json_file: Path | None, picture: Path | None = None) -> None:
    """Refuse, before minutes are spent on it, what could not be written in the end."""
    from lockstep.errors import ConfigError

    for path in (json_file, picture):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} lies in no folder", "one that exists")
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--picture needs matplotlib", "pip install 'lockstep-train[plots]'")


def write(path: Path | None, numbers: dict[str, Any]) -> None:
    """Write all numbers to a file, if one was asked for."""
    if path is not None:
        path.write_text(json.dumps(numbers, indent=2) + "\n")
