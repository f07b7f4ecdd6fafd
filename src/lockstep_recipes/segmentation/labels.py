"""Planes derived from labels: distances, distance maps, scribbles.

Owns: the exact Euclidean distance transform and its uses. All functions are pure, from
arrays to arrays. Labels are class indices in uint8, 255 where unlabelled.
"""

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

IGNORE = 255
SCRIBBLE_LAMBDA = math.e
"""The scribble map reaches 0 at a distance of 255 / sqrt(lambda): 155 pixels."""
CONTOUR_LAMBDA = math.e**6
"""The contour map reaches 255 at 13 pixels, by the same formula."""

Labels = NDArray[np.uint8]


def distances(points: NDArray[np.bool_], limit: float = math.inf) -> NDArray[np.float64]:
    """Return each pixel's Euclidean distance to the nearest True pixel, exactly.

    First the distance within each column; then, for every pixel, the minimum of
    (column offset)² + (distance within that column)² over growing offsets, until larger
    offsets cannot be nearer. Distances beyond `limit`, or to nothing, are infinite.

    >>> distances(np.array([[True, False, False], [False, False, False]]))[1].round(2).tolist()
    [1.0, 1.41, 2.24]
    """
    height, width = points.shape
    if not points.any():
        return np.full(points.shape, math.inf)
    rows = np.arange(height)[:, None]
    far = height + width  # further than anything inside
    above = np.maximum.accumulate(np.where(points, rows, -far), axis=0)
    below = np.minimum.accumulate(np.where(points, rows, 2 * far)[::-1], axis=0)[::-1]
    squared = np.minimum(rows - above, below - rows).astype(np.int64) ** 2
    nearest = squared.copy()
    for aside in range(1, width):
        if aside > limit or aside**2 >= nearest.max():
            break
        there = squared + aside**2
        np.minimum(nearest[:, aside:], there[:, :-aside], out=nearest[:, aside:])
        np.minimum(nearest[:, :-aside], there[:, aside:], out=nearest[:, :-aside])
    reach = min(limit**2, height**2 + width**2)
    return np.where(nearest <= reach, np.sqrt(nearest), math.inf)


def is_foreground(labels: Labels, background: int | None) -> NDArray[np.bool_]:
    """Return the labelled pixels that are not background, if there is a background class."""
    known: NDArray[np.bool_] = labels != IGNORE
    return known if background is None else known & (labels != background)


def scribble_map(scribble: Labels, background: int | None) -> NDArray[np.uint8]:
    """Return 255 on scribbled foreground, falling to 0 with the distance from it."""
    scale = math.sqrt(SCRIBBLE_LAMBDA)
    distance = distances(is_foreground(scribble, background), limit=255 / scale + 1)
    return (255 - np.clip(scale * distance, 0, 255)).round().astype(np.uint8)


def contour_map(labels: Labels) -> NDArray[np.uint8]:
    """Return 0 on the contours of `labels`, rising to 255 with the distance from them."""
    contour = np.zeros(labels.shape, dtype=bool)
    for axis in (0, 1):
        rolled = np.moveaxis(labels, axis, 0)
        marked = np.moveaxis(contour, axis, 0)  # a view
        differs = rolled[1:] != rolled[:-1]
        marked[1:] |= differs
        marked[:-1] |= differs
    scale = math.sqrt(CONTOUR_LAMBDA)
    distance = distances(contour, limit=255 / scale + 1)
    return np.clip(scale * distance, 0, 255).round().astype(np.uint8)


def scribble_of(mask: Labels, seed: int, strokes: int = 2, width: int = 3) -> Labels:
    """Imitate an annotator: draw strokes through the thickest parts of each class of a mask.

    Every scribbled pixel has the mask's class; all others are 255.
    """
    rng = np.random.default_rng(seed)
    scribble = np.full_like(mask, IGNORE)
    for label in np.unique(mask[mask != IGNORE]):
        rows, columns = (np.flatnonzero((mask == label).any(axis=axis)) for axis in (1, 0))
        box = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
        inside = np.pad(mask[box] == label, 1)  # the border of the image bounds the region
        depth = distances(~inside)[1:-1, 1:-1]
        core = np.argwhere(depth >= 0.6 * depth.max())
        canvas = Image.new("1", depth.shape[::-1])
        for _ in range(strokes):
            ends = core[rng.integers(len(core), size=2)]
            points = [(float(x), float(y)) for y, x in ends]
            ImageDraw.Draw(canvas).line(points, fill=1, width=width)
        scribble[box][np.asarray(canvas) & (depth > min(1.0, depth.max() - 1))] = label
    return scribble
