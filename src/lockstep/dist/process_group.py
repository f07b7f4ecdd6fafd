"""The process group of this process: made once, and kept until the process ends.

Owns: joining, keeping and leaving torch's process group. Does not own: the collectives in it
(`collectives.py`).
"""

import atexit
import ctypes
import datetime
import logging
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lockstep.dist import position
from lockstep.dist.addresses import (
    LOOPBACK,
    check_loopback,
    choose_interface,
    listen_at,
    names_loopback,
)
from lockstep.dist.detect import Launch
from lockstep.dist.environment import group_timeout_s
from lockstep.errors import LaunchError

DEFAULT_TIMEOUT_S = 1800.0
_log = logging.getLogger("lockstep")


def _open_store(launch: Launch, timeout: datetime.timedelta) -> Any:
    """Return the store through which the ranks find each other."""
    if launch.has_agent:  # it may already hold the store
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        # The store survives restarts, with the addresses of ended processes. Nodes count restarts
        # separately, so the count is a usable prefix only on a single node.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefixed = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
        return prefixed if launch.local_size == launch.size else store
    assert launch.port is not None
    if names_loopback(launch.head):
        check_loopback()
    # By default torch's store listens on all interfaces, where anyone may write to it.
    listener = listen_at(launch.head, launch.port) if launch.rank == 0 else None
    return dist.TCPStore(  # type: ignore[attr-defined]
        launch.head,
        launch.port,
        launch.size,
        launch.rank == 0,
        timeout=timeout,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def check_group(launch: Launch) -> str:
    """Return the backend of an existing group; refuse one with another rank or size than ours."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (launch.rank, launch.size):
        raise LaunchError(
            f"the process group says rank {rank} of {size}, the launch variables say rank "
            f"{launch.rank} of {launch.size}",
            "use one launcher, and start as many processes as it announces",
        )
    return str(dist.get_backend_config())


def let_gloo_finish() -> None:
    """Let gloo's threads free their last tensors before the interpreter ends.

    A wrapped model keeps those threads alive after the group is destroyed. A thread needs the
    interpreter's lock to free a tensor. If it asks for the lock while the interpreter is shutting
    down, the whole process aborts.
    """
    time.sleep(0.1)


def _shares_gpu(launch: Launch, store: Any, device: torch.device) -> bool:
    """Return whether any two ranks use the same physical GPU."""
    store.set(f"gpu/{launch.rank}", str(torch.cuda.get_device_properties(device).uuid))
    return len({store.get(f"gpu/{rank}") for rank in range(launch.size)}) < launch.size


_left: list[Any] = []
"""Groups that were left. A replicated model refers to its group, too. If it freed the group last,
torch would join the group's thread while holding the lock that this thread waits for, and the
process would hang. A reference here delays the end of the group until that is safe."""


@dataclass
class OwnGroup:
    """The process group that `World.enter` made. It lives until the process ends."""

    group: Any
    device: torch.device
    timeout_s: float
    process: int
    has_failed: bool = False
    """Whether a rank failed while using it: its collectives may no longer be paired correctly."""


_own: OwnGroup | None = None
_num_groups = 0
"""The number of groups that this process has made. Each has its own keys in the store: otherwise
torch would connect a second group to the addresses of the first."""
_stores: dict[Launch, Any] = {}
"""The store of each launch. It is kept, because a second server could not use the same port."""


def own_group() -> OwnGroup | None:
    """Return the group that lockstep made, if it is the one in use."""
    is_used = _own is not None and dist.is_initialized() and dist.group.WORLD is _own.group
    return _own if is_used else None


def join_group(
    launch: Launch, place: torch.device, timeout_s: float | None
) -> tuple[str | None, Any]:
    """Use the existing group, or join the other ranks in a new one, if there are others.

    Returns:
        The backend, or None without a group, and the group if it is a new one.
    """
    own = own_group()
    if own is not None and own.has_failed:
        leave_group()
    if dist.is_initialized():
        backend = check_group(launch)
        if own is None:
            atexit.unregister(let_gloo_finish)
            atexit.register(let_gloo_finish)
        elif launch.rank == 0:
            report_kept(own, place, timeout_s)
        return backend, None
    if launch.size == 1:
        return None, None
    seconds = group_timeout_s(DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)
    position.this_rank.begin_join()
    own, backend = make_group(launch, place, seconds)
    position.this_rank.end_join()
    return backend, own.group


def make_group(launch: Launch, place: torch.device, timeout_s: float) -> tuple[OwnGroup, str]:
    """Join the other ranks in a new process group; return it and its backend. Collective."""
    global _own, _num_groups
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        kept = _stores.get(launch) or _open_store(launch, timeout)
        if launch.local_size == launch.size and names_loopback(launch.head):
            choose_interface(LOOPBACK)
        store = dist.PrefixStore(f"group_{_num_groups}", kept)  # type: ignore[attr-defined]
        # NCCL refuses two ranks on one GPU; gloo supports them, through host memory.
        own_gpu = place.type == "cuda" and not _shares_gpu(launch, store, place)
        backend = "cpu:gloo,cuda:nccl" if own_gpu else "gloo"
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.size, timeout=timeout
        )
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        raise LaunchError(
            f"rank {launch.rank} of {launch.size} could not join the process group at "
            f"{launch.head}:{launch.port}: {str(error).splitlines()[0]}",
            "check that every rank started, use a free port (MASTER_PORT, or torchrun "
            "--standalone), and set GLOO_SOCKET_IFNAME if the hosts cannot reach each other; "
            "lockstep doctor tests this",
        ) from error
    _stores[launch] = kept
    if _num_groups == 0:
        atexit.register(let_gloo_finish)
        atexit.register(_end_group)  # registered last, so it runs first
    _num_groups += 1
    _own = OwnGroup(dist.group.WORLD, place, timeout_s, os.getpid())
    return _own, backend


def report_kept(own: OwnGroup, place: torch.device, timeout_s: float | None) -> None:
    """Warn about settings that the existing group does not follow."""
    if timeout_s is not None and group_timeout_s(timeout_s) != own.timeout_s:
        _log.warning(
            "timeout_s=%g has no effect: the process group already has timeout_s=%g",
            timeout_s,
            own.timeout_s,
        )
    if place.type != own.device.type and place.type == "cuda":
        _log.warning("the process group was made for the CPU: GPU tensors travel through the host")


def leave_group() -> None:
    """Leave the group that lockstep made, if it is the one in use."""
    own = own_group()
    if own is None:
        return
    _left.append(own.group)
    if own.has_failed:
        with suppress(RuntimeError):  # otherwise NCCL would wait for the other ranks
            own.group.abort()
    dist.destroy_process_group()


_is_failing = False
"""Whether `note_failure` was called."""


def note_failure() -> None:
    """Note that this process fails, so that its exit functions do not wait for other ranks.

    Call this if you catch an exception of a script; an uncaught one is detected.
    """
    global _is_failing
    _is_failing = True


def _end_group() -> None:
    """Leave the group at exit, unless this rank has failed.

    Leaving may wait for the other ranks (NCCL). They detect a failed rank by its connections.
    """
    own = own_group()
    is_here = own is not None and own.process == os.getpid()  # not in a child forked from a rank
    is_failing = _is_failing or hasattr(sys, "last_value")  # set by an uncaught exception
    if own is None or not is_here:
        return
    if own.has_failed or is_failing:
        # Never free the group, because that would wait for its pending collectives.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(own.group))
    else:
        leave_group()


def all_reach(launch: Launch, place: str, timeout_s: float) -> bool:
    """Return whether every rank calls this for `place` within `timeout_s`, once per group.

    Uses the store, not a collective, because another rank may be waiting in one. Returns False
    for several ranks in a group that lockstep did not make.
    """
    if launch.size == 1:
        return True
    if launch not in _stores:
        return False
    store = _stores[launch]
    names = [f"came_{_num_groups}/{place}/{rank}" for rank in range(launch.size)]
    try:
        store.set(names[launch.rank], "1")
        store.wait(names, datetime.timedelta(seconds=timeout_s))
    except (dist.DistError, RuntimeError):
        return False
    return True
