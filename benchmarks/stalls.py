"""Where training stands still: at a checkpoint, at the start of a resumed epoch, at start-up.

    python benchmarks/stalls.py [--width 1024] [--every 200] [--repeats 10] [--json FILE]

A checkpoint's stall is what the loop loses by it, seen from the model: the time between two steps
with a save in between, less that without. It is set against the bare copy of the same tensors to
host memory, and as a share against the time from one save to the next; `whole` waits for the file,
`background` for the copy alone. A resumed epoch is a loader that is sent to a position. Start-up
is a process of its own. Prints a table with the targets; exit code 1 when one is missed.
"""

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import Loader, RunConfig, Task, fit
from lockstep.checkpoint.state import flatten
from lockstep.testing import FakeWorld

BIN = Path(sys.executable).parent
NUM_LAYERS, NUM_SAVES = 16, 4
POSITIONS = (0, 10**3, 10**6, 10**9)


@dataclass
class Row:
    """One line of the table; `most` is the target, None where there is none."""

    what: str
    value: float
    unit: str
    most: float | None = None

    @property
    def verdict(self) -> str:
        if self.most is None:
            return ""
        return "ok" if self.value <= self.most else "MISSED"

    def __str__(self) -> str:
        target = "" if self.most is None else f"<= {self.most:g} {self.unit}"
        return f"{self.what:<58}{self.value:>9.4g} {self.unit:<3}{target:>14}  {self.verdict}"


# --- Checkpoints ---------------------------------------------------------------------------


class Layers(Task):
    """A stack of layers with a large state for its work; notes when each step begins."""

    name = "stalls"

    def __init__(self, width: int) -> None:
        self.width = width
        self.began: list[float] = []

    def build_model(self) -> nn.Module:
        self.model = nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(NUM_LAYERS)))
        return self.model

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
        return self.optimizer

    def train_data(self) -> list[Tensor]:
        return list(torch.randn(2**16, 8).split(1))

    def loss(self, model: nn.Module, batch: Tensor, context: Any) -> Tensor:
        self.began.append(time.perf_counter())
        return model(batch.flatten().mean().expand(4, self.width)).square().mean()


def train(width: int, every: int, **checkpoint: Any) -> tuple[Layers, list[float]]:
    """Train with a save every so many steps; return the time from each step to the next."""
    task = Layers(width)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder,
            "max_steps": every * NUM_SAVES + every // 2,
            "batch": {"batch_size": 4},
            "checkpoint": {"every_steps": every, "keep_last": 1, **checkpoint},
            "sinks": {"curves": False},
            "log_every": 1,  # reads the loss: on a GPU, a step ends where it ends
        }
        with redirect_stdout(io.StringIO()):
            fit(task, RunConfig.parse(settings))
    return task, [b - a for a, b in zip(task.began, task.began[1:], strict=False)]


def bare_copies_s(task: Layers, repeats: int) -> tuple[float, float, int]:
    """Return how long a copy of model and optimizer to host memory takes, and its bytes.

    Into new memory, whose first touch takes longer than the copy, and into memory used before.
    """
    tensors = [*flatten(task.model.state_dict())[0].values()]
    tensors += flatten(task.optimizer.state_dict())[0].values()
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]

    def copy(memory: Tensor) -> None:
        for tensor, place in zip(tensors, memory.split(sizes), strict=True):
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())

    def new() -> Tensor:
        return torch.empty(sum(sizes), dtype=torch.uint8)

    used = new().zero_()
    return timed(lambda: copy(new()), repeats), timed(lambda: copy(used), repeats), sum(sizes)


def checkpoints(width: int, every: int, repeats: int) -> list[Row]:
    """Measure what saves cost the loop, waited for and in the background."""
    rows = []
    for name, background in (("whole", False), ("background", True)):
        task, gaps = train(width, every, background=background)
        copy_s, again_s, size = bare_copies_s(task, repeats)
        # The gap that holds a save is the one after step `every`, and so on; the first is warm-up.
        saves = gaps[every - 1 :: every][:NUM_SAVES]
        others = [gap for n, gap in enumerate(gaps[10:], start=11) if n % every]
        step_s = statistics.median(others)
        stall_s = statistics.median(saves) - step_s
        share = 100 * stall_s / (stall_s + every * step_s)
        of = f"{name}, {size / 1e6:.0f} MB"
        rows += [
            Row(f"{of}: bare copy to new host memory", 1e3 * copy_s, "ms"),
            Row(f"{of}: bare copy to memory used before", 1e3 * again_s, "ms"),
            Row(f"{of}: stall per checkpoint", 1e3 * stall_s, "ms"),
            Row(f"{of}: stall / copy", stall_s / copy_s, "x", 1.0 if background else None),
            Row(
                f"{of}: share of wall time, a save every {every * step_s:.1f} s",
                share,
                "%",
                1.0 if background else None,
            ),
        ]
        if background:
            beside = [gaps[n * every : n * every + 5] for n in range(1, NUM_SAVES)]
            slower = statistics.median(gap for five in beside for gap in five) / step_s
            rows.append(Row("a step beside the writer, against one without", slower, "x"))
    return rows


# --- Seeking ---------------------------------------------------------------------------------


class Endless:
    """Two billion samples that cost nothing."""

    def __len__(self) -> int:
        return 2 * 10**9

    def __getitem__(self, index: int) -> int:
        return index


def first_batch(position: int) -> None:
    """Read the first batch of a run that goes on after `position` samples.

    Comparing the data with those of a checkpoint is not part of it: that does not depend on
    where the run is.
    """
    loader = Loader(Endless(), FakeWorld(), batch_size=8, epochs=1)
    loader.seek(position // 8, position)
    batch = next(iter(loader))
    assert batch.consumed == position + 8


def seeks(repeats: int) -> list[Row]:
    """Measure the time to the first batch at several positions of an epoch."""
    first_batch(0)  # imports
    took = {n: 1e3 * timed(lambda n=n: first_batch(n), repeats, min) for n in POSITIONS}
    rows = [Row(f"first batch at sample {n:,} of an epoch", t, "ms", 10.0) for n, t in took.items()]
    return [
        *rows,
        Row("the slowest of these against the first", max(took.values()) / took[0], "x", 2.0),
    ]


# --- Start-up --------------------------------------------------------------------------------

SCRIPT = """
import sys, time
from lockstep import RunConfig, fit
from lockstep.testing import TinyTask
class Task(TinyTask):
    def loss(self, model, batch, context):
        if context.step == 1 and context.world.is_first:  # the first step is behind us
            open(sys.argv[1] + "/stepped", "w").write(repr(time.time()))
        return super().loss(model, batch, context)
fit(Task(), RunConfig.parse({"output_dir": sys.argv[1], "max_steps": 2, "device": "cpu",
    "batch": {"batch_size": 4}, "sinks": {"curves": False}}))
"""


def timed(
    action: Callable[[], object],
    repeats: int,
    of: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Return the median, or another choice, of the times of an action in seconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return of(times)


def to_first_step_s(command: list[str]) -> float:
    """Return the seconds from starting a command to the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        began = time.time()
        ran = subprocess.run(
            [*command, str(script), folder], env=environment, capture_output=True, text=True
        )
        if ran.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{ran.stdout}{ran.stderr}")
        return float((Path(folder) / "stepped").read_text()) - began


def start_up(repeats: int) -> list[Row]:
    """Measure how long a user waits for a command, and for the first step."""
    helped = [str(BIN / "lockstep"), "--help"]
    help_s = timed(lambda: subprocess.run(helped, check=True, capture_output=True), repeats)
    rows = [Row("lockstep --help", help_s, "s", 0.2)]
    few = max(1, repeats // 3)
    for name, command in {
        "python": [sys.executable],
        "torchrun, 2 processes": [str(BIN / "torchrun"), "--standalone", "--nproc_per_node=2"],
        "lockstep launch, 2 processes": [str(BIN / "lockstep"), "launch", "--gpus", "2"],
    }.items():
        seconds = statistics.median(to_first_step_s(command) for _ in range(few))
        rows.append(Row(f"{name}: to the end of the first step", seconds, "s"))
    rows[-1].most = rows[-2].value
    return rows


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=1024, help="1024 is a state of 200 MB")
    parser.add_argument("--every", type=int, default=200, help="steps from save to save")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = checkpoints(args.width, args.every, args.repeats)
    rows += seeks(args.repeats) + start_up(args.repeats)
    print(*rows, sep="\n")
    if args.json:
        machine = {"cores": os.cpu_count(), "cpu": platform.processor() or platform.machine()}
        facts = {"torch": torch.__version__, "machine": machine, "every": args.every}
        told = [{**asdict(row), "verdict": row.verdict} for row in rows]
        args.json.write_text(json.dumps({**facts, "rows": told}, indent=2) + "\n")
    return int(any(row.verdict == "MISSED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
