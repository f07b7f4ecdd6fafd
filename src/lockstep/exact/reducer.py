"""Exact mode's gradient reducer: the same bits for every number of ranks.

Owns: the exchange that finishes the sum over micro-batches across ranks. Does not own: the order
of additions (`tree.py`), or what a micro-batch computes. The communication library only moves
bytes; it never adds.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.batch import MicroBatch, StepBatch
from lockstep.dist.collectives import Collectives, GradBucket
from lockstep.dist.trained import TrainedParameters
from lockstep.errors import ConfigError
from lockstep.exact.statistics import Statistics
from lockstep.exact.tree import Node, TreeSum, cover, sum_nodes
from lockstep.torch_compat.private import foreach


class ExactReducer:
    """Sums the gradients and statistics of a step's leaves in one order on any number of ranks.

    For each step call `begin`, use `leaf` around the forward and backward pass of each
    micro-batch, then call `finish`. `total` sums numbers. With several ranks, `replicate`
    registers `exchange` as a hook, so gradients are exchanged during the last backward pass.

    Args:
        model: The model, on its device, not yet replicated.
        gathers: Its loss compares samples through `Context.gather`.
    """

    def __init__(self, model: nn.Module, world: Collectives, gathers: bool = False) -> None:
        self.world = world
        self.gathers = gathers
        self.set_model(model)
        self._statistics = Statistics(model)
        self._tree = TreeSum(1)
        self._last: Node | None = None
        self._buckets: list[Bucket] = []
        self.was_used = False
        """Whether a step has begun."""
        self._has_failed = False

    def set_model(self, model: nn.Module) -> None:
        """Sum the gradients of the parameters that now require one."""
        self.trained = TrainedParameters(model)
        self._trained = [p for p in model.parameters() if p.requires_grad]

    def begin(self, num_leaves: int) -> None:
        """Start a step; discard the state of a failed one."""
        self._tree = TreeSum(num_leaves)
        self._buckets = []
        self._last = None
        self.was_used = True
        self._has_failed = False
        self._statistics.begin()

    def drop_step(self) -> None:
        """Restore the running statistics from before a failed step."""
        self._statistics.restore()

    def fail(self) -> None:
        """Send zeros for the remaining buckets: the sums of this rank are incomplete."""
        self._has_failed = True

    def raise_if_unused(self) -> None:
        """Refuse a step taken without this reducer: its gradients would differ between ranks."""
        if not self.was_used:
            raise ConfigError(
                "exact=true, but this loop's steps do not sum gradients in exact mode",
                "call train_step(..., exact_reducer=run.exact_reducer), or trainer.step(batch)",
            )

    @contextmanager
    def leaf(self, micro_batch: MicroBatch, is_last: bool) -> Iterator[None]:
        """Separate this leaf's gradients and running statistics from those of other leaves."""
        place = micro_batch.leaf.place
        node = None if micro_batch.leaf.is_padding else (0, place)
        self._last = node if is_last else None
        self._statistics.before(place)
        yield
        if node:
            self._statistics.after()
        if is_last and self.world.size > 1:
            return  # `exchange` has already sent its gradients
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained]
        for parameter in self._trained:
            parameter.grad = None
        if node:
            self._tree.add(node, grads)

    def total(self, rows: Sequence[Tensor], batch: StepBatch) -> Tensor:
        """Return the sum of one row of numbers per leaf. Collective."""
        tree = TreeSum(batch.num_leaves)
        for micro_batch, row in zip(batch.micro_batches, rows, strict=True):
            if not micro_batch.leaf.is_padding:
                tree.add((0, micro_batch.leaf.place), [row.clone()])
        return sum_nodes(tree, rows[0], self.world)

    def finish(self) -> None:
        """Give every parameter the sum over all leaves as its gradient. Collective."""
        self._statistics.finish(self._tree.num_leaves, self.world)
        if self.world.size == 1:
            for parameter, grad in zip(self._trained, self._tree.total, strict=True):
                parameter.grad = grad
        for bucket in self._buckets:
            bucket.set_gradients(self.world)

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Send every rank its piece of our nodes of a bucket; add up our own piece."""
        world = self.world
        num_leaves = self._tree.num_leaves
        own = Bucket.of(bucket)
        self._buckets.append(own)
        tree = TreeSum(num_leaves)
        for node, grads in self._tree.nodes:
            by_parameter = dict(zip(map(id, self._trained), grads, strict=True))
            tree.add(node, [own.laid_out(by_parameter)])
        if self._last:
            tree.add(self._last, [own.buffer])  # added last, so never changed in place
        covers = [cover(num_leaves, rank, world.size) for rank in range(world.size)]
        length = math.ceil(own.buffer.numel() / world.size)
        gap = world.size * length - own.buffer.numel()
        rows = [nn.functional.pad(value, (0, gap)) if gap else value for _, (value,) in tree.nodes]
        if self._has_failed or not rows:
            sent = own.buffer.new_zeros(world.size, len(covers[world.rank]), length)
        else:
            sent = torch.stack([row.view(world.size, length) for row in rows], dim=1)
        received, arrival = world.exchange(sent, [len(nodes) * length for nodes in covers])

        def add_up(done: torch.futures.Future[Any]) -> Tensor:
            done.value()  # raises if the exchange failed
            whole = TreeSum(num_leaves)
            nodes = (node for nodes in covers for node in nodes)
            for node, value in zip(nodes, received.view(-1, length), strict=True):
                whole.add(node, [value])
            (own.piece,) = whole.total
            return bucket.buffer()

        return arrival.then(add_up)


@dataclass
class Bucket:
    """Parameters whose gradients are exchanged together, and their places in the buffer."""

    buffer: Tensor
    places: list[tuple[Tensor, tuple[Any, Any, Any]]]
    """Each parameter with the shape, strides and offset of its gradient in the buffer."""
    piece: Tensor | None = None
    """This rank's share of the buffer, summed over all leaves."""

    @classmethod
    def of(cls, grads: GradBucket) -> "Bucket":
        """Read the argument of a communication hook, which has complex numbers as pairs."""
        buffer = grads.buffer()
        trained = grads.parameters()
        offsets = [view.storage_offset() - buffer.storage_offset() for view in grads.gradients()]
        places = [(p, (p.shape, _strides(p), k)) for p, k in zip(trained, offsets, strict=True)]
        return cls(buffer.view(trained[0].dtype), places)

    def laid_out(self, by_parameter: dict[int, Tensor]) -> Tensor:
        """Return gradients as one tensor with the layout of the buffer."""
        flat = torch.zeros_like(self.buffer)
        views = [flat.as_strided(*place) for _, place in self.places]
        foreach("copy_")(views, [by_parameter[id(parameter)] for parameter, _ in self.places])
        return flat

    def set_gradients(self, world: Collectives) -> None:
        """Collect the pieces of all ranks, and set each parameter's gradient. Collective."""
        assert self.piece is not None
        whole = world.all_pieces(self.piece)
        for parameter, _ in self.places:
            # Not a view of the buffer: kernels may add in another order at another alignment.
            parameter.grad = torch.empty_like(parameter)
        grads = [p.grad for p, _ in self.places if p.grad is not None]
        foreach("copy_")(grads, [whole.as_strided(*place) for _, place in self.places])


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a gradient in a bucket: the parameter's, if those have no gaps.

    The views that torch passes to a hook have other strides, which are wrong.
    """
    by_stride = sorted(range(parameter.ndim), key=parameter.stride, reverse=True)
    is_dense = parameter.permute(by_stride).is_contiguous()
    like = parameter if is_dense else torch.empty(parameter.shape, device="meta")
    return tuple(like.stride())
