"""A loss that compares all samples of a step, computed leaf by leaf.

Owns: gathering the rows of all leaves, and the gradient of every leaf's loss with respect to these
rows. Does not own: the loss. On any number of ranks, leaves have the same shapes, and everything
is added in the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.dist.collectives import Collectives
from lockstep.exact.tree import TreeSum, sum_nodes

if TYPE_CHECKING:
    from lockstep.data.batch import StepBatch

LeafLoss = Callable[[nn.Module, Any, "GatheredRows"], Any]
"""Computes the loss of a micro-batch."""


@dataclass
class GatheredRows:
    """The rows that one leaf passes to `Context.gather`, and the rows of all leaves.

    A loss may gather several tensors. They all have the same number of rows.
    """

    start: int = 0
    """Index of this leaf's first row among those of all leaves."""
    length: int = 0
    own: list[Tensor] = field(default_factory=list)
    """This leaf's rows, one tensor for each call of `gather`."""
    whole: Sequence[Tensor] = ()
    """The rows of all leaves, once they are known."""
    grads: Sequence[Tensor] = ()
    """The gradient of the summed loss of all leaves with respect to `whole`."""

    def gather(self, local: Tensor) -> Tensor:
        """Return the rows of all leaves; in the first pass, this leaf's own."""
        self.own.append(local)
        return self.whole[len(self.own) - 1] if self.whole else local

    @property
    def surrogate_loss(self) -> Tensor | float:
        """Add this to a leaf's loss to get the gradient of all leaves' losses."""
        grads = (grad.narrow(0, self.start, self.length) for grad in self.grads)
        return sum(
            (rows[: self.length] * grad).sum() for rows, grad in zip(self.own, grads, strict=True)
        )


def gather_rows(
    leaf_loss: LeafLoss, model: nn.Module, batch: "StepBatch", world: Collectives
) -> list[GatheredRows]:
    """Return the gathered rows for each micro-batch; [] if the loss does not gather. Collective.

    This takes two more forward passes: the first computes the rows of every leaf, the second the
    gradient of each leaf's loss with respect to all rows. It needs the memory of one leaf only.
    """
    gathered = [GatheredRows() for _ in batch.micro_batches]
    pairs = list(zip(batch.micro_batches, gathered, strict=True))
    for micro_batch, one in pairs:
        with torch.no_grad():
            leaf_loss(model, micro_batch, one)
        one.length = len(one.own[0]) if one.own and micro_batch.counts else 0
    wholes = []
    for tensors in zip(*(one.own for one in gathered), strict=True):
        counted = [rows[: one.length] for rows, one in zip(tensors, gathered, strict=True)]
        wholes.append(torch.cat(world.all_parts(torch.cat(counted))))
    if not wholes:
        return []
    start = sum(world.all_lengths(sum(one.length for one in gathered))[: world.rank])

    trees = [TreeSum(batch.num_leaves) for _ in wholes]
    for micro_batch, one in pairs:
        one.start = start
        start += one.length
        if micro_batch.counts:
            one.own = []
            one.whole = [whole.clone().requires_grad_() for whole in wholes]
            total = leaf_loss(model, micro_batch, one).loss_sum
            grads = torch.autograd.grad(total, one.whole, materialize_grads=True)
        elif not micro_batch.leaf.is_padding:  # a stand-in, which has a place in the sum
            grads = tuple(map(torch.zeros_like, wholes))
        else:
            continue
        for tree, grad in zip(trees, grads, strict=True):
            tree.add((0, micro_batch.leaf.place), [grad.contiguous()])
    sums = [sum_nodes(tree, whole, world) for tree, whole in zip(trees, wholes, strict=True)]
    return [replace(one, own=[], whole=wholes, grads=sums) for one in gathered]
