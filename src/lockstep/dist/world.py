"""World: the ranks that train one model, which this process joins.

Owns: entering and leaving the group, and the public methods of a custom loop. Does not own: the
collectives (`collectives.py`) or the process group (`process_group.py`).
"""

import atexit
import datetime
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from lockstep.callback import Callback, Callbacks, collect_callbacks, listed, load_callbacks
from lockstep.custom_loop import CustomLoop
from lockstep.dist import position
from lockstep.dist.collectives import Collectives
from lockstep.dist.ddp import Averaging, replicate, sync_buffers
from lockstep.dist.detect import Launch, check_size, detect_launch
from lockstep.dist.environment import callback_names, group_timeout_s
from lockstep.dist.process_group import (
    DEFAULT_TIMEOUT_S,
    check_group,
    leave_group,
    let_gloo_finish,
    make_group,
    num_groups,
    own_group,
    report_kept,
    store_of,
)
from lockstep.errors import LaunchError, hide_tracebacks, own_exit_code
from lockstep.exact.reducer import ExactReducer


def choose_device(launch: Launch, wanted: str = "auto") -> torch.device:
    """Return this rank's device: its GPU if there is one, otherwise the CPU.

    A launcher may make one GPU visible to each process and still number the local ranks, so the
    index is taken modulo the number of visible GPUs.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError("device is 'cuda', and torch sees no GPU", "set device=cpu")
    return torch.device("cuda", launch.local_rank % torch.cuda.device_count())


class World(Collectives):
    """The group of processes that train one model, seen from one of them.

    `World.enter()` reads the launch variables, chooses the device and joins the other ranks. The
    group lasts until the process ends, or until `leave()`.
    """

    def __init__(self, launch: Launch, device: torch.device, backend: str | None) -> None:
        super().__init__(launch, device, backend)
        self._made: Any = None
        """The process group, if this world made it."""
        self.callbacks = Callbacks()
        self._store = store_of(launch)
        """The store of the group, if lockstep made it."""

    @classmethod
    def enter(
        cls,
        device: str = "auto",
        timeout_s: float | None = None,
        local_rank: int | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Self:
        """Join the group that this process was launched into; a single process has no group.

        An existing group is used, with its timeout: for example one that Accelerate made, or an
        earlier `enter` or `fit`.

        `callbacks`, and those that LOCKSTEP_CALLBACKS names, are called in a loop around
        `train_step` and in every run of this world.

        After this, an uncaught LockstepError prints one sentence and ends the script with its
        exit code.
        """
        with own_exit_code():
            world = cls._enter(device, timeout_s, local_rank)
            world.attach(callbacks)
        hide_tracebacks()  # after torch has set its own hook for a group
        return world

    @classmethod
    def _enter(cls, device: str, timeout_s: float | None, local_rank: int | None) -> Self:
        launch = detect_launch(os.environ, local_rank)
        check_size(launch, os.environ)
        place = choose_device(launch, device)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        own = own_group()
        if own is not None and own.has_failed:
            leave_group()
        if dist.is_initialized():
            world = cls(launch, place, check_group(launch))
            if own is None:
                atexit.unregister(let_gloo_finish)
                atexit.register(let_gloo_finish)
            elif world.is_first:
                report_kept(own, place, timeout_s)
            return world
        if launch.size == 1:
            return cls(launch, place, None)
        seconds = group_timeout_s(DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)
        position.this_rank.begin_join()
        own, backend = make_group(launch, place, seconds)
        position.this_rank.end_join()
        world = cls(launch, place, backend)
        world._made = own.group
        return world

    def attach(self, callbacks: Sequence[Callback]) -> None:
        """Add callbacks, and those that LOCKSTEP_CALLBACKS names. Collective."""
        named = callback_names()
        both = collect_callbacks(self, lambda: [*listed(callbacks), *load_callbacks(named)])
        self.callbacks = both
        self.custom_loop = CustomLoop(self, both) if both else None

    @contextmanager
    def inside_run(self) -> Iterator[None]:
        """Inside the block the run calls the callbacks, and `train_step` does not."""
        loop = self.custom_loop
        self.custom_loop = None
        self.is_in_run = True
        try:
            yield
        finally:
            self.custom_loop = loop
            self.is_in_run = False

    def leave(self) -> None:
        """Leave the group, if this `World` made it. You may call this twice, or enter again.

        A group that existed before stays, because its owner may still need it.
        """
        own = own_group()
        if own is not None and self._made is own.group:
            leave_group()

    def keep_group(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Keep the group for the next run of this process; for `ExitStack.push`.

        After an error that other ranks may not have, the next `enter` makes a new group: in the
        old one, collectives of different places in the program could be paired.
        """
        own = own_group()
        if own is not None and error is not None and not getattr(error, "is_shared", False):
            own.has_failed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.keep_group(kind, error, trace)
        own = own_group()
        if own is None or not own.has_failed:
            self.leave()

    def __repr__(self) -> str:
        return (
            f"World(rank {self.rank} of {self.size}, local rank {self.local_rank} of "
            f"{self.local_size}, {self.device}, {self.launcher} on {socket.gethostname()})"
        )

    def replicate(
        self, model: nn.Module, averaging: Averaging | ExactReducer | None = None
    ) -> nn.Module:
        """Put `model` on this rank's device and average its gradients over ranks. Collective.

        Call it again with the result after changing `requires_grad` of a parameter.
        """
        return replicate(model, self, averaging)

    def sync_buffers(self, model: nn.Module) -> None:
        """Give every rank the first rank's buffers, such as running statistics. Collective."""
        sync_buffers(model, self)

    def all_reach(self, place: str, timeout_s: float) -> bool:
        """Return whether every rank calls this for `place` within `timeout_s`, once per group.

        Uses the store, not a collective, because another rank may be waiting in one. Returns
        False for several ranks in a group that lockstep did not make.
        """
        if self.size == 1:
            return True
        if self._store is None:
            return False
        names = [f"came_{num_groups()}/{place}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(names[self.rank], "1")
            self._store.wait(names, datetime.timedelta(seconds=timeout_s))
        except (dist.DistError, RuntimeError):
            return False
        return True
