"""A save that is killed, refused or cut off by a power loss costs at most itself.

The rig replaces the functions of `os` through which a save reaches the disk,
and lets the n-th call be the last one, for every n in turn.
"""

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint import CheckpointStore
from lockstep.checkpoint import layout as layout_module
from lockstep.errors import CheckpointError

torch.set_num_threads(1)
CALLS = ("open", "write", "fsync", "mkdir", "rename", "replace", "symlink", "unlink", "rmdir")
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
                if repr(loaded.load(part)) != repr(tree):
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
    if checkpoint is None or repr(checkpoint.load("model")) != repr(parts(4)["model"]):
        problems.append("the next checkpoint is not what was saved")
    return problems


def die_at(last: int, torn: bool) -> None:
    """Let the `last`-th call from now kill this process, half done if it is a write."""
    count = 0

    def deadly(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == last:
                try:
                    if torn and name == "write":
                        real(args[0], bytes(args[1])[: len(args[1]) // 2])
                    elif torn:
                        real(*args, **kwargs)
                finally:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, deadly(name, getattr(os, name)))


def killed_everywhere(
    template: Path, tmp_path: Path, save: Save, *, torn: bool = False
) -> Iterator[list[str]]:
    """Kill a save at each of its calls in turn; yield the problems after each."""
    for last in range(1, 1000):
        store = fresh(template, tmp_path)
        pid = os.fork()
        if pid == 0:
            try:
                die_at(last, torn)
                save(store)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return
        assert os.WTERMSIG(status) == signal.SIGKILL
        found = problems_with(store) or problems_of_going_on(store)
        yield [f"call {last}: {problem}" for problem in found]
    raise AssertionError("the save never came to its end")


@pytest.mark.parametrize("torn", [False, True], ids=["before the call", "in or after the call"])
def test_a_save_killed_at_any_call_loses_nothing_before_it(
    template: Path, tmp_path: Path, torn: bool
) -> None:
    problems = list(killed_everywhere(template, tmp_path, save_third, torn=torn))
    assert sum(problems, []) == []
    assert len(problems) >= 30


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
        layout_module.write_checkpoint(store.path(3), 3, "custom", parts(3), {})
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


@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
def test_an_error_of_any_call_is_reported_and_loses_nothing(
    template: Path, tmp_path: Path, stays: bool
) -> None:
    num_reported = 0
    for fault in (Fault(first, stays=stays) for first in range(1, 1000)):
        store = fresh(template, tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            fault.install(patch)
            said = problem_of(save_third, store)
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


class Trace:
    """Record in which order a save reaches the disk."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        paths: dict[int, str] = {}
        real = {name: getattr(os, name) for name in ("open", "write", "fsync", "rename")}

        def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            descriptor: int = real["open"](path, flags, *args, **kwargs)
            paths[descriptor] = os.fspath(path)
            return descriptor

        def write(descriptor: int, content: Any) -> int:
            self.events.append(("write", paths[descriptor]))
            return int(real["write"](descriptor, content))

        def fsync(descriptor: int) -> None:
            self.events.append(("fsync", paths[descriptor]))
            real["fsync"](descriptor)

        def rename(source: Any, target: Any) -> None:
            self.events.append(("rename", os.fspath(target)))
            real["rename"](source, target)

        for name, double in [
            ("open", open_),
            ("write", write),
            ("fsync", fsync),
            ("rename", rename),
        ]:
            patch.setattr(os, name, double)


def power_loss_hazards(events: list[tuple[str, str]], store: CheckpointStore) -> list[str]:
    """Return what a power loss could undo although a later step relied on it."""
    hazards = []
    aside = f"{store.folder}/.writing_step_00000003"
    commit = events.index(("rename", str(store.path(3))))
    before, after = events[:commit], events[commit + 1 :]
    written = [path for what, path in before if what == "write"]
    for path in dict.fromkeys(written):
        last_write = max(n for n, event in enumerate(before) if event == ("write", path))
        if ("fsync", path) not in before[last_write:]:
            hazards.append(f"{path} not flushed before the commit")
        if ("fsync", aside) not in before[last_write:]:
            hazards.append(f"the name of {path} not flushed before the commit")
    if not written or not written[-1].endswith("manifest.json"):
        hazards.append("the manifest is not the last file")
    removal = [
        n for n, (what, path) in enumerate(after) if what == "rename" and ".removing" in path
    ]
    if ("fsync", str(store.folder)) not in after[: removal[0] if removal else None]:
        hazards.append("the commit not flushed before something was removed")
    if not removal:
        hazards.append("nothing was removed, so its order was not seen")
    return hazards


def hazards_of_a_save(
    store: CheckpointStore, without: Callable[[str], bool] | None = None
) -> list[str]:
    trace = Trace()
    with pytest.MonkeyPatch.context() as patch:
        trace.install(patch)
        store.save(3, parts(3), {})
    events = [
        event
        for event in trace.events
        if without is None or event[0] != "fsync" or not without(event[1])
    ]
    return power_loss_hazards(events, store)


def test_everything_a_commit_relies_on_is_flushed_before_it(template: Path, tmp_path: Path) -> None:
    assert hazards_of_a_save(fresh(template, tmp_path)) == []


@pytest.mark.parametrize("forgotten", ["model.safetensors", "manifest.json", "000003", "run"])
def test_a_forgotten_flush_would_be_caught(template: Path, tmp_path: Path, forgotten: str) -> None:
    store = fresh(template, tmp_path)
    assert hazards_of_a_save(store, without=lambda path: path.endswith(forgotten))
