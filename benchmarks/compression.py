"""What rounding gradients between ranks does to a run: its curve, its bytes, its steps.

    python benchmarks/compression.py [--epochs 10] [--link_mbit 200] [--json FILE] [--picture PNG]

The smallest JiT on generated images, two ranks on the CPU, one thread each. All runs have the
same first weights, samples and noise, and differ in `gradients.exchange_in` alone. Two more are to
measure by: a learning rate that is a millionth larger, which nobody would notice, and another
seed, which is luck. Bytes are counted where they are handed to the sum.

With `--link_mbit`, steps are timed over a link of that rate, the ways in turn in the same processes
(each rank in a network namespace of its own, as in forecast.py; needs root), and the bytes are
those that the kernel counts on the wire.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from forecast import Cables, cables
from torch import Tensor

from lockstep import RunConfig, World, fit, read_events
from lockstep.run.build import prepare
from lockstep.run.run import Run
from lockstep.signals import StopSignals
from lockstep.testing import free_port, run_ranks
from lockstep.trainer import Trainer
from lockstep_recipes.jit.flags import build
from lockstep_recipes.jit.sample_data import make_images
from lockstep_recipes.jit.task import JiTTask

WAYS = ("same", "bf16", "fp16")
OTHER_RATE, OTHER_SEED = "same, rate + 1e-6 of it", "same, another seed"
NUM_IMAGES, NUM_HELD_OUT, SIZE = 1024, 256, 16
STEPS_A_BLOCK, WIRE = 3, Path("/sys/class/net/eth0/statistics/tx_bytes")


def jit(way: str, folder: Path, *flags: str) -> tuple[JiTTask, RunConfig]:
    """Return what to train, and how, one way."""
    words = f"--model JiT-T/4 --img_size {SIZE} --batch_size 16 --warmup_epochs 1"
    words += f" --lr {1e-3 * (1 + 1e-6 * (way == OTHER_RATE))}"
    words += " --ema_decays --num_workers 0 --grid 0 --num_fid_samples 0 --log_interval 1"
    words += f" --data_path {folder / 'train'} --val_path {folder / 'held_out'}"
    words += f" --output_dir {folder / way.replace(' ', '_')}"
    words += f" --device cpu --seed {int(way == OTHER_SEED)}"
    words += f" --set gradients.exchange_in={way.split(',')[0]} --set num_threads=1"
    return build([*words.split(), *flags])


# --- Curves ---


def train(way: str, folder: Path, epochs: int) -> int:
    """Train one way to the end; return the bytes of gradients that this rank had summed."""
    sent, all_sum_later = [], World.all_sum_later

    def counted(world: World, value: Tensor) -> Any:
        sent.append(value.nbytes)
        return all_sum_later(world, value)

    World.all_sum_later = counted  # type: ignore[method-assign]
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    fit(*jit(way, folder, "--epochs", str(epochs), "--save_interval", str(epochs)))
    return sum(sent)


def curve(way: str, folder: Path, epochs: int) -> dict[str, Any]:
    """Return what a run left behind."""
    sent = run_ranks(2, train, way, folder, epochs, timeout_s=1800)[0]
    events = read_events(jit(way, folder)[1].output_dir)
    losses = [event["loss"] for event in events if event["event"] == "step"]
    held_out = {e["step"]: e["metrics"]["loss"] for e in events if e["event"] == "evaluation"}
    return {"losses": losses, "held_out": held_out, "bytes_a_step": sent / len(losses)}


def apart(found: dict[str, Any], reference: dict[str, Any]) -> list[float]:
    """Return how far training losses lie from the reference's, step by step."""
    pairs = zip(found["losses"], reference["losses"], strict=True)
    return [abs(one - other) for one, other in pairs]


# --- A slow link ---


def time_steps(folder: Path, num_blocks: int) -> None:
    """Time steps of all ways in turn, and the bytes they send; the first rank writes it down."""
    with ExitStack() as stack:
        world = stack.enter_context(World.enter("cpu", timeout_s=300))
        runs = [prepare(*jit(way, folder, "--epochs", "100"), world, stack) for way in WAYS]
        trainers = [Trainer(run, StopSignals(), stack) for run in runs]
        steps = [trainer.steps() for trainer in trainers]
        found: dict[str, Any] = {way: {"step_s": [], "bytes": []} for way in WAYS}
        for block in range(1 + num_blocks):
            for way, trainer, batches in zip(WAYS, trainers, steps, strict=True):
                world.barrier()
                began, before = time.perf_counter(), int(WIRE.read_text())
                for _ in range(STEPS_A_BLOCK):
                    trainer.step(next(batches))
                if block:  # the first one warms up
                    sent = int(WIRE.read_text()) - before
                    found[way]["step_s"].append((time.perf_counter() - began) / STEPS_A_BLOCK)
                    found[way]["bytes"].append(sent / STEPS_A_BLOCK)
        found["parameters"] = num_trained(runs[0])
        if world.is_first:
            (folder / "link.json").write_text(json.dumps(found))


def num_trained(run: Run) -> int:
    return sum(p.numel() for p in run.model.parameters() if p.requires_grad)


def over_link(folder: Path, rate_mbit: int, num_blocks: int) -> dict[str, Any]:
    """Start both ranks behind cables of a rate, and return what they measured."""
    here = [sys.executable, str(Path(__file__).resolve()), "--as_rank", str(folder)]
    here += ["--blocks", str(num_blocks)]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.79.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "eth0"}
    with cables(2, rate_mbit):
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", f"{Cables.prefix}-{rank}", *here],
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]
        codes = [rank.wait() for rank in ranks]
    if any(codes):
        sys.exit("compression: a rank failed")
    found = json.loads((folder / "link.json").read_text())
    rows: dict[str, Any] = {"mbit": rate_mbit, "parameters": found["parameters"]}
    for way in WAYS:
        ratios = [a / b for a, b in zip(found[way]["step_s"], found["same"]["step_s"], strict=True)]
        rows[way] = {
            "step_s": statistics.median(found[way]["step_s"]),
            "ratio": statistics.median(ratios),
            "ratios": [min(ratios), max(ratios)],
            "bytes_a_step": statistics.median(found[way]["bytes"]),
        }
    return rows


# --- What is shown ---


def draw(curves: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the curves, and how far they lie apart."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4.2), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = dict(
        zip(curves, ("#33373d", "#d1603d", "#3b6fb6", "#2f9e7f", "#b9bec6"), strict=True)
    )
    dashes = dict(zip(curves, ("-", "--", ":", "-.", "-"), strict=True))
    for way, found in curves.items():
        look = {"color": colours[way], "linestyle": dashes[way], "linewidth": 1.6}
        steps, losses = list(found["held_out"]), list(found["held_out"].values())
        left.plot(steps, losses, label=way, marker="o", markersize=3, **look)
        if way != "same":
            look["linestyle"] = "-"
            each = apart(found, curves["same"])
            right.plot(range(1, len(each) + 1), each, label=way, **(look | {"linewidth": 0.9}))
    left.set_title("held-out loss")
    right.set_title("training loss: |difference| to exchange_in: same")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png")


def main() -> None:
    """Train all ways, time them, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=10, help="of 32 steps each")
    parser.add_argument("--link_mbit", type=int, help="also time steps over a link of this rate")
    parser.add_argument("--blocks", type=int, default=6, help=f"of {STEPS_A_BLOCK} timed steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--as_rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.as_rank:
        time_steps(args.as_rank, args.blocks)
        return
    said: dict[str, Any] = {"torch": torch.__version__, "epochs": args.epochs}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_images(folder / "train", num=NUM_IMAGES, size=SIZE, seed=0)
        make_images(folder / "held_out", num=NUM_HELD_OUT, size=SIZE, seed=1)
        curves = {way: curve(way, folder, args.epochs) for way in (*WAYS, OTHER_RATE, OTHER_SEED)}
        if args.link_mbit:
            said["link"] = over_link(folder, args.link_mbit, args.blocks)
    reference = curves["same"]
    print(
        "| exchange_in | bytes a step | held-out loss | apart in 64 steps | in all | at the end |"
    )
    print("|---|---|---|---|---|---|")
    for way, found in curves.items():
        off = apart(found, reference)
        last = list(found["held_out"].values())[-1]
        print(
            f"| {way} | {found['bytes_a_step']:,.0f} | {last:.4f} | "
            f"{max(off[:64]):.1e} | {max(off):.1e} | "
            f"{statistics.mean(off[-32:]):.1e} |"
        )
    if args.link_mbit:
        print(f"\n| over {args.link_mbit} Mbit/s | bytes a step | a step | ratio | min..max |")
        print("|---|---|---|---|---|")
        for way in WAYS:
            row = said["link"][way]
            low, high = row["ratios"]
            print(
                f"| {way} | {row['bytes_a_step']:,.0f} | {row['step_s'] * 1e3:.0f} ms | "
                f"{row['ratio']:.2f} | {low:.2f}..{high:.2f} |"
            )
    if args.picture:
        draw(curves, args.picture)
    if args.json:
        args.json.write_text(json.dumps({**said, "curves": curves}, indent=2) + "\n")


if __name__ == "__main__":
    main()
