"""`python -m lockstep_recipes.atlas.convert SOURCE OUTPUT`: recordings to episode folders.

Owns: reading two other layouts, and which episodes are held out. Does not own: the layout
it writes, which data.py describes.

The layouts that can be converted:

    a folder, or a .tar.xz of it, with meta.jsonl    per line: dir, instruction, views, action_dim;
                                                     DIR/VIEW/NNNN.jpg, DIR/data.npz
    LIBERO's HDF5 files, one or a folder of them     data/demo_N/{actions, obs/agentview_rgb,
                                                     obs/eye_in_hand_rgb, obs/ee_states, ...}

Robots differ in the width of an action, and a policy has a single width: `--width`, by
default 7. The first view becomes `workspace`; LIBERO's second becomes `wrist`, others keep
their names. Episodes are held out as a whole, chosen by `--seed`.
"""

import contextlib
import importlib
import shutil
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lockstep.errors import ConfigError, DataError
from lockstep.randomness import derive_seed
from lockstep.text_input import parse_json
from lockstep_recipes.atlas.sample_data import write_table
from lockstep_recipes.command import Flags, finish

HDF5 = (".hdf5", ".h5")
OTHER_SOURCE = "pass a folder with meta.jsonl, a .tar.xz of one, or LIBERO's .hdf5 files"


@dataclass(frozen=True, slots=True)
class Recording:
    """One episode: its numbers, and a function that writes one of its images."""

    instruction: str
    actions: NDArray[Any]
    states: NDArray[Any] | None
    views: tuple[str, ...]
    write_image: Callable[[str, int, Path], None]
    """Takes a view, a frame and a path without suffix."""


def convert(argv: Sequence[str]) -> str:
    """Convert as `argv` describes and return a summary.

    Raises:
        LockstepError: if the source cannot be read or the output exists.
    """
    command = "python -m lockstep_recipes.atlas.convert"
    summary, _, *layouts = __doc__.strip().split("\n\n")
    description = "\n\n".join([summary, *layouts])
    parser = Flags("atlas.convert", description, f"{command} robots.tar.xz data/episodes")
    parser.prog = command
    add = parser.add_argument
    add("source", type=Path, help="a folder or a file in one of these layouts")
    add("output", type=Path, help="folder to create, for data_dir")
    add("--width", type=int, default=7, help="columns of the actions to convert")
    add("--val_share", type=float, default=0.2, help="share of the episodes to hold out")
    add("--seed", type=int, default=0, help="seed of the choice of held-out episodes")
    args = parser.read(argv)
    if not 0 <= args.val_share < 1:
        raise ConfigError(
            f"--val_share {args.val_share} is not from 0 to 1", "pass --val_share 0.2"
        )
    if args.output.exists():
        raise DataError(f"{args.output} exists", "pass another output folder, or remove it")
    if not args.source.exists():
        raise DataError(f"{args.source} does not exist", "pass a folder, a .tar.xz or an HDF5 file")
    aside = args.output.with_name(f".{args.output.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with opened(args.source, args.width) as recordings:
            counts = write_all(recordings, aside, args.val_share, args.seed)
        aside.rename(args.output)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return f"{args.output}: {counts['train']} episodes to train on, {counts['val']} held out"


@contextlib.contextmanager
def opened(source: Path, width: int) -> Iterator[list[Recording]]:
    """Yield the recordings of a source whose actions have `width` columns."""
    with contextlib.ExitStack() as stack:
        files = [source] if source.suffix in HDF5 else []
        if source.is_dir():
            files = sorted(path for path in source.rglob("*") if path.suffix in HDF5)
        if files:
            found = [r for path in files for r in _libero(path, stack)]
        else:
            if source.is_file():
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                _unpack(source, folder)
                source = folder
            found = list(_robots(source))
        widths = Counter(recording.actions.shape[1] for recording in found)
        if width not in widths:
            listed = ", ".join(f"{w} ({n} episodes)" for w, n in sorted(widths.items()))
            problem = f"no episode has actions of {width} columns; there are {listed}"
            raise DataError(problem, "pass one of these as --width")
        yield [recording for recording in found if recording.actions.shape[1] == width]


def write_all(
    recordings: Sequence[Recording], folder: Path, val_share: float, seed: int
) -> Counter[str]:
    """Write every recording into a split; hold out at least one unless the share is 0."""
    num_val = min(len(recordings) - 1, max(round(val_share * len(recordings)), int(val_share > 0)))
    shuffled = np.random.default_rng(derive_seed(seed, "split")).permutation(len(recordings))
    held_out = set(shuffled[:num_val].tolist())
    counts: Counter[str] = Counter()
    for number, recording in enumerate(recordings):
        split = "val" if number in held_out else "train"
        target = folder / split / f"episode_{counts[split]:06d}"
        counts[split] += 1
        (target / "images").mkdir(parents=True)
        write_table(target / "actions.csv", recording.actions)
        if recording.states is not None:
            write_table(target / "states.csv", recording.states)
        (target / "language_task.txt").write_text(recording.instruction + "\n")
        for view in recording.views:
            for frame in range(len(recording.actions)):
                recording.write_image(view, frame, target / "images" / f"{view}_{frame:06d}")
    return counts


def _unpack(source: Path, folder: Path) -> None:
    try:
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(
            f"cannot read the archive {source}: {error}", "pass a .tar.xz file"
        ) from error


def _robots(source: Path) -> Iterator[Recording]:
    try:
        lines = (source / "meta.jsonl").read_text().splitlines()
    except OSError:
        problem = f"{source} holds neither meta.jsonl nor HDF5 files"
        raise DataError(problem, OTHER_SOURCE) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            meta = parse_json(line)
            instruction = str(meta["instruction"])
            folder = source / meta["dir"]
            with (folder / "data.npz").open("rb") as file, np.load(file) as data:
                frames = data["frame_index"].tolist()
                actions = data["action"][frames]
                states = data["state"][frames]
            names = {("workspace" if not i else name): name for i, name in enumerate(meta["views"])}
        except (OSError, EOFError, ValueError, LookupError, TypeError, BadZipFile) as error:
            raise DataError(
                f"meta.jsonl, line {number} is not a recording: {type(error).__name__}: {error}",
                "correct or remove the line",
            ) from error

        def write(
            view: str,
            frame: int,
            path: Path,
            folder: Path = folder,
            names: dict[str, str] = names,
            frames: list[int] = frames,
        ) -> None:
            source = folder / names[view] / f"{frames[frame]:04d}.jpg"
            try:
                shutil.copyfile(source, path.with_suffix(".jpg"))
            except OSError as error:
                problem = f"{source} cannot be read: {error}"
                raise DataError(problem, "download or copy it again") from error

        yield Recording(instruction, actions, states, tuple(names), write)


def _libero(path: Path, stack: contextlib.ExitStack) -> Iterator[Recording]:
    try:
        h5py = importlib.import_module("h5py")
    except ImportError:
        raise DataError(
            f"{path} needs h5py, which is not installed", "run pip install h5py"
        ) from None
    try:
        data = stack.enter_context(h5py.File(path, "r"))["data"]
        instruction = _libero_instruction(path, data)
        for name in sorted(data, key=lambda name: int(name.rpartition("_")[2])):
            demo = data[name]
            views = {"workspace": demo["obs/agentview_rgb"], "wrist": demo["obs/eye_in_hand_rgb"]}
            own = [
                demo[f"obs/{k}"][:] for k in ("ee_states", "gripper_states") if f"obs/{k}" in demo
            ]
            states = np.concatenate(own, axis=1) if own else None

            def write(view: str, frame: int, path: Path, views: dict[str, Any] = views) -> None:
                Image.fromarray(views[view][frame]).save(path.with_suffix(".png"))

            yield Recording(instruction, demo["actions"][:], states, tuple(views), write)
    except (KeyError, OSError) as error:
        problem = f"{path} does not have the layout of LIBERO: {error}"
        raise DataError(problem, OTHER_SOURCE) from error


def _libero_instruction(path: Path, data: Any) -> str:
    """Return the instruction that the file holds, or the one in its name."""
    with contextlib.suppress(KeyError, ValueError, TypeError):
        return str(parse_json(data.attrs["problem_info"])["language_instruction"]).strip('"')
    return path.stem.removesuffix("_demo").replace("_", " ")


if __name__ == "__main__":
    finish(convert, sys.argv[1:])
