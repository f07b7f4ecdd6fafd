"""Test doubles, also for users: ranks, a world, a task, a clock.

`run_ranks` starts real processes in a real gloo group. They are forked from one that has already
imported torch, so that hundreds of such tests take minutes.
"""

import functools
import importlib
import multiprocessing
import os
import secrets
import socket
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.dist.detect import Launch
from lockstep.dist.environment import leave_process
from lockstep.dist.world import World
from lockstep.task import Context, PartialLoss, Task

NUM_HELD = 64
"""Number of its latest ports that a process keeps reserved."""
_held: deque[int] = deque()


class FakeWorld(World):
    """A rank without a group: collectives see only this rank."""

    def __init__(self, rank: int = 0, size: int = 1, device: str = "cpu") -> None:
        launch = Launch(rank=rank, size=size, local_rank=rank, local_size=size, launcher="fake")
        super().__init__(launch, torch.device(device), None)

    def all_sum(self, value: Tensor) -> Tensor:
        """Return this rank's value."""
        return value

    def all_max(self, *values: int) -> list[int]:
        """Return this rank's values."""
        return list(values)

    def all_texts(self, text: str) -> list[str]:
        """Return this rank's text, as if every rank had given it."""
        return [text] * self.size

    def all_lengths(self, length: int) -> list[int]:
        """Return this rank's number, as if every rank had given it."""
        return [length] * self.size

    def all_gather(self, local: Tensor) -> Tensor:
        """Return this rank's rows."""
        return local


class ManualClock:
    """A clock that moves when told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now += seconds


class TinyTask(Task):
    """A regression in float64 in which samples have different numbers of units; some have none.

    The loss of a sample is weighted by 0 to 3 units, so ranks and micro-batches rarely have the
    same weight, and a mean of means is visibly wrong.
    """

    name = "tiny"

    def __init__(self, num_samples: int = 48, num_held_out: int = 10, dropout: float = 0.0) -> None:
        self.num_samples = num_samples
        self.num_held_out = num_held_out
        self.dropout = dropout

    def build_model(self) -> nn.Module:
        """Return a small network in float64."""
        layers = (nn.Linear(5, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 3))
        return nn.Sequential(*layers).double()

    def train_data(self) -> list[dict[str, Tensor]]:
        """Return `num_samples` samples, always the same."""
        return _tiny_samples(self.num_samples, seed=1)

    def eval_data(self) -> list[dict[str, Tensor]]:
        """Return held-out samples."""
        return _tiny_samples(self.num_held_out, seed=2)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        """Return the squared error summed over units."""
        error = (model(batch["x"]) - batch["y"]).square().sum(dim=1)
        units = batch["units"]
        largest = (error.detach() * (units > 2)).sum(), (units > 2).sum()
        return PartialLoss((error * units).sum(), units.sum(), {"heavy": largest})


def _tiny_samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    units = torch.randint(0, 4, (count,), generator=generator).double()
    return [{"x": x[i], "y": y[i], "units": units[i]} for i in range(count)]


def run_ranks(
    num_ranks: int, action: Callable[..., Any], *args: Any, timeout_s: float = 60
) -> list[Any]:
    """Run `action(*args)` in `num_ranks` forked processes and return what each returned.

    Each process has the launch variables of its rank and calls `World.enter` itself. If one
    fails, the others are terminated and its traceback is raised here.
    """
    _warm_up()
    context = multiprocessing.get_context("fork")
    port = free_port()
    children = []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_be_rank, args=(rank, num_ranks, port, sender, action, args))
        child.start()
        sender.close()
        children.append((child, receiver))
    results: list[Any] = []
    try:
        for rank, (_, receiver) in enumerate(children):
            if not receiver.poll(timeout_s):
                raise TimeoutError(f"rank {rank} did not answer within {timeout_s} s")
            try:
                ok, value = receiver.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died without an error message") from None
            if not ok:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results.append(value)
        return results
    finally:
        for child, receiver in children:
            if len(results) < num_ranks:
                child.kill()
            child.join()
            receiver.close()


@functools.cache
def _warm_up() -> None:
    """Import here what every forked rank would otherwise import itself."""
    for name in ("lockstep.trainer", "torch._dynamo"):  # the latter for exact mode
        importlib.import_module(name)


def _be_rank(
    rank: int, size: int, port: int, sender: Connection, action: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        sender.send((True, action(*args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    leave_process(0)


def free_port() -> int:
    """Return a free port that no other caller gets for a while.

    The caller holds an abstract socket named after the port, until it exits or has asked for
    many more. So processes that ask at the same time get different ports, and no file is left
    behind. The ports are below the kernel's ephemeral range, so no connection takes one before
    it is used.
    """
    end = _first_ephemeral_port()
    begin = end // 2
    while True:
        port = begin + secrets.randbelow(end - begin)
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            held.bind(f"\0lockstep_port_{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        _held.append(held.detach())
        if len(_held) > NUM_HELD:
            os.close(_held.popleft())
        return port


def _first_ephemeral_port() -> int:
    try:
        said = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:
        return 32768
    return max(16384, int(said.split()[0]))
