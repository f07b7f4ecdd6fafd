"""Schedules are pure functions of the step: they train at once, end at the floor, ignore ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.plan import BatchConfig, plan_batches
from lockstep.schedule import ScheduleConfig, build_schedule, warmup_constant, warmup_cosine


@given(warmup=st.integers(0, 50), decay=st.integers(1, 200), floor=st.floats(0, 1))
def test_the_first_step_trains_and_the_last_is_at_the_floor(
    warmup: int, decay: int, floor: float
) -> None:
    rate = warmup_cosine(warmup, warmup + decay, floor)
    if warmup:
        assert rate(0) == 1 / warmup
    elif decay > 1:
        assert rate(0) > floor or floor == 1
    assert rate(warmup + decay - 1) == pytest.approx(floor, abs=1e-15)
    assert rate(warmup + decay + 100) == pytest.approx(floor, abs=1e-15), "it stays there"


@given(warmup=st.integers(1, 50), decay=st.integers(1, 200), floor=st.floats(0, 1))
def test_a_rate_rises_to_one_and_then_only_falls(warmup: int, decay: int, floor: float) -> None:
    rate = warmup_cosine(warmup, warmup + decay, floor)
    up = [rate(step) for step in range(warmup)]
    down = [rate(step) for step in range(warmup - 1, warmup + decay)]
    assert up == sorted(up)
    assert up[-1] == 1
    assert down == sorted(down, reverse=True)


def test_a_constant_rate_holds_after_the_warm_up() -> None:
    rate = warmup_constant(4)
    assert [rate(step) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert warmup_constant(0)(0) == 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_a_schedule_does_not_depend_on_the_number_of_ranks(world_size: int) -> None:
    config = ScheduleConfig(shape="cosine", warmup_epochs=1.5, floor=0.1)
    batch = BatchConfig(batch_size=2, global_batch_size=12)
    plan = plan_batches(batch, 120, world_size)
    rate = build_schedule(config, plan.steps_per_epoch, 10 * plan.steps_per_epoch)
    assert [rate(0), rate(14), rate(99)] == [1 / 15, 1.0, 0.1]


def test_warm_up_in_epochs_counts_weight_updates_and_not_micro_batches() -> None:
    plan = plan_batches(BatchConfig(batch_size=4, accumulate=4), 29_500, 8)
    config = ScheduleConfig(warmup_epochs=5)
    rate = build_schedule(config, plan.steps_per_epoch, 10_000)
    assert rate(0) == 1 / (5 * plan.steps_per_epoch)
    assert rate(5 * plan.steps_per_epoch - 1) == 1


def test_a_schedule_goes_on_after_a_resume_from_the_step_alone() -> None:
    config = ScheduleConfig(shape="cosine", warmup_steps=3)
    straight = [build_schedule(config, 10, 40)(step) for step in range(40)]
    assert straight[17:] == [build_schedule(config, 10, 40)(step) for step in range(17, 40)]
