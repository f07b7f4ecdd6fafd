"""What is counted, what windows see, and the colours things are drawn in."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from lockstep_recipes.segmentation.evaluate import (
    count_pixels,
    draw_rows,
    palette,
    predict_in_windows,
    read_confusion,
    window_starts,
)


def test_ignored_pixels_are_not_counted_and_absent_classes_have_no_iou() -> None:
    truth = torch.tensor([[0, 0, 1, 255]], dtype=torch.uint8)
    counts = count_pixels(torch.tensor([[0, 1, 1, 2]]), truth, num_classes=4)
    expected = {"miou": 0.5, "pixel_accuracy": 2 / 3, "iou_00": 0.5, "iou_01": 0.5}
    assert read_confusion(counts.double()) == pytest.approx(expected)
    assert read_confusion(counts.double() / 7) == pytest.approx(expected), "shares will do"


def test_without_a_labelled_pixel_nothing_is_right() -> None:
    unknown = torch.full((2, 3), 255, dtype=torch.uint8)
    counts = count_pixels(torch.zeros(2, 3, dtype=torch.int64), unknown, num_classes=4)
    assert read_confusion(counts.double()) == {"miou": 0.0, "pixel_accuracy": 0.0}


class Pointwise(nn.Module):
    """Sees one pixel at a time, so that windows cannot matter; notes what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes.append(tuple(image.shape[2:]))
        return self.conv(image), torch.zeros(())


@torch.no_grad()
@pytest.mark.parametrize("size", [(40, 70), (20, 90), (10, 12)])
def test_windows_cover_the_image_and_average_to_what_it_is(size: tuple[int, int]) -> None:
    model, image = Pointwise(), torch.randn(3, *size)
    whole = model(image[None])[0][0].softmax(dim=0)
    model.shapes.clear()
    seen = predict_in_windows(model, image, scales=(1.0,), window=33)
    assert torch.allclose(seen, whole, atol=1e-6)
    assert set(model.shapes) == {(33, 33)}
    flat = torch.ones(3, *size)
    several = predict_in_windows(model, flat, window=33)
    assert several.shape == (4, *size)
    assert torch.allclose(several.sum(dim=0), torch.ones(size), atol=1e-5)


def test_windows_are_two_thirds_apart_and_the_last_ends_with_the_image() -> None:
    assert window_starts(1000, 465) == [0, 310, 535]
    assert window_starts(465, 465) == [0]
    for length in range(465, 1500, 7):
        starts = window_starts(length, 465)
        assert starts[-1] + 465 == length
        assert max(np.diff(starts), default=0) <= 310


def test_classes_have_vocs_colours(tmp_path) -> None:
    colours = palette()
    known = {
        0: (0, 0, 0),
        1: (128, 0, 0),
        2: (0, 128, 0),
        15: (192, 128, 128),
        255: (224, 224, 192),
    }
    for index, colour in known.items():
        assert tuple(colours[index]) == colour
    image = np.full((5, 7, 3), 9, dtype=np.uint8)
    mask = np.full((5, 7), 15, dtype=np.uint8)
    draw_rows(
        [(image, mask, mask), (image[:3, :4], mask[:3, :4], mask[:3, :4])], tmp_path / "p.png"
    )
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.size == (3 * 11, 9 + 7)
        assert picture.getpixel((13, 3)) == (192, 128, 128)
