"""A checkpoint that takes the place of one of the same step: no kill loses both."""

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_damage import killed

from lockstep.checkpoint import CheckpointStore
from lockstep.errors import CheckpointError

torch.set_num_threads(1)


def save(store: CheckpointStore, number: int, replace: bool = False) -> None:
    store.save(1, {"model": {"weight": torch.full((4,), float(number))}}, {}, replace)


def held(store: CheckpointStore) -> float:
    """Return which of the two the newest checkpoint is, by its name and by its alias."""
    checkpoint, rejected = store.latest()
    assert checkpoint is not None
    assert rejected == []
    assert store.open("best_model.pt").path == checkpoint.path.resolve()
    return float(checkpoint.load("model")["weight"][0])


def saved_once(folder: Path) -> CheckpointStore:
    """Return a store whose only checkpoint is to be replaced."""
    store = CheckpointStore(folder, keep_last=1)
    store.take_over()
    save(store, 1)
    store.name(1, "best_model.pt")
    return store


def next_group(folder: Path) -> CheckpointStore:
    """Begin as a run does that follows a killed one."""
    store = CheckpointStore(folder, keep_last=1)
    store.restore_replaced()
    store.take_over(1)
    return store


def test_a_checkpoint_is_replaced_if_asked(tmp_path: Path) -> None:
    store = saved_once(tmp_path)
    save(store, 2)
    assert held(store) == 1
    save(store, 2, replace=True)
    assert held(store) == 2
    assert list(tmp_path.glob(".*")) == []


def test_replacing_killed_at_any_call_leaves_one_of_the_two(tmp_path: Path) -> None:
    found = []
    num_hidden = 0
    for last in range(1, 1000):
        folder = tmp_path / str(last)
        store = saved_once(folder)
        if not killed(partial(save, store, 2, replace=True), last, torn=True):
            break
        num_hidden += not store.path(1).exists()
        following = next_group(folder)
        found.append(held(following))
        save(following, 3, replace=True)
        assert held(following) == 3
        assert list(folder.glob(".*")) == []
    assert found == sorted(found)
    assert set(found) == {1, 2}
    assert num_hidden, "no kill came between the two renames"


def test_a_save_alone_brings_back_what_a_kill_has_hidden(tmp_path: Path) -> None:
    store = saved_once(tmp_path)
    store.path(1).rename(tmp_path / f".replaced_step_00000001.g{store.generation}")
    store.sweep()
    assert held(store) == 1


def test_a_replacement_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = saved_once(tmp_path)
    real = os.rename

    def rename(source: Any, target: Any) -> None:
        if ".writing" in str(source):
            raise OSError(errno.EIO, "planted")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointError, match="planted"):
        save(store, 2, replace=True)
    assert held(store) == 1
    assert list(tmp_path.glob(".*")) == []


def test_a_link_to_another_disk_is_not_replaced(tmp_path: Path) -> None:
    store = saved_once(tmp_path / "run")
    store.path(1).rename(tmp_path / "step_00000001")
    store.path(1).symlink_to(tmp_path / "step_00000001")
    save(store, 2, replace=True)
    assert store.path(1).is_symlink()
    assert held(store) == 1
