"""Save, find, name and keep checkpoints."""

import os
import pickle
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.checkpoint import BackgroundWriter, Checkpoint, CheckpointStore, snapshot
from lockstep.errors import CheckpointError

torch.set_num_threads(1)
FORMAT_1 = Path(__file__).parent / "format_1"


def parts(step: int) -> dict[str, Any]:
    weight = torch.full((4, 3), float(step))
    return {"model": {"weight": weight}, "optimizer": {"state": {0: weight + 1}, "lr": 0.1}}


def save(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(step, parts(step), {"position": step * 10})


def latest(store: CheckpointStore) -> Checkpoint:
    checkpoint, rejected = store.latest()
    assert checkpoint is not None
    assert not rejected
    return checkpoint


def test_an_empty_or_absent_folder_has_no_latest(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path).latest() == (None, [])
    assert CheckpointStore(tmp_path / "absent").latest() == (None, [])
    assert not (tmp_path / "absent").exists()


def test_what_was_saved_is_found_with_its_meta(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "a" / "b", recipe="jit")
    path = store.save(123, parts(123), {"position": 5, "ledger": "ab", "best": float("inf")})
    checkpoint = latest(CheckpointStore(tmp_path / "a" / "b", recipe="jit"))
    assert path == checkpoint.path == tmp_path / "a" / "b" / "step_00000123" == store.path(123)
    assert (checkpoint.step, checkpoint.recipe) == (123, "jit")
    assert checkpoint.meta == {"position": 5, "ledger": "ab", "best": float("inf")}
    assert checkpoint.parts == ("model", "optimizer")
    assert checkpoint.load("model")["weight"].tolist() == [[123.0] * 3] * 4
    assert checkpoint.load("optimizer")["state"][0].tolist() == [[124.0] * 3] * 4
    assert sorted(os.listdir(path)) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
    ]
    assert os.listdir(tmp_path / "a" / "b") == ["step_00000123"]


def test_weights_can_be_used_without_lockstep(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    path = CheckpointStore(tmp_path).save(1, {"model": model.state_dict()}, {})
    plain = safetensors.torch.load_file(path / "model.safetensors")
    fresh = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    fresh.load_state_dict(plain)
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=None)
    save(store, 999_999_999, 100_000_000_000, 5)
    assert store.steps() == [5, 999_999_999, 100_000_000_000]
    assert latest(store).step == 100_000_000_000


def test_loaded_tensors_outlive_the_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    loaded = latest(store).load("model")["weight"]
    file = tmp_path / "step_00000001" / "model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert loaded.tolist() == [[1.0] * 3] * 4
    assert str(file) not in Path("/proc/self/maps").read_text()


def test_saving_a_step_again_keeps_the_first(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    inode = store.path(1).stat().st_ino
    assert store.save(1, parts(77), {}) == store.path(1)
    assert store.path(1).stat().st_ino == inode
    assert latest(store).load("model")["weight"][0, 0] == 1


def test_saving_over_a_damaged_step_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (store.path(1) / "model.safetensors").write_bytes(b"short")
    save(store, 1)
    assert latest(store).load("model")["weight"][0, 0] == 1
    save(store, 2)
    assert sorted(os.listdir(tmp_path)) == ["step_00000001", "step_00000002"]


def test_leftovers_of_dead_writers_go_at_the_next_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    for name in (".writing_step_00000009", ".removing_step_00000003", ".rejected_step_00000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    (tmp_path / ".naming_best_model.pt").symlink_to("step_00000001")
    (tmp_path / ".notes").write_text("the user's own")
    save(store, 2)
    assert sorted(os.listdir(tmp_path)) == [".notes", "step_00000001", "step_00000002"]


def test_a_save_that_does_not_read_back_fails_and_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    real = os.write
    monkeypatch.setattr(
        os, "write", lambda fd, data: real(fd, bytes(data).replace(b"\x40", b"\x41"))
    )
    with pytest.raises(CheckpointError, match="step_00000002"):
        save(store, 2)
    monkeypatch.setattr(os, "write", real)
    assert latest(store).step == 1
    assert os.listdir(tmp_path) == ["step_00000001"], "and nothing of it was committed"


def test_without_reading_back_the_bad_save_would_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.checkpoint.layout.check_file", lambda *_: None)
    with pytest.raises(pytest.fail.Exception):
        test_a_save_that_does_not_read_back_fails_and_removes_nothing(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "meta",
    [{"a": object()}, {"a": torch.ones(1)}, {(1, 2): 3}],
    ids=["object", "tensor", "tuple key"],
)
def test_meta_that_is_not_json_is_refused_without_litter(meta: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        CheckpointStore(tmp_path).save(1, parts(1), meta)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "/a", "a..b", ".hidden", "a\0", "a b", "x" * 200, "-a"]
)
def test_names_that_could_lead_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "store")
    with pytest.raises(CheckpointError):
        store.save(1, {name: {}}, {})
    save(store, 1)
    with pytest.raises(CheckpointError):
        store.name(1, name)
    assert os.listdir(tmp_path) == ["store"]


def test_impossible_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step -1"):
        save(CheckpointStore(tmp_path), -1)
    with pytest.raises(CheckpointError, match="keep_last=0"):
        CheckpointStore(tmp_path, keep_last=0)


@pytest.mark.parametrize(
    "given", ["step_00000001", "best_model.pt", "checkpoints/best_model.pt", "{run}/best_model.pt"]
)
def test_a_checkpoint_opens_by_any_path_a_user_gives(given: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder)
    save(store, 1, 2)
    store.name(1, "best_model.pt")
    assert store.open(given.format(run=folder)).step == 1
    assert CheckpointStore(tmp_path / "elsewhere").open(str(folder / "best_model.pt")).step == 1


def test_a_copied_checkpoint_opens_under_any_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    save(store, 1)
    os.rename(store.path(1), tmp_path / "keepsake")
    assert store.open(tmp_path / "keepsake").load("model")["weight"][0, 0] == 1


def test_a_name_that_does_not_exist_lists_what_does(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, 2)
    store.name(2, "checkpoint_epoch_10.pt")
    with pytest.raises(CheckpointError) as caught:
        store.open("checkpoints/checkpoint_epoch_11.pt")
    assert "step_00000001, step_00000002, checkpoint_epoch_10.pt" in caught.value.problem
    assert caught.value.remedy == "use 'checkpoint_epoch_10.pt'"
    with pytest.raises(CheckpointError, match="holds none"):
        CheckpointStore(tmp_path / "none").open("zzz")


@pytest.mark.parametrize("given", ["", ".", "loop", "file.pt", "a\0b", "x" * 5000])
def test_what_is_no_checkpoint_is_refused(given: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file.pt").write_bytes(b"a pickle, perhaps")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        CheckpointStore(tmp_path).open(given)


def test_a_part_that_does_not_exist_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with pytest.raises(CheckpointError, match="only model, optimizer\n  try: load model"):
        latest(store).load("modle")


def test_another_recipe_is_refused(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path, recipe="atlas"), 1)
    store = CheckpointStore(tmp_path, recipe="jit")
    for attempt in (store.latest, lambda: store.open("step_00000001"), lambda: save(store, 1)):
        with pytest.raises(CheckpointError, match="belongs to recipe 'atlas', this run is 'jit'"):
            attempt()


def test_an_alias_moves_in_one_piece_and_protects(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    store.name(1, "best_model.pt")
    save(store, 2)
    store.name(2, "checkpoint_epoch_1.pt")
    save(store, 3)
    assert store.steps() == [1, 2, 3]
    assert os.readlink(tmp_path / "best_model.pt") == "step_00000001"
    store.name(3, "best_model.pt")
    save(store, 4)
    assert store.steps() == [2, 3, 4]
    assert store.aliases() == {
        "best_model.pt": "step_00000003",
        "checkpoint_epoch_1.pt": "step_00000002",
    }


def test_a_link_the_user_made_protects_as_well(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    (tmp_path / "favourite").symlink_to(store.path(1).resolve())
    save(store, 2)
    assert store.steps() == [1, 2]


def test_an_alias_never_replaces_something_else(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, 2)
    (tmp_path / "model.pt").write_text("precious")
    for alias in ("model.pt", "step_00000002", "step_00000009", "lock"):
        with pytest.raises(CheckpointError, match="cannot be used as the name"):
            store.name(1, alias)
    assert (tmp_path / "model.pt").read_text() == "precious"
    with pytest.raises(CheckpointError, match="'step_00000003' is not a checkpoint"):
        store.name(3, "best_model.pt")


def test_a_rewound_run_does_not_meet_the_abandoned_checkpoints(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for _ in range(2):
        save(store, 1, 2, 3)
        store.name(3, "best_model.pt")
        moved = store.set_aside_after(2)
        assert latest(store).step == 2
        assert store.open("best_model.pt").step == 3
    assert [path.name for path in moved] == ["superseded_2_step_00000003"]
    assert len(store.aliases()) == 1
    save(store, 3, 4, 5)
    assert store.open(moved[0]).step == 3
    assert store.set_aside_after(5) == []


def test_a_rewound_run_never_removes_what_it_just_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 10)
    save(store, 5)
    assert store.steps() == [5]


def test_a_folder_that_cannot_be_used_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot list"):
        CheckpointStore(tmp_path / "file").latest()
    with pytest.raises(CheckpointError, match="cannot save"):
        save(CheckpointStore(tmp_path / "file" / "below"), 1)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    store = CheckpointStore(tmp_path / "run")
    save(store, 1, 2)
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match="cannot rename .* to superseded_1_"):
        store.set_aside_after(1)


def test_saving_in_the_background_keeps_the_state_of_its_moment(tmp_path: Path) -> None:
    store, writer = CheckpointStore(tmp_path), BackgroundWriter()
    model = nn.Linear(200, 200)
    expected = {}
    for step in range(3):
        copy = snapshot(model.state_dict())
        expected[step] = model.weight.detach().clone()
        writer.submit(partial(store.save, step, {"model": copy}, {}))
        with torch.no_grad():
            model.weight.add_(1)
    writer.close()
    for step, weight in expected.items():
        assert torch.equal(store.open(store.path(step)).load("model")["weight"], weight)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        monkeypatch.setattr(owner, name, refuse)
    store = CheckpointStore(tmp_path)
    save(store, 1)
    checkpoint = latest(store)
    assert [checkpoint.load(part) for part in checkpoint.parts]
    with pytest.raises(AssertionError, match="unpickled"):  # the gate itself works
        torch.load(store.path(1) / "model.safetensors")


def test_format_1_is_read_for_ever() -> None:
    checkpoint = CheckpointStore(FORMAT_1, recipe="golden").open("step_00000007")
    assert checkpoint.meta == {"position": 70, "contract": {"global_batch": 10}}
    model, optimizer = checkpoint.load("model"), checkpoint.load("optimizer")
    assert model["a"].tolist() == model["tied"].tolist() == [1.0, 2.0, 3.0]
    assert model["a"] is model["tied"]
    assert model["half"].dtype == torch.bfloat16
    assert optimizer["state"][0]["step"].tolist() == 7.0
    assert optimizer["state"][0]["wide"].tolist() == [1 + 2j]
    assert optimizer["groups"] == [{"lr": 0.1, "betas": (0.9, 0.99), "best": float("inf")}]


def kept_by_the_rule(valid: set[int], all_steps: set[int], named: set[int], keep: int) -> set[int]:
    if len(valid) < keep:
        return all_steps
    oldest_kept = sorted(valid)[-keep]
    return {step for step in all_steps if step >= oldest_kept or step in named}


def follow_the_rule(folder: Path, keep: int, seed: int, actions: str) -> None:
    """Act at random (s: save; d: damage one; n: name one; r: restart) and compare."""
    rng = random.Random(seed)
    store = CheckpointStore(folder, keep_last=keep)
    step = 0
    valid: set[int] = set()
    steps: set[int] = set()
    named: set[int] = set()
    for action in actions:
        if action == "s":
            step += rng.randint(1, 3)
            save(store, step)
            steps = kept_by_the_rule(valid | {step}, steps | {step}, named, keep)
            valid = (valid | {step}) & steps
        elif action == "d" and steps:
            victim = rng.choice(sorted(steps))
            file = store.path(victim) / rng.choice(["manifest.json", "model.safetensors"])
            file.write_bytes(file.read_bytes()[:-1])
            valid.discard(victim)
        elif action == "n" and steps:
            best = rng.choice(sorted(steps))
            store.name(best, "best_model.pt")
            named = {best}
        elif action == "r":
            store = CheckpointStore(folder, keep_last=keep)
        assert store.steps() == sorted(steps)
        checkpoint, rejected = store.latest()
        assert (checkpoint.step if checkpoint else None) == max(valid, default=None)
        assert len(rejected) == sum(s > max(valid, default=-1) for s in steps)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    keep=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    actions=st.text("ssssdnr", min_size=3, max_size=25),
)
def test_retention_follows_its_rule(
    keep: int, seed: int, actions: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    follow_the_rule(tmp_path_factory.mktemp("run"), keep, seed, actions)


def test_retention_that_trusts_damaged_ones_would_be_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    follow_the_rule(tmp_path / "right", keep=2, seed=0, actions="sdss")
    monkeypatch.setattr(CheckpointStore, "_is_verified", lambda *_: True)
    with pytest.raises(AssertionError):
        follow_the_rule(tmp_path / "wrong", keep=2, seed=0, actions="sdsdss")
