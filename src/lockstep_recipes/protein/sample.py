"""Design sequences for a backbone: `python -m lockstep_recipes.protein.sample`.

Owns: the reverse process from noise to a sequence, and the command that writes designs as
FASTA. Does not own: a single reverse step (`diffusion.py`), training.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.checkpoint import CheckpointStore, load_model_state
from lockstep.errors import ConfigError, DataError
from lockstep.randomness import keyed_generator
from lockstep_recipes.command import Flags, finish
from lockstep_recipes.protein.diffusion import Absorbing, Kernel
from lockstep_recipes.protein.evaluate import bin_centres
from lockstep_recipes.protein.model import ProteinNet
from lockstep_recipes.protein.residues import LETTERS, UNKNOWN
from lockstep_recipes.protein.structure import Chain, is_structure, read_chains, segments


@dataclass(frozen=True, slots=True)
class Design:
    """One sequence for one chain."""

    aatype: NDArray[np.int64]
    chi: NDArray[np.float32]
    """Chi angles (L, 4) in radians, as predicted when the residue was drawn."""
    recovery: float
    """The share of known residues that match the chain; NaN if none is known."""

    @property
    def sequence(self) -> str:
        """The residues as letters."""
        return "".join(LETTERS[number] for number in self.aatype)


@torch.no_grad()
def design(
    model: ProteinNet,
    process: Absorbing | Kernel,
    chain: Chain,
    num_steps: int,
    sampler: str,
    seed: int,
    number: int = 0,
) -> Design:
    """Sample a sequence for one backbone, from the seed, the chain's name and `number`."""
    device = model.first_node.device
    generator = keyed_generator(torch.device("cpu"), seed, "design", chain.id, number)
    coords = torch.from_numpy(chain.coords)[None].to(device)
    segment = torch.from_numpy(segments(chain.coords))[None].to(device)
    backbone = model.encode(coords, segment)
    vocabulary = process.vocabulary
    blank = torch.zeros(1, len(chain), vocabulary.table.shape[1], dtype=torch.long)
    x = process.noise(blank, generator)
    chi = torch.zeros(1, len(chain), 4)
    for t, s in walk(process.num_steps, num_steps):
        level = torch.full((1,), t / process.num_steps, device=device)
        logits, chi_logits = (
            out.float().cpu() for out in model.decode(backbone, x.to(device), level)
        )
        before = x
        x = process.step_back(x, logits, t, s, generator, adaptive=sampler == "adaptive")
        drawn = (x != before).any(dim=-1) if isinstance(process, Absorbing) else x[..., 0] >= 0
        chi = torch.where(drawn[..., None], bin_centres(chi_logits.argmax(dim=-1)), chi)
    aatype = _read_tokens(x[0], vocabulary.table[:UNKNOWN]).numpy()
    known = chain.aatype != UNKNOWN
    recovery = float((aatype == chain.aatype)[known].mean()) if known.any() else float("nan")
    return Design(aatype, chi[0].float().numpy(), recovery)


def walk(total: int, num_steps: int) -> list[tuple[int, int]]:
    """Return the steps (t, s), t > s, that lead from time `total` to 0.

    >>> walk(1000, 3)
    [(1000, 667), (667, 333), (333, 0)]
    """
    stops = [round(total * (1 - k / num_steps)) for k in range(num_steps + 1)]
    return [(t, s) for t, s in zip(stops[:-1], stops[1:], strict=True) if t > s]


def _read_tokens(tokens: Tensor, table: Tensor) -> Tensor:
    return (tokens[:, None] == table).all(dim=-1).long().argmax(dim=-1)


def fasta(chain: Chain, made: Design, number: int = 0) -> str:
    """Return one entry of a FASTA file, with 80 letters per line."""
    lines = [made.sequence[i : i + 80] for i in range(0, len(made.sequence), 80)]
    return "\n".join([f">{chain.id} design={number} recovery={made.recovery:.4f}", *lines, ""])


def flags() -> Flags:
    """Return the parser of the sampling command."""
    parser = Flags(
        "protein",
        "Design sequences for backbones with a trained network, and write them as FASTA.",
        "python -m lockstep_recipes.protein.sample --checkpoint checkpoints/best_model.pt "
        "--pdb_path 1abc.pdb --output designs.fasta",
    )
    add = parser.add_argument
    add("--checkpoint", required=True, help="a checkpoint: checkpoints/best_model.pt")
    add("--pdb_path", required=True, help="a structure, a folder of them, or a cache folder")
    add("--output", required=True, help="the FASTA file to write")
    add("--num_designs", type=int, default=1, help="sequences for each chain")
    add("--sample_steps", type=int, default=10)
    add("--sampler", choices=["plain", "adaptive"], default="adaptive")
    add("--weights", choices=["average", "model"], default="average", help="weights to sample with")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--seed", type=int, default=0)
    return parser


def load_checkpoint(path: str, weights: str) -> tuple[ProteinNet, Absorbing | Kernel]:
    """Return the network of a checkpoint, and the process it was trained with.

    Raises:
        CheckpointError: if the checkpoint is missing, damaged, or of another recipe.
    """
    from lockstep_recipes.protein.task import ProteinConfig

    checkpoint = CheckpointStore(Path(path).parent, recipe="protein").open(Path(path).name)
    config = ProteinConfig(**checkpoint.load("task")["config"])
    model = config.build_network()
    state = checkpoint.load("model")
    averages = [part for part in checkpoint.parts if part.startswith("average_")]
    if weights == "average" and averages:
        state |= checkpoint.load(averages[0])
    load_model_state(model, state)
    return model.eval(), config.process


def run(argv: Sequence[str]) -> str:
    """Write the designs that `argv` describes and return a summary.

    Raises:
        LockstepError: if the request, the checkpoint or a structure cannot be used.
    """
    args = flags().read(argv)
    if args.num_designs < 1 or args.sample_steps < 1:
        raise ConfigError("--num_designs and --sample_steps must be 1 or more", "pass 1 or more")
    model, process = load_checkpoint(args.checkpoint, args.weights)
    model.to(args.device)
    chains = find_chains(Path(args.pdb_path))
    entries = []
    recoveries = []
    for chain in chains:
        for number in range(args.num_designs):
            made = design(model, process, chain, args.sample_steps, args.sampler, args.seed, number)
            entries.append(fasta(chain, made, number))
            recoveries.append(made.recovery)
    try:
        Path(args.output).write_text("".join(entries))
    except OSError as error:
        problem = f"cannot write {args.output}: {error.strerror}"
        raise DataError(problem, "pass another --output") from error
    median = float(np.median(recoveries))
    return f"{args.output}: {len(entries)} designs of {len(chains)} chains, recovery {median:.3f}"


def find_chains(path: Path) -> list[Chain]:
    """Return the chains of a structure, a folder of structures, or a cache folder.

    Raises:
        DataError: naming the file that cannot be read.
    """
    from lockstep_recipes.protein.data import load_chain

    if not path.exists():
        raise DataError(f"{path} does not exist", "pass another --pdb_path")
    files = [path] if path.is_file() else sorted(path.iterdir())
    entries = [load_chain(file) for file in files if file.suffix == ".pt"]
    entries += [
        chain
        for file in files
        if file.suffix != ".pt" and (path.is_file() or is_structure(file))
        for chain in read_chains(file)
    ]
    if not entries:
        raise DataError(f"{path} holds no .pt, .pdb or .cif file", "pass another --pdb_path")
    return entries


if __name__ == "__main__":
    finish(run, sys.argv[1:])
