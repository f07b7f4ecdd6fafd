"""The forecast of `lockstep bench scaling`, scored: predicted against measured steps.

    python benchmarks/forecast.py [--ranks 2 4] [--steps 8] [--json FILE]

Predicted from one process by itself and the numbers of a link; measured over that very link,
by the same command on 2 and 4 ranks:

- bandwidth: each rank in a network namespace of its own, whose way out is held to a rate by the
  kernel (`tc ... tbf`). Needs root. Latency is gloo's own, measured over the loopback;
- latency: every bucket takes alpha + beta x bytes, one after the other, because the exchange
  sleeps that long.

The command trains a model that sleeps in place of computing, as a host does while its GPU works:
four ranks on two cores would otherwise be slow for want of cores, and the score is about
communication. Its gradients, buckets, exchanges and sums are real.

Ends with 1 if a prediction is off by more than 10 %.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import PartialLoss, RunConfig, Task, fit
from lockstep.bench.collectives import measure_collectives
from lockstep.bench.forecast import Timeline, forecast, step_s
from lockstep.bench.link import Link
from lockstep.bench.measured import Measured
from lockstep.bench.runs import BenchRuns
from lockstep.dist import ddp as parallel
from lockstep.task import Context

MOST_OFF = 0.10
RATES_MBIT = (200, 80)
HOOKS = ((0.010, 1 / 100e6), (0.050, 1 / 10e6))
"""Seconds a bucket, and seconds a byte."""
PAYLOAD = 1448 / 1514
"""Of an Ethernet frame on the wire, what is not a header."""

MIB_4 = 1 << 18
"""Numbers of four bytes in a MiB."""
BLOCKS = (
    (torch.float64, 3 * MIB_4 // 4),  # 1.5 MiB
    (torch.float32, 3 * MIB_4 // 2),
    (torch.float64, 5 * MIB_4 // 8),  # 1.25 MiB, a first bucket of its kind
    (torch.float32, 5 * MIB_4 // 4),
)
"""Kind and numbers of each block's weights; the backward pass meets the last one first. Buckets
hold one kind, so there are four, spread over the backward pass."""
FORWARD_S, BACKWARD_S = 0.020, 0.100
"""Of each block."""


# --- What is trained ---


class Asleep(torch.autograd.Function):
    """A layer on a GPU, seen from its host: nothing to do for a while, then a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        ctx.like = weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(BACKWARD_S)
        return gradient, torch.zeros_like(ctx.like)


class Sleeper(nn.Module):
    """Four layers that sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(num, dtype=kind) for kind, num in BLOCKS)

    def forward(self, x: Tensor) -> Tensor:
        """Return what came in."""
        for weight in self.weights:
            x = Asleep.apply(x, weight)
        return x


class SleepTask(Task):
    """Nothing is learned, in known time."""

    name = "sleep"

    def build_model(self) -> nn.Module:
        return Sleeper()

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr)

    def train_data(self) -> list[Tensor]:
        return [torch.zeros(1)] * 64

    def loss(self, model: nn.Module, batch: Tensor, context: Context) -> PartialLoss:
        return PartialLoss(model(batch.requires_grad_()).sum(), len(batch))


def slow_down(alpha_s: float, beta_s: float) -> None:
    """From here on, average one bucket after the other, each in alpha + beta x bytes."""
    line, average = ThreadPoolExecutor(1), parallel.Averaging.average

    def slowly(own: parallel.Averaging, grads: Tensor) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        line.submit(send, own, grads, done)
        return done

    def send(own: parallel.Averaging, grads: Tensor, done: torch.futures.Future[Tensor]) -> None:
        ends = time.perf_counter() + alpha_s + beta_s * grads.nbytes
        averaged = average(own, grads).wait()
        time.sleep(max(0.0, ends - time.perf_counter()))
        done.set_result(averaged)

    parallel.Averaging.average = slowly


def train(hook: str) -> int:
    """Train, over a slow link if there is one."""
    torch.set_num_threads(1)
    if hook:
        slow_down(*map(float, hook.split(",")))
    config = {"max_steps": 10**6, "batch": {"batch_size": 4}, "max_grad_norm": None}
    return fit(SleepTask(), RunConfig.parse(config)).exit_code


# --- Links of known bandwidth ---


class Cables(BenchRuns):
    """Measures with every rank behind a cable of its own."""

    prefix = f"lkf{os.getpid()}"

    def words_before(self, rank: int) -> list[str]:
        """Start a rank in its namespace."""
        return ["ip", "netns", "exec", f"{self.prefix}-{rank}"]

    def variables(self, rank: int, ranks: int, port: int) -> dict[str, str]:
        """Have ranks meet across the cables."""
        across = {"MASTER_ADDR": "10.79.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
        return super().variables(rank, ranks, port) | across


@contextmanager
def cables(ranks: int, rate_mbit: int) -> Iterator[None]:
    """Lay a cable from each rank's namespace to a switch, and hold its way out to a rate."""
    switch = f"{Cables.prefix}-s"
    names = [switch, *(f"{Cables.prefix}-{rank}" for rank in range(ranks))]
    try:
        for name in names:
            must("ip", "netns", "add", name)
            must("ip", "-n", name, "link", "set", "lo", "up")
        must("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        must("ip", "-n", switch, "link", "set", "br0", "up")
        for rank, name in enumerate(names[1:]):
            ends = ("link", "add", f"r{rank}", "type", "veth", "peer", "name", "eth0")
            must("ip", "-n", switch, *ends, "netns", name)
            must("ip", "-n", switch, "link", "set", f"r{rank}", "master", "br0", "up")
            must("ip", "-n", name, "addr", "add", f"10.79.0.{rank + 1}/24", "dev", "eth0")
            must("ip", "-n", name, "link", "set", "eth0", "up")
            # Two milliseconds' worth at once: as long as a busy kernel may be late.
            burst = f"{rate_mbit * 250}"
            shape = ("rate", f"{rate_mbit}mbit", "burst", burst, "latency", "400ms")
            must(
                *("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root"),
                *("tbf", *shape),
            )
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def must(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"forecast: {' '.join(command)}: {done.stderr.strip()} (root, and Linux's tc)")


# --- Scoring ---


def row(
    kind: str,
    link: str,
    alone: Timeline,
    costs_s: Sequence[float],
    predicted_s: float,
    found: Measured,
) -> dict[str, Any]:
    """Return one line of the score; beside it, how far off a model without overlap would be."""
    return {
        "kind": kind,
        "link": link,
        "ranks": found.ranks,
        "predicted_ms": 1e3 * predicted_s,
        "measured_ms": 1e3 * found.step_s,
        "without_ms": 1e3 * found.compute_s,
        "off": predicted_s / found.step_s - 1,
        "off_without_overlap": (alone.step_s + sum(costs_s)) / found.step_s - 1,
        "buckets": [bucket.size_bytes for bucket in found.buckets],
    }


def score(args: argparse.Namespace, folder: Path) -> tuple[Timeline, list[dict[str, Any]]]:
    """Measure alone, predict, then measure over each link."""
    words = [sys.executable, str(Path(__file__).resolve()), "--train"]
    (folder / "alone").mkdir()
    alone = BenchRuns(words, folder / "alone", threads=1).measure(1, args.steps).timeline()
    rows: list[dict[str, Any]] = []

    def add(new: dict[str, Any]) -> None:
        rows.append(new)
        print(line_of(new), flush=True)

    heads = ("link", "ranks", "predicted ms", "measured ms", "gradients kept local, ms", "off")
    print(f"| {' | '.join(heads)} | off without overlap |\n{'|---' * 7}|")
    for ranks in args.ranks:
        latency_s = measure_collectives(ranks).link.latency_s
        for rate in RATES_MBIT:
            link = Link(f"{rate} Mb/s", latency_s, rate * 1e6 / 8 * PAYLOAD, ring_only=True)
            made = forecast(alone, link, ranks)
            costs_s = [link.ring_s(bucket.size_bytes, ranks) for bucket in alone.buckets]
            place = folder / f"{ranks}_{rate}"
            place.mkdir()
            with cables(ranks, rate):
                found = Cables(words, place, threads=1).measure(ranks, args.steps)
            fit = found.link()
            assert fit is not None
            add(
                row("bandwidth", link.name, alone, costs_s, made.step_s, found)
                | {"fitted_mb_per_s": fit.bytes_per_s / 1e6, "mb_per_s": link.bytes_per_s / 1e6}
            )
        for alpha_s, beta_s in HOOKS:
            name = f"{1e3 * alpha_s:.0f} ms + bytes / {1e-6 / beta_s:.0f} MB/s"
            # The small sums do not go that way.
            costs_s = [alpha_s + beta_s * bucket.size_bytes for bucket in alone.buckets]
            place = folder / f"{ranks}_{alpha_s}"
            place.mkdir()
            hooked = BenchRuns([*words, "--hook", f"{alpha_s},{beta_s}"], place, threads=1)
            found = hooked.measure(ranks, args.steps)
            add(row("latency", name, alone, costs_s, step_s(alone, costs_s), found))
    return alone, rows


def line_of(row: dict[str, Any]) -> str:
    times = (f"{row[name]:.1f}" for name in ("predicted_ms", "measured_ms", "without_ms"))
    shares = (f"{100 * row[name]:+.1f} %" for name in ("off", "off_without_overlap"))
    return f"| {' | '.join([row['link'], str(row['ranks']), *times, *shares])} |"


def main() -> int:
    """Score the forecast, or be the command it is scored with."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hook", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        return train(args.hook)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cables and ranks are cleared away
    with tempfile.TemporaryDirectory() as folder:
        alone, rows = score(args, Path(folder))
    worst = max(abs(row["off"]) for row in rows)
    sizes = [round(bucket.size_bytes / 2**20, 2) for bucket in alone.buckets]
    print(f"\none process by itself: {1e3 * alone.step_s:.1f} ms, buckets of {sizes} MiB")
    print(f"worst: {100 * worst:.1f} % off, at most {100 * MOST_OFF:.0f} % allowed")
    if args.json:
        facts = {"torch": torch.__version__, "worst_off": worst, "most_off": MOST_OFF}
        facts |= {"cores": os.cpu_count(), "load_at_the_end": os.getloadavg()[1]}
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=2))
    return 1 if worst > MOST_OFF else 0


if __name__ == "__main__":
    sys.exit(main())
