"""The three numbers mean what their definitions say."""

import pytest

from lockstep.observe.throughput import Throughput


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rate_step_time_and_wait_share_follow_from_the_clock() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    for _ in range(4):
        with throughput.waiting():
            clock.now += 0.5
        clock.now += 1.5
        throughput.step_done(32)
    assert throughput.interval() == {
        "samples_per_second": 16.0,
        "step_time_s": 2.0,
        "data_wait_share": 0.25,
    }


def test_an_interval_starts_over() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    clock.now += 50.0
    throughput.step_done(1)
    throughput.interval()
    clock.now += 2.0
    throughput.step_done(10)
    assert throughput.interval()["samples_per_second"] == 5.0


def test_an_evaluation_does_not_look_like_a_slow_step() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    clock.now += 1.0
    throughput.step_done(8)
    with throughput.pausing():
        clock.now += 1000.0
    assert throughput.interval()["samples_per_second"] == 8.0


def test_time_is_counted_even_when_the_wait_ends_in_an_error() -> None:
    clock = Clock()
    throughput = Throughput(clock)

    def fetch() -> None:
        with throughput.waiting():
            clock.now += 1.0
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fetch()
    clock.now += 1.0
    throughput.step_done(1)
    assert throughput.interval()["data_wait_share"] == 0.5


def test_an_interval_without_steps_is_zero() -> None:
    assert set(Throughput(Clock()).interval().values()) == {0.0}
