"""Episodes on disk; a sample is one frame, with earlier frames of the same episode.

Owns: the files of an episode, reading and checking them, stacking frames, the statistics of
actions. Does not own: the order of samples, batches, devices. Pixels stay bytes, and actions
stay as recorded. Augmentation uses Python's `random`, which the loader seeds by
(seed, epoch, sample).

    DATA_DIR/SPLIT/EPISODE/
      images/workspace_000000.png, images/wrist_000000.png, ...   or .jpg, .jpeg
      actions.csv or actions.parquet                              one row per frame
      states.csv or states.parquet                                only for `use_state`
      language_task.txt, or metadata.json with `language_task`
"""

import csv
import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, model_validator
from torch import Tensor

from lockstep.data.fingerprint import file_fingerprints
from lockstep.errors import ConfigError, DataError
from lockstep.text_input import parse_json
from lockstep_recipes.atlas.model import Tokenizer
from lockstep_recipes.atlas.section import Section
from lockstep_recipes.atlas.vggt import PATCH

Rows = NDArray[np.float32]
Pixels = NDArray[np.uint8]
SUFFIXES = (".png", ".jpg", ".jpeg")


class DataConfig(Section):
    """The `data` section, except batches and workers."""

    data_dir: Path = Path("./data/episodes")
    train_split: str = "train"
    val_split: str | None = "val"
    image_size: int = Field(default=518, ge=PATCH)
    use_wrist_camera: bool | None = None
    """True unless `views` lists the cameras."""
    views: tuple[str, ...] | None = None
    normalize_actions: bool = True
    action_stats_path: Path | None = None
    num_temporal_frames: int = Field(default=1, ge=1)
    temporal_stride: int = Field(default=1, ge=1)
    use_state: bool = False
    """Give the network the state of the robot: `states.csv`."""
    use_last_action: bool = False
    """Give the network the previous action."""
    cache_images: bool = False
    """Keep decoded images in memory, in each worker."""
    random_shift: int = Field(default=0, ge=0)
    """Largest random shift of training images in pixels, the same for all images of a sample."""
    color_jitter: float = Field(default=0.0, ge=0, lt=1)
    """Largest random change of brightness and contrast, the same for all images of a sample."""
    max_frames: int | None = Field(default=None, ge=1)
    """Use only this many training frames, and as many held-out ones."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.image_size % PATCH:
            raise ConfigError(
                f"data.image_size={self.image_size} is not a multiple of the patch size, {PATCH}",
                f"set image_size: {round(self.image_size / PATCH) * PATCH or PATCH}",
            )
        if self.views is not None and self.use_wrist_camera is not None:
            raise ConfigError(
                "data.views and data.use_wrist_camera both choose the cameras", "set one of them"
            )
        if self.views is not None and not self.views:
            raise ConfigError("data.views names no camera", "set views: [workspace]")
        return self

    @property
    def cameras(self) -> tuple[str, ...]:
        """The views of a sample, in order."""
        if self.views is not None:
            return self.views
        return ("workspace",) if self.use_wrist_camera is False else ("workspace", "wrist")


@dataclass(frozen=True, slots=True)
class Episode:
    """One recording: an instruction, and for every frame its images, action and state."""

    folder: Path
    instruction: str
    actions: Rows
    states: Rows | None
    images: dict[str, list[Path]]

    def __len__(self) -> int:
        return len(self.actions)


# --- reading ---------------------------------------------------------------------------------


def open_split(config: DataConfig, split: str, action_dim: int) -> list[Episode]:
    """Read every episode of a split, except its images.

    Raises:
        DataError: naming the folder or file that is missing or does not fit.
    """
    folder = config.data_dir / split
    if not folder.is_dir():
        missing = folder if config.data_dir.is_dir() else config.data_dir
        raise DataError(
            f"{missing} does not exist",
            "check data_dir, train_split and val_split, or make the folder with "
            "python -m lockstep_recipes.atlas.convert",
        )
    found = sorted(path for path in folder.iterdir() if path.is_dir())
    if not found:
        raise DataError(f"{folder} holds no episode", "put a folder there for each episode")
    return [read_episode(path, config.cameras, action_dim, config.use_state) for path in found]


def read_episode(
    folder: Path, cameras: Sequence[str], action_dim: int, wants_state: bool
) -> Episode:
    """Read and check one episode."""
    actions = read_table(folder, "actions")
    if actions.shape[1] < action_dim:
        raise DataError(
            f"{folder}: actions have {actions.shape[1]} columns, model.action_dim is {action_dim}",
            f"set action_dim: {actions.shape[1]}",
        )
    states = read_table(folder, "states") if wants_state else None
    if states is not None and len(states) != len(actions):
        problem = f"{folder} has {len(actions)} actions, {len(states)} states"
        raise DataError(problem, "write a row of each for every frame, or remove the episode")
    images = find_images(folder, cameras, len(actions))
    return Episode(folder, read_instruction(folder), actions[:, :action_dim], states, images)


def read_table(folder: Path, stem: str) -> Rows:
    """Return the rows of STEM.csv, or of STEM.parquet."""
    path = folder / f"{stem}.csv"
    if path.is_file():
        rows = _read_csv(path)
    elif (path := folder / f"{stem}.parquet").is_file():
        rows = _read_parquet(path)
    else:
        raise DataError(f"{folder} has neither {stem}.csv nor {stem}.parquet", "add one of them")
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if not len(rows) or len(bad):
        problem = f"row {bad[0] + 1} is not all numbers" if len(bad) else "there are no rows"
        raise DataError(
            f"{path}: {problem}", "write finite numbers into every row, or remove the episode"
        )
    return rows


def _read_csv(path: Path) -> Rows:
    """Read numbers; a first line of text is taken as the column names."""
    try:
        with path.open(newline="") as file:
            lines = [line for line in csv.reader(file) if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}", "save it as UTF-8 CSV") from error
    try:
        [float(word) for word in lines[0] if word.strip()] if lines else None
    except ValueError:
        names, *lines = lines
        if not names[0].strip():  # an index column, which would shift all others
            raise DataError(
                f"{path}: the first column has no name; it looks like an index",
                "keep only the recorded columns; in pandas, use to_csv(..., index=False)",
            ) from None
    try:
        return np.array(lines or [[]], dtype=np.float32)[: len(lines)]
    except ValueError as error:
        problem = f"{path} is not a table of numbers: {error}"
        raise DataError(problem, "write one number per cell, as many in every row") from None


def _read_parquet(path: Path) -> Rows:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(
            f"{path} needs pyarrow, which is not installed",
            f"run pip install pyarrow, or put a {path.stem}.csv beside it",
        ) from None
    try:
        columns = parquet.read_table(path).to_pydict()
        return np.array(list(columns.values()), dtype=np.float32).reshape(len(columns), -1).T
    except Exception as error:  # a damaged file makes pyarrow raise all kinds of errors
        problem = f"{path} is not a table of numbers: {error}"
        raise DataError(problem, "write the file again, as columns of numbers") from error


def find_images(folder: Path, cameras: Sequence[str], count: int) -> dict[str, list[Path]]:
    """Return each camera's images, one per action."""
    images = folder / "images"
    try:
        names = {path.stem: path for path in images.iterdir() if path.suffix.lower() in SUFFIXES}
    except OSError:
        problem = f"{images} does not exist"
        raise DataError(problem, "put images/VIEW_000000.png and so on there") from None
    found: dict[str, list[Path]] = {}
    for camera in cameras:
        frames = sum(name.rpartition("_")[0] == camera for name in names)
        if frames > count:
            problem = f"{folder} has {count} actions for {frames} frames of {camera}"
            raise DataError(problem, "write one action for each frame")
        wanted = [f"{camera}_{frame:06d}" for frame in range(count)]
        missing = next((name for name in wanted if name not in names), None)
        if missing:
            there = sorted({name.rpartition("_")[0] for name in names})
            raise DataError(
                f"{images}/{missing}.png or .jpg is missing; there are {count} actions",
                f"add the frames, or set data.views to some of: {', '.join(there) or 'none'}",
            )
        found[camera] = [names[name] for name in wanted]
    return found


def read_instruction(folder: Path) -> str:
    """Return the instruction of an episode."""
    text = folder / "language_task.txt"
    meta = folder / "metadata.json"
    try:
        if text.is_file():
            return text.read_text().strip()
        return str(parse_json(meta.read_text())["language_task"])
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(
            f"{folder} has no instruction",
            "add language_task.txt, or metadata.json with language_task",
        ) from None


def read_pixels(path: Path, size: int) -> Pixels:
    """Return an image as (3, size, size) bytes."""
    try:
        with Image.open(path) as image:
            resized = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
            return np.ascontiguousarray(np.asarray(resized).transpose(2, 0, 1))
    except (OSError, SyntaxError) as error:
        problem = f"{path} is not a readable image: {error}"
        raise DataError(problem, "replace the image, or remove the episode") from error


# --- samples ---------------------------------------------------------------------------------


class Frames:
    """The frames of a list of episodes.

    A sample also has `num_temporal_frames - 1` earlier frames, `temporal_stride` apart. Frames
    that would lie before the episode are replaced by its first one.
    """

    def __init__(
        self,
        episodes: Sequence[Episode],
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        is_training: bool,
    ) -> None:
        self.episodes = episodes
        self.config = config
        self.is_augmented = is_training and bool(config.random_shift or config.color_jitter)
        self.places = [(e, t) for e, episode in enumerate(episodes) for t in range(len(episode))]
        self.places = self.places[: config.max_frames]
        self.tokens, self.mask = tokenizer([episode.instruction for episode in episodes])
        self._seen: dict[Path, Pixels] = {}

    def __len__(self) -> int:
        return len(self.places)

    def describe(self, index: int) -> str:
        """Return the name of a sample for error messages."""
        episode, time = self.places[index]
        return f"{self.episodes[episode].folder}, frame {time}"

    def fingerprint(self) -> list[str]:
        """Return a text per frame that changes with its numbers, instruction or images."""
        found = []
        for number, time in self.places:
            episode = self.episodes[number]
            state = b"" if episode.states is None else episode.states[time].tobytes()
            numbers = episode.actions[time].tobytes() + state
            name = f"{episode.folder.name} {time} {episode.instruction} {numbers.hex()}"
            found.append((name, [episode.images[view][time] for view in self.config.cameras]))
        return file_fingerprints(found)

    @cached_property
    def num_states(self) -> int:
        """Number of columns of a state; 0 without states."""
        states = self.episodes[0].states
        return 0 if states is None else states.shape[1]

    def times(self, time: int) -> list[int]:
        """Return the frames of a sample, the current one first."""
        config = self.config
        back = range(0, config.num_temporal_frames * config.temporal_stride, config.temporal_stride)
        return [max(0, time - ago) for ago in back]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, time = self.places[index]
        episode = self.episodes[number]
        times = self.times(time)
        paths = [episode.images[view][t] for t in times for view in self.config.cameras]
        pixels = np.stack([self._read(path) for path in paths])
        if self.is_augmented:
            pixels = augment(pixels, self.config.random_shift, self.config.color_jitter)
        sample = {
            "images": torch.from_numpy(pixels),
            "tokens": self.tokens[number],
            "mask": self.mask[number],
            "action": torch.from_numpy(episode.actions[time]),
            "last": torch.from_numpy(np.stack([episode.actions[max(0, t - 1)] for t in times])),
            "has_last": torch.tensor([t > 0 for t in times]),
        }
        if episode.states is not None:
            sample["state"] = torch.from_numpy(episode.states[times])
        return sample

    def _read(self, path: Path) -> Pixels:
        if path in self._seen:
            return self._seen[path]
        pixels = read_pixels(path, self.config.image_size)
        if self.config.cache_images:
            self._seen[path] = pixels
        return pixels


def augment(pixels: Pixels, shift: int, jitter: float) -> Pixels:
    """Shift and recolour all images (S, 3, H, W) of a sample in the same way, repeating edges."""
    if shift:
        down = random.randint(0, 2 * shift)
        right = random.randint(0, 2 * shift)
        height, width = pixels.shape[2:]
        padded = np.pad(pixels, ((0, 0), (0, 0), (shift, shift), (shift, shift)), mode="edge")
        pixels = padded[:, :, down : down + height, right : right + width]
    if jitter:
        contrast, brightness = (1 + random.uniform(-jitter, jitter) for _ in range(2))
        middle = pixels.mean(dtype=np.float32)
        changed = ((pixels - middle) * np.float32(contrast) + middle) * np.float32(brightness)
        pixels = changed.clip(0, 255).astype(np.uint8)
    return np.ascontiguousarray(pixels)


# --- statistics ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of the training split; every checkpoint has them, for running the policy."""

    mean: Tensor
    std: Tensor
    first: Tensor
    """The mean first action of an episode, which stands in for the previous action there."""
    gripper: Tensor
    """Lowest and highest value of the last column."""
    state_mean: Tensor
    state_std: Tensor

    def to_json(self) -> dict[str, list[float]]:
        """Return the statistics as plain numbers."""
        return {name: getattr(self, name).tolist() for name in self.__slots__}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        """Rebuild it."""
        return cls(**{name: torch.tensor(stored[name]) for name in cls.__slots__})


def measure(episodes: Sequence[Episode]) -> Statistics:
    """Return the statistics of all frames of `episodes`."""
    actions = np.concatenate([episode.actions for episode in episodes])
    states = np.concatenate(
        [e.states for e in episodes if e.states is not None] or [actions[:, :0]]
    )
    low = float(actions[:, -1].min())
    high = float(actions[:, -1].max())
    if low == high:  # a gripper that never moved: assume the usual range of its value
        low, high = (-1.0, 1.0) if low < 0 else (0.0, 1.0)
    return Statistics(
        *_mean_and_std(actions),
        torch.from_numpy(np.mean([e.actions[0] for e in episodes], axis=0, dtype=np.float32)),
        torch.tensor([low, high]),
        *_mean_and_std(states),
    )


def _mean_and_std(rows: Rows) -> tuple[Tensor, Tensor]:
    mean = rows.mean(axis=0, dtype=np.float64)
    std = rows.std(axis=0, dtype=np.float64)
    std[std < 1e-6] = 1.0  # a constant column is not scaled
    return torch.from_numpy(mean.astype(np.float32)), torch.from_numpy(std.astype(np.float32))


def read_statistics(path: Path, measured: Statistics) -> Statistics:
    """Return `measured` with the actions' mean and std replaced by those of a JSON file.

    Raises:
        DataError: if the file is missing, or does not fit the actions.
    """
    try:
        stored = parse_json(path.read_text())
        given = [torch.tensor(stored[name], dtype=torch.float32) for name in ("mean", "std")]
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise DataError(
            f"action_stats_path {path} cannot be read: {type(error).__name__}: {error}",
            'write {"mean": [...], "std": [...]} there, or leave out action_stats_path',
        ) from None
    if any(v.shape != measured.mean.shape for v in given) or not bool((given[1] > 0).all()):
        problem = f"{path} does not fit {len(measured.mean)} columns of actions"
        raise DataError(problem, "remove action_stats_path to measure them, or pass another file")
    values = {name: getattr(measured, name) for name in Statistics.__slots__}
    return Statistics(**values | {"mean": given[0], "std": given[1]})
