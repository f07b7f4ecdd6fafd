"""One checkpoint on disk: a manifest, and one safetensors file per part or per share of a part.

Owns: writing, flushing and verifying these files. Does not own: the folder of a checkpoint, or how
long it is kept.

    step_00000120/
      manifest.json           step, recipe, meta, skeletons; size and hash of every file
      model.safetensors       readable without lockstep
      optimizer.safetensors

If every rank writes a share, `model.0_of_4.safetensors` and its siblings replace
`model.safetensors`, and the header of each says which rows of a tensor it contains.
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

WHOLE = 1
"""Format version with one file per part."""
SHARED = 2
"""Format version with any number of files per part; the manifest names the part of each."""
FORMAT_VERSIONS = (WHOLE, SHARED)
MANIFEST: Final = "manifest.json"
MAX_MANIFEST_BYTES: Final = 64 * 2**20
MALFORMED: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
STEP_FOLDER: Final = re.compile(r"step_(\d{8,})")
CHUNK_BYTES: Final = 16 * 2**20
_PLAIN_NAME: Final = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,99}")
_SEAL: Final = re.compile(rb',\n"sha256": "([0-9a-f]{64})"}\n\Z')


class Piece(NamedTuple):
    """A tensor in a file: whole, or some of its rows."""

    tensor: Tensor
    first_row: int
    num_rows: int | None
    """The number of rows of the whole tensor; None if this is the whole."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One committed checkpoint. Its tensors stay on disk until `load`."""

    path: Path
    step: int
    recipe: str
    meta: Mapping[str, Any]
    files: Mapping[str, tuple[int, str, str]] = field(repr=False)
    """Size in bytes, SHA-256 and part of each file."""
    skeletons: Mapping[str, Any] = field(repr=False)
    generation: int = 0
    """The generation that saved it (`generation.py`), or 0 if it has none."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names `load` takes."""
        return tuple(self.skeletons)

    def load(self, part: str) -> Any:
        """Return a saved part, on the CPU; the hash of its file is checked before it is parsed.

        Raises:
            CheckpointError: there is no such part, or its file is damaged.
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
        """Write a part, whole or sharded, to one new safetensors file readable without lockstep.

        Raises:
            CheckpointError: the part cannot be loaded, or the file exists or cannot be written.
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
        """Verify and read one file."""
        check_file(self.path, name, *self.files[name][:2])
        try:
            # Clone the tensors, because the file is mapped and may be changed later.
            with safe_open(self.path / name, framework="pt") as file:
                tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
                cuts = json.loads((file.metadata() or {}).get("cuts", "{}"))
            whole = (0, None)
            return {key: Piece(tensor, *cuts.get(key, whole)) for key, tensor in tensors.items()}
        except (SafetensorError, OSError, RecursionError, *MALFORMED) as error:
            raise damaged(self.path, f"{name} cannot be read: {error}") from error


class Written(NamedTuple):
    """The files of a checkpoint that ranks have written but not committed yet."""

    skeletons: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    """The manifest's entry for each file."""


def write_share(folder: Path, share: Share) -> dict[str, dict[str, Any]]:
    """Write the files of a share, flush and read them back; return their manifest entries."""
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
    """Read a checkpoint's manifest and verify every file, or only their sizes.

    Raises:
        CheckpointError: names the file and the fault.
    """
    checkpoint = read_manifest(folder)
    for name, (size_bytes, sha256, _) in checkpoint.files.items():
        check_file(folder, name, size_bytes, sha256 if hashed else None)
    return checkpoint


def read_manifest(folder: Path) -> Checkpoint:
    """Read a checkpoint's manifest without verifying the other files.

    Raises:
        CheckpointError: names the wrong field, or the manifest was changed.
    """
    with _opened(folder, MANIFEST) as file:
        if (size_bytes := os.fstat(file.fileno()).st_size) > MAX_MANIFEST_BYTES:
            raise damaged(
                folder, f"{MANIFEST} has {size_bytes:,} bytes, more than {MAX_MANIFEST_BYTES:,}"
            )
        raw = file.read()
    return _parse_manifest(folder, raw)


def check_file(folder: Path, name: str, size_bytes: int, sha256: str | None) -> None:
    """Compare one file of a checkpoint with its manifest entry."""
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
    """Return the name if it cannot lead out of its folder; refuse it otherwise."""
    if not _PLAIN_NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r:.120} cannot be a file name", "use letters, digits and . _ + = - only"
        )
    return name


def file_name(part: str) -> str:
    """Return the file name of a part."""
    return f"{plain_name(part)}.safetensors"


def flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damaged(folder: Path, what: str) -> CheckpointError:
    """Return the error for a damaged checkpoint."""
    return CheckpointError(f"{folder}: {what}", "use an older checkpoint, or copy this one again")


def _joined(files: Iterable[Mapping[str, Piece]]) -> dict[str, Tensor]:
    """Return whole tensors, joined from the pieces in several files."""
    pieces: dict[str, list[Piece]] = {}
    for file in files:
        for name, piece in file.items():
            pieces.setdefault(name, []).append(piece)
    return {name: _whole(name, found) for name, found in pieces.items()}


def _whole(name: str, pieces: list[Piece]) -> Tensor:
    """Return a tensor from its pieces, which must contain every row once."""
    tensor, _, num_rows = pieces[0]
    if len(pieces) == 1 and num_rows is None:
        return tensor
    pieces.sort(key=lambda piece: piece.first_row)
    tensors = [piece.tensor for piece in pieces]
    starts = [0, *itertools.accumulate(map(len, tensors))]
    rows = [(piece.first_row, piece.num_rows) for piece in pieces]
    same_type = len({(tensor.dtype, tensor.shape[1:]) for tensor in tensors}) == 1
    adds_up = rows == [(start, num_rows) for start in starts[:-1]] and starts[-1] == num_rows
    if not (same_type and adds_up):
        raise CheckpointError(
            f"the rows of {name!r} do not add up: {rows}", "use another checkpoint"
        )
    return torch.cat(tensors)


def _tensor_file(
    tensors: Mapping[str, Tensor], cuts: Mapping[str, tuple[int, int]] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file: header length, JSON header, then the tensors back to back.

    The writer of safetensors refuses tied tensors and does not hash its output.
    """
    # The widest types first, so that each tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    metadata = {"format": "pt", **({"cuts": json.dumps(cuts)} if cuts else {})}
    header: dict[str, Any] = {RESERVED_NAME: metadata}
    end = 0
    for name, tensor in ordered:
        start = end
        end += num_bytes([tensor])
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
    """Write and flush a new file; return its size and hash for the manifest."""
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
        if hasattr(os, "posix_fadvise"):  # makes the read-back read the disk, not the cache
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return {"size_bytes": size_bytes, "sha256": digest.hexdigest()}


def _seal(manifest: Mapping[str, Any]) -> bytes:
    """Return a manifest as JSON, one key per line; the last line is the hash of the others."""
    try:
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(v)}" for key, v in manifest.items())
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the metadata cannot be written as JSON: {error}",
            "use only numbers, strings, lists and dicts in it",
        ) from error
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
            f"{folder} has format version {in_brief(version)}; this version of lockstep reads "
            f"{WHOLE} and {SHARED}",
            "use the version of lockstep that wrote the checkpoint",
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
        fault = error.problem if isinstance(error, CheckpointError) else error
        raise damaged(folder, f"{MANIFEST} is malformed: {fault}") from error
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
    """Open a regular file of a checkpoint; refuse a link or a pipe."""
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
