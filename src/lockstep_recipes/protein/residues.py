"""The twenty residues: letters, side-chain atoms, fragments, exchange scores, frequencies.

Owns: facts of chemistry, and the translation of residues to tokens. Does not own:
files, networks, noise. Residues are numbered in the order of `LETTERS`; 20 is unknown.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lockstep_recipes.tables import placed

LETTERS = "ARNDCQEGHILKMFPSTWYV"
NAMES = [
    "ALA", "ARG", "ASN", "ASP", "CYS", "GLN", "GLU", "GLY", "HIS", "ILE",
    "LEU", "LYS", "MET", "PHE", "PRO", "SER", "THR", "TRP", "TYR", "VAL",
]  # fmt: skip
UNKNOWN = len(LETTERS)
NUMBER = {name: number for number, name in enumerate(NAMES)}

SIDE_CHAINS = {
    "ARG": "CB CG CD NE CZ", "ASN": "CB CG OD1", "ASP": "CB CG OD1", "CYS": "CB SG",
    "GLN": "CB CG CD OE1", "GLU": "CB CG CD OE1", "HIS": "CB CG ND1", "ILE": "CB CG1 CD1",
    "LEU": "CB CG CD1", "LYS": "CB CG CD CE NZ", "MET": "CB CG SD CE", "PHE": "CB CG CD1",
    "PRO": "CB CG CD", "SER": "CB OG", "THR": "CB OG1", "TRP": "CB CG CD1", "TYR": "CB CG CD1",
    "VAL": "CB CG1",
}  # fmt: skip
"""The atoms after N and CA along the chi angles; every four in a row define one."""

PERIODIC = (("ASP", 1), ("GLU", 2), ("PHE", 1), ("TYR", 1))
"""Chi angles (counted from 0) that are symmetric under half a turn."""

FREQUENCIES = (
    0.0825, 0.0553, 0.0406, 0.0546, 0.0138, 0.0393, 0.0672, 0.0707, 0.0227, 0.0591,
    0.0965, 0.0580, 0.0241, 0.0386, 0.0474, 0.0665, 0.0536, 0.0110, 0.0292, 0.0686,
)  # fmt: skip
"""Frequency of each residue in protein databases; their entropy is 2.889 nats."""

# The lower triangle of BLOSUM62 (Henikoff and Henikoff 1992), in the order of LETTERS.
_BLOSUM62 = """
4
-1 5
-2 0 6
-2 -2 1 6
0 -3 -3 -3 9
-1 1 0 0 -3 5
-1 0 0 2 -4 2 5
0 -2 0 -1 -3 -2 -2 6
-2 0 1 -1 -3 0 0 -2 8
-1 -3 -3 -3 -1 -3 -3 -4 -3 4
-1 -2 -3 -4 -1 -2 -3 -4 -3 2 4
-1 2 0 -1 -3 1 1 -2 -1 -3 -2 5
-1 -1 -2 -3 -1 0 -2 -3 -2 1 2 -1 5
-2 -3 -3 -3 -2 -3 -3 -3 -1 0 0 -3 0 6
-1 -2 -2 -1 -3 -1 -1 -2 -2 -3 -3 -1 -2 -4 7
1 -1 1 0 -1 0 0 0 -1 -2 -2 0 -1 -2 -1 4
0 -1 0 -1 -1 -1 -1 -2 -2 -1 -1 -1 -1 -2 -1 1 5
-3 -3 -4 -4 -2 -2 -3 -2 -2 -3 -2 -3 -1 1 -4 -3 -2 11
-2 -2 -2 -3 -2 -1 -2 -3 2 -1 -1 -2 -1 3 -3 -2 -2 2 7
0 -3 -3 -3 -1 -2 -2 -3 -3 3 1 -2 1 -1 -2 -2 0 -3 -1 4
"""

FRAGMENTS = [
    "PAD", "EOS", "METHYL", "METHYLENE", "HYDROXYL", "PHENYL", "AMINE", "CARBOXYL", "AMIDE",
    "GUANIDINE", "IMIDAZOLE", "INDOLE", "THIOL", "BRANCH_CH",
]  # fmt: skip
SLOTS = 5

_PARTS = {
    "m": "METHYLENE", "b": "BRANCH_CH", "Me": "METHYL", "OH": "HYDROXYL", "S": "THIOL",
    "Ph": "PHENYL", "NH3": "AMINE", "COO": "CARBOXYL", "CON": "AMIDE", "Gua": "GUANIDINE",
    "Im": "IMIDAZOLE", "In": "INDOLE",
}  # fmt: skip
_FRAGMENTS_OF = {
    "GLY": "", "ALA": "Me", "SER": "m OH", "CYS": "m S", "VAL": "b Me Me", "THR": "b OH Me",
    "LEU": "m b Me Me", "ILE": "b Me m Me", "MET": "m m S Me", "PHE": "m Ph", "TYR": "m Ph OH",
    "TRP": "m In", "ASN": "m CON", "GLN": "m m CON", "ASP": "m COO", "GLU": "m m COO",
    "LYS": "m m m m NH3", "ARG": "m m m Gua", "HIS": "m Im", "PRO": "m m m",
}  # fmt: skip


def blosum62() -> Tensor:
    """Return the exchange scores (20, 20)."""
    rows = [[int(score) for score in line.split()] for line in _BLOSUM62.split("\n") if line]
    return torch.tensor([[rows[max(i, j)][min(i, j)] for j in range(20)] for i in range(20)])


@cache
def periodic_chis() -> Tensor:
    """Return which chi angles (21, 4) are symmetric under half a turn."""
    table = torch.zeros(UNKNOWN + 1, 4, dtype=torch.bool)
    for name, chi in PERIODIC:
        table[NUMBER[name], chi] = True
    return table


@cache
def turn_costs() -> Tensor:
    """Return the cost of each chi angle as it is, and half a turn away (21, 4, 2)."""
    costs = torch.where(periodic_chis(), 0.0, torch.inf)
    return torch.stack([torch.zeros_like(costs), costs], dim=-1)


def fragments_of(name: str) -> list[str]:
    """Return the five slots of a residue: its fragments, closed by EOS and filled with PAD.

    >>> fragments_of("SER")
    ['METHYLENE', 'HYDROXYL', 'EOS', 'PAD', 'PAD']
    """
    parts = [_PARTS[part] for part in _FRAGMENTS_OF[name].split()]
    return [*parts, "EOS", *["PAD"] * SLOTS][:SLOTS]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a residue: one, or five slots of fragments.

    Every residue has the same number of slots, so that the number gives nothing away.
    """

    table: Tensor
    """The tokens (21, S) of each residue; MASK for an unknown one."""
    num_states: int
    """Tokens 0 to `num_states` - 1 are data; the next one is MASK."""

    @property
    def mask(self) -> int:
        """The MASK token."""
        return self.num_states

    def tokens(self, aatype: Tensor) -> Tensor:
        """Return the tokens (..., S) of residues (...); MASK for an unknown one."""
        return placed(self.table, aatype.device)[aatype]

    def residues(self, logits: Tensor) -> Tensor:
        """Turn logits of tokens (..., S, states) into log-probabilities of residues (..., 20)."""
        scores = logits.log_softmax(dim=-1)
        table = placed(self.table, logits.device)[:UNKNOWN]
        per_slot = [scores[..., slot, table[:, slot]] for slot in range(table.shape[1])]
        return torch.stack(per_slot).sum(dim=0).log_softmax(dim=-1)


def build_vocabulary(kind: str) -> Vocabulary:
    """Return the vocabulary called "residue" or "fragment"."""
    if kind == "residue":
        return Vocabulary(torch.arange(UNKNOWN + 1)[:, None], UNKNOWN)
    rows = [[FRAGMENTS.index(part) for part in fragments_of(name)] for name in NAMES]
    hidden = [len(FRAGMENTS)] * SLOTS
    return Vocabulary(torch.tensor([*rows, hidden]), len(FRAGMENTS))
