"""A data set without a length trains the same on every number of ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from whole_run import NUM_SAMPLES, run, weights

from lockstep.testing import TinyTask


class StreamTask(TinyTask):
    def train_data(self) -> Any:
        samples = super().train_data()

        class Stream:
            def __iter__(self) -> Iterator[Any]:
                return iter(samples)

        return Stream()


def test_a_stream_trains_the_same_on_every_number_of_ranks(tmp_path: Path) -> None:
    for num_ranks in (1, 2):
        changes = {"epochs": None, "max_steps": 4}
        results = run(
            tmp_path / str(num_ranks), num_ranks, lambda: StreamTask(NUM_SAMPLES), **changes
        )
        assert [result.step for result in results] == [4] * num_ranks
    for name, tensor in weights(tmp_path / "1").items():
        torch.testing.assert_close(weights(tmp_path / "2")[name], tensor, rtol=0, atol=1e-12)


def test_a_stream_without_a_number_of_steps_is_refused(tmp_path: Path) -> None:
    errors = run(tmp_path, 2, lambda: StreamTask(NUM_SAMPLES))
    assert errors[0] == errors[1]
    assert errors[0][0] == "ConfigError"
    assert "max_steps=" in errors[0][1]
