"""World: who am I, which device is mine, and how do I talk to the others.

Owns: the environment, the process group, every collective. It is the only file
that reads RANK and its kin. Does not own: what the launch variables mean
(`detect.py`), nor what is sent or when.

Functions that communicate start with `all_`: every rank must call them, in the
same order, or the group waits for the one that did not.
"""

import atexit
import datetime
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket as GradBucket  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from lockstep.detect import Launch, collective_timeout_s, detect_launch
from lockstep.errors import LaunchError
from lockstep.gradients import gather_over_ranks, sum_over_ranks
from lockstep.late_compiler import defer_compiler

if TYPE_CHECKING:
    from lockstep.exact import LeafSum
    from lockstep.parallel import Averaging


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
    return dist.TCPStore(  # type: ignore[attr-defined]
        launch.head, launch.port, launch.size, launch.rank == 0, timeout=timeout
    )


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


class World:
    """The group of processes that train one model, seen from one of them.

    `World.enter()` finds out how the process was started, takes its device and
    joins the others; use it in a `with`, or call `leave()` in a `finally`.
    """

    def __init__(self, launch: Launch, device: torch.device, backend: str | None) -> None:
        self.rank = launch.rank
        self.size = launch.size
        self.local_rank = launch.local_rank
        self.local_size = launch.local_size
        self.launcher = launch.launcher
        self.device = device
        self.backend = backend
        # What ranks tell each other through the host, NCCL alone cannot carry.
        self._host = dist.new_group(backend="gloo") if backend == "cuda:nccl" else None
        if backend is not None:
            atexit.unregister(let_gloo_finish)
            atexit.register(let_gloo_finish)

    @classmethod
    def enter(
        cls, device: str = "auto", timeout_s: float = 1800, local_rank: int | None = None
    ) -> Self:
        """Join the group this process was launched into; alone, there is no group.

        A group that is there already (Accelerate makes one) is taken as it is.
        """
        defer_compiler()
        launch = detect_launch(os.environ, local_rank)
        place = choose_device(launch, device)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        if dist.is_initialized():
            return cls(launch, place, _check_group(launch))
        if launch.size == 1:
            return cls(launch, place, None)
        timeout = datetime.timedelta(seconds=group_timeout_s(timeout_s))
        try:
            store = _meet(launch, timeout)
            # NCCL refuses two ranks on one GPU; gloo takes them, through host memory.
            own_gpu = place.type == "cuda" and not _shares_gpu(launch, store, place)
            backend = "cpu:gloo,cuda:nccl" if own_gpu else "gloo"
            dist.init_process_group(
                backend, store=store, rank=launch.rank, world_size=launch.size, timeout=timeout
            )
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise LaunchError(
                f"rank {launch.rank} of {launch.size} could not meet the others at "
                f"{launch.head}:{launch.port}: {str(error).splitlines()[0]}",
                "every rank started, on a port of their own (MASTER_PORT, torchrun --standalone), "
                "by machines that see each other (GLOO_SOCKET_IFNAME=eth0; lockstep doctor)",
            ) from error
        return cls(launch, place, backend)

    def leave(self) -> None:
        """Leave the group. Safe to call twice, and after an error."""
        if dist.is_initialized():
            _left.append(dist.group.WORLD)
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        """Put `model` on this rank's device and keep its gradients alike on all ranks."""
        from lockstep.parallel import replicate

        return replicate(model, self, way)

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
