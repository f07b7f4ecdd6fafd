"""Processes that read leaves ahead of time, all replaced when one dies or stands still.

Owns: when a worker is given up, and what is asked of those that come after. Does not own:
the processes and how tensors travel from them, which is torch's `DataLoader`; what is read
(`reader.py`); the order.
"""

import atexit
import faulthandler
import mmap
import os
import pickle
import re
import signal
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import active_children, connection, util
from multiprocessing.reduction import ForkingPickler
from threading import Thread
from typing import Any

import psutil
import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import signal_handling

from lockstep.data.batch import MicroBatch, WorkerFault
from lockstep.data.order import Leaf
from lockstep.data.reader import LeafReader, names_of
from lockstep.errors import DataError
from lockstep.parent import end_with_parent
from lockstep.signals import leave_signals_to_parent

MAX_TRIES = 3
SLICE_S = 0.25
STOPPED_S = 5.0
"""How long a worker may be seen stopped by a signal; no read takes that form."""
PATIENCE = 10
"""A leaf may take so many times as long as the slowest so far, whatever the time limit."""
GOODBYE_S = 1.0
NUM_FRAMES = 4
"""So much is told of where a worker stands."""

Asked = tuple[int, Leaf]
"""A leaf, and how many were asked for before it."""


def read_in_workers(
    reader: LeafReader, leaves: Iterable[Leaf], timeout_s: float, **crew_options: Any
) -> Generator[MicroBatch]:
    """Yield the leaves in their order, read ahead by a `Crew`.

    When a worker dies, is stopped, or keeps a leaf waiting for longer than `timeout_s` and
    ten times the slowest so far, all are killed and others go on at the first leaf that was
    not yielded.

    Raises:
        DataError: if three workers were lost over the same leaf.
    """
    coming, waiting, tries = enumerate(leaves), deque[Asked](), Counter[Asked]()
    slowest_s = 0.0

    def ask() -> Iterator[Asked]:
        """Ask again for what has not arrived, then for what comes."""
        yield from tuple(waiting)
        for asked in coming:
            waiting.append(asked)
            yield asked

    crew = Crew(reader, ask(), **crew_options)
    try:
        while waiting:
            began, lost = time.monotonic(), list[tuple[int, str]]()
            while isinstance(found := crew.take(max(timeout_s, PATIENCE * slowest_s)), dict):
                crew.end()
                for worker, happened in found.items():
                    lost.append((crew.processes[worker].pid, happened))
                    at = waiting[max(0, crew.begun[worker] - waiting[0][0])]
                    tries[at] += 1
                    if tries[at] == MAX_TRIES:
                        raise _given_up(reader, at[1], happened)
                crew = Crew(reader, ask(), **crew_options)
            slowest_s = max(slowest_s, crew.waited_s)
            waiting.popleft()
            if waiting:
                crew.fetch()
            seconds = (time.monotonic() - began) / max(1, len(lost))
            faults = tuple(WorkerFault(pid, happened, seconds) for pid, happened in lost)
            yield replace(found, faults=faults)
    finally:
        crew.end()


class Crew:
    """The workers of one `DataLoader`, each `prefetch` leaves ahead, watched from this process.

    Data for a GPU come in page-locked memory.
    """

    def __init__(
        self, reader: LeafReader, asked: Any, num_workers: int, prefetch: int, device: torch.device
    ) -> None:
        self.begun = memoryview(mmap.mmap(-1, 8 * num_workers)).cast("q")
        """By worker, the number of the leaf it began last; the workers write it."""
        self.waited_s = 0.0
        self._num_taken, self._device = 0, device
        self._coming: Future[MicroBatch | str] | None = None
        self._stack = os.fdopen(os.memfd_create("stack"), "rb")
        util.get_temp_dir()  # made here, the workers' sockets are removed though they are killed
        # Or torch would raise a worker's death wherever this process happens to be.
        signal_handling._SIGCHLD_handler_set = True
        loader: Any = DataLoader(
            _Desk(reader, self.begun),  # type: ignore[arg-type]  # indexed by leaf
            sampler=asked,
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=prefetch,
            timeout=SLICE_S,
            generator=torch.Generator(),  # or it draws a number from the caller's
            worker_init_fn=partial(_settle, os.getpid(), self._stack.fileno()),
            multiprocessing_context="fork",
        )
        before = set(active_children())
        try:
            self._parcels = iter(loader)
        except (OSError, RuntimeError) as error:
            self._stack.close()
            for process in set(active_children()) - before:
                process.kill()  # or this process would wait for it when it ends
            problem = f"{num_workers} loader workers cannot be started: {error}"
            remedy = "lower loader.num_workers, allow more open files (ulimit -n), or free /dev/shm"
            raise DataError(problem, remedy) from error
        self.processes = self._parcels._workers
        # Nor is a handler that a loader of the user's has set to know of these workers.
        _remove_worker_pids(id(self._parcels))
        self._parcels._worker_pids_set = False
        atexit.register(self.end)  # multiprocessing would wait for workers that ignore SIGTERM

    def fetch(self) -> "Future[MicroBatch | str]":
        """Take the next leaf in, in a thread: a stopped worker may hold that up for ever."""
        if self._coming is None:
            self._coming = Future()
            Thread(target=self._fetch, args=(self._coming,), name="feed", daemon=True).start()
        return self._coming

    def take(self, limit_s: float) -> MicroBatch | dict[int, str]:
        """Wait for the next leaf; return what became of which workers if it does not come.

        Time is counted in slices: when this process was stopped as well, that is no fault.
        """
        coming, turn = self.fetch(), self._num_taken % len(self.processes)  # torch asks in turn
        slice_s, stopped_s, self.waited_s = min(SLICE_S, limit_s / 4), 0.0, 0.0
        while not wait([coming], slice_s).done:
            self.waited_s += slice_s
            stopped = [w for w, process in enumerate(self.processes) if _is_stopped(process.pid)]
            stopped_s = stopped_s + slice_s if stopped else 0.0
            if stopped_s >= min(STOPPED_S, limit_s):
                return dict.fromkeys(stopped, f"was stopped by a signal for {stopped_s:.3g} s")
            if self.waited_s >= limit_s:
                silence = f"gave no answer for {self.waited_s:.3g} s"
                return {turn: silence + self._place_of(self.processes[turn].pid)}
        self.waited_s += slice_s
        if isinstance(found := coming.result(), MicroBatch):
            self._num_taken, self._coming = self._num_taken + 1, None
            return found
        ended = connection.wait([process.sentinel for process in self.processes], GOODBYE_S)
        fates = {w: _end_of(p) for w, p in enumerate(self.processes) if p.sentinel in ended}
        return fates or {turn: f"sent what cannot be taken in: {found}"}

    def _place_of(self, pid: int) -> str:
        """Ask a worker where it stands; the call that it is in comes first."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
        time.sleep(SLICE_S)
        self._stack.seek(0)
        frames = re.findall(r'File "(.+)", line (\d+) in (.+)', self._stack.read().decode())
        told = [f"{f} ({os.path.basename(path)}:{line})" for path, line, f in frames[:NUM_FRAMES]]
        return f", in {' < '.join(told)}" if told else ""

    def end(self) -> None:
        """Kill the workers; torch's own way waits for locks that a dead worker may hold."""
        atexit.unregister(self.end)
        self._stack.close()
        self._parcels._shutdown = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(GOODBYE_S)  # one that waits for a dead disk cannot even be killed
        for queue in self._parcels._index_queues:
            queue.close()
        if self._coming is not None:
            wait([self._coming], GOODBYE_S)

    def _fetch(self, coming: "Future[MicroBatch | str]") -> None:
        """Set `coming` to the next leaf, or to the words of what torch raises once one is dead."""
        while not coming.done():
            try:
                micro_batch: MicroBatch = pickle.loads(next(self._parcels).numpy())
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)
                    micro_batch = micro_batch.pin_memory()
                coming.set_result(micro_batch)
            except Exception as error:
                if "DataLoader timed out" not in str(error):  # or all are alive, and it may go on
                    coming.set_result(f"{type(error).__name__}: {error}")


@dataclass
class _Desk:
    """Where a worker reads: it notes which leaf it is on, and packs what it read.

    A micro-batch travels pickled in shared memory, whatever strings and arrays it holds. The
    message that says where is shorter than what a pipe takes in at once: no worker can die in
    the midst of one, which would leave the reading process waiting for the rest.
    """

    reader: LeafReader
    begun: memoryview

    def __getitem__(self, asked: Asked) -> Any:
        worker: Any = get_worker_info()
        self.begun[worker.id], leaf = asked
        micro_batch = self.reader.read(leaf)
        try:
            return _packed(micro_batch)
        except Exception as error:  # something of the user's that cannot be sent, or no room
            names = names_of(self.reader.dataset, micro_batch.ids)
            problem = f"the batch of {names} cannot leave its worker: {error}"
            story = problem, "what can be pickled, more shared memory, or loader.num_workers=0"
            return _packed(replace(micro_batch, data=None, error=story))


def _packed(micro_batch: MicroBatch) -> Any:
    """Return it in shared memory already: torch would find no room in a thread, and drop it."""
    return torch.frombuffer(ForkingPickler.dumps(micro_batch), dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]


def _settle(parent: int, stack: int, worker: int) -> None:
    """Be a worker: heed no signal that is meant for the parent, and end with it.

    Asked by SIGUSR2, it writes its stack to the file `stack`, whatever it is doing.
    """
    leave_signals_to_parent(worker)
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=False)
    end_with_parent(parent)


def _end_of(process: Any) -> str:
    """Say how a process ended."""
    process.join(GOODBYE_S)
    code = process.exitcode or 0
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL), as the kernel does when memory runs out"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _is_stopped(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _given_up(reader: LeafReader, leaf: Leaf, happened: str) -> DataError:
    """Return the error that ends the run."""
    names = names_of(reader.dataset, reader.order.ids(leaf.epoch, leaf.start, leaf.stop))
    return DataError(
        f"{MAX_TRIES} workers were lost at the batch of {names}; the last one {happened}",
        "fix these samples (loader.num_workers=0 shows what they do); if memory ran out, lower "
        "loader.num_workers; if they are slow, raise loader.timeout_s",
    )
