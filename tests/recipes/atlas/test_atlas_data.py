"""Episodes: what is read of them, how frames are stacked, statistics, and the converter."""

import json
import random
import shutil
import sys
import tarfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.errors import DataError
from lockstep_recipes.atlas.convert import convert
from lockstep_recipes.atlas.data import (
    DataConfig,
    Frames,
    augment,
    measure,
    open_split,
    read_statistics,
    read_table,
)
from lockstep_recipes.atlas.model import hash_words
from lockstep_recipes.command import answer


def frames_of(root, **changes) -> Frames:
    config = DataConfig(**{"data_dir": root, "image_size": 28} | changes)
    return Frames(open_split(config, "train", 7), config, hash_words, is_training=True)


def test_a_sample_is_a_frame_with_all_its_views(episodes) -> None:
    frames = frames_of(episodes)
    assert len(frames) == 4 * 6
    sample = frames[7]
    assert sample["images"].shape == (2, 3, 28, 28)
    assert sample["images"].dtype == torch.uint8
    assert sample["action"].shape == (7,)
    assert frames.describe(7).endswith("episode_000001, frame 1")
    assert frames_of(episodes, use_wrist_camera=False)[0]["images"].shape == (1, 3, 28, 28)
    assert torch.equal(frames_of(episodes, views=("wrist",))[7]["images"][0], sample["images"][1])


def test_stacking_never_leaves_the_episode(episodes) -> None:
    frames = frames_of(episodes, num_temporal_frames=3, temporal_stride=2)
    single = frames_of(episodes)
    for index, (number, time) in enumerate(frames.places):
        first = index - time
        expected = [first + max(0, time - ago) for ago in (0, 2, 4)]
        images = frames[index]["images"].unflatten(0, (3, 2))
        for seen, wanted in zip(images, expected, strict=True):
            assert frames.places[wanted][0] == number
            assert torch.equal(seen, single[wanted]["images"])
    at_start = frames[6]
    assert at_start["has_last"].tolist() == [False, False, False]
    last = frames[6 + 3]
    assert last["has_last"].tolist() == [True, True, False]
    assert torch.equal(last["last"][0], single[6 + 2]["action"])


def test_cached_images_are_the_same_and_read_once(episodes, tmp_path) -> None:
    shutil.copytree(episodes, tmp_path / "data")
    cached = frames_of(tmp_path / "data", cache_images=True)
    before = cached[3]["images"]
    shutil.rmtree(tmp_path / "data")
    assert torch.equal(cached[3]["images"], before)
    assert torch.equal(frames_of(episodes)[3]["images"], before)


def test_augmentation_treats_all_views_alike() -> None:
    random.seed(1)
    pixels = np.broadcast_to(
        np.random.default_rng(0).integers(0, 256, (1, 3, 28, 28)), (4, 3, 28, 28)
    )
    changed = augment(pixels.astype(np.uint8), 3, 0.2)
    assert changed.shape == pixels.shape
    assert not np.array_equal(changed, pixels)
    assert all(np.array_equal(view, changed[0]) for view in changed)


def test_tables_with_and_without_names(tmp_path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n3,4\n")
    (tmp_path / "b.csv").write_text("1,2\n\n3,4\n")
    for stem in ("a", "b"):
        assert read_table(tmp_path, stem).tolist() == [[1, 2], [3, 4]]
    for text, said in (
        ("1,2\n3\n", "not a table"),
        ("1,x\n1,2\n3,nan\n", "row 2"),
        ("x,y\n", "no rows"),
        (",x,y\n0,1,2\n1,3,4\n", "no name"),  # pandas' index is no action
    ):
        (tmp_path / "c.csv").write_text(text)
        with pytest.raises(DataError, match=said):
            read_table(tmp_path, "c")


def test_parquet_is_read_by_pyarrow_or_refused_in_one_line(tmp_path, monkeypatch) -> None:
    (tmp_path / "actions.parquet").write_bytes(b"columns")
    table = SimpleNamespace(to_pydict=lambda: {"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]})
    fake = SimpleNamespace(read_table=lambda path: table)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=fake))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", fake)
    assert read_table(tmp_path, "actions").tolist() == [[1, 4], [2, 5], [3, 6]]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"actions\.parquet needs pyarrow, which is not installed"):
        read_table(tmp_path, "actions")


def test_statistics_are_those_of_all_training_frames(episodes, tmp_path) -> None:
    train = frames_of(episodes).episodes
    rows = np.concatenate([episode.actions for episode in train]).astype(np.float64)
    known = measure(train)
    assert np.allclose(known.mean, rows.mean(axis=0), atol=1e-6)
    assert np.allclose(known.std, rows.std(axis=0), atol=1e-6)
    assert known.gripper.tolist() == [-1, 1]
    assert np.allclose(known.first, np.mean([e.actions[0] for e in train], axis=0), atol=1e-6)
    path = tmp_path / "stats.json"
    path.write_text(json.dumps({"mean": [1] * 7, "std": [2] * 7}))
    given = read_statistics(path, known)
    assert given.mean.tolist() == [1] * 7
    assert torch.equal(given.gripper, known.gripper)
    path.write_text(json.dumps({"mean": [1] * 6, "std": [2] * 6}))
    with pytest.raises(DataError, match="does not fit 7 columns"):
        read_statistics(path, known)


def test_instructions_may_be_in_the_metadata(episodes, tmp_path) -> None:
    shutil.copytree(episodes, tmp_path / "data")
    folder = tmp_path / "data" / "train" / "episode_000000"
    (folder / "language_task.txt").unlink()
    (folder / "metadata.json").write_text(json.dumps({"language_task": "lift it"}))
    assert frames_of(tmp_path / "data").episodes[0].instruction == "lift it"


# --- the converter --------------------------------------------------------------------------------


@pytest.fixture
def robots(tmp_path):
    """Two robots in the layout of the real recordings: every second raw frame has an image."""
    root, lines = tmp_path / "robots", []
    for number, (width, views) in enumerate([(7, ["a", "b"])] * 5 + [(12, ["c"])]):
        name = f"robot/ep{number:03d}"
        (root / name).mkdir(parents=True)
        frames = np.arange(0, 6, 2)
        rows = np.arange(6 * width, dtype=np.float32).reshape(6, width) + number
        np.savez(root / name / "data.npz", state=rows + 0.5, action=rows, frame_index=frames)
        for view in views:
            (root / name / view).mkdir()
            for frame in frames:
                image = Image.new("RGB", (8, 8), (number * 20, int(frame) * 20, 0))
                image.save(root / name / view / f"{frame:04d}.jpg")
        meta = {"dir": name, "instruction": f"do {number}", "views": views, "action_dim": width}
        lines.append(json.dumps(meta))
    (root / "meta.jsonl").write_text("\n".join(lines))
    return root


@pytest.mark.parametrize("packed", [True, False])
def test_recordings_of_one_width_are_converted_and_split_by_episode(
    packed, robots, tmp_path, capsys
) -> None:
    source = robots
    if packed:
        source = tmp_path / "robots.tar.xz"
        with tarfile.open(source, "w:xz") as archive:
            for path in sorted(robots.iterdir()):
                archive.add(path, path.name)
    out = tmp_path / "out"
    assert answer(convert, [str(source), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 4 episodes to train on, 1 held out\n"
    config = DataConfig(data_dir=out, views=("workspace", "b"), use_state=True, image_size=28)
    found = {split: open_split(config, split, 7) for split in ("train", "val")}
    told = [episode.instruction for split in found.values() for episode in split]
    assert sorted(told) == [f"do {n}" for n in range(5)], "each in one split"
    episode = found["train"][0]
    number = int(episode.instruction.split()[1])
    assert episode.actions[:, 0].tolist() == [number, 14 + number, 28 + number]
    assert torch.equal(torch.tensor(episode.states), torch.tensor(episode.actions) + 0.5)
    assert answer(convert, [str(source), str(tmp_path / "wide"), "--width", "12"]) == 0
    assert answer(convert, [str(source), str(tmp_path / "none"), "--width", "3"]) == 2
    said = capsys.readouterr().err
    assert "no episode has actions of 3 columns; there are 7 (5 episodes), 12 (1 episodes)" in said
    assert not (tmp_path / "none").exists()


def test_the_converter_refuses_in_one_line(robots, tmp_path, capsys) -> None:
    cases = {
        "does not exist": [str(tmp_path / "nowhere"), str(tmp_path / "out")],
        "exists": [str(robots), str(robots)],
        "neither meta.jsonl nor HDF5": [str(robots / "robot"), str(tmp_path / "out")],
        "is not from 0 to 1": [str(robots), str(tmp_path / "out"), "--val_share", "1"],
        "cannot read the archive": [str(robots / "meta.jsonl"), str(tmp_path / "out")],
    }
    for said, argv in cases.items():
        assert answer(convert, argv) == 2
        err = capsys.readouterr().err
        assert err.startswith("lockstep: ")
        assert said in err
        assert not (tmp_path / "out").exists()


def test_the_converter_lists_the_layouts_that_it_reads(robots, tmp_path, capsys) -> None:
    assert answer(convert, ["--help"]) == 0
    said = capsys.readouterr().out
    assert "a folder, or a .tar.xz of it, with meta.jsonl" in said
    assert "LIBERO's HDF5 files, one or a folder of them" in said
    assert "example: python -m lockstep_recipes.atlas.convert robots.tar.xz data/episodes" in said
    assert answer(convert, [str(robots / "robot"), str(tmp_path / "out")]) == 2
    remedy = "try: pass a folder with meta.jsonl, a .tar.xz of one, or LIBERO's .hdf5 files"
    assert remedy in capsys.readouterr().err


def test_the_converter_names_a_line_that_is_no_recording(robots, tmp_path, capsys) -> None:
    meta, out = robots / "meta.jsonl", tmp_path / "out"
    good = meta.read_text()
    for bad in ("{oops", '{"dir": "robot/ep000"}', good.split("\n")[0].replace("ep000", "none")):
        meta.write_text(f"{good}\n{bad}\n")
        assert answer(convert, [str(robots), str(out)]) == 2
        assert capsys.readouterr().err.startswith(
            "lockstep: meta.jsonl, line 7 is not a recording: "
        )
    (robots / "robot/ep000/data.npz").write_bytes(b"PK\x03\x04 cut off")
    assert answer(convert, [str(robots), str(out)]) == 2
    assert "meta.jsonl, line 1" in capsys.readouterr().err


class FakeGroup(dict):
    """As much of h5py as the converter uses: paths with slashes, attributes, a context."""

    attrs: dict[str, str] = {}

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None


def test_libero_files_are_converted_with_h5py_or_refused_in_one_line(
    tmp_path, monkeypatch, capsys
) -> None:
    rng = np.random.default_rng(0)
    data = FakeGroup()
    for number in range(10):
        data[f"demo_{number}"] = FakeGroup(
            {
                "actions": np.full((3, 7), number, dtype=np.float64),
                "obs/agentview_rgb": rng.integers(0, 256, (3, 16, 16, 3), dtype=np.uint8),
                "obs/eye_in_hand_rgb": rng.integers(0, 256, (3, 16, 16, 3), dtype=np.uint8),
                "obs/ee_states": np.ones((3, 6)),
                "obs/gripper_states": np.ones((3, 2)),
            }
        )
    source = tmp_path / "open_the_top_drawer_demo.hdf5"
    source.write_bytes(b"")
    fake = SimpleNamespace(File=lambda path, mode: FakeGroup(data=data))
    monkeypatch.setitem(sys.modules, "h5py", fake)
    assert answer(convert, [str(source), str(tmp_path / "out"), "--val_share", "0.3"]) == 0
    config = DataConfig(data_dir=tmp_path / "out", use_state=True, image_size=28)
    train, val = (open_split(config, split, 7) for split in ("train", "val"))
    assert (len(train), len(val)) == (7, 3)
    assert train[0].instruction == "open the top drawer"
    assert train[0].states.shape == (3, 8)
    with Image.open(train[0].images["wrist"][2]) as image:
        number = int(train[0].actions[0, 0])
        assert np.array_equal(np.asarray(image), data[f"demo_{number}"]["obs/eye_in_hand_rgb"][2])
    data.attrs = {"problem_info": json.dumps({"language_instruction": "lift"})}
    assert answer(convert, [str(source), str(tmp_path / "told")]) == 0
    assert (
        open_split(config.model_copy(update={"data_dir": tmp_path / "told"}), "val", 7)[
            0
        ].instruction
        == "lift"
    )
    del data["demo_3"]["actions"]
    assert answer(convert, [str(source), str(tmp_path / "bad")]) == 2
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert answer(convert, [str(source), str(tmp_path / "none")]) == 2
    assert "needs h5py, which is not installed" in capsys.readouterr().err


def test_the_real_recordings_are_in_the_layout_the_converter_reads(shared_data, tmp_path, capsys):
    assert answer(convert, [str(shared_data / "vla_real.tar.xz"), str(tmp_path / "out")]) == 0
    assert "18 episodes to train on, 4 held out" in capsys.readouterr().out
    config = DataConfig(data_dir=tmp_path / "out", views=("workspace", "image_1", "image_2"))
    assert {len(e) for e in open_split(config, "val", 7)} == {10}
