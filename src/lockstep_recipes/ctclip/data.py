"""A data set of volumes with their reports and findings.

Owns: manifests and tar shards, converting stored voxels to network input, and naming the
file and line of a bad sample. Does not own: words (`text.py`), order, batches, devices.

A folder holds `manifest.jsonl`, with one JSON object per line, and `.npy` and `.npz` volumes
(depth, height, width); or `manifest.json` and tar shards, as in the original project.

Voxels become HU = slope * raw + intercept, are resampled to one spacing, clipped to
[-1000, 1000], divided by 1000, and centred in the wanted shape, padded with -1 (air).
"""

import csv
import io
import math
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveFloat, ValidationError
from torch import Tensor

from lockstep.data.fingerprint import Span, file_fingerprints
from lockstep.errors import DataError, closest
from lockstep.text_input import parse_json

FINDINGS = (
    "Medical material",
    "Arterial wall calcification",
    "Cardiomegaly",
    "Pericardial effusion",
    "Coronary artery wall calcification",
    "Hiatal hernia",
    "Lymphadenopathy",
    "Emphysema",
    "Atelectasis",
    "Lung nodule",
    "Lung opacity",
    "Pulmonary fibrotic sequela",
    "Pleural effusion",
    "Mosaic attenuation pattern",
    "Peribronchial thickening",
    "Consolidation",
    "Bronchiectasis",
    "Interlobular septal thickening",
)
"""The findings of CT-RATE in the order of its columns; labels in a list follow this order."""
SHARD_SHAPE = (480, 480, 240)
"""Height, width, depth of a `.bin` in a shard: float16, already prepared."""
WINDOW_HU = 1000.0
AIR = -1.0

Spacing = tuple[PositiveFloat, PositiveFloat, PositiveFloat]
Shape = tuple[int, int, int]


class ManifestLine(BaseModel):
    """The keys of a line of `manifest.jsonl`."""

    model_config = ConfigDict(extra="forbid")

    volume: str
    """A path relative to the manifest's folder."""
    report: str
    labels: dict[str, FiniteFloat] | list[FiniteFloat] | None = None
    spacing: Spacing | None = None
    """Millimetres between voxels: depth, height, width. Default: the wanted spacing."""
    slope: FiniteFloat = 1.0
    intercept: FiniteFloat = 0.0
    prepared: bool = False
    """The voxels are already scaled to [-1, 1] and have the wanted shape."""
    meta: Any = None
    """Free text."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One volume: its file, report and labels."""

    path: Path
    origin: str
    """The line of the manifest, for error messages."""
    report: str
    findings: Mapping[str, float]
    spacing: Spacing | None = None
    slope: float = 1.0
    intercept: float = 0.0
    prepared: bool = False
    offset: int | None = None
    """Offset of the voxels inside a tar shard."""
    member: str = ""
    """Name of the sample in the shard."""
    shape: Shape = SHARD_SHAPE

    @property
    def name(self) -> str:
        """Return the name of the volume: that of its file, or its name inside a shard."""
        return Path(self.member or self.path).name

    def problem(self, what: str, remedy: str = "replace or remove it") -> DataError:
        """Return the error that names this volume."""
        return DataError(
            f"{self.path} ({self.origin}) {what}", f"{remedy}, or set data.on_bad_sample: skip"
        )


def open_entries(path: Path, labels: Path | None = None) -> list[Entry]:
    """Return the volumes of a folder or a manifest.

    Raises:
        DataError: naming the file, and the line where there is one.
    """
    if (path / "manifest.json").is_file() and not (path / "manifest.jsonl").is_file():
        entries = _open_shards(path)
    else:
        entries = _read_manifest(path if path.suffix == ".jsonl" else path / "manifest.jsonl")
    if labels is not None:
        found = read_labels(labels)
        entries = [replace(e, findings=found.get(scan_of(e.name), e.findings)) for e in entries]
    return entries


def scan_of(name: str) -> str:
    """Return a file's name without the suffixes of its storage format.

    >>> scan_of("valid_1_a_1.nii.gz"), scan_of("valid_1_a_1.npz"), scan_of("1.2.840.npy")
    ('valid_1_a_1', 'valid_1_a_1', '1.2.840')
    """
    for suffix in (".npy", ".npz", ".gz", ".nii"):
        name = name.removesuffix(suffix)
    return name


def _read_manifest(path: Path) -> list[Entry]:
    try:
        lines = path.read_text("utf-8-sig").split(
            "\n"
        )  # a report may contain other line separators
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise DataError(
            f"the manifest {path} cannot be read: {reason}",
            "check data.paths, or set LOCKSTEP_REHEARSAL=1 to train on generated volumes",
        ) from error
    entries = [_entry(path, n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not entries:
        raise DataError(f"the manifest {path} is empty", "write one JSON object per line")
    missing = next((entry for entry in entries if not entry.path.is_file()), None)
    if missing:
        raise DataError(f"{missing.path} does not exist ({missing.origin})", "put the file there")
    return entries


def _entry(path: Path, number: int, text: str) -> Entry:
    origin = f"{path}, line {number}"
    try:
        line = ManifestLine.model_validate(parse_json(text))
    except ValidationError as invalid:
        first = invalid.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the line"
        near = closest(key, ManifestLine.model_fields)
        remedy = f"correct {key}" if key in ManifestLine.model_fields else f"use {near}"
        if first["type"] == "missing":
            remedy = f"add {key}"
        elif near is None:
            remedy = f"use the keys {', '.join(ManifestLine.model_fields)}"
        raise DataError(f"{origin}: {key}: {first['msg']}", remedy) from None
    except ValueError as error:
        why = getattr(error, "msg", error)
        raise DataError(f"{origin} is not JSON: {why}", "write one JSON object per line") from error
    return Entry(
        path.parent / line.volume,
        origin,
        line.report,
        _named(line.labels or {}, origin),
        line.spacing,
        line.slope,
        line.intercept,
        line.prepared,
    )


def _named(labels: Mapping[str, float] | Sequence[float], origin: str) -> Mapping[str, float]:
    if isinstance(labels, Mapping):
        found = labels
    elif len(labels) != len(FINDINGS):
        raise DataError(
            f"{origin}: {len(labels)} labels, but there are {len(FINDINGS)} findings",
            "give the labels by name: {'Cardiomegaly': 1}",
        )
    else:
        found = dict(zip(FINDINGS, labels, strict=True))
    bad = next((f"{name} {value}" for name, value in found.items() if value not in (0, 1)), None)
    if bad:
        raise DataError(f"{origin}: a label is 0 or 1, not {bad}", "write 0 or 1")
    return found


def read_labels(path: Path) -> dict[str, dict[str, float]]:
    """Return the findings of a CSV file like CT-RATE's, by the `scan_of` of its VolumeName.

    Raises:
        DataError: naming the file and the line.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text("utf-8-sig"))))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problem = f"the labels {path} cannot be read: {error}"
        raise DataError(problem, "check data.paths.labels") from error
    if not rows or "VolumeName" not in rows[0]:
        problem = f"{path} has no column VolumeName"
        raise DataError(problem, "write the columns VolumeName and one per finding")
    found = {}
    for number, row in enumerate(rows, 2):
        name = row.pop("VolumeName")
        try:
            values = {finding: float(value) for finding, value in row.items()}
        except (TypeError, ValueError) as error:
            problem = f"{path}, line {number}: {error}"
            raise DataError(problem, "write 0 or 1 for each finding") from error
        found[scan_of(name)] = dict(_named(values, f"{path}, line {number}"))
    return found


def _open_shards(folder: Path) -> list[Entry]:
    """List the samples of tar shards from their headers; voxels are read on demand."""
    manifest = _parsed(folder / "manifest.json", (folder / "manifest.json").read_bytes())
    samples: dict[str, dict[str, tuple[Path, int, int]]] = {}
    for shard in sorted(folder.glob("*.tar")):
        try:
            with tarfile.open(shard) as tar:
                for member in tar:
                    stem, _, kind = member.name.rpartition(".")
                    if member.isfile():
                        place = shard, member.offset_data, member.size
                        samples.setdefault(f"{shard.name}:{stem}", {})[kind] = place
        except (OSError, tarfile.TarError) as error:
            problem = f"{shard} is not a readable tar file: {error}"
            raise DataError(problem, "download it again") from error
    total = manifest.get("total_samples")
    if total != len(samples):
        raise DataError(
            f"{folder}/manifest.json says total_samples {total}, its shards hold {len(samples)}",
            "add the missing shards, or correct total_samples",
        )
    shape = tuple(manifest.get("shape", SHARD_SHAPE))
    return [_shard_entry(name, parts, shape) for name, parts in samples.items()]


def _shard_entry(name: str, parts: dict[str, tuple[Path, int, int]], shape: Any) -> Entry:
    lacking = [kind for kind in ("bin", "txt") if kind not in parts]
    if lacking:
        raise DataError(f"{name} has no .{lacking[0]}", "add a .bin and a .txt for every sample")

    def content(kind: str) -> bytes:
        path, offset, size = parts[kind]
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    path, offset, size = parts["bin"]
    needed = 2 * int(np.prod(shape))
    if size != needed:
        raise DataError(
            f"{name}.bin has {size:,} bytes, but float16 of {shape} has {needed:,}",
            "write float16 voxels, height x width x depth",
        )
    labels = np.frombuffer(content("labels"), "<f4").tolist() if "labels" in parts else {}
    study = _parsed(Path(name), content("json")) if "json" in parts else {}
    return Entry(
        path,
        f"{name} {study.get('study_id', '')}".strip(),
        content("txt").decode(errors="replace"),
        _named(labels, name),
        prepared=True,
        offset=offset,
        member=name.partition(":")[2],
        shape=shape,
    )


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        values = parse_json(text)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}", "write the file again") from error
    return values if isinstance(values, dict) else {}


class VolumeData:
    """Samples: "volume" (1, D, H, W) in float16, "report" as text, "labels" (K,).

    A missing label is NaN: it does not mean that the finding is absent.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        shape: Shape,
        spacing: Spacing,
        findings: Sequence[str] = (),
        prepared_as: Shape | None = None,
    ) -> None:
        self.entries = entries
        self.shape = shape
        self.spacing = spacing
        self.findings = tuple(findings)
        self.prepared_as = prepared_as

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = self.entries[index]
        labels = [float(entry.findings.get(name, math.nan)) for name in self.findings]
        voxels = read_voxels(entry)
        volume = prepare(voxels, entry, self.shape, self.spacing, self.prepared_as)
        # float16 resolves half an HU, like the published shards, and halves the transfer.
        return {
            "volume": volume[None].to(torch.float16),
            "report": entry.report,
            "labels": torch.tensor(labels),
        }

    def describe(self, index: int) -> str:
        """Name the file behind a sample."""
        return f"{self.entries[index].path} ({self.entries[index].origin})"

    def fingerprint(self) -> list[str]:
        """Return a text per volume that changes with its file, report, labels or scale."""
        found: list[tuple[str, list[Path | Span]]] = []
        for e in self.entries:
            voxels: Path | Span = e.path
            if e.offset is not None:
                voxels = (e.path, e.offset, e.offset + 2 * int(np.prod(e.shape)))
            facts = (e.path.name, e.report, sorted(e.findings.items()), e.spacing, e.slope)
            found.append((repr((*facts, e.intercept)), [voxels]))
        return file_fingerprints(found)


def read_voxels(entry: Entry) -> NDArray[Any]:
    """Return the stored voxels, depth first.

    Raises:
        DataError: if the file is not a volume of numbers.
    """
    if entry.offset is not None:
        voxels = np.fromfile(entry.path, "<f2", int(np.prod(entry.shape)), offset=entry.offset)
        return voxels.reshape(entry.shape).transpose(2, 0, 1)
    try:
        found = np.load(entry.path, allow_pickle=False)
        if isinstance(found, np.lib.npyio.NpzFile):
            with found:
                name = "volume" if "volume" in found.files else found.files[0]
                found = found[name]
    except (OSError, ValueError, EOFError, IndexError, KeyError) as error:
        raise entry.problem(f"is not a readable .npy or .npz file: {error}") from error
    voxels = np.asarray(found)
    if voxels.dtype.kind not in "iuf":
        raise entry.problem(f"holds {voxels.dtype}, not numbers", "save integers or floats")
    if voxels.ndim != 3 or 0 in voxels.shape:
        raise entry.problem(f"has shape {voxels.shape}", "save depth x height x width")
    return voxels


def prepare(
    voxels: NDArray[Any],
    entry: Entry,
    shape: Shape,
    spacing: Spacing,
    prepared_as: Shape | None = None,
) -> Tensor:
    """Return network input: values in [-1, 1], of the wanted shape.

    A prepared volume has that shape already, or has `prepared_as` and is cropped.

    Raises:
        DataError: if a prepared volume has another shape or range, or a voxel is NaN.
    """
    volume = torch.from_numpy(voxels.astype(np.float32))
    low = float(volume.min())
    high = float(volume.max())
    if not np.isfinite([low, high]).all():
        raise entry.problem("holds voxels that are NaN")
    if entry.prepared:
        if tuple(volume.shape) != (prepared_as or shape):
            raise entry.problem(
                f"is prepared as {tuple(volume.shape)}, the model takes {prepared_as or shape}",
                "change model.image_encoder.depth and image_size",
            )
        if low < -1.001 or high > 1.001:
            raise entry.problem(
                f"is marked as prepared, but its values range from {low:g} to {high:g}",
                "scale them to [-1, 1], or set prepared: false",
            )
        return fit_shape(volume, shape) if prepared_as else volume
    volume = volume * entry.slope + entry.intercept
    if entry.spacing is not None:
        volume = resample(volume, entry.spacing, spacing)
    return fit_shape(volume.clamp(-WINDOW_HU, WINDOW_HU) / WINDOW_HU, shape)


def resample(volume: Tensor, spacing: Sequence[float], wanted: Sequence[float]) -> Tensor:
    """Interpolate to voxels `wanted` millimetres apart."""
    size = [
        max(1, round(n * have / want))
        for n, have, want in zip(volume.shape, spacing, wanted, strict=True)
    ]
    if size == list(volume.shape):
        return volume
    return F.interpolate(volume[None, None], size, mode="trilinear", align_corners=False)[0, 0]


def fit_shape(volume: Tensor, shape: Shape, fill: float = AIR) -> Tensor:
    """Crop or pad each axis around the centre.

    >>> fit_shape(torch.arange(3.0).reshape(3, 1, 1), (5, 1, 1)).flatten().tolist()
    [-1.0, 0.0, 1.0, 2.0, -1.0]
    """
    for axis, wanted in enumerate(shape):
        have = volume.shape[axis]
        if have > wanted:
            volume = volume.narrow(axis, (have - wanted) // 2, wanted)
    padding = []
    for have, wanted in zip(reversed(volume.shape), reversed(shape), strict=True):
        before = (wanted - have) // 2
        padding += [before, wanted - have - before]
    return F.pad(volume, padding, value=fill)


def findings_in(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Return the labelled findings: those of CT-RATE in its order, then others by name."""
    named = {name for entry in entries for name in entry.findings}
    return (*(f for f in FINDINGS if f in named), *sorted(named - set(FINDINGS)))


def spread(num: int, wanted: int | None) -> list[int]:
    """Return `wanted` indices of `num`, evenly spread, or all of them.

    >>> spread(10, 4)
    [0, 2, 5, 7]
    """
    kept = num if wanted is None else min(num, wanted)
    return [index * num // kept for index in range(kept)]
