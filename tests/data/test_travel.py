"""A micro-batch arrives as it was sent: whole, in its layout, without another copy."""

import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lockstep.data.travel import LARGE_BYTES, receive, send

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with sender, receiver:
        yield sender, receiver


def travelled(value: Any, ends: Ends) -> Any:
    send(ends[0], value)
    return receive(ends[1])


IMAGE = torch.rand(3, 4, 5)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "tensor",
    [
        IMAGE.permute(2, 0, 1),
        IMAGE[:, ::2, 1:4],
        IMAGE[1, 2, 3],
        torch.ones(1).expand(1000, 1000),
        torch.zeros(0, 3),
        torch.arange(10) > 4,
        IMAGE.bfloat16(),
        IMAGE.to(torch.float8_e4m3fn),
        torch.complex(IMAGE, IMAGE).conj(),
        torch.eye(3).to_sparse(),
        torch.ones(2, requires_grad=True),
        nn.Parameter(IMAGE),
    ],
)
def test_a_tensor_of_any_kind_arrives_in_its_layout(tensor: Tensor, ends: Ends) -> None:
    found = travelled([tensor, tensor], ends)
    assert found[0] is found[1], "one object stays one"
    assert type(found[0]) is type(tensor)
    assert found[0].requires_grad == tensor.requires_grad
    assert found[0].dtype == tensor.dtype
    assert found[0].layout == tensor.layout
    if tensor.layout is torch.strided:
        assert found[0].stride() == tensor.stride()
    assert torch.equal(found[0].to_dense().cfloat(), tensor.detach().to_dense().cfloat())


def test_a_view_travels_without_the_tensor_it_is_a_view_of(ends: Ends) -> None:
    found = travelled(torch.arange(1 << 20)[5:7], ends)
    assert found.untyped_storage().nbytes() == 16


def test_arrays_arrive_aligned_and_may_be_written_into(ends: Ends) -> None:
    found = travelled([np.ones(3, dtype=np.int8), torch.ones(5), np.zeros((2, 2))], ends)
    assert found[1].data_ptr() % 64 == found[2].ctypes.data % 64 == 0
    for array in found:
        array += 1
    assert [array.sum() for array in found] == [6, 10, 4]


def test_what_lies_in_shared_memory_already_is_not_copied(ends: Ends) -> None:
    tensor = torch.zeros(LARGE_BYTES, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    found = travelled(tensor, ends)
    tensor.fill_(3)
    assert int(found.sum()) == 3 * LARGE_BYTES
    small = torch.zeros(8).share_memory_()  # type: ignore[no-untyped-call]
    found = travelled(small, ends)
    small.fill_(3)
    assert found.sum() == 0


def test_a_message_of_many_parts_arrives(ends: Ends) -> None:
    samples = [{"x": torch.full((2,), float(i)), "name": f"sample {i}"} for i in range(5000)]
    found = travelled(samples, ends)
    assert torch.equal(default_collate(found)["x"], default_collate(samples)["x"])
    assert found[4999]["name"] == "sample 4999"


def test_nothing_stays_open(ends: Ends) -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    found = travelled([torch.ones(5), np.ones(5)], ends)
    assert num_open() <= before + 1
    del found
    assert num_open() == before


def test_a_sender_that_is_gone_is_an_error(ends: Ends) -> None:
    send(ends[0], "last words")
    ends[0].close()
    assert receive(ends[1]) == "last words"
    with pytest.raises(EOFError, match="closed"):
        receive(ends[1])
