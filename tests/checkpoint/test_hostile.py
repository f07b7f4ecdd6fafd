"""A checkpoint made by somebody with bad intent runs no code, writes nowhere, and fills no memory.

Every file of the corpus stands in the place of one of a real checkpoint, whose manifest is sealed
again around it, so that no hash protects the reader.
"""

import hashlib
import io
import json
import os
import pickle
import resource
import shutil
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_damage import OLD, is_right, parts

from lockstep.checkpoint import CheckpointStore
from lockstep.checkpoint.layout import _seal
from lockstep.errors import CheckpointError

MEMORY_BYTES = 64 * 2**20
Build = Callable[[Path], object]


class Payload:
    """Says that it was run, in a file beside the checkpoints."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.canary,))


def pickled(folder: Path, protocol: int = 4) -> bytes:
    return pickle.dumps(Payload(folder.parent.parent / "canary"), protocol)


def torch_file(folder: Path) -> bytes:
    content = io.BytesIO()
    torch.save({"model": Payload(folder.parent.parent / "canary")}, content)
    return content.getvalue()


def zip_bomb(_: Path) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(100 * 2**20))
    return content.getvalue()


def header(length: int | None = None, data: bytes = b"1234", **tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def reseal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    change(manifest)
    path.write_bytes(_seal(manifest))


def in_place_of(name: str, content: bytes | Callable[[Path], bytes]) -> Build:
    """Put content in the place of a file, and say so in the manifest."""

    def build(folder: Path) -> None:
        found = content if isinstance(content, bytes) else content(folder)
        (folder / name).write_bytes(found)
        if name != "manifest.json":
            facts = {"size_bytes": len(found), "sha256": hashlib.sha256(found).hexdigest()}
            reseal(folder, lambda manifest: manifest["files"][name].update(facts))

    return build


def beside(name: str, content: Callable[[Path], bytes]) -> Build:
    return lambda folder: (folder / name).write_bytes(content(folder))


def said(change: Callable[[dict[str, Any]], object]) -> Build:
    return lambda folder: reseal(folder, change)


def named(name: str, *, of_part: bool) -> Build:
    """Let a manifest lead to a file by another name."""

    def change(manifest: dict[str, Any]) -> None:
        facts = manifest["files"].pop("model.safetensors")
        if of_part:
            manifest["files"][f"{name}.safetensors"] = facts
            manifest["skeletons"][name] = manifest["skeletons"].pop("model")
        else:
            manifest["format_version"] = 2
            manifest["files"] = {name: facts | {"part": "model"}}

    return said(change)


def linked(name: str, target: str) -> Build:
    def build(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return build


def special(name: str, make: Callable[[Path], object]) -> Build:
    def build(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return build


def bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def foreign_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    for name in (".metadata", "__0_0.distcp", "manifest.json", "model.pt"):
        (folder / name).write_bytes(pickled(folder))


def huge(name: str, size_bytes: int) -> Build:
    return lambda folder: os.truncate(folder / name, size_bytes)


TENSORS, MANIFEST = "model.safetensors", "manifest.json"
NAMES = ["../x", "/etc/passwd", "a/b", "..", "", "a\0b", "x" * 4096, "..\\x", "$HOME", "-rf"]
NODE: Any = {"dict": [["weight", {"tensor": "weight"}]]}
CORPUS: dict[str, Build] = {
    **{f"a pickle as {n}, protocol {p}": in_place_of(n, lambda f, p=p: pickled(f, p))  # type: ignore[misc]
       for n in (MANIFEST, TENSORS) for p in range(6)},
    **{f"a .pt file as {n}": in_place_of(n, torch_file) for n in (MANIFEST, TENSORS)},
    **{f"a pickle beside, {n}": beside(n, pickled)
       for n in ("model.pt", ".metadata", "__init__.py", "data.pkl", "manifest.json.pkl")},
    "a folder of another program": foreign_folder,
    **{f"part {n!r:.20}": named(n, of_part=True) for n in NAMES},
    **{f"file {n!r:.20}": named(n, of_part=False) for n in NAMES},
    **{f"a zip bomb as {n}": in_place_of(n, zip_bomb) for n in (MANIFEST, TENSORS)},
    "a header of 1 GB": in_place_of(TENSORS, header(10**9)),
    "a header of 2^63 bytes": in_place_of(TENSORS, header(2**63)),
    "a header of 2^64-1 bytes": in_place_of(TENSORS, header(2**64 - 1)),
    "no header": in_place_of(TENSORS, header(0)),
    "a shape of 2^63": in_place_of(TENSORS, header(weight=tensor([2**63], [0, 4]))),
    "a shape of 2^62 x 4": in_place_of(TENSORS, header(weight=tensor([2**62, 4], [0, 4]))),
    "an empty shape of 2^62": in_place_of(
        TENSORS, header(weight=tensor([0, 2**62], [0, 0]), data=b"")
    ),
    "a shape of -1": in_place_of(TENSORS, header(weight=tensor([-1], [0, 4]))),
    "offsets beyond the end": in_place_of(TENSORS, header(weight=tensor([2**40], [0, 2**42]))),
    "negative offsets": in_place_of(TENSORS, header(weight=tensor([1], [-4, 0]))),
    "offsets backwards": in_place_of(TENSORS, header(weight=tensor([1], [4, 0]))),
    "overlapping offsets": in_place_of(
        TENSORS, header(weight=tensor([1], [0, 4]), bias=tensor([3], [2, 5], "U8"), data=b"12345")
    ),
    "a hole between tensors": in_place_of(
        TENSORS, header(weight=tensor([1], [0, 4]), bias=tensor([1], [5, 6], "U8"), data=b"123456")
    ),
    "a dtype of its own": in_place_of(TENSORS, header(weight=tensor([1], [0, 4], "PICKLE"))),
    "numbers that are text": in_place_of(TENSORS, header(weight=tensor("1", ["0", "4"]))),
    "a header nested deeply": in_place_of(
        TENSORS, (10**6).to_bytes(8, "little") + b"[" * 10**6
    ),
    "cuts that are not": in_place_of(
        TENSORS, header(__metadata__={"cuts": "[" * 10**5}, weight=tensor([1], [0, 4]))
    ),
    "cuts of 2^63 rows": in_place_of(
        TENSORS, header(__metadata__={"cuts": '{"weight": [0, 9223372036854775808]}'},
                        weight=tensor([1], [0, 4]))
    ),
    "a manifest nested deeply": in_place_of(MANIFEST, b"[" * 10**6),
    "a manifest of 1 TB": huge(MANIFEST, 2**40),
    "a number of a million digits": in_place_of(MANIFEST, b'{"format_version": ' + b"9" * 10**6),
    "a size of 10^400": said(lambda m: m["files"][TENSORS].update(size_bytes=10**400)),
    "a size of -1": said(lambda m: m["files"][TENSORS].update(size_bytes=-1)),
    "a step of infinity": said(lambda m: m.update(step=float("inf"))),
    "no files": said(lambda m: m.update(files={})),
    "a skeleton that names a function": said(
        lambda m: m["skeletons"].update(model={"tensor": "weight", "dtype": "load"})
    ),
    "a skeleton of a kind of its own": said(
        lambda m: m["skeletons"].update(model={"reduce": ["os.system", ["true"]]})
    ),
    "a skeleton that leads elsewhere": said(
        lambda m: m["skeletons"].update(model={"tensor": "../../../etc/passwd"})
    ),
    **{f"{n} is a link to {t}": linked(n, t)
       for n in (MANIFEST, TENSORS) for t in ("/etc/passwd", "/dev/zero", "../step_00000001", "x")},
    **{f"{n} is {kind}": special(n, make)
       for n in (MANIFEST, TENSORS)
       for kind, make in {"a pipe": os.mkfifo, "a socket": bind, "a folder": Path.mkdir}.items()},
}  # fmt: skip


def outcome_of(store: CheckpointStore) -> str:
    """Try everything a resume may do with the newest checkpoint; say how that ended."""
    try:
        checkpoint, _ = store.latest()
        if checkpoint is None:
            return "nothing was left"
        if checkpoint.step == OLD:
            return "fell back" if is_right(checkpoint) else "WRONG BITS"
        for part in checkpoint.parts:
            checkpoint.load(part)
    except CheckpointError:
        return "refused"
    except BaseException as error:
        return f"NOT TYPED: {error!r:.200}"
    return "harmless"


def in_little_memory(action: Callable[[], object]) -> None:
    """Run `action` in a process that may take no more than 64 MB beyond what it has."""
    pid = os.fork()
    if pid == 0:
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            action()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with a good checkpoint and one to be replaced."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (OLD, OLD + 1):
        store.save(step, parts(step), {})
    return tmp_path / "run"


def everything_in(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path): path.read_bytes() for path in found if path.stat().st_size < 2**30}


def test_nothing_in_a_hostile_checkpoint_is_run_or_written(place: Path) -> None:
    stores = {}
    for number, (name, build) in enumerate(CORPUS.items()):
        stores[name] = CheckpointStore(place.parent / f"{number}" / "checkpoints")
        shutil.copytree(place, place.parent / f"{number}")
        build(stores[name].path(OLD + 1))
    told, before = place.parent / "outcomes", everything_in(place.parent)
    in_little_memory(
        lambda: told.write_text(json.dumps({n: outcome_of(s) for n, s in stores.items()}))
    )
    outcomes = json.loads(told.read_text())
    assert everything_in(place.parent) == before | {str(told): told.read_bytes()}
    assert not list(place.parent.rglob("canary"))
    assert len(outcomes) == len(CORPUS) > 75
    assert {n: o for n, o in outcomes.items() if o not in ("fell back", "refused")} == {
        name: "harmless" for name in CORPUS if "a pickle beside" in name
    }


def test_the_canary_would_sing(place: Path) -> None:
    hostile = place / "checkpoints" / "step_00000002"
    pickle.loads(pickled(hostile))
    assert (place / "canary").exists()


def test_the_memory_limit_would_be_felt() -> None:
    with pytest.raises(AssertionError):
        in_little_memory(lambda: bytearray(2 * MEMORY_BYTES))


@pytest.mark.parametrize("name", ["best_model.pt", "step_00000009"])
def test_a_pickle_named_by_the_user_is_refused_unread(place: Path, name: str) -> None:
    store = CheckpointStore(place / "checkpoints")
    (store.folder / name).write_bytes(pickled(store.path(1)))
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        store.open(name)
    assert not (place / "canary").exists()
