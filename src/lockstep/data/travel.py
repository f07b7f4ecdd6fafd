"""How a micro-batch travels from a loader worker: its arrays lie in shared memory.

Owns: the message and the shared memory. Does not own: the processes, or when a message is sent
(`workers.py`).

A message is one packet on a socket, which arrives whole or not at all: a worker that is killed
never leaves half a message. It carries the descriptor of a file in /dev/shm without a name, which
the kernel frees when nobody holds it any more.
"""

import mmap
import pickle
import socket
import struct
import tempfile
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

SHARED_MEMORY = "/dev/shm"
ALIGNMENT = 64
"""Arrays begin at multiples of so many bytes, as torch's own allocator has it."""
LARGE_BYTES = 1 << 20
"""A tensor of so many bytes is worth the fifth of a millisecond that torch's own way takes."""
HEADER = struct.Struct("=QQ")
"""Where the index begins in the file, and where it ends."""


def send(connection: socket.socket, value: Any) -> None:
    """Send a value; a full /dev/shm is an OSError."""
    buffers: list[pickle.PickleBuffer] = []
    stream = BytesIO()
    _Pickler(stream, 5, True, buffers.append).dump(value)
    with tempfile.TemporaryFile("wb", dir=SHARED_MEMORY) as file:
        places = []
        end = 0
        for buffer in buffers:
            content = buffer.raw()
            gap = -end % ALIGNMENT
            start = end + gap
            end = start + content.nbytes
            places.append((start, end))
            file.write(bytes(gap))
            file.write(content)
        index = pickle.dumps((stream.getvalue(), places))
        file.write(index)
        file.flush()
        header = HEADER.pack(end, end + len(index))
        socket.send_fds(connection, [header], [file.fileno()])


def receive(connection: socket.socket) -> Any:
    """Wait for a value, and return it; its tensors and arrays lie in the memory that was sent.

    Raises:
        EOFError: nobody is at the other end any more.
    """
    header, files, _, _ = socket.recv_fds(connection, HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
    if not header:
        raise EOFError("the connection was closed")
    start, end = HEADER.unpack(header)
    with open(files[0], "rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), end))
    stream, places = pickle.loads(content[start:end])
    return pickle.loads(stream, buffers=[content[first:last] for first, last in places])


class _Pickler(ForkingPickler):
    """Leaves the contents of tensors out of the pickle, as Python does those of NumPy's arrays.

    What is large and in shared memory already, where torch's `default_collate` puts its result
    in a worker, is not copied there again: it travels by `torch.multiprocessing`.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        if value.is_shared() and value.nbytes >= LARGE_BYTES:  # type: ignore[no-untyped-call]
            return NotImplemented
        value = value.resolve_conj().resolve_neg()
        steps = zip(value.shape, value.stride(), strict=True)
        length = 1 + sum((size - 1) * stride for size, stride in steps)
        elements = value.as_strided((length,), (1,))  # with the gaps, if a view has some
        buffer = pickle.PickleBuffer(elements.view(torch.uint8).numpy())
        return _tensor_in, (buffer, value.dtype, value.shape, value.stride())


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is plain: only numbers and their layout, in this process's memory."""
    is_special = tensor.is_quantized or tensor.requires_grad
    is_in_memory = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return is_in_memory and tensor.numel() > 0 and not is_special


def _tensor_in(
    memory: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    """Return the tensor in a piece of memory, in the layout it had."""
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)
