"""Processes that read micro-batches ahead of time, all replaced when one is lost.

Owns: the processes, their settings, when one counts as lost, and what is asked of its replacement.
Does not own: what is read (`reader.py`), how it travels (`travel.py`), or the order.
"""

import atexit
import faulthandler
import mmap
import multiprocessing
import os
import pickle
import re
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import cycle
from multiprocessing import util
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Literal

import psutil
import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from lockstep.data.batch import MicroBatch, WorkerFault
from lockstep.data.order import Leaf
from lockstep.data.reader import LeafReader, names_of
from lockstep.data.travel import receive, send
from lockstep.dist.detect import MAX_TIMEOUT_S
from lockstep.errors import DataError
from lockstep.parent import end_with_parent
from lockstep.signals import leave_signals_to_parent
from lockstep.torch_compat.private import set_worker_info

MAX_TRIES = 3
SLICE_S = 0.25
STOPPED_S = 5.0
"""How long a worker may be seen stopped by a signal; no read takes that form."""
SLOWEST_FACTOR = 10
"""A micro-batch may take so many times as long as the slowest so far, whatever the time limit."""
JOIN_TIMEOUT_S = 1.0
NUM_FRAMES = 4
"""How many calls are named of a worker that gives no answer."""
REQUEST_BYTES = 4096
"""No request is longer."""

Request = tuple[int, Leaf]
"""A leaf, and how many were requested before it."""


class LoaderConfig(BaseModel):
    """How samples are read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_workers: NonNegativeInt = 0
    prefetch: int = Field(default=2, ge=1, le=100)
    timeout_s: float = Field(default=300.0, gt=0, le=MAX_TIMEOUT_S)
    """Replace a worker that does not answer for this long, or for ten times the slowest read if
    that is longer. Three in a row fit into the default 1800 s timeout of other ranks."""
    on_bad_sample: Literal["stop", "skip"] = "stop"


def read_in_workers(
    reader: LeafReader, leaves: Iterable[Leaf], timeout_s: float, **pool_options: Any
) -> Generator[MicroBatch]:
    """Yield the leaves in their order, read ahead by a `WorkerPool`.

    When a worker dies, is stopped, or keeps a leaf waiting for longer than `timeout_s` and
    ten times the slowest so far, all are killed, and new ones continue at the first leaf that was
    not yielded.

    Raises:
        DataError: if three workers were lost over the same leaf.
    """
    upcoming = enumerate(leaves)
    pending = deque[Request]()
    tries = Counter[Request]()
    slowest_s = 0.0

    def requests() -> Iterator[Request]:
        """Request again what has not arrived, then what comes."""
        yield from tuple(pending)
        for request in upcoming:
            pending.append(request)
            yield request

    pool = WorkerPool(reader, requests(), **pool_options)
    try:
        while pending:
            began = time.monotonic()
            lost: list[tuple[int, str]] = []
            while isinstance(found := pool.take(max(timeout_s, SLOWEST_FACTOR * slowest_s)), dict):
                over: dict[Request, str] = {}  # several that had begun nothing count as one
                for worker, happened in found.items():
                    lost.append((pool.processes[worker].pid, happened))
                    over[pending[max(0, pool.begun[worker] - pending[0][0])]] = happened
                for request, happened in over.items():
                    tries[request] += 1
                    if tries[request] == MAX_TRIES:
                        raise _given_up(reader, request[1], happened)
                pool.end()
                pool = WorkerPool(reader, requests(), **pool_options)
            slowest_s = max(slowest_s, pool.waited_s)
            pending.popleft()
            seconds = (time.monotonic() - began) / max(1, len(lost))
            faults = tuple(WorkerFault(pid, happened, seconds) for pid, happened in lost)
            yield replace(found, faults=faults)
    finally:
        pool.end()


class WorkerPool:
    """Processes that take turns in reading, each `prefetch` leaves ahead, watched from this one.

    Each has a connection of its own: one that is killed while it sends holds up no other. A
    thread receives, and moves data for a GPU to page-locked memory meanwhile.
    """

    def __init__(
        self,
        reader: LeafReader,
        requests: Iterator[Request],
        num_workers: int,
        prefetch: int,
        device: torch.device,
    ) -> None:
        self.begun = memoryview(mmap.mmap(-1, 8 * num_workers)).cast("q")
        """By worker, the number of the leaf it began last; the workers write it."""
        self.waited_s = 0.0
        """How long the last leaf kept `take` waiting."""
        self.processes: list[Any] = []
        self._connections: list[socket.socket] = []
        self._requests = requests
        self._num_sent = 0
        self._num_taken = 0
        self._arrived = SimpleQueue[MicroBatch | str]()
        """Micro-batches in their order; a text if the next one cannot be received."""
        self._receiver = Thread(target=self._receive, args=(device,), name="feed", daemon=True)
        self._stack = os.fdopen(os.memfd_create("stack"), "rb")
        util.get_temp_dir()  # made here, what torch leaves in it is removed with this process
        atexit.register(self.end)  # multiprocessing would wait for workers that ignore SIGTERM
        try:
            for worker in range(num_workers):
                self._start(worker, num_workers, reader)
        except OSError as error:
            self.end()
            problem = f"{num_workers} loader workers cannot be started: {error}"
            remedy = "lower loader.num_workers, or allow more open files (ulimit -n)"
            raise DataError(problem, remedy) from error
        for _ in range(num_workers * prefetch + 1):  # one is received while another is in use
            self._send_request()
        self._receiver.start()

    def _start(self, worker: int, num_workers: int, reader: LeafReader) -> None:
        """Fork a worker. Nobody else holds its end of the connection, so its death closes that."""
        own_end, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connections.append(own_end)
        with far_end:
            process = multiprocessing.get_context("fork").Process(
                target=_serve,
                args=(far_end, reader, worker, num_workers, self.begun, self._stack.fileno()),
                kwargs={"parent": os.getpid()},
                daemon=True,
            )
            process.start()
        self.processes.append(process)

    def take(self, limit_s: float) -> MicroBatch | dict[int, str]:
        """Wait for the next leaf; return what became of which workers if it does not come.

        Time is counted in slices: when this process was stopped as well, that is no fault.
        """
        turn = self._num_taken % len(self.processes)
        slice_s = min(SLICE_S, limit_s / 4)
        stopped_s = 0.0
        self.waited_s = slice_s
        while (found := self._next(slice_s)) is None:
            stopped = [w for w, process in enumerate(self.processes) if _is_stopped(process.pid)]
            stopped_s = stopped_s + slice_s if stopped else 0.0
            if stopped_s >= min(STOPPED_S, limit_s):
                return dict.fromkeys(stopped, f"was stopped by a signal for {stopped_s:.3g} s")
            if self.waited_s >= limit_s:
                silence = f"gave no answer for {self.waited_s:.3g} s"
                return {turn: silence + self._place_of(self.processes[turn].pid)}
            self.waited_s += slice_s
        if isinstance(found, MicroBatch):
            self._num_taken += 1
            self._send_request()
            return found
        self.processes[turn].join(JOIN_TIMEOUT_S)  # one that was killed closes its connection first
        codes = {w: process.exitcode for w, process in enumerate(self.processes)}
        ended = {w: _end_of(code) for w, code in codes.items() if code is not None}
        return ended or {turn: f"sent what cannot be received: {found}"}

    def end(self) -> None:
        """Kill the workers, and wait until they are gone."""
        atexit.unregister(self.end)
        for process in self.processes:
            process.kill()
        for connection in self._connections:
            connection.shutdown(socket.SHUT_RDWR)  # the thread may wait at it
        if self._receiver.ident is not None:
            self._receiver.join(JOIN_TIMEOUT_S)
        while self._connections:
            self._connections.pop().close()
        while self.processes:
            process = self.processes.pop()
            process.join(JOIN_TIMEOUT_S)  # one that waits for a dead disk cannot even be killed
            if process.exitcode is not None:
                process.close()
        self._arrived = SimpleQueue()  # frees what nobody will take
        self._stack.close()

    def _next(self, limit_s: float) -> MicroBatch | str | None:
        """Return what the thread has received, or None if nothing arrives in time."""
        with suppress(Empty):
            return self._arrived.get(timeout=limit_s)
        return None

    def _send_request(self) -> None:
        """Request one more leaf of the worker whose turn it is, if there is one."""
        request = next(self._requests, None)
        if request is not None:
            turn = self._num_sent % len(self.processes)
            with suppress(OSError):  # it is dead, as `take` will find
                self._connections[turn].send(pickle.dumps(request))
            self._num_sent += 1

    def _receive(self, device: torch.device) -> None:
        """Receive micro-batches in their order, until a worker is lost or the pool ends."""
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            for connection in cycle(self._connections):
                micro_batch: MicroBatch = receive(connection)
                if device.type == "cuda":
                    micro_batch = micro_batch.pin_memory()
                self._arrived.put(micro_batch)
        except Exception as error:
            self._arrived.put(f"{type(error).__name__}: {error}")

    def _place_of(self, pid: int) -> str:
        """Ask a worker where it is; the innermost call comes first."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
        time.sleep(SLICE_S)
        self._stack.seek(0)
        frames = re.findall(r'File "(.+)", line (\d+) in (.+)', self._stack.read().decode())
        told = [f"{f} ({os.path.basename(path)}:{line})" for path, line, f in frames[:NUM_FRAMES]]
        return f", in {' < '.join(told)}" if told else ""


def _serve(
    connection: socket.socket,
    reader: LeafReader,
    worker: int,
    num_workers: int,
    begun: memoryview,
    stack: int,
    parent: int,
) -> None:
    """Be a worker: read what is requested until the parent ends this process.

    Asked by SIGUSR2, it writes its stack to the file `stack`, whatever it is doing.
    """
    leave_signals_to_parent()
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=False)
    end_with_parent(parent)
    torch.set_num_threads(1)  # the workers share the cores
    set_worker_info(worker, num_workers, reader.seed, reader.dataset)
    while request := connection.recv(REQUEST_BYTES):
        begun[worker], leaf = pickle.loads(request)
        micro_batch = reader.read(leaf)
        try:
            send(connection, micro_batch)
        except Exception as error:  # something of the user's that cannot be sent, or no room
            if isinstance(error, OSError):
                error = OSError(f"unable to share its memory: {error.strerror}")
            names = names_of(reader.dataset, micro_batch.ids)
            problem = f"the batch of {names} cannot be sent from its worker: {error}"
            remedy = (
                "return only what can be pickled, allow more shared memory (/dev/shm), or set "
                "loader.num_workers=0"
            )
            send(connection, replace(micro_batch, data=None, error=(problem, remedy)))


def _end_of(code: int) -> str:
    """Return as text how a process ended."""
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
