"""The order of an epoch is a permutation, computable anywhere; ranks cut it whole."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.order import Leaf, Sequential, Shuffled, consumed_after, leaves_of, step_of
from lockstep.plan import BatchConfig, BatchPlan, plan_batches


@st.composite
def plans(draw: st.DrawFn) -> list[BatchPlan]:
    """Draw one cut of a data set, for several numbers of ranks."""
    num_samples = draw(st.integers(1, 400))
    batch_size = draw(st.integers(1, 9))
    leaves = draw(st.integers(1, 8))
    drop_last = draw(st.booleans()) and num_samples >= batch_size * leaves
    config = BatchConfig(
        batch_size=batch_size, global_batch_size=batch_size * leaves, drop_last=drop_last
    )
    sizes = draw(st.lists(st.integers(1, leaves), min_size=1, max_size=3))
    return [plan_batches(config, num_samples, size) for size in sizes]


def leaves_of_step(plan: BatchPlan, step: int) -> list[Leaf]:
    """Return what all ranks together train on, in rank order."""
    each = (leaves_of(plan, step, rank) for rank in range(plan.world_size))
    return [leaf for rank in each for leaf in rank if not leaf.is_padding]


# --- The permutation ----------------------------------------------------------------


@given(num_samples=st.integers(1, 5000), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_an_epoch_visits_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    ids = Shuffled(num_samples, seed).ids(epoch, 0, num_samples)
    assert np.array_equal(np.sort(ids), np.arange(num_samples))


@pytest.mark.parametrize("num_samples", [*range(1, 40), 4999, 5000])
def test_small_data_sets_are_shuffled_whole(num_samples: int) -> None:
    ids = Shuffled(num_samples, seed=0).ids(0, 0, num_samples)
    assert sorted(ids.tolist()) == list(range(num_samples))


@given(num_samples=st.integers(1, 10**12), cut=st.integers(0, 300), data=st.data())
@settings(max_examples=50)
def test_seeking_gives_what_reading_on_would(
    num_samples: int, cut: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, num_samples - 1))
    stop = min(start + 300, num_samples)
    middle = min(start + cut, stop)
    order = Shuffled(num_samples, seed=5)
    parts = [order.ids(2, start, middle), order.ids(2, middle, stop)]
    assert np.array_equal(np.concatenate(parts), order.ids(2, start, stop))


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = [Shuffled(1000, seed).ids(epoch, 0, 1000) for seed in (0, 1) for epoch in (0, 1)]
    for a, b in pairwise(orders):
        assert (a == b).mean() < 0.02


def test_the_shuffle_is_even() -> None:
    """Each sample is as likely in one tenth of the epoch as in another."""
    order = Shuffled(100, seed=0)
    tenth = np.stack([np.argsort(order.ids(epoch, 0, 100)) // 10 for epoch in range(2000)])
    counts = np.stack([np.bincount(column, minlength=10) for column in tenth.T])
    statistic = ((counts - 200) ** 2 / 200).sum(axis=1)  # chi square of 9 degrees of freedom
    assert statistic.mean() == pytest.approx(9, abs=1.5)
    assert statistic.max() < 40


def test_seeking_in_a_billion_samples_takes_no_time() -> None:
    order = Shuffled(10**9, seed=0)

    def seek(start: int) -> float:
        began = time.thread_time()
        order.ids(7, start, start + 256)
        return time.thread_time() - began

    assert min(seek(10**9 - 1000 - k) for k in range(5)) < 0.010


# --- The cut --------------------------------------------------------------------------


@given(plans())
def test_the_leaves_of_all_ranks_in_turn_are_the_order(plans: list[BatchPlan]) -> None:
    for plan in plans:
        order = Shuffled(plan.num_samples, seed=1)
        for epoch in (0, 1):
            steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
            leaves = [leaf for step in steps for leaf in leaves_of_step(plan, step)]
            assert {leaf.epoch for leaf in leaves} == {epoch}
            ids = [order.ids(epoch, leaf.start, leaf.stop) for leaf in leaves]
            whole = order.ids(epoch, 0, plan.samples_per_epoch)
            assert np.array_equal(np.concatenate(ids), whole)


@given(plans())
def test_every_number_of_ranks_computes_the_same_leaves(plans: list[BatchPlan]) -> None:
    for step in range(min(plan.steps_per_epoch for plan in plans) + 1):
        assert len({tuple(leaves_of_step(plan, step)) for plan in plans}) == 1


@given(plans())
def test_no_rank_is_ever_without_a_leaf_or_far_ahead(plans: list[BatchPlan]) -> None:
    for plan in plans:
        for step in range(plan.steps_per_epoch):
            counts = [len(leaves_of(plan, step, rank)) for rank in range(plan.world_size)]
            assert min(counts) >= 1
            assert max(counts) - min(counts) <= 1


@given(plans())
def test_places_count_the_leaves_of_a_step(plans: list[BatchPlan]) -> None:
    for plan in plans:
        for step in range(plan.steps_per_epoch):
            leaves = leaves_of_step(plan, step)
            assert [leaf.place for leaf in leaves] == list(range(len(leaves)))
            assert all(0 < leaf.stop - leaf.start <= plan.batch_size for leaf in leaves)


# --- The position of a run is one integer ---------------------------------------------------


@given(plans(), st.integers(0, 2000))
def test_samples_consumed_name_the_next_step(plans: list[BatchPlan], step: int) -> None:
    for plan in plans:
        consumed = consumed_after(plan, step)
        assert step_of(plan, consumed) == step + 1
        before = consumed_after(plan, step - 1) if step else 0
        assert consumed - before == sum(
            leaf.stop - leaf.start for leaf in leaves_of_step(plan, step)
        )


def test_a_run_begins_with_nothing_consumed() -> None:
    assert step_of(plan_batches(BatchConfig(batch_size=4), 100, 2), 0) == 0


@given(plans(), st.integers(0, 500), st.data())
def test_another_number_of_ranks_goes_on_at_the_same_sample(
    plans: list[BatchPlan], step: int, data: st.DataObject
) -> None:
    before, after = data.draw(st.sampled_from(plans)), data.draw(st.sampled_from(plans))
    resumed = step_of(after, consumed_after(before, step))
    assert leaves_of_step(after, resumed) == leaves_of_step(before, step + 1)


def test_the_sequential_order_is_the_samples_as_they_come() -> None:
    assert Sequential(10).ids(3, 4, 8).tolist() == [4, 5, 6, 7]


def test_a_position_beyond_the_epoch_is_refused() -> None:
    """It would walk from one value outside to the next, and never come inside."""
    with pytest.raises(ValueError, match="8 samples has no position 8"):
        Shuffled(8, seed=0).ids(epoch=0, start=4, stop=9)
