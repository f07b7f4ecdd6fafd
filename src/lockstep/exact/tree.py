"""Sums along one binary tree over the micro-batches of a step.

Owns: the order in which numbers are added. It depends only on the number of micro-batches (the
leaves of the tree), so any number of ranks gives the same bits. Does not own: what is added.
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
    """A sum over leaves 0 to n - 1 along one binary tree; a rank may have only some leaves.

    Leaves, or nodes above them, are added from left to right. Siblings merge as soon as both have
    been added, so a rank keeps only a few nodes for any number of leaves.

    >>> tree = TreeSum(5)
    >>> for place in range(1, 5):
    ...     tree.add((0, place), [torch.tensor(float(place))])
    >>> tree.nodes
    [((0, 1), [tensor(1.)]), ((1, 1), [tensor(5.)]), ((2, 1), [tensor(4.)])]
    """

    num_leaves: int
    nodes: list[tuple[Node, list[Tensor]]] = field(default_factory=list)

    def add(self, node: Node, value: list[Tensor]) -> None:
        """Add the next node to the right; nodes to its left may be changed in place."""
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
                break  # its sibling is added later
            level, index = level + 1, index // 2  # without a sibling it becomes its own parent
        self.nodes.append(((level, index), value))

    @property
    def total(self) -> list[Tensor]:
        """The sum over all leaves, with +0 for -0, whose sign would depend on the ranks."""
        (_, value), *others = self.nodes
        assert not others, "the sum over all leaves needs all of them"
        return list(foreach("add")(value, 0.0))


@lru_cache(maxsize=4096)
def cover(num_leaves: int, rank: int, world_size: int) -> tuple[Node, ...]:
    """Return the nodes that the sum of a rank's leaves consists of."""
    tree = TreeSum(num_leaves)
    for place in share(num_leaves, rank, world_size):
        tree.add((0, place), [])
    return tuple(node for node, _ in tree.nodes)


def sum_nodes(tree: TreeSum, like: Tensor, world: Collectives) -> Tensor:
    """Return the sum over all leaves, after every rank has added its own to `tree`. Collective.

    Meant for few numbers, because every rank gets all nodes. `like` has the shape of a leaf's
    tensor, for ranks without a leaf.
    """
    covers = [cover(tree.num_leaves, rank, world.size) for rank in range(world.size)]
    rows = torch.stack([value for _, (value,) in tree.nodes]) if tree.nodes else like[None][:0]
    parts = world.all_parts(rows, [len(nodes) for nodes in covers])
    whole = TreeSum(tree.num_leaves)
    for nodes, values in zip(covers, parts, strict=True):
        for node, value in zip(nodes, values, strict=True):
            whole.add(node, [value])
    return whole.total[0]
