"""Processes that read leaves ahead of time, and are replaced when they die or stand still.

Owns: the worker processes of one reading, how a micro-batch travels from them, and
when one of them is given up. Does not own: what is read (`reader.py`), nor the order.

A micro-batch travels as a file in memory, handed over by one message on a socket that
the worker shares with nobody. A worker killed or stopped in the midst of anything holds
up neither this process nor another worker, and leaves nothing behind.
"""

import atexit
import ctypes
import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from itertools import islice
from multiprocessing import connection
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from lockstep.data.order import Leaf
from lockstep.data.reader import LeafReader, MicroBatch, WorkerFault, names_of
from lockstep.signals import leave_signals_to_parent

MAX_TRIES = 3
SLICE_S = 0.25
STOPPED_S = 5.0
"""How long a worker may be seen stopped by a signal; no read takes that form."""
PATIENCE = 10
"""A read may take so many times as long as the slowest so far, whatever the time limit."""
GOODBYE_S = 1.0
ALIGNMENT = 64
PR_SET_PDEATHSIG = 1

_FORK = multiprocessing.get_context("fork")


def read_in_workers(
    reader: LeafReader, leaves: Iterable[Leaf], num_workers: int, prefetch: int, timeout_s: float
) -> Generator[MicroBatch]:
    """Yield the leaves in their order, each worker `prefetch` of them ahead.

    A worker that dies, is stopped, or takes longer than `timeout_s` and than ten times the
    slowest read so far, is replaced, and its leaves are read again. A leaf at which three
    workers were lost comes back as an error.
    """
    coming, turns = iter(leaves), deque[Worker]()
    workers = [Worker(reader, timeout_s) for _ in range(num_workers)]

    def ask(worker: Worker) -> None:
        for leaf in islice(coming, 1):
            worker.ask(leaf)
            turns.append(worker)

    def close() -> None:
        for worker in workers:
            worker.dismiss()
        deadline = time.monotonic() + GOODBYE_S
        for worker in workers:
            worker.end(deadline - time.monotonic())

    atexit.register(close)  # or a worker that ignores signals is waited for by multiprocessing
    try:
        for _ in range(prefetch):
            for worker in workers:
                ask(worker)
        while turns:
            worker = turns.popleft()
            micro_batch = worker.take()
            ask(worker)
            yield micro_batch
    finally:
        atexit.unregister(close)
        close()


def pinned_ahead(
    read: Iterator[MicroBatch], depth: int, device: torch.device
) -> Generator[MicroBatch]:
    """Yield what is read from page-locked memory, copied there in a thread, `depth` ahead."""

    def make() -> MicroBatch | None:
        for micro_batch in read:
            return micro_batch.pin_memory()
        return None

    thread = ThreadPoolExecutor(1, "feed", torch.cuda.set_device, (device,))
    try:
        coming = deque(thread.submit(make) for _ in range(depth))
        while (item := coming.popleft().result()) is not None:
            coming.append(thread.submit(make))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)


class Worker:
    """A place for one process after another, and the leaves it was asked for."""

    slowest_s = 0.0

    def __init__(self, reader: LeafReader, timeout_s: float) -> None:
        self._reader = reader
        self._timeout_s = timeout_s
        self._wanted = deque[Leaf]()
        self._process: Any = None
        self._channel: socket.socket

    def ask(self, leaf: Leaf) -> None:
        """Have a leaf read; the first one starts the process."""
        self._wanted.append(leaf)
        if self._process is None:
            self._start()
        else:
            self._request(leaf)

    def take(self) -> MicroBatch:
        """Return the leaf asked for first, from as many processes as that takes."""
        began, lost = time.monotonic(), []
        while isinstance(answer := self._wait(), str):
            lost.append((self._process.pid, answer))
            self.end(0)
            if len(lost) == MAX_TRIES:
                return _given_up(self._reader, self._wanted[0], answer)
            self._start()
        self._wanted.popleft()
        seconds = (time.monotonic() - began) / max(1, len(lost))
        faults = tuple(WorkerFault(pid, happened, seconds) for pid, happened in lost)
        return replace(answer, faults=faults) if faults else answer

    def dismiss(self) -> None:
        """Ask the process to end."""
        if self._process is not None:
            with suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)

    def end(self, grace_s: float) -> None:
        """End the process, by force if it does not leave by itself."""
        process, self._process = self._process, None
        if process is not None:
            process.join(max(0.0, grace_s))
            process.kill()
            process.join(GOODBYE_S)  # one that waits for a dead disk cannot even be killed
            self._channel.close()

    def _start(self) -> None:
        """Fork a process and ask it for all that is wanted."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends = (theirs, self._channel)
        self._process = _FORK.Process(
            target=_work, args=(self._reader, *ends, os.getpid()), daemon=True
        )
        self._process.start()
        theirs.close()
        for leaf in self._wanted:
            self._request(leaf)

    def _request(self, leaf: Leaf) -> None:
        with suppress(OSError):  # it is gone; whoever waits for the leaf will see
            self._channel.send(pickle.dumps(leaf))

    def _wait(self) -> MicroBatch | str:
        """Return the next answer, or what became of the worker instead.

        Time is counted in slices: when this process was stopped as well, that is no fault.
        """
        waited_s = stopped_s = 0.0
        slice_s = min(SLICE_S, self._timeout_s / 4)
        while True:
            ready = connection.wait([self._channel, self._process.sentinel], slice_s)
            if ready:
                return self._receive() or _last_words(self._process)
            waited_s += slice_s
            stopped_s = stopped_s + slice_s if _is_stopped(self._process.pid) else 0.0
            if stopped_s >= min(STOPPED_S, self._timeout_s):
                return f"was stopped by a signal for {stopped_s:.3g} s"
            if waited_s >= max(self._timeout_s, PATIENCE * self.slowest_s):
                return f"gave no answer for {waited_s:.3g} s"

    def _receive(self) -> MicroBatch | None:
        """Take a message, which outlives its sender; None if there is no more."""
        try:
            told, files, _, _ = socket.recv_fds(
                self._channel, 8, maxfds=1, flags=socket.MSG_DONTWAIT
            )
        except OSError:
            return None
        if not told or not files:
            return None
        (seconds,) = struct.unpack("d", told)
        self.slowest_s = max(self.slowest_s, seconds)
        return _unpacked(files[0])


def _work(
    reader: LeafReader, channel: socket.socket, other_end: socket.socket, parent: int
) -> None:
    """Be a worker: read what is asked for until nobody asks any more."""
    leave_signals_to_parent(0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    other_end.close()
    torch.set_num_threads(1)
    with suppress(ConnectionError):
        while request := channel.recv(1 << 16):
            began, leaf = time.monotonic(), pickle.loads(request)
            micro_batch = reader.read(leaf)
            try:
                file = _packed(micro_batch)
            except Exception as error:  # something of the user's that cannot be sent
                file = _packed(_cannot_travel(reader, leaf, error))
            socket.send_fds(channel, [struct.pack("d", time.monotonic() - began)], [file])
            os.close(file)


def _last_words(process: Any) -> str:
    """Say how a process ended."""
    process.join(GOODBYE_S)
    code = process.exitcode
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL), as the kernel does when memory runs out"
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _is_stopped(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _given_up(reader: LeafReader, leaf: Leaf, happened: str) -> MicroBatch:
    """Return the leaf as the error that ends the run."""
    ids = reader.order.ids(leaf.epoch, leaf.start, leaf.stop)
    problem = (
        f"a micro-batch cannot be read: {MAX_TRIES} workers were lost at it, the last one "
        f"{happened}; it holds {names_of(reader.dataset, ids)}"
    )
    if "memory" in happened:
        remedy = "more memory for the job, fewer loader.num_workers, or a look at these samples"
    elif "no answer" in happened:
        remedy = "a longer loader.timeout_s if reading may take that long, or mend these samples"
    else:
        remedy = "loader.num_workers=0 to see it happen, or mend these samples"
    return MicroBatch(leaf, ids, None, error=(problem, remedy))


def _cannot_travel(reader: LeafReader, leaf: Leaf, error: Exception) -> MicroBatch:
    ids = reader.order.ids(leaf.epoch, leaf.start, leaf.stop)
    problem = (
        f"the batch of {names_of(reader.dataset, ids)} cannot leave its worker: "
        f"{type(error).__name__}: {error}"
    )
    return MicroBatch(
        leaf, ids, None, error=(problem, "a batch that can be pickled, or num_workers=0")
    )


# --- A micro-batch as a file in memory --------------------------------------------------------


def _packed(micro_batch: MicroBatch) -> int:
    """Return a file in memory: lengths, the pickled micro-batch, then its arrays, aligned."""
    arrays: list[pickle.PickleBuffer] = []
    body = BytesIO()
    pickler = pickle.Pickler(body, 5, buffer_callback=arrays.append)
    pickler.dispatch_table = {Tensor: _reduced}
    pickler.dump(micro_batch)
    blocks = [body.getbuffer(), *(array.raw() for array in arrays)]
    lengths = [len(blocks), *(block.nbytes for block in blocks)]
    file = os.memfd_create("micro_batch")
    with open(file, "wb", closefd=False) as writer:
        writer.write(struct.pack(f"{len(lengths)}q", *lengths))
        for block, place in zip(blocks, _places(lengths), strict=True):
            writer.seek(place)
            writer.write(block)
        writer.truncate()
    return file


def _unpacked(file: int) -> MicroBatch:
    """Return what `_packed` put into a file; the arrays lie where they are, writable."""
    try:
        memory = memoryview(mmap.mmap(file, 0))
    finally:
        os.close(file)
    (count,) = struct.unpack_from("q", memory)
    lengths = struct.unpack_from(f"{count + 1}q", memory)
    body, *arrays = (
        memory[place : place + length]
        for place, length in zip(_places(lengths), lengths[1:], strict=True)
    )
    micro_batch: MicroBatch = pickle.loads(body, buffers=arrays)
    return micro_batch


def _places(lengths: Iterable[int]) -> list[int]:
    """Return where each block begins: sums may come out otherwise where arrays are not aligned."""
    count, *sizes = lengths
    places, end = [], 8 * (count + 1)
    for size in sizes:
        places.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = places[-1] + size
    return places


def _reduced(tensor: Tensor) -> Any:
    """Take a plain tensor apart into an array of bytes, which travels beside the pickle."""
    is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not is_plain or tensor.requires_grad or tensor.is_quantized or not tensor.numel():
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.storage_offset():
        tensor = tensor.clone()  # a view would take along all that it is a view of
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.contiguous().clone()
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return _rebuilt, (raw.numpy(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _rebuilt(
    raw: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    storage = torch.from_numpy(raw).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride)
