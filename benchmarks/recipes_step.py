"""How near each recipe's step is to what one GPU can do, on data made on the spot.

    python benchmarks/recipes_step.py OUT [--only jit-256 ctclip] [--compile graphs] [--tiny]

Runs `lockstep bench step` over every recipe at a size that a GPU is bought for, prints one table
and writes all numbers to OUT/recipes_step.json, of each recipe to OUT/NAME.json. Nothing is
downloaded. `--tiny` takes sizes for a CPU, which say nothing, in a minute or so. Ends with 1 if
a recipe could not be measured.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep_recipes.atlas.sample_data import make_episodes
from lockstep_recipes.ctclip.flags import SMALL_MODEL
from lockstep_recipes.made_folder import make_folder
from lockstep_recipes.protein.data import save_chain
from lockstep_recipes.protein.sample_data import make_chains
from lockstep_recipes.segmentation.sample_data import NUM_CLASSES, make_shapes

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT_S, INTERRUPT_S = 150.0, 10.0
"""How long a recipe may take, and then to end."""
NUM_WORDS, REPORT_WORDS = 30_000, 300
VOLUME_FILES, VOLUMES = 4, 128
"""So many files on disk, each read as the volume of many reports."""


@dataclass(frozen=True, slots=True)
class Case:
    """A recipe at one size."""

    name: str
    recipe: str
    words: Callable[[Path, bool], Sequence[object]]
    """The recipe's own flags, from a folder for its data; and whether all is to be tiny."""
    in_tiny: bool = True


# --- What each recipe is measured on ---------------------------------------------------------


def jit(batch_size: int) -> Callable[[Path, bool], Sequence[object]]:
    """JiT-B/4 at 64 px, compiled, in bf16."""

    def words(data: Path, tiny: bool) -> Sequence[object]:
        small = ("--model", "JiT-T/4", "--img_size", 16, "--batch_size", 16, "--sample_data", 128)
        if tiny:
            return (*small, "--num_workers", 0, "--output_dir", data)
        own = ("--model", "JiT-B/4", "--img_size", 64, "--batch_size", batch_size, "--use_amp")
        made = ("--sample_data", 2048, "--num_workers", 12, "--output_dir", data)
        return (*own, "--compile", "--ema_decays", 0.999, 0.99, *made)

    return words


def protein(has_side_chains: bool) -> Callable[[Path, bool], Sequence[object]]:
    """Diffusion over 45 chains a step, about 10,000 residues."""

    def words(data: Path, tiny: bool) -> Sequence[object]:
        num, longest = (24, 60) if tiny else (188, 360)
        cache = make_cache(data / "cache", num, longest, has_side_chains)
        found = ("--pdb_path", cache, "--cache_dir", cache, "--use_predefined_split")
        diffusion = ("--use_discrete_diffusion", "--schedule", "linear", "--loss", "elbo")
        own = (*found, *diffusion, "--output_dir", data / "run", "--learning_rate", 1e-3)
        if tiny:
            return (*own, "--batch_size", 4, "--hidden_dim", 16, "--num_layers", 1)
        steps = ("--batch_size", 15, "--gradient_accumulation_steps", 3, "--num_workers", 8)
        return (*own, *steps, "--use_amp")

    return words


def make_cache(folder: Path, num: int, longest: int, has_side_chains: bool) -> Path:
    """Write chains of a quarter to all of the longest length, eight of them held out."""

    def fill(aside: Path) -> None:
        chains = make_chains(num, min_length=max(40, longest // 4), max_length=longest)
        if not has_side_chains:
            chains = [replace(c, chi_mask=np.zeros_like(c.chi_mask)) for c in chains]
        names = [save_chain(aside, chain).stem for chain in chains]
        for split, listed in {"val": names[:8], "train": names[8:], "test": []}.items():
            (aside / f"{split}.txt").write_text("\n".join([*listed, ""]))

    record = {"num": num, "longest": longest, "has_side_chains": has_side_chains}
    return make_folder(folder, record, fill)


def segmentation(data: Path, tiny: bool) -> Sequence[object]:
    """ResNet-50 with ASPP at 361 x 481, eight images, dense masks."""
    num, size = (32, 48) if tiny else (96, 400)
    shapes = make_shapes(data / "shapes", num, num_val=8, size=size)
    found = ("--dataset_path", shapes, "--dataset", "Full", "--num_classes", NUM_CLASSES)
    own = (*found, "--no_tensorboard", "--output_dir", data / "run", "--l_lorm", 0.03)
    if tiny:
        small = ("--model_type", "res18_ASPP_lorm", "--width", 8, "--crop_size", 33)
        return (*own, *small, "--batchsize", 4, "--workers", 0)
    large = ("--model_type", "res50_ASPP_lorm", "--crop_size", 361, 481, "--scale", 0.75, 1.75)
    return (*own, *large, "--batchsize", 8, "--workers", 14)


def atlas(data: Path, tiny: bool) -> Sequence[object]:
    """A policy on a tiny VGGT, all of it trained, 64 samples of two frames."""
    size = 28 if tiny else 112
    episodes = make_episodes(data / "episodes", num=4 if tiny else 32, size=size)
    settings: dict[str, object] = {
        "data.data_dir": episodes,
        "checkpoint.save_dir": data / "run",
        "model.freeze_vggt": "false",
        "model.vggt_preset": "micro" if tiny else "tiny",
        "model.lang_preset": "micro" if tiny else "tiny",
        "model.fusion_hidden_dim": 64 if tiny else 256,
        "model.fusion_layers": 1 if tiny else 4,
        "model.predict_residual": "true",
        "data.views": "[workspace]",
        "data.use_state": "true",
        "data.use_last_action": "true",
        "data.num_temporal_frames": 2,
        "data.image_size": size,
        "data.cache_images": "true",
        "data.num_workers": 0 if tiny else 4,
        "data.batch_size": 8 if tiny else 64,
    }
    return [f"--set={name}={value}" for name, value in settings.items()]


def ctclip(data: Path, tiny: bool) -> Sequence[object]:
    """CT-CLIP at full size, four volumes of 480 x 480 x 240."""
    shape = (24, 48, 48) if tiny else (240, 480, 480)
    volumes = make_folder(
        data / "volumes", {"shape": list(shape)}, lambda aside: write_volumes(aside, shape)
    )
    settings: dict[str, object] = {
        "data.paths.train": volumes,
        "data.paths.validation": "null",
        "checkpoint.save_dir": data / "run",
        "data.num_workers": 0 if tiny else workers_for(4 * 2 * int(np.prod(shape))),
        "data.prefetch_factor": 1,
    }
    if tiny:
        for section, keys in SMALL_MODEL.items():
            settings |= {f"model.{section}.{key}": value for key, value in keys.items()}
    config = REPOSITORY / "recipes" / "ctclip" / "configs" / "base_config.yaml"
    return ["--config", config, *(f"--set={name}={value}" for name, value in settings.items())]


def workers_for(batch_bytes: int, most: int = 10) -> int:
    """Return how many workers may hold two batches each in shared memory."""
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared).free if shared.exists() else 0
    return min(most, free // (2 * batch_bytes))


def write_volumes(folder: Path, shape: tuple[int, int, int]) -> None:
    """Write noise as volumes that are prepared already, and reports of random words."""
    rng = np.random.default_rng(0)
    for number in range(VOLUME_FILES):
        noise = 2 * rng.random(shape, dtype=np.float32) - 1
        np.save(folder / f"volume_{number}.npy", noise.astype(np.float16))
    lines = []
    for number in range(VOLUMES):
        report = " ".join(f"word{n}" for n in rng.integers(NUM_WORDS, size=REPORT_WORDS))
        name = f"volume_{number % VOLUME_FILES}.npy"
        lines.append(json.dumps({"volume": name, "report": report, "prepared": True}))
    (folder / "manifest.jsonl").write_text("\n".join(lines) + "\n")


CASES = (
    Case("jit-256", "jit", jit(256)),
    Case("jit-64", "jit", jit(64), in_tiny=False),
    Case("protein", "protein", protein(has_side_chains=False)),
    Case("side-chains", "protein", protein(has_side_chains=True), in_tiny=False),
    Case("segmentation", "segmentation", segmentation),
    Case("atlas", "atlas", atlas),
    Case("ctclip", "ctclip", ctclip),
)


# --- Measuring -------------------------------------------------------------------------------


def measure(
    case: Case, folder: Path, steps: int, tiny: bool, compiled: str | None = None
) -> dict[str, Any] | None:
    """Run `lockstep bench step` over a recipe; None if it failed, which it has then said."""
    data, report = (folder / "data" / case.recipe).absolute(), folder / f"{case.name}.json"
    data = data if case.recipe == "jit" else data.with_name(case.name)  # sizes of JiT share images
    recipe = [sys.executable, "-m", f"lockstep_recipes.{case.recipe}"]
    words = [*recipe, *map(str, case.words(data, tiny))]
    if compiled:
        words.append(f"--set={'lockstep.' * (case.recipe == 'ctclip')}compile={compiled}")
    verb = [sys.executable, "-m", "lockstep.cli.main", "bench", "step", "--steps", str(steps)]
    report.unlink(missing_ok=True)
    found = (str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", ""))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, found))}
    if tiny:  # threads cost more than such small sums
        env["OMP_NUM_THREADS"] = "1"
    running = subprocess.Popen([*verb, "--json", str(report), "--", *words], env=env)
    try:
        running.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"{case.name}: nothing after {LIMIT_S:g} s", flush=True)
        running.send_signal(signal.SIGINT)  # it ends what it has started
        try:
            running.wait(INTERRUPT_S)
        except subprocess.TimeoutExpired:
            running.kill()
    return dict(json.loads(report.read_text())) if report.exists() else None


def row_of(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """Return what the table says of a recipe."""
    work = found["work"]
    step_s = float(np.median(found["whole_s"]))
    return {
        "recipe": case.name,
        "device": found["facts"]["device"],
        "step_ms": 1e3 * step_s,
        "samples_per_s": found["facts"]["global_batch"] / step_s,
        "tflop_per_s": work["per_s"] / 1e12,
        "limit_tflop_per_s": work["limit_per_s"] / 1e12,
        "dtype": work["dtype"],
        "mfu": work["mfu"],
        "busy": work["busy"],
        "data_wait": found["wait_s"] / step_s,
        "update_ms": 1e3 * work["update_s"],
        "peak_gb": work["peak_bytes"] / 1e9,
        "top_kind": next(iter(work["kinds"]), "none"),
        "top_share": next(iter(work["kinds"].values()), 0.0),
    }


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lay the rows out."""
    heads = ("step ms", "samples/s", "TFLOP/s", "MFU", "GPU busy", "data wait")
    lines = [f"{'recipe':<14}" + "".join(f"{head:>11}" for head in heads) + "   mostly"]
    for row in rows:
        busy = "-" if row["busy"] is None else f"{100 * row['busy']:.0f} %"
        cells = [f"{row['step_ms']:.1f}", f"{row['samples_per_s']:.0f}"]
        cells += [f"{row['tflop_per_s']:.3g}", f"{100 * row['mfu']:.1f} %", busy]
        cells += [f"{100 * row['data_wait']:.0f} %"]
        mostly = f"{row['top_kind']} {100 * row['top_share']:.0f} %"
        lines.append(f"{row['recipe']:<14}" + "".join(f"{c:>11}" for c in cells) + f"   {mostly}")
    return lines


def main() -> int:
    """Measure all, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    timed = "steps to time, and as many again without the gradient exchange: 8, tiny 4"
    parser.add_argument("--steps", type=int, help=timed)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, one of each recipe")
    parser.add_argument("--compile", choices=["true", "graphs"], help="each recipe's setting")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = args.only or [case.name for case in CASES if case.in_tiny or not args.tiny]
    rows, failed = [], []
    for case in CASES:
        if case.name in wanted:
            began = time.monotonic()
            steps = args.steps or (4 if args.tiny else 8)
            found = measure(case, args.out, steps, args.tiny, args.compile)
            print(f"{case.name}: {time.monotonic() - began:.0f} s\n", flush=True)
            rows += [row_of(case, found)] if found else []
            failed += [] if found else [case.name]
    (args.out / "recipes_step.json").write_text(json.dumps(rows, indent=2) + "\n")
    print("\n".join(table(rows)), flush=True)
    if failed:
        print(f"could not be measured: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
