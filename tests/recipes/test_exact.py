"""Every recipe in exact mode: any number of ranks, and a resume on another, gives one hash."""

import hashlib
import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lockstep import fit
from lockstep.testing import run_ranks
from lockstep_recipes.atlas.sample_data import make_episodes

STEPS = 2
FLAGS = ["--exact", "--batch_size=2", "--set=batch.global_batch_size=16"]
SHARED = ["sinks.curves=false", "rate.lr_scaling=none"]
SIZES_BY_HAND = os.environ.get("SIZES", "1 2 3 4 5 8").split()
COMMANDS = {
    "jit": [*FLAGS, "--output_dir=run", "--grid=0", "--num_fid_samples=0"],
    "protein": [*FLAGS, "--output_dir=run"],
    "segmentation": ["--exact", "--batchsize=2", "--set=batch.global_batch_size=16"],
    "atlas": [  # not its rehearsal, which reads as many frames as its ranks take in one step
        "--set=model.vggt_preset=micro",
        "--set=model.lang_preset=micro",
        "--set=model.fusion_hidden_dim=64",
        "--set=data.image_size=28",
        "--set=data.num_workers=0",
        "--set=data.batch_size=2",
        "--set=exact=true",
        "--set=batch.global_batch_size=16",
        "--set=checkpoint.save_dir=run/checkpoints",
    ],
    "ctclip": [
        f"--config={Path(__file__).parents[2] / 'recipes/ctclip/configs/debug_config.yaml'}",
        "--set=data.batch_size=2",
        "--set=lockstep.exact=true",
        "--set=lockstep.batch.global_batch_size=16",
        "--set=checkpoint.save_dir=run",
    ],
}


def train(recipe: str, folder: Path, max_steps: int) -> None:
    """Run the recipe's command in miniature, on the rank this process is."""
    os.chdir(folder)
    os.environ["LOCKSTEP_REHEARSAL"] = str(int(recipe != "atlas"))
    build = import_module(f"lockstep_recipes.{recipe}.flags").build
    settings = [*SHARED, "resume=auto", f"max_steps={max_steps}"]
    where = "lockstep." if recipe == "ctclip" else ""
    more = [f"--set={where}{setting}" for setting in settings]
    if recipe == "atlas":
        more.append(f"--set=data.data_dir={make_episodes(folder / 'episodes', num=2)}")
    distributed = ["--distributed"] if recipe == "segmentation" else []
    built = build([*COMMANDS[recipe], *more, *distributed])
    if callable(built):
        built()
    else:
        fit(*built)


def state_of(folder: Path) -> str:
    newest = max(folder.glob("**/checkpoints/step_*"))
    digest = hashlib.sha256()
    for file in sorted(newest.glob("*.safetensors")):
        digest.update(file.name.encode() + file.read_bytes())
    return f"{newest.name} {digest.hexdigest()}"


def final_state(recipe: str, folder: Path, *stages: tuple[int, int]) -> str:
    folder.mkdir()
    for num_ranks, stop in stages:
        run_ranks(num_ranks, train, recipe, folder, stop, timeout_s=300)
    return state_of(folder)


@pytest.mark.parametrize("recipe", COMMANDS)
def test_one_hash_for_every_number_of_ranks(recipe: str, tmp_path: Path) -> None:
    hashes = {"1": final_state(recipe, tmp_path / "one", (1, STEPS))}
    hashes["3 -> 2"] = final_state(recipe, tmp_path / "elastic", (3, 1), (2, STEPS))
    assert len(set(hashes.values())) == 1, hashes


if __name__ == "__main__":  # all sizes, by hand: python tests/recipes/test_exact.py FOLDER [RECIPE]
    where = Path(sys.argv[1])
    for name in sys.argv[2:] or COMMANDS:
        plans = {str(size): [(size, 4)] for size in map(int, SIZES_BY_HAND)}
        if "4" in SIZES_BY_HAND:
            plans["4 -> 1 -> 3 -> 2"] = [(4, 1), (1, 2), (3, 3), (2, 4)]
        found = {
            plan: final_state(name, where / f"{name}_{number}", *stages)
            for number, (plan, stages) in enumerate(plans.items())
        }
        distinct = sorted(set(found.values()))
        print(f"{name}: {len(distinct)} hash for {', '.join(found)}: {distinct}", flush=True)
