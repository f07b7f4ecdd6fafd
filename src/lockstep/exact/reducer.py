"""Exact mode's gradient reducer: the same bits for every number of ranks.

Owns: the exchange that finishes the sum over micro-batches across ranks. Does not own: the order
in which it adds (`tree.py`), nor what a micro-batch computes. The communication library moves
bytes here; it never adds.
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


class ExactReducer:
    """Sums what the leaves of a step leave behind, alike for every number of ranks.

    A step is `begin`, for each micro-batch `leaf` around its forward and backward, and
    `finish`; `total` sums numbers. With several ranks, gradients are exchanged while the last
    leaf's are still being computed: `replicate` hooks us into the model.

    Args:
        model: What is trained, on its device, not yet replicated.
        gathers: Its loss compares samples through `Context.gather`.
    """

    def __init__(self, model: nn.Module, world: Collectives, gathers: bool = False) -> None:
        self.world = world
        self.gathers = gathers
        self.follow(model)
        self._statistics = Statistics(model)
        self._tree = TreeSum(1)
        self._last: Node | None = None
        self._buckets: list[Bucket] = []
        self.num_sent = 0
        self.has_failed = True  # until a step begins

    def follow(self, model: nn.Module) -> None:
        """Sum the gradients of the parameters that require one now."""
        self.trained = TrainedParameters(model)
        self._trained = [p for p in model.parameters() if p.requires_grad]

    def begin(self, num_leaves: int) -> None:
        """Start a step; drop whatever a failed one left."""
        self._tree = TreeSum(num_leaves)
        self._buckets, self._last = [], None
        self.num_sent, self.has_failed = 0, False
        self._statistics.begin()

    def drop_step(self) -> None:
        """Give running statistics the values they had before a step that has failed."""
        self._statistics.restore()

    def raise_if_unused(self) -> None:
        """Refuse a step that was taken without us: ranks would keep gradients of their own."""
        if self.has_failed:
            raise ConfigError(
                "exact=true, but this loop's steps do not sum gradients in exact mode",
                "call train_step(..., exact_reducer=run.exact_reducer), or trainer.step(batch)",
            )

    @contextmanager
    def leaf(self, micro_batch: MicroBatch, is_last: bool) -> Iterator[None]:
        """Keep apart what the block adds to gradients and running statistics."""
        place = micro_batch.leaf.place
        node = (0, place) if micro_batch.counts else None
        self._last = node if is_last else None
        self._statistics.before(place)
        yield
        if node:
            self._statistics.after()
        if is_last and self.world.size > 1:
            return  # its gradients are on their way already
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained]
        for parameter in self._trained:
            parameter.grad = None
        if node:
            self._tree.add(node, grads)

    def total(self, rows: Sequence[Tensor], batch: StepBatch) -> Tensor:
        """Return the sum of one row of numbers per leaf. Collective."""
        tree = TreeSum(batch.num_leaves)
        for micro_batch, row in zip(batch.micro_batches, rows, strict=True):
            if micro_batch.counts:
                tree.add((0, micro_batch.leaf.place), [row.clone()])
        return sum_nodes(tree, rows[0], self.world)

    def finish(self) -> None:
        """Give every parameter the sum over all leaves as its gradient. Collective."""
        self._statistics.finish(self._tree.num_leaves, self.world)
        if self.world.size == 1:
            for parameter, grad in zip(self._trained, self._tree.total, strict=True):
                parameter.grad = grad
        for bucket in self._buckets:
            bucket.hand_out(self.world)

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Send every rank its piece of our nodes of a bucket; add up the piece that is ours."""
        world, num_leaves = self.world, self._tree.num_leaves
        own = Bucket.of(bucket)
        self._buckets.append(own)
        self.num_sent += 1
        tree = TreeSum(num_leaves)
        for node, grads in self._tree.nodes:
            by_parameter = dict(zip(map(id, self._trained), grads, strict=True))
            tree.add(node, [own.laid_out(by_parameter)])
        if self._last:
            tree.add(self._last, [own.buffer])  # the last, and so never the one that is changed
        covers = [cover(num_leaves, rank, world.size) for rank in range(world.size)]
        length = math.ceil(own.buffer.numel() / world.size)
        gap = world.size * length - own.buffer.numel()
        rows = [nn.functional.pad(value, (0, gap)) if gap else value for _, (value,) in tree.nodes]
        if self.has_failed or not rows:
            sent = own.buffer.new_zeros(world.size, len(covers[world.rank]), length)
        else:
            sent = torch.stack([row.view(world.size, length) for row in rows], dim=1)
        received, arrival = world.exchange(sent, [len(nodes) * length for nodes in covers])

        def add_up(done: torch.futures.Future[Any]) -> Tensor:
            done.value()  # or what went wrong on the way
            whole = TreeSum(num_leaves)
            nodes = (node for nodes in covers for node in nodes)
            for node, value in zip(nodes, received.view(-1, length), strict=True):
                whole.add(node, [value])
            (own.piece,) = whole.total
            return bucket.buffer()

        return arrival.then(add_up)


@dataclass
class Bucket:
    """Parameters whose gradients travel together, and where each lies in their buffer."""

    buffer: Tensor
    places: list[tuple[Tensor, tuple[Any, Any, Any]]]
    """Each parameter with the shape, strides and offset of its gradient in the buffer."""
    piece: Tensor | None = None
    """This rank's share of the buffer, summed over all leaves."""

    @classmethod
    def of(cls, grads: GradBucket) -> "Bucket":
        """Describe what torch hands to a communication hook: complex numbers in pairs of others."""
        buffer, trained = grads.buffer(), grads.parameters()
        offsets = [view.storage_offset() - buffer.storage_offset() for view in grads.gradients()]
        places = [(p, (p.shape, _strides(p), k)) for p, k in zip(trained, offsets, strict=True)]
        return cls(buffer.view(trained[0].dtype), places)

    def laid_out(self, by_parameter: dict[int, Tensor]) -> Tensor:
        """Return gradients as one tensor, laid out as the buffer is."""
        laid = torch.zeros_like(self.buffer)
        views = [laid.as_strided(*place) for _, place in self.places]
        torch._foreach_copy_(views, [by_parameter[id(parameter)] for parameter, _ in self.places])
        return laid

    def hand_out(self, world: Collectives) -> None:
        """Collect the pieces of all ranks, and give each parameter its own. Collective."""
        assert self.piece is not None
        whole = world.all_pieces(self.piece)
        for parameter, _ in self.places:
            # No view of the whole: a kernel may add in another order from another address.
            parameter.grad = torch.empty_like(parameter)
        grads = [p.grad for p, _ in self.places if p.grad is not None]
        torch._foreach_copy_(grads, [whole.as_strided(*place) for _, place in self.places])


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Return how torch lays a gradient out in a bucket: as the parameter, where that has no gaps.

    What it shows of the bucket to a hook looks laid out row by row, and is not.
    """
    by_stride = sorted(range(parameter.ndim), key=parameter.stride, reverse=True)
    is_dense = parameter.permute(by_stride).is_contiguous()
    like = parameter if is_dense else torch.empty(parameter.shape, device="meta")
    return tuple(like.stride())
