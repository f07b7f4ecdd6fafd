"""Generated chest volumes with findings, and reports that name them.

Owns: drawing them, reproducibly from a seed. Does not own: reading them back.

Each finding is a shape with its own density and position, randomly moved and scaled a
little; a report says for every finding, in random order, whether it is present. Held-out
volumes all have different findings, so that a report fits only one volume.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import ConfigError
from lockstep.randomness import derive_seed
from lockstep_recipes.command import Flags, finish
from lockstep_recipes.made_folder import make_folder

INTERCEPT = -1024
"""Stored values are HU + 1024, as scanners store them."""
LUNG_HU, BODY_HU, AIR_HU = -800, 40, -1000

# Centre (depth, height, width) and radii of a finding as parts of the volume, and its HU.
PLACES: dict[str, tuple[tuple[float, float, float], tuple[float, float, float], int]] = {
    "Cardiomegaly": ((0.5, 0.55, 0.5), (0.28, 0.16, 0.16), 120),
    "Pleural effusion": ((0.78, 0.63, 0.3), (0.18, 0.1, 0.12), 10),
    "Emphysema": ((0.25, 0.32, 0.3), (0.2, 0.12, 0.12), -1000),
    "Lung nodule": ((0.4, 0.35, 0.7), (0.12, 0.08, 0.08), 300),
    "Consolidation": ((0.7, 0.6, 0.75), (0.2, 0.12, 0.1), -100),
    "Medical material": ((0.3, 0.2, 0.5), (0.16, 0.06, 0.06), 1000),
}

NUM_CODES = 2 ** len(PLACES)
"""Findings as bits of a number."""


def make_volumes(
    folder: Path | str,
    num: int = 64,
    num_val: int = 16,
    shape: tuple[int, int, int] = (24, 48, 48),
    seed: int = 0,
) -> Path:
    """Write `num` training and `num_val` held-out volumes in `train` and `validation`.

    A folder that already holds exactly this set is kept.

    Raises:
        ConfigError: if there are fewer combinations of findings than held-out volumes.
        DataError: if the folder holds anything else.
    """
    if num_val > NUM_CODES:
        problem = (
            f"{num_val} held-out volumes cannot all differ: there are {NUM_CODES} combinations of "
            "findings"
        )
        raise ConfigError(problem, f"make at most {NUM_CODES} held-out volumes")
    record = {"num": num, "num_val": num_val, "shape": list(shape), "seed": seed}

    def fill(made: Path) -> None:
        rng = np.random.default_rng(derive_seed(seed, "volumes", num, num_val))
        held_out = rng.permutation(NUM_CODES)[:num_val]
        for split, codes in (("train", rng.integers(0, NUM_CODES, num)), ("validation", held_out)):
            _write(made / split, codes, shape, rng)

    return make_folder(folder, record, fill)


def _write(
    folder: Path, codes: NDArray[np.int64], shape: tuple[int, int, int], rng: np.random.Generator
) -> None:
    folder.mkdir()
    lines = []
    for number, code in enumerate(codes.tolist()):
        labels = {name: code >> bit & 1 for bit, name in enumerate(PLACES)}
        name = f"volume_{number:05d}.npy"
        np.save(folder / name, draw(labels, shape, rng))
        line = {"volume": name, "report": report(labels, rng), "labels": labels}
        lines.append(json.dumps(line | {"intercept": INTERCEPT}))
    (folder / "manifest.jsonl").write_text("\n".join(lines) + "\n")


def draw(
    labels: dict[str, int], shape: tuple[int, int, int], rng: np.random.Generator
) -> NDArray[np.int16]:
    """Draw a chest with these findings, in the units that scanners store."""
    grid = np.meshgrid(*(np.linspace(0, 1, n) for n in shape), indexing="ij")

    def inside(centre: tuple[float, ...], radii: tuple[float, ...]) -> NDArray[np.bool_]:
        moved = (((g - c) / r) ** 2 for g, c, r in zip(grid, centre, radii, strict=True))
        return sum(moved, np.zeros(shape)) < 1

    hu = np.full(shape, float(AIR_HU))
    hu[inside((0.5, 0.5, 0.5), (9, 0.4, 0.47))] = BODY_HU
    for side in (0.3, 0.7):
        hu[inside((0.5, 0.48, side), (0.6, 0.3, 0.17))] = LUNG_HU
    for name, present in labels.items():
        if present:
            centre, radii, density = PLACES[name]
            where = tuple(c + rng.uniform(-0.03, 0.03) for c in centre)
            size = rng.uniform(0.85, 1.2)
            hu[inside(where, tuple(r * size for r in radii))] = density + rng.uniform(-30, 30)
    hu += rng.normal(0, 25, shape)
    return (hu - INTERCEPT).clip(0, 4095).astype(np.int16)


def report(labels: dict[str, int], rng: np.random.Generator) -> str:
    """Return a sentence per finding that says whether it is present, in random order."""
    names = list(labels)
    order = (names[index] for index in rng.permutation(len(names)))
    return " ".join(f"There is {'' if labels[n] else 'no '}{n.lower()}." for n in order)


def main(argv: Sequence[str]) -> str:
    """Write the volumes that the command line describes."""
    flags = Flags("ctclip", "Make volumes with findings.", "... data --num 512 --num_val 64")
    flags.add_argument("folder", type=Path)
    flags.add_argument("--num", type=int, default=512)
    flags.add_argument("--num_val", type=int, default=NUM_CODES)
    flags.add_argument("--seed", type=int, default=0)
    args = flags.read(argv)
    made = make_volumes(args.folder, args.num, args.num_val, seed=args.seed)
    return f"{args.num} volumes in {made / 'train'}, {args.num_val} in {made / 'validation'}"


if __name__ == "__main__":
    finish(main, sys.argv[1:])
