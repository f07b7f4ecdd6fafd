"""Resuming equals never stopping, bit for bit: weights, optimizer, averages, ledger, events."""

import os
import random
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

from lockstep import CheckpointStore, PartialLoss, RunConfig, fit, read_events
from lockstep.task import Context
from lockstep.testing import TinyTask, run_ranks

NUM_SAMPLES = 46  # six steps an epoch, of four micro-batches; the last has three
TIMES = re.compile(r"time|.*_s|samples_per_second|.*_share|data_wait_rank|slow_.*|path")


class RestlessData:
    """Samples augmented from Python's, NumPy's and torch's global generators."""

    def __init__(self, samples: list[dict[str, Tensor]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(5, dtype=torch.float64)
        return {
            **self.samples[index],
            "x": self.samples[index]["x"] + noise,
            "id": torch.tensor(index),
        }


class RestlessTask(TinyTask):
    """Random wherever a run can be; does `mischief` at its moment; notes what it trained on."""

    def __init__(self, folder: str, mischief: "Mischief") -> None:
        super().__init__(NUM_SAMPLES, dropout=0.2)
        self.folder, self.mischief = folder, mischief

    def train_data(self) -> Any:
        return RestlessData(super().train_data())

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=lr)

    def noise(self, shape: torch.Size, context: Context) -> Tensor:
        generator = context.generator("noise")
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        self.mischief("loss" if context.training else "evaluate", context)
        if context.training:
            line = f"{context.step} {context.place} {batch['id'].tolist()}\n"
            with open(Path(self.folder) / f"trained_{context.world.rank}.txt", "a") as file:
                file.write(line)
            batch = {**batch, "x": batch["x"] + self.noise(batch["x"].shape, context)}
        return super().loss(model, batch, context)


class Mischief:
    """Send `number` to this process at a step, on one rank, where the task passes by."""

    def __init__(
        self, step: int = -1, where: str = "loss", number: int = signal.SIGKILL, rank: int = 0
    ) -> None:
        self.step, self.where, self.number, self.rank = step, where, number, rank
        self.done = False

    def __call__(self, where: str, context: Context) -> None:
        due = (where, context.step, context.world.rank) == (self.where, self.step, self.rank)
        if due and not self.done:
            self.done = True
            if self.number == signal.SIGKILL:
                for child in psutil.Process().children(recursive=True):
                    child.kill()  # loader workers would outlive their parent by some seconds
            os.kill(os.getpid(), self.number)


NONE = Mischief()
SAVING = {"every_steps": 3, "keep_last": 2}
AT_ONCE = {**SAVING, "background": False}


def config_for(folder: Path, **changes: Any) -> RunConfig:
    values = {
        "output_dir": str(folder),
        "epochs": 2,
        "seed": 3,
        "batch": {"batch_size": 2, "global_batch_size": 8, "drop_last": False},
        "rate": {"lr": 0.02},
        "schedule": {"shape": "cosine", "warmup_steps": 2},
        "evaluation": {"every_steps": 4, "save_best": False},
        "checkpoint": SAVING,
        "averages": [0.9, 0.5],
        "sinks": {"curves": False},
        "log_every": 2,
        "device": "cpu",
        "timeout_s": 20,
    }
    return RunConfig.parse(values | changes)


def live(
    folder: Path,
    num_ranks: int,
    mischief: Mischief = NONE,
    kind: type[RestlessTask] = RestlessTask,
    **changes: Any,
) -> list[tuple[int, int]]:
    """Run `fit` once; return step and exit code of each rank."""

    def one_rank() -> tuple[int, int]:
        result = fit(kind(str(folder), mischief), config_for(folder, **changes))
        return result.step, result.exit_code

    return run_ranks(num_ranks, one_rank, timeout_s=40)


def die(folder: Path, num_ranks: int, mischief: Mischief, **options: Any) -> None:
    """Run `fit` until it is killed."""
    with pytest.raises(RuntimeError, match="ended without returning a result|failed"):
        live(folder, num_ranks, mischief, **options)


# --- What is compared -----------------------------------------------------------------------


def final_state(folder: Path) -> dict[str, Any]:
    """Read the last checkpoint back, whole."""
    checkpoint, rejected = CheckpointStore(folder / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    assert not rejected
    kept = {name: checkpoint.meta[name] for name in ("consumed", "ledger", "metrics", "contract")}
    return {"step": checkpoint.step, **kept, **{p: checkpoint.load(p) for p in checkpoint.parts}}


def story(folder: Path, rank: int = 0, without: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Read the events of a run, times and paths aside."""
    return [
        {key: value for key, value in event.items() if not TIMES.fullmatch(key)}
        for event in read_events(folder, rank)
        if event["event"] not in without
    ]


def assert_same(a: Any, b: Any, path: str = "") -> None:
    """Compare two trees bit for bit."""
    assert type(a) is type(b), path
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b), f"{path} differs by {(a - b).abs().max()}"
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}.{index}")
    else:
        assert a == b, path


def trained_on(folder: Path) -> dict[tuple[int, int], list[int]]:
    """Return the samples of each micro-batch that counts, as noted when it was last computed."""
    noted: dict[tuple[int, int], list[int]] = {}
    for file in folder.glob("trained_*.txt"):
        for line in file.read_text().splitlines():
            step, place, ids = line.split(" ", 2)
            noted[int(step), int(place)] = sorted(map(int, ids.strip("[]").split(",")))
    return noted


def assert_each_once(folder: Path) -> None:
    for epoch in range(2):
        steps = range(6 * epoch, 6 * epoch + 6)
        ids = [i for (step, _), ids in trained_on(folder).items() if step in steps for i in ids]
        assert sorted(ids) == list(range(NUM_SAMPLES))
    verdicts = [event["message"] for event in read_events(folder) if event["event"] == "epoch"]
    assert verdicts == [f"{NUM_SAMPLES} of {NUM_SAMPLES} samples, each once"] * 2


Straight = Callable[[int], Path]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Return the folder of a run on so many ranks that was never stopped."""
    folders: dict[int, Path] = {}

    def run(num_ranks: int) -> Path:
        if num_ranks not in folders:
            folders[num_ranks] = tmp_path_factory.mktemp(f"straight_{num_ranks}")
            assert live(folders[num_ranks], num_ranks) == [(12, 0)] * num_ranks
        return folders[num_ranks]

    return run


def assert_equal_runs(folder: Path, straight: Path, num_ranks: int) -> None:
    assert_same(final_state(folder), final_state(straight))
    for rank in range(num_ranks):
        assert story(folder, rank) == story(straight, rank)
    assert_each_once(folder)


# --- Killed -----------------------------------------------------------------------------------


def test_a_straight_run_has_something_to_compare(straight: Straight) -> None:
    state, events = final_state(straight(1)), story(straight(1))
    assert state["step"] == 12
    assert {"model", "optimizer", "progress", "average_0.9", "average_0.5"} <= state.keys()
    kinds = [event["event"] for event in events]
    assert [kinds.count(k) for k in ("step", "epoch", "evaluation", "saving")] == [6, 2, 3, 4]
    assert_each_once(straight(1))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_resuming_after_kill_9_equals_never_stopping(
    num_ranks: int, num_workers: int, straight: Straight, tmp_path: Path
) -> None:
    choose = random.Random(f"{num_ranks} {num_workers}")
    step = choose.choice([4, 5, 7, 8, 10, 11])  # in mid-epoch, with steps to be done again
    options = {"loader": {"num_workers": num_workers}, "checkpoint": AT_ONCE}
    die(tmp_path, num_ranks, Mischief(step, rank=choose.randrange(num_ranks)), **options)
    assert final_state(tmp_path)["step"] == step // 3 * 3
    assert live(tmp_path, num_ranks, **options) == [(12, 0)] * num_ranks
    assert_equal_runs(tmp_path, straight(num_ranks), num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_many_kills_in_a_row_change_nothing(
    num_ranks: int, straight: Straight, tmp_path: Path
) -> None:
    choose = random.Random(num_ranks)
    for step in (1, 4, 4, 8, 8, 11):  # the first before anything was saved
        die(tmp_path, num_ranks, Mischief(step, rank=choose.randrange(num_ranks)))
    die(tmp_path, num_ranks, Mischief(12, "evaluate"))
    live(tmp_path, num_ranks)
    assert_equal_runs(tmp_path, straight(num_ranks), num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_stop_by_sigterm_and_a_resume_equal_never_stopping(
    num_ranks: int, straight: Straight, tmp_path: Path
) -> None:
    ends = live(tmp_path, num_ranks, Mischief(7, number=signal.SIGTERM, rank=num_ranks - 1))
    assert {code for _, code in ends} == {128 + signal.SIGTERM}
    assert len({step for step, _ in ends}) == 1
    assert ends[0][0] in (8, 9), "at the next step"
    assert final_state(tmp_path)["step"] == ends[0][0], "saved where it stopped"
    assert live(tmp_path, num_ranks) == [(12, 0)] * num_ranks
    assert_same(final_state(tmp_path), final_state(straight(num_ranks)))
    # Stopping saved once more, and put off the evaluation of step 8; nothing else.
    stopping = ["saving", "evaluation_interrupted"]
    for rank in range(num_ranks):
        there = story(straight(num_ranks), rank, without=stopping)
        assert story(tmp_path, rank, without=stopping) == there
    assert_each_once(tmp_path)
    assert len(trained_on(tmp_path)) == 2 * 23, "no step was made again"


# --- On other hardware ---------------------------------------------------------------------------


def test_a_run_may_move_to_other_numbers_of_ranks(straight: Straight, tmp_path: Path) -> None:
    die(tmp_path, 2, Mischief(5, rank=1), checkpoint=AT_ONCE)
    live(tmp_path, 1, Mischief(8, number=signal.SIGTERM))
    assert live(tmp_path, 3) == [(12, 0)] * 3
    moved, stayed = final_state(tmp_path), final_state(straight(1))
    assert moved["ledger"] == stayed["ledger"]
    assert moved["consumed"] == stayed["consumed"]
    for part in ("model", "average_0.9", "average_0.5"):
        for name, tensor in stayed[part].items():
            torch.testing.assert_close(moved[part][name], tensor, rtol=0, atol=1e-12)
    ledgers = [
        [(e["step"], e["ledger"]) for e in story(folder) if e["event"] == "step"]
        for folder in (tmp_path, straight(1))
    ]
    assert ledgers[0] == ledgers[1]
    assert trained_on(tmp_path) == trained_on(straight(1))
    assert_each_once(tmp_path)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_number_of_ranks_trains_on_the_same_micro_batches(
    num_ranks: int, straight: Straight
) -> None:
    assert trained_on(straight(num_ranks)) == trained_on(straight(1))
    assert_each_once(straight(num_ranks))


# --- Planted faults -----------------------------------------------------------------------------


class ForgetfulTask(RestlessTask):
    """Draws its noise from a generator of its own, whose state no checkpoint holds."""

    generator = np.random.default_rng(0)

    def noise(self, shape: torch.Size, context: Context) -> Tensor:
        return torch.from_numpy(self.generator.standard_normal(shape))


def test_the_comparison_sees_randomness_that_does_not_repeat(tmp_path: Path) -> None:
    live(tmp_path / "straight", 1, kind=ForgetfulTask)
    die(tmp_path / "resumed", 1, Mischief(5), kind=ForgetfulTask, checkpoint=AT_ONCE)
    live(tmp_path / "resumed", 1, kind=ForgetfulTask)
    with pytest.raises(AssertionError, match="differs by"):
        assert_same(
            final_state(tmp_path / "resumed")["model"], final_state(tmp_path / "straight")["model"]
        )


class SkippingTask(RestlessTask):
    """Forgets where it was in the optimizer, as a resume from weights alone would."""

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(model, lr)
        optimizer.load_state_dict = lambda state: None  # type: ignore[method-assign]
        return optimizer


def test_the_comparison_sees_an_optimizer_that_was_not_restored(
    straight: Straight, tmp_path: Path
) -> None:
    die(tmp_path, 1, Mischief(5), checkpoint=AT_ONCE)
    live(tmp_path, 1, kind=SkippingTask)
    with pytest.raises(AssertionError, match="differs by"):
        assert_same(final_state(tmp_path)["model"], final_state(straight(1))["model"])
