"""Sums along one binary tree over the micro-batches of a step.

Owns: the order in which numbers are added. It depends on the number of micro-batches (the leaves
of the tree) alone, so any number of ranks gives the same bits. Does not own: what is added.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from lockstep.data.order import share
from lockstep.dist.collectives import Collectives
from lockstep.torch_compat.private import foreach

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
                    foreach("add_")(left, value)
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
        return list(foreach("add")(value, 0.0))


@lru_cache(maxsize=4096)
def cover(num_leaves: int, rank: int, world_size: int) -> tuple[Node, ...]:
    """Return the nodes that a rank's own leaves add up to."""
    tree = TreeSum(num_leaves)
    for place in share(num_leaves, rank, world_size):
        tree.add((0, place), [])
    return tuple(node for node, _ in tree.nodes)


def sum_nodes(tree: TreeSum, like: Tensor, world: Collectives) -> Tensor:
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
