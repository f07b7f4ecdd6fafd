"""Small data sets made on the spot, with something in them to learn.

Owns: drawing shapes and writing sentences, the same for the same seed. Does not
own: reading them back.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lockstep.errors import ConfigError
from lockstep.randomness import derive_seed
from lockstep_recipes.made_folder import make_folder

Plane = NDArray[np.float64]

# Each drawing says where its shape is, from coordinates in units of the shape's radius.
SHAPES: dict[str, Callable[[Plane, Plane], NDArray[np.bool_]]] = {
    "disc": lambda x, y: x**2 + y**2 < 1,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.85,
    "cross": lambda x, y: (np.minimum(abs(x), abs(y)) < 0.3) & (np.maximum(abs(x), abs(y)) < 1),
    "ring": lambda x, y: abs(np.hypot(x, y) - 0.8) < 0.25,
    "triangle": lambda x, y: (y < 0.8) & (y > 2 * abs(x) - 1),
    "stripes": lambda x, y: np.floor(x * 1.5) % 2 == 0,
    "bars": lambda x, y: np.floor(y * 1.5) % 2 == 0,
    "checker": lambda x, y: (np.floor(x * 1.2) + np.floor(y * 1.2)) % 2 == 0,
    "diamond": lambda x, y: abs(x) + abs(y) < 1,
    "half": lambda x, y: x + y < 0,
}


def make_images(
    folder: Path | str, num: int = 512, size: int = 32, classes: int = 4, seed: int = 0
) -> Path:
    """Write `num` PNG images of coloured shapes, one folder per class, and return the folder.

    A folder that holds exactly this set is left alone. For a validation set call it
    again with another seed.

    Raises:
        ConfigError: if there are fewer shapes than `classes`, or fewer images.
        DataError: if the folder holds anything else.
    """
    if not 1 <= classes <= len(SHAPES) or num < classes:
        raise ConfigError(
            f"{num} sample images in {classes} classes cannot be drawn",
            f"use 1 to {len(SHAPES)} classes and at least one image of each",
        )
    record = {"images": num, "size": size, "classes": classes, "seed": seed}
    return make_folder(folder, record, lambda aside: _draw_all(aside, num, size, classes, seed))


def make_texts(folder: Path | str, num: int = 256, seed: int = 0) -> Path:
    """Write `num` short texts, half of them as prompt and answer, and return the folder.

    Raises:
        DataError: if the folder holds anything else.
    """
    record = {"texts": num, "seed": seed}
    return make_folder(folder, record, lambda aside: _write_all(aside, num, seed))


def _draw_all(folder: Path, num: int, size: int, classes: int, seed: int) -> None:
    rng = np.random.default_rng(derive_seed(seed, "sample images", num, size, classes))
    names = list(SHAPES)[:classes]
    for name in names:
        (folder / name).mkdir()
    for index in range(num):
        name = names[index % classes]
        Image.fromarray(draw(name, size, rng)).save(folder / name / f"{index:05d}.png")


def draw(name: str, size: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw one shape (size, size, 3) at some place, in some colour, on a sloping background."""
    y, x = np.mgrid[0:size, 0:size] / (size - 1) * 2 - 1
    centre_x, centre_y = rng.uniform(-0.3, 0.3, 2)
    radius = rng.uniform(0.4, 0.65)
    inside = SHAPES[name]((x - centre_x) / radius, (y - centre_y) / radius)
    shape_colour = rng.uniform(150, 255, 3)
    ground_colour = rng.uniform(0, 90, 3)
    slope = rng.uniform(-15, 15, 2)
    ground = ground_colour + (slope[0] * x + slope[1] * y)[..., None]
    return np.where(inside[..., None], shape_colour, ground).clip(0, 255).astype(np.uint8)


def _write_all(folder: Path, num: int, seed: int) -> None:
    rng = np.random.default_rng(derive_seed(seed, "sample texts", num))
    animals = ("cat", "dog", "crow", "carp", "moth")
    places = ("garden", "kitchen", "harbour", "forest")
    for index in range(num):
        if index % 2:
            a, b = (int(n) for n in rng.integers(0, 50, 2))
            entry = {"prompt": f"{a} + {b} =", "answer": str(a + b)}
            (folder / f"{index:05d}.json").write_text(json.dumps(entry))
        else:
            text = f"The {rng.choice(animals)} sleeps in the {rng.choice(places)}."
            (folder / f"{index:05d}.txt").write_text(text)
