"""Volumes: HU, spacing, window, shape; manifests, tar shards, CSV labels; generated chests."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.errors import ConfigError, DataError
from lockstep_recipes.ctclip.data import (
    FINDINGS,
    Entry,
    VolumeData,
    findings_in,
    fit_shape,
    open_entries,
    prepare,
    read_voxels,
    resample,
)
from lockstep_recipes.ctclip.flags import build
from lockstep_recipes.ctclip.sample_data import PLACES, draw, make_volumes, report

SPACING = (1.5, 0.75, 0.75)


def entry(path: Path = Path("x.npy"), **changes) -> Entry:
    return Entry(path, "manifest.jsonl, line 1", "", {}, **changes)


def test_stored_values_become_hu_in_a_window() -> None:
    stored = np.array([[[0, 24, 1024, 2024, 4000]]], dtype=np.int16)
    seen = prepare(stored, entry(intercept=-1024), (1, 1, 5), SPACING)
    assert seen.flatten().tolist() == [-1.0, -1.0, 0.0, 1.0, 1.0]
    doubled = prepare(stored // 2, entry(slope=2.0, intercept=-1024), (1, 1, 5), SPACING)
    assert torch.equal(doubled, seen)


def test_resampling_keeps_the_extent_and_the_values() -> None:
    ramp = torch.linspace(0, 1, 20).reshape(20, 1, 1).expand(20, 8, 8)
    seen = resample(ramp, (3.0, 1.5, 0.75), SPACING)
    assert seen.shape == (40, 16, 8)
    assert seen[:, 0, 0].diff().min() >= 0
    assert seen.mean() == pytest.approx(0.5, abs=1e-3)
    assert resample(ramp, SPACING, SPACING) is ramp


def test_a_volume_is_centred_with_air_around() -> None:
    volume = torch.zeros(2, 6, 3)
    seen = fit_shape(volume, (4, 4, 6))
    assert seen.shape == (4, 4, 6)
    assert (seen == 0).sum() == 2 * 4 * 3
    assert seen[1:3, :, 1:4].abs().sum() == 0
    marked = torch.arange(6.0).reshape(1, 6, 1)
    assert fit_shape(marked, (1, 4, 1)).flatten().tolist() == [1, 2, 3, 4]


def test_npy_and_npz_read_alike(tmp_path: Path) -> None:
    voxels = np.random.default_rng(0).integers(0, 2000, (3, 4, 5)).astype(np.int16)
    np.save(tmp_path / "a.npy", voxels)
    np.savez_compressed(tmp_path / "b.npz", other=np.zeros(2), volume=voxels)
    for name in ("a.npy", "b.npz"):
        assert np.array_equal(read_voxels(entry(tmp_path / name)), voxels)


def write_shards(folder: Path, num: int, shape=(6, 4, 2), total: int | None = None) -> np.ndarray:
    folder.mkdir()
    rng = np.random.default_rng(0)
    voxels = rng.uniform(-1, 1, (num, *shape)).astype("<f2")
    for start in range(0, num, 2):
        with tarfile.open(folder / f"shard_{start:04d}.tar", "w") as tar:
            for index in range(start, min(num, start + 2)):
                labels = np.eye(len(FINDINGS), dtype="<f4")[index]
                parts = {
                    "bin": voxels[index].tobytes(),
                    "txt": f"Report {index}.".encode(),
                    "json": json.dumps({"study_id": f"study{index}"}).encode(),
                    "labels": labels.tobytes(),
                }
                for kind, content in parts.items():
                    member = tarfile.TarInfo(f"{index:06d}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    said = {"total_samples": num if total is None else total, "shape": shape}
    (folder / "manifest.json").write_text(json.dumps(said))
    return voxels


def test_tar_shards_are_read_by_index(tmp_path: Path) -> None:
    voxels = write_shards(tmp_path / "shards", 3)
    entries = open_entries(tmp_path / "shards")
    data = VolumeData(entries, (2, 6, 4), SPACING, findings_in(entries))
    assert len(data) == 3
    assert data.findings == FINDINGS
    for index in (2, 0, 1):
        sample = data[index]
        expected = voxels[index].transpose(2, 0, 1)  # height, width, depth are stored
        assert np.array_equal(sample["volume"][0].numpy(), expected)
        assert sample["report"] == f"Report {index}."
        assert sample["labels"].argmax() == index
    assert "study2" in data.describe(2)


def test_a_rehearsal_reads_what_is_prepared_for_the_full_size(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LOCKSTEP_REHEARSAL", "1")
    write_shards(tmp_path / "shards", 3, shape=(60, 60, 30))
    settings = {
        "data": {"paths": {"train": str(tmp_path / "shards"), "validation": None}},
        "model": {"image_encoder": {"image_size": 60, "depth": 30}, "clip": {"dim_image": 4608}},
        "checkpoint": {"save_dir": str(tmp_path / "saves")},
    }
    (tmp_path / "fits.yaml").write_text(json.dumps(settings))
    settings["model"]["image_encoder"]["depth"] = 40
    (tmp_path / "not.yaml").write_text(json.dumps(settings))
    fits, does_not = (
        build(["--config", str(tmp_path / name)]).args[1].train_data()  # type: ignore[attr-defined]
        for name in ("fits.yaml", "not.yaml")
    )
    assert fits[0]["volume"].shape == (1, 24, 48, 48)
    with pytest.raises(DataError, match=r"\(30, 60, 60\), the model takes \(40, 60, 60\)"):
        does_not[0]


def test_shards_that_are_missing_or_cut_are_named(tmp_path: Path) -> None:
    write_shards(tmp_path / "few", 3, total=4)
    with pytest.raises(DataError, match="total_samples 4, its shards hold 3"):
        open_entries(tmp_path / "few")
    write_shards(tmp_path / "cut", 2)
    shard = tmp_path / "cut" / "shard_0000.tar"
    shard.write_bytes(b"no tar" * 200)
    with pytest.raises(DataError, match=r"shard_0000.tar is not a readable tar file"):
        open_entries(tmp_path / "cut")


def test_a_line_of_a_manifest_ends_where_json_lines_do(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 2, 2)))
    reports = ["one\u2028two", "three\x85four", "Göğüs"]
    lines = [json.dumps({"volume": "a.npy", "report": r}, ensure_ascii=False) for r in reports]
    (tmp_path / "manifest.jsonl").write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    found = open_entries(tmp_path)
    assert [e.report for e in found] == reports
    assert found[1].origin.endswith("line 2")


def test_labels_come_from_a_csv_by_volume_name(tmp_path: Path) -> None:
    data = make_volumes(tmp_path / "data", num=2, num_val=1, shape=(4, 8, 8))
    rows = ["VolumeName,Cardiomegaly,Emphysema", "volume_00001.npy,0,1", "volume_00000.npy,1,0"]
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    entries = open_entries(data / "train", tmp_path / "labels.csv")
    assert [e.findings for e in entries] == [
        {"Cardiomegaly": 1, "Emphysema": 0},
        {"Cardiomegaly": 0, "Emphysema": 1},
    ]


def test_labels_of_ct_rate_fit_volumes_that_were_converted(tmp_path: Path) -> None:
    # Its table has the names of the scans as they are published.
    csv = tmp_path / "labels.csv"
    for name in ("valid_1_a_1.npy", "valid_1_a_1.npz", "valid_1_a_1.nii.npy"):
        np.save(tmp_path / "volume.npy", np.zeros((2, 2, 2)))
        (tmp_path / "volume.npy").rename(tmp_path / name)
        line = {"volume": name, "report": "x"}
        (tmp_path / "manifest.jsonl").write_text(json.dumps(line))
        csv.write_text("VolumeName,Emphysema\nvalid_1_a_1.nii.gz,1\nvalid_1_a_2.nii.gz,0\n")
        (found,) = open_entries(tmp_path, csv)
        assert found.findings == {"Emphysema": 1}, name
    write_shards(tmp_path / "shards", 3)
    csv.write_text("VolumeName,Emphysema\n000001.nii.gz,1\n")
    of_shards = [e.findings for e in open_entries(tmp_path / "shards", csv)]
    assert of_shards[1] == {"Emphysema": 1}
    assert len(of_shards[0]) == len(of_shards[2]) == len(FINDINGS), "the shard's own"


def test_generated_chests_show_and_name_their_findings(tmp_path: Path) -> None:
    shape, none = (24, 48, 48), dict.fromkeys(PLACES, 0)
    healthy = draw(none, shape, np.random.default_rng(0)).astype(int)
    for name, (centre, _, density) in PLACES.items():
        ill = draw(none | {name: 1}, shape, np.random.default_rng(0)).astype(int)
        place = tuple(round(c * (n - 1)) for c, n in zip(centre, shape, strict=True))
        assert abs(ill[place] - 1024 - density) < 150, name
        assert abs(ill[place] - healthy[place]) > 40, f"{name} must be seen"
        said = report(none | {name: 1}, np.random.default_rng(1))
        assert f"There is {name.lower()}." in said
        assert said.count("There is no ") == len(PLACES) - 1
    data = make_volumes(tmp_path / "data", num=5, num_val=30, shape=(4, 8, 8))
    entries = open_entries(data / "validation")
    kinds = {tuple(e.findings.items()) for e in entries}
    assert len(kinds) == 30, "one report fits one volume"
    again = make_volumes(tmp_path / "again", num=5, num_val=30, shape=(4, 8, 8))
    files = sorted(path.relative_to(data) for path in data.rglob("*.np*"))
    assert all((data / f).read_bytes() == (again / f).read_bytes() for f in files)
    with pytest.raises(ConfigError, match="65 held-out volumes cannot all differ"):
        make_volumes(tmp_path / "more", num=5, num_val=65, shape=(4, 8, 8))
    with pytest.raises(DataError, match="holds another sample set"):
        make_volumes(tmp_path / "data", num=6, num_val=30, shape=(4, 8, 8))
