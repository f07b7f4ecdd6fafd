"""Metrics and pictures: the confusion matrix, sliding windows at several scales, colours.

Owns: IoU and accuracy, the sliding-window prediction, the colours of classes. Does not
own: which images are held out, or when to evaluate.

Shapes: H x W pixels, K classes.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from lockstep_recipes.segmentation.data import CLASS_NAMES
from lockstep_recipes.segmentation.labels import IGNORE
from lockstep_recipes.tables import placed

MEAN = torch.tensor((0.485, 0.456, 0.406), dtype=torch.float64)[:, None, None]
STD = torch.tensor((0.229, 0.224, 0.225), dtype=torch.float64)[:, None, None]
"""Mean and deviation of ImageNet, for which published weights were trained."""
TEST_SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
TEST_WINDOW = 465


def normalise(image: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn bytes (B, 3, H, W) into normalised network input."""
    mean, std = (placed(v, image.device, dtype) for v in (MEAN, STD))
    scaled = (image.to(dtype) / 255 - mean) / std
    return scaled.contiguous(memory_format=torch.channels_last)


def count_pixels(predicted: Tensor, truth: Tensor, num_classes: int) -> Tensor:
    """Count the pixels of class t (row) that were predicted as class p (column), without 255."""
    k = num_classes
    pairs = torch.where(truth == IGNORE, k * k, truth.long() * k + predicted)
    return torch.bincount(pairs.flatten(), minlength=k * k + 1)[:-1].view(k, k)


def read_confusion(matrix: Tensor) -> dict[str, float]:
    """Return mIoU, pixel accuracy and each class's IoU from counts of pixels, or shares.

    Classes that neither occur nor were predicted have no IoU and do not enter the mean.
    """
    hit = matrix.diag()
    union = matrix.sum(0) + matrix.sum(1) - hit
    seen = union > 0
    iou = hit / torch.where(seen, union, 1)
    total = float(matrix.sum())
    names = class_names(len(matrix))
    measured = {
        "miou": float(iou[seen].mean()) if seen.any() else 0.0,
        "pixel_accuracy": float(hit.sum()) / total if total else 0.0,
    }
    return measured | {f"iou_{names[i]}": float(iou[i]) for i in range(len(iou)) if seen[i]}


def class_names(num_classes: int) -> Sequence[str]:
    """Return the class names of VOC or CamVid, or numbers for another data set."""
    known = CLASS_NAMES.get(num_classes)
    return known.split() if known else [f"{index:02d}" for index in range(num_classes)]


def window_starts(length: int, window: int) -> list[int]:
    """Return the window starts along one side: two thirds of a window apart, the last at the end.

    >>> window_starts(1000, 465), window_starts(300, 465)
    ([0, 310, 535], [0])
    """
    last = max(0, length - window)
    return [*range(0, last, math.ceil(window * 2 / 3)), last]


def predict_in_windows(
    model: nn.Module,
    image: Tensor,
    scales: Sequence[float] = TEST_SCALES,
    window: int = TEST_WINDOW,
) -> Tensor:
    """Return the mean class probabilities (K, H, W) of a normalised image (3, H, W).

    At each scale, windows slide over the image and overlap; a pixel's probability is the
    mean over the windows that cover it, then over scales.
    """
    size = image.shape[1:]
    total = torch.zeros(())
    for scale in scales:
        scaled_size = [max(1, round(n * scale)) for n in size]
        scaled = F.interpolate(image[None], scaled_size, mode="bilinear", align_corners=False)
        padding = [max(0, window - n) for n in scaled_size]
        scaled = F.pad(scaled, (0, padding[1], 0, padding[0]))  # 0 is ImageNet's mean
        summed = torch.zeros(())
        seen = scaled.new_zeros(scaled.shape[2:])
        for top in window_starts(scaled.shape[2], window):
            for left in window_starts(scaled.shape[3], window):
                here = slice(top, top + window), slice(left, left + window)
                logits = model(scaled[..., here[0], here[1]])[0]
                if summed.ndim == 0:
                    summed = logits.new_zeros(logits.shape[1], *seen.shape)
                summed[:, here[0], here[1]] += logits[0].softmax(dim=0)
                seen[here] += 1
        mean = (summed / seen)[:, : scaled_size[0], : scaled_size[1]]
        restored = F.interpolate(mean[None], size, mode="bilinear", align_corners=False)
        total = total.to(restored) + restored[0]
    return total / len(scales)


def palette() -> NDArray[np.uint8]:
    """Return VOC's colour of each index: its bits, distributed over red, green and blue."""
    index = np.arange(256)
    colours = np.zeros((256, 3), dtype=np.uint8)
    for triple in range(3):
        for channel in range(3):
            bit = index >> (3 * triple + channel) & 1
            colours[:, channel] |= (bit << (7 - triple)).astype(np.uint8)
    return colours


def draw_rows(rows: Sequence[tuple[NDArray[np.uint8], ...]], file: Path | BinaryIO) -> None:
    """Write a PNG with a row per image: the image, its truth and its prediction."""
    colours = palette()
    strips = []
    for image, *maps in rows:
        parts = [image, *(colours[plane] for plane in maps)]
        strips.append(np.concatenate([np.pad(p, ((2, 2), (2, 2), (0, 0))) for p in parts], axis=1))
    width = max(strip.shape[1] for strip in strips)
    padded = [np.pad(s, ((0, 0), (0, width - s.shape[1]), (0, 0))) for s in strips]
    Image.fromarray(np.concatenate(padded)).save(file, format="PNG")
