"""A custom loop owns the folder it saves into, as `fit` does."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import CheckpointStore, World
from lockstep.errors import CheckpointError, LockstepError
from lockstep.testing import run_ranks


def told(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except LockstepError as error:
        return type(error).__name__, str(error), error.exit_code


def save(folder: Path, value: float, *steps: int, loads: bool = False) -> Any:
    """Save a model of one weight at some steps, in a process of its own."""
    with World.enter("cpu", timeout_s=20) as world:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, value)
        store = CheckpointStore(folder, keep_last=None)
        begun = store.load_into(model=model) if loads else 0
        for step in steps:
            refusal = told(lambda step=step: store.save_from(world, step, model=model))
            if refusal:
                return refusal
        return begun, model.weight.item()


def saved(folder: Path) -> dict[int, float]:
    store = CheckpointStore(folder)
    return {
        step: store.open(store.path(step)).load("model")["weight"].item() for step in store.steps()
    }


@contextmanager
def another_loop(folder: Path) -> Iterator[int]:
    """Let another process save step 1 and live on inside the block."""
    context = multiprocessing.get_context("fork")
    begun, over = context.Event(), context.Event()

    def loop() -> None:
        save(folder, 1.0, 1)
        begun.set()
        over.wait(60)

    process = context.Process(target=loop)
    process.start()
    try:
        assert begun.wait(60)
        assert process.pid is not None
        yield process.pid
    finally:
        over.set()
        process.join()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_second_loop_in_the_same_folder_is_refused(num_ranks: int, tmp_path: Path) -> None:
    with another_loop(tmp_path) as pid:
        results = run_ranks(num_ranks, save, tmp_path, 2.0, 1, 2)
    for kind, said, exit_code in results:
        assert kind == "FolderInUseError"
        assert f"{tmp_path} is in use by process {pid}" in said
        assert exit_code
    assert saved(tmp_path) == {1: 1.0}


def test_the_folder_can_be_read_meanwhile(tmp_path: Path) -> None:
    with another_loop(tmp_path):
        model = nn.Linear(1, 1, bias=False)
        assert CheckpointStore(tmp_path).load_into(model=model) == 1
        assert model.weight.item() == 1.0


def test_a_part_that_a_loop_does_not_load_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    CheckpointStore(tmp_path).save(1, {n: o.state_dict() for n, o in parts.items()}, {})
    assert CheckpointStore(tmp_path).load_into(**parts) == 1
    store = CheckpointStore(tmp_path)
    store.load_into(schedule=schedule)
    store.load_into(model=model, optimizer=optimizer)
    assert not caplog.messages
    CheckpointStore(tmp_path).load_into(model=model, optimizer=optimizer)
    (message,) = caplog.messages
    assert "step_00000001 also holds schedule, which load_into was not given" in message


def test_a_checkpoint_of_any_recipe_is_opened_unless_one_is_given(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, recipe="charlm").save(1, {"model": {}}, {})
    assert CheckpointStore(tmp_path).open("step_00000001").recipe == "charlm"
    with pytest.raises(CheckpointError, match="belongs to recipe 'charlm'"):
        CheckpointStore(tmp_path, recipe="custom").open("step_00000001")
    with pytest.raises(CheckpointError, match="belongs to recipe 'charlm'"):
        CheckpointStore(tmp_path).load_into(model=nn.Linear(1, 1))


def test_a_loop_that_loads_nothing_sets_the_checkpoints_of_another_run_aside(
    tmp_path: Path,
) -> None:
    run_ranks(1, save, tmp_path, 1.0, 1, 2, 3)
    run_ranks(1, save, tmp_path, 2.0, 1, 2)
    assert saved(tmp_path) == {1: 2.0, 2: 2.0}
    assert len(list(tmp_path.glob("superseded_1_step_*"))) == 3


def test_a_loop_that_loads_continues_with_what_is_there(tmp_path: Path) -> None:
    run_ranks(1, save, tmp_path, 1.0, 1, 2)
    assert run_ranks(1, lambda: save(tmp_path, 2.0, 2, 3, loads=True)) == [(2, 1.0)]
    assert saved(tmp_path) == {1: 1.0, 2: 1.0, 3: 1.0}
    assert not list(tmp_path.glob("superseded_*"))


def test_a_step_that_another_run_saved_is_never_taken_for_this_ones(tmp_path: Path) -> None:
    run_ranks(1, save, tmp_path, 1.0, 1, 2)
    ((kind, said, _),) = run_ranks(1, lambda: save(tmp_path, 2.0, 1, loads=True))
    assert kind == "CheckpointError"
    assert "step_00000001 was saved by another run, and step 1 of this one is not saved" in said
    assert "try: call store.load_into before the first step" in said
    assert saved(tmp_path) == {1: 1.0, 2: 1.0}


def save_through_many_stores(folder: Path) -> list[int]:
    with World.enter("cpu") as world:
        model = nn.Linear(1, 1)
        for step in (1, 2, 3):
            CheckpointStore(folder).save_from(world, step, model=model)
        assert torch.equal(
            CheckpointStore(folder).open("step_00000003").load("model")["weight"], model.weight
        )
        return CheckpointStore(folder).steps()


def test_one_process_may_use_many_stores_of_a_folder(tmp_path: Path) -> None:
    assert run_ranks(1, save_through_many_stores, tmp_path) == [[1, 2, 3]]


def test_a_loop_that_was_replaced_meanwhile_may_not_save(tmp_path: Path) -> None:
    def be_replaced() -> Any:
        with World.enter("cpu") as world:
            store, model = CheckpointStore(tmp_path), nn.Linear(1, 1)
            store.save_from(world, 1, model=model)
            CheckpointStore(tmp_path).take_over(1)  # on another host, where no lock reaches
            return told(lambda: store.save_from(world, 2, model=model))

    ((kind, said, _),) = run_ranks(1, be_replaced)
    assert kind == "TakenOverError"
    assert "another run took over" in said


def save_through_two_stores(folder: Path) -> Any:
    with World.enter("cpu", timeout_s=20) as world:
        model = nn.Linear(1, 1, bias=False)
        CheckpointStore(folder).save_from(world, 5, model=model)
        return told(lambda: CheckpointStore(folder).save_from(world, 5, model=model))


def test_another_store_of_the_same_process_knows_its_checkpoints(tmp_path: Path) -> None:
    assert run_ranks(2, save_through_two_stores, tmp_path) == [None, None]
