"""World: who am I, which device is mine, and how do I talk to the others.

Owns: the environment, the process group, every collective. It is the only file
that reads RANK and its kin. Does not own: what the launch variables mean
(`detect.py`), nor what is sent or when.

Functions that communicate start with `all_`: every rank must call them, in the
same order, or the group waits for the one that did not.
"""

import atexit
import datetime
import logging
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket as GradBucket  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from lockstep import position
from lockstep.addresses import (
    LOOPBACK,
    check_loopback,
    interface_towards,
    listen_at,
    names_loopback,
)
from lockstep.detect import Launch, check_size, collective_timeout_s, detect_launch
from lockstep.errors import LaunchError
from lockstep.gradients import gather_over_ranks, sum_over_ranks
from lockstep.late_compiler import defer_compiler

if TYPE_CHECKING:
    from lockstep.exact import LeafSum
    from lockstep.parallel import Averaging

DEFAULT_TIMEOUT_S = 1800.0
_log = logging.getLogger("lockstep")


def is_rehearsal() -> bool:
    """Say whether LOCKSTEP_REHEARSAL=1 asks for the run in miniature."""
    return os.environ.get("LOCKSTEP_REHEARSAL", "0") not in ("", "0")


def default_variable(name: str, value: str) -> None:
    """Set an environment variable that nobody has set, for libraries that read no other way."""
    os.environ.setdefault(name, value)


def launched() -> Launch:
    """Return who this process is without joining anything; alone if the variables make no sense."""
    try:
        return detect_launch(os.environ)
    except LaunchError:
        return Launch()


def launched_rank() -> int:
    """Return this process's rank without joining anything."""
    return launched().rank


def group_timeout_s(configured: float) -> float:
    """Return how long a collective may wait: NCCL_TIMEOUT (seconds) if set, else the config's."""
    return collective_timeout_s(os.environ, configured)


def choose_device(launch: Launch, wanted: str = "auto") -> torch.device:
    """Return this rank's device: its own GPU where there is one, else the CPU.

    A launcher may show each process one GPU and still count local ranks up, so
    the index is taken modulo the number of visible GPUs.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError("device 'cuda' was asked for, and torch sees no GPU", "device: cpu")
    return torch.device("cuda", launch.local_rank % torch.cuda.device_count())


def _meet(launch: Launch, timeout: datetime.timedelta) -> Any:
    """Return the store through which the ranks find each other."""
    if launch.launcher == "torchrun":  # its agent may already hold the store
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        # It is kept over restarts, with the addresses of the dead. Machines count restarts each
        # for itself, so only on a single one does the count tell them apart.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefixed = dist.PrefixStore(attempt, store)  # type: ignore[attr-defined]
        return prefixed if launch.local_size == launch.size else store
    assert launch.port is not None
    if names_loopback(launch.head):
        check_loopback()
    # Left to itself, torch's store listens on all interfaces, and anyone may write to it.
    listener = listen_at(launch.head, launch.port) if launch.rank == 0 else None
    return dist.TCPStore(  # type: ignore[attr-defined]
        launch.head,
        launch.port,
        launch.size,
        launch.rank == 0,
        timeout=timeout,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _stay_on_this_machine(launch: Launch) -> None:
    """Have gloo and NCCL listen on loopback alone, if all ranks are on this machine."""
    if launch.local_size == launch.size and names_loopback(launch.head):
        interface = interface_towards(LOOPBACK)
        if interface is not None:
            default_variable("GLOO_SOCKET_IFNAME", interface)
            default_variable("NCCL_SOCKET_IFNAME", interface)


def _check_group(launch: Launch) -> str:
    """Return the backend of the group somebody else made, if we were launched into that one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (launch.rank, launch.size):
        raise LaunchError(
            f"the process group says rank {rank} of {size}, the launch variables say rank "
            f"{launch.rank} of {launch.size}",
            "one launcher, and as many processes as it was told",
        )
    return str(dist.get_backend_config())


def let_gloo_finish() -> None:
    """Let gloo's threads drop their last tensors before the interpreter ends.

    A wrapped model keeps those threads alive after the group was left. Dropping a
    tensor takes the interpreter's lock; a thread that asks for it once the
    interpreter is ending is ended inside C++, and the whole process aborts.
    """
    time.sleep(0.1)


def _shares_gpu(launch: Launch, store: Any, device: torch.device) -> bool:
    """Say whether any two ranks sit on the same physical GPU."""
    store.set(f"gpu/{launch.rank}", str(torch.cuda.get_device_properties(device).uuid))
    return len({store.get(f"gpu/{rank}") for rank in range(launch.size)}) < launch.size


_left: list[Any] = []
"""Groups that were left. A replicated model holds its group too; were it the last to let go,
torch would join the group's thread while holding the lock that thread waits for, and a
finished run would never end. Held here, the group ends in a way that releases the lock."""


@dataclass
class _OwnGroup:
    """The process group that `World.enter` made. It lives until the process ends."""

    group: Any
    device: torch.device
    timeout_s: float
    process: int
    has_failed: bool = False
    """Whether a rank stopped in the middle of it: its collectives may no longer pair up."""


_own: _OwnGroup | None = None
_num_groups = 0
"""How many groups this process has made. Each has its own keys in the store: torch would
otherwise connect a second group to the addresses of the first."""
_stores: dict[Launch, Any] = {}
"""The store of each launch, kept: a second server could not have the same port."""


def _own_group() -> _OwnGroup | None:
    """Return the group that lockstep made, if it is the one in use."""
    is_used = _own is not None and dist.is_initialized() and dist.group.WORLD is _own.group
    return _own if is_used else None


def _make_group(launch: Launch, place: torch.device, timeout_s: float) -> tuple[_OwnGroup, str]:
    """Join the other ranks in a new process group; return it and its backend. Collective."""
    global _own, _num_groups
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        kept = _stores.get(launch) or _meet(launch, timeout)
        _stay_on_this_machine(launch)
        store = dist.PrefixStore(f"group_{_num_groups}", kept)  # type: ignore[attr-defined]
        # NCCL refuses two ranks on one GPU; gloo takes them, through host memory.
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
        atexit.register(_end_group)  # the last to be registered is the first to run
    _num_groups += 1
    _own = _OwnGroup(dist.group.WORLD, place, timeout_s, os.getpid())
    return _own, backend


def _report_kept(own: _OwnGroup, place: torch.device, timeout_s: float | None) -> None:
    """Log what was asked of a new group and the existing one does not do."""
    if timeout_s is not None and group_timeout_s(timeout_s) != own.timeout_s:
        _log.warning(
            "timeout_s=%g has no effect: the process group was made with timeout_s=%g before",
            timeout_s,
            own.timeout_s,
        )
    if place.type != own.device.type and place.type == "cuda":
        _log.warning("the process group was made for the CPU: GPU tensors travel through the host")


def _leave_group() -> None:
    """Leave the group that lockstep made, if it is the one in use."""
    own = _own_group()
    if own is None:
        return
    _left.append(own.group)
    if own.has_failed:
        with suppress(RuntimeError):  # or NCCL would wait for ranks that are somewhere else
            own.group.abort()
    dist.destroy_process_group()


_is_failing = False
"""Whether whoever runs the script has noted that it failed."""


def note_failure() -> None:
    """Note that this process fails, before its exit functions run: they must not wait for others.

    Whoever catches what a script raises must call this; an uncaught exception is noticed anyway.
    """
    global _is_failing
    _is_failing = True


def _end_group() -> None:
    """At exit, leave the group; not if this rank has failed, and the others are elsewhere.

    Leaving may wait for the other ranks (NCCL). They see a failed one end by its connections.
    """
    own = _own_group()
    is_here = own is not None and own.process == os.getpid()  # not in a child forked from a rank
    is_failing = _is_failing or hasattr(sys, "last_value")  # set by an uncaught exception
    if own is not None and is_here and not own.has_failed and not is_failing:
        _leave_group()


class World:
    """The group of processes that train one model, seen from one of them.

    `World.enter()` finds out how the process was started, takes its device and
    joins the others. The group lasts until the process ends, or until `leave()`.
    """

    def __init__(self, launch: Launch, device: torch.device, backend: str | None) -> None:
        self.rank = launch.rank
        self.size = launch.size
        self.local_rank = launch.local_rank
        self.local_size = launch.local_size
        self.launcher = launch.launcher
        self.device = device
        self.backend = backend
        self._made: Any = None
        """The process group, if this world made it."""
        # What ranks tell each other through the host, NCCL alone cannot carry.
        self._host = dist.new_group(backend="gloo") if backend == "cuda:nccl" else None

    @classmethod
    def enter(
        cls, device: str = "auto", timeout_s: float | None = None, local_rank: int | None = None
    ) -> Self:
        """Join the group this process was launched into; alone, there is no group.

        A group that is there already is used as it is: one that Accelerate made, say, or that an
        earlier `enter` or `fit` made. Its timeout then stays what it was.
        """
        defer_compiler()
        launch = detect_launch(os.environ, local_rank)
        check_size(launch, os.environ)
        place = choose_device(launch, device)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        own = _own_group()
        if own is not None and own.has_failed:
            _leave_group()
        if dist.is_initialized():
            world = cls(launch, place, _check_group(launch))
            if own is None:
                atexit.unregister(let_gloo_finish)
                atexit.register(let_gloo_finish)
            elif world.is_first:
                _report_kept(own, place, timeout_s)
            return world
        if launch.size == 1:
            return cls(launch, place, None)
        seconds = group_timeout_s(DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)
        position.own.begin_join()
        own, backend = _make_group(launch, place, seconds)
        position.own.end_join()
        world = cls(launch, place, backend)
        world._made = own.group
        return world

    def leave(self) -> None:
        """Leave the group, if this `World` made it. Safe to call twice, and to enter again.

        A group that was there before stays: whoever made it may still need it.
        """
        own = _own_group()
        if own is not None and self._made is own.group:
            _leave_group()

    def stay(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Keep the group for the next run of this process; for `ExitStack.push`.

        After an error that other ranks may not have met, the next `enter` makes a new one:
        in the old one, the collectives of two different places would be taken for one.
        """
        own = _own_group()
        if own is not None and error is not None and not getattr(error, "is_shared", False):
            own.has_failed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stay(kind, error, trace)
        own = _own_group()
        if own is None or not own.has_failed:
            self.leave()

    def __repr__(self) -> str:
        return (
            f"World(rank {self.rank} of {self.size}, local rank {self.local_rank} of "
            f"{self.local_size}, {self.device}, {self.launcher} on {socket.gethostname()})"
        )

    @property
    def is_first(self) -> bool:
        """Say whether this is the rank that prints and writes for all."""
        return self.rank == 0

    def replicate(self, model: nn.Module, way: "Averaging | LeafSum | None" = None) -> nn.Module:
        """Put `model` on this rank's device and average its gradients over ranks. Collective.

        Call it again with the result after changing `requires_grad` of a parameter.
        """
        from lockstep.parallel import replicate

        return replicate(model, self, way)

    def sync_buffers(self, model: nn.Module) -> None:
        """Give every rank the first rank's buffers, running statistics among them. Collective."""
        from lockstep.parallel import sync_buffers

        sync_buffers(model, self)

    def all_sum(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over all ranks. Collective."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value, group=self._group(value))
        return value

    def all_from_first(self, value: Tensor) -> None:
        """Give `value` the first rank's numbers. Collective."""
        dist.broadcast(value, 0, group=self._group(value))

    def all_sum_with_grad(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over all ranks, carrying gradients. Collective."""
        return value if self.size == 1 else sum_over_ranks(value, self)

    def all_max(self, *values: int) -> list[int]:
        """Return the largest of each number over all ranks, through the host. Collective.

        This is how ranks agree on what only one of them may know (a signal, a
        bad sample): it never waits for the GPU.
        """
        if self.size == 1:
            return list(values)
        votes = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._host)
        return votes.tolist()

    def all_texts(self, text: str) -> list[str]:
        """Return every rank's text, in rank order. Collective."""
        if self.size == 1:
            return [text]
        local = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        return [bytes(part[:-1].tolist()).decode() for part in self.all_parts(local)]

    def all_gather(self, local: Tensor) -> Tensor:
        """Concatenate `local` over ranks along its first axis, in rank order. Collective.

        Carries gradients, and the first axis may differ between ranks. A gather
        that drops gradients gives the right loss and a wrong step.
        """
        return local if self.size == 1 else gather_over_ranks(local, self)

    def barrier(self) -> None:
        """Wait until every rank is here. Collective."""
        self.all_max(0)

    def all_lengths(self, length: int) -> list[int]:
        """Return every rank's number, in rank order. Collective."""
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = length
        return self.all_sum(lengths).tolist()

    def _group(self, value: Tensor) -> Any:
        return self._host if value.device.type == "cpu" else None

    def all_parts(self, local: Tensor, lengths: list[int] | None = None) -> list[Tensor]:
        """Return every rank's rows, in rank order, without gradients. Collective.

        Give `lengths`, where all ranks know how many rows each has, to spare asking.
        """
        if self.size == 1:
            return [local]
        lengths = lengths or self.all_lengths(len(local))
        padded = local.new_zeros((max(lengths), *local.shape[1:]))
        padded[: len(local)] = local
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group(padded))
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]

    def all_sum_later(self, value: Tensor) -> torch.futures.Future[Any]:
        """Start summing `value` over ranks, in place. Collective."""
        return dist.all_reduce(value, async_op=True).get_future()  # type: ignore[no-any-return]

    def exchange(
        self, sent: Tensor, lengths: list[int]
    ) -> tuple[Tensor, torch.futures.Future[Any]]:
        """Send row r of `sent` to rank r; return what arrives, one rank's after the other's.

        `lengths` says how many numbers each rank sends here. The result is to be read when the
        future is there. Collective.
        """
        received = sent.new_empty(sum(lengths))
        flat, even = sent.flatten(), [sent[0].numel()] * self.size
        work = dist.all_to_all_single(
            received, flat, lengths, even, group=self._group(sent), async_op=True
        )
        return received, work.get_future()

    def all_pieces(self, piece: Tensor) -> Tensor:
        """Concatenate pieces of one length over ranks. Collective."""
        whole = piece.new_empty(self.size * piece.numel())
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # by version
        gather(whole, piece, group=self._group(piece))
        return whole


def leave_process(code: int) -> NoReturn:
    """End this process now, after flushing.

    A gloo group may still abort the interpreter on its way out although it was
    destroyed; a command that has nothing left to do leaves before that.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
