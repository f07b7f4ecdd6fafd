"""A small cache of generated chains that a network can learn from.

Owns: building backbones from torsion angles with realistic bond lengths and angles, and
sequences that depend on them: helices, strands and turns each prefer certain residues.
Does not own: reading them back.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.randomness import derive_seed
from lockstep_recipes.made_folder import make_folder
from lockstep_recipes.protein.data import save_chain
from lockstep_recipes.protein.residues import LETTERS, NAMES, SIDE_CHAINS
from lockstep_recipes.protein.structure import Chain, Floats, fill_oxygen

# Of each state: torsions phi and psi in degrees, the residues it prefers, and chi1.
STATES = {
    "helix": (-60.0, -45.0, "AAALLEEKKQRM", -65.0),
    "strand": (-120.0, 130.0, "VVVIIYYFTTWC", 180.0),
    "turn": (55.0, 45.0, "GGGNND", 60.0),
    "loop": (-70.0, 145.0, "PPSSDTHR", -60.0),
}
# Bond lengths in angstrom and angles in degrees at: N, CA, C (Engh and Huber).
BONDS = {"N": (1.329, 116.2), "CA": (1.458, 121.7), "C": (1.525, 111.0)}


def make_chains(num: int, seed: int = 0, min_length: int = 40, max_length: int = 64) -> list[Chain]:
    """Return `num` chains, the same for the same seed."""
    rng = np.random.default_rng(derive_seed(seed, "sample chains", num, min_length, max_length))
    names = list(STATES)
    states = np.zeros((num, max_length), dtype=np.int64)
    for row in states:
        start = 0
        while start < max_length:
            state = names[rng.integers(len(names))]
            length = {"helix": 12, "strand": 7, "turn": 2, "loop": 3}[state] + int(rng.integers(4))
            row[start : start + length] = names.index(state)
            start += length
    table = np.array([STATES[name][:2] for name in names])
    torsions = np.radians(table[states] + rng.normal(0, 6, (num, max_length, 2)))
    coords = build_backbones(torsions[..., 0], torsions[..., 1])
    chains = []
    for index in range(num):
        length = int(rng.integers(min_length, max_length + 1))
        letters = [STATES[names[state]][2] for state in states[index, :length]]
        sequence = "".join(choices[rng.integers(len(choices))] for choices in letters)
        chi, has_chi = _chi_angles(sequence, [names[s] for s in states[index, :length]], rng)
        chains.append(
            Chain(
                id=f"sample_{index:04d}",
                coords=fill_oxygen(coords[index, :length].astype(np.float32)),
                aatype=np.array([LETTERS.index(letter) for letter in sequence], dtype=np.int8),
                chi=chi,
                chi_mask=has_chi,
                residue_index=np.arange(1, length + 1, dtype=np.int32),
            )
        )
    return chains


def _chi_angles(
    sequence: str, states: list[str], rng: np.random.Generator
) -> tuple[Floats, NDArray[np.bool_]]:
    has_chi = np.zeros((len(sequence), 4), dtype=np.bool_)
    chi = np.radians(rng.normal(180, 12, (len(sequence), 4)))
    for row, (letter, state) in enumerate(zip(sequence, states, strict=True)):
        atoms = SIDE_CHAINS.get(NAMES[LETTERS.index(letter)], "").split()
        has_chi[row, : max(0, len(atoms) - 1)] = True
        chi[row, 0] = np.radians(STATES[state][3] + rng.normal(0, 12))
    wrapped = (chi + np.pi) % (2 * np.pi) - np.pi
    return np.where(has_chi, wrapped, 0).astype(np.float32), has_chi


def build_backbones(phi: NDArray[np.float64], psi: NDArray[np.float64]) -> NDArray[np.float64]:
    """Place N, CA and C of many chains (B, L, 4, 3) from their torsions (B, L); O is NaN."""
    num, length = phi.shape
    coords = np.full((num, length, 4, 3), np.nan)
    start = np.array([[-1.0, 1.5, 0.0], [0.0, 0.5, 0.2], [0.0, -0.9, 0.0]])
    last = [np.tile(point, (num, 1)) for point in start]
    for row in range(length):
        before = psi[:, row - 1] if row else np.zeros(num)
        omega = np.full(num, np.pi)
        for atom, torsion in (("N", before), ("CA", omega), ("C", phi[:, row])):
            last = [*last[1:], _place(last, *BONDS[atom], torsion)]
            coords[:, row, ("N", "CA", "C").index(atom)] = last[-1]
    return coords


def _place(
    last: list[NDArray[np.float64]], bond: float, angle: float, torsion: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the position of the atom that follows three others."""
    a, b, c = last
    forward = _unit(c - b)
    normal = _unit(np.cross(b - a, forward))
    sideways = np.cross(normal, forward)
    bend = np.radians(180 - angle)
    x = np.cos(bend)
    y = np.sin(bend) * np.cos(torsion)[:, None]
    z = np.sin(bend) * np.sin(torsion)[:, None]
    return np.asarray(c + bond * (x * forward + y * sideways + z * normal))


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))


def make_cache(folder: Path, num: int = 96, num_held_out: int = 8, seed: int = 0) -> Path:
    """Write a cache folder of `num` chains with its three lists, and return it.

    A folder that holds exactly this set is left alone; ranks may race for it.

    Raises:
        DataError: if the folder holds anything else.
    """

    def fill(aside: Path) -> None:
        names = [save_chain(aside, chain).stem for chain in make_chains(num, seed)]
        ends = {"val": names[:num_held_out], "test": names[num_held_out : 2 * num_held_out]}
        for split, listed in {"train": names[2 * num_held_out :], **ends}.items():
            (aside / f"{split}.txt").write_text("\n".join([*listed, ""]))

    return make_folder(folder, {"chains": num, "held_out": num_held_out, "seed": seed}, fill)
