"""What exact mode, and what the guards of a run, cost: ratios within one sitting.

    python benchmarks/exact_cost.py [--ranks 1 2 4] [--width 128] [--words 32] [--json FILE]

A small transformer, on the CPU with one thread a process, or on GPUs if there are any, in bf16.
`plain` and `exact` differ in `exact` alone. `plain` is what `fit` does, with ledger, events, the
votes of all ranks and the look at every loss; `bare` is `train_step` in a loop by hand. Rounds
alternate, and the medians are compared.
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import PartialLoss, RunConfig, Task, World
from lockstep.setup import prepare
from lockstep.signals import StopSignals
from lockstep.step import train_step
from lockstep.task import Context
from lockstep.testing import run_ranks
from lockstep.trainer import Trainer

WARMUP_STEPS = 3
WAYS = ("bare", "plain", "exact")


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


def step_time_s(way: str, args: argparse.Namespace, folder: str) -> float:
    """Return the median time of a step on this rank."""
    config = RunConfig.parse(
        {
            "output_dir": folder,
            "max_steps": WARMUP_STEPS + args.steps,
            "batch": {"batch_size": 8, "global_batch_size": 8 * args.leaves},
            "precision": "auto",
            "checkpoint": {"every_steps": 10**9},
            "sinks": {"curves": False},
            "exact": way == "exact",
            "num_threads": 1,
            "log_every": 10,
        }
    )
    times = []
    with ExitStack() as stack:
        world = stack.enter_context(World.enter(config.device))
        signals = stack.enter_context(StopSignals())
        task = WordsTask(args.width, args.words)
        run = prepare(task, config, world, stack)
        if way == "bare":
            began = time.perf_counter()
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
                float(report.loss)
                times.append(time.perf_counter() - began)
                began = time.perf_counter()
        else:
            trainer = Trainer(run, signals, stack)
            began = time.perf_counter()
            for batch in trainer.steps():
                trainer.step(batch)
                times.append(time.perf_counter() - began)
                began = time.perf_counter()
    return statistics.median(times[WARMUP_STEPS:])


def measure(num_ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the median step of every way, rounds in turn, and its ratios."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for way in WAYS:
                where = str(Path(folder) / f"{way}_{number}")
                times = run_ranks(num_ranks, step_time_s, way, args, where, timeout_s=600)
                found[way].append(max(times))
    median = {way: statistics.median(times) for way, times in found.items()}
    return {
        "ranks": num_ranks,
        "leaves": args.leaves,
        **{f"{way}_ms": 1e3 * median[way] for way in WAYS},
        "exact_over_plain": median["exact"] / median["plain"],
        "guards_over_bare": median["plain"] / median["bare"],
    }


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--words", type=int, default=32)
    parser.add_argument("--leaves", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [measure(ranks, args) for ranks in args.ranks]
    print("| ranks | leaves | bare ms | plain ms | exact ms | exact / plain | guards / bare |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['ranks']} | {row['leaves']} | {row['bare_ms']:.1f} | {row['plain_ms']:.1f} | "
            f"{row['exact_ms']:.1f} | {row['exact_over_plain']:.3f} | "
            f"{row['guards_over_bare']:.3f} |"
        )
    if args.json:
        facts = {"torch": torch.__version__, "width": args.width, "words": args.words}
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
