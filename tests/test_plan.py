"""The batch and learning-rate contract, in the numbers of the five guides."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lockstep.data.order import leaves_of
from lockstep.errors import ConfigError
from lockstep.plan import (
    BatchConfig,
    Contract,
    RateConfig,
    contract_change,
    plan_batches,
    scaled_rate,
)


def contract(
    world_size: int = 2, num_samples: int = 100, lr: float = 1e-3, **batch: int
) -> Contract:
    plan = plan_batches(BatchConfig(**{"batch_size": 4, **batch}), num_samples, world_size)
    return Contract(plan, lr, "none", lr)


def resumed(stored: Contract, fresh: Contract) -> Contract:
    """Return the contract of a run whose settings and data have not changed."""
    assert contract_change(stored, fresh) is None
    return stored.on_ranks(fresh.plan.world_size)


# --- Batches ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "steps", "dropped"), [(1, 7375, 0), (2, 3687, 4), (4, 1843, 12), (8, 921, 28)]
)
def test_the_table_of_guide_004_comes_out(world_size: int, steps: int, dropped: int) -> None:
    plan = plan_batches(BatchConfig(batch_size=4), 29_500, world_size)
    assert (plan.steps_per_epoch, plan.dropped) == (steps, dropped)


@pytest.mark.parametrize(
    ("batch_size", "world_size", "accumulate", "total", "effective"),
    [
        (4, 4, 1, 16, 16),
        (8, 8, 1, 64, 64),
        (8, 8, 4, 64, 256),
        (8, 8, 2, 64, 128),
        (4, 8, 4, 32, 128),
        (64, 2, 1, 128, 128),
    ],
)
def test_total_and_effective_batch_are_those_of_the_guides(
    batch_size: int, world_size: int, accumulate: int, total: int, effective: int
) -> None:
    config = BatchConfig(batch_size=batch_size, accumulate=accumulate)
    plan = plan_batches(config, 10_000, world_size)
    assert (plan.samples_at_once, plan.global_batch) == (total, effective)
    assert plan.accumulate == accumulate


def test_a_global_batch_is_kept_for_every_number_of_ranks() -> None:
    config = BatchConfig(batch_size=4, global_batch_size=48)
    plans = [plan_batches(config, 1000, world_size) for world_size in (1, 2, 3, 5, 12)]
    assert {plan.global_batch for plan in plans} == {48}
    assert {plan.steps_per_epoch for plan in plans} == {20}
    assert [plan.accumulate for plan in plans] == [12, 6, 4, 3, 1]


@given(
    num_samples=st.integers(1, 3000),
    batch_size=st.integers(1, 20),
    accumulate=st.integers(1, 5),
    world_size=st.integers(1, 9),
)
def test_keeping_the_tail_drops_nothing(
    num_samples: int, batch_size: int, accumulate: int, world_size: int
) -> None:
    config = BatchConfig(batch_size=batch_size, accumulate=accumulate, drop_last=False)
    plan = plan_batches(config, num_samples, world_size)
    assert plan.dropped == 0
    assert plan.steps_per_epoch == -(-num_samples // (batch_size * accumulate * world_size))


@given(
    num_samples=st.integers(1, 3000), batch_size=st.integers(1, 20), world_size=st.integers(1, 9)
)
def test_dropping_leaves_out_less_than_one_batch_of_all_ranks(
    num_samples: int, batch_size: int, world_size: int
) -> None:
    assume(num_samples >= batch_size * world_size)
    plan = plan_batches(BatchConfig(batch_size=batch_size), num_samples, world_size)
    assert 0 <= plan.dropped < batch_size * world_size
    assert plan.steps_per_epoch == num_samples // (batch_size * world_size)


# --- Errors carry a remedy that works ---------------------------------------------------


def remedies(error: ConfigError) -> list[dict[str, object]]:
    """Read each alternative of a remedy as the settings it asks for."""
    found = re.findall(r"(global_batch_size|batch_size|drop_last)=(\w+)", error.remedy)
    return [{name: int(value) if value.isdigit() else value} for name, value in found]


@given(
    num_samples=st.integers(1, 200),
    batch_size=st.integers(1, 40),
    world_size=st.integers(1, 9),
    global_batch_size=st.none() | st.integers(1, 300),
)
def test_following_any_remedy_of_a_batch_that_does_not_fit_succeeds(
    num_samples: int, batch_size: int, world_size: int, global_batch_size: int | None
) -> None:
    def follow(config: BatchConfig, patience: int) -> None:
        try:
            plan_batches(config, num_samples, world_size)
        except ConfigError as error:
            choices = remedies(error)
            if not (choices and patience):
                raise
            for choice in choices:
                follow(BatchConfig(**{**config.model_dump(), **choice}), patience - 1)

    # Twice: first the batch is cut anew, and then there may be too few samples for it.
    follow(BatchConfig(batch_size=batch_size, global_batch_size=global_batch_size), patience=2)


def test_an_empty_data_set_is_not_blamed_on_the_batch() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_batches(BatchConfig(batch_size=4, drop_last=False), 0, 1)
    assert "0 samples" in caught.value.problem
    assert "batch_size" not in caught.value.remedy, "no batch size helps"


# --- Rates ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lr", "rule", "world_size", "expected"),
    [
        (5e-4, "linear", 4, 2e-3),
        (5e-4, "sqrt", 4, 1e-3),
        (1e-4, "linear", 8, 8e-4),
        (1e-4, "sqrt", 8, 1e-4 * math.sqrt(8)),
        (1e-4, "none", 8, 1e-4),
        (5e-5, "linear", 2, 1e-4),
        (1e-3, "linear", 2, 2e-3),
        (1e-3, "linear", 4, 4e-3),
    ],
)
def test_the_rates_are_those_of_the_guides(
    lr: float, rule: str, world_size: int, expected: float
) -> None:
    config = RateConfig(lr=lr, lr_scaling=rule)  # type: ignore[arg-type]
    assert scaled_rate(config, world_size, global_batch=1) == pytest.approx(expected, rel=1e-12)


def test_sqrt_of_eight_is_printed_as_the_guide_rounds_it() -> None:
    rate = scaled_rate(RateConfig(lr=1e-4, lr_scaling="sqrt"), world_size=8, global_batch=64)
    assert f"{rate:.2e}" == "2.83e-04"


@pytest.mark.parametrize(("world_size", "expected"), [(1, 1.25e-6), (2, 2.5e-6), (4, 5.0e-6)])
def test_the_batch_rule_follows_the_ratio_of_batches(world_size: int, expected: float) -> None:
    config = RateConfig(lr=1.25e-6, lr_scaling="batch", reference_batch=4)
    plan = plan_batches(BatchConfig(batch_size=4), 29_500, world_size)
    assert scaled_rate(config, world_size, plan.global_batch) == pytest.approx(expected, rel=1e-12)


# --- Resuming ---------------------------------------------------------------------------------


def test_an_unchanged_contract_is_resumed_as_it_is() -> None:
    assert resumed(contract(), contract()) == contract()


def test_a_contract_survives_the_checkpoint() -> None:
    assert Contract.from_json(contract().to_json()) == contract()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_another_number_of_ranks_keeps_the_global_batch_and_the_rate(world_size: int) -> None:
    stored = contract(world_size=2, accumulate=2)
    moved = resumed(stored, contract(world_size=world_size, accumulate=2))
    assert moved.plan.global_batch == stored.plan.global_batch == 16
    assert moved.plan.steps_per_epoch == stored.plan.steps_per_epoch
    assert moved.plan.samples_per_epoch == stored.plan.samples_per_epoch
    assert moved.effective_lr == stored.effective_lr
    assert moved.plan.world_size == world_size
    assert moved.plan.accumulate == math.ceil(4 / world_size)


def test_a_run_goes_on_again_and_again_on_other_ranks_than_it_began_on() -> None:
    def on(world_size: int, accumulate: int = 1) -> Contract:
        fresh = contract(world_size, accumulate=accumulate)
        return replace(fresh, lr_scaling="linear", effective_lr=1e-3 * world_size)

    began = moved = on(4)
    for world_size in (2, 2, 3, 1, 1, 4, 4):
        moved = Contract.from_json(resumed(moved, on(world_size)).to_json())
        assert moved.plan.world_size == world_size
        assert (moved.plan.global_batch, moved.effective_lr) == (16, began.effective_lr)
    change = contract_change(moved, on(4, accumulate=2))
    assert change is not None
    assert "global_batch 16 -> 32" in change.problem


@pytest.mark.parametrize(
    ("fresh", "said"),
    [
        (contract(batch_size=8), "batch_size 4 -> 8"),
        (contract(accumulate=2), "global_batch 8 -> 16"),
        (contract(lr=2e-3), "lr 0.001 -> 0.002"),
        (contract(num_samples=99), "num_samples 100 -> 99"),
        (replace(contract(), lr_scaling="linear"), "lr_scaling none -> linear"),
        (contract(world_size=1, lr=2e-3), "lr 0.001 -> 0.002"),
    ],
)
def test_changed_numbers_are_named(fresh: Contract, said: str) -> None:
    change = contract_change(contract(), fresh)
    assert change is not None
    assert said in change.problem
    assert "accept_changes=true" in change.remedy


@pytest.mark.parametrize(
    ("batch_size", "began_on", "world_size", "leaves"),
    [
        (8, 1, 2, [4, 4]),
        (8, 1, 4, [2, 2, 2, 2]),
        (8, 1, 8, [1] * 8),
        (8, 2, 3, [6, 6, 4]),
        (5, 1, 2, [3, 2]),
        (5, 2, 4, [3, 3, 3, 1]),
        (5, 1, 4, [2, 2, 1]),  # and a padding one: in one round, where single samples take two
        (8, 4, 3, [8, 8, 8, 8]),
        (5, 1, 5, [1] * 5),
    ],
)
def test_more_ranks_than_micro_batches_get_smaller_ones(
    batch_size: int, began_on: int, world_size: int, leaves: list[int]
) -> None:
    stored = contract(batch_size=batch_size, world_size=began_on)
    fresh = contract(batch_size=batch_size, world_size=world_size)
    plan = resumed(stored, fresh).plan
    assert plan.global_batch == stored.plan.global_batch
    found = {leaf.place: leaf for r in range(world_size) for leaf in leaves_of(plan, 0, r)}
    assert [leaf.stop - leaf.start for _, leaf in sorted(found.items())] == leaves
    assert plan.accumulate == math.ceil(len(leaves) / world_size)
    back = resumed(replace(stored, plan=plan), stored).plan
    assert back == stored.plan, "and grow again as ranks get fewer"


def test_memory_halves_what_more_ranks_have_cut_already() -> None:
    stored = contract(batch_size=8, world_size=1)
    plan = resumed(stored, contract(batch_size=8, world_size=2)).plan
    assert [plan.leaf_size, plan.halved().leaf_size, plan.halved().halved().leaf_size] == [4, 2, 1]
    back = resumed(replace(stored, plan=plan.halved()), stored).plan
    assert back.leaf_size == 2, "what did not fit in memory stays halved on fewer ranks"


def test_more_ranks_than_samples_in_a_step_are_refused_with_the_numbers() -> None:
    stored, fresh = contract(world_size=1), contract(world_size=5)
    assert contract_change(stored, fresh) == (
        "a step has 4 samples, too few for 5 ranks",
        "use at most 4 ranks, or pass accept_changes=true to continue with the new ones",
    )


def test_halving_for_more_ranks_than_samples_ends_at_single_samples() -> None:
    plan = contract(world_size=1).plan.on_ranks(5).halved_for_ranks()
    assert (plan.leaf_size, plan.num_leaves) == (1, 4)


def test_a_kept_tail_is_not_dropped_after_a_resume_without_a_word() -> None:
    kept = plan_batches(BatchConfig(batch_size=4, drop_last=False), 101, 2)
    dropped = plan_batches(BatchConfig(batch_size=4), 101, 2)
    stored, fresh = (Contract(plan, 1e-3, "none", 1e-3) for plan in (kept, dropped))
    change = contract_change(stored, fresh)
    assert change is not None
    assert "101 -> 96" in change.problem


# --- What is printed ----------------------------------------------------------------------------


def test_every_number_of_the_contract_is_printed() -> None:
    plan = plan_batches(BatchConfig(batch_size=4, accumulate=2), 29_500, 8)
    lines = "\n".join(Contract(plan, 1e-4, "linear", 8e-4).describe())
    for text in ("4 per GPU", "32 total", "64 effective", "461", "29472 of 29500", "28 dropped"):
        assert text in lines.replace("29,", "29"), text
    for text in ("Base LR: 0.0001", "linear", "factor: 8", "effective LR: 0.0008"):
        assert text in lines, text
