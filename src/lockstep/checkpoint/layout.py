"""What one checkpoint is on disk: a manifest, and one safetensors file per part or share of it.

Owns: the bytes of both, how they are flushed, and proving that they are the
ones that were written. Does not own: where a checkpoint stands, or how long.

    step_00000120/
      manifest.json           step, recipe, meta, skeletons; size and hash of every file
      model.safetensors       readable without lockstep
      optimizer.safetensors

Where ranks write a share each, `model.0_of_4.safetensors` and its siblings stand in
place of `model.safetensors`, and the header says which rows of a cut tensor are there.
"""

import hashlib
import itertools
import json
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.checkpoint.manifest import checked_manifest, in_brief, read_json
from lockstep.checkpoint.state import FILE_DTYPES, RESERVED_NAME, Share, flatten, unflatten
from lockstep.checkpoint.state import num_bytes as num_bytes
from lockstep.errors import CheckpointError, closest

WHOLE, SHARED = FORMAT_VERSIONS = (1, 2)
"""One file per part, or any number of files per part, each saying which part it is of."""
MANIFEST: Final = "manifest.json"
MAX_MANIFEST_BYTES: Final = 64 * 2**20
MALFORMED: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
STEP_FOLDER: Final = re.compile(r"step_(\d{8,})")
CHUNK_BYTES: Final = 16 * 2**20
_PLAIN_NAME: Final = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,99}")
_SEAL: Final = re.compile(rb',\n"sha256": "([0-9a-f]{64})"}\n\Z')


class Piece(NamedTuple):
    """A tensor of a file: whole, or some rows of one that ranks have divided among them."""

    tensor: Tensor
    first_row: int
    num_rows: int | None
    """How many the whole has; None if this is the whole."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One committed checkpoint. Its tensors stay on disk until asked for."""

    path: Path
    step: int
    recipe: str
    meta: Mapping[str, Any]
    files: Mapping[str, tuple[int, str, str]] = field(repr=False)
    """Size in bytes, SHA-256 and part of each file."""
    skeletons: Mapping[str, Any] = field(repr=False)
    generation: int = 0
    """Which group of processes saved it; 0 if it was not counted."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names `load` takes."""
        return tuple(self.skeletons)

    def load(self, part: str) -> Any:
        """Return a part as it was saved, on the CPU; its file is hashed before it is parsed.

        Raises:
            CheckpointError: there is no such part, or its file is not what was saved.
        """
        if part not in self.skeletons:
            raise CheckpointError(
                f"{self.path} has no part {part!r}, only {', '.join(self.parts)}",
                f"load {closest(part, self.parts) or 'one of those'}",
            )
        files = [name for name, (_, _, whose) in self.files.items() if whose == part]
        pieces = [self._pieces(name) for name in files]
        try:
            return unflatten(self.skeletons[part], _joined(pieces))
        except (CheckpointError, RuntimeError, TypeError) as error:
            raise damaged(self.path, f"{' '.join(files)} cannot be read: {error}") from error

    def export(self, part: str, path: str | Path) -> Path:
        """Write a part, however it was saved, as one new safetensors file that needs no lockstep.

        Raises:
            CheckpointError: it cannot be loaded, or the file exists or cannot be written.
        """
        tensors, _ = flatten(self.load(part))
        try:
            _write_file(Path(path), _tensor_file(tensors))
        except OSError as error:
            raise CheckpointError(
                f"cannot export to {path}: {error}", "pass the path of a new file"
            ) from error
        return Path(path)

    def _pieces(self, name: str) -> dict[str, Piece]:
        """Read one file, proved to be the one that was written."""
        check_file(self.path, name, *self.files[name][:2])
        try:
            # Cloned out of the mapped file: what later happens to it must not reach the run.
            with safe_open(self.path / name, framework="pt") as file:
                tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
                cuts = json.loads((file.metadata() or {}).get("cuts", "{}"))
            whole = (0, None)
            return {key: Piece(tensor, *cuts.get(key, whole)) for key, tensor in tensors.items()}
        except (SafetensorError, OSError, RecursionError, *MALFORMED) as error:
            raise damaged(self.path, f"{name} cannot be read: {error}") from error


class Written(NamedTuple):
    """What ranks have written of a checkpoint that is not committed yet."""

    skeletons: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    """What the manifest will say of each file."""


def write_share(folder: Path, share: Share) -> dict[str, dict[str, Any]]:
    """Write the files of a share, flush them and read them back; return what to say of each."""
    files = {}
    is_whole = share.size == 1
    for part, tensors in share.tensors.items():
        if tensors or is_whole:
            name = file_name(part if is_whole else f"{part}.{share.rank}_of_{share.size}")
            content = _tensor_file(tensors, share.cuts.get(part))
            files[name] = _write_file(folder / name, content) | ({} if is_whole else {"part": part})
    flush_folder(folder)
    for name, facts in files.items():
        check_file(folder, name, facts["size_bytes"], facts["sha256"])
    return files


def write_manifest(
    folder: Path,
    step: int,
    recipe: str,
    written: Written,
    meta: Mapping[str, Any],
    generation: int = 0,
) -> None:
    """Write and flush the manifest: the last file of a checkpoint."""
    is_shared = any("part" in facts for facts in written.files.values())
    manifest = {
        "format_version": SHARED if is_shared else WHOLE,
        "step": step,
        "recipe": recipe,
        **({"generation": generation} if generation else {}),
        "meta": meta,
        "files": written.files,
        "skeletons": written.skeletons,
    }
    _write_file(folder / MANIFEST, [_seal(manifest)])
    flush_folder(folder)


def read_checkpoint(folder: Path, *, hashed: bool = True) -> Checkpoint:
    """Read a checkpoint's manifest and compare every file with it, or only their sizes.

    Raises:
        CheckpointError: says which file, and what is wrong with it.
    """
    checkpoint = read_manifest(folder)
    for name, (size_bytes, sha256, _) in checkpoint.files.items():
        check_file(folder, name, size_bytes, sha256 if hashed else None)
    return checkpoint


def read_manifest(folder: Path) -> Checkpoint:
    """Read a checkpoint's manifest without looking at the other files.

    Raises:
        CheckpointError: says which field is wrong, or that the manifest was changed.
    """
    with _opened(folder, MANIFEST) as file:
        if (size_bytes := os.fstat(file.fileno()).st_size) > MAX_MANIFEST_BYTES:
            raise damaged(folder, f"{MANIFEST} has {size_bytes:,} bytes, more than any has")
        raw = file.read()
    return _parse_manifest(folder, raw)


def check_file(folder: Path, name: str, size_bytes: int, sha256: str | None) -> None:
    """Compare one file of a checkpoint with what its manifest says of it."""
    with _opened(folder, name) as file:
        found_bytes = os.fstat(file.fileno()).st_size
        if found_bytes != size_bytes:
            raise damaged(folder, f"{name} has {found_bytes:,} bytes instead of {size_bytes:,}")
        if sha256 is None:
            return
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise damaged(folder, f"hash mismatch in {name}: {found[:12]} instead of {sha256[:12]}")


def plain_name(name: str) -> str:
    """Return a name that cannot lead out of its folder, or refuse it."""
    if not _PLAIN_NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r:.120} cannot name a file", "use letters, digits and . _ + = -"
        )
    return name


def file_name(part: str) -> str:
    """Return the name of the file that holds a part."""
    return f"{plain_name(part)}.safetensors"


def flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damaged(folder: Path, what: str) -> CheckpointError:
    """Return the error for a checkpoint that is not what was written."""
    return CheckpointError(f"{folder}: {what}", "use an older checkpoint, or copy this one again")


def _joined(files: Iterable[Mapping[str, Piece]]) -> dict[str, Tensor]:
    """Return the whole tensors that the pieces in some files add up to."""
    pieces: dict[str, list[Piece]] = {}
    for file in files:
        for name, piece in file.items():
            pieces.setdefault(name, []).append(piece)
    return {name: _whole(name, found) for name, found in pieces.items()}


def _whole(name: str, pieces: list[Piece]) -> Tensor:
    """Return a tensor from its pieces, which must be all of them and nothing twice."""
    tensor, _, num_rows = pieces[0]
    if len(pieces) == 1 and num_rows is None:
        return tensor
    pieces.sort(key=lambda piece: piece.first_row)
    tensors = [piece.tensor for piece in pieces]
    starts = [0, *itertools.accumulate(map(len, tensors))]
    said = [(piece.first_row, piece.num_rows) for piece in pieces]
    is_alike = len({(tensor.dtype, tensor.shape[1:]) for tensor in tensors}) == 1
    adds_up = said == [(start, num_rows) for start in starts[:-1]] and starts[-1] == num_rows
    if not (is_alike and adds_up):
        raise CheckpointError(f"the rows of {name!r} do not add up: {said}", "use another one")
    return torch.cat(tensors)


def _tensor_file(
    tensors: Mapping[str, Tensor], cuts: Mapping[str, tuple[int, int]] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file: header length, JSON header, then the tensors back to back.

    safetensors' own writer refuses tied tensors and does not hash what it writes.
    """
    # The widest first, so that each tensor starts at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    about = {"format": "pt", **({"cuts": json.dumps(cuts)} if cuts else {})}
    header: dict[str, Any] = {RESERVED_NAME: about}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + num_bytes([tensor])
        header[name] = {
            "dtype": FILE_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for _, tensor in ordered:
        in_bytes = tensor.cpu().contiguous().unsqueeze(-1).view(torch.uint8).reshape(-1)
        content = in_bytes.numpy().data
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]


def _write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file through to the disk; return what a manifest says of it."""
    digest = hashlib.sha256()
    size_bytes = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for chunk in chunks:
            digest.update(chunk)
            size_bytes += len(chunk)
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):  # so that reading back asks the disk, not the cache
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return {"size_bytes": size_bytes, "sha256": digest.hexdigest()}


def _seal(manifest: Mapping[str, Any]) -> bytes:
    """Return a manifest as JSON, a key to a line, the last line the hash of those before."""
    try:
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(v)}" for key, v in manifest.items())
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the meta data is not JSON: {error}", "convert it") from error
    body = f"{{{lines}".encode()
    return body + f',\n"sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def _parse_manifest(folder: Path, raw: bytes) -> Checkpoint:
    try:
        tree = read_json(raw)
        version = tree["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(folder, f"{MANIFEST} is unreadable: {error!r:.200}") from error
    if type(version) is not int or version not in FORMAT_VERSIONS:
        raise CheckpointError(
            f"{folder} has format version {in_brief(version)}; this lockstep reads {WHOLE} and "
            f"{SHARED}",
            "use the version of lockstep that wrote it",
        )
    seal = _SEAL.search(raw, max(0, len(raw) - 100))
    if not seal or hashlib.sha256(raw[: seal.start()]).hexdigest() != seal[1].decode():
        raise damaged(folder, f"hash mismatch in {MANIFEST}")
    try:
        manifest = checked_manifest(tree)
        files = {}
        for name, facts in manifest.files.items():
            part = facts.part if version == SHARED else name.removesuffix(".safetensors")
            if part not in manifest.skeletons:
                raise ValueError(f"files.{in_brief(name)} belongs to no part in skeletons")
            files[plain_name(name)] = (facts.size_bytes, facts.sha256, part)
        whole = {file_name(part) for part in manifest.skeletons}
        if version == WHOLE and set(files) != whole:
            raise ValueError("files does not list one file for each part in skeletons")
    except (ValueError, CheckpointError) as error:
        said = error.problem if isinstance(error, CheckpointError) else error
        raise damaged(folder, f"{MANIFEST} is malformed: {said}") from error
    checkpoint = Checkpoint(
        path=folder,
        step=manifest.step,
        recipe=manifest.recipe,
        meta=manifest.meta,
        files=files,
        skeletons=manifest.skeletons,
        generation=manifest.generation,
    )
    named = STEP_FOLDER.fullmatch(folder.name)
    if named and int(named[1]) != checkpoint.step:
        raise damaged(folder, f"{MANIFEST} is that of step {checkpoint.step}")
    return checkpoint


@contextmanager
def _opened(folder: Path, name: str) -> Iterator[BufferedReader]:
    """Open a regular file of a checkpoint; a link or a pipe in its place is refused."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise damaged(folder, f"{name} is not a regular file")
        with open(descriptor, "rb") as file:
            yield file
    except FileNotFoundError:
        raise damaged(folder, f"{name} is missing") from None
    except OSError as error:
        raise damaged(folder, f"{name} cannot be read: {error}") from error
