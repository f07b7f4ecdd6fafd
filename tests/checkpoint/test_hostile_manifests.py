"""A manifest that somebody changed and sealed again is refused in one sentence, or passed over.

No hash protects the reader here: every one is right.
"""

import hashlib
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile_manifests
import pytest
import torch
from hostile_manifests import LIMIT_BYTES, LIMIT_S, Source, attempt, resumed, sealed, train

import lockstep.run.resume
from lockstep.checkpoint import CheckpointStore
from lockstep.errors import CheckpointError
from lockstep.run.saved_run import check_saved_run

torch.set_num_threads(1)
COUNT = 60


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    """Return runs of one rank, of two, and of two that saved a shard each."""
    return hostile_manifests.sources(tmp_path_factory.mktemp("runs"))


def test_no_change_ends_in_a_traceback(runs: list[Source], tmp_path: Path) -> None:
    """What `benchmarks/hostile_manifests.py` does 400 times."""
    bad, kinds = [], set()
    for number in range(COUNT):
        done, outcome = attempt(runs[number % len(runs)], number, 1, tmp_path)
        kinds.add(outcome.kind)
        if outcome.kind not in ("refused", "fell back", "trained on"):
            bad.append((done, outcome))
    assert bad == []
    assert kinds == {"refused", "fell back", "trained on"}


def test_without_the_checks_there_would_be_tracebacks(
    runs: list[Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep.run.resume, "check_saved_run", lambda checkpoint: None)
    outcomes = (attempt(runs[0], number, 1, tmp_path)[1].kind for number in range(COUNT))
    assert any(kind == "TRACEBACK" for kind in outcomes)


def changed(run: Source, place: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Copy a run and change the newest manifest in it; return that checkpoint."""
    shutil.copytree(run.folder, place, symlinks=True)
    newest = place / "checkpoints" / "step_00000004"
    tree = json.loads((newest / "manifest.json").read_text())
    del tree["sha256"]
    change(tree)
    (newest / "manifest.json").write_bytes(sealed(tree))
    return newest


def part(tree: dict[str, Any], *path: Any) -> list[Any]:
    """Return the key and value of an entry in a skeleton, to be changed."""
    node: Any = ["", tree["skeletons"][path[0]]]
    for key in path[1:]:
        ((kind, items),) = node[1].items()
        node = (
            next(item for item in items if item[0] == key) if kind == "dict" else ["", items[key]]
        )
    return list(node) if not isinstance(node, list) else node


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a step that is text": (lambda t: t.update(step="4"), "step is '4': input should be a valid"),
    "no files": (lambda t: t.pop("files"), "files is missing"),
    "a generation below 0": (lambda t: t.update(generation=-1), "generation is -1: "),
    "a size below 0": (
        lambda t: t["files"]["model.safetensors"].update(size_bytes=-1),
        "files.'model.safetensors'.size_bytes is -1: input should be greater than or equal to 0",
    ),
    "a part without a file": (
        lambda t: t["skeletons"].update(more={"dict": []}),
        "files does not list one file for each part in skeletons",
    ),
    "a batch of 0": (
        lambda t: t["meta"]["contract"]["plan"].update(batch_size=0),
        "meta.contract.plan.batch_size is 0, not between 1 and",
    ),
    "a contract without a plan": (
        lambda t: t["meta"]["contract"].pop("plan"),
        "meta.contract.plan is missing",
    ),
    "a rate that is not a number": (
        lambda t: t["meta"]["contract"].update(effective_lr=float("nan")),
        "meta.contract.effective_lr is nan, not a learning rate",
    ),
    "halvings without end": (
        lambda t: t["meta"]["contract"]["plan"].update(halvings=10**9),
        "meta.contract.plan.halvings is 1000000000, not between 0 and 62",
    ),
    "a config that is a list": (
        lambda t: t["meta"].update(config=[]),
        "meta.config is a list of 0: input should be a valid dictionary",
    ),
    "names without end": (
        lambda t: t["meta"].update(names=["x"] * 10**5),
        "meta.names is a list of 100000: list should have at most 16 items",
    ),
    "a print of nothing": (
        lambda t: t["meta"]["data"]["training"].update(per_entry=0),
        "meta.data.training.per_entry is 0: input should be greater than 0",
    ),
    "a sample that has no number": (
        lambda t: t["meta"]["data"]["training"]["samples"].update({"-1": ["x", 0.0, 0.0]}),
        "meta.data.training.samples is a dict",
    ),
    "a lone surrogate": (lambda t: t["meta"].update(ledger="\ud800"), "meta.ledger is '\\ud800'"),
    "a skeleton of another kind": (
        lambda t: t["skeletons"]["progress"]["dict"].append(["x", {"reduce": []}]),
        "skeletons.progress.x is a dict of 1, which is not a saved value",
    ),
    "nesting without end": (
        lambda t: t["meta"].update(task="@deep100000"),
        "it is nested more than 200 levels deep",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_the_file_and_the_field_are_named(name: str, runs: list[Source], tmp_path: Path) -> None:
    change, words = CHANGES[name]
    newest = changed(runs[0], tmp_path / "run", change)
    store = CheckpointStore(newest.parent, recipe="tiny")
    checkpoint, rejected = store.latest(check_saved_run)
    assert checkpoint is not None
    assert checkpoint.step == 2
    ((path, reason),) = rejected
    assert path == newest
    assert "manifest.json" in reason
    assert words in reason
    assert len(reason) < 500
    assert reason.isprintable()


PARTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a step of the progress": (
        lambda t: part(t, "progress", "step").__setitem__(1, 5),
        "skeletons.progress: step is 5, the checkpoint's is 4",
    ),
    "a position": (
        lambda t: part(t, "progress", "consumed").__setitem__(1, 10**30),
        "skeletons.progress: consumed is 1000000000000000000000000000000, the checkpoint's is 32",
    ),
    "a ledger": (
        lambda t: part(t, "progress", "ledger").__setitem__(1, {"list": [2**64, 3]}),
        "skeletons.progress: ledger is a list of 2, not a digest and a count",
    ),
    "a sum": (
        lambda t: part(t, "progress", "epoch").__setitem__(1, {"dict": [["loss", None]]}),
        "skeletons.progress: epoch.loss is not a sum and a weight",
    ),
    "the order of parameters": (
        lambda t: part(t, "optimizer", "param_groups", 0, "params")[1]["list"].reverse(),
        "skeletons.optimizer.param_groups does not count the parameters up",
    ),
    "a moment": (
        lambda t: part(t, "optimizer", "state", 1, "exp_avg").__setitem__(
            1, {"tensor": "state.0.exp_avg"}
        ),
        "skeletons.optimizer.state.1.exp_avg is [8, 5] float64, the parameter [8] float64",
    ),
    "a step count": (
        lambda t: part(t, "optimizer", "state", 0, "step").__setitem__(1, "many"),
        "skeletons.optimizer.state.0.step is str",
    ),
    "a moment that is missing": (
        lambda t: part(t, "optimizer", "state", 2)[1]["dict"].pop(),
        "skeletons.optimizer.state.2 holds step, exp_avg, others differ",
    ),
    "an average": (
        lambda t: t["skeletons"].__setitem__("average_0.9", {"dict": []}),
        "the saved weights do not fit this model",
    ),
    "the weights": (
        lambda t: t["skeletons"].__setitem__("model", {"list": [1]}),
        "the saved weights are a list, not tensors by name",
    ),
    "the task": (lambda t: t["skeletons"].__setitem__("task", 3), "skeletons.task is 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_makes_no_sense_is_refused(
    name: str, runs: list[Source], tmp_path: Path
) -> None:
    change, words = PARTS[name]
    newest = changed(runs[0], tmp_path / "run", change)
    outcome = resumed(lambda: train(tmp_path / "run", 6), tmp_path / "output")
    assert outcome.kind == "refused", outcome.said
    assert words in outcome.said
    assert outcome.said.startswith(f"{newest}: ")


@pytest.mark.parametrize("filler", [b"[],", b'["a",{"b":[]}],', b"1,"], ids=str)
def test_a_manifest_of_millions_of_values_takes_little_memory(
    filler: bytes, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path / "run")
    store.save(1, {"model": {"weight": torch.ones(2)}}, {})
    manifest = store.path(1) / "manifest.json"
    text = b'"meta": {"x": [' + (filler * (60_000_000 // len(filler)))[:-1] + b"]}"
    body = manifest.read_bytes().rpartition(b',\n"sha256"')[0].replace(b'"meta": {}', text)
    seal = hashlib.sha256(body).hexdigest()
    manifest.write_bytes(body + f',\n"sha256": "{seal}"}}\n'.encode())

    def look() -> None:
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (limit + LIMIT_BYTES, limit + LIMIT_BYTES))
        with pytest.raises(CheckpointError, match="values, more than 4,000,000"):
            store.open("step_00000001")

    outcome = resumed(look, tmp_path / "output")
    assert outcome.kind == "trained on", outcome.said
    assert outcome.cpu_s < LIMIT_S
