"""A loss that compares all samples of a step, computed leaf by leaf.

Owns: showing every leaf the rows of all others, and carrying back to each leaf what the
others' losses ask of its rows. Does not own: the loss. Whatever ranks compute the leaves,
each is computed in the same shapes and everything is added in the same order.
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

Part = Callable[[nn.Module, Any, "Meeting"], Any]
"""Computes the loss of a micro-batch."""


@dataclass
class Meeting:
    """What one leaf shows the others through `Context.gather`, and is shown, as often as it asks.

    Every time it shows as many rows.
    """

    start: int = 0
    """Where its own rows begin among those of all leaves."""
    length: int = 0
    rows: list[Tensor] = field(default_factory=list)
    shown: Sequence[Tensor] = ()
    asked: Sequence[Tensor] = ()
    """The gradient of all leaves' losses by the rows of all."""

    def gather(self, local: Tensor) -> Tensor:
        """Return the rows of all leaves; before they have met, its own."""
        self.rows.append(local)
        return self.shown[len(self.rows) - 1] if self.shown else local

    @property
    def owed(self) -> Tensor | float:
        """What to add to the loss so that its gradient is that of all leaves' losses."""
        own = (asked.narrow(0, self.start, self.length) for asked in self.asked)
        return sum(
            (row[: self.length] * asked).sum() for row, asked in zip(self.rows, own, strict=True)
        )


def meet(part: Part, model: nn.Module, batch: "StepBatch", world: Collectives) -> list[Meeting]:
    """Let the leaves of a step see each other; return a meeting for each micro-batch. Collective.

    Two forward passes come before the one that is trained: one to have every leaf's rows, one
    to learn how each leaf's loss depends on the rows of all. Memory stays that of one leaf.
    """
    meetings = [Meeting() for _ in batch.micro_batches]
    pairs = list(zip(batch.micro_batches, meetings, strict=True))
    for micro_batch, meeting in pairs:
        with torch.no_grad():
            part(model, micro_batch, meeting)
        meeting.length = len(meeting.rows[0]) if meeting.rows and micro_batch.counts else 0
    wholes = []
    for all_rows in zip(*(meeting.rows for meeting in meetings), strict=True):
        own = [rows[: m.length] for rows, m in zip(all_rows, meetings, strict=True)]
        wholes.append(torch.cat(world.all_parts(torch.cat(own))))
    if not wholes:  # nothing was compared
        return []
    start = sum(world.all_lengths(sum(m.length for m in meetings))[: world.rank])

    trees = [TreeSum(batch.num_leaves) for _ in wholes]
    for micro_batch, meeting in pairs:
        meeting.start, start = start, start + meeting.length
        if micro_batch.counts:
            meeting.rows, meeting.shown = [], [whole.clone().requires_grad_() for whole in wholes]
            total = part(model, micro_batch, meeting).loss_sum
            grads = torch.autograd.grad(total, meeting.shown, materialize_grads=True)
            for tree, grad in zip(trees, grads, strict=True):
                tree.add((0, micro_batch.leaf.place), [grad.contiguous()])
    asked = [sum_nodes(tree, whole, world) for tree, whole in zip(trees, wholes, strict=True)]
    return [replace(m, rows=[], shown=wholes, asked=asked) for m in meetings]
