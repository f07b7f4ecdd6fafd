"""The ledger proves that each sample was consumed once; a repeated one must make it differ."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.data.ledger import Ledger
from lockstep.data.order import Ids, Shuffled, leaves_of
from lockstep.plan import BatchConfig, plan_batches

ALONE = torch.Tensor.clone


def ledger_of(*ids: int, epoch: int = 0) -> Ledger:
    ledger = Ledger()
    ledger.add(epoch, np.array(ids, dtype=np.int64))
    return ledger


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("drop_last", [True, False])
def test_what_the_ranks_consume_adds_up_to_the_epoch(world_size: int, drop_last: bool) -> None:
    config = BatchConfig(batch_size=3, global_batch_size=12, drop_last=drop_last)
    plan = plan_batches(config, 100, world_size)
    order = Shuffled(100, seed=4)
    for epoch in (0, 1):
        total = Ledger()
        for rank in range(world_size):
            local = Ledger()
            for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
                for leaf in leaves_of(plan, step, rank):
                    if not leaf.is_padding:
                        local.add(epoch, order.ids(epoch, leaf.start, leaf.stop))
            total = total.plus(local, ALONE)
        assert total == Ledger.of_epoch(order, plan, epoch)
        assert total.count == plan.samples_per_epoch


@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=30, unique=True), st.data())
def test_a_ledger_ignores_the_order_but_not_a_repeated_sample(
    ids: list[int], data: st.DataObject
) -> None:
    assert ledger_of(*ids) == ledger_of(*data.draw(st.permutations(ids)))
    repeated = [ids[1], *ids[1:]]
    assert len(repeated) == len(ids)
    assert ledger_of(*repeated) != ledger_of(*ids)
    assert ledger_of(*ids[:-1]) != ledger_of(*ids)


def test_epochs_have_ledgers_of_their_own() -> None:
    assert str(ledger_of(1, 2, epoch=0)) != str(ledger_of(1, 2, epoch=1))


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5))
def test_digests_of_any_size_add_up_over_ranks(digests: list[int]) -> None:
    """64-bit sums wrap around; the sum over ranks is made in signed integers."""
    locals_ = [Ledger(digest, 1) for digest in digests]

    def all_sum(value: Tensor) -> Tensor:
        signed = [d - 2**64 if d >= 2**63 else d for d in digests]
        total = torch.zeros(2, dtype=torch.int64)
        for digest in signed:
            total += torch.tensor([digest, 1])
        return total

    assert Ledger().plus(locals_[0], all_sum) == Ledger(sum(digests) % 2**64, len(digests))


@pytest.mark.parametrize("batch_size", [1, 4, 20])
def test_an_epoch_must_be_every_sample_even_where_its_order_lies(batch_size: int) -> None:
    plan = plan_batches(BatchConfig(batch_size=batch_size), 20, 1)
    honest = Shuffled(20, seed=0)

    class Repeating:
        def ids(self, epoch: int, start: int, stop: int) -> Ids:
            ids = honest.ids(epoch, start, stop)
            return np.where(ids == 7, 8, ids)

    consumed = Ledger()
    consumed.add(0, Repeating().ids(0, 0, 20))
    assert consumed != Ledger.of_epoch(Repeating(), plan, 0)
    assert Ledger.of_epoch(honest, plan, 0) == ledger_of(*range(20))
