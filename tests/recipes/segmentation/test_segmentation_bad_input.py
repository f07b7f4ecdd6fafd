"""Bad input: one clear line that names file and line, exit code 2, no traceback."""

import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from lockstep.errors import DataError
from lockstep.testing import run_ranks
from lockstep_recipes.command import answer
from lockstep_recipes.segmentation import test as test_command
from lockstep_recipes.segmentation.flags import build, choose_model
from lockstep_recipes.segmentation.sample_data import make_shapes

SMALL = shlex.split(
    "--layers 18 --width 4 --crop_size 33 --batchsize 4 --epochs 1 --max_steps 2 --workers 0 "
    "--num_classes 5 --num_pictures 0 --no_tensorboard --set sinks.curves=false "
    "--output_dir run --dataset_path data"
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_shapes(tmp_path / "data", num=10, num_val=2, size=24)


def check(ended, *words: str) -> None:
    assert ended.code == 2, ended.err
    assert "Traceback" not in ended.err + ended.out
    said = [line for line in ended.err.splitlines() if line.startswith("lockstep: ")]
    assert len(set(said)) == 1, ended.err
    assert "\n  try: " in ended.err
    for word in words:
        assert word in ended.err, f"{word!r} not in:\n{ended.err}"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--batch_size", "8"], ["--batch_size", "--batchsize"]),
        (["--dataset", "Scribbles"], ["Scribbles", "--dataset"]),
        (["--layers", "20"], ["20"]),
        (["--model_type", "vgg16"], ["vgg16", "resN_ASPP_lorm"]),
        (["--model_type", "res50_ASPP"], ["--layers 18", "res50_ASPP"]),
        (["--dist_url", "tcp://host:1"], ["tcp://host:1", "env://"]),
        (["--label_smooth", "2"], ["label_smooth"]),
        (["--batchsize", "1"], ["--batchsize 2"]),
        (["--crop_size", "0"], ["crop"]),
        (["--scale", "0", "1"], ["scale"]),
        (["--batchsize", "16"], ["10 samples"]),
        (["--world_size", "2"], ["--world_size 2"]),
        (["--dataset_path", "nowhere"], ["nowhere"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_bad_flag_is_named_with_what_to_try(command, data, argv, words) -> None:
    check(command(build, [*SMALL, *argv]), *words)


def test_one_image_a_rank_needs_the_other_ranks_images(command, data) -> None:
    argv = [*SMALL, "--distributed", "--batchsize", "1", "--no_sync_bn"]
    check(command(build, argv, ranks=2), "--batchsize 2")


def out_of_range(data: Path) -> str:
    path = data / "pascal_2012_scribble" / "shapes_00003.png"
    with Image.open(path) as image:
        labels = np.array(image)
    labels[7, 2] = 57
    Image.fromarray(labels).save(path)
    return "shapes_00003.png has label 57 at row 7, column 2, but there are 5 classes"


def other_size(data: Path) -> str:
    Image.new("L", (9, 8), 255).save(data / "pseudo_labels" / "shapes_00003.png")
    return "pseudo_labels/shapes_00003.png is 9 x 8, but its image"


def missing_image(data: Path) -> str:
    (data / "JPEGImages" / "shapes_00003.jpg").unlink()
    return "JPEGImages/shapes_00003.jpg does not exist"


def cut_off(data: Path) -> str:
    path = data / "JPEGImages" / "shapes_00003.jpg"
    path.write_bytes(path.read_bytes()[:100])
    return "shapes_00003.jpg is not a readable image"


def coloured_mask(data: Path) -> str:
    path = data / "pascal_2012_scribble" / "shapes_00003.png"
    with Image.open(path) as image:
        image.convert("RGB").save(path)
    return "shapes_00003.png is not a map of class indices"


FAULTS = [out_of_range, other_size, missing_image, cut_off, coloured_mask]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_bad_sample_stops_with_its_file_and_line(command, data, fault) -> None:
    said = fault(data)
    check(command(build, [*SMALL, "--max_steps", "9", "--epochs", "9"]), said, "train.txt, line 4")


def test_a_bad_sample_stops_all_ranks_once(command, data) -> None:
    said = out_of_range(data)
    argv = [*SMALL, "--distributed", "--batchsize", "2", "--epochs", "9", "--max_steps", "9"]
    check(command(build, argv, ranks=2), said)


def test_bad_samples_are_skipped_alike_on_any_number_of_ranks(command, data, tmp_path) -> None:
    said = out_of_range(data)
    (data / "JPEGImages" / "shapes_00007.jpg").unlink()
    weights = []
    for ranks in (1, 2):
        argv = [*SMALL, "--on_bad_sample", "skip", "--distributed", "--lr_scaling", "none"]
        argv += ["--output_dir", f"run{ranks}", "--batchsize", str(4 // ranks)]
        ended = command(build, argv, ranks=ranks)
        assert ended.code == 0, ended.err
        assert ended.out.count("skipped 2 bad samples:") == 1
        assert said in ended.out
        assert "(8 of 8 samples, 0 dropped)" in ended.out
        folder = tmp_path / f"run{ranks}" / "checkpoints" / "step_00000002"
        weights.append(load_file(folder / "model.safetensors"))
    for name, weight in weights[0].items():
        assert (weights[1][name] - weight).abs().max() < 1e-4, name


def test_lists_that_are_missing_or_empty_are_named(command, data) -> None:
    lists = data / "ImageSets" / "SegmentationAug"
    for name in ("train.txt", "val.txt"):
        kept = (lists / name).read_text()
        (lists / name).write_text("\n \n")
        check(command(build, SMALL), f"{name} is empty")
        (lists / name).unlink()
        check(command(build, SMALL), name, "cannot be read")
        (lists / name).write_text(kept)


def test_a_missing_split_of_camvids_layout_is_named(command, tmp_path) -> None:
    (tmp_path / "data" / "trainannot").mkdir(parents=True)
    check(command(build, SMALL), "data/train does not exist")
    (tmp_path / "data" / "train").mkdir()
    check(command(build, SMALL), "data/train holds no image")


def test_masks_to_validate_with_are_needed(command, data) -> None:
    shutil.rmtree(data / "SegmentationClassAug")
    check(command(build, SMALL), "no masks")


def test_the_name_of_a_model_says_what_it_has() -> None:
    assert choose_model(None, None) == ("res50_ASPP_lorm", 50, True)
    assert choose_model("res101_ASPP", 101) == ("res101_ASPP", 101, False)


def said_of_a_test(argv: list[str]) -> str:
    with pytest.raises(DataError) as caught:
        test_command.run(argv)
    return ":".join(caught.value.problem.split(":")[:2])


def test_the_final_test_rebuilds_the_network_and_writes_masks(
    command, data, tmp_path, capfd
) -> None:
    assert command(build, SMALL).code == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000002"
    argv = ["--checkpoint", str(checkpoint), "--dataset_path", str(data), "--window", "33"]
    argv += ["--scales", "0.5", "1", "1.5", "--output", str(tmp_path / "out")]
    assert answer(test_command.run, argv) == 0
    out = capfd.readouterr().out
    assert out.startswith(" * IOU_All 0.")
    said = dict(line.split() for line in out.splitlines()[1:])
    masks = sorted((tmp_path / "out" / "masks").glob("*.png"))
    assert len(masks) == len(list((tmp_path / "out" / "pictures").glob("*.png"))) == 2
    with (
        Image.open(masks[0]) as mask,
        Image.open(data / "JPEGImages" / f"{masks[0].stem}.jpg") as image,
    ):
        assert mask.size == image.size
        assert np.asarray(mask).max() < 5
    right = []
    for path in masks:
        with (
            Image.open(path) as mask,
            Image.open(data / "SegmentationClassAug" / path.name) as truth,
        ):
            right.append((np.asarray(mask) == np.asarray(truth)).ravel())
    assert float(said["pixel_accuracy"]) == pytest.approx(np.concatenate(right).mean(), abs=1e-4)
    assert answer(test_command.run, ["--checkpoint", "nowhere", "--dataset_path", str(data)]) == 2
    assert "nowhere" in capfd.readouterr().err
    (data / "JPEGImages" / f"{masks[1].stem}.jpg").write_bytes(b"no image")  # the second rank's
    said_by = run_ranks(2, said_of_a_test, argv)
    assert said_by == [f"rank 1: {data}/JPEGImages/{masks[1].stem}.jpg is not a readable image"] * 2
