"""Of two groups of processes that save into one folder, only the later one counts.

No lock protects them here: it is lost, or does not reach the other host.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fencing
import pytest
import torch
from checkpoint_damage import is_right, killed, parts, save_shared

from lockstep import CheckpointStore, RunConfig, fit
from lockstep.checkpoint import generation
from lockstep.checkpoint import store as store_module
from lockstep.errors import CheckpointError, LockstepError, TakenOverError
from lockstep.testing import TinyTask, run_ranks

torch.set_num_threads(1)


def test_a_group_suspended_anywhere_in_its_save_leaves_one_chain(tmp_path: Path) -> None:
    """What `benchmarks/fencing.py` does a hundred times."""
    endings, faults = fencing.sweep(10, seed=4, folder=tmp_path)
    assert faults == []
    assert endings["refused"] >= 5


def test_without_the_two_looks_two_chains_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_is_stale", lambda *_: False)
    monkeypatch.setattr(generation, "raise_if_taken_over", lambda *_: None)
    found: list[str] = []
    for seed in range(8):
        (tmp_path / str(seed)).mkdir()
        found += fencing.sweep(5, seed, tmp_path / str(seed))[1]
        if any("old group" in fault or "not the new group's" in fault for fault in found):
            return
    raise AssertionError("40 tries without the two looks, and nothing went wrong")


# --- Through `fit` ----------------------------------------------------------------------


def train(folder: Path, max_steps: int, kind: type[TinyTask] = TinyTask, **checkpoint: Any) -> str:
    """Train up to a step, saving every second; return how that ended."""
    values = {
        "output_dir": str(folder),
        "max_steps": max_steps,
        "batch": {"batch_size": 4},
        "checkpoint": {"every_steps": 2, "background": False, **checkpoint},
        "evaluation": {"every_epochs": None, "save_best": False},
        "sinks": {"curves": False},
        "device": "cpu",
        "num_threads": 1,
    }
    try:
        return f"done at {fit(kind(48, 0), RunConfig.parse(values)).step}"
    except LockstepError as error:
        return f"{type(error).__name__}: {error.problem}"


def suspend_before(name: str, wanted: Callable[..., bool]) -> None:
    """Suspend this process at the first call of a function of `os` that is the wanted one."""
    real = getattr(os, name)

    def call(*args: Any, **named: Any) -> Any:
        if wanted(*args):
            setattr(os, name, real)
            signal.raise_signal(signal.SIGSTOP)
        return real(*args, **named)

    setattr(os, name, call)


@contextmanager
def suspended(action: Callable[[], str], told: Path) -> Iterator[Callable[[], str]]:
    """Run `action` in a process until it suspends itself; yield what lets it go on to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            with told.open("w") as file:
                file.write(action())
        finally:
            os._exit(0)

    def go_on() -> str:
        os.kill(pid, signal.SIGCONT)
        os.waitpid(pid, 0)
        return told.read_text()

    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), told.read_text()
    try:
        yield go_on
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def commits_step_4(_: Any, target: Any) -> bool:
    return Path(target).name == "step_00000004"


def writes_manifest_of_step_4(path: Any, flags: int, *_: Any) -> bool:
    return str(path).endswith("manifest.json") and "step_00000004" in str(path) and flags & 1 == 1


class Killed(TinyTask):
    """Dies in its first step."""

    def loss(self, model: Any, batch: Any, context: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_suspended_run_cannot_save_once_another_has_its_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not even one that was told to go on without saving."""
    folder = tmp_path / "run"

    def old_run() -> str:
        suspend_before("open", writes_manifest_of_step_4)
        return train(folder, 8, on_failed_save="continue")

    with suspended(old_run, tmp_path / "told") as go_on:
        os.unlink(folder / "lock")  # as a file system does that forgets its locks
        assert run_ranks(1, train, folder, 3) == ["done at 3"]
        said = go_on()
    taker = json.loads((folder / "checkpoints" / "generation_00000002.json").read_text())
    where = f"(process {taker['pid']} on {taker['host']})"
    assert said.startswith(f"TakenOverError: another run took over {folder / 'checkpoints'} at 20")
    assert said.endswith(f"{where}; this one may not save any more")
    checkpoint, rejected = CheckpointStore(folder / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.generation, rejected) == (3, 2, [])


def test_a_commit_that_comes_too_late_to_be_refused_is_never_resumed_from(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The new group dies before it has saved; only the old one's late commit is newer."""
    folder = tmp_path / "run"
    late = folder / "checkpoints" / "step_00000004"

    def old_run() -> str:
        suspend_before("rename", commits_step_4)
        return train(folder, 8)

    with suspended(old_run, tmp_path / "told") as go_on:
        os.unlink(folder / "lock")
        with pytest.raises(RuntimeError, match="ended without returning a result"):
            run_ranks(1, train, folder, 3, Killed)
        said = go_on()
    assert late.is_dir()
    assert said.startswith("TakenOverError: another run took over")
    capfd.readouterr()
    assert run_ranks(1, train, folder, 3) == ["done at 3"]
    printed = capfd.readouterr().out
    assert f"skipped checkpoint {late}: " in printed
    assert "saved by generation 1 of this run, which generation 2 had replaced at 20" in printed
    assert "resumed at step 2 from" in printed
    assert not late.exists()
    assert late.with_name("superseded_1_step_00000004").is_dir()


@pytest.mark.parametrize(
    ("module", "name", "test"),
    [
        (
            store_module,
            "_is_stale",
            test_a_commit_that_comes_too_late_to_be_refused_is_never_resumed_from,
        ),
        (
            generation,
            "raise_if_taken_over",
            test_a_suspended_run_cannot_save_once_another_has_its_folder,
        ),
    ],
)
def test_without_either_look_the_suspended_run_would_be_resumed(
    module: Any, name: str, test: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(module, name, lambda *_: False)
    with pytest.raises(AssertionError):
        test(tmp_path, capfd)


def test_ranks_that_save_a_shard_each_belong_to_one_generation(tmp_path: Path) -> None:
    assert run_ranks(2, lambda: train(tmp_path, 2, sharded=True)) == ["done at 2"] * 2
    assert run_ranks(2, lambda: train(tmp_path, 4, sharded=True)) == ["done at 4"] * 2
    store = CheckpointStore(tmp_path / "checkpoints", recipe="tiny")
    assert [store.open(store.path(step)).generation for step in store.steps()] == [1, 2]
    assert len(generation.claims(store.folder)) == 1, "claims of earlier groups are removed"


# --- The claims themselves --------------------------------------------------------------


def groups(folder: Path) -> tuple[CheckpointStore, CheckpointStore]:
    """Return an old group that has saved steps 1 and 2, and one that resumed from the latter."""
    old, new = CheckpointStore(folder, keep_last=None), CheckpointStore(folder, keep_last=None)
    old.take_over()
    for step in (1, 2):
        old.save(step, parts(step), {})
    new.take_over(2)
    return old, new


def test_what_was_there_when_a_group_took_over_still_counts(tmp_path: Path) -> None:
    _, new = groups(tmp_path)
    checkpoint, rejected = new.latest()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.generation, rejected) == (2, 1, [])


@pytest.mark.parametrize(
    "action",
    [
        lambda store: store.save(3, parts(3), {}),
        lambda store: save_shared(store, 3),
        lambda store: store.name(2, "best_model.pt"),
        lambda store: store.set_aside_after(1),
    ],
    ids=["save", "save sharded", "name", "set aside"],
)
def test_the_old_group_may_not_write_any_more(
    action: Callable[[CheckpointStore], object], tmp_path: Path
) -> None:
    old, _ = groups(tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CheckpointError, match="another run took over"):
        action(old)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_group_never_removes_the_unfinished_work_of_a_later_one(tmp_path: Path) -> None:
    old, new = groups(tmp_path)
    assert new.begin(3)
    old.sweep()
    assert [name for name in os.listdir(tmp_path) if name.startswith(".writing")]


def test_a_number_lost_with_its_file_is_not_given_again(tmp_path: Path) -> None:
    """Somebody copies the checkpoints to another folder, but not the claim."""
    _, new = groups(tmp_path)
    new.save(3, parts(3), {})
    for claim in tmp_path.glob("generation_*"):
        claim.unlink()
    store = CheckpointStore(tmp_path)
    assert store.take_over(3) == 3
    assert store.latest()[0].step == 3  # type: ignore[union-attr]


def test_a_claim_of_a_group_that_died_at_once_takes_nothing_away(tmp_path: Path) -> None:
    old, new = groups(tmp_path)
    new.save(3, parts(3), {})
    (tmp_path / "generation_00000003.json").write_text("")
    assert new.latest()[0].step == 3  # type: ignore[union-attr]
    assert CheckpointStore(tmp_path).take_over(3) == 4


def test_a_checkpoint_of_before_there_were_generations_counts(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, parts(1), {})
    assert store.latest()[0].generation == 0  # type: ignore[union-attr]
    store.take_over(1)
    assert store.latest()[0].step == 1  # type: ignore[union-attr]


def test_a_custom_loop_that_saves_into_the_folder_of_a_run_takes_it_over(tmp_path: Path) -> None:
    old, new = groups(tmp_path)
    CheckpointStore(tmp_path, keep_last=None).save(3, parts(3), {})
    assert CheckpointStore(tmp_path).latest()[0].generation == 3  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="another run took over"):
        new.save(4, parts(4), {})


def test_of_twenty_groups_that_claim_together_each_has_a_number_of_its_own(tmp_path: Path) -> None:
    gate_out, gate_in = os.pipe()
    told_out, told_in = os.pipe()
    pids = []
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            os.close(gate_in)
            os.read(gate_out, 1)
            try:
                os.write(told_in, f"{CheckpointStore(tmp_path).take_over()}\n".encode())
            except TakenOverError:
                os.write(told_in, b"late\n")
            finally:
                os._exit(0)
        pids.append(pid)
    os.close(gate_in)
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(told_in)
    os.close(gate_out)
    told = b""
    while chunk := os.read(told_out, 4096):
        told += chunk
    os.close(told_out)
    numbers = [int(line) for line in told.split() if line != b"late"]
    assert len(told.split()) == 20
    assert len(set(numbers)) == len(numbers) > 0
    assert generation.newest(tmp_path).number == max(numbers)  # type: ignore[union-attr]


def test_a_take_over_killed_at_any_call_loses_nothing(tmp_path: Path) -> None:
    def take_over_and_save() -> None:
        store = CheckpointStore(folder, keep_last=2)
        store.take_over(2)
        store.save(3, parts(3), {})
        store.name(3, "best_model.pt")

    for last in range(1, 200, 3):
        folder = tmp_path / str(last)
        groups(folder)
        if not killed(take_over_and_save, last, torn=bool(last % 2)):
            break
        checkpoint, rejected = CheckpointStore(folder).latest()
        assert checkpoint is not None
        assert (checkpoint.step in (2, 3), is_right(checkpoint), rejected) == (True, True, [])
        store = CheckpointStore(folder, keep_last=2)
        store.take_over(checkpoint.step)
        store.save(4, parts(4), {})
        assert store.latest()[0].step == 4  # type: ignore[union-attr]
        assert [name for name in os.listdir(folder) if name.startswith(".")] == []
        assert len(generation.claims(folder)) == 1
    assert last > 30


@pytest.mark.parametrize(
    "content",
    ["[" * 10**5, "{}", "null", '{"steps": 3}', "\0", '{"number": 1e999, "steps": [], "host": 1}'],
)
def test_a_claim_that_makes_no_sense_is_not_one(content: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, parts(1), {})
    (tmp_path / "generation_00000007.json").write_text(content)
    assert store.latest()[0].step == 1  # type: ignore[union-attr]
    assert CheckpointStore(tmp_path).take_over(1) == 8
