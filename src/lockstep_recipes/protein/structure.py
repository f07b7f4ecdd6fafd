"""Protein chains from PDB and mmCIF files.

Owns: which atoms of a file form a chain. Only the first model counts, and a residue's most
occupied alternative location; selenomethionine is read as methionine; a residue without
N, CA or C is dropped; residues other than the twenty are kept as unknown. Does not own:
where a chain is stored, or training on it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import gemmi
import numpy as np
from numpy.typing import NDArray

from lockstep.errors import DataError
from lockstep_recipes.protein.residues import LETTERS, NAMES, NUMBER, SIDE_CHAINS, UNKNOWN

BACKBONE = ("N", "CA", "C", "O")
BREAK_A = 4.5
"""Neighbouring CA atoms further apart than this are not bonded: the chain has a break."""
SUFFIXES = (".pdb", ".ent", ".cif", ".mmcif")

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Chain:
    """One chain of L residues."""

    id: str
    coords: Floats
    """N, CA, C and O (L, 4, 3) in angstrom."""
    aatype: NDArray[np.int8]
    chi: Floats
    """Chi angles (L, 4) in radians, 0 where `chi_mask` is false."""
    chi_mask: NDArray[np.bool_]
    residue_index: NDArray[np.int32]
    chain_id: str = "A"
    resolution: float = 0.0
    """In angstrom; 0 where the file does not say."""

    def __len__(self) -> int:
        return len(self.aatype)

    @property
    def sequence(self) -> str:
        """The residues as letters."""
        return "".join((LETTERS + "X")[number] for number in self.aatype)


@dataclass(frozen=True, slots=True)
class Filter:
    """Which chains to train on."""

    min_length: int = 40
    max_length: int = 2048
    max_resolution_a: float = 2.5
    max_unknown_share: float = 0.5

    def reason_against(self, chain: Chain) -> str | None:
        """Return why a chain is rejected, or None if it is not."""
        if not len(chain):
            return "has no residue with N, CA and C"
        if not self.min_length <= len(chain) <= self.max_length:
            return f"has {len(chain)} residues, not {self.min_length} to {self.max_length}"
        if chain.resolution > self.max_resolution_a:
            return f"has a resolution of {chain.resolution:g} A, worse than {self.max_resolution_a}"
        unknown = chain.aatype == UNKNOWN
        if unknown.mean() > self.max_unknown_share:
            first = f"the first is residue {chain.residue_index[unknown][0]}"
            return f"has {unknown.sum()} unknown residues among {len(chain)}, {first}"
        return None


ANY = Filter(min_length=1, max_length=10**9, max_resolution_a=1e9, max_unknown_share=1)


def is_structure(path: Path) -> bool:
    """Return whether a file has the name of a structure."""
    return path.name.lower().removesuffix(".gz").endswith(SUFFIXES)


def read_chains(path: Path, wanted: Filter = ANY) -> list[Chain]:
    """Return the protein chains of a file that pass the filter `wanted`.

    Raises:
        DataError: if the file is not a structure, or none of its chains passes.
    """
    remedy = "correct or remove it, or pass --on_bad_sample skip"
    try:
        structure = gemmi.read_structure(str(path))
    except (ValueError, RuntimeError, OSError, UnicodeDecodeError) as error:
        cause = " ".join(str(error).removeprefix(str(path)).split())
        raise DataError(f"{path} is not a structure: {cause}", remedy) from error
    model: Iterable[gemmi.Chain] = structure[0] if len(structure) else []
    if not any(len(chain) for chain in model):
        raise DataError(f"{path} is not a structure: it has no ATOM record", remedy)
    structure.setup_entities()
    resolution = float(structure.resolution or 0.0)
    found = [_read_chain(chain, resolution) for chain in model]
    found = [chain for chain in found if len(chain)]
    if not found:
        raise DataError(f"{path} has no residue with N, CA and C", remedy)
    stem = path.name.removesuffix(".gz").rsplit(".", 1)[0]
    if len(found) == 1:
        chains = [replace(found[0], id=stem)]
    else:
        chains = [replace(chain, id=f"{stem}_{chain.chain_id}") for chain in found]
    reasons = [wanted.reason_against(chain) for chain in chains]
    kept = [chain for chain, reason in zip(chains, reasons, strict=True) if reason is None]
    if not kept:
        raise DataError(f"{path}: chain {chains[0].chain_id} {reasons[0]}", remedy)
    return kept


def _read_chain(chain: gemmi.Chain, resolution: float) -> Chain:
    polymer = chain.get_polymer()
    residues = [_atoms(group) for group in _by_number(polymer if len(polymer) else chain)]
    residues = [found for found in residues if {"N", "CA", "C"} <= found[1].keys()]
    numbers = np.array([residue.seqid.num for residue, _ in residues], dtype=np.int32)
    names = ["MET" if residue.name == "MSE" else residue.name for residue, _ in residues]
    blank = [np.nan] * 3
    coords = [[atoms.get(name, blank) for name in BACKBONE] for _, atoms in residues]
    chi = np.full((len(residues), 4), np.nan, dtype=np.float32)
    for row, (name, (_, atoms)) in enumerate(zip(names, residues, strict=True)):
        path = ["N", "CA", *SIDE_CHAINS.get(name, "").split()]
        for number in range(len(path) - 3):
            four = [gemmi.Position(*atoms[a]) for a in path[number : number + 4] if a in atoms]
            if len(four) == 4:
                chi[row, number] = gemmi.calculate_dihedral(*four)
    return Chain(
        id=chain.name,
        coords=fill_oxygen(np.array(coords, dtype=np.float32).reshape(-1, 4, 3)),
        aatype=np.array([NUMBER.get(name, UNKNOWN) for name in names], dtype=np.int8),
        chi=np.nan_to_num(chi),
        chi_mask=np.isfinite(chi),
        residue_index=numbers,
        chain_id=chain.name,
        resolution=resolution,
    )


def _by_number(residues: object) -> Iterator[list[gemmi.Residue]]:
    """Group the alternatives of one residue: they share a number and an insertion code."""
    for _, group in groupby(residues, key=lambda residue: str(residue.seqid)):  # type: ignore[call-overload]
        yield list(group)


def _atoms(group: list[gemmi.Residue]) -> tuple[gemmi.Residue, dict[str, list[float]]]:
    """Return the most occupied alternative of a residue and its atoms by name."""

    def occupancy(residue: gemmi.Residue) -> float:
        return max((float(atom.occ) for atom in residue), default=0.0)

    residue = max(group, key=occupancy)
    totals: dict[str, float] = {}
    for atom in residue:
        if atom.altloc != "\0":
            totals[atom.altloc] = totals.get(atom.altloc, 0.0) + atom.occ
    chosen = max(sorted(totals), key=lambda letter: totals[letter], default="\0")
    atoms: dict[str, gemmi.Atom] = {}
    for atom in residue:
        name = "SD" if residue.name == "MSE" and atom.name == "SE" else atom.name
        rank = (atom.altloc in ("\0", chosen), atom.occ)
        held = atoms.get(name)
        if held is None or rank > (held.altloc in ("\0", chosen), held.occ):
            atoms[name] = atom
    return residue, {name: atom.pos.tolist() for name, atom in atoms.items()}


def fill_oxygen(coords: Floats) -> Floats:
    """Add a missing O in the peptide plane: on the far side of C from CA and the next N."""
    if not len(coords):
        return coords
    n, ca, c = coords[:, 0], coords[:, 1], coords[:, 2]
    away_from = np.concatenate([n[1:], n[-1:]])  # at the end of a chain any plane will do
    direction = _unit(_unit(c - ca) + _unit(c - away_from))
    missing = ~np.isfinite(coords[:, 3]).all(axis=-1)
    coords[missing, 3] = (c + 1.23 * direction)[missing]
    return coords


def _unit(vectors: Floats) -> Floats:
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(length, 1e-6), dtype=np.float32)


def segments(coords: Floats) -> NDArray[np.int64]:
    """Number the unbroken stretches of a chain (L): a break is where CA atoms lie far apart."""
    ca = coords[:, 1]
    far = np.linalg.norm(ca[1:] - ca[:-1], axis=-1) > BREAK_A
    return np.concatenate([[0], np.cumsum(far)]).astype(np.int64)[: len(coords)]


def write_pdb(chain: Chain, path: Path) -> None:
    """Write the backbone of a chain as PDB text."""
    lines: list[str] = []
    for row, number in enumerate(chain.residue_index):
        name = NAMES[chain.aatype[row]] if chain.aatype[row] < UNKNOWN else "UNK"
        for atom, (x, y, z) in zip(BACKBONE, chain.coords[row], strict=True):
            place = f"{chain.chain_id:1.1}{number:4d}    {x:8.3f}{y:8.3f}{z:8.3f}"
            whose = f"{len(lines) + 1:5d}  {atom:<3} {name}"
            lines.append(f"ATOM  {whose} {place}  1.00  0.00           {atom[0]}")
    path.write_text("\n".join([*lines, "END", ""]))
