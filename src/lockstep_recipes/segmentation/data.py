"""Images with labels in the layout of VOC or CamVid.

Owns: the files of a split, which of them each `--dataset` mode reads, checking and
augmenting a sample. Does not own: the order of samples, batches, devices. Pixels and
labels stay uint8 here. Augmentation uses Python's `random`, which the loader seeds by
(seed, epoch, sample).
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor

from lockstep.data.fingerprint import file_fingerprints
from lockstep.errors import DataError
from lockstep.randomness import derive_seed
from lockstep_recipes.segmentation.labels import (
    IGNORE,
    Labels,
    contour_map,
    scribble_map,
    scribble_of,
)

MODES: dict[str, tuple[str, ...]] = {
    "ScribbleOnly": ("scribble",),
    "PseudoOnly": ("pseudo",),
    "ScribblePseudo": ("scribble", "pseudo"),
    "ScribblePseudoDs": ("scribble", "pseudo", "ds"),
    "ScribblePseudoDc": ("scribble", "pseudo", "dc"),
    "ScribblePseudoDsDc": ("scribble", "pseudo", "ds", "dc"),
    "Full": ("mask",),
}
"""The planes that each mode reads: scribbles, pseudo-labels, their distance maps, masks."""

VOC_FOLDERS = {
    "image": "JPEGImages",
    "mask": "SegmentationClassAug",
    "scribble": "pascal_2012_scribble",
    "pseudo": "pseudo_labels",
    "ds": "distance_maps_scribble",
    "dc": "distance_maps_pseudo",
}
VOC_LISTS = "ImageSets/SegmentationAug"
CLASS_NAMES = {
    21: "background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse "
    "motorbike person pottedplant sheep sofa train tvmonitor",
    11: "sky building pole road pavement tree sign fence car pedestrian bicyclist",
}
"""Class names of VOC and of CamVid, by their number."""
MAPS = ("ds", "dc")
MEAN_COLOUR = (124, 116, 104)
"""The mean of ImageNet in bytes: the colour outside an image."""

Plane = NDArray[np.uint8]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listing:
    """The samples of one split: their files, and the meaning of their labels."""

    root: Path
    names: tuple[str, ...]
    """File names, without folder and suffix."""
    origins: tuple[str, ...]
    """Where each name comes from, for error messages."""
    folders: Mapping[str, Path]
    """The existing folders, by kind of content."""
    num_classes: int
    void: int
    """The index that means "unlabelled"; 255 always does."""
    background: int | None
    """The background class, if there is one."""
    suffixes: Mapping[str, str]

    def path(self, kind: str, index: int) -> Path:
        """Return the file that holds `kind` for a sample."""
        return self.folders[kind] / (self.names[index] + self.suffixes.get(kind, ".png"))


def is_camvid(root: Path) -> bool:
    """Return whether `root` has the layout of CamVid: train/ and trainannot/."""
    return (root / "trainannot").is_dir()


def open_split(
    root: Path,
    split: str,
    *,
    num_classes: int | None = None,
    void: int | None = None,
    pseudo: str | None = None,
) -> Listing:
    """List a split of a VOC-style or CamVid-style folder.

    Raises:
        DataError: if the folder, the split or its list is missing or empty.
    """
    if not root.is_dir():
        raise DataError(
            f"the data folder {root} does not exist",
            "check --dataset_path, or set LOCKSTEP_REHEARSAL=1 to train on generated shapes",
        )
    if is_camvid(root):
        places = {"image": split, "mask": f"{split}annot", "scribble": f"{split}scribble"}
        places["pseudo"] = pseudo or f"{split}pseudo"
        names, origins, suffixes = _names_in(root / split)
        classes = num_classes or 11
        default_void = None
        background = None
    else:
        places = VOC_FOLDERS | ({"pseudo": pseudo} if pseudo else {})
        names, origins = _names_listed(root / VOC_LISTS / f"{split}.txt")
        suffixes = {"image": ".jpg"}
        classes = num_classes or 21
        default_void = IGNORE
        background = 0
    folders = {kind: root / name for kind, name in places.items() if (root / name).is_dir()}
    if default_void is None:
        default_void = classes
    return Listing(
        root,
        names,
        origins,
        folders,
        classes,
        default_void if void is None else void,
        background,
        suffixes,
    )


def _names_listed(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Read a list of names, one per line; a line may also give the image's path, as in VOC."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise DataError(
            f"the list {path} cannot be read: {reason}",
            "pass a folder with JPEGImages/ and ImageSets/SegmentationAug/{train,val}.txt, "
            "or with train/ and trainannot/",
        ) from error
    found = [(Path(line.split()[0]).stem, n) for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DataError(
            f"the list {path} is empty", "write one image name per line, without its suffix"
        )
    return tuple(name for name, _ in found), tuple(f"{path}, line {n}" for _, n in found)


def _names_in(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
    if not folder.is_dir():
        problem = f"the split {folder} does not exist"
        raise DataError(problem, "name the folders train/, trainannot/, val/ and valannot/")
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if not files:
        raise DataError(f"the split {folder} holds no image", "put .jpg or .png files there")
    suffixes = {file.suffix for file in files}
    if len(suffixes) > 1:
        problem = f"the split {folder} mixes {' and '.join(sorted(suffixes))}"
        raise DataError(problem, "convert the images to one kind")
    names = tuple(file.stem for file in files)
    return names, tuple(str(folder) for _ in names), {"image": suffixes.pop()}


def choose_mode(mode: str, listing: Listing) -> str:
    """Return the mode to train in: "auto" chooses the richest that the folders allow.

    Raises:
        DataError: if a folder that the mode needs is missing.
    """
    has = listing.folders
    if mode == "auto":
        if "scribble" in has and "pseudo" in has:
            return "ScribblePseudoDsDc"
        found = {"scribble": "ScribbleOnly", "pseudo": "PseudoOnly", "mask": "Full"}
        mode = next((name for kind, name in found.items() if kind in has), "Full")
    for kind in MODES[mode]:
        made_from = {"scribble": "mask", "ds": "scribble", "dc": "pseudo"}.get(kind)
        if kind not in has and made_from not in (*has, *MODES[mode]):
            wanted = VOC_FOLDERS[kind]
            raise DataError(
                f"--dataset {mode} needs {kind} labels, and {listing.root} has none",
                f"add a folder {wanted} there, or pass another --dataset",
            )
    return mode


def check_files(listing: Listing, kinds: Iterable[str]) -> None:
    """Check that every file of a split exists.

    Raises:
        DataError: naming the first missing file and the line that lists it.
    """
    needed = [kind for kind in ("image", *kinds) if kind in listing.folders]
    for index, origin in enumerate(listing.origins):
        for kind in needed:
            path = listing.path(kind, index)
            if not path.is_file():
                raise _missing(path, origin)


def _missing(path: Path, origin: str) -> DataError:
    return DataError(
        f"{path} does not exist ({origin})", "put the file there, or pass --on_bad_sample skip"
    )


@dataclass(frozen=True, slots=True)
class Augment:
    """Random augmentation of a training sample, and its size."""

    crop: tuple[int, int] = (465, 465)
    """Height and width."""
    scale: tuple[float, float] = (0.5, 2.0)
    degrees: float = 10.0
    blur: float = 1.5
    """Largest blur radius; half of the images are blurred."""

    def __call__(self, image: Image.Image, planes: dict[str, Plane]) -> dict[str, Plane]:
        """Scale, rotate, flip, blur and crop an image, and its planes in the same way."""
        warp = self._draw_warp(image.size)
        size = self.crop[::-1]

        def warped(source: Image.Image, how: Image.Resampling, fill: object) -> Image.Image:
            affine = Image.Transform.AFFINE
            return source.transform(size, affine, warp, how, fillcolor=fill)  # type: ignore[arg-type]

        picture = warped(image, Image.Resampling.BILINEAR, MEAN_COLOUR)
        if random.random() < 0.5:
            picture = picture.filter(ImageFilter.GaussianBlur(random.uniform(0, self.blur)))
        made = {"image": np.asarray(picture)}
        for kind, plane in planes.items():
            how = Image.Resampling.BILINEAR if kind in MAPS else Image.Resampling.NEAREST
            fill = 0 if kind in MAPS else IGNORE
            made[kind] = np.asarray(warped(Image.fromarray(plane), how, fill))
        return made

    def _draw_warp(self, size: tuple[int, int]) -> tuple[float, ...]:
        """Return the affine map from a point of the crop to a point of the image."""
        scale = random.uniform(*self.scale)
        angle = math.radians(random.uniform(-self.degrees, self.degrees))
        mirror = random.choice((1, -1))
        # Offset of the crop's centre from the image's, in pixels of the scaled image: anywhere
        # that keeps the smaller of the two inside the larger.
        slack = [(scale * n - c) / 2 for n, c in zip(size, self.crop[::-1], strict=True)]
        shift = [
            random.uniform(-abs(s), abs(s)) - c / 2
            for s, c in zip(slack, self.crop[::-1], strict=True)
        ]
        cos = math.cos(angle) / scale
        sin = math.sin(angle) / scale
        rows = ((mirror * cos, -mirror * sin), (sin, cos))
        moved = [a * shift[0] + b * shift[1] + n / 2 for (a, b), n in zip(rows, size, strict=True)]
        return (*rows[0], moved[0], *rows[1], moved[1])


class SegmentationData:
    """Samples as uint8 tensors: "image" (3, H, W), and a plane (H, W) for each kind.

    "label" holds the reliable labels: scribbles, or the mask.
    """

    def __init__(
        self, listing: Listing, kinds: tuple[str, ...], augment: Augment | None = None
    ) -> None:
        self.listing = listing
        self.kinds = kinds
        self.augment = augment

    def __len__(self) -> int:
        return len(self.listing.names)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image, planes = self.read(index)
        made = (
            self.augment(image, planes) if self.augment else {"image": np.asarray(image)} | planes
        )
        made["image"] = made["image"].transpose(2, 0, 1)
        names = {"scribble": "label", "mask": "label"}
        return {
            names.get(kind, kind): torch.from_numpy(np.array(plane)) for kind, plane in made.items()
        }

    def describe(self, index: int) -> str:
        """Name the file behind a sample."""
        return str(self.listing.path("image", index))

    def fingerprint(self) -> list[str]:
        """Return a text per sample that changes with its name, image or labels."""
        listing = self.listing
        kinds = [k for k in ("image", *self.kinds) if k in listing.folders]
        files = [[listing.path(kind, i) for kind in kinds] for i in range(len(self))]
        return file_fingerprints(list(zip(listing.names, files, strict=True)))

    def read(self, index: int) -> tuple[Image.Image, dict[str, Plane]]:
        """Return an image and its planes, read from files or computed from other planes.

        Raises:
            DataError: naming the file and the line that lists it, if the sizes differ.
        """
        listing = self.listing
        origin = listing.origins[index]
        image = _decode(listing.path("image", index), origin, lambda opened: opened.convert("RGB"))

        def plane(kind: str) -> Plane:
            path = listing.path(kind, index)
            pixels = _decode(path, origin, partial(_single_channel, path, origin))
            if pixels.shape[::-1] != image.size:
                width, height = image.size
                raise DataError(
                    f"{path} is {pixels.shape[1]} x {pixels.shape[0]}, but its image "
                    f"{self.describe(index)} is {width} x {height} ({origin})",
                    "give image and labels the same size, or pass --on_bad_sample skip",
                )
            return pixels if kind in MAPS else _checked(pixels, listing, path, origin)

        planes: dict[str, Plane] = {}
        for kind in self.kinds:
            if kind in listing.folders:
                planes[kind] = plane(kind)
            elif kind == "scribble":
                planes[kind] = scribble_of(plane("mask"), derive_seed(listing.names[index]))
            elif kind == "ds":
                planes[kind] = scribble_map(planes["scribble"], listing.background)
            else:
                planes[kind] = contour_map(planes["pseudo"])
        return image, planes

    def without_bad(self) -> tuple["SegmentationData", list[str]]:
        """Return the readable samples, and the error of each of the others."""

        def problem(index: int) -> str:
            try:
                self.read(index)
            except DataError as error:
                return error.problem
            return ""

        with ThreadPoolExecutor(8) as pool:
            problems = list(pool.map(problem, range(len(self))))
        listing = self.listing
        good = [index for index, text in enumerate(problems) if not text]
        if not good:
            raise DataError(
                f"every sample of {listing.root} is unreadable, the first because {problems[0]}",
                "check the whole data set before skipping samples",
            )
        names, origins = (
            tuple(values[index] for index in good) for values in (listing.names, listing.origins)
        )
        kept = SegmentationData(
            replace(listing, names=names, origins=origins), self.kinds, self.augment
        )
        return kept, [text for text in problems if text]


def _decode(path: Path, origin: str, take: Callable[[Image.Image], T]) -> T:
    try:
        with Image.open(path) as opened:
            return take(opened)
    except FileNotFoundError as error:
        raise _missing(path, origin) from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{path} is not a readable image: {error} ({origin})",
            "replace the file, or pass --on_bad_sample skip",
        ) from error


def _single_channel(path: Path, origin: str, opened: Image.Image) -> Plane:
    if opened.mode not in ("L", "P", "1"):
        raise DataError(
            f"{path} is not a map of class indices: its mode is {opened.mode} ({origin})",
            "save a single-channel 8-bit PNG, one class index per pixel",
        )
    return np.array(opened).astype(np.uint8)


def _checked(labels: Labels, listing: Listing, path: Path, origin: str) -> Labels:
    """Replace the void index by 255, and refuse labels that are not a class."""
    known = np.where(labels == listing.void, IGNORE, labels).astype(np.uint8)
    wrong = (known >= listing.num_classes) & (known != IGNORE)
    if wrong.any():
        row, column = (int(n) for n in np.argwhere(wrong)[0])
        raise DataError(
            f"{path} has label {known[row, column]} at row {row}, column {column}, but there are "
            f"{listing.num_classes} classes ({origin})",
            "set --num_classes and --void as the labels have them, or pass --on_bad_sample skip",
        )
    return known
