"""Generated shapes with masks, scribbles and pseudo-labels, in VOC's layout.

Owns: drawing them, reproducibly from a seed. Does not own: reading them back.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lockstep.randomness import derive_seed
from lockstep_recipes.made_folder import make_folder
from lockstep_recipes.segmentation.data import VOC_FOLDERS, VOC_LISTS
from lockstep_recipes.segmentation.labels import IGNORE, Labels, scribble_of

Plane = NDArray[np.float64]

# Each function tests whether a point is inside, in units of the radius; class 0 is background.
SHAPES: tuple[Callable[[Plane, Plane], NDArray[np.bool_]], ...] = (
    lambda x, y: x**2 + y**2 < 1,
    lambda x, y: np.maximum(abs(x), abs(y)) < 0.85,
    lambda x, y: (y < 0.8) & (y > 2 * abs(x) - 1),
    lambda x, y: (np.minimum(abs(x), abs(y)) < 0.35) & (np.maximum(abs(x), abs(y)) < 1),
)
COLOURS = np.array([(200, 70, 60), (70, 180, 80), (70, 90, 210), (210, 190, 70)])
NUM_CLASSES = len(SHAPES) + 1


def make_shapes(
    folder: Path | str, num: int = 128, num_val: int = 16, size: int = 72, seed: int = 0
) -> Path:
    """Write `num` training and `num_val` validation images of about `size` pixels a side.

    A folder that already holds exactly this set is kept.

    Raises:
        DataError: if the folder holds anything else.
    """
    record = {"num": num, "num_val": num_val, "size": size, "seed": seed}
    return make_folder(folder, record, lambda aside: _write(aside, num, num_val, size, seed))


def _write(folder: Path, num: int, num_val: int, size: int, seed: int) -> None:
    for kind in ("image", "mask", "scribble", "pseudo"):
        (folder / VOC_FOLDERS[kind]).mkdir(parents=True)
    (folder / VOC_LISTS).mkdir(parents=True)
    rng = np.random.default_rng(derive_seed(seed, "shapes", num, num_val, size))
    names = {"train": [f"shapes_{n:05d}" for n in range(num)]}
    names["val"] = [f"shapes_{n:05d}" for n in range(num, num + num_val)]
    for split, listed in names.items():
        (folder / VOC_LISTS / f"{split}.txt").write_text("\n".join(listed) + "\n")
        for name in listed:
            image, mask = draw(size, rng)
            planes = {"mask": mask}
            if split == "train":
                planes["scribble"] = scribble_of(mask, int(rng.integers(2**31)))
                planes["pseudo"] = _guess(mask, rng)
            Image.fromarray(image).save(folder / VOC_FOLDERS["image"] / f"{name}.jpg", quality=92)
            for kind, plane in planes.items():
                Image.fromarray(plane).save(folder / VOC_FOLDERS[kind] / f"{name}.png")


def draw(size: int, rng: np.random.Generator) -> tuple[NDArray[np.uint8], Labels]:
    """Draw one to three shapes on a noisy background; return the image and its mask."""
    height, width = (int(n) for n in rng.integers(size, size + size // 4 + 1, 2))
    y, x = (plane.astype(np.float64) for plane in np.mgrid[0:height, 0:width])
    mask = np.zeros((height, width), dtype=np.uint8)
    image = np.full((height, width, 3), 110.0) + rng.uniform(-30, 30, 3)
    for _ in range(int(rng.integers(1, 4))):
        label = int(rng.integers(1, NUM_CLASSES))
        radius = size * rng.uniform(0.2, 0.35)
        centre_x, centre_y = rng.uniform(0.2, 0.8, 2) * (width, height)
        inside = SHAPES[label - 1]((x - centre_x) / radius, (y - centre_y) / radius)
        mask[inside] = label
        image[inside] = COLOURS[label - 1] + rng.uniform(-35, 35, 3)
    image += rng.normal(0, 12, image.shape)
    return image.clip(0, 255).astype(np.uint8), mask


def _guess(mask: Labels, rng: np.random.Generator) -> Labels:
    """Imitate the pseudo-label of a first network: slightly shifted, and unsure in one corner."""
    guess = np.roll(mask, tuple(int(n) for n in rng.integers(-2, 3, 2)), axis=(0, 1))
    row, column = (int(rng.integers(0, n - n // 6)) for n in mask.shape)
    guess[row : row + mask.shape[0] // 6, column : column + mask.shape[1] // 6] = IGNORE
    return guess
