"""Any number of ranks writes a share each, and any other number reads the same bits."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_damage import digest

from lockstep.checkpoint import Checkpoint, CheckpointStore, Written, share_of
from lockstep.checkpoint.layout import _seal
from lockstep.checkpoint.state import num_bytes
from lockstep.errors import CheckpointError

FORMAT_2 = Path(__file__).parent / "format_2"


def state() -> dict[str, Any]:
    """Return parts with everything that is awkward to divide."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(200, 7, generator=generator)
    return {
        "model": {
            "large": large,
            "tied": large,
            "turned": large.t(),
            "one row": torch.randn(1, 900, generator=generator),
            "half": torch.randn(33, generator=generator).bfloat16(),
            "number": torch.tensor(3.0),
            "nothing": torch.zeros(0, 5),
        },
        "optimizer": {
            "state": {0: {"wide": torch.randn(9, generator=generator).to(torch.complex128)}},
            "groups": [{"lr": 0.1, "betas": (0.9, float("inf"))}],
            "flags": torch.arange(11) % 2 == 0,
        },
        "progress": {"step": 5},
        "last": {"nothing": torch.zeros(0)},
    }


def save(folder: Path, parts: dict[str, Any], num_ranks: int, step: int = 1) -> CheckpointStore:
    """Save as that many ranks would, one after the other."""
    store = CheckpointStore(folder)
    assert store.begin(step)
    shares = [share_of(parts, rank, num_ranks) for rank in range(num_ranks)]
    files = {k: v for share in shares for k, v in store.write_share(step, share).items()}
    store.save(step, Written(shares[-1].skeletons, files), {"position": 5})
    return store


def newest(store: CheckpointStore) -> Checkpoint:
    checkpoint, rejected = store.latest()
    assert checkpoint is not None
    assert not rejected
    return checkpoint


def load(store: CheckpointStore) -> dict[str, Any]:
    checkpoint = newest(store)
    return {part: checkpoint.load(part) for part in checkpoint.parts}


def test_what_any_number_of_ranks_saved_any_other_number_saves_again(tmp_path: Path) -> None:
    right, num_pairs = digest(state()), 0
    for a in range(1, 9):
        first = load(save(tmp_path / f"{a}", state(), a))
        assert digest(first) == right
        for b in range(1, 9):
            assert digest(load(save(tmp_path / f"{a}_{b}", first, b))) == right, (a, b)
            num_pairs += 1
    assert num_pairs == 64


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 50])
def test_each_rank_writes_as_much_as_any_other_to_a_row(num_ranks: int) -> None:
    sizes = [
        sum(num_bytes(tensors.values()) for tensors in share.tensors.values())
        for share in (share_of(state(), rank, num_ranks) for rank in range(num_ranks))
    ]
    longest_row = 200 * 4 if num_ranks > 1 else 0
    total = sum(sizes)
    assert total == sum(num_bytes(t.values()) for t in share_of(state()).tensors.values())
    assert max(sizes) <= total / num_ranks + max(longest_row, 900 * 4)


def test_a_share_of_one_is_what_the_first_format_holds(tmp_path: Path) -> None:
    save(tmp_path / "one", state(), 1)
    CheckpointStore(tmp_path / "whole").save(1, state(), {"position": 5})
    one, whole = (tmp_path / name / "step_00000001" for name in ("one", "whole"))
    assert sorted(os.listdir(one)) == sorted(os.listdir(whole))
    for name in os.listdir(one):
        assert (one / name).read_bytes() == (whole / name).read_bytes()
    assert json.loads((one / "manifest.json").read_text())["format_version"] == 1


def test_an_export_is_the_plain_file_of_a_whole_save(tmp_path: Path) -> None:
    shared, whole = save(tmp_path / "shared", state(), 3), save(tmp_path / "whole", state(), 1)
    file = newest(shared).export("model", tmp_path / "weights.safetensors")
    assert file.read_bytes() == (whole.path(1) / "model.safetensors").read_bytes()
    plain = safetensors.torch.load_file(file)
    assert torch.equal(plain["large"], state()["model"]["large"])
    with pytest.raises(CheckpointError, match="cannot export.*File exists"):
        newest(shared).export("model", file)


def test_format_2_is_read_for_ever() -> None:
    checkpoint = CheckpointStore(FORMAT_2, recipe="golden").open("step_00000007")
    assert len(checkpoint.files) == 3
    assert checkpoint.meta == {"position": 70}
    model = checkpoint.load("model")
    assert model["a"].tolist() == [[float(n), 0.5] for n in range(7)]
    assert model["a"] is model["tied"]
    assert checkpoint.load("optimizer") == {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}


def test_a_rank_that_has_not_written_keeps_the_checkpoint_from_existing(tmp_path: Path) -> None:
    store = save(tmp_path, state(), 2)
    assert store.begin(2)
    shares = [share_of(state(), rank, 2) for rank in (0, 1)]
    of_first, of_second = (store.write_share(2, share) for share in shares)
    os.unlink(store.folder / ".writing_step_00000002" / min(of_second))
    files = of_first | of_second
    with pytest.raises(CheckpointError, match="is missing"):
        store.save(2, Written(shares[0].skeletons, files), {})
    assert newest(store).step == 1
    assert os.listdir(tmp_path) == ["step_00000001"]


def rewrite(path: Path, cuts: Callable[[dict[str, Any]], object]) -> None:
    """Change what a share says of its rows, and seal everything again."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    said = json.loads(header["__metadata__"]["cuts"])
    header["__metadata__"]["cuts"] = json.dumps(cuts(said) or said)
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + content[8 + length :]
    path.write_bytes(content)
    manifest = json.loads((path.parent / "manifest.json").read_text())
    del manifest["sha256"]
    facts = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"][path.name].update(facts)
    (path.parent / "manifest.json").write_bytes(_seal(manifest))


@pytest.mark.parametrize(
    "cuts",
    [
        lambda said: said["large"].__setitem__(0, 3),
        lambda said: said["large"].__setitem__(0, -1),
        lambda said: said["large"].__setitem__(1, 10**18),
        lambda said: said["large"].__setitem__(1, None),
        lambda said: said["large"].append(1),
        lambda said: said["large"].__setitem__(0, "0"),
        lambda said: said.update(large=7),
        lambda said: said.pop("large") and None,
        lambda said: [1],
        lambda said: said.update(number=[0, 2]),
    ],
    ids=range(10),
)
def test_rows_that_do_not_add_up_are_refused(tmp_path: Path, cuts: Any) -> None:
    tree = {"model": {"number": torch.tensor(1.0), "large": torch.arange(20.0)}}
    store = save(tmp_path, tree, 2)
    rewrite(store.path(1) / "model.0_of_2.safetensors", cuts)
    with pytest.raises(CheckpointError, match=r"model\.0_of_2\.safetensors.* cannot be read"):
        newest(store).load("model")


def test_a_share_that_the_manifest_does_not_name_is_missed(tmp_path: Path) -> None:
    store = save(tmp_path, state(), 3)
    path = store.path(1) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    del manifest["files"]["model.1_of_3.safetensors"]
    path.write_bytes(_seal(manifest))
    with pytest.raises(CheckpointError, match="do not add up|unknown entry"):
        newest(store).load("model")
    shutil.rmtree(store.path(1))
