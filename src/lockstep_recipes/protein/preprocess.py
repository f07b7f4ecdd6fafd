"""Turn structures, or a JSON-lines pack, into a cache folder with its split lists.

Owns: the command `scripts/preprocess_dataset.py`. Does not own: parsing a structure,
the format of an entry. Lists are written last, so a folder that has them is complete.
"""

import gzip
import random
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import ConfigError, DataError
from lockstep.text_input import parse_json
from lockstep_recipes.command import Flags
from lockstep_recipes.protein.data import read_header, save_chain
from lockstep_recipes.protein.residues import LETTERS
from lockstep_recipes.protein.structure import (
    BACKBONE,
    Chain,
    Filter,
    fill_oxygen,
    is_structure,
    read_chains,
)

SPLIT_FILES = {"train": "train", "validation": "val", "valid": "val", "val": "val", "test": "test"}


def flags() -> Flags:
    """Return the parser."""
    parser = Flags(
        "protein",
        "Write a cache folder: one <id>.pt per chain, and train.txt, val.txt, test.txt.",
        "python scripts/preprocess_dataset.py --pdb_dir structures --output_dir data/cache",
    )
    add = parser.add_argument
    add("--pdb_dir", help="folder of .pdb, .ent, .cif files, also .gz")
    add("--jsonl", help="a file with one JSON chain per line, instead of --pdb_dir")
    add("--splits", help="JSON file of chain names, listed under train, validation and test")
    add("--output_dir", default="data/cache")
    add("--num_workers", type=int, default=1)
    add("--train_ratio", type=float, default=0.8)
    add("--val_ratio", type=float, default=0.1)
    add("--test_ratio", type=float, default=0.1)
    add("--use_mmcif", action="store_true", help="read .cif files only")
    add("--min_length", type=int, default=40)
    add("--max_length", type=int, default=2048)
    add("--max_resolution", type=float, default=2.5, help="in angstrom")
    add("--on_bad_sample", choices=["stop", "skip"], default="skip")
    add("--seed", type=int, default=42)
    return parser


def run(argv: Sequence[str]) -> str:
    """Write the cache that `argv` describes and return a summary.

    Raises:
        LockstepError: if the request or, with `--on_bad_sample stop`, a file cannot be used.
    """
    args = flags().read(argv)
    if bool(args.pdb_dir) == bool(args.jsonl):
        problem = "exactly one of --pdb_dir and --jsonl is needed"
        raise ConfigError(problem, "pass --pdb_dir structures")
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = Filter(args.min_length, args.max_length, args.max_resolution)
    skipped: list[str] = []
    names: list[str] = []
    found = (
        read_jsonl(Path(args.jsonl), wanted)
        if args.jsonl
        else read_folder(Path(args.pdb_dir), wanted, args.use_mmcif, args.num_workers)
    )
    for item in found:
        if isinstance(item, DataError):
            if args.on_bad_sample == "stop":
                raise item
            skipped.append(item.problem)
        else:
            names.append(save_chain(folder, item).name.removesuffix(".pt"))
    if not names:
        problem = f"no chain could be used: {skipped[0] if skipped else 'there is none'}"
        raise DataError(problem, "correct the structures, or use others")
    twice = len(names) - len(set(names))
    if twice:
        raise DataError(f"{twice} chains share their name with another", "rename the files")
    ratios = (args.train_ratio, args.val_ratio, args.test_ratio)
    lists = (
        read_splits(Path(args.splits), names) if args.splits else shuffle(names, ratios, args.seed)
    )
    for split in {*SPLIT_FILES.values()} - {*lists}:  # left by an earlier call with other chains
        (folder / f"{split}.txt").unlink(missing_ok=True)
    for split, listed in lists.items():
        (folder / f"{split}.txt").write_text("\n".join([*listed, ""]))
    counts = ", ".join(f"{split} {len(listed)}" for split, listed in lists.items())
    lines = [f"{folder}: {len(names)} chains ({counts}), {len(skipped)} skipped"]
    others = others_in(folder, set(names))
    if others:
        lines.append(
            f"  {len(others)} more from an earlier call are still there ({', '.join(others[:3])}): "
            "a run without lists reads them too; try: use another --output_dir, or remove them"
        )
    return "\n".join([*lines, *(f"  skipped: {reason}" for reason in skipped[:5])])


def others_in(folder: Path, names: Collection[str]) -> list[str]:
    """Return entries that this call did not write: their structures are gone or were skipped."""
    others = []
    for path in sorted(folder.glob("*.pt")):
        if path.name.removesuffix(".pt") not in names:
            with suppress(DataError):  # other files are not entries
                read_header(path)
                others.append(path.name)
    return others


def shuffle(
    names: list[str], ratios: tuple[float, float, float], seed: int
) -> dict[str, list[str]]:
    """Split the chains at random into train, val and test."""
    if min(ratios) < 0 or abs(sum(ratios) - 1) > 1e-6:
        raise ConfigError(f"the ratios {ratios} do not add up to 1", "pass 0.8, 0.1 and 0.1")
    dealt = sorted(names)
    random.Random(seed).shuffle(dealt)
    first = round(ratios[0] * len(dealt))
    second = first + round(ratios[1] * len(dealt))
    return {"train": dealt[:first], "val": dealt[first:second], "test": dealt[second:]}


def read_splits(path: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the lists of a JSON file, without names that no chain has.

    Raises:
        DataError: if the file has another format, or lists no training chain.
    """
    try:
        with _opened(path) as file:
            stored: Any = parse_json(file.read())
        lists = {SPLIT_FILES[k]: v for k, v in stored.items() if k in SPLIT_FILES}
        known = set(names)
        kept = {split: [name for name in v if name in known] for split, v in lists.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        problem = f"{path} is not a JSON file of lists: {error}"
        raise DataError(problem, "pass another --splits") from error
    if not kept.get("train"):
        problem = f"{path} lists no chain to train on"
        raise DataError(problem, "pass the lists that belong to --jsonl")
    return kept


def read_folder(
    folder: Path, wanted: Filter, only_mmcif: bool, num_workers: int
) -> Iterator[Chain | DataError]:
    """Yield the chains of every structure in a folder, or the error of a file that is skipped."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder of structures", "pass another --pdb_dir")
    files = [path for path in sorted(folder.rglob("*")) if is_structure(path)]
    if only_mmcif:
        files = [path for path in files if ".cif" in path.name or ".mmcif" in path.name]
    if not files:
        raise DataError(f"{folder} holds no structure", "put .pdb, .ent or .cif files there")
    read = partial(_read_file, wanted=wanted)
    if num_workers <= 1:
        for path in files:
            yield from read(path)
        return
    with ProcessPoolExecutor(num_workers, get_context("spawn")) as pool:
        for chains in pool.map(read, files, chunksize=16):
            yield from chains


def _read_file(path: Path, wanted: Filter) -> list[Chain | DataError]:
    try:
        return [*read_chains(path, wanted)]
    except DataError as error:
        return [error]


def read_jsonl(path: Path, wanted: Filter) -> Iterator[Chain | DataError]:
    """Yield the chains of a JSON-lines file, or the error of a line that is skipped."""
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _read_line(line, f"{path}:{number}", wanted)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", "pass another --jsonl") from error


def _read_line(line: str, where: str, wanted: Filter) -> Chain | DataError:
    remedy = "correct or remove the line, or pass --on_bad_sample skip"
    try:
        entry = parse_json(line)
        letters = np.array(list(entry["seq"]))
        atoms = [np.array(entry["coords"][atom], dtype=np.float32) for atom in BACKBONE]
        coords = np.stack(atoms, axis=1).reshape(len(letters), 4, 3)
        strange = sorted(set(entry["seq"]) - set(LETTERS + "X"))
        if strange:
            return DataError(f"{where}: unknown residue {strange[0]!r}", remedy)
        aatype = np.array([(LETTERS + "X").index(letter) for letter in letters], dtype=np.int8)
        given = entry.get("resnum") or range(1, len(letters) + 1)
        numbers = np.array([int(str(n).rstrip(_INSERTIONS)) for n in given], dtype=np.int32)
        whole = np.isfinite(coords[:, :3]).all(axis=(1, 2))
        chain = Chain(
            id=str(entry["name"]),
            coords=fill_oxygen(coords[whole]),
            aatype=aatype[whole],
            chi=np.zeros((int(whole.sum()), 4), dtype=np.float32),
            chi_mask=np.zeros((int(whole.sum()), 4), dtype=np.bool_),
            residue_index=numbers[whole],
        )
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        cause = f"{type(error).__name__}: {error}"
        return DataError(f"{where} is not a chain with name, seq and coords ({cause})", remedy)
    reason = wanted.reason_against(chain)
    return DataError(f"{where}: {chain.id} {reason}", remedy) if reason else chain


_INSERTIONS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def _opened(path: Path) -> Any:
    return gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
