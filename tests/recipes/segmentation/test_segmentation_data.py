"""Distances are exact, scribbles are true, augmentation moves an image and its labels alike."""

import math
import random
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.errors import DataError
from lockstep_recipes.segmentation.data import (
    MODES,
    Augment,
    SegmentationData,
    check_files,
    choose_mode,
    open_split,
)
from lockstep_recipes.segmentation.labels import (
    contour_map,
    distances,
    scribble_map,
    scribble_of,
)
from lockstep_recipes.segmentation.sample_data import NUM_CLASSES, draw, make_shapes


@pytest.mark.parametrize("seed", range(6))
def test_the_distance_transform_equals_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = rng.random(rng.integers(1, 40, 2)) < rng.choice([0.004, 0.05, 0.6])
    points[rng.integers(points.shape[0]), rng.integers(points.shape[1])] = True
    rows, columns = np.indices(points.shape)
    apart = [np.hypot(rows - r, columns - c) for r, c in np.argwhere(points)]
    assert np.array_equal(distances(points), np.min(apart, axis=0))
    near = distances(points, limit=3)
    truth = np.min(apart, axis=0)
    assert np.array_equal(near, np.where(truth <= 3, truth, math.inf))


def test_the_distance_to_nothing_is_infinite() -> None:
    assert np.isinf(distances(np.zeros((4, 5), dtype=bool))).all()


def test_the_distance_maps_are_what_the_formulas_say() -> None:
    scribble = np.full((40, 300), 255, dtype=np.uint8)
    scribble[20, 10] = 3
    scribble[5, 5] = 0  # scribbled background is not foreground
    rows, columns = np.indices(scribble.shape)
    d = np.hypot(rows - 20, columns - 10)
    expected = 255 - np.clip(math.sqrt(math.e) * d, 0, 255)
    assert np.abs(scribble_map(scribble, background=0) - expected).max() <= 0.5
    assert scribble_map(scribble, background=0)[20, 299] == 0
    assert not scribble_map(np.full((9, 9), 255, dtype=np.uint8), background=0).any()

    labels = np.zeros((20, 60), dtype=np.uint8)
    labels[:, 30:] = 2
    d = np.where(np.arange(60) < 30, 29 - np.arange(60), np.arange(60) - 30)
    expected = np.clip(math.exp(3) * d, 0, 255)
    assert np.abs(contour_map(labels) - expected[None]).max() <= 0.5
    assert (contour_map(np.zeros((5, 5), dtype=np.uint8)) == 255).all()


def test_a_generated_scribble_marks_every_class_and_never_lies() -> None:
    rng = np.random.default_rng(1)
    for seed in range(20):
        _, mask = draw(48, rng)
        mask[:4, :4] = 255
        scribble = scribble_of(mask, seed)
        known = scribble != 255
        assert np.array_equal(scribble[known], mask[known])
        assert set(np.unique(scribble[known])) == set(np.unique(mask[mask != 255]))
        assert known.mean() < 0.35
        assert np.array_equal(scribble, scribble_of(mask, seed))


def test_augmentation_moves_image_and_labels_alike() -> None:
    random.seed(3)
    mask = np.zeros((60, 80), dtype=np.uint8)
    mask[15:45, 20:60] = 1
    picture = Image.fromarray(np.repeat(mask[..., None] * 200, 3, axis=2).astype(np.uint8))
    for _ in range(20):
        made = Augment(crop=(49, 65), blur=0)(picture, {"mask": mask, "ds": mask * 200})
        assert made["image"].shape == (49, 65, 3)
        bright, labels = made["image"][..., 0].astype(int), made["mask"]
        inside = labels != 255
        agree = (bright > 100) == (labels == 1)
        assert agree[inside].mean() > 0.95
        assert (abs(made["ds"].astype(int) - bright) < 40)[inside].mean() > 0.95
        outside = (made["image"] == (124, 116, 104)).all(axis=-1)
        assert (outside == ~inside).mean() > 0.9


def test_augmentation_covers_its_ranges_and_repeats_with_the_seed() -> None:
    picture = Image.new("RGB", (50, 50))
    widths, mirrored = [], []
    random.seed(0)
    for _ in range(200):
        a, b, _, d, e, _ = Augment(crop=(33, 33))._draw_warp(picture.size)
        widths.append(1 / math.hypot(d, e))
        mirrored.append(a * e - b * d < 0)
        assert abs(a * d + b * e) < 1e-12, "a rotation, not a shear"
        assert math.hypot(a, b) == pytest.approx(math.hypot(d, e))
        assert abs(math.degrees(math.atan2(d, e))) <= 10
    assert 0.5 <= min(widths) < 0.55
    assert 1.9 < max(widths) <= 2
    assert 70 < sum(mirrored) < 130


def test_a_sample_repeats_with_the_generators_and_differs_without(shapes: Path) -> None:
    listing = open_split(shapes, "train", num_classes=NUM_CLASSES)
    data = SegmentationData(listing, MODES["ScribblePseudoDsDc"], Augment(crop=(33, 33)))
    made = []
    for seed in (7, 7, 8):
        random.seed(seed)
        made.append(data[3])
    assert all(torch.equal(made[0][kind], made[1][kind]) for kind in made[0])
    assert not torch.equal(made[0]["image"], made[2]["image"])
    assert {kind: plane.shape for kind, plane in made[0].items()} == {
        "image": (3, 33, 33),
        **dict.fromkeys(("label", "pseudo", "ds", "dc"), (33, 33)),
    }


def test_auto_uses_what_exists_and_stored_maps_win(shapes: Path, tmp_path: Path) -> None:
    root = tmp_path / "VOC2012"
    shutil.copytree(shapes, root)

    def mode() -> str:
        return choose_mode("auto", open_split(root, "train"))

    assert mode() == "ScribblePseudoDsDc"
    stored = root / "distance_maps_scribble"
    stored.mkdir()
    first = open_split(root, "train").names[0]
    with Image.open(root / "pascal_2012_scribble" / f"{first}.png") as scribble:
        Image.new("L", scribble.size, 77).save(stored / f"{first}.png")
    data = SegmentationData(open_split(root, "train"), MODES["ScribblePseudoDs"])
    assert (data[0]["ds"] == 77).all()
    shutil.rmtree(root / "pseudo_labels")
    assert mode() == "ScribbleOnly"
    with pytest.raises(DataError, match="PseudoOnly"):
        choose_mode("PseudoOnly", open_split(root, "train"))
    shutil.rmtree(root / "pascal_2012_scribble")
    assert mode() == "Full"


def test_sample_data_are_made_once_and_never_over_other_files(tmp_path: Path) -> None:
    made = make_shapes(tmp_path / "a", num=2, num_val=1, size=24)
    before = {f: f.stat().st_mtime_ns for f in made.rglob("*")}
    assert make_shapes(tmp_path / "a", num=2, num_val=1, size=24) == made
    assert {f: f.stat().st_mtime_ns for f in made.rglob("*")} == before
    with pytest.raises(DataError, match="another sample set"):
        make_shapes(tmp_path / "a", num=3, num_val=1, size=24)


def test_camvids_layout_needs_no_list_and_its_void_is_ignored(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for folder in (split, f"{split}annot"):
            (tmp_path / folder).mkdir()
        for number in range(3):
            labels = np.full((20, 30), 11, dtype=np.uint8)
            labels[4:16, 5 : 15 + number] = 10
            Image.fromarray(labels).save(tmp_path / f"{split}annot" / f"street_{number}.png")
            Image.new("RGB", (30, 20)).save(tmp_path / split / f"street_{number}.jpg")
    listing = open_split(tmp_path, "train")
    assert listing.names == ("street_0", "street_1", "street_2")
    for kind in ("mask", "scribble"):
        labels = SegmentationData(listing, (kind,))[1]["label"]
        assert set(labels.unique().tolist()) == {10, 255}
    with pytest.raises(DataError, match="label 11"):
        SegmentationData(open_split(tmp_path, "train", void=255), ("mask",))[0]
    (tmp_path / "trainannot" / "street_1.png").unlink()
    with pytest.raises(DataError, match=r"trainannot/street_1\.png does not exist"):
        check_files(listing, ["mask"])


def test_camvid_is_read_with_void_ignored_and_scribbles_made(
    shared_data: Path, tmp_path: Path
) -> None:
    with tarfile.open(shared_data / "camvid_480x360.tar.xz") as pack:
        chosen = {}
        for member in pack:
            folder = Path(member.name).parent.name
            if folder in ("valannot", "val") and member.isfile():
                chosen.setdefault(Path(member.name).stem, []).append(member)
            if sum(len(pair) == 2 for pair in chosen.values()) >= 3:
                break
        for pair in chosen.values():
            if len(pair) == 2:
                pack.extractall(tmp_path, pair, filter="data")
    for file in (tmp_path / "valannot").iterdir():
        if not (tmp_path / "val" / f"{file.stem}.jpg").exists():
            file.unlink()
    (tmp_path / "trainannot").mkdir()
    listing = open_split(tmp_path, "val")
    assert (listing.num_classes, listing.void, listing.background) == (11, 11, None)
    assert choose_mode("auto", listing) == "Full"
    assert len(listing.names) >= 3
    for index in range(3):
        dense = SegmentationData(listing, ("mask",))[index]
        sparse = SegmentationData(listing, ("scribble",))[index]
        assert dense["image"].shape == (3, 360, 480)
        labels = set(dense["label"].unique().tolist())
        assert labels <= {*range(11), 255}
        assert len(labels) > 5
        known = sparse["label"] != 255
        assert torch.equal(sparse["label"][known], dense["label"][known])
        assert 0.001 < known.float().mean() < 0.2
