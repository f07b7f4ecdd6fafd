"""A worker may be killed, end or stand still at any moment: the batches stay what they are."""

import gc
import multiprocessing
import os
import random
import re
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing import util
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import signal_handling

from lockstep.data import workers
from lockstep.data.batch import MicroBatch
from lockstep.data.held_out import read_held_out
from lockstep.data.workers import LoaderConfig
from lockstep.errors import DataError
from lockstep.testing import FakeWorld


class Pair(NamedTuple):
    image: Tensor
    name: str


class Rich:
    """Samples of every kind a batch may hold, noise from a global generator included."""

    def __init__(self, num_samples: int = 24) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = torch.rand(3, 4, 5).permute(2, 0, 1)
        return {
            "pair": Pair(image, f"sample {index}"),
            "array": np.full((2, 3), index, dtype=np.int16),
            "words": b"x" * 40_000 * (index % 3),
            "none": torch.zeros(0, 3),
            "view": torch.arange(1000)[index : index + 2],
            "half": torch.full((2,), float(index)).bfloat16(),
        }


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def number_worker(samples: list[Any]) -> int:
    worker: Any = get_worker_info()
    return int(worker.id)


def read(
    dataset: Any, meddle: Callable[[int], None] = lambda turn: None, **options: Any
) -> list[MicroBatch]:
    """Read two samples at a time, meddling before each is asked for."""
    config = LoaderConfig(**({"num_workers": 2} | options))
    micro_batches = read_held_out(dataset, 2, FakeWorld(), 7, as_list, config)
    found: list[MicroBatch] = []
    with closing(micro_batches):  # type: ignore[type-var]
        for turn in range(len(dataset) // 2):
            meddle(turn)
            found.append(next(micro_batches))
    return found


def plain(value: Any) -> Any:
    """Return a batch as values that compare, with strides: a layout decides what kernels run."""
    if isinstance(value, Tensor):
        return value.dtype, value.stride(), value.float().tolist()
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def data_of(found: list[MicroBatch]) -> list[Any]:
    return [(m.ids.tolist(), plain(m.data)) for m in found]


def children() -> list[psutil.Process]:
    """Return the living ones, but for the server of `warm_programs`, which stays for all tests."""
    living = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in living if not any(word.endswith("warm_python.py") for word in p.cmdline())]


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def faults(found: list[MicroBatch]) -> list[str]:
    return [fault.happened for m in found for fault in m.faults]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at workers often and give up on stopped ones, and on slow ones, soon."""
    monkeypatch.setattr(workers, "SLICE_S", 0.02)
    monkeypatch.setattr(workers, "STOPPED_S", 0.06)
    monkeypatch.setattr(workers, "SLOWEST_FACTOR", 1)


@pytest.mark.parametrize("num_workers", [1, 4])
def test_whatever_a_batch_holds_arrives_as_it_was(num_workers: int) -> None:
    found = read(Rich(), num_workers=num_workers)
    assert data_of(found) == data_of(read(Rich(), num_workers=0))
    first = found[0].data[0]
    first["pair"].image.add_(1)  # a user may write into a batch
    first["array"] += 1
    assert first["pair"].image.data_ptr() % 64 == 0
    assert not children()


def test_a_data_set_is_told_which_worker_it_is_in() -> None:
    config = LoaderConfig(num_workers=2)
    found = list(read_held_out(Rich(8), 2, FakeWorld(), 7, number_worker, config))
    assert [m.data for m in found] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("how", "times", "words"),
    [(signal.SIGKILL, 20, "when memory runs out"), (signal.SIGSTOP, 10, "stopped by a signal")],
)
def test_any_worker_may_be_lost_at_any_moment(
    how: signal.Signals, times: int, words: str, quick: None
) -> None:
    choose, hits = random.Random(how), Counter[int]()
    dataset = Rich(8 * times)
    calm = data_of(read(dataset, num_workers=0))

    def meddle(turn: int) -> None:
        time.sleep(choose.random() * 0.004)
        if turn % 4 == 0:  # a leaf is in the workers' hands for three turns
            victim = choose.choice(multiprocessing.active_children())
            hits[victim.pid or 0] += 1
            os.kill(victim.pid or 0, how)

    found = read(dataset, lambda turn: meddle(turn) if turn else None, prefetch=1)
    assert data_of(found) == calm
    assert hits.total() == times - 1
    told = faults(found)
    assert len(told) > times // 2
    assert all(words in text for text in told)
    assert {f.pid for m in found for f in m.faults} <= hits.keys()
    assert not children()


@pytest.fixture
def own_loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have torch watch over the workers of a loader of the user's own."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    before = signal.getsignal(signal.SIGCHLD)
    assert len(list(DataLoader(Rich(), None, num_workers=1))) == 24  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGCHLD) != before
    yield
    signal.signal(signal.SIGCHLD, before)


def test_a_killed_worker_costs_less_than_a_second_and_is_raised_nowhere(own_loader: None) -> None:
    """A busy machine can only make a loss dearer, so the cheapest of three tries counts."""

    def meddle(turn: int) -> None:
        if turn == 5:
            for worker in children():
                worker.kill()
            time.sleep(0.1)  # where torch's handler would raise

    def cost_s() -> float:
        found = read(Rich(), meddle, prefetch=1)
        lost = [fault for m in found for fault in m.faults]
        assert 1 <= len(lost) <= 2
        return max(fault.seconds for fault in lost)

    assert any(cost_s() < 1 for _ in range(3))


class Stuck(Rich):
    """Does not come back from one sample, as often as there is a file for it."""

    def __init__(self, folder: Path, times: int, what: Callable[[], Any]) -> None:
        super().__init__()
        self.folder, self.what = folder, what
        for number in range(times):
            (folder / str(number)).touch()

    def __getitem__(self, index: int) -> dict[str, Any]:
        left = list(self.folder.iterdir()) if index == 7 else []
        if left:
            left[0].unlink()
            self.what()
        return super().__getitem__(index)

    def describe(self, index: int) -> str:
        return f"scan_{index}.nii"


class BehindSlow(Stuck):
    """The same, while the worker asked first is still reading."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.3 * (index == 0))
        return super().__getitem__(index)


def test_a_worker_that_ends_is_replaced_and_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, quick: None
) -> None:
    found = read(Stuck(tmp_path, 2, lambda: os._exit(3)))
    said = [f"rank 0, evaluation: {fault}" for m in found for fault in m.faults]
    assert [record.getMessage() for record in caplog.records] == said
    assert all(re.search(r"loader worker \d+ ended .*; replaced, .* s lost", text) for text in said)
    assert data_of(found) == data_of(read(Rich(), num_workers=0))
    assert faults(found) == ["ended with code 3"] * 2


def sleep_long() -> None:
    time.sleep(60)


def test_a_worker_that_does_not_come_back_says_where_it_stands_and_is_replaced(
    tmp_path: Path, quick: None
) -> None:
    found = read(Stuck(tmp_path, 1, sleep_long), timeout_s=0.8)
    assert data_of(found) == data_of(read(Rich(), num_workers=0))
    (fault,) = faults(found)
    place = r"in sleep_long \(test_workers.py:\d+\) < __getitem__ \(test_workers.py:\d+\) < .+"
    assert re.fullmatch(rf"gave no answer for 0.8 s, {place}", fault), fault


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "memory"),
        (lambda: os.kill(os.getpid(), signal.SIGSTOP), "stopped by a signal"),
        (lambda: os._exit(1), "ended with code 1"),
    ],
)
def test_the_third_loss_over_the_same_samples_names_them(
    what: Callable[[], Any], said: str, tmp_path: Path, quick: None
) -> None:
    with pytest.raises(DataError, match=f"3 workers were lost.*{said}") as caught:
        read(BehindSlow(tmp_path, 3, what))
    assert "batch of scan_6.nii, scan_7.nii;" in caught.value.problem
    assert "loader.num_workers=0" in caught.value.remedy
    assert not children()


def test_slow_reads_are_no_fault_once_they_are_known_to_be_slow() -> None:
    class Slower(Rich):
        def __getitem__(self, index: int) -> dict[str, Any]:
            time.sleep(0.05 if index < 12 else 0.3)
            return super().__getitem__(index)

    assert faults(read(Slower(16), timeout_s=0.4)) == []


def test_a_batch_that_cannot_travel_is_named() -> None:
    class Unsendable(Rich):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"lock": threading.Lock()}

    said = "batch of sample 0, sample 1 cannot be sent from its worker"
    with pytest.raises(DataError, match=said):
        read(Unsendable())


def test_a_batch_for_which_there_is_no_shared_memory_is_named(quick: None) -> None:
    class Large(Rich):
        def __getitem__(self, index: int) -> Any:
            """A file, and so a piece of shared memory, has at most 1 MB in this worker."""
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
            return np.zeros(1 << 21, dtype=np.uint8)

    said = "sample 0, sample 1 cannot be sent from its worker: unable"
    with pytest.raises(DataError, match=said):
        read(Large(), timeout_s=1.0)


def test_workers_that_cannot_all_be_started_are_refused_and_none_is_left() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 16, hard))
    try:
        with pytest.raises(DataError, match="16 loader workers cannot be started: .*open files"):
            read(Rich(), num_workers=16)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for process in multiprocessing.active_children():
        process.join(5)
        assert not process.is_alive(), "it ignores SIGTERM, and would be waited for at the end"


def test_nothing_is_left_behind_by_reading_that_stops_early() -> None:
    def left() -> tuple[int, list[str]]:
        """Count open files, and name shared memory of this process; others have theirs."""
        shared = [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]
        return len(os.listdir("/proc/self/fd")), shared

    gc.collect()  # errors of other tests hold on to their batches
    before = left()
    micro_batches = read_held_out(Rich(), 2, FakeWorld(), 7, as_list, LoaderConfig(num_workers=2))
    next(micro_batches)
    children()[0].send_signal(signal.SIGSTOP)
    del micro_batches
    assert not children()
    deadline = time.monotonic() + 30  # threads of torch's close what they hold as they end
    while left() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left() == before
    assert os.listdir(util.get_temp_dir()) == [], "no names"


def test_workers_leave_stop_signals_to_their_parent() -> None:
    def meddle(turn: int) -> None:
        for worker in children() if turn > 1 else ():  # by then both have answered
            worker.terminate()
            worker.send_signal(signal.SIGINT)

    assert faults(read(Rich(), meddle)) == []


def test_workers_end_with_a_process_that_is_killed() -> None:
    class Busy(Rich):
        def __getitem__(self, index: int) -> dict[str, Any]:
            time.sleep(60 if index > 1 else 0)  # it does not look whether anyone still asks
            return super().__getitem__(index)

    receiver, sender = os.pipe()
    if (child := os.fork()) == 0:
        micro_batches = read_held_out(
            Busy(), 2, FakeWorld(), 7, as_list, LoaderConfig(num_workers=2)
        )
        next(micro_batches)
        os.write(sender, b",".join(b"%d" % p.pid for p in children()))
        signal.pause()
    pids = [int(pid) for pid in os.read(receiver, 100).split(b",")]
    os.close(receiver)
    os.close(sender)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 30  # by themselves they would sleep for twice as long
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pids) == 2
    assert not any(map(is_alive, pids))
