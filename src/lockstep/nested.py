"""Tensors in nested dicts, lists, tuples and named tuples: batches, samples and states.

Owns: walking such a tree. Does not own: trees of checkpoints, which hold plain values too and
refuse anything else (`checkpoint/state.py`), or hashing a sample (`contents.py`).
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return `tree` with every tensor changed; containers keep their types.

    >>> map_tensors(Tensor.neg, {"x": [Tensor([1.0]), "name"]})
    {'x': [tensor([-1.]), 'name']}
    """
    return map_leaves(change, tree, _is_tensor)


def map_leaves(change: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool]) -> Any:
    """Return `tree` with every node changed for which `is_leaf` is true.

    Containers keep their types.
    """
    if is_leaf(tree):
        return change(tree)
    if isinstance(tree, dict):
        changed = copy.copy(tree)  # whatever kind of dict it is
        changed.update((key, map_leaves(change, value, is_leaf)) for key, value in tree.items())
        return changed
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(change, value, is_leaf) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_leaves(change, value, is_leaf) for value in tree)
    return tree


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Tensor)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of `tree`, from left to right."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_in(value)
