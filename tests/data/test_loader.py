"""The loader gives the same samples however they are read, and names the one that cannot be."""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset

from lockstep import Loader
from lockstep.data.batch import StepBatch
from lockstep.data.held_out import read_held_out
from lockstep.data.order import Ids, Sequential, Shuffled, consumed_after
from lockstep.data.workers import LoaderConfig
from lockstep.errors import ConfigError, DataError
from lockstep.plan import BatchConfig, plan_batches
from lockstep.randomness import seed_all, untouched
from lockstep.testing import FakeWorld


class Augmented:
    """Samples with noise from all three global generators."""

    def __init__(self, num_samples: int = 20) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Tensor:
        noise = random.random() + np.random.rand() + float(torch.rand((), dtype=torch.float64))
        return torch.tensor([float(index), noise], dtype=torch.float64)


class Holed(Augmented):
    """Some samples cannot be read."""

    bad = (3,)

    def __getitem__(self, index: int) -> Tensor:
        if index in self.bad:
            raise OSError("truncated file")
        return super().__getitem__(index)


class Batched(Holed):
    """Reads several samples in one call, or fails as a whole."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        self.asked.append(indices)
        return [super(Batched, self).__getitem__(index) for index in indices]

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.bad, self.asked = bad, list[list[int]]()


class Stream:
    """An iterable without length, whose samples are made with global random numbers."""

    def __init__(self, length: int = 1000) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.length):
            noise = random.random() + np.random.rand() + float(torch.rand((), dtype=torch.float64))
            yield torch.tensor([float(index), noise], dtype=torch.float64)


def steps(
    dataset: Any,
    rank: int = 0,
    size: int = 1,
    *,
    skip: int = 0,
    max_steps: int = 8,
    **options: Any,
) -> list[StepBatch]:
    """Read what one rank gets, two leaves of two samples a step, from step `skip` on."""
    plan = None
    if hasattr(dataset, "__len__"):
        config = BatchConfig(batch_size=2, global_batch_size=4, drop_last=False)
        plan = plan_batches(config, len(dataset), size)
    loader = Loader(
        dataset,
        FakeWorld(rank, size),
        batch_size=2,
        plan=plan,
        max_steps=max_steps,
        config=LoaderConfig(**options),
    )
    loader.consumed = consumed_after(loader.plan, skip - 1) if skip else 0
    return list(loader)


def rows(batches: list[StepBatch]) -> list[list[float]]:
    """Return every sample that counts, in the order of reading."""
    micro = [m for batch in batches for m in batch.micro_batches if m.counts]
    return [row for m in micro for row in m.data.tolist()]


# --- The same data, however read -----------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_number_of_workers_does_not_change_the_data(num_workers: int) -> None:
    read = rows(steps(Augmented(), num_workers=num_workers, prefetch=3))
    assert read == rows(steps(Augmented()))


@pytest.mark.parametrize("size", [2, 3])
def test_the_number_of_ranks_does_not_change_the_data(size: int) -> None:
    def read(num_ranks: int) -> list[list[float]]:
        plan = plan_batches(BatchConfig(batch_size=2, global_batch_size=6), 20, num_ranks)
        each = [
            Loader(Augmented(), FakeWorld(rank, num_ranks), plan=plan, max_steps=6)
            for rank in range(num_ranks)
        ]
        return [row for step in zip(*each, strict=True) for batch in step for row in rows([batch])]

    assert read(size) == read(1)


def test_augmentation_differs_between_epochs_and_samples() -> None:
    noise = [row[1] for row in rows(steps(Augmented(), max_steps=10))]
    assert len(noise) == 40
    assert len(set(noise)) == 40


@pytest.mark.parametrize("skip", [1, 4, 7])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_going_on_after_k_steps_equals_skipping_k(skip: int, num_workers: int) -> None:
    resumed = steps(Augmented(), skip=skip, num_workers=num_workers)
    assert [batch.step for batch in resumed] == list(range(skip, 8))
    assert rows(resumed) == rows(steps(Augmented())[skip:])


def test_no_steps_are_none_and_a_run_that_was_cut_short_has_none_left() -> None:
    loader = Loader(range(8), FakeWorld(), batch_size=2, epochs=3, max_steps=0)
    assert (len(loader), list(loader)) == (0, [])
    loader.seek(step=4, consumed=8)  # and the user has asked for less than that since
    assert (len(loader), list(loader)) == (0, [])


def test_a_loader_does_not_go_on_under_another_seed() -> None:
    loader = Loader(range(12), FakeWorld(), batch_size=2, epochs=1, seed=1)
    read = [batch.micro_batches[0].ids.tolist() for batch in islice(loader, 3)]
    state, kind = loader.state_dict(), {"batch_size": 2, "epochs": 1}
    with pytest.raises(ConfigError, match="seed 1 -> 2") as caught:
        Loader(range(12), FakeWorld(), seed=2, **kind).load_state_dict(state)  # type: ignore[arg-type]
    assert (
        caught.value.remedy == "restore the old values, or use another folder to start from scratch"
    )
    again = Loader(range(12), FakeWorld(), seed=1, **kind)  # type: ignore[arg-type]
    again.load_state_dict(state)
    read += [batch.micro_batches[0].ids.tolist() for batch in again]
    assert sorted(sum(read, [])) == list(range(12))


def test_smaller_micro_batches_for_more_ranks_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    state = Loader(range(48), FakeWorld(size=2), batch_size=8, epochs=1).state_dict()
    caplog.set_level("WARNING", "lockstep")
    for size in (2, 3):
        Loader(range(48), FakeWorld(size=size), batch_size=8, epochs=1).load_state_dict(state)
    (logged,) = caplog.messages
    assert logged.startswith(
        "resumed on 3 ranks instead of 2: micro-batches of 6 samples instead of 8, still 16 samples"
    )


def test_a_data_set_that_reads_several_samples_in_one_call_is_asked_so() -> None:
    whole = Batched()
    read = rows(steps(whole))
    assert [len(indices) for indices in whole.asked] == [2] * 16
    assert [row[0] for row in read] == [row[0] for row in rows(steps(Augmented()))]
    noise = [row[1] for row in read]
    assert len(set(noise)) == len(noise)
    assert rows(steps(Batched(), num_workers=1)) == read
    assert rows(steps(Batched(), skip=4)) == read[16:]
    part = Subset(Batched(), range(20))
    assert rows(steps(part)) == rows(steps(Augmented())), "a subset draws for each sample"


def test_resuming_reads_nothing_again() -> None:
    class Counted(Augmented):
        touched: list[int] = []

        def __getitem__(self, index: int) -> Tensor:
            self.touched.append(index)
            return super().__getitem__(index)

    loader = Loader(Counted(10_000), FakeWorld(), batch_size=4, max_steps=2000)
    loader.consumed = 4 * 1990
    assert len(loader) == 10
    read = [int(i) for batch in loader for m in batch.micro_batches for i in m.ids]
    assert Counted.touched == read
    assert len(read) == 40


def test_what_is_consumed_is_what_was_handed_out_and_not_what_was_fetched() -> None:
    loader = Loader(
        Augmented(),
        FakeWorld(),
        epochs=1,
        batch_size=2,
        config=LoaderConfig(num_workers=1, prefetch=4),
    )
    batches = iter(loader)
    for _ in range(3):
        batch = next(batches)
    assert loader.consumed == batch.consumed == 6


@pytest.mark.parametrize("dataset", [Augmented(), Stream()])
def test_reading_here_leaves_the_callers_generators_alone(dataset: Any) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with untouched():
        seed_all(5)
        expected = [draw() for _ in range(5)]
        seed_all(5)
        loader = Loader(dataset, FakeWorld(), batch_size=2, max_steps=4)
        found = [draw()]
        for _ in loader:
            found.append(draw())
        assert found == expected


# --- Bad samples ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_sample_is_named(num_workers: int) -> None:
    with pytest.raises(DataError) as caught:
        steps(Holed(), num_workers=num_workers)
    assert caught.value.problem == "sample 3 cannot be read: OSError: truncated file"
    assert "on_bad_sample=skip" in caught.value.remedy


def test_a_bad_sample_among_several_is_named_or_left_out_alone() -> None:
    with pytest.raises(DataError, match="sample 3 cannot be read"):
        steps(Batched(bad=(3,)))
    left = rows(steps(Batched(bad=(3,)), max_steps=5, on_bad_sample="skip"))
    assert sorted(row[0] for row in left) == [i for i in range(20) if i != 3]


def test_a_data_set_that_leaves_out_a_bad_sample_unasked_is_read_one_by_one() -> None:
    class Silent(Batched):
        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            return super().__getitems__([index for index in indices if index not in self.bad])

    with pytest.raises(DataError, match="sample 3 cannot be read"):
        steps(Silent(bad=(3,)))
    epoch = steps(Silent(bad=(3,)), on_bad_sample="skip", max_steps=5)
    found = [m for batch in epoch for m in batch.micro_batches]
    assert all(len(m.ids) == len(m.data) for m in found)
    assert [sample for m in found for sample, _ in m.skipped] == [3]


def test_a_bad_sample_goes_by_the_name_its_data_set_has_for_it() -> None:
    class Named(Holed):
        def describe(self, index: int) -> str:
            return f"images/{index}.png"

    with pytest.raises(DataError, match="images/3.png cannot be read"):
        steps(Named())


def test_a_name_that_cannot_be_had_does_not_hide_what_is_wrong() -> None:
    class Unnamed(Holed):
        def describe(self, index: int) -> str:
            raise KeyError("no such name")

    with pytest.raises(DataError, match=r"sample 3 cannot be read: OSError"):
        steps(Unnamed())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_skipped_sample_is_left_out_and_reported_but_counted_as_visited(num_workers: int) -> None:
    batches = steps(Holed(), max_steps=5, on_bad_sample="skip", num_workers=num_workers)
    micro = [m for batch in batches for m in batch.micro_batches]
    assert sorted(row[0] for row in rows(batches)) == [i for i in range(20) if i != 3]
    assert [s for m in micro for s, _ in m.skipped] == [3]
    assert sorted(np.concatenate([m.visited for m in micro]).tolist()) == list(range(20))


def test_skipping_a_sample_does_not_change_the_others() -> None:
    clean = [row for row in rows(steps(Augmented())) if row[0] != 3]
    assert rows(steps(Holed(), on_bad_sample="skip")) == clean


def test_a_micro_batch_of_bad_samples_only_ends_the_run_in_words() -> None:
    class Hopeless(Holed):
        bad = tuple(range(20))

    with pytest.raises(DataError, match="every sample of a micro-batch was bad"):
        steps(Hopeless(), on_bad_sample="skip")


def test_a_batch_that_cannot_be_put_together_names_its_samples() -> None:
    class Ragged(Augmented):
        def __getitem__(self, index: int) -> Tensor:
            return torch.zeros(index + 1)

    with pytest.raises(DataError, match=r"batch of sample \d+, sample \d+: RuntimeError: stack"):
        steps(Ragged())


# --- Streams -----------------------------------------------------------------------------------


def test_a_stream_needs_a_number_of_steps() -> None:
    with pytest.raises(ConfigError, match="without length") as caught:
        Loader(Stream(), FakeWorld(), batch_size=2)
    assert "max_steps=" in caught.value.remedy


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_stream_is_used_once_and_in_order_across_ranks(size: int) -> None:
    each = [steps(Stream(), rank, size, max_steps=5) for rank in range(size)]
    ids = [row[0] for batches in zip(*each, strict=True) for b in batches for row in rows([b])]
    assert ids == list(range(5 * 2 * size))


def test_the_samples_of_a_stream_do_not_depend_on_the_number_of_ranks() -> None:
    one = rows(steps(Stream(), max_steps=8))
    two = [steps(Stream(), rank, 2, max_steps=4) for rank in range(2)]
    assert [row for pair in zip(*two, strict=True) for b in pair for row in rows([b])] == one


@pytest.mark.parametrize("skip", [1, 5])
def test_a_resumed_stream_goes_on_at_the_right_sample(skip: int) -> None:
    assert rows(steps(Stream(), skip=skip)) == rows(steps(Stream())[skip:])


def test_random_numbers_in_a_stream_do_not_repeat_from_batch_to_batch() -> None:
    noise = [row[1] for row in rows(steps(Stream()))]
    assert len(set(noise)) == len(noise)


def test_a_stream_that_ends_begins_again() -> None:
    ids = [row[0] for row in rows(steps(Stream(6), max_steps=4))]
    assert ids == [0, 1, 2, 3, 4, 5, 0, 1]


def test_a_stream_that_fails_names_the_place() -> None:
    class Torn(Stream):
        def __iter__(self) -> Iterator[Tensor]:
            yield from islice(super().__iter__(), 5)
            raise OSError("connection lost")

    with pytest.raises(DataError, match="sample 5 cannot be read: OSError: connection lost") as met:
        steps(Torn())
    assert "on_bad_sample" not in str(met.value), "a stream cannot go on behind it"


def test_an_iterator_is_not_taken_for_one_that_begins_anew() -> None:
    def seen(dataset: Any) -> list[list[float]]:
        loader = Loader(dataset, FakeWorld(), batch_size=2, max_steps=4)
        taken = list(islice(loader, 3))
        loader.seek(step=2, consumed=4)  # the third step is taken again
        return rows([*taken, *loader])

    first = seen(Stream())
    assert first[4:6] == first[6:8]
    with pytest.raises(
        DataError, match="a step must be repeated, but an iterator cannot start again"
    ):
        seen(iter(Stream()))
    with pytest.raises(DataError, match="an iterator at its end"):
        seen(iter(Stream(3)))


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        steps(Stream(0))


# --- Held-out samples -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_held_out_samples_are_read_once_over_all_ranks_in_the_same_batches(size: int) -> None:
    def read(rank: int, of: int) -> list[list[int]]:
        batches = read_held_out(
            Augmented(5), 2, FakeWorld(rank, of), 0, torch.stack, LoaderConfig()
        )
        return [m.ids.tolist() for m in batches]

    assert [ids for rank in range(size) for ids in read(rank, size)] == [[0, 1], [2, 3], [4]]


def test_a_held_out_sample_that_is_skipped_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    skipping = LoaderConfig(on_bad_sample="skip")
    batches = list(read_held_out(Holed(5), 2, FakeWorld(), 0, torch.stack, skipping))
    assert [m.ids.tolist() for m in batches] == [[0, 1], [2], [4]]
    (said,) = caplog.messages
    assert said.startswith("rank 0, evaluation: sample 3 cannot be read: OSError: truncated file")


# --- An order of the user's own ------------------------------------------------------------------


def test_an_order_of_the_users_own_is_followed() -> None:
    class Backwards(Shuffled):
        def ids(self, epoch: int, start: int, stop: int) -> Ids:
            return np.arange(self.num_samples)[::-1][start:stop].astype(np.int64)

    loader = Loader(Augmented(), FakeWorld(), batch_size=2, epochs=1, order=Backwards(20, 0))
    ids = [int(i) for batch in loader for m in batch.micro_batches for i in m.ids]
    assert ids == list(range(19, -1, -1))


class DrawsLate(Augmented):
    """Draws from a global generator, but not for the first samples it is asked for."""

    draw: Callable[[], float]

    def __getitem__(self, index: int) -> Any:
        return (index, self.draw() if index >= 6 else 0.0)


DRAWS = {
    "random": random.random,
    "numpy": np.random.rand,
    "torch": lambda: float(torch.randn(())),
    "a generator of its own": lambda: np.random.default_rng(torch.initial_seed()).random(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_data_set_that_begins_to_draw_is_seeded_for_every_sample_of_that_leaf(name: str) -> None:
    def noise(batch_size: int) -> dict[int, float]:
        dataset = DrawsLate(12)
        dataset.draw = DRAWS[name]
        loader = Loader(dataset, FakeWorld(), batch_size=batch_size, epochs=1, order=Sequential(12))
        found = [batch.micro_batches[0].data for batch in loader]
        ids, values = (torch.cat([data[part] for data in found]).tolist() for part in (0, 1))
        return dict(zip(ids, values, strict=True))

    assert noise(4) == noise(2) == noise(12)
    assert len(set(noise(4).values())) == 7


# --- Data that changed since the checkpoint -----------------------------------------------------


class Printed(list[int]):
    """Numbers with a fingerprint of their own."""

    def fingerprint(self) -> list[str]:
        return [str(number) for number in self]


def state_after_two_steps(data: Any) -> dict[str, Any]:
    loader = Loader(data, FakeWorld(), batch_size=2, epochs=1)
    assert len(list(islice(loader, 2))) == 2
    return loader.state_dict()


def resumed(data: Any, state: dict[str, Any], accept_changes: bool = False) -> Loader:
    world, kind = FakeWorld(), {"batch_size": 2, "epochs": 1}
    loader = Loader(data, world, accept_changes=accept_changes, **kind)  # type: ignore[arg-type]
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("kind", [list, Printed])
def test_data_that_changed_since_the_checkpoint_are_refused(kind: type[list[int]]) -> None:
    state = state_after_two_steps(kind(range(8)))
    assert len(list(resumed(kind(range(8)), state))) == 2
    other = kind([*range(7), 70])
    with pytest.raises(
        ConfigError, match="the training data changed since the checkpoint"
    ) as caught:
        list(resumed(other, state))
    assert "pass Loader(accept_changes=True)" in caught.value.remedy


def test_changed_data_may_be_accepted_and_are_those_of_the_next_checkpoint() -> None:
    state = state_after_two_steps(list(range(8)))
    other = [*range(7), 70]
    accepting = resumed(other, state, accept_changes=True)
    assert len(list(islice(accepting, 1))) == 1
    assert len(list(resumed(other, accepting.state_dict()))) == 1


def test_a_state_of_an_earlier_version_says_nothing_of_the_data() -> None:
    state = state_after_two_steps(list(range(8)))
    del state["data"]
    assert len(list(resumed([*range(7), 70], state))) == 2


@pytest.mark.parametrize(
    ("variable", "rank", "is_in_run", "told"),
    [("1", 0, False, True), ("1", 1, False, False), ("1", 0, True, False), ("0", 0, False, False)],
)
def test_a_rehearsal_in_a_custom_loop_is_logged_once_by_the_first_rank(
    variable: str,
    rank: int,
    is_in_run: bool,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("LOCKSTEP_REHEARSAL", variable)
    world = FakeWorld(rank, 2)
    world.is_in_run = is_in_run
    for _ in range(2):  # one to train, one to validate
        Loader(range(800), world, batch_size=2, epochs=90)
    line = "rehearsal: the loop ends after 4 steps, because LOCKSTEP_REHEARSAL=1 is set"
    assert caplog.messages == ([line] if told else [])
