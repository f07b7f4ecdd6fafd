"""Bad input: one clear line that names the file and the line, exit code 2, no traceback."""

import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from lockstep import read_events
from lockstep_recipes.command import answer
from lockstep_recipes.protein import preprocess, sample
from lockstep_recipes.protein.flags import build
from lockstep_recipes.protein.residues import UNKNOWN
from lockstep_recipes.protein.sample_data import make_cache, make_chains
from lockstep_recipes.protein.structure import write_pdb

SMALL = shlex.split(
    "--hidden_dim 8 --num_layers 1 --num_neighbors 4 --batch_size 2 --epochs 1 --max_steps 2 "
    "--ema_decays 0.9 --num_designs 0 --set sinks.curves=false --output_dir run"
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "cache", num=12, num_held_out=2)


def check(ended, *words: str) -> None:
    assert ended.code == 2, ended.err + ended.out
    assert "Traceback" not in ended.err + ended.out
    assert ended.err.count("lockstep: ") == 1, ended.err
    assert "\n  try: " in ended.err
    for word in words:
        assert word in ended.err, f"{word!r} not in:\n{ended.err}"


def run(command, folder: Path, *argv: str, **more: object):
    return command(build, [*SMALL, "--pdb_path", str(folder), *argv], **more)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--learning_rat", "1"], ["--learning_rat", "--learning_rate"]),
        (["--transition", "gaussian"], ["--transition", "gaussian"]),
        (["--mask_ratio", "2"], ["mask_ratio", "2"]),
        (["--transition", "uniform"], ["--use_discrete_diffusion"]),
        (["--use_discrete_diffusion", "--transition=blosum", "--vocab=fragment"], ["fragments"]),
        (["--save_dir", "a"], ["--save_dir and --output_dir"]),
        (["--batch_size", "400"], ["400", "samples"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_bad_flag_is_named_with_what_to_try(command, data, argv, words) -> None:
    check(run(command, data, *argv), *words)


def test_what_is_not_a_structure_is_named(command, tmp_path) -> None:
    folder = tmp_path / "structures"
    folder.mkdir()
    for chain in make_chains(4):
        write_pdb(chain, folder / f"{chain.id}.pdb")
    empty = "HETATM    1  O   HOH A   1       1.000   1.000   1.000  1.00  0.00           O\n"
    nothing_known = replace(
        make_chains(1)[0], aatype=np.full_like(make_chains(1)[0].aatype, UNKNOWN)
    )
    write_pdb(nothing_known, folder / "unknown.pdb")
    unknown = (folder / "unknown.pdb").read_text()
    (folder / "unknown.pdb").unlink()
    bad = {
        "hello.pdb": ("hello\n", "no ATOM record"),
        "cut.pdb": ("ATOM      1  N   ALA A   1      xx.000\n", "line 1"),
        "hello.cif": ("hello\n", "hello.cif is not a structure: :1:0"),
        "empty.pdb": ("", "no ATOM record"),
        "water.pdb": (empty, "no residue with N, CA and C"),
        "short.pdb": (
            "\n".join((folder / "sample_0001.pdb").read_text().split("\n")[:80]),
            "20 residues",
        ),
        "unknown.pdb": (unknown, "unknown residues"),
    }
    for name, (text, word) in bad.items():
        (folder / name).write_text(text)
        check(run(command, folder, "--val_split", "0"), name, word)
        (folder / name).unlink()


def test_a_list_is_named_with_its_line(command, data) -> None:
    predefined = ["--use_predefined_split"]
    assert run(command, data, *predefined).code == 0
    train, val = data / "train.txt", data / "val.txt"
    listed = train.read_text()
    train.write_text(listed + "nowhere\n")
    check(run(command, data, *predefined), "train.txt:9: there is no", "nowhere.pt")
    train.write_text(listed + listed.splitlines()[0])
    check(run(command, data, *predefined), "train.txt:9:", "is in line 1 already")
    train.write_text(listed + val.read_text())
    check(run(command, data, *predefined), "val.txt", "train.txt, too")
    train.write_text("# nothing\n\n")
    check(run(command, data, *predefined), "train.txt lists no chain")
    train.unlink()
    check(run(command, data, *predefined, ranks=2), "the split", "train.txt cannot be read")
    train.write_text(listed)
    val.unlink()
    check(run(command, data, *predefined), "val.txt cannot be read")


def test_a_folder_without_chains_is_named(command, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    check(run(command, tmp_path / "empty"), "empty holds no .pt, .pdb or .cif")
    check(run(command, tmp_path / "missing"), "missing does not exist")


def damage(data: Path) -> tuple[Path, Path]:
    """Cut one entry in its header, and spoil the coordinates of another."""
    cut, spoilt = sorted(data.glob("*.pt"))[6:8]
    cut.write_bytes(cut.read_bytes()[:40])
    content = bytearray(spoilt.read_bytes())
    at = content.index(b"__metadata__")
    content[-1000:] = b"\xff" * 1000
    assert at
    spoilt.write_bytes(content)
    return cut, spoilt


def test_a_damaged_entry_stops_all_ranks_with_its_name(command, data) -> None:
    cut, spoilt = damage(data)
    check(run(command, data, "--use_predefined_split", ranks=2), cut.name, "not a cache entry")
    for name in ("train.txt", "val.txt"):
        (data / name).write_text((data / name).read_text().replace(cut.stem + "\n", ""))
    ended = run(
        command, data, "--use_predefined_split", "--max_steps", "9", "--epochs", "9", ranks=2
    )
    check(ended, spoilt.name, "not a cache entry")


def test_bad_chains_are_skipped_alike_on_any_number_of_ranks(command, data, tmp_path) -> None:
    cut, spoilt = damage(data)
    with (data / "train.txt").open("a") as file:
        file.write("nowhere\n")
    argv = [
        "--use_predefined_split",
        "--on_bad_sample",
        "skip",
        "--max_steps",
        "4",
        "--epochs",
        "9",
    ]
    argv += ["--set", "batch.global_batch_size=4", "--batch_size", "2"]
    weights = []
    for ranks in (1, 2):
        ended = run(command, data, *argv, "--output_dir", f"run{ranks}", ranks=ranks)
        assert ended.code == 0, ended.err
        assert "skipped 2, the first because" in ended.out
        assert "nowhere" in ended.out
        folder = tmp_path / f"run{ranks}"
        events = [event for rank in range(ranks) for event in read_events(folder, rank)]
        skipped = {
            e["reason"].split(" is not")[0] for e in events if e["event"] == "sample_skipped"
        }
        assert skipped == {str(spoilt)}
        weights.append(load_file(folder / "checkpoints" / "step_00000004" / "model.safetensors"))
    assert cut.name not in "".join(skipped)
    for name, weight in weights[0].items():
        assert (weights[1][name] - weight).abs().max() < 1e-5, name


@pytest.mark.parametrize(
    ("action", "argv", "word"),
    [
        (sample.run, "--checkpoint nowhere/best_model.pt --pdb_path x --output y", "best_model.pt"),
        (sample.run, "--checkpoint x", "required"),
        (preprocess.run, "--output_dir x", "exactly one of --pdb_dir and --jsonl"),
        (preprocess.run, "--pdb_dir nowhere --output_dir x", "nowhere is not a folder"),
        (preprocess.run, "--jsonl nowhere.jsonl --output_dir x", "nowhere.jsonl cannot be read"),
    ],
)
def test_the_other_commands_say_it_as_well(
    action, argv, word, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert answer(action, shlex.split(argv)) == 2
    said = capsys.readouterr().err
    assert word in said
    assert said.startswith("lockstep: ")


def test_sampling_writes_designs_for_every_chain(command, data, tmp_path) -> None:
    assert run(command, data, "--use_discrete_diffusion").code == 0
    structures = tmp_path / "structures"
    structures.mkdir()
    chains = make_chains(2, seed=7)
    for chain in chains:
        write_pdb(chain, structures / f"{chain.id}.pdb")
    argv = ["--checkpoint", str(tmp_path / "run" / "checkpoints" / "best_model.pt")]
    argv += ["--pdb_path", str(structures), "--sample_steps", "3", "--num_designs", "2", "--output"]
    texts = []
    for name in ("a.fasta", "b.fasta"):
        said = sample.run([*argv, str(tmp_path / name)])
        assert "4 designs of 2 chains" in said
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1], "a design repeats for its seed"
    entries = [entry.split("\n", 1) for entry in texts[0].split(">")[1:]]
    assert [head.split()[0] for head, _ in entries] == ["sample_0000"] * 2 + ["sample_0001"] * 2
    for (_, body), chain in zip(entries[::2], chains, strict=True):
        letters = body.replace("\n", "")
        assert len(letters) == len(chain)
        assert set(letters) <= set("ARNDCQEGHILKMFPSTWYV")
    one = [*argv[:3], str(structures / "sample_0001.pdb"), "--output", str(tmp_path / "c.fasta")]
    assert "1 designs of 1 chains" in sample.run(one)
    shutil.rmtree(structures)
