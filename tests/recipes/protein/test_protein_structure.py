"""Chains come out of PDB and mmCIF files as the rules say, from texts small enough to read."""

import math
import tarfile
from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import DataError
from lockstep_recipes.protein.sample_data import make_chains
from lockstep_recipes.protein.structure import (
    Filter,
    read_chains,
    segments,
    write_pdb,
)

MODEL_2 = "ENDMDL\nMODEL        2\n"


def atom(
    name: str,
    residue: str,
    number: str,
    x: float,
    y: float = 0.0,
    z: float = 0.0,
    alt: str = " ",
    occ: float = 1.0,
    kind: str = "ATOM",
    chain: str = "A",
) -> str:
    """Return one line; `number` may end in an insertion code."""
    digits, code = (number[:-1], number[-1]) if number[-1].isalpha() else (number, " ")
    where = f"{x:8.3f}{y:8.3f}{z:8.3f}{occ:6.2f}{0:6.2f}"
    element = "SE" if name == "SE" else name[0]
    padded = f"{name:<4}" if name == "SE" else f" {name:<3}"
    return (
        f"{kind:<6}{1:5d} {padded}{alt}{residue:>3} {chain}{digits:>4}{code}   {where}"
        f"          {element:>2}\n"
    )


def residue(name: str, number: str, x: float, **more: object) -> str:
    """Return a backbone whose CA is at x on a line; 3.8 apart is bonded."""
    spots = {"N": (-1.2, 0.8), "CA": (0.0, 0.0), "C": (1.2, 0.8), "O": (1.2, 2.0)}
    return "".join(atom(a, name, number, x + dx, dy, **more) for a, (dx, dy) in spots.items())


def parse(tmp_path: Path, text: str, name: str = "x.pdb"):
    path = tmp_path / name
    path.write_text(text)
    return read_chains(path)


def test_plain_residues_are_read_in_order(tmp_path: Path) -> None:
    text = residue("GLY", "1", 0) + residue("ALA", "2", 3.8) + residue("TRP", "3", 7.6)
    (chain,) = parse(tmp_path, text)
    assert (chain.id, chain.chain_id, chain.sequence) == ("x", "A", "GAW")
    assert chain.residue_index.tolist() == [1, 2, 3]
    assert chain.coords[1, 1].tolist() == pytest.approx([3.8, 0, 0])


def test_only_the_first_model_counts(tmp_path: Path) -> None:
    first, second = residue("GLY", "1", 0), residue("ALA", "1", 50)
    text = f"MODEL        1\n{first}{residue('SER', '2', 3.8)}{MODEL_2}{second}ENDMDL\n"
    (chain,) = parse(tmp_path, text)
    assert chain.sequence == "GS"
    assert chain.coords[:, 1, 0].max() < 10


def test_of_alternative_locations_the_most_occupied_counts(tmp_path: Path) -> None:
    near = residue("SER", "1", 0, alt="A", occ=0.4)
    text = near + residue("SER", "1", 9, alt="B", occ=0.6) + residue("GLY", "2", 12.8)
    (chain,) = parse(tmp_path, text)
    assert chain.sequence == "SG"
    assert chain.coords[0, 1, 0] == pytest.approx(9.0)


def test_of_two_residues_in_one_place_the_more_occupied_counts(tmp_path: Path) -> None:
    first = residue("SER", "1", 0, alt="A", occ=0.3)
    text = first + residue("THR", "1", 0, alt="B", occ=0.7) + residue("GLY", "2", 3.8)
    assert parse(tmp_path, text)[0].sequence == "TG"


def test_insertion_codes_make_residues_of_their_own(tmp_path: Path) -> None:
    numbers = ["52", "52A", "52B", "53"]
    text = "".join(residue("ALA", n, 3.8 * i) for i, n in enumerate(numbers))
    (chain,) = parse(tmp_path, text)
    assert chain.sequence == "AAAA"
    assert chain.residue_index.tolist() == [52, 52, 52, 53]
    assert segments(chain.coords).tolist() == [0, 0, 0, 0]


def test_selenomethionine_is_methionine_with_its_chi_angles(tmp_path: Path) -> None:
    kind = {"kind": "HETATM"}
    side = {"CB": (-0.5, -1.2, 0.8), "CG": (0.5, -2.3, 0.9), "SE": (0, -4, 1.8), "CE": (1, -5, 1)}
    text = residue("GLY", "1", -3.8) + residue("MSE", "2", 0, **kind)
    text += "".join(atom(a, "MSE", "2", *at, **kind) for a, at in side.items())
    (chain,) = parse(tmp_path, text + residue("GLY", "3", 3.8))
    assert chain.sequence == "GMG"
    assert chain.chi_mask.tolist() == [[False] * 4, [True, True, True, False], [False] * 4]


def test_residues_without_n_ca_or_c_are_dropped(tmp_path: Path) -> None:
    lines = [residue("ALA", str(n), 3.8 * n) for n in range(1, 5)]
    lines[1] = "".join(line + "\n" for line in lines[1].splitlines() if " CA " not in line)
    (chain,) = parse(tmp_path, "".join(lines))
    assert chain.residue_index.tolist() == [1, 3, 4]
    assert segments(chain.coords).tolist() == [0, 1, 1], "what is missing breaks the chain"


def test_a_missing_oxygen_is_put_where_it_belongs(tmp_path: Path) -> None:
    made = make_chains(1, seed=0, min_length=20, max_length=20)[0]
    write_pdb(made, tmp_path / "x.pdb")
    text = (tmp_path / "x.pdb").read_text().splitlines()
    whole = parse(tmp_path, "\n".join(text))[0]
    (chain,) = parse(tmp_path, "\n".join(line for line in text if line[12:16] != " O  "))
    assert np.isfinite(chain.coords).all()
    assert np.abs(chain.coords - whole.coords)[:-1].max() < 0.01


def test_a_chain_breaks_where_ca_atoms_are_more_than_four_and_a_half_apart() -> None:
    coords = np.zeros((4, 4, 3), dtype=np.float32)
    coords[:, 1, 0] = [0, 4.4, 9.0, 12.8]
    assert segments(coords).tolist() == [0, 0, 1, 1]


def test_other_residues_are_unknown_and_water_is_none(tmp_path: Path) -> None:
    text = (
        residue("ALA", "1", 0) + residue("SEP", "2", 3.8, kind="HETATM") + residue("GLY", "3", 7.6)
    )
    text += "TER\n" + atom("O", "HOH", "201", 30, kind="HETATM")
    assert parse(tmp_path, text)[0].sequence == "AXG"


def test_every_chain_of_a_file_is_one_sample(tmp_path: Path) -> None:
    text = residue("ALA", "1", 0) + residue("GLY", "2", 3.8) + "TER\n"
    text += residue("SER", "1", 50, chain="B") + residue("VAL", "2", 53.8, chain="B")
    found = parse(tmp_path, text)
    assert [(chain.id, chain.sequence) for chain in found] == [("x_A", "AG"), ("x_B", "SV")]


def test_chi_angles_have_the_sign_and_size_of_the_torsion(tmp_path: Path) -> None:
    n, ca, cb = (0.0, 1.0, 0.0), (0.0, 0.0, 0.0), (1.5, 0.0, 0.0)
    angle = math.radians(-65)
    og = (1.9, math.cos(angle), math.sin(angle))
    places = {"N": n, "CA": ca, "C": (-1.0, -1.0, 0.5), "CB": cb, "OG": og}
    text = "".join(atom(a, "SER", "1", *at) for a, at in places.items()) + residue("GLY", "2", 3.8)
    (chain,) = parse(tmp_path, text)
    assert math.degrees(chain.chi[0, 0]) == pytest.approx(-65, abs=0.1)


CIF_COLUMNS = """
group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_seq_id
auth_seq_id auth_asym_id pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy pdbx_PDB_model_num
"""


def test_mmcif_says_the_same(tmp_path: Path) -> None:
    rows = []
    for model in (1, 2):
        for number, name in enumerate(("GLY", "MSE", "LEU"), start=1):
            for alt, occ, shift in (
                ((".", 1, 0),) if number != 3 else (("A", 0.3, 5), ("B", 0.7, 0))
            ):
                for a, dx in (("N", -1.2), ("CA", 0.0), ("C", 1.2), ("O", 1.2)):
                    x = 3.8 * number + dx + shift + 90 * (model - 1)
                    code, seq = ("A", 1) if number == 2 else ("?", number)
                    rows.append(
                        f"ATOM {len(rows) + 1} {a[0]} {a} {alt} {name} A {number} {seq} Q {code} "
                        f"{x:.3f} 0.8 0.1 {occ} {model}"
                    )
    header = "data_x\n_refine.pdbx_refine_id 'X-RAY'\n_refine.ls_d_res_high 1.80\nloop_\n"
    columns = "".join(f"_atom_site.{column}\n" for column in CIF_COLUMNS.split())
    (chain,) = parse(tmp_path, header + columns + "\n".join(rows) + "\n", "x.cif")
    assert (chain.chain_id, chain.sequence) == ("Q", "GML")
    assert chain.resolution == pytest.approx(1.8)
    assert chain.residue_index.tolist() == [1, 1, 3]
    assert chain.coords[:, 1, 0].tolist() == pytest.approx([3.8, 7.6, 11.4])


def test_the_filter_says_why(tmp_path: Path) -> None:
    chain = make_chains(1, min_length=50, max_length=50)[0]
    path = tmp_path / "x.pdb"
    write_pdb(chain, path)
    assert len(read_chains(path, Filter())) == 1
    for wanted, word in (
        (Filter(min_length=51), "50 residues"),
        (Filter(max_length=49), "40 to 49"),
    ):
        with pytest.raises(DataError, match=word):
            read_chains(path, wanted)
    resolution = "REMARK   2\nREMARK   2 RESOLUTION.    2.60 ANGSTROMS.\n"
    path.write_text(resolution + path.read_text())
    with pytest.raises(DataError, match="resolution of 2.6"):
        read_chains(path, Filter())


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    chain = make_chains(1, seed=4)[0]
    write_pdb(chain, tmp_path / "x.pdb")
    (read,) = read_chains(tmp_path / "x.pdb")
    assert read.sequence == chain.sequence
    assert np.abs(read.coords - chain.coords).max() < 1e-3


def test_sample_chains_have_the_bonds_of_real_ones() -> None:
    for chain in make_chains(4, seed=0):
        n, ca, c = (chain.coords[:, i] for i in range(3))
        for left, right, length in ((n, ca, 1.458), (ca, c, 1.525), (c[:-1], n[1:], 1.329)):
            assert np.abs(np.linalg.norm(left - right, axis=-1) - length).max() < 1e-3
        assert np.abs(np.linalg.norm(ca[1:] - ca[:-1], axis=-1) - 3.8).max() < 0.1
        assert not segments(chain.coords).any()


def test_real_chains_agree_with_the_pack_they_came_from(shared_data: Path, tmp_path: Path) -> None:
    import gzip
    import json

    with tarfile.open(shared_data / "protein_full_atom_pdb.tar.xz") as pack:
        members = [next(m for m in pack if m.isfile()) for _ in range(1)]
        members += [m for m, _ in zip((m for m in pack if m.isfile()), range(11), strict=False)]
        for member in members:
            pack.extract(member, tmp_path, filter="data")
    files = {path.name.removesuffix(".pdb"): path for path in tmp_path.rglob("*.pdb")}
    compared = 0
    with gzip.open(shared_data / "protein_chains.jsonl.gz", "rt") as lines:
        for line in lines:
            if line[9 : line.index('"', 9)] not in files:
                continue
            entry = json.loads(line)
            (chain,) = read_chains(files[entry["name"]])
            atoms = np.array([entry["coords"][a] for a in ("N", "CA", "C")])
            whole = np.isfinite(atoms).all(axis=(0, 2))
            assert chain.sequence == "".join(np.array(list(entry["seq"]))[whole])
            off = np.abs(chain.coords[:, 1] - atoms[1][whole]).max(axis=-1)
            assert (off > 2e-3).mean() < 0.02, "but for alternative locations"
            has_side_chain = np.isin(list(chain.sequence), list("GA"), invert=True)
            assert chain.chi_mask[has_side_chain, 0].mean() > 0.8
            compared += 1
    assert compared == len(files) >= 10
