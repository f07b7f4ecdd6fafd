"""A save that is killed or refused costs at most itself.

The rig replaces the functions of `os` through which a save reaches the disk,
and lets the n-th call be the last one, for every n in turn.
"""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_damage import CALLS, digest, follow, killed, sequences

from lockstep.checkpoint import CheckpointStore, Written, share_of
from lockstep.checkpoint import layout as layout_module
from lockstep.errors import CheckpointError

torch.set_num_threads(1)
CODES = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.ENFILE, errno.EACCES)
Save = Callable[[CheckpointStore], object]


def parts(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"weight": torch.randn(64, 8, generator=generator), "bias": torch.ones(8)},
        "optimizer": {"state": {0: torch.rand(64, 8, generator=generator)}},
    }


def save_third(store: CheckpointStore) -> None:
    store.save(3, parts(3), {"position": 3})
    store.name(3, "best_model.pt")


def save_third_in_shares(store: CheckpointStore) -> None:
    """Save as two ranks would, the second one's share first."""
    shares = [share_of(parts(3), rank, 2) for rank in (1, 0)]
    assert store.begin(3, sum(share.num_bytes for share in shares))
    files = {name: facts for s in shares for name, facts in store.write_share(3, s).items()}
    store.save(3, Written(shares[0].skeletons, files), {"position": 3})
    store.name(3, "best_model.pt")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with steps 1 and 2, and the leftovers of an earlier crash."""
    store = CheckpointStore(tmp_path_factory.mktemp("template") / "checkpoints", keep_last=2)
    for step in (1, 2):
        store.save(step, parts(step), {"position": step})
    store.name(2, "best_model.pt")
    shutil.copytree(store.path(1), store.folder / ".writing_step_00000009")
    return store.folder


def fresh(template: Path, tmp_path: Path) -> CheckpointStore:
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    shutil.copytree(template, tmp_path / "run", symlinks=True)
    return CheckpointStore(tmp_path / "run", keep_last=2)


def problems_with(store: CheckpointStore) -> list[str]:
    """Return what a crash has broken; nothing may be."""
    problems = []
    checkpoint, rejected = store.latest()
    problems += [f"rejected: {reason}" for _, reason in rejected]
    if checkpoint is None:
        return [*problems, "nothing left to resume from"]
    if checkpoint.step not in (2, 3):
        problems.append(f"fell back to {checkpoint.step}")
    for step in {2, checkpoint.step}:
        try:
            loaded = store.open(store.path(step))
            for part, tree in parts(step).items():
                if digest(loaded.load(part)) != digest(tree):
                    problems.append(f"{part} of step {step} changed")
        except CheckpointError as error:
            problems.append(error.problem)
    try:
        store.open("best_model.pt")
    except CheckpointError as error:
        problems.append(error.problem)
    return problems


def problems_of_going_on(store: CheckpointStore) -> list[str]:
    """Return what keeps the run that follows from working as if nothing had been."""
    save_third(store)
    store.save(4, parts(4), {})
    checkpoint, rejected = store.latest()
    left = sorted(os.listdir(store.folder))
    problems = [reason for _, reason in rejected]
    if left != ["best_model.pt", "step_00000003", "step_00000004"]:
        problems.append(f"left: {left}")
    if checkpoint is None or digest(checkpoint.load("model")) != digest(parts(4)["model"]):
        problems.append("the next checkpoint is not what was saved")
    return problems


def killed_everywhere(
    template: Path, tmp_path: Path, save: Save, *, torn: bool = False
) -> Iterator[list[str]]:
    """Kill a save at each of its calls in turn; yield the problems after each."""
    for last in range(1, 1000):
        store = fresh(template, tmp_path)
        if not killed(partial(save, store), last, torn=torn):
            return
        found = problems_with(store) or problems_of_going_on(store)
        yield [f"call {last}: {problem}" for problem in found]
    raise AssertionError("the save never came to its end")


@pytest.mark.parametrize("save", [save_third, save_third_in_shares], ids=["whole", "in shares"])
def test_a_save_killed_at_any_call_loses_nothing_before_it(
    template: Path, tmp_path: Path, save: Save
) -> None:
    problems = list(killed_everywhere(template, tmp_path, save, torn=True))
    assert sum(problems, []) == []
    assert len(problems) >= 30


def test_going_back_killed_at_any_call_leaves_every_name_usable(
    template: Path, tmp_path: Path
) -> None:
    for last in range(1, 100):
        store = fresh(template, tmp_path)
        if not killed(lambda: store.set_aside_after(0), last, torn=bool(last % 2)):  # noqa: B023
            break
        checkpoint, rejected = store.latest()
        assert (checkpoint.step if checkpoint else 0, rejected) in [(2, []), (1, []), (0, [])]
        store.set_aside_after(0)
        assert store.steps() == []
        assert digest(store.open("best_model.pt").load("model")) == digest(parts(2)["model"])
    assert last > 8


def test_random_kills_never_leave_fewer_checkpoints_than_there_should_be(tmp_path: Path) -> None:
    num_turns, lost = sequences(8, seed=7, folder=tmp_path)
    assert (num_turns, lost) == (40, [])


def test_removing_before_the_commit_would_be_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(self: CheckpointStore, step: int, num_needed: int = 0) -> bool:
        for old in self.steps()[:-1]:
            shutil.rmtree(self.path(old))
        return begin(self, step, num_needed)

    begin = CheckpointStore.begin
    monkeypatch.setattr(CheckpointStore, "begin", careless)
    store = CheckpointStore(tmp_path / "run", keep_last=2)
    assert any("became" in lost for lost in follow(store, random.Random(0), 25))


def test_removing_first_and_saving_then_would_be_caught(template: Path, tmp_path: Path) -> None:
    def careless(store: CheckpointStore) -> None:
        shutil.rmtree(store.path(1))
        shutil.rmtree(store.path(2))
        save_third(store)

    everywhere = killed_everywhere(template, tmp_path, careless)
    assert any(
        "nothing left to resume from" in problem for found in everywhere for problem in found
    )


def test_saving_in_place_would_be_caught(template: Path, tmp_path: Path) -> None:
    def in_place(store: CheckpointStore) -> None:
        store.path(3).mkdir()
        share = share_of(parts(3))
        written = Written(share.skeletons, layout_module.write_share(store.path(3), share))
        layout_module.write_manifest(store.path(3), 3, "custom", written, {})
        store.name(3, "best_model.pt")

    everywhere = killed_everywhere(template, tmp_path, in_place)
    assert any("rejected" in problem for found in everywhere for problem in found)


def problem_of(save: Save, store: CheckpointStore) -> str | None:
    try:
        save(store)
    except CheckpointError as error:
        return error.problem
    return None


class Fault:
    """Let the n-th call to `os` fail, or that one and all that need room after it."""

    def __init__(self, first: int, *, stays: bool) -> None:
        self.first, self.stays = first, stays
        self.code = CODES[first % len(CODES)]
        self.count = 0
        self.fired: list[str] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            patch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            needs_room = name in ("write", "fsync", "mkdir", "symlink")
            if self.count == self.first or (self.fired and self.stays and needs_room):
                self.fired.append(name)
                raise OSError(self.code, os.strerror(self.code))
            return real(*args, **kwargs)

        return call


@pytest.mark.parametrize(
    ("save", "stays"),
    [(save_third, False), (save_third, True), (save_third_in_shares, False)],
    ids=["once", "from then on", "in shares"],
)
def test_an_error_of_any_call_is_reported_and_loses_nothing(
    template: Path, tmp_path: Path, save: Save, stays: bool
) -> None:
    num_reported = 0
    for fault in (Fault(first, stays=stays) for first in range(1, 1000)):
        store = fresh(template, tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            fault.install(patch)
            said = problem_of(save, store)
        if said is not None:
            num_reported += 1
            assert os.strerror(fault.code) in said
            assert "bytes needed" in said or "cannot save" not in said
        if not fault.fired:
            break
        where = f"call {fault.first}, {fault.fired[0]}"
        assert problems_with(store) == [], where
        if stays and fault.fired[0] in ("write", "mkdir"):
            assert [n for n in os.listdir(store.folder) if n.startswith(".w")] == [], where
        assert problems_of_going_on(store) == [], where
    assert num_reported >= 15


def test_a_full_disk_is_reported_with_the_numbers(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = fresh(template, tmp_path)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError) as caught:
        save_third(store)
    free = f"{shutil.disk_usage(tmp_path).free:,}"[:2]
    needed = 2 * 64 * 8 * 4 + 8 * 4
    assert f"No space left on device ({needed:,} bytes needed, {free}" in caught.value.problem
