"""Samples of like length together: still a permutation, and still the same for all ranks."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.grouped import Grouped
from lockstep.data.order import leaves_of
from lockstep.plan import BatchConfig, plan_batches

lengths = st.lists(st.integers(1, 500), min_size=1, max_size=300).map(np.array)


def order_of(lengths: np.ndarray, batch_size: int, seed: int, window: int) -> Grouped:
    return Grouped(lengths.astype(np.int64), batch_size, seed, window)


@given(lengths, st.integers(1, 9), st.integers(0, 5), st.integers(1, 8), st.integers(0, 3))
def test_an_epoch_holds_every_sample_once(lengths, batch_size, seed, window, epoch) -> None:
    ids = order_of(lengths, batch_size, seed, window).ids(epoch, 0, len(lengths))
    assert sorted(ids.tolist()) == list(range(len(lengths)))


@given(lengths, st.integers(1, 9), st.integers(1, 8), st.data())
def test_any_stretch_is_that_of_the_whole_epoch(lengths, batch_size, window, data) -> None:
    order = order_of(lengths, batch_size, 1, window)
    start = data.draw(st.integers(0, len(lengths)))
    stop = data.draw(st.integers(start, len(lengths)))
    whole = order.ids(2, 0, len(lengths))
    assert order.ids(2, start, stop).tolist() == whole[start:stop].tolist()


def test_leaves_are_of_like_length_and_come_in_no_order_of_length() -> None:
    lengths = np.random.default_rng(0).integers(40, 1000, 4000)
    leaves = lengths[order_of(lengths, 8, 0, 64).ids(0, 0, 4000)].reshape(-1, 8)
    kept = lengths.sum() / (leaves.max(axis=1) * 8).sum()
    assert kept > 0.95
    shuffled = lengths.reshape(-1, 8)
    assert lengths.sum() / (shuffled.max(axis=1) * 8).sum() < 0.65, "padding that grouping saves"
    assert abs(np.corrcoef(np.arange(500), leaves.mean(axis=1))[0, 1]) < 0.15


def test_epochs_and_seeds_differ() -> None:
    lengths = np.arange(200) % 17
    first = order_of(lengths, 4, 0, 8)
    assert first.ids(0, 0, 200).tolist() != first.ids(1, 0, 200).tolist()
    assert first.ids(0, 0, 200).tolist() != order_of(lengths, 4, 1, 8).ids(0, 0, 200).tolist()


def test_the_samples_that_fill_no_leaf_are_no_longer_than_others() -> None:
    lengths = np.arange(1, 104)  # 100 in leaves, 3 left over
    order = order_of(lengths, 10, 0, 4)
    left = [lengths[order.ids(epoch, 100, 103)].mean() for epoch in range(300)]
    assert abs(np.mean(left) - lengths.mean()) < 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_number_of_ranks_computes_the_same_leaves(world_size: int) -> None:
    lengths = np.random.default_rng(0).integers(40, 1000, 97)
    order = order_of(lengths, 4, 0, 3)

    def leaves(size: int) -> list[list[list[int]]]:
        config = BatchConfig(batch_size=4, global_batch_size=16, drop_last=False)
        plan = plan_batches(config, 97, size)
        return [
            [
                order.ids(leaf.epoch, leaf.start, leaf.stop).tolist()
                for rank in range(size)
                for leaf in leaves_of(plan, step, rank)
                if not leaf.is_padding
            ]
            for step in range(plan.steps_per_epoch)
        ]

    assert leaves(world_size) == leaves(1)


def test_seeking_costs_one_window_and_not_the_epoch() -> None:
    order = order_of(np.full(3_000_000, 100), 32, 0, 64)
    order.ids(0, 0, 32)
    began = time.process_time()
    order.ids(7, 2_999_000, 2_999_032)
    assert time.process_time() - began < 0.1
