"""One writer to a folder, for as long as it lives and no longer."""

import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lockstep.checkpoint import FolderLock
from lockstep.errors import CheckpointError, FolderInUseError


def start(body: Callable[[], object]) -> int:
    """Run `body` in a forked process that ends without pytest's help."""
    pid = os.fork()
    if pid:
        return pid
    try:
        body()
        os._exit(0)
    except BaseException:
        os._exit(1)


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@contextmanager
def holder(folder: Path, *, with_child: bool = False) -> Iterator[tuple[int, int]]:
    """Hold the lock in another process, which may have a child of its own."""
    reading, writing = os.pipe()

    def hold() -> None:
        FolderLock(folder).acquire()
        child = start(lambda: time.sleep(60)) if with_child else 0
        os.write(writing, f"{child}\n".encode())
        time.sleep(60)

    pid = start(hold)
    child = int(os.read(reading, 100))
    try:
        yield pid, child
    finally:
        for leftover in (pid, child):
            if leftover:
                with suppress(ProcessLookupError):
                    os.kill(leftover, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


def test_a_live_holder_is_named(tmp_path: Path) -> None:
    with holder(tmp_path) as (pid, _):
        began = time.monotonic()
        with pytest.raises(FolderInUseError) as caught:
            FolderLock(tmp_path).acquire()
        assert time.monotonic() - began < 30  # the holder stays for 60 s
        message = str(caught.value)
        assert f"process {pid} on {socket.gethostname()}, since 20" in message
        assert str(tmp_path) in message


def test_asking_again_does_not_take_the_lock_from_its_holder(tmp_path: Path) -> None:
    with holder(tmp_path):
        for _ in range(3):
            with pytest.raises(FolderInUseError):
                FolderLock(tmp_path).acquire()


@pytest.mark.parametrize("with_child", [False, True], ids=["alone", "with a living child"])
def test_a_killed_holder_leaves_the_folder_free_at_once(tmp_path: Path, with_child: bool) -> None:
    with holder(tmp_path, with_child=with_child) as (pid, child):
        end(pid)
        if child:
            os.kill(child, 0)  # alive
        with FolderLock(tmp_path):
            assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def test_a_lock_that_children_inherit_would_not_be_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.checkpoint.lock.fcntl.lockf", fcntl.flock)
    with pytest.raises(FolderInUseError):
        test_a_killed_holder_leaves_the_folder_free_at_once(tmp_path, True)


def test_one_process_cannot_lock_twice(tmp_path: Path) -> None:
    first = FolderLock(tmp_path).acquire()
    (tmp_path / "link").symlink_to(tmp_path)
    for folder in (tmp_path, tmp_path / "link"):
        with pytest.raises(FolderInUseError, match="this process, "):
            FolderLock(folder).acquire()
    first.release()
    first.release()
    with FolderLock(tmp_path):
        pass
    assert first.acquire() is first
    first.release()


def test_a_forked_child_can_neither_take_nor_release_its_parents_lock(tmp_path: Path) -> None:
    def meddle() -> None:
        lock.release()
        with pytest.raises(FolderInUseError, match=f"process {os.getppid()} "):
            FolderLock(tmp_path).acquire()

    lock = FolderLock(tmp_path).acquire()
    _, status = os.waitpid(start(meddle), 0)
    assert status == 0

    def try_again() -> None:
        with pytest.raises(FolderInUseError):
            FolderLock(tmp_path).acquire()

    _, status = os.waitpid(start(try_again), 0)
    assert status == 0
    lock.release()


def test_a_release_frees_the_folder_for_others(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "new" / "run"):
        pass
    _, status = os.waitpid(start(FolderLock(tmp_path / "new" / "run").acquire), 0)
    assert status == 0


@pytest.mark.parametrize("round_", range(3))
def test_of_twenty_runs_that_start_together_one_wins(tmp_path: Path, round_: int) -> None:
    gate_out, gate_in = os.pipe()
    told_out, told_in = os.pipe()

    def race() -> None:
        os.close(gate_in)
        os.read(gate_out, 1)  # returns for all when the parent closes its end
        try:
            FolderLock(tmp_path).acquire()
            os.write(told_in, f"{os.getpid()} won\n".encode())
        except FolderInUseError as error:
            named = error.problem.split("process ")[1].split(" ")[0]
            os.write(told_in, f"{named} lost\n".encode())
        time.sleep(60)

    pids = [start(race) for _ in range(20)]
    os.close(gate_in)
    told = ""
    while told.count("\n") < 20:
        told += os.read(told_out, 4096).decode()
    for pid in pids:
        end(pid)
    os.close(gate_out)
    os.close(told_out)
    os.close(told_in)
    winners = {line.split()[0] for line in told.splitlines() if line.endswith("won")}
    named = {line.split()[0] for line in told.splitlines() if line.endswith("lost")}
    assert told.count("won") == 1
    assert named == winners


def test_a_holder_that_has_not_said_who_it_is_is_reported_all_the_same(tmp_path: Path) -> None:
    with holder(tmp_path):
        os.truncate(tmp_path / "lock", 0)
        with pytest.raises(FolderInUseError, match="has not written its name"):
            FolderLock(tmp_path).acquire()


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("lockstep.checkpoint.lock.fcntl.lockf", no_locks)
    with pytest.raises(CheckpointError, match="Function not implemented"):
        FolderLock(tmp_path).acquire()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot lock"):
        FolderLock(tmp_path / "file").acquire()
