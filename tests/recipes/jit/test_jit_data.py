"""A folder is understood or refused in one clear line."""

import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data.fingerprint import take_fingerprint
from lockstep.errors import ConfigError, DataError
from lockstep_recipes.jit import text_pixels
from lockstep_recipes.jit.data import (
    ImageFolder,
    hold_out,
    match_classes,
    open_listing,
    read_image,
    scan,
)
from lockstep_recipes.jit.flags import build
from lockstep_recipes.jit.sample_data import SHAPES, make_images, make_texts
from lockstep_recipes.jit.task import JiTTask


def write_image(path: Path, mode: str = "RGB", size: tuple[int, int] = (8, 8)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size).save(path)
    return path


# --- what a folder holds --------------------------------------------------------------------------


def test_class_folders_become_classes_in_alphabetical_order(tmp_path: Path) -> None:
    for name in ("dog/1.png", "cat/deep/2.JPEG", "cat/3.jpg", "emu/4.webp", "emu/5.bmp"):
        write_image(tmp_path / name)
    write_image(tmp_path / ".cache" / "6.png")
    listing = scan(tmp_path)
    assert listing.classes == ("cat", "dog", "emu")
    assert listing.names == ("cat/3.jpg", "cat/deep/2.JPEG", "dog/1.png", "emu/4.webp", "emu/5.bmp")
    assert listing.labels == (0, 0, 1, 2, 2)


def test_a_flat_folder_is_unconditional(tmp_path: Path, make_task: Callable[..., JiTTask]) -> None:
    for index in range(3):
        write_image(tmp_path / f"{index}.png")
    assert scan(tmp_path).classes == ()
    task = make_task(data=tmp_path)
    assert task.num_classes == 0
    assert task.build_model().null_class == 0


def test_texts_are_recognised(text_folder: Path) -> None:
    assert scan(text_folder).kind == "text"


def test_a_missing_folder_says_so_and_what_to_try(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist\n  try: ") as caught:
        scan(tmp_path / "nowhere")
    assert caught.value.exit_code == 2


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty"):
        scan(tmp_path)


def test_a_folder_of_other_files_says_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    (tmp_path / "b.csv").touch()
    with pytest.raises(DataError, match="2 files but none to train on .found 2 .csv"):
        scan(tmp_path)


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a file"):
        scan(write_image(tmp_path / "a.png"))


def test_an_unreadable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image(tmp_path / "cat" / "1.png")
    real = os.scandir

    def refuse(path: Any = ".") -> Any:  # chmod does not stop root
        if str(path).endswith("cat"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="cat cannot be read: Permission denied"):
        scan(tmp_path)


def test_images_and_texts_in_one_folder_need_a_word(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png")
    (tmp_path / "b.txt").write_text("hello")
    with pytest.raises(DataError, match="1 images and 1 texts .a.png, b.txt"):
        scan(tmp_path)
    assert scan(tmp_path, "images").names == ("a.png",)
    assert scan(tmp_path, "text").names == ("b.txt",)


def test_images_beside_class_folders_are_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "stray.png")
    write_image(tmp_path / "cat" / "1.png")
    with pytest.raises(DataError, match="1 images beside 1 folders .stray.png, cat/"):
        scan(tmp_path)


def test_an_empty_class_folder_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "cat" / "1.png")
    (tmp_path / "dog").mkdir()
    with pytest.raises(DataError, match="dog holds no image"):
        scan(tmp_path)


# --- what is held out -----------------------------------------------------------------------------


@pytest.mark.parametrize(("num", "expected"), [(1000, 20), (100, 8), (10, 5), (1, 0)])
def test_the_held_out_slice_never_overlaps(num: int, expected: int, tmp_path: Path) -> None:
    for index in range(num):
        (tmp_path / f"{index}.png").touch()
    listing = scan(tmp_path)
    trained, held_out = hold_out(listing, 0.02)
    assert len(held_out) == expected
    assert not set(trained.names) & set(held_out.names)
    assert set(trained.names) | set(held_out.names) == set(listing.names)
    assert hold_out(scan(tmp_path), 0.02) == (trained, held_out)


def test_the_task_holds_out_a_slice_or_reads_the_given_folder(
    tmp_path: Path, image_folder: Path, make_task: Callable[..., JiTTask]
) -> None:
    sliced = make_task()
    held_out = sliced.eval_data()
    assert held_out is not None
    assert (len(sliced.train_data()), len(held_out)) == (56, 8)
    given = make_task(val=make_images(tmp_path / "val", num=12, size=8, classes=4, seed=1))
    held_out = given.eval_data()
    assert held_out is not None
    assert (len(given.train_data()), len(held_out)) == (64, 12)
    assert make_task(val_fraction=0).eval_data() is None


def test_held_out_classes_are_numbered_as_in_training(tmp_path: Path) -> None:
    for name in ("train/ant/1.png", "train/bee/1.png", "train/cow/1.png"):
        write_image(tmp_path / name)
    for name in ("val/cow/1.png", "some/dog/1.png", "flat/1.png"):
        write_image(tmp_path / name)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").touch()
    trained = scan(tmp_path / "train")
    assert match_classes(scan(tmp_path / "val"), trained).labels == (2,)
    for folder, problem in (("some", "dog"), ("flat", "is flat"), ("texts", "holds text")):
        with pytest.raises(DataError, match=problem):
            match_classes(scan(tmp_path / folder), trained)


# --- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "LA", "I;16"])
def test_every_kind_of_image_becomes_rgb(mode: str, tmp_path: Path) -> None:
    path = write_image(tmp_path / "a.png", mode)
    assert read_image(path, 8).shape == (8, 8, 3)


def test_grey_keeps_its_value_and_sixteen_bits_are_scaled(tmp_path: Path) -> None:
    grey = np.full((8, 8), 90, dtype=np.uint8)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(np.full((8, 8), 90 * 256, dtype=np.uint16)).save(tmp_path / "deep.png")
    for name in ("grey.png", "deep.png"):
        assert (read_image(tmp_path / name, 8) == 90).all()


def test_what_is_transparent_becomes_white(tmp_path: Path) -> None:
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "a.png")
    assert (read_image(tmp_path / "a.png", 8) == 255).all()


def test_the_central_square_is_cut_out_and_resized(tmp_path: Path) -> None:
    pixels = np.zeros((20, 60, 3), dtype=np.uint8)
    pixels[:, 20:40] = 200
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    Image.fromarray(pixels.transpose(1, 0, 2)).save(tmp_path / "tall.png")
    for name in ("wide.png", "tall.png"):
        image = read_image(tmp_path / name, 10)
        assert image.shape == (10, 10, 3)
        assert (image[2:-2, 2:-2] == 200).all()
        assert (image > 150).all()  # only the very border sees a little of what was cut off


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
def test_a_corrupt_image_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.png is not a readable image"):
        ImageFolder(scan(tmp_path), 8, flip=False)[0]


def test_a_truncated_image_is_named(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "cut.jpg")
    whole = (tmp_path / "cut.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.jpg is not a readable image"):
        ImageFolder(scan(tmp_path), 8, flip=False)[0]


def test_a_sample_is_bytes_with_a_label_and_can_be_described(image_folder: Path) -> None:
    data = open_listing(scan(image_folder), 8, flip=False)
    sample = data[20]
    assert sample["image"].dtype == torch.uint8
    assert sample["image"].shape == (3, 8, 8)
    assert isinstance(sample["label"], int)
    assert Path(data.describe(20)).is_file()
    pixels = np.asarray(Image.open(data.describe(20)).convert("RGB"))
    assert np.array_equal(sample["image"].numpy(), pixels.transpose(2, 0, 1))


def test_the_flip_mirrors_half_of_the_samples_and_repeats_with_the_seed(
    image_folder: Path,
) -> None:
    plain = ImageFolder(scan(image_folder), 8, flip=False)[0]["image"]
    flipping = ImageFolder(scan(image_folder), 8, flip=True)

    def draw(seed: int) -> torch.Tensor:
        random.seed(seed)
        image: torch.Tensor = flipping[0]["image"]
        return image

    assert not torch.equal(plain, plain.flip(2))
    images = [draw(seed) for seed in range(200)]
    assert all(torch.equal(image, plain) or torch.equal(image, plain.flip(2)) for image in images)
    assert 70 < sum(torch.equal(image, plain) for image in images) < 130
    assert torch.equal(draw(3), draw(3))


# --- text as pixels -------------------------------------------------------------------------------


def test_tokens_survive_the_round_trip_through_pixels() -> None:
    tokens = [0, 1, 255, 256, 258, 65_535, 65_536, 256**3 - 1]
    pixels, mask = text_pixels.paint(tokens, 4)
    assert text_pixels.read_pixels(pixels)[: len(tokens)] == tokens
    assert mask.reshape(-1).tolist() == [True] * 8 + [False] * 8
    assert (pixels[:, ~mask] == text_pixels.PAD).all()
    assert pixels[:, 0, 3].tolist() == [0, 1, 0]  # 256: green is the second digit


def test_text_survives_the_round_trip_through_pixels() -> None:
    text = "Zwölf Boxkämpfer: 十二"
    pixels, _ = text_pixels.paint(text_pixels.encode(text.encode()), 16)
    assert text_pixels.decode(text_pixels.read_pixels(pixels)) == text


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    sample = open_listing(scan(tmp_path), 4, flip=True)[0]
    assert sample["mask"].all()
    assert text_pixels.decode(text_pixels.read_pixels(sample["image"].numpy())) == "x" * 16


def test_prompts_and_answers_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"prompt": "1+1", "answer": "2"}')
    (tmp_path / "b.json").write_text('{"text": "hello"}')
    data = open_listing(scan(tmp_path), 8, flip=False)
    texts = [
        text_pixels.decode(text_pixels.read_pixels(data[i]["image"].numpy())) for i in range(2)
    ]
    assert texts == ["1+1 | 2", "hello"]


@pytest.mark.parametrize("content", ["{", "[1, 2]", '{"prompt": "1"}', '{"text": 3}', "null"])
def test_a_json_that_says_something_else_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(DataError, match=r"bad\.json is not a JSON object"):
        open_listing(scan(tmp_path), 8, flip=False)[0]


# --- sample data ----------------------------------------------------------------------------------


def test_sample_images_are_the_same_for_a_seed(tmp_path: Path) -> None:
    def read(name: str, seed: int) -> list[bytes]:
        folder = make_images(tmp_path / name, num=20, size=16, classes=10, seed=seed)
        listing = scan(folder)
        assert len(listing.classes) == len(SHAPES) == 10
        return [(folder / file).read_bytes() for file in listing.names]

    first = read("a", 0)
    assert first == read("b", 0)
    assert not set(first) & set(read("c", 1))
    assert len(set(first)) == 20


def test_a_complete_folder_is_left_alone_and_any_other_refused(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "data", num=8, size=8)
    before = folder.stat().st_mtime_ns
    assert make_images(tmp_path / "data", num=8, size=8) == folder
    assert folder.stat().st_mtime_ns == before
    with pytest.raises(DataError, match="another sample set"):
        make_images(folder, num=9, size=8)
    write_image(tmp_path / "own" / "photo.png")
    with pytest.raises(DataError, match="files that are not a sample set"):
        make_images(tmp_path / "own")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "own"]


def test_ranks_may_race_for_sample_data(
    tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    results = run_ranks(4, lambda _: make_images(tmp_path / "data", num=40, size=8))
    assert results == [tmp_path / "data"] * 4
    assert len(scan(tmp_path / "data")) == 40
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_a_failed_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("lockstep_recipes.jit.sample_data.draw", refuse)
    with pytest.raises(DataError, match="disk full"):
        make_images(tmp_path / "data", num=8, size=8)
    assert list(tmp_path.iterdir()) == []


def test_more_classes_than_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="11 classes"):
        make_images(tmp_path / "data", classes=11)


def test_sample_texts_can_be_read_back(tmp_path: Path) -> None:
    data = open_listing(scan(make_texts(tmp_path / "texts", num=10)), 16, flip=False)
    texts = [
        text_pixels.decode(text_pixels.read_pixels(s["image"].numpy()))
        for s in map(data.__getitem__, range(10))
    ]
    assert sum("sleeps" in text for text in texts) == 5
    assert sum(" + " in text for text in texts) == 5


# --- real images ----------------------------------------------------------------------------------


def test_real_photographs_are_read(shared_data: Path, tmp_path: Path) -> None:
    with tarfile.open(shared_data / "tiny_imagenet_20c.tar.xz") as pack:
        for _ in range(12):
            member = pack.next()
            assert member is not None
            pack.extract(member, tmp_path, filter="data")
    data = open_listing(scan(tmp_path / "train"), 64, flip=False)
    images = torch.stack([data[index]["image"] for index in range(len(data))])
    assert len(images) >= 8
    assert 20 < images.float().std() < 120


def test_a_rehearsal_makes_the_data_that_are_not_there_whatever_else_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_REHEARSAL", "1")
    monkeypatch.setattr("lockstep_recipes.jit.flags.REHEARSAL_IMAGES", 16)
    for words in ("", "--seed 1", "--val_path not_there", "--data_format text"):
        where = ["--data_path", str(tmp_path / "none"), "--output_dir", str(tmp_path / "out")]
        task, _ = build([*where, *words.split()])
        assert [len(listing) for listing in task.listings] == [8, 8], words


def test_a_seed_is_the_same_by_flag_and_by_setting(image_folder: Path) -> None:
    for words in (["--seed", "5"], ["--set", "seed=5"]):
        task, config = build(["--data_path", str(image_folder), *words])
        assert (task.config.seed, config.seed) == (5, 5)


def test_files_may_have_names_that_are_no_text(tmp_path: Path) -> None:
    for index in range(4):
        with open(os.fsencode(tmp_path) + b"/caf\xe9_%d.png" % index, "wb") as file:
            Image.new("RGB", (8, 8)).save(file, "PNG")
    trained, held_out = hold_out(scan(tmp_path), 0.5)
    data = open_listing(trained, 8, flip=False)
    assert (len(data), len(held_out)) == (2, 2)
    assert data[0]["image"].shape == (3, 8, 8)
    assert take_fingerprint(data, seed=0)["length"] == 2
