"""Real ranks save together: in shares, in the background, and when one of them cannot."""

import errno
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_damage import digest, flip
from torch import Tensor, nn

from lockstep import CheckpointStore, PartialLoss, RunConfig, fit, read_events
from lockstep.checkpoint.generation import is_claim
from lockstep.errors import LockstepError
from lockstep.observe.events import EventLog
from lockstep.task import Context
from lockstep.testing import TinyTask, run_ranks

Before = Callable[[], object]


def run(
    folder: Path,
    num_ranks: int,
    before: Before = int,
    kind: type[TinyTask] = TinyTask,
    **checkpoint: Any,
) -> list[Any]:
    """Train six steps, saving every second; return what ranks say, an error as (class, problem)."""
    saving = {"every_steps": 2, "sharded": True} | checkpoint
    values = {
        "output_dir": str(folder),
        "max_steps": saving.pop("max_steps", 6),
        "batch": {"batch_size": 2, "global_batch_size": 12},
        "evaluation": {"every_epochs": None, "save_best": False},
        "checkpoint": saving,
        "sinks": {"curves": False},
        "log_every": 1,
        "device": "cpu",
        "timeout_s": 20,
        "averages": [0.9],
    }

    def one_rank() -> Any:
        before()
        try:
            return fit(kind(48), RunConfig.parse(values)).step
        except LockstepError as error:
            return type(error).__name__, error.problem

    return run_ranks(num_ranks, one_rank, timeout_s=30)


def store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", recipe="tiny")


def names(folder: Path) -> list[str]:
    found = sorted(os.listdir(folder / "checkpoints"))
    return [name for name in found if not is_claim(name)]


def content(folder: Path, step: int) -> dict[str, str]:
    checkpoint = store(folder).open(store(folder).path(step))
    return {part: digest(checkpoint.load(part)) for part in checkpoint.parts}


def warnings(folder: Path, rank: int) -> list[tuple[int, str]]:
    found = read_events(folder, rank, raw=True)
    return [(e["step"], e["message"]) for e in found if e["event"] == "warning"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two ranks whose first one saves everything."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, 2, sharded=False)
    return folder


@pytest.mark.parametrize("background", [True, False])
def test_ranks_that_save_in_shares_save_what_one_would(
    background: bool, whole: Path, tmp_path: Path
) -> None:
    def dawdle() -> None:
        """Write so late that the next step has changed the weights, if it can."""
        real = CheckpointStore.write_share

        def write_share(self: CheckpointStore, step: int, share: Any) -> Any:
            time.sleep(0.2)
            return real(self, step, share)

        CheckpointStore.write_share = write_share  # type: ignore[method-assign]

    assert run(tmp_path, 2, dawdle, background=background) == [6, 6]
    assert names(tmp_path) == ["step_00000002", "step_00000004", "step_00000006"]
    for step in (2, 4, 6):
        files = " ".join(os.listdir(store(tmp_path).path(step)))
        assert ".0_of_2.safetensors" in files
        assert ".1_of_2.safetensors" in files
        assert "model.safetensors" not in files
        assert content(tmp_path, step) == content(whole, step)


def test_a_share_that_lacks_but_its_name_gets_it_at_the_next_try(tmp_path: Path) -> None:
    def fail_once() -> None:
        real, tries = os.symlink, iter([OSError(errno.EDQUOT, "quota")])

        def symlink(*args: Any, **options: Any) -> None:
            if error := next(tries, None):
                raise error
            real(*args, **options)

        os.symlink = symlink  # type: ignore[assignment]

    saving = {"every_steps": 6, "name_steps": True, "on_failed_save": "continue"}
    assert run(tmp_path, 2, fail_once, **saving) == [6, 6]
    assert "quota" in warnings(tmp_path, 0)[0][1]
    assert names(tmp_path) == ["checkpoint_step_6.pt", "step_00000006"]


class Remembering(nn.Module):
    """Keeps what it saw last, on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(200, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.last.fill_(float(x.detach().sum()))
        return x


class EachItsOwn(TinyTask):
    """Ranks end up with other buffers; what the task remembers is the same on all of them."""

    seen = torch.zeros(0)

    def build_model(self) -> nn.Module:
        return nn.Sequential(super().build_model(), Remembering())

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        if context.training:  # of held-out batches ranks have different numbers
            self.seen = torch.cat([self.seen, torch.ones(10)])
        return super().loss(model, batch, context)

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


def test_shares_are_the_first_rank_s_where_ranks_have_something_of_their_own(
    tmp_path: Path,
) -> None:
    for name in ("whole", "shares"):
        said = run(tmp_path / name, 2, kind=EachItsOwn, sharded=name == "shares", max_steps=2)
        assert said == [2, 2]
    assert content(tmp_path / "shares", 2) == content(tmp_path / "whole", 2)


def test_shares_of_two_ranks_go_on_on_three_and_on_one(whole: Path, tmp_path: Path) -> None:
    assert run(tmp_path, 2, max_steps=2) == [2, 2]
    assert run(tmp_path, 3, max_steps=4) == [4, 4, 4]
    assert run(tmp_path, 1, max_steps=6) == [6]
    resumed = [e["path"] for e in read_events(tmp_path, raw=True) if e["event"] == "resume"]
    assert [Path(path).name for path in resumed] == ["step_00000002", "step_00000004"]
    assert content(tmp_path, 2) == content(whole, 2)
    names_of_last = os.listdir(store(tmp_path).path(6))
    assert "model.safetensors" in names_of_last, "one rank has nobody to share with"


def no_room(rank: int, *failing: int, after: Callable[[], object] = int) -> Before:
    """Let these writes of a rank's checkpoints, counted from 1, find a full disk."""

    def plant() -> None:
        real, count = os.write, 0

        def write(descriptor: int, data: Any) -> int:
            nonlocal count
            if ".writing_" in os.readlink(f"/proc/self/fd/{descriptor}"):
                count += 1
                if count in failing:
                    after()
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, data)

        if os.environ["RANK"] == str(rank):
            os.write = write

    return plant


@pytest.mark.parametrize(("rank", "sharded"), [(1, True), (0, True), (0, False)])
def test_a_share_that_fails_commits_nothing_and_is_raised_on_all_ranks(
    rank: int, sharded: bool, tmp_path: Path
) -> None:
    said = run(tmp_path, 2, no_room(rank, 1), sharded=sharded)
    assert said[0] == said[1]
    kind, problem = said[0]
    assert kind == "CheckpointError"
    assert problem.startswith(f"rank {rank}: cannot save step 2 in ")
    assert "No space left on device" in problem
    assert names(tmp_path) == []
    assert run(tmp_path, 2, sharded=sharded) == [6, 6], "once there is room"


@pytest.mark.parametrize(("num_ranks", "sharded"), [(2, True), (2, False), (1, False)])
def test_a_run_that_may_go_on_says_loudly_that_it_has_not_saved(
    num_ranks: int, sharded: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = run(
        tmp_path,
        num_ranks,
        no_room(num_ranks - 1 if sharded else 0, 1),
        sharded=sharded,
        on_failed_save="continue",
        background=False,
    )
    assert told == [6] * num_ranks
    assert names(tmp_path) == ["step_00000004", "step_00000006"]
    for rank in range(num_ranks):
        (step, message), *others = warnings(tmp_path, rank)
        assert (step, others) == (2, [])
        assert message.startswith("NOT SAVED: ")
        assert "No space left on device" in message
    assert capfd.readouterr().out.count("warning: NOT SAVED: ") == 1


@pytest.mark.parametrize("sharded", [True, False])
def test_a_failure_in_the_background_is_said_at_the_next_step(
    sharded: bool, tmp_path: Path
) -> None:
    """The save after step 2 fails while step 3 is computed, which waits for just that."""

    class Waits(TinyTask):
        def loss(self, model: Any, batch: Any, context: Any) -> Any:
            if context.step == 2:
                begun.set()
            while context.step == 2 and is_writing():
                time.sleep(0.01)
            return super().loss(model, batch, context)

    def is_writing() -> bool:
        return any(thread.name == "lockstep-writer" for thread in threading.enumerate())

    begun = threading.Event()
    fault = no_room(0, 1, after=lambda: begun.wait(20))
    told = run(tmp_path, 2, fault, Waits, sharded=sharded, on_failed_save="continue")
    assert told == [6, 6]
    assert [[step for step, _ in warnings(tmp_path, rank)] for rank in (0, 1)] == [[3], [3]]
    assert names(tmp_path) == ["step_00000004", "step_00000006"]


@pytest.mark.parametrize("sharded", [True, False])
def test_a_checkpoint_is_told_of_when_it_is_there(sharded: bool, tmp_path: Path) -> None:
    """Who reads the line and kills the run at once goes on from there."""

    def watch() -> None:
        real = EventLog.write

        def write(log: EventLog, kind: str, step: int, **fields: Any) -> Any:
            assert kind != "checkpoint" or store(tmp_path).latest()[0].step == step  # type: ignore[union-attr]
            return real(log, kind, step, **fields)

        EventLog.write = write  # type: ignore[method-assign]

    assert run(tmp_path, 2, watch, sharded=sharded) == [6, 6]
    told = [event for event in read_events(tmp_path, raw=True) if event["event"] == "checkpoint"]
    assert [event["step"] for event in told] == [2, 4, 6]


def test_the_last_save_of_a_run_must_succeed(tmp_path: Path) -> None:
    said = run(tmp_path, 2, no_room(1, *range(1, 99)), on_failed_save="continue")
    assert said[0] == said[1]
    assert said[0][0] == "CheckpointError"
    assert "cannot save step 6" in said[0][1]
    assert names(tmp_path) == []


def test_a_rank_that_dies_in_its_share_leaves_the_checkpoint_before(
    whole: Path, tmp_path: Path
) -> None:
    def plant() -> None:
        real = CheckpointStore.write_share

        def write_share(self: CheckpointStore, step: int, share: Any) -> Any:
            if step == 4 and share.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, step, share)

        CheckpointStore.write_share = write_share  # type: ignore[method-assign]

    with pytest.raises(RuntimeError, match="rank 0 failed|rank 1 ended without returning a result"):
        run(tmp_path, 2, plant)
    assert store(tmp_path).steps() == [2]
    assert content(tmp_path, 2) == content(whole, 2)
    assert run(tmp_path, 2) == [6, 6]
    assert names(tmp_path) == ["step_00000002", "step_00000004", "step_00000006"]
    assert content(tmp_path, 6) == content(whole, 6)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_resumed_run_says_which_checkpoint_it_passed_over(
    sharded: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, 2, sharded=sharded, max_steps=4)
    flip(random.Random(0), store(tmp_path).path(4))
    assert run(tmp_path, 2, sharded=sharded) == [6, 6]
    printed = capfd.readouterr().out
    assert f"skipped checkpoint {store(tmp_path).path(4)}: " in printed
    assert f"resumed at step 2 from {store(tmp_path).path(2)}" in printed


def forbid_unpickling() -> None:
    """End this process with an error as soon as anything is unpickled, or could be."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was unpickled")

    for owner, name in [
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (pickle, "_Unpickler"),
        (torch, "load"),
        (torch.serialization, "load"),
    ]:
        setattr(owner, name, refuse)

    def watch(event: str, _: Any) -> None:
        # Raised by the interpreter itself, however the unpickler was reached.
        if event == "pickle.find_class":
            raise AssertionError("something was unpickled")

    sys.addaudithook(watch)


@pytest.mark.parametrize("sharded", [True, False])
def test_no_unpickler_is_reached_by_a_resume(sharded: bool, tmp_path: Path) -> None:
    run(tmp_path, 2, max_steps=2, sharded=sharded)
    assert run(tmp_path, 2, forbid_unpickling, sharded=sharded) == [6, 6]


def test_an_unpickler_would_be_noticed(tmp_path: Path) -> None:
    def plant() -> None:
        from lockstep.checkpoint.layout import Checkpoint

        load, unpickle = Checkpoint.load, pickle.loads  # kept from before they are forbidden

        def careless(self: Checkpoint, part: str) -> Any:
            unpickle(pickle.dumps(Path("anything with a class")))
            return load(self, part)

        Checkpoint.load = careless  # type: ignore[method-assign]
        forbid_unpickling()

    run(tmp_path, 1, max_steps=2)
    with pytest.raises(RuntimeError, match="something was unpickled"):
        run(tmp_path, 1, plant)
