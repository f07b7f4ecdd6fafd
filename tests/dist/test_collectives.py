"""Collectives give the caller a tensor of his own, on one rank as on several."""

from typing import Any

import pytest
import torch

from lockstep import World
from lockstep.testing import run_ranks


def edited_results() -> list[Any]:
    with World.enter("cpu", timeout_s=20) as world:
        value = torch.ones(2, requires_grad=True)
        for collective in (world.all_sum, world.all_sum_with_grad, world.all_gather):
            result = collective(value.detach())
            result += 5
        (world.all_sum_with_grad(value).sum() + world.all_gather(3 * value).sum()).backward()
        world.all_from_first(value.detach())
        assert value.grad is not None
        return [value.tolist(), (value.grad / world.size).tolist()]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_result_can_be_edited_without_changing_what_was_sent(num_ranks: int) -> None:
    assert run_ranks(num_ranks, edited_results) == [[[1.0, 1.0], [4.0, 4.0]]] * num_ranks
