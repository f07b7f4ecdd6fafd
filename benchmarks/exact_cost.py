"""What exact mode, and what the guards of a run, cost: ratios within one sitting.

    python benchmarks/exact_cost.py [--ranks 1 2 4] [--width 128] [--words 32] [--json FILE]

A small transformer, on the CPU with one thread a process, or on GPUs if there are any, in bf16.
`plain` and `exact` differ in `exact` alone; rounds alternate, and the medians are compared.
`plain` is what `fit` does, with ledger, events, log lines, the votes of all ranks and the look at
every loss; `bare` is `train_step` in a loop by hand, its loss read as often as `plain` logs. Both
run side by side in the same processes, ten steps of one, ten of the other, every second time in
the other order; the ratio is the median of such pairs, and lies between the two numbers after it
with a confidence of 95%.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import PartialLoss, RunConfig, Task, World
from lockstep.run.build import prepare
from lockstep.signals import StopSignals
from lockstep.step.train_step import train_step
from lockstep.task import Context
from lockstep.testing import run_ranks
from lockstep.trainer import Trainer

STEPS_A_BLOCK = 10


class Words(nn.Module):
    """A small decoder."""

    def __init__(self, width: int, num_layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(512, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a score for every word at every place."""
        return self.body(self.tokens(tokens)) @ self.tokens.weight.T


class WordsTask(Task):
    """Predict the next word of random text."""

    name = "words"

    def __init__(self, width: int, num_words: int) -> None:
        self.width, self.num_words = width, num_words

    def build_model(self) -> nn.Module:
        """Return the decoder."""
        return Words(self.width)

    def train_data(self) -> list[Tensor]:
        """Return random sentences."""
        generator = torch.Generator().manual_seed(0)
        return list(torch.randint(0, 512, (2048, self.num_words + 1), generator=generator))

    def loss(self, model: nn.Module, batch: Tensor, context: Context) -> PartialLoss:
        """Return the cross-entropy of the next word, summed."""
        scores, wanted = model(batch[:, :-1]).transpose(1, 2), batch[:, 1:]
        each = nn.functional.cross_entropy(scores, wanted, reduction="none")
        return PartialLoss(each.sum(), wanted.numel())


def config_for(way: str, args: argparse.Namespace, folder: str) -> RunConfig:
    """Return the settings of a run that only trains, far longer than anybody looks."""
    return RunConfig.parse(
        {
            "output_dir": folder,
            "max_steps": 10**6,
            "batch": {"batch_size": 8, "global_batch_size": 8 * args.leaves},
            "precision": "auto",
            "checkpoint": {"every_steps": 10**9},
            "evaluation": {"every_epochs": None},
            "sinks": {"curves": False},
            "exact": way == "exact",
            "num_threads": 1,
            "log_every": 10,
        }
    )


def steps_of(
    way: str, args: argparse.Namespace, folder: str, world: World, stack: ExitStack
) -> Iterator[None]:
    """Take a step each time the next is asked for."""
    config, task = config_for(way, args, folder), WordsTask(args.width, args.words)
    run = prepare(task, config, world, stack)
    if way == "bare":
        for batch in run.loader:
            report = train_step(
                task.loss,
                run.model,
                run.optimizer,
                batch,
                world,
                max_grad_norm=1.0,
                autocast=run.autocast,
            )
            if batch.step % config.log_every == 0:
                float(report.loss)
            yield
    trainer = Trainer(run, stack.enter_context(StopSignals()), stack)
    for batch in trainer.steps():
        trainer.step(batch)
        yield


def block_times_s(ways: Sequence[str], args: argparse.Namespace, folder: str) -> list[list[float]]:
    """Return the mean step of every block of steps, the ways in turn, in the same processes."""
    with ExitStack() as stack:
        world = stack.enter_context(World.enter())
        runs = [steps_of(way, args, f"{folder}/{way}", world, stack) for way in ways]
        times: list[list[float]] = [[] for _ in ways]
        for number in range(1 + args.blocks):
            pairs = list(zip(runs, times, strict=True))
            for run, own in reversed(pairs) if number % 2 else pairs:
                world.barrier()
                began = time.perf_counter()
                for _ in range(STEPS_A_BLOCK):
                    next(run)
                if world.device.type == "cuda":
                    torch.cuda.synchronize()
                own.append((time.perf_counter() - began) / STEPS_A_BLOCK)
        return [own[1:] for own in times]  # the first warms up


def slowest(ranks: list[list[list[float]]]) -> list[list[float]]:
    """Return each block as its slowest rank saw it."""
    return [[max(block) for block in zip(*way, strict=True)] for way in zip(*ranks, strict=True)]


def measure(num_ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the median step of every way, and ratios of what ran side by side."""

    def run(ways: Sequence[str], folder: Path) -> list[list[float]]:
        told = run_ranks(num_ranks, block_times_s, ways, args, str(folder), timeout_s=900)
        return slowest(told)

    plain_ms, exact_ms = [], []
    with tempfile.TemporaryDirectory() as folder:
        bare, guarded = run(("bare", "plain"), Path(folder) / "guards")
        # What exact mode sets holds for the whole process: it has one of its own.
        for number in range(args.rounds):
            plain_ms += [1e3 * s for s in run(("plain",), Path(folder) / f"plain_{number}")[0]]
            exact_ms += [1e3 * s for s in run(("exact",), Path(folder) / f"exact_{number}")[0]]
    plain, exact = (statistics.median(ms) if ms else math.nan for ms in (plain_ms, exact_ms))
    ratios = sorted(b / a for a, b in zip(bare, guarded, strict=True))
    apart = max(0, int((len(ratios) - 1.96 * math.sqrt(len(ratios))) / 2))
    return {
        "ranks": num_ranks,
        "leaves": args.leaves,
        "bare_ms": 1e3 * statistics.median(bare),
        "plain_ms": plain,
        "exact_ms": exact,
        "exact_over_plain": exact / plain,
        "guards_over_bare": statistics.median(ratios),
        "guards_95": [ratios[apart], ratios[-1 - apart]],
    }


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--words", type=int, default=32)
    parser.add_argument("--leaves", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3, help="of exact mode; 0: the guards alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [measure(ranks, args) for ranks in args.ranks]
    print("| ranks | leaves | bare ms | plain ms | exact ms | exact / plain | guards / bare |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['ranks']} | {row['leaves']} | {row['bare_ms']:.1f} | {row['plain_ms']:.1f} | "
            f"{row['exact_ms']:.1f} | {row['exact_over_plain']:.3f} | "
            f"{row['guards_over_bare']:.3f} "
            f"({' to '.join(f'{ratio:.3f}' for ratio in row['guards_95'])}) |"
        )
    if args.json:
        facts = {"torch": torch.__version__, "width": args.width, "words": args.words}
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
