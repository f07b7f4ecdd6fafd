"""Nested batches keep their containers; their tensors are found in order."""

from collections import OrderedDict, defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.nested import map_tensors, tensors_in


class Pair(NamedTuple):
    x: Tensor
    name: str


def test_tensors_change_and_containers_keep_their_types() -> None:
    one = torch.tensor(1)
    counted = defaultdict(int, {"a": one})
    tree = {"pair": Pair(one, "b"), "list": [one, (one, None)], "own": OrderedDict(z=one, y=2)}
    changed = map_tensors(torch.neg, {**tree, "counted": counted})
    minus = torch.tensor(-1)
    assert changed["pair"] == Pair(minus, "b")
    assert isinstance(changed["pair"], Pair)
    assert changed["list"] == [minus, (minus, None)]
    assert list(changed["own"]) == ["z", "y"]
    assert isinstance(changed["own"], OrderedDict)
    assert changed["counted"].default_factory is int
    assert tree["list"][0] is one  # what came in is as it was


def test_tensors_are_found_from_left_to_right() -> None:
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    found = list(tensors_in({"a": [a, "text"], "b": (Pair(b, ""), {"c": c})}))
    assert [id(tensor) for tensor in found] == [id(a), id(b), id(c)]
