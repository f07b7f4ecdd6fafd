"""Whatever happens to the bytes is noticed, said, and survived by the one before."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_damage import BYTES, damage
from checkpoint_damage import FILES as FILE_DAMAGES

from lockstep.checkpoint import CheckpointStore
from lockstep.checkpoint import layout as layout_module
from lockstep.checkpoint.layout import _seal
from lockstep.errors import CheckpointError
from lockstep.run.resume import choose_checkpoint

torch.set_num_threads(1)
FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors"]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Return a store with a good step 1 and a step 2 to be damaged."""
    store = CheckpointStore(tmp_path / "checkpoints")
    torch.manual_seed(0)
    for step in (1, 2):
        model = {"weight": torch.randn(40, 30), "bias": torch.randn(30)}
        optimizer = {"state": {0: torch.rand(40, 30), 1: torch.zeros(1000)}, "lr": 0.1 * step}
        store.save(step, {"model": model, "optimizer": optimizer}, {"position": step})
    return store


def expect_fallback(store: CheckpointStore, *words: str) -> str:
    """Check that step 2 is rejected, by name, and step 1 taken; return the reason."""
    checkpoint, rejected = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == 1, "damage was not noticed"
    assert [path for path, _ in rejected] == [store.path(2)]
    assert all(word in rejected[0][1] for word in words), rejected
    with pytest.raises(CheckpointError):
        store.open("step_00000002")
    with pytest.raises(CheckpointError):
        store.verify(store.path(2))
    return rejected[0][1]


def damage_often(
    store: CheckpointStore, times: int, damage: Callable[[random.Random, bytes], bytes]
) -> None:
    rng = random.Random(0)
    originals = {name: (store.path(2) / name).read_bytes() for name in FILES}
    for turn in range(times):
        name = FILES[turn % len(FILES)]
        changed = damage(rng, originals[name])
        if changed == originals[name]:
            continue
        (store.path(2) / name).write_bytes(changed)
        reason = expect_fallback(store)
        assert name in reason or "format version" in reason
        (store.path(2) / name).write_bytes(originals[name])
    checkpoint, rejected = store.latest()
    assert checkpoint is not None
    assert (checkpoint.step, rejected) == (2, [])


def flip(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def zero_block(rng: random.Random, content: bytes) -> bytes:
    start, length = rng.randrange(len(content)), rng.choice([1, 16, 512, 4096])
    block = content[start : start + length]
    return content[:start] + bytes(len(block)) + content[start + length :]


def append(rng: random.Random, content: bytes) -> bytes:
    return content + rng.randbytes(rng.randint(1, 100))


@pytest.mark.parametrize("damage", [flip, truncate, zero_block, append])
def test_random_damage_is_always_noticed(
    store: CheckpointStore, damage: Callable[[random.Random, bytes], bytes]
) -> None:
    damage_often(store, 90, damage)


@pytest.mark.parametrize("name", [*BYTES, *FILE_DAMAGES])
def test_no_kind_of_damage_is_silent(name: str, tmp_path: Path) -> None:
    """What `benchmarks/checkpoint_damage.py` does a thousand times, whole and in shares."""
    count = 10
    outcomes = damage((BYTES | FILE_DAMAGES)[name], count, seed=3, folder=tmp_path)
    assert outcomes == {"done": count, "found": count, "fell back": count}


def test_the_count_of_silent_damage_would_rise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_module, "check_file", lambda *_: None)
    assert damage(BYTES["bit flip"], 20, seed=3, folder=tmp_path)["silent"] > 5


def test_a_flip_of_any_byte_of_the_manifest_is_noticed(store: CheckpointStore) -> None:
    path = store.path(2) / "manifest.json"
    original = path.read_bytes()
    for position in range(len(original)):
        changed = bytearray(original)
        changed[position] ^= 1 << (position % 8)
        path.write_bytes(changed)
        with pytest.raises(CheckpointError):
            store.verify(store.path(2))


@pytest.mark.parametrize("damage", [flip, zero_block])
def test_without_the_hashes_damage_would_pass(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, damage: Any
) -> None:
    monkeypatch.setattr(layout_module, "check_file", lambda *_: None)
    with pytest.raises(AssertionError, match="not noticed"):
        damage_often(store, 90, damage)


def test_without_its_own_hash_a_changed_manifest_would_pass(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.path(2) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"position": 2', b'"position": 3'))
    assert "hash mismatch in manifest.json" in expect_fallback(store)
    monkeypatch.setattr(layout_module, "_parse_manifest", parse_without_seal)
    checkpoint, _ = store.latest()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.meta) == (2, {"position": 3})


real_parse = layout_module._parse_manifest


def parse_without_seal(folder: Path, raw: bytes) -> Any:
    manifest = json.loads(raw)
    del manifest["sha256"]
    return real_parse(folder, _seal(manifest))


def test_the_reason_carries_the_numbers(store: CheckpointStore) -> None:
    model = store.path(2) / "model.safetensors"
    whole = model.read_bytes()
    model.write_bytes(whole[:-1000])
    size = len(whole)
    expect_fallback(store, f"model.safetensors has {size - 1000:,} bytes instead of {size:,}")
    model.write_bytes(b"\1" * size)
    expect_fallback(store, "hash mismatch in model.safetensors")
    model.unlink()
    expect_fallback(store, "model.safetensors is missing")
    model.mkdir()
    expect_fallback(store, "model.safetensors is not a regular file")


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_checkpoint_is_noticed(store: CheckpointStore, name: str) -> None:
    shutil.copy(store.path(1) / name, store.path(2) / name)
    expect_fallback(store, name)


def test_files_swapped_within_a_checkpoint_are_noticed(store: CheckpointStore) -> None:
    model, optimizer = (store.path(2) / name for name in FILES[1:])
    model.rename(store.path(2) / "x")
    optimizer.rename(model)
    (store.path(2) / "x").rename(optimizer)
    expect_fallback(store)


def test_a_checkpoint_under_the_name_of_another_step_is_noticed(store: CheckpointStore) -> None:
    shutil.rmtree(store.path(2))
    shutil.copytree(store.path(1), store.path(2))
    expect_fallback(store, "manifest.json is that of step 1")


@pytest.mark.parametrize("name", FILES)
def test_links_and_pipes_inside_a_checkpoint_are_refused(store: CheckpointStore, name: str) -> None:
    file = store.path(2) / name
    file.replace(store.folder / "elsewhere")
    file.symlink_to(store.folder / "elsewhere")
    expect_fallback(store, name)
    file.unlink()
    os.mkfifo(file)
    expect_fallback(store, f"{name} is not a regular file")
    file.unlink()
    file.mkdir()
    expect_fallback(store, name)


def test_an_unreadable_file_is_said(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Any, _: Any) -> Any:
        if "step_00000002" in os.readlink(f"/proc/self/fd/{file.fileno()}"):
            raise OSError(5, "Input/output error")
        return real(file, _)

    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", fail)
    expect_fallback(store, "Input/output error")


def test_rejecting_leaves_no_file_open(store: CheckpointStore) -> None:
    before = len(os.listdir("/proc/self/fd"))
    test_links_and_pipes_inside_a_checkpoint_are_refused(store, "model.safetensors")
    assert len(os.listdir("/proc/self/fd")) == before


def test_when_all_are_damaged_nothing_is_taken_and_all_is_said(store: CheckpointStore) -> None:
    for step in (1, 2):
        (store.path(step) / "manifest.json").unlink()
    checkpoint, rejected = store.latest()
    assert checkpoint is None
    assert [path.name for path, _ in rejected] == ["step_00000002", "step_00000001"]


def test_damage_after_opening_is_noticed_by_load(store: CheckpointStore) -> None:
    checkpoint = store.open("step_00000002")
    file = store.path(2) / "model.safetensors"
    file.write_bytes(flip(random.Random(1), file.read_bytes()))
    with pytest.raises(CheckpointError, match="hash mismatch"):
        checkpoint.load("model")
    assert checkpoint.load("optimizer")["lr"] == 0.2


def rewrite(store: CheckpointStore, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and seal it again, as somebody with bad intent would."""
    path = store.path(2) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    change(manifest)
    path.write_bytes(_seal(manifest))


def test_an_unknown_format_version_is_said(store: CheckpointStore) -> None:
    rewrite(store, lambda manifest: manifest.update(format_version=3))
    expect_fallback(store, "has format version 3; this version of lockstep reads 1 and 2")


PATHS = ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "x" * 4096, "..\\x", "~/x", "$HOME"]


@pytest.mark.parametrize("name", PATHS, ids=lambda name: repr(name)[:20])
def test_names_in_a_manifest_cannot_lead_elsewhere(store: CheckpointStore, name: str) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][f"{name}.safetensors"] = manifest["files"].pop("model.safetensors")
        manifest["skeletons"][name] = manifest["skeletons"].pop("model")

    rewrite(store, change)
    expect_fallback(store)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("files"),
        lambda m: m.pop("step"),
        lambda m: m.update(files=[]),
        lambda m: m.update(files={"model.safetensors": 3}),
        lambda m: m.update(files={}),
        lambda m: m["files"]["model.safetensors"].update(size_bytes=float("inf")),
        lambda m: m["files"]["model.safetensors"].update(size_bytes=-1),
        lambda m: m["files"]["model.safetensors"].update(sha256=None),
        lambda m: m.update(meta=3),
        lambda m: m.update(skeletons=None),
        lambda m: m.update(step="two"),
        lambda m: m.update(step=3),
    ],
)
def test_a_sealed_manifest_that_makes_no_sense_is_refused(
    store: CheckpointStore, change: Any
) -> None:
    rewrite(store, change)
    expect_fallback(store)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 100_000, b'"' * 9])
def test_a_manifest_that_is_not_one_is_refused(store: CheckpointStore, raw: bytes) -> None:
    (store.path(2) / "manifest.json").write_bytes(raw)
    expect_fallback(store, "manifest.json is unreadable")


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        b"\xff" * 8,
        (10**9).to_bytes(8, "little") + b"{}",
        header(weight={"dtype": "F32", "shape": [2**63], "data_offsets": [0, 4]}) + b"1234",
        header(weight={"dtype": "F32", "shape": [1], "data_offsets": [0, 400]}) + b"1234",
        header(weight={"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}) + b"1234",
        header(weight={"dtype": "XYZ", "shape": [1], "data_offsets": [0, 4]}) + b"1234",
        header(
            weight={"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
            bias={"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
        )
        + b"123456",
        header(bias={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}) + b"1234",
        header(weight=3),
        b"PK\3\4 a foreign .pt file",
    ],
    ids=range(12),
)
def test_a_hostile_tensor_file_is_a_typed_error(store: CheckpointStore, content: bytes) -> None:
    facts = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite(store, lambda manifest: manifest["files"].update({"model.safetensors": facts}))
    (store.path(2) / "model.safetensors").write_bytes(content)
    checkpoint = store.open("step_00000002")
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read"):
        checkpoint.load("model")


@pytest.mark.parametrize(
    "skeleton",
    [{"tensor": "../x"}, {"dict": 3}, {"tensor": "weight", "dtype": "load"}, {"list": [{"x": 1}]}],
    ids=str,
)
def test_a_hostile_skeleton_is_a_typed_error(store: CheckpointStore, skeleton: Any) -> None:
    rewrite(store, lambda manifest: manifest["skeletons"].update(model=skeleton))
    with pytest.raises(CheckpointError):
        store.open("step_00000002").load("model")


def test_a_skeleton_nested_too_deeply_is_a_typed_error(store: CheckpointStore) -> None:
    deep: Any = None
    for _ in range(450):
        deep = {"list": [deep]}
    rewrite(store, lambda manifest: manifest["skeletons"].update(model=deep))
    with suppress(CheckpointError):  # fits the stack or does not; never a bare RecursionError
        store.open("step_00000002").load("model")


def leave(rng: random.Random, folder: Path, good: Path, kind: str) -> None:
    """Put into a folder what a crash, a copy, another version or a user may leave there."""
    if kind in ("file", "link"):
        folder.symlink_to("nowhere") if kind == "link" else folder.write_text("no folder")
        return
    shutil.copytree(good, folder)
    if kind == "valid":
        skewed_s = rng.uniform(0, 2e9)
        os.utime(folder, (skewed_s, skewed_s))
    elif kind == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif kind == "partial":
        (folder / rng.choice(FILES)).unlink()
    elif kind == "later version":
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["sha256"]
        (folder / "manifest.json").write_bytes(_seal(manifest | {"format_version": 7}))
    elif kind == "damaged":
        file = folder / rng.choice(FILES)
        file.write_bytes(flip(rng, file.read_bytes()))


def test_a_resume_takes_the_newest_valid_one_from_any_folder_or_refuses(
    store: CheckpointStore, tmp_path: Path
) -> None:
    kinds = ["valid", "empty", "partial", "later version", "damaged", "file", "link", "none"]
    other = CheckpointStore(tmp_path / "other", keep_last=None)
    for step in range(3, 9):
        torch.manual_seed(step)
        state = {"model": {"weight": torch.randn(3)}, "optimizer": {"lr": 0.1}}
        other.save(step, state, {"position": step})
    for seed in range(60):
        rng = random.Random(seed)
        found = CheckpointStore(tmp_path / f"{seed}")
        left = {step: rng.choice(kinds) for step in range(3, 9)}
        if seed % 4 == 0:
            left = {step: "empty" if kind == "valid" else kind for step, kind in left.items()}
        for step, kind in left.items():
            found.folder.mkdir(exist_ok=True)
            if kind != "none":
                leave(rng, found.path(step), other.path(step), kind)
        shutil.copytree(other.path(8), found.folder / ".writing_step_00000099")
        valid = [step for step, kind in left.items() if kind == "valid"]
        if valid:
            checkpoint, rejected = choose_checkpoint(found, "auto")
            assert checkpoint is not None
            assert (checkpoint.step, checkpoint.meta["position"]) == (max(valid), max(valid))
            bad = ("empty", "partial", "later version", "damaged", "link")
            newer = [s for s, kind in left.items() if s > max(valid) and kind in bad]
            assert sorted(int(path.name[5:]) for path, _ in rejected) == newer
        elif any(kind not in ("file", "none") for kind in left.values()):
            with pytest.raises(CheckpointError, match="no checkpoint in .* is valid"):
                choose_checkpoint(found, "auto")
        else:
            assert choose_checkpoint(found, "auto") == (None, [])
