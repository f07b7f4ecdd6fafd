"""Data sets of images or texts in a folder.

Owns: listing a folder, its classes, the held-out slice, decoding a file. Does not own:
the order of samples, batches, devices. Images stay uint8 here.
"""

import hashlib
import math
import os
import random
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from lockstep.data.fingerprint import file_fingerprints
from lockstep.errors import DataError
from lockstep.text_input import parse_json
from lockstep_recipes.jit import text_pixels

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})
TEXT_SUFFIXES = frozenset({".json", ".txt"})
MIN_HELD_OUT = 8

DataFormat = Literal["auto", "images", "text"]


@dataclass(frozen=True, slots=True)
class Listing:
    """The usable files of a folder, in a fixed order."""

    root: Path
    kind: Literal["images", "text"]
    names: tuple[str, ...]
    """Paths relative to `root`, with forward slashes."""
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    """Class folders in alphabetical order; empty if the folder is flat."""

    def __len__(self) -> int:
        return len(self.names)

    def fingerprint(self) -> list[str]:
        """Return a text per file that changes with its content, name or class."""
        named = zip(self.names, self.labels, strict=True)
        return file_fingerprints([(f"{name} {label}", [self.root / name]) for name, label in named])

    def select(self, indices: list[int]) -> "Listing":
        """Return the same folder with only some of its files."""
        names = tuple(self.names[i] for i in indices)
        return replace(self, names=names, labels=tuple(self.labels[i] for i in indices))


def scan(folder: Path | str, data_format: DataFormat = "auto") -> Listing:
    """List what `folder` holds: images (in class folders, or flat), or texts.

    Hidden files and files of other kinds are ignored. With "auto" the folder must hold
    either images or texts; otherwise the other kind is ignored too.

    Raises:
        DataError: if the folder is missing, unreadable, empty, or mixed.
    """
    root = Path(folder)
    names = _walk(root)
    images = [name for name in names if Path(name).suffix.lower() in IMAGE_SUFFIXES]
    texts = [name for name in names if Path(name).suffix.lower() in TEXT_SUFFIXES]
    if data_format == "auto" and images and texts:
        raise DataError(
            f"{root} holds {len(images)} images and {len(texts)} texts ({images[0]}, {texts[0]})",
            "pass --data_format images or --data_format text to say which to train on",
        )
    found = {"auto": images or texts, "images": images, "text": texts}[data_format]
    if not found:
        _refuse_empty(root, names, data_format)
    if found is texts:
        return Listing(root, "text", tuple(texts), (0,) * len(texts), ())
    return _sort_into_classes(root, images)


def _walk(root: Path) -> list[str]:
    """Return the visible files below `root`, sorted, as paths relative to it."""
    if not root.exists():
        raise DataError(
            f"the data folder {root} does not exist",
            "check the path, or set LOCKSTEP_REHEARSAL=1 to train on generated sample data",
        )
    if not root.is_dir():
        raise DataError(f"{root} is a file, not a folder of images or texts", f"pass {root.parent}")

    def refuse(error: OSError) -> NoReturn:
        raise DataError(
            f"{error.filename or root} cannot be read: {error.strerror or error}",
            "check its permissions (chmod -R u+rX), or that the disk is still mounted",
        ) from error

    names = []
    for folder, below, files in os.walk(root, onerror=refuse, followlinks=True):
        below[:] = [name for name in below if not name.startswith(".")]
        prefix = Path(folder).relative_to(root)
        names += [(prefix / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(names)


def _refuse_empty(root: Path, names: list[str], data_format: DataFormat) -> NoReturn:
    wanted = sorted(IMAGE_SUFFIXES if data_format == "images" else TEXT_SUFFIXES)
    if data_format == "auto":
        wanted = sorted(IMAGE_SUFFIXES | TEXT_SUFFIXES)
    if not names:
        raise DataError(f"{root} is empty", f"put files there ({', '.join(wanted)})")
    kinds = Counter(Path(name).suffix or "no suffix" for name in names)
    held = ", ".join(f"{number} {suffix}" for suffix, number in kinds.most_common(4))
    raise DataError(
        f"{root} has {len(names)} files but none to train on (found {held})",
        f"pass a folder of {', '.join(wanted)}",
    )


def _sort_into_classes(root: Path, images: list[str]) -> Listing:
    flat = [name for name in images if "/" not in name]
    folders = sorted(
        entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    if len(flat) == len(images):
        return Listing(root, "images", tuple(images), (0,) * len(images), ())
    if flat:
        raise DataError(
            f"{root} holds {len(flat)} images beside {len(folders)} folders ({flat[0]}, "
            f"{folders[0]}/), so the class of these images is unknown",
            "give every class a folder, or put all images into one flat folder",
        )
    number = {name: index for index, name in enumerate(folders)}
    labels = tuple(number[name.split("/", 1)[0]] for name in images)
    empty = sorted(set(range(len(folders))) - set(labels))
    if empty:
        raise DataError(
            f"the class folder {root / folders[empty[0]]} holds no image",
            "remove it (every folder counts as a class), or put its images there",
        )
    return Listing(root, "images", tuple(images), labels, tuple(folders))


def hold_out(listing: Listing, fraction: float) -> tuple[Listing, Listing]:
    """Split a listing into training files and disjoint held-out files.

    The hash of a file's name decides, so neither the machine nor the order of the folder
    matters. At least 8 files are held out, never more than half.
    """
    if fraction <= 0:
        return listing, listing.select([])
    wanted = max(MIN_HELD_OUT, math.ceil(fraction * len(listing)))
    num_held_out = min(wanted, len(listing) // 2)

    def key(index: int) -> bytes:
        name = listing.names[index].encode(errors="surrogateescape")  # a name may be invalid UTF-8
        return hashlib.blake2b(name, digest_size=8).digest()

    order = sorted(range(len(listing)), key=key)
    return (
        listing.select(sorted(order[num_held_out:])),
        listing.select(sorted(order[:num_held_out])),
    )


def match_classes(held_out: Listing, trained: Listing) -> Listing:
    """Give the classes of a held-out folder the numbers of the training folder.

    Raises:
        DataError: if it holds another kind of file, or a class without training files.
    """
    if held_out.kind != trained.kind:
        raise DataError(
            f"{trained.root} holds {trained.kind}, but {held_out.root} holds {held_out.kind}",
            "use a validation folder of the same kind",
        )
    if bool(held_out.classes) != bool(trained.classes):
        with_classes, flat = (
            (trained.root, held_out.root) if trained.classes else (held_out.root, trained.root)
        )
        raise DataError(
            f"{with_classes} has class folders, but {flat} is flat",
            "use the same layout in both",
        )
    unknown = [name for name in held_out.classes if name not in trained.classes]
    if unknown:
        raise DataError(
            f"{held_out.root} has {len(unknown)} classes that {trained.root} lacks ({unknown[0]})",
            "use the same class folders in both",
        )
    number = {name: index for index, name in enumerate(trained.classes)}
    labels = tuple(number[held_out.classes[i]] if held_out.classes else 0 for i in held_out.labels)
    return replace(held_out, labels=labels, classes=trained.classes)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert a grey, palette or transparent image to RGB, on white."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # 16-bit grey: Pillow would clip instead of scale
        values = np.asarray(image).astype(np.int64) >> 8
        return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def centre_square(image: Image.Image, size: int) -> Image.Image:
    """Crop the central square and resize it to `size` pixels."""
    if image.size == (size, size):
        return image
    width, height = image.size
    side = min(width, height)
    left = (width - side) / 2
    top = (height - side) / 2
    return image.resize(
        (size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side)
    )


def read_image(path: Path, size: int) -> NDArray[np.uint8]:
    """Decode a file into an RGB image (size, size, 3).

    Raises:
        DataError: if the file cannot be opened, or is truncated or damaged.
    """
    try:
        with warnings.catch_warnings(), Image.open(path) as image:
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image.draft("RGB", (2 * size, 2 * size))  # decodes a large JPEG at a reduced size
            return np.asarray(centre_square(to_rgb(image), size))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{path} is not a readable image: {error}", "replace the file or remove it"
        ) from error


class ImageFolder:
    """Images as {"image": uint8 (3, H, H), "label": int}."""

    def __init__(self, listing: Listing, size: int, *, flip: bool) -> None:
        self.listing = listing
        self.size = size
        self.flip = flip

    def __len__(self) -> int:
        return len(self.listing)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = read_image(self.listing.root / self.listing.names[index], self.size)
        if self.flip and random.random() < 0.5:  # the loader seeds `random` for each sample
            pixels = pixels[:, ::-1]
        planes = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
        return {"image": planes, "label": self.listing.labels[index]}

    def describe(self, index: int) -> str:
        """Name the file behind a sample."""
        return str(self.listing.root / self.listing.names[index])

    def fingerprint(self) -> list[str]:
        """Return a text per sample that changes with its file."""
        return self.listing.fingerprint()


class TextFolder:
    """Texts as {"image": uint8 (3, H, H), "label": 0, "mask": bool (H, H)}."""

    def __init__(self, listing: Listing, size: int) -> None:
        self.listing = listing
        self.size = size

    def __len__(self) -> int:
        return len(self.listing)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = read_tokens(self.listing.root / self.listing.names[index])
        pixels, mask = text_pixels.paint(tokens, self.size)
        return {"image": torch.from_numpy(pixels), "label": 0, "mask": torch.from_numpy(mask)}

    def describe(self, index: int) -> str:
        """Name the file behind a sample."""
        return str(self.listing.root / self.listing.names[index])

    def fingerprint(self) -> list[str]:
        """Return a text per sample that changes with its file."""
        return self.listing.fingerprint()


def read_tokens(path: Path) -> list[int]:
    """Return the tokens of a `.txt`, or of a `.json` with "text" or "prompt" and "answer".

    Raises:
        DataError: if the file cannot be read, or has another format.
    """
    try:
        content = path.read_bytes()
        if path.suffix.lower() == ".txt":
            return text_pixels.encode(content)
        entry = parse_json(content)
        if isinstance(entry, dict) and isinstance(entry.get("text"), str):
            return text_pixels.encode(entry["text"].encode())
        return text_pixels.encode(entry["prompt"].encode(), entry["answer"].encode())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "check the file") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f'{path} is not a JSON object with "text", or with "prompt" and "answer"',
            "correct the file or remove it",
        ) from error


def open_listing(listing: Listing, size: int, *, flip: bool) -> ImageFolder | TextFolder:
    """Return the data set of a listing; `flip` mirrors half of the images, and no texts."""
    if listing.kind == "text":
        return TextFolder(listing, size)
    return ImageFolder(listing, size, flip=flip)
