"""Run a function on several ranks, forked from this process, in a real gloo group.

Owns: forking the ranks, and returning their results or errors. Does not own: the group, which each
rank enters itself.
"""

import functools
import importlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from lockstep.dist.environment import leave_process
from lockstep.harness.ranks import free_port, rank_variables
from lockstep.torch_compat import COMPILER


def run_ranks(
    num_ranks: int, action: Callable[..., Any], *args: Any, timeout_s: float = 60
) -> list[Any]:
    """Run `action(*args)` in `num_ranks` forked processes and return their results.

    Each process has the launch variables of its rank; `action` calls `World.enter`. If one fails,
    the others are killed, and a RuntimeError with its traceback is raised.
    """
    warm_up()
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
                raise TimeoutError(f"rank {rank} returned no result within {timeout_s} s")
            try:
                ok, value = receiver.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} ended without returning a result") from None
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
def warm_up() -> None:
    """Import modules once, so that forked ranks need not import them."""
    for name in ("lockstep.trainer", COMPILER):  # exact mode imports the compiler
        importlib.import_module(name)


def _be_rank(
    rank: int, size: int, port: int, sender: Connection, action: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(rank_variables(rank, size, port))
    try:
        sender.send((True, action(*args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    leave_process(0)
