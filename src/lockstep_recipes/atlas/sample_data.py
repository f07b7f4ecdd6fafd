"""Generated episodes: the instruction decides which of two blocks a hand moves to.

Owns: drawing them, reproducibly from a seed. Does not own: reading them back. Episodes
come in pairs with the same images, so only the instruction distinguishes their actions.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lockstep.randomness import derive_seed
from lockstep_recipes.made_folder import make_folder

COLOURS = {"red": (210, 50, 40), "blue": (50, 70, 210)}
HAND = (240, 230, 120)
REACH = 0.75
"""Distance at which the gripper closes; the table is 2 wide."""
Point = NDArray[np.float64]


def make_episodes(
    folder: Path | str,
    num: int = 8,
    num_val: int = 2,
    frames: int = 16,
    size: int = 56,
    seed: int = 0,
) -> Path:
    """Write `num` training and `num_val` validation episodes, unless the folder holds them already.

    Raises:
        DataError: if the folder holds anything else.
    """
    record = {"num": num, "num_val": num_val, "frames": frames, "size": size, "seed": seed}

    def fill(aside: Path) -> None:
        for split, count in (("train", num), ("val", num_val)):
            for number in range(count):
                target = aside / split / f"episode_{number:06d}"
                rng = np.random.default_rng(derive_seed(seed, split, number // 2))
                write_episode(target, list(COLOURS)[number % 2], frames, size, rng)

    return make_folder(folder, record, fill)


def write_episode(
    folder: Path, named: str, frames: int, size: int, rng: np.random.Generator
) -> None:
    """Write an episode in which the hand wanders and its actions point to the named block."""
    (folder / "images").mkdir(parents=True)
    blocks = dict(zip(COLOURS, rng.permutation([[-0.6, 0.0], [0.6, 0.0]]), strict=True))
    blocks = {colour: place + rng.uniform(-0.3, 0.3, 2) for colour, place in blocks.items()}
    phase = rng.uniform(0, 2 * np.pi)
    actions = []
    states = []
    for frame in range(frames):
        angle = 2 * np.pi * frame / frames + phase
        hand = np.array([0.8 * np.cos(angle), 0.5 * np.sin(2 * angle)])
        offset = blocks[named] - hand
        near = bool(np.hypot(*offset) < REACH)
        turn = np.arctan2(offset[1], offset[0]) / np.pi
        pose = [*offset, -0.2 if near else 0.2, 0.1 * turn, 0.1 * offset[0], 0.1 * offset[1]]
        actions.append([*pose, 1.0 if near else -1.0])
        states.append([*hand, 0.0])
        views = {"workspace": (np.zeros(2), 1.0), "wrist": (hand, 0.8)}
        for view, (centre, reach) in views.items():
            picture = draw(blocks, hand, centre, reach, size)
            Image.fromarray(picture).save(folder / "images" / f"{view}_{frame:06d}.png")
    write_table(folder / "actions.csv", np.array(actions))
    write_table(folder / "states.csv", np.array(states))
    (folder / "language_task.txt").write_text(f"move to the {named} block\n")


def draw(
    blocks: dict[str, Point], hand: Point, centre: Point, reach: float, size: int
) -> NDArray[np.uint8]:
    """Return a picture of the table around `centre`, `reach` to each side."""
    line = np.linspace(-reach, reach, size)
    x, y = np.meshgrid(centre[0] + line, centre[1] + line)
    picture = np.full((size, size, 3), 20, dtype=np.uint8)
    for colour, place in blocks.items():
        picture[np.maximum(abs(x - place[0]), abs(y - place[1])) < 0.3] = COLOURS[colour]
    picture[np.hypot(x - hand[0], y - hand[1]) < 0.25] = HAND
    return picture


def write_table(path: Path, rows: NDArray[np.floating]) -> None:
    """Write rows of numbers as CSV, with column names."""
    names = ",".join(f"{path.stem[:-1]}_{column}" for column in range(rows.shape[1]))
    lines = [",".join(f"{value:.9g}" for value in row) for row in rows]
    path.write_text("\n".join([names, *lines]) + "\n")
