"""After a power loss the newest acknowledged checkpoint is there, and nothing false is taken.

The rig follows every call by which a save reaches the disk on a model of it: what a file holds and
which names a folder has are safe once flushed; of what came after, any part may be there and any
part missing, in whatever order. Before every call the power may fail: some of those states are
then written out as real files, and a resume looks at them.
"""

import copy
import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkpoint_damage import is_right, parts, save_shared

from lockstep.checkpoint import CheckpointStore
from lockstep.errors import CheckpointError

Forget = Callable[[str], bool]
Choose = Callable[[list[Any]], list[Any]]
NUM_RANDOM_STATES = 3


@dataclass
class File:
    safe: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    """Offset and content of each write since the last flush."""
    size: int = 0


@dataclass
class Link:
    target: str


@dataclass
class Folder:
    safe: dict[str, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    pending: list[dict[str, int | None]] = field(default_factory=list)
    """Each change since the last flush: names with what they stand for from then on, or None."""

    def change(self, **names: int | None) -> None:
        self.pending.append(names)
        apply(self.names, names)


def apply(names: dict[str, int], change: dict[str, int | None]) -> None:
    for name, number in change.items():
        if number is None:
            names.pop(name, None)
        else:
            names[name] = number


class Disk:
    """Everything below one folder, as numbered files, links and folders."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes: list[File | Folder | Link] = [Folder()]
        self.acknowledged = 0

    def find(self, path: str) -> tuple[Folder, str] | None:
        """Return the folder a path ends in, and the name there; None if it is not below ours."""
        absolute = Path(os.path.abspath(path))
        if not absolute.is_relative_to(self.root) or absolute == self.root:
            return None
        *above, name = absolute.relative_to(self.root).parts
        folder = self.nodes[0]
        for step in above:
            assert isinstance(folder, Folder)
            folder = self.nodes[folder.names[step]]
        assert isinstance(folder, Folder)
        return folder, name

    def node(self, path: str) -> Any:
        found = self.find(path)
        return self.nodes[found[0].names[found[1]]] if found else None

    def add(self, path: str, node: File | Folder | Link) -> None:
        if found := self.find(path):
            self.nodes.append(node)
            found[0].change(**{found[1]: len(self.nodes) - 1})

    def flush(self, path: str) -> None:
        match self.node(path) if Path(path) != self.root else self.nodes[0]:
            case File() as file:
                write_out(file.safe, file.pending)
                file.pending = []
            case Folder() as folder:
                folder.safe, folder.pending = dict(folder.names), []

    def survivors(self, choose: Choose, folder: int = 0) -> dict[str, Any]:
        """Return what is left of a folder if of the pending changes the chosen ones got through."""
        node = self.nodes[folder]
        assert isinstance(node, Folder)
        names = dict(node.safe)
        for change in choose(node.pending):
            apply(names, change)
        left: dict[str, Any] = {}
        for name, number in names.items():
            match self.nodes[number]:
                case File() as file:
                    left[name] = write_out(bytearray(file.safe), choose(file.pending))
                case Link() as link:
                    left[name] = link
                case Folder():
                    left[name] = self.survivors(choose, number)
        return left


def write_out(content: bytearray, writes: list[tuple[int, bytes]]) -> bytearray:
    for offset, piece in writes:
        content.extend(bytes(max(0, offset + len(piece) - len(content))))
        content[offset : offset + len(piece)] = piece
    return content


def put(folder: Path, left: dict[str, Any]) -> None:
    folder.mkdir()
    for name, what in left.items():
        if isinstance(what, dict):
            put(folder / name, what)
        elif isinstance(what, Link):
            (folder / name).symlink_to(what.target)
        else:
            (folder / name).write_bytes(what)


class Recorder:
    """Follow the calls of `os` on the model; keep the state before each."""

    def __init__(self, root: Path, forget: Forget) -> None:
        self.disk = Disk(root)
        self.states: list[Disk] = []
        self.forget = forget
        self.paths: dict[int, str] = {}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("open", "write", "fsync", "mkdir", "rename", "symlink", "unlink", "rmdir"):
            patch.setattr(os, name, self.wrap(getattr(self, name), getattr(os, name)))
        patch.setattr(os, "replace", os.rename)

    def wrap(self, follow: Callable[..., None], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, dir_fd: int | None = None, **named: Any) -> Any:
            self.states.append(copy.deepcopy(self.disk))
            place = {} if dir_fd is None else {"dir_fd": dir_fd}
            result = real(*args, **place, **named)
            if dir_fd is not None:
                args = (f"{self.paths[dir_fd]}/{args[0]}", *args[1:])
            follow(result, *args)
            return result

        return call

    def open(self, descriptor: int, path: Any, flags: int, *_: Any) -> None:
        self.paths[descriptor] = os.fspath(path)
        if flags & os.O_CREAT:
            self.disk.add(os.fspath(path), File())

    def write(self, written: int, descriptor: int, content: Any) -> None:
        file = self.disk.node(self.paths[descriptor])
        file.pending.append((file.size, bytes(content)[:written]))
        file.size += written

    def fsync(self, _: None, descriptor: int) -> None:
        if not self.forget(self.paths[descriptor]):
            self.disk.flush(self.paths[descriptor])

    def mkdir(self, _: None, path: Any, *__: Any) -> None:
        self.disk.add(os.fspath(path), Folder())

    def rename(self, _: None, source: Any, target: Any) -> None:
        found, place = self.disk.find(os.fspath(source)), self.disk.find(os.fspath(target))
        assert found is not None
        assert place is not None
        assert found[0] is place[0], "a checkpoint is renamed within its folder"
        found[0].change(**{place[1]: found[0].names[found[1]], found[1]: None})

    def symlink(self, _: None, target: str, path: Any) -> None:
        self.disk.add(os.fspath(path), Link(target))

    def unlink(self, _: None, path: Any) -> None:
        found = self.disk.find(os.fspath(path))
        assert found is not None
        found[0].change(**{found[1]: None})

    rmdir = unlink


def ways(rng: random.Random) -> Iterator[Choose]:
    """Yield ways to choose what got through: nothing, all, only the last, and some at random."""
    yield lambda pending: []
    yield lambda pending: list(pending)
    yield lambda pending: pending[-1:]
    for _ in range(NUM_RANDOM_STATES):
        yield lambda pending: rng.sample(pending, rng.randint(0, len(pending)))


def problems_after(root: Path, acknowledged: int) -> list[str]:
    store = CheckpointStore(root / "output" / "checkpoints", keep_last=2)
    try:
        checkpoint, _ = store.latest()
        if checkpoint is not None and not is_right(checkpoint):
            return [f"step {checkpoint.step} was taken and is not what was saved"]
        found = checkpoint.step if checkpoint else 0
        if acknowledged >= 3 and not is_right(store.open("best_model.pt")):
            return ["the best one is not what was saved"]
    except CheckpointError as error:
        return [error.problem]
    return [f"{acknowledged} was acknowledged, {found} is left"] if found < acknowledged else []


def failures(
    tmp_path: Path, forget: Forget = lambda _: False, last: int = 4
) -> Iterator[list[str]]:
    """Save some checkpoints, whole and in shares, and let the power fail before every call.

    Yields what is wrong with each state that is left.
    """
    root = tmp_path / "disk"
    root.mkdir()
    recorder = Recorder(root, forget)
    with pytest.MonkeyPatch.context() as patch:
        recorder.install(patch)
        store = CheckpointStore(root / "output" / "checkpoints", keep_last=2)
        for step in range(1, last + 1):
            if step % 2:
                with suppress(CheckpointError):
                    store.save(step, parts(step), {})
                store.save(step, parts(step), {})  # which has nothing to do, or does it better
            else:
                save_shared(store, step, 2)
            recorder.disk.acknowledged = step
            if step == 2:
                store.name(step, "best_model.pt")
    rng = random.Random(0)
    for number, disk in enumerate([*recorder.states, recorder.disk]):
        seen: list[dict[str, Any]] = []
        for choose in ways(rng):
            left = disk.survivors(choose)
            if left in seen:
                continue
            seen.append(left)
            put(tmp_path / "after", left)
            found = problems_after(tmp_path / "after", disk.acknowledged)
            shutil.rmtree(tmp_path / "after")
            yield [f"before call {number}: {problem}" for problem in found]


def test_a_power_loss_at_any_moment_costs_nothing_acknowledged(tmp_path: Path) -> None:
    problems = list(failures(tmp_path))
    assert sum(problems, []) == []
    assert len(problems) > 300


@pytest.mark.parametrize(
    "forgotten",
    [
        "/model.safetensors",
        "/optimizer.1_of_2.safetensors",
        "/manifest.json",
        "/.writing_step_00000001",
        "/checkpoints",
        "/output",
    ],
)
def test_a_forgotten_flush_would_be_caught(tmp_path: Path, forgotten: str) -> None:
    assert any(failures(tmp_path, lambda path: path.endswith(forgotten)))


def test_a_save_whose_last_flush_failed_is_flushed_before_it_counts(tmp_path: Path) -> None:
    flushed: list[str] = []

    def fail_once(path: str) -> bool:
        flushed.append(path)
        if path.endswith("/checkpoints") and flushed.count(path) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return False

    problems = list(failures(tmp_path, fail_once, last=1))
    assert sum(problems, []) == []
    assert len([path for path in flushed if path.endswith("/checkpoints")]) >= 2
