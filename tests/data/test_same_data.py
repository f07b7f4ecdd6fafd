"""Ranks that see different samples are refused before the first step; augmentation is not."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from lockstep import CheckpointStore, Loader, RunConfig, World, fit
from lockstep.data import fingerprint
from lockstep.errors import LockstepError
from lockstep.run.build import prepare
from lockstep.testing import TinyTask, run_ranks

NUM_SAMPLES = 64
EXAMPLES = Path(__file__).parents[2] / "examples"


def rank() -> int:
    return int(os.environ["RANK"])


def samples(generator: torch.Generator | None = None) -> list[dict[str, Tensor]]:
    x = torch.randn(NUM_SAMPLES, 5, dtype=torch.float64, generator=generator)
    units = torch.ones((), dtype=torch.float64)
    return [{"x": row, "y": row[:3].sin(), "units": units} for row in x]


def config_for(folder: Path, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "batch": {"batch_size": 4, "global_batch_size": 16},
        "sinks": {"curves": False},
        "device": "cpu",
        "timeout_s": 60,
    }
    return RunConfig.parse(values | changes)


def train(folder: Path, task: TinyTask, changes: dict[str, Any]) -> Any:
    """Return the seen samples' and the weights' bits, or the error's class and words."""
    seen: list[bytes] = []
    collate = task.collate

    def noted(batch: list[Any]) -> Any:
        seen.extend(sample["x"].numpy().tobytes() for sample in batch)
        return collate(batch)

    task.collate = noted  # type: ignore[method-assign]
    try:
        fit(task, config_for(folder, **changes))
    except LockstepError as error:
        return type(error).__name__, str(error)
    return seen


def run(folder: Path, num_ranks: int, build: Callable[[], TinyTask], **changes: Any) -> list[Any]:
    return run_ranks(num_ranks, lambda: train(folder, build(), changes), timeout_s=60)


# --- fit ------------------------------------------------------------------------------------


class Unseeded(TinyTask):
    """Draws its data from the global generators, in one of three libraries."""

    library = "torch"

    def train_data(self) -> Any:
        draw = {
            "torch": lambda: torch.rand(5, dtype=torch.float64),
            "numpy": lambda: torch.from_numpy(np.random.rand(5)),
            "python": lambda: torch.tensor([random.random() for _ in range(5)]).double(),
        }[self.library]
        drawn = [draw() for _ in range(NUM_SAMPLES)]
        units = torch.ones((), dtype=torch.float64)
        return [{"x": x, "y": x[:3], "units": units} for x in drawn]

    def eval_data(self) -> Any:
        return self.train_data()[:8]


class UnseededNumPy(Unseeded):
    library = "numpy"


class UnseededPython(Unseeded):
    library = "python"


def as_under_a_launcher(build: Callable[[], TinyTask]) -> Callable[[], TinyTask]:
    """Start from other generators on every rank, as processes of a launcher do."""

    def start() -> TinyTask:
        torch.manual_seed(rank())
        np.random.seed(rank())
        random.seed(rank())
        return build()

    return start


@pytest.mark.parametrize("task", [Unseeded, UnseededNumPy, UnseededPython])
def test_data_without_a_seed_are_the_same_on_every_rank(
    task: Callable[[], TinyTask], tmp_path: Path
) -> None:
    one = run(tmp_path / "1", 1, as_under_a_launcher(task))[0]
    two = run(tmp_path / "2", 2, as_under_a_launcher(task))
    assert len(one) >= NUM_SAMPLES
    assert sorted(two[0] + two[1]) == sorted(one)


def test_held_out_data_are_not_the_training_data_again(tmp_path: Path) -> None:
    def build() -> bool:
        with ExitStack() as stack, World.enter("cpu") as world:
            run = prepare(Unseeded(), config_for(tmp_path), world, stack)
            return torch.equal(run.held_out[0]["x"], run.loader.dataset[0]["x"])

    assert run_ranks(1, build) == [False]


class OfTheRank(TinyTask):
    """A generator that is seeded by the rank: fit cannot seed it."""

    def train_data(self) -> Any:
        return samples(torch.Generator().manual_seed(rank()))


class OfTheRankHeldOut(TinyTask):
    def eval_data(self) -> Any:
        return samples(torch.Generator().manual_seed(rank()))


class OneOther(TinyTask):
    """One sample, the last, differs by a hundredth on the third rank: say, a stale file there."""

    def train_data(self) -> Any:
        data = samples(torch.Generator().manual_seed(0))
        if rank() == 2:
            data[-1]["x"] = data[-1]["x"] + 0.01
        return data


class Unsorted(TinyTask):
    """Files in the order a folder happens to list them, with a fingerprint of their own."""

    def train_data(self) -> Any:
        return Listed(samples(torch.Generator().manual_seed(0)), reverse=rank() == 1)


class Listed:
    def __init__(self, held: list[Any], reverse: bool) -> None:
        self.names = [f"{index:02}.png" for index in range(len(held))]
        self.held = held
        if reverse:
            self.names.reverse()
            self.held.reverse()

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: int) -> Any:
        return self.held[index]

    def describe(self, index: int) -> str:
        return self.names[index]

    def fingerprint(self) -> list[str]:
        return self.names


def on_node(rank_in_node: int, size: int = 1) -> None:
    """Be this rank of a node with `size` ranks, as a launcher would say it."""
    os.environ.update(LOCAL_RANK=str(rank_in_node), LOCAL_WORLD_SIZE=str(size))


class UnsortedOnAnotherNode(Unsorted):
    def __init__(self) -> None:
        super().__init__()
        on_node(0)


ALL_DIFFER = "sample 0, sample 9, sample 18 and 5 more differ (8 compared)"


@pytest.mark.parametrize(
    ("task", "num_ranks", "said"),
    [
        (OfTheRank, 2, f"ranks 0 and 1 see different training samples: {ALL_DIFFER}"),
        (OfTheRankHeldOut, 2, f"ranks 0 and 1 see different held-out samples: {ALL_DIFFER}"),
        (OneOther, 3, "ranks 0 and 2 see different training samples: sample 63 differs"),
        (Unsorted, 2, "63.png, 62.png, 61.png and 61 more differ (64 compared)"),
        (UnsortedOnAnotherNode, 2, "the same samples in a different order, from 63.png on"),
    ],
)
def test_ranks_with_different_data_are_refused_by_fit(
    task: Callable[[], TinyTask], num_ranks: int, said: str, tmp_path: Path
) -> None:
    results = run(tmp_path, num_ranks, task)
    for kind, words in results:
        assert kind == "ConfigError"
        assert said in words
        assert "try: build the same data on every rank" in words
    assert not (tmp_path / "checkpoints").exists()


class Noted(Listed):
    """Notes which ranks ask for the fingerprint of all files."""

    def __init__(self, notes: Path, stale_on: int | None = None) -> None:
        super().__init__(samples(torch.Generator().manual_seed(0)), reverse=False)
        self.notes, self.stale_on = notes, stale_on

    def fingerprint(self) -> list[str]:
        with self.notes.open("a") as file:
            file.write(f"{rank()} ")
        stale = self.stale_on in (rank(), -1)
        return [f"{name} edited" if stale and name == "20.png" else name for name in self.names]


class TwoNodes(TinyTask):
    """Four ranks on two nodes; the fingerprint of the data differs on `stale_on`, or on all."""

    def __init__(self, notes: Path, stale_on: int | None = None) -> None:
        super().__init__()
        on_node(rank() % 2, 2)
        self.data = Noted(notes, stale_on)

    def train_data(self) -> Any:
        return self.data


def test_the_first_rank_of_each_node_looks_into_all_files(tmp_path: Path) -> None:
    notes, folder = tmp_path / "notes", tmp_path / "run"
    results = run(folder, 4, lambda: TwoNodes(notes), max_steps=1)
    assert [type(result) for result in results] == [list] * 4
    assert sorted(notes.read_text().split()) == ["0", "2"]
    stale = run(tmp_path / "other", 4, lambda: TwoNodes(notes, stale_on=2))
    found = "1 with different names or contents: 20.png"
    said = f"ranks 0 and 2 see different training samples: {found}"
    assert all(said in words for _, words in stale)
    edited = run(folder, 4, lambda: TwoNodes(notes, stale_on=-1), max_steps=2)
    said = (
        "settings or data differ from the checkpoint's: "
        "training data: 1 with different names or contents: 20.png"
    )
    assert [words.partition("\n")[0] for _, words in edited] == [said] * 4


def test_a_loader_takes_the_print_of_all_files_once_on_a_node(tmp_path: Path) -> None:
    build = lambda: Noted(tmp_path / "notes")  # noqa: E731
    assert run_ranks(2, lambda: own_loop(build, collate=len)) == [12, 12]
    assert (tmp_path / "notes").read_text().split() == ["0"]


# --- What is no difference ------------------------------------------------------------------


class Augmented:
    """Samples that draw from every global generator, and hold the folder they lie in."""

    def __init__(self, held: list[dict[str, Tensor]]) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = random.random() + np.random.rand() + torch.rand(5, dtype=torch.float64)
        path = f"/local/node_{rank()}/{index}.png"
        return {**self.held[index], "x": self.held[index]["x"] + noise, "path": path}


class Restless(Augmented):
    """Draws from a generator nobody seeds: no two reads are the same."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = float(np.random.default_rng().random())
        return {**self.held[index], "x": self.held[index]["x"] + noise}


class Rounded(Augmented):
    """Large samples with other last bits on another processor."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(index)
        image = torch.rand(200_000, generator=draw)
        error = torch.rand(200_000, generator=torch.Generator().manual_seed(rank()))
        return {**self.held[index], "image": image * (1 + 1.2e-7 * (error - 0.5))}


class Slow(Augmented):
    """Takes longer to read than a fingerprint may take, on one rank."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.15 * rank())
        return super().__getitem__(index)


class Kept(TinyTask):
    def __init__(self, kind: type[Augmented]) -> None:
        super().__init__()
        self.kind = kind

    def train_data(self) -> Any:
        return self.kind(samples(torch.Generator().manual_seed(0)))

    def collate(self, batch: list[Any]) -> Any:
        return super().collate([{name: s[name] for name in ("x", "y", "units")} for s in batch])


@pytest.mark.parametrize("kind", [Augmented, Restless, Rounded])
def test_augmentation_and_rounding_are_no_difference(kind: type[Augmented], tmp_path: Path) -> None:
    results = run(tmp_path, 2, lambda: Kept(kind), max_steps=1)
    assert [type(result) for result in results] == [list, list]


def test_a_rank_that_reads_slowly_is_compared_in_what_it_has_read(tmp_path: Path) -> None:
    def shorter() -> TinyTask:
        fingerprint.READ_S = 1.0
        return Kept(Slow)

    batch = {"batch_size": 1, "global_batch_size": 2}
    results = run(tmp_path, 2, shorter, max_steps=1, batch=batch)
    assert [type(result) for result in results] == [list, list]


def test_samples_that_could_not_be_compared_are_named_in_the_banner(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, 2, lambda: Kept(Restless), max_steps=1)
    said = "warning: the training samples were not compared between ranks"
    assert said in capfd.readouterr().out


# --- A custom loop ----------------------------------------------------------------------------


def own_loop(build: Callable[[], Any], **options: Any) -> Any:
    """Iterate over a loader; return how many samples came, or the error's words."""
    with World.enter("cpu", timeout_s=60) as world:
        loader = Loader(build(), world, batch_size=4, max_steps=3, **options)
        try:
            return sum(len(micro.ids) for batch in loader for micro in batch.micro_batches)
        except LockstepError as error:
            return type(error).__name__, str(error)


def tensors(seed: int) -> TensorDataset:
    return TensorDataset(torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(seed)))


def test_a_loader_refuses_ranks_with_different_data() -> None:
    for kind, words in run_ranks(2, own_loop, lambda: tensors(rank())):
        assert kind == "ConfigError"
        assert f"ranks 0 and 1 see different training samples: {ALL_DIFFER}" in words
        assert "try: seed before building the data (torch.manual_seed(0))" in words
    assert run_ranks(2, own_loop, lambda: tensors(0)) == [12, 12]


class Stream(IterableDataset[Tensor]):
    """Numbers that come one after the other, shuffled by a generator of its own or not at all."""

    def __init__(self, seed: int, augments: bool = False, fails_at: int = -1) -> None:
        self.seed, self.augments, self.fails_at = seed, augments, fails_at

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(self.seed))
        for position, number in enumerate(order):
            if position == self.fails_at:
                raise OSError("truncated file")
            yield number + torch.rand(()) if self.augments else number


def test_streams_that_differ_between_ranks_are_refused() -> None:
    for kind, words in run_ranks(2, own_loop, lambda: Stream(rank())):
        assert kind == "ConfigError"
        assert "ranks 0 and 1 see different training samples: sample 0, sample 1" in words
        assert "give the stream's own generator a fixed seed" in words
    assert run_ranks(3, own_loop, lambda: Stream(0, augments=True)) == [12, 12, 12]


def test_a_stream_that_fails_on_one_rank_keeps_no_other_waiting() -> None:
    """The rank whose micro-batch cannot be read takes part in the comparison all the same."""
    first, second = run_ranks(2, own_loop, lambda: Stream(0, fails_at=6 if rank() else -1))
    assert first == 12
    assert second[0] == "DataError"
    assert "truncated file" in second[1]


def test_collating_in_place_is_no_difference() -> None:
    def spoil(batch: list[Tensor]) -> Tensor:
        return torch.stack([number.mul_(0) for number in batch])

    build = lambda: Stream(0)  # noqa: E731
    assert run_ranks(2, lambda: own_loop(build, collate=spoil)) == [12, 12]


# --- The command a user types ---------------------------------------------------------------


def test_the_five_lines_without_a_seed_are_refused_under_torchrun(tmp_path: Path) -> None:
    script = (EXAMPLES / "five_lines.py").read_text().replace("torch.manual_seed(0)\n", "")
    (tmp_path / "train.py").write_text(script)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc_per_node=2", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "ranks 0 and 1 see different training samples" in done.stderr
    assert not (tmp_path / "run").exists()


def resume_on_changed_data(folder: Path, offset: float) -> str:
    with World.enter("cpu", timeout_s=20) as world:
        data = [torch.tensor([float(i)]) + offset * (i == 15) for i in range(16)]
        loader = Loader(data, world, batch_size=2, max_steps=4)
        store = CheckpointStore(folder)
        try:
            begun = store.load_into(loader=loader)
            for _ in loader:
                if loader.step == 2:
                    break
        except LockstepError as error:
            return str(error)
        if not begun:
            store.save_from(world, loader.step, loader=loader)
        return f"began at {begun}"


def test_five_lines_refuse_to_resume_on_data_that_changed(tmp_path: Path) -> None:
    assert run_ranks(2, resume_on_changed_data, tmp_path, 0.0) == ["began at 0"] * 2
    assert run_ranks(2, resume_on_changed_data, tmp_path, 0.0) == ["began at 2"] * 2
    said, again = run_ranks(2, resume_on_changed_data, tmp_path, 1.0)
    assert said == again
    assert "the training data changed since the checkpoint: different contents: sample 15" in said
