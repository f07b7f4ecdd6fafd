"""Collectives of a process group: sums, gathers, votes.

Owns: every collective, and its backward pass if it carries gradients. Does not own: joining the
group (`process_group.py`), or the decision what to send and when.

Methods that communicate start with `all_`, except `barrier` and `exchange`; each says
"Collective". Every rank must call them, in the same order; otherwise the group waits for the rank
that did not.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket as GradBucket  # type: ignore[attr-defined]

from lockstep.dist.detect import Launch
from lockstep.torch_compat.private import gather_flat


class Collectives:
    """The ranks of one group, seen from one of them."""

    def __init__(self, launch: Launch, device: torch.device, backend: str | None) -> None:
        self.rank = launch.rank
        self.size = launch.size
        self.local_rank = launch.local_rank
        self.local_size = launch.local_size
        self.launcher = launch.launcher
        self.device = device
        self.backend = backend
        self.before_collective: Callable[[], None] | None = None
        """Called before each collective, while it is set."""
        self.num_collectives = 0
        """The number of collectives so far, without the exchanges of gradients."""
        # NCCL cannot send tensors in host memory.
        self._host = dist.new_group(backend="gloo") if backend == "cuda:nccl" else None

    @property
    def is_first(self) -> bool:
        """Return whether this is the rank that prints and writes for all."""
        return self.rank == 0

    def all_sum(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over all ranks. Collective."""
        self._announce()
        total = value.clone()  # on one rank, too: a caller may change the result in place
        if self.size > 1:
            dist.all_reduce(total, group=self._group(total))
        return total

    def all_from_first(self, value: Tensor) -> None:
        """Give `value` the first rank's numbers. Collective."""
        self._announce()
        if self.size > 1:
            dist.broadcast(value, 0, group=self._group(value))

    def all_sum_with_grad(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over all ranks, carrying gradients. Collective."""
        if self.size == 1:
            return value.clone()
        return _Sum.apply(value, self)  # type: ignore[no-any-return, no-untyped-call]

    def all_max(self, *values: int) -> list[int]:
        """Return the largest of each number over all ranks, through the host. Collective.

        Ranks use it to agree on an event that only one of them may have seen, such as a signal or
        a bad sample. It never waits for the GPU.
        """
        self._announce()
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

    def all_values(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective.

        It travels as JSON, which holds file names that are not UTF-8, too.
        """
        return [json.loads(text) for text in self.all_texts(json.dumps(value))]

    def all_gather(self, local: Tensor) -> Tensor:
        """Concatenate `local` over ranks along its first axis, in rank order. Collective.

        It carries gradients: without them the loss would be right and the step wrong. The length
        of the first axis may differ between ranks.
        """
        if self.size == 1:
            return local.clone()
        return _Gather.apply(local, self)  # type: ignore[no-any-return, no-untyped-call]

    def barrier(self) -> None:
        """Wait until every rank calls this. Collective."""
        self.all_max(0)

    def all_lengths(self, length: int) -> list[int]:
        """Return every rank's number, in rank order. Collective."""
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = length
        return self.all_sum(lengths).tolist()

    def _announce(self, is_counted: bool = True) -> None:
        """Count a collective and call `before_collective`, but not for collectives inside it."""
        self.num_collectives += is_counted
        callback = self.before_collective
        self.before_collective = None
        if callback is not None:
            try:
                callback()
            finally:
                self.before_collective = callback

    def _group(self, value: Tensor) -> Any:
        return self._host if value.device.type == "cpu" else None

    def all_parts(
        self, local: Tensor, lengths: list[int] | None = None, is_counted: bool = True
    ) -> list[Tensor]:
        """Return every rank's rows, in rank order, without gradients. Collective.

        Pass `lengths`, if all ranks know how many rows each has, to save a collective.
        `num_collectives` leaves it out unless `is_counted`.
        """
        self._announce(is_counted)
        if self.size == 1:
            return [local]
        lengths = lengths or self.all_lengths(len(local))
        padded = local.new_zeros((max(lengths), *local.shape[1:]))
        padded[: len(local)] = local
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group(padded))
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]

    def all_sum_later(self, value: Tensor) -> torch.futures.Future[Any]:
        """Start summing `value` over ranks, in place. Collective.

        Gradients travel this way, so `num_collectives` leaves it out.
        """
        self._announce(is_counted=False)
        return dist.all_reduce(value, async_op=True).get_future()  # type: ignore[no-any-return]

    def exchange(
        self, sent: Tensor, lengths: list[int]
    ) -> tuple[Tensor, torch.futures.Future[Any]]:
        """Send row r of `sent` to rank r; return what this rank receives, in rank order.

        `lengths` are the numbers of elements that each rank sends to this one. Read the result
        after the future has completed. Gradients travel this way, so `num_collectives` leaves it
        out. Collective.
        """
        self._announce(is_counted=False)
        received = sent.new_empty(sum(lengths))
        sent_lengths = [sent[0].numel()] * self.size
        work = dist.all_to_all_single(
            received, sent.flatten(), lengths, sent_lengths, group=self._group(sent), async_op=True
        )
        return received, work.get_future()

    def all_pieces(self, piece: Tensor) -> Tensor:
        """Concatenate pieces of equal length over ranks. Collective.

        Gradients travel this way, so `num_collectives` leaves it out.
        """
        self._announce(is_counted=False)
        whole = piece.new_empty(self.size * piece.numel())
        gather_flat(dist)(whole, piece, group=self._group(piece))
        return whole


class _Sum(torch.autograd.Function):
    """Sum forward; sum the gradients backward, since every rank's result depends on our value."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, world: Collectives) -> Tensor:
        ctx.world = world
        return world.all_sum(value.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.world.all_sum(grads[0].contiguous()), None


class _Gather(torch.autograd.Function):
    """Gather forward; sum the gradients of all ranks backward and keep our own rows."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, world: Collectives) -> Tensor:
        parts = world.all_parts(local.detach().contiguous())
        ctx.world = world
        ctx.start = sum(len(part) for part in parts[: world.rank])
        ctx.length = len(local)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.world.all_sum(grads[0].contiguous()).narrow(0, ctx.start, ctx.length), None
