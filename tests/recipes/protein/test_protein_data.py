"""The cache: what is written is read back, safely; splits, packs and batches."""

import gzip
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.errors import DataError
from lockstep_recipes.protein import preprocess
from lockstep_recipes.protein.data import (
    chains_of,
    collate,
    load_chain,
    open_split,
    read_header,
    read_list,
    save_chain,
)
from lockstep_recipes.protein.sample_data import make_cache, make_chains
from lockstep_recipes.protein.structure import Filter, write_pdb


def open_cache(folder: Path, **changes: object):
    settings = {"predefined": True, "val_split": 0.1, "skip_bad": False, "seed": 0, **changes}
    return open_split(folder, folder, wanted=Filter(), **settings)  # type: ignore[arg-type]


def test_an_entry_is_read_back_as_it_was(tmp_path: Path) -> None:
    chain = make_chains(1, seed=2)[0]
    read = load_chain(save_chain(tmp_path, chain))
    for name in ("coords", "aatype", "chi", "chi_mask", "residue_index"):
        assert np.array_equal(getattr(read, name), getattr(chain, name)), name
    assert (read.id, read.chain_id, read.resolution) == (chain.id, "A", 0.0)
    assert read_header(tmp_path / f"{chain.id}.pt")[0] == len(chain)


def test_loading_an_entry_runs_no_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    for name, write in (
        ("torch", torch.save),
        ("pickle", lambda o, p: p.write_bytes(pickle.dumps(o))),
    ):
        path = tmp_path / f"{name}.pt"
        write({"aatype": Trap()}, path)
        with pytest.raises(DataError, match=f"{name}.pt is not a cache entry"):
            load_chain(path)
    assert not (tmp_path / "sprung").exists()


def test_predefined_lists_decide(cache: Path) -> None:
    split = open_cache(cache)
    assert (len(split.train), len(split.held_out)) == (32, 4)
    assert [split.train.chain(i).id for i in range(32)] == read_list(cache / "train.txt")
    assert np.all(np.diff(split.held_out.lengths) >= 0), "held-out chains are sorted by length"


def test_a_random_split_is_the_same_each_time_and_leaves_the_test_chains_alone(cache: Path) -> None:
    first, again = (open_cache(cache, predefined=False, val_split=0.25) for _ in range(2))
    names = [
        {chains.chain(i).id for i in range(len(chains))} for chains in (first.train, first.held_out)
    ]
    assert names[1] == {again.held_out.chain(i).id for i in range(len(again.held_out))}
    assert not names[0] & names[1]
    assert (len(names[0]), len(names[1])) == (27, 9)
    assert not (names[0] | names[1]) & set(read_list(cache / "test.txt"))


def test_structures_are_read_without_a_cache(tmp_path: Path) -> None:
    for chain in make_chains(5, seed=1):
        write_pdb(chain, tmp_path / f"{chain.id}.pdb")
    split = open_split(
        tmp_path, None, predefined=False, val_split=0.2, wanted=Filter(), skip_bad=False, seed=0
    )
    assert (len(split.train), len(split.held_out)) == (4, 1)
    single = open_split(
        tmp_path / "sample_0000.pdb", None, predefined=False, val_split=0.2, wanted=Filter(),
        skip_bad=False, seed=0,
    )  # fmt: skip
    assert (len(single.train), len(single.held_out)) == (1, 0)


def test_batches_are_padded_with_what_counts_for_nothing() -> None:
    data = chains_of(make_chains(2, 0, 5, 9))
    samples = sorted((data[i] for i in range(2)), key=lambda s: len(s["aatype"]))
    if len(samples[0]["aatype"]) == len(samples[1]["aatype"]):
        samples[0] = {k: v[:4] for k, v in samples[0].items()}
    batch = collate(samples)
    short = len(samples[0]["aatype"])
    assert (batch["segment"][0, short:] == -1).all()
    assert (batch["aatype"][0, short:] == 20).all()
    assert not batch["chi_mask"][0, short:].any()
    assert batch["aatype"].dtype == torch.int64


def test_structures_become_a_cache_with_its_lists(tmp_path: Path) -> None:
    folder = tmp_path / "structures"
    folder.mkdir()
    for chain in make_chains(10, seed=1):
        write_pdb(chain, folder / f"{chain.id}.pdb")
    (folder / "broken.pdb").write_text("no structure")
    argv = ["--pdb_dir", str(folder), "--output_dir", str(tmp_path / "cache")]
    said = preprocess.run(argv)
    assert "10 chains (train 8, val 1, test 1), 1 skipped" in said
    assert "broken.pdb is not a structure" in said
    split = open_cache(tmp_path / "cache")
    assert (len(split.train), len(split.held_out)) == (8, 1)
    with pytest.raises(DataError, match="broken.pdb"):
        preprocess.run([*argv, "--on_bad_sample", "stop"])
    with pytest.raises(DataError, match="holds no structure"):
        preprocess.run([*argv, "--use_mmcif"])


def pack_line(name: str, letters: str = "A" * 50, **changes: object) -> str:
    chain = make_chains(1, 0, 50, 50)[0]
    coords = {atom: chain.coords[:, i].tolist() for i, atom in enumerate(("N", "CA", "C", "O"))}
    coords["N"][7] = [float("nan")] * 3
    coords["O"][9] = [float("nan")] * 3
    numbers = [str(i) for i in range(49)] + ["48A"]
    return json.dumps(
        {"name": name, "seq": letters, "coords": coords, "resnum": numbers, **changes}
    )


def test_a_pack_of_json_lines_becomes_a_cache(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "pack.jsonl.gz", "wt") as file:
        file.write("\n".join(pack_line(f"{n}abc.A") for n in range(1, 5)) + "\n")
    splits = {"train": ["1abc.A", "2abc.A", "9zzz.Z"], "validation": ["3abc.A"], "extra": ["x"]}
    (tmp_path / "splits.json").write_text(json.dumps(splits))
    argv = ["--jsonl", str(tmp_path / "pack.jsonl.gz"), "--splits", str(tmp_path / "splits.json")]
    said = preprocess.run([*argv, "--output_dir", str(tmp_path / "cache")])
    assert "4 chains (train 2, val 1), 0 skipped" in said
    chain = load_chain(tmp_path / "cache" / "1abc.A.pt")
    assert len(chain) == 49, "a residue without N is dropped, one without O is not"
    assert np.isfinite(chain.coords).all()
    assert not chain.chi_mask.any()
    assert len(open_cache(tmp_path / "cache").train) == 2


def test_a_cache_that_is_written_again_says_what_is_left_of_before(tmp_path: Path) -> None:
    """Without lists all of its entries are trained on, those that are no longer wanted too."""
    pack, cache, splits = (tmp_path / name for name in ("pack.jsonl", "cache", "splits.json"))
    argv = ["--jsonl", str(pack), "--output_dir", str(cache)]
    pack.write_text("\n".join(pack_line(f"{n}abc") for n in range(10)))
    preprocess.run(argv)
    (cache / "own.pt").write_text("not ours")
    pack.write_text("\n".join(pack_line(f"{n}abc") for n in range(1, 3)))
    splits.write_text(json.dumps({"train": ["1abc", "2abc"]}))
    said = preprocess.run([*argv, "--splits", str(splits)])
    lists = sorted(path.name for path in cache.glob("*.txt"))
    assert lists == ["train.txt"], "another call's lists are of other chains"
    assert "8 more from an earlier call are still there (0abc.pt" in said
    assert "own.pt" not in said


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (pack_line("b", "A" * 49 + "J"), "pack.jsonl:2: unknown residue 'J'"),
        (pack_line("b", "X" * 50), "pack.jsonl:2: b has 49 unknown residues"),
        (pack_line("b", "A" * 49), "pack.jsonl:2 is not a chain"),
        ("{", "pack.jsonl:2 is not a chain"),
        (pack_line("../b"), "'../b' cannot name a file"),
        (
            json.dumps(
                {"name": "b", "seq": "", "coords": dict.fromkeys(("N", "CA", "C", "O"), [])}
            ),
            ":2",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, word: str) -> None:
    (tmp_path / "pack.jsonl").write_text(f"{pack_line('a')}\n{line}\n")
    argv = ["--jsonl", str(tmp_path / "pack.jsonl"), "--output_dir", str(tmp_path / "cache")]
    with pytest.raises(DataError) as raised:
        preprocess.run([*argv, "--on_bad_sample", "stop"])
    assert word in raised.value.problem


def test_the_real_pack_is_imported(shared_data: Path, tmp_path: Path) -> None:
    with gzip.open(shared_data / "protein_chains.jsonl.gz", "rt") as lines:
        few = "".join(line for line, _ in zip(lines, range(40), strict=False))
    (tmp_path / "few.jsonl").write_text(few)
    splits = shared_data / "protein_splits.json"
    argv = ["--jsonl", str(tmp_path / "few.jsonl"), "--splits", str(splits)]
    assert "40 chains" in preprocess.run([*argv, "--output_dir", str(tmp_path / "cache")])


def test_sample_data_are_left_alone_and_other_files_are_not_overwritten(tmp_path: Path) -> None:
    folder = make_cache(tmp_path / "cache", num=12, num_held_out=2)
    before = sorted(path.stat().st_mtime_ns for path in folder.iterdir())
    assert make_cache(tmp_path / "cache", num=12, num_held_out=2) == folder
    assert sorted(path.stat().st_mtime_ns for path in folder.iterdir()) == before
    with pytest.raises(DataError, match="another sample set"):
        make_cache(tmp_path / "cache", num=13, num_held_out=2)
