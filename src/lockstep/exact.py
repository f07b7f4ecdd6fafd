"""The same bits for every number of ranks: sums along one tree over the leaves of a step.

Owns: the tree, the exchange that finishes it across ranks, and what a model remembers
from leaf to leaf (running statistics). Does not own: what a leaf computes. The
communication library moves bytes here; it never adds.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.data.order import share
from lockstep.errors import ConfigError
from lockstep.runtime import GradBucket, World
from lockstep.trained import TrainedParameters

if TYPE_CHECKING:
    from lockstep.data.loader import StepBatch
    from lockstep.data.reader import MicroBatch

Node = tuple[int, int]
"""Level and index: it covers the leaves from `index << level` to `(index + 1) << level`."""


@dataclass
class TreeSum:
    """A sum over leaves 0 to n - 1 along one binary tree, of which some leaves are at hand.

    Leaves, or nodes above them, are added from left to right; siblings merge as soon as both
    are there, so a rank keeps a few nodes however many leaves it has.

    >>> tree = TreeSum(5)
    >>> for place in range(1, 5):
    ...     tree.add((0, place), [torch.tensor(float(place))])
    >>> tree.nodes
    [((0, 1), [tensor(1.)]), ((1, 1), [tensor(5.)]), ((2, 1), [tensor(4.)])]
    """

    num_leaves: int
    nodes: list[tuple[Node, list[Tensor]]] = field(default_factory=list)

    def add(self, node: Node, value: list[Tensor]) -> None:
        """Add the next node to the right; what lies left of it may be changed in place."""
        level, index = node
        while index or 1 << level < self.num_leaves:
            if index % 2:
                if not self.nodes or self.nodes[-1][0] != (level, index - 1):
                    break  # its sibling is on another rank
                _, left = self.nodes.pop()
                if left:
                    torch._foreach_add_(left, value)
                value = left
            elif (index + 1) << level < self.num_leaves:
                break  # its sibling is still to come
            level, index = level + 1, index // 2  # or there is none, and it stands for both
        self.nodes.append(((level, index), value))

    @property
    def total(self) -> list[Tensor]:
        """The sum over all leaves; a zero has no sign, for its sign depends on who added."""
        (_, value), *others = self.nodes
        assert not others, "the sum over all leaves needs all of them"
        return list(torch._foreach_add(value, 0.0))


@lru_cache(maxsize=4096)
def cover(num_leaves: int, rank: int, world_size: int) -> tuple[Node, ...]:
    """Return the nodes that a rank's own leaves add up to."""
    tree = TreeSum(num_leaves)
    for place in share(num_leaves, rank, world_size):
        tree.add((0, place), [])
    return tuple(node for node, _ in tree.nodes)


def sum_nodes(tree: TreeSum, like: Tensor, world: World) -> Tensor:
    """Return the sum over all leaves, every rank having added its own to `tree`. Collective.

    For few numbers: every rank gets all nodes. `like` has the shape of a leaf's tensor, for
    ranks without one.
    """
    covers = [cover(tree.num_leaves, rank, world.size) for rank in range(world.size)]
    rows = torch.stack([value for _, (value,) in tree.nodes]) if tree.nodes else like[None][:0]
    parts = world.all_parts(rows, [len(nodes) for nodes in covers])
    whole = TreeSum(tree.num_leaves)
    for nodes, values in zip(covers, parts, strict=True):
        for node, value in zip(nodes, values, strict=True):
            whole.add(node, [value])
    return whole.total[0]


class LeafSum:
    """Sums what the leaves of a step leave behind, alike for every number of ranks.

    A step is `begin`, for each micro-batch `leaf` around its forward and backward, and
    `finish`; `total` sums numbers. With several ranks, gradients are exchanged while the last
    leaf's are still being computed: `replicate` hooks us into the model.

    Args:
        model: What is trained, on its device, not yet replicated.
        gathers: Its loss compares samples through `Context.gather`.
    """

    def __init__(self, model: nn.Module, world: World, gathers: bool = False) -> None:
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
        """Start a step anew; whatever is left of one that failed is dropped."""
        self._tree = TreeSum(num_leaves)
        self._buckets, self._last = [], None
        self.num_sent, self.has_failed = 0, False
        self._statistics.begin()

    def raise_if_unused(self) -> None:
        """Refuse a step that was taken without us: ranks would keep gradients of their own."""
        if self.has_failed:
            raise ConfigError(
                "exact=true, but this loop's steps do not sum gradients in exact mode",
                "train_step(..., leaf_sum=run.leaf_sum), or trainer.step(batch)",
            )

    @contextmanager
    def leaf(self, micro_batch: "MicroBatch", is_last: bool) -> Iterator[None]:
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

    def total(self, rows: Sequence[Tensor], batch: "StepBatch") -> Tensor:
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

    def hand_out(self, world: World) -> None:
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


class Statistics:
    """Running statistics, moved leaf by leaf in the order of leaves, whoever computed them.

    Every leaf starts from zero statistics, so that what it leaves is its own share; the
    shares of all ranks are then applied one after the other.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        self._layers = [layer for layer in layers if layer.running_mean is not None]
        pairs = [(m.running_mean, m.running_var) for m in self._layers]
        self._values = [b for pair in pairs for b in pair if b is not None]
        self._counts = [b for m in self._layers if (b := m.num_batches_tracked) is not None]
        known = {id(b) for b in (*self._values, *self._counts)}
        self._others = [(n, b) for n, b in model.named_buffers() if id(b) not in known]
        self._versions: list[int] = []
        self._before: Tensor | None = None
        self._shares: list[Tensor] = []

    def begin(self) -> None:
        """Remember where the step starts; go back there from one that failed."""
        if self._before is not None:
            self._write(self._before)
        self._before = self._read()
        self._shares = []
        self._versions = [buffer._version for _, buffer in self._others]

    def before(self, place: int) -> None:
        """Start a leaf with nothing remembered but how many leaves came before it."""
        assert self._before is not None
        self._write(self._before)
        for layer in self._layers:
            if layer.training:
                layer.running_mean.zero_()  # type: ignore[union-attr]
                layer.running_var.zero_()  # type: ignore[union-attr]
                layer.num_batches_tracked.add_(place)  # type: ignore[union-attr]

    def after(self) -> None:
        """Take the leaf's share."""
        seen = zip(self._others, self._versions, strict=True)
        changed = [name for (name, buffer), version in seen if buffer._version != version]
        if changed:
            raise ConfigError(
                f"the forward pass changes {', '.join(changed)}, which exact mode cannot merge",
                "a buffer that stays put, or exact=false",
            )
        self._shares.append(self._read())

    def finish(self, num_leaves: int, world: World) -> None:
        """Apply the shares of all leaves. Collective."""
        before, self._before = self._before, None
        if not self._layers or before is None:
            return
        lengths = [len(share(num_leaves, rank, world.size)) for rank in range(world.size)]
        local = torch.stack(self._shares) if self._shares else before[None][:0]
        rows = torch.cat(world.all_parts(local, lengths))
        num_counts = len(self._counts)
        values, counts = before[:-num_counts], before[-num_counts:]
        widths = torch.tensor([2 * m.num_features for m in self._layers], device=before.device)
        kept = before.new_tensor([1 - (m.momentum or 0.0) for m in self._layers])
        averaged = before.new_tensor([m.momentum is None for m in self._layers]).bool()
        trained = before.new_tensor([m.training for m in self._layers]).bool()
        num_calls = torch.zeros_like(counts)
        for place, row in enumerate(rows):
            came = counts + place
            calls = torch.where(trained, row[-num_counts:] - came, 0.0)
            # With no momentum the statistics are plain means over all batches so far.
            decay = torch.where(averaged & (calls > 0), came / (came + calls), kept**calls)
            decay = decay.repeat_interleave(widths)
            own = row[:-num_counts] * trained.repeat_interleave(widths)
            values = values * decay + own
            num_calls += calls
        self._write(torch.cat([values, counts + num_calls]))

    def _read(self) -> Tensor:
        buffers = [*self._values, *self._counts]
        return torch.cat([b.double().flatten() for b in buffers]) if buffers else torch.empty(0)

    @torch.no_grad()
    def _write(self, state: Tensor) -> None:
        buffers = [*self._values, *self._counts]
        values = torch.split(state, [b.numel() for b in buffers])
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value.view_as(buffer))
