"""A data set that changed since a checkpoint is found out, wherever it lies."""

import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.contents import contents_of, same_contents
from lockstep.data import fingerprint
from lockstep.data.fingerprint import differences, file_fingerprints, take_fingerprint


class Folder:
    """The files of a folder in a listed order."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names = (root / "list.txt").read_text().split()

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> bytes:
        return (self.root / self.names[index]).read_bytes()

    def describe(self, index: int) -> str:
        return self.names[index]

    def fingerprint(self) -> list[str]:
        return file_fingerprints([(name, [self.root / name]) for name in self.names])


def make(root: Path, count: int = 40) -> Folder:
    root.mkdir()
    choose = random.Random(0)
    for index in range(count):
        (root / f"{index:03}.bin").write_bytes(choose.randbytes(choose.randrange(10, 9000)))
    write_list(root, [f"{index:03}.bin" for index in range(count)])
    return Folder(root)


def write_list(root: Path, names: list[str]) -> None:
    (root / "list.txt").write_text("\n".join(names))


def append(folder: Folder, choose: random.Random) -> str:
    (folder.root / "new.bin").write_bytes(choose.randbytes(50))
    write_list(folder.root, [*folder.names, "new.bin"])
    return "1 samples appended, the first about new.bin"


def delete(folder: Folder, choose: random.Random) -> str:
    gone = choose.randrange(len(folder))
    names = folder.names[:gone] + folder.names[gone + 1 :]
    write_list(folder.root, names)
    return f"1 samples removed, the first about {names[min(gone, len(names) - 1)]}"


def reorder(folder: Folder, choose: random.Random) -> str:
    a, b = sorted(choose.sample(range(len(folder)), 2))
    names = list(folder.names)
    names[a], names[b] = names[b], names[a]
    write_list(folder.root, names)
    return f"the same samples in a different order, from {names[a]} on"


def edit(folder: Folder, choose: random.Random) -> str:
    """Change one byte, anywhere, and put the time of the change back."""
    name = choose.choice(folder.names)
    path, content = folder.root / name, bytearray(folder[folder.names.index(name)])
    before = path.stat()
    content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    return f"1 with different names or contents: {name}"


@pytest.mark.parametrize("mutate", [append, delete, reorder, edit])
def test_fifty_changes_of_a_kind_are_all_named(
    mutate: Callable[[Folder, random.Random], str], tmp_path: Path
) -> None:
    choose = random.Random(mutate.__name__)
    original = make(tmp_path / "original")
    before = take_fingerprint(original, 0)
    for number in range(50):
        copy = tmp_path / str(number)  # a data set may move: the copy itself is no change
        shutil.copytree(original.root, copy)
        assert differences(before, take_fingerprint(Folder(copy), 0, before), Folder(copy)) == ""
        expected = mutate(Folder(copy), choose)
        changed = Folder(copy)
        assert differences(before, take_fingerprint(changed, 0, before), changed) == expected
        shutil.rmtree(copy)


def test_a_print_of_many_samples_stays_small_and_still_finds_one_edit(tmp_path: Path) -> None:
    class Many:
        edited = -1
        length = 100_000

        def __len__(self) -> int:
            return self.length

        def __getitem__(self, index: int) -> int:
            return index

        def fingerprint(self) -> list[str]:
            return [f"{i} {i == self.edited}" for i in range(self.length)]

    before = take_fingerprint(Many(), 0)
    assert len(before["entries"]) <= fingerprint.MAX_ENTRIES
    changed = Many()
    changed.edited = 70_001
    assert "1 with different names" in differences(
        before, take_fingerprint(changed, 0, before), changed
    )
    changed = Many()
    changed.length += 7
    assert "7 samples appended" in differences(
        before, take_fingerprint(changed, 0, before), changed
    )


class Samples:
    """Samples without a fingerprint of their own, augmented from a global generator."""

    def __init__(self, count: int = 30, **edited: Tensor) -> None:
        self.count, self.edited = count, edited
        self.num_reads = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_reads += 1
        value = self.edited.get(f"at_{index}", torch.full((4,), float(index)))
        return {"x": value + torch.rand(4), "name": f"sample {index}"}


def test_a_few_samples_stand_for_a_data_set_without_a_print() -> None:
    before = take_fingerprint(Samples(), 3)
    assert len(before["samples"]) == fingerprint.NUM_SAMPLES
    assert differences(before, take_fingerprint(Samples(), 3, before), Samples()) == ""
    index = sorted(map(int, before["samples"]))[3]
    edited = Samples(**{f"at_{index}": torch.full((4,), index + 0.01)})
    said = differences(before, take_fingerprint(edited, 3, before), edited)
    assert said == f"different contents: sample {index}"
    assert differences(before, take_fingerprint(Samples(32), 3, before), Samples(32)) == "2 added"
    rounded = Samples(**{f"at_{index}": torch.full((4,), index * (1 + 1e-7))})
    assert differences(before, take_fingerprint(rounded, 3, before), rounded) == ""


def test_looking_at_samples_leaves_the_data_set_and_the_generators_alone() -> None:
    samples, state = Samples(), torch.get_rng_state()
    assert take_fingerprint(samples, 0)["samples"]
    assert samples.num_reads == 0
    assert torch.equal(torch.get_rng_state(), state)


LARGE = """
import time, torch
from lockstep.data import fingerprint

class Large:  # torch computes its samples with several threads, which this process has begun
    def __init__(self, read_s):
        torch.set_num_threads(2)
        self.values, self.read_s = torch.ones(200_000).mul(2), read_s
    def __len__(self):
        return 20
    def __getitem__(self, index):
        time.sleep(self.read_s)
        return self.values.mul(index).exp()

for fingerprint.READ_S, read_s in ((20.0, 0.0), (3.2, 0.16)):
    print(len(fingerprint.take_fingerprint(Large(read_s), 0)["samples"]))
"""


def test_large_samples_are_looked_at_and_slow_ones_while_there_is_time() -> None:
    """In a process of its own: threads that were begun stay."""
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=60)
    large, slow = map(int, done.stdout.split())
    assert large == fingerprint.NUM_SAMPLES, done.stderr
    assert 1 <= slow < large


def test_samples_that_never_repeat_or_cannot_be_read_say_nothing() -> None:
    class Restless(Samples):
        def __getitem__(self, index: int) -> float:
            return float(int.from_bytes(os.urandom(4), "little"))

    class Deadly(Samples):
        def __getitem__(self, index: int) -> None:
            os._exit(1)

    assert take_fingerprint(Restless(), 0) == {"length": 30, "samples": {}}
    assert take_fingerprint(Deadly(), 0) == {"length": 30, "samples": {}}


# --- Prints of earlier versions ---------------------------------------------------------------


class WithPaths(Samples):
    """Samples that hold the whole path of their file, as many do."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self.root = root

    def __getitem__(self, index: int) -> Any:
        return {"path": f"{self.root}/{index}.png", "x": torch.full((4,), index / 7)}


OLD_PRINT: dict[str, Any] = {
    "length": 30,
    "samples": {
        "0": ["2c66d465ec678c43", 0.0, 0.0],
        "29": ["7af89be0a080330e", 0.55581802070316, 4.142857074737549],
    },
}
"""What a version that digested whole paths kept of `WithPaths("/data")`."""


def test_a_print_of_an_earlier_version_is_compared_with_whole_paths() -> None:
    kept = WithPaths("/data")
    now = take_fingerprint(kept, 0, OLD_PRINT)
    assert differences(OLD_PRINT, now, kept) == ""
    moved = WithPaths("/elsewhere")
    said = differences(OLD_PRINT, take_fingerprint(moved, 0, OLD_PRINT), moved)
    assert said == "different contents: sample 0, sample 29"
    # What ranks compare and the next checkpoint holds is of the present form.
    assert now["samples"] == take_fingerprint(moved, 0, OLD_PRINT)["samples"]
    assert "old_samples" not in take_fingerprint(kept, 0, now)


# --- Infinities -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_samples_with_infinities_are_compared_by_where_they_are() -> None:
    mask = torch.full((6, 6), -math.inf).triu(1)
    edited = mask.clone()
    edited[5, 0] = -math.inf
    positive, unknown = mask.abs(), mask.clone()
    unknown[0, 5] = math.nan
    own = contents_of({"mask": mask})
    assert same_contents(own, contents_of({"mask": mask.numpy()}))
    for other in (edited, positive, unknown, torch.zeros(6, 6)):
        assert not same_contents(own, contents_of({"mask": other}))
    assert len(take_fingerprint([mask] * 3, 0)["samples"]) == 3


def test_finite_values_have_the_digest_they_always_had() -> None:
    sample = {"path": "/data/29.png", "x": torch.full((4,), 29 / 7)}
    assert same_contents(OLD_PRINT["samples"]["29"], contents_of(sample, whole_paths=True))
    assert contents_of({**sample, "path": "29.png"}) == contents_of(sample)
