"""Chains as samples: the cache folder, structures read directly, splits, batches.

Owns: the format of a cache entry, the split into training and held-out chains,
padding. Does not own: parsing a structure, the order of samples.

    data/cache/
      train.txt, val.txt, test.txt    one id per line; blank lines and # comments are ignored
      <id>.pt                         one chain as safetensors: tensors and plain text, no code
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lockstep.data.fingerprint import file_fingerprints
from lockstep.errors import DataError
from lockstep.randomness import derive_seed
from lockstep.text_input import parse_json
from lockstep_recipes.protein.residues import UNKNOWN
from lockstep_recipes.protein.structure import Chain, Filter, is_structure, read_chains, segments

FORMAT_VERSION = "1"
REMEDY = "write it again with scripts/preprocess_dataset.py, or pass --on_bad_sample skip"
TENSORS = ("coords", "aatype", "chi", "chi_mask", "residue_index")


# --- One entry --------------------------------------------------------------------------------


def entry_path(folder: Path, name: str) -> Path:
    """Return the file of a chain."""
    return folder / f"{name}.pt"


def save_chain(folder: Path, chain: Chain) -> Path:
    """Write one entry of the cache.

    Raises:
        DataError: if the chain's name cannot name a file.
    """
    if not chain.id or Path(chain.id).name != chain.id or chain.id.startswith("."):
        raise DataError(f"{chain.id!r} cannot name a file in {folder}", "rename the chain")
    text = {"id": chain.id, "chain_id": chain.chain_id, "resolution": f"{chain.resolution:g}"}
    tensors = {name: np.ascontiguousarray(getattr(chain, name)) for name in TENSORS}
    path = entry_path(folder, chain.id)
    path.write_bytes(save(tensors, {**text, "format_version": FORMAT_VERSION}))
    return path


def read_header(path: Path) -> tuple[int, dict[str, str]]:
    """Return the length of an entry's chain and its metadata, without reading a tensor.

    Raises:
        DataError: if the file is missing or not an entry; the message names it.
    """
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > 2**20:
                raise ValueError("a torch file or another format")
            header = parse_json(file.read(size))
        return int(header["aatype"]["shape"][0]), header["__metadata__"]
    except FileNotFoundError:
        raise DataError(f"{path} does not exist", REMEDY) from None
    except (OSError, ValueError, KeyError, TypeError, IndexError, struct.error) as error:
        raise DataError(f"{path} is not a cache entry: {error}", REMEDY) from error


def load_chain(path: Path) -> Chain:
    """Read one entry of the cache; nothing in it is ever executed.

    Raises:
        DataError: if the file is not an entry, or holds no chain; the message names it.
    """
    length, text = read_header(path)
    try:
        if text["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format version {text['format_version']}, not {FORMAT_VERSION}")
        tensors = load(path.read_bytes())
        chain = Chain(
            id=text["id"],
            chain_id=text["chain_id"],
            resolution=float(text["resolution"]),
            **{name: tensors[name] for name in TENSORS},
        )
        shapes = {"coords": (4, 3), "aatype": (), "chi": (4,), "chi_mask": (4,)}
        for name, shape in shapes.items():
            if getattr(chain, name).shape != (length, *shape):
                raise ValueError(f"{name} has the shape {getattr(chain, name).shape}")
        if not length or not np.isfinite(chain.coords).all():
            raise ValueError("coordinates are missing")
        if not ((chain.aatype >= 0) & (chain.aatype <= UNKNOWN)).all():
            raise ValueError("residues outside 0 to 20")
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a cache entry: {error}", REMEDY) from error
    if (chain.aatype == UNKNOWN).all():
        raise DataError(f"{path} has only unknown residues", REMEDY)
    return chain


# --- Many chains ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chains:
    """A data set of chains: entries of a cache, or structures already in memory."""

    sources: Sequence[Chain | Path]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> dict[str, Any]:
        chain = self.chain(index)
        return {
            "coords": torch.from_numpy(np.asarray(chain.coords, dtype=np.float32)),
            "segment": torch.from_numpy(segments(chain.coords)),
            "aatype": torch.from_numpy(chain.aatype.astype(np.int64)),
            "chi": torch.from_numpy(np.asarray(chain.chi, dtype=np.float32)),
            "chi_mask": torch.from_numpy(np.asarray(chain.chi_mask, dtype=np.bool_)),
        }

    def chain(self, index: int) -> Chain:
        """Return the chain behind a sample."""
        source = self.sources[index]
        return load_chain(source) if isinstance(source, Path) else source

    def describe(self, index: int) -> str:
        """Name the chain behind a sample."""
        source = self.sources[index]
        return str(source) if isinstance(source, Path) else f"chain {source.id}"

    def fingerprint(self) -> list[str]:
        """Return a text per chain that changes with its file, or its residues and coordinates."""
        return file_fingerprints(
            [
                (source.name, [source])
                if isinstance(source, Path)
                else (f"{source.id} {source.aatype.tobytes()!r} {source.coords.sum():.3f}", [])
                for source in self.sources
            ]
        )

    def by_length(self) -> "Chains":
        """Return the same chains, shortest first."""
        order = np.argsort(self.lengths, kind="stable")
        return Chains([self.sources[i] for i in order], self.lengths[order])


def chains_of(sources: Sequence[Chain | Path]) -> Chains:
    """Build the data set, reading the length of each chain."""
    lengths = [read_header(s)[0] if isinstance(s, Path) else len(s) for s in sources]
    return Chains(list(sources), np.array(lengths, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Split:
    """The training chains, the held-out chains, and why others were skipped."""

    train: Chains
    held_out: Chains
    folder: Path
    is_predefined: bool
    skipped: list[str] = field(default_factory=list)


def open_split(
    pdb_path: Path,
    cache_dir: Path | None,
    *,
    predefined: bool,
    val_split: float,
    wanted: Filter,
    skip_bad: bool,
    seed: int,
) -> Split:
    """Find the chains: in `cache_dir` if it holds entries, else in `pdb_path`.

    Without predefined lists, a share of `val_split` is held out, chosen by name; the
    chains of test.txt are not used.

    Raises:
        DataError: naming the file, and the line where there is one.
    """
    skipped: list[str] = []
    folder = cache_dir if cache_dir and any(cache_dir.glob("*.pt")) else pdb_path
    sources = _sources(folder, wanted, skipped if skip_bad else None)
    if predefined:
        train = read_list(folder / "train.txt", sources, skipped if skip_bad else None)
        held_out = read_list(folder / "val.txt", sources, skipped if skip_bad else None)
        shared = next((name for name in held_out if name in set(train)), None)
        if shared:
            problem = f"{folder / 'val.txt'}: {shared} is in train.txt, too"
            raise DataError(problem, "remove it from one of them")
    else:
        test = folder / "test.txt"
        kept_apart = read_list(test, sources, skipped) if _is_filled(test) else []
        names = sorted(sources.keys() - set(kept_apart))
        names.sort(key=lambda name: derive_seed(seed, "split", name))
        num_held_out = min(max(1, round(val_split * len(names))), len(names) - 1)
        num_held_out = num_held_out if val_split else 0
        held_out = names[:num_held_out]
        train = sorted(names[num_held_out:])

    def open_all(names: list[str]) -> Chains:
        good: list[Chain | Path] = []
        for name in names:
            with _noting_errors(skipped if skip_bad else None):
                chains_of([sources[name]])
                good.append(sources[name])
        return chains_of(good)

    return Split(open_all(train), open_all(held_out).by_length(), folder, predefined, skipped)


@contextmanager
def _noting_errors(skipped: list[str] | None) -> Iterator[None]:
    """Append the error of a bad chain to `skipped` and continue; raise it if that is None."""
    try:
        yield
    except DataError as error:
        if skipped is None:
            raise
        skipped.append(error.problem)


def _sources(folder: Path, wanted: Filter, skipped: list[str] | None) -> dict[str, Chain | Path]:
    """Return the chains of a cache folder, a folder of structures, or one structure, by name."""
    if not folder.exists():
        raise DataError(
            f"the data folder {folder} does not exist",
            "make it with scripts/preprocess_dataset.py, or set LOCKSTEP_REHEARSAL=1 to train on "
            "generated sample data",
        )
    if folder.is_dir():
        entries = sorted(folder.glob("*.pt"))
        if entries:
            return {path.name.removesuffix(".pt"): path for path in entries}
        files = sorted(path for path in folder.rglob("*") if is_structure(path))
        if not files:
            raise DataError(f"{folder} holds no .pt, .pdb or .cif file", "pass another --pdb_path")
    else:
        files = [folder]
    found: dict[str, Chain | Path] = {}
    for path in files:
        with _noting_errors(skipped):
            for chain in read_chains(path, wanted):
                if chain.id in found:
                    problem = f"{path} holds chain {chain.id}, and so does another file"
                    raise DataError(problem, "keep one of the two files")
                found[chain.id] = chain
    return found


def _is_filled(path: Path) -> bool:
    return path.exists() and bool(path.read_text().strip())


def read_list(
    path: Path, known: Mapping[str, object] | None = None, skipped: list[str] | None = None
) -> list[str]:
    """Return the ids that a list file names.

    Raises:
        DataError: if the file is missing or empty, or names a chain twice or an unknown
            one; the message names the file and the line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the split {path} cannot be read: {getattr(error, 'strerror', None) or error}",
            "write it with scripts/preprocess_dataset.py, or leave out --use_predefined_split to "
            "hold out a random share",
        ) from error
    names: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        name = line.split("#")[0].strip()
        if not name:
            continue
        with _noting_errors(skipped):
            if name in names:
                raise DataError(
                    f"{path}:{number}: {name} is in line {names[name]} already", "remove one"
                )
            if known is not None and name not in known:
                raise DataError(f"{path}:{number}: there is no {path.parent / name}.pt", REMEDY)
            names[name] = number
    if not names:
        raise DataError(f"{path} lists no chain", "write one id per line")
    return list(names)


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad chains to the longest, with segment -1, unknown residues and zeros."""
    blank = {"segment": -1, "aatype": UNKNOWN}
    return {
        key: pad_sequence([s[key] for s in samples], True, float(blank.get(key, 0)))
        for key in samples[0]
    }
