"""A batch iterator whose whole state is one integer: the samples consumed.

Owns: reading leaves (micro-batches) in order, in worker processes or here, and
handing them out a step at a time. Does not own: the order itself, or the copy
to the device. Every sample is read with the random generators seeded by
(seed, epoch, sample), so augmentation repeats on resume and depends neither on
the number of workers nor on the number of ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt
from torch.utils.data import DataLoader, default_collate, get_worker_info

from lockstep.data.feed import pin, to_device
from lockstep.data.order import Ids, Leaf, Order, Sequential, Shuffled, consumed_after, leaves_of, step_of
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.plan import BatchConfig, BatchPlan, plan_batches
from lockstep.randomness import seed_all, untouched
from lockstep.runtime import World

Collate = Callable[[Sequence[Any]], Any]
STREAM_LENGTH = 2**62
"""A stream is one endless epoch, in which a sample's id is its position."""


class LoaderConfig(BaseModel):
    """How samples are read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_workers: NonNegativeInt = 0
    prefetch: PositiveInt = 2
    on_bad_sample: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One leaf, read: the collated data and the ids of the samples in it."""

    leaf: Leaf
    ids: Ids
    data: Any
    skipped: tuple[tuple[int, str], ...] = ()
    error: tuple[str, str] | None = None

    @property
    def counts(self) -> bool:
        """Say whether this micro-batch adds to the step; a borrowed one only keeps company."""
        return not self.leaf.borrowed

    @property
    def visited(self) -> Ids:
        """Return every sample that was tried, bad ones included: what the ledger counts."""
        return np.concatenate([self.ids, np.array([s for s, _ in self.skipped], dtype=np.int64)])

    def pin_memory(self) -> "MicroBatch":
        """Move the data to page-locked memory; torch's loader calls this."""
        return replace(self, data=pin(self.data))


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one rank computes in one step."""

    step: int
    epoch: int
    micro_batches: list[MicroBatch]
    consumed: int
    """Samples the whole run has consumed once this step is done."""


class Loader:
    """Iterate over the steps of a run: `for batch in Loader(dataset, world, batch_size=32)`.

    Give `plan` or `batch_size`. Set `consumed` (a checkpoint holds it) to go on
    where a run stopped: reading seeks there, nothing is read again.
    """

    def __init__(
        self,
        dataset: Any,
        world: World,
        *,
        batch_size: int = 32,
        plan: BatchPlan | None = None,
        epochs: int | None = None,
        total_steps: int | None = None,
        seed: int = 0,
        order: Order | None = None,
        collate: Collate = default_collate,
        config: LoaderConfig | None = None,
    ) -> None:
        self.plan = plan or plan_for(dataset, BatchConfig(batch_size=batch_size), world.size)
        if total_steps is None and is_stream(dataset):
            raise ConfigError("a data set without length has no epochs to count", "total_steps=1000")
        self.total_steps = total_steps or (epochs or 1) * self.plan.steps_per_epoch
        self.order = order or (
            Sequential(STREAM_LENGTH) if is_stream(dataset) else Shuffled(self.plan.num_samples, seed)
        )
        self.consumed = 0
        self._world = world
        self._config = config or LoaderConfig()
        self._reader = _reader(dataset, self.order, seed, collate, self._config.on_bad_sample)

    def __len__(self) -> int:
        """Return the steps that are left."""
        return self.total_steps - step_of(self.plan, self.consumed)

    def __iter__(self) -> Iterator[StepBatch]:
        first = step_of(self.plan, self.consumed)
        steps = range(first, self.total_steps)
        rank = self._world.rank
        leaves = (leaf for step in steps for leaf in leaves_of(self.plan, step, rank))
        read = _read(self._reader, leaves, self._config, self._world)
        for step in steps:
            mine = [next(read) for _ in leaves_of(self.plan, step, rank)]
            consumed = consumed_after(self.plan, step)
            # Consumed, not fetched: whoever saves inside the loop body has trained on this step.
            self.consumed = consumed
            yield StepBatch(step, mine[0].leaf.epoch, mine, consumed)


def read_held_out(
    dataset: Any, batch_size: int, world: World, seed: int, collate: Collate, config: LoaderConfig
) -> Iterator[MicroBatch]:
    """Yield this rank's share of a held-out set, each sample on exactly one rank.

    Batches are cut before they are shared out, so they are the same batches for
    every number of ranks.
    """
    num_leaves = -(-len(dataset) // batch_size)
    plan = BatchPlan(len(dataset), batch_size, num_leaves, len(dataset), world.size)
    mine = [leaf for leaf in leaves_of(plan, 0, world.rank) if not leaf.borrowed]
    order = Sequential(len(dataset))
    reader = _reader(dataset, order, seed, collate, config.on_bad_sample)
    return _read(reader, iter(mine), config, world)


def plan_for(dataset: Any, batch: BatchConfig, world_size: int) -> BatchPlan:
    """Return the batch plan for a data set; a stream counts as one endless epoch."""
    if not is_stream(dataset):
        return plan_batches(batch, len(dataset), world_size)
    plan = plan_batches(batch, STREAM_LENGTH, world_size)
    return replace(plan, num_samples=STREAM_LENGTH, samples_per_epoch=STREAM_LENGTH)


def is_stream(dataset: Any) -> bool:
    """Say whether samples can only be had one after the other."""
    return not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


def _read(
    reader: "_LeafReader", leaves: Iterable[Leaf], config: LoaderConfig, world: World
) -> Iterator[MicroBatch]:
    """Read leaves in worker processes, a few ahead, and move them to the device."""
    num_workers = 0 if isinstance(reader, _StreamReader) else config.num_workers
    micro_batches: Iterable[MicroBatch] = DataLoader(
        reader,  # type: ignore[arg-type]  # indexed by leaf, not by integer
        sampler=leaves,  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=_as_is,
        num_workers=num_workers,
        prefetch_factor=config.prefetch if num_workers else None,
        pin_memory=world.device.type == "cuda",
    )
    for micro_batch in micro_batches:
        if micro_batch.error is not None:
            raise DataError(*micro_batch.error)
        yield replace(micro_batch, data=to_device(micro_batch.data, world.device))


def _as_is(micro_batch: MicroBatch) -> MicroBatch:
    return micro_batch


@dataclass
class _LeafReader:
    """Read one leaf from a data set that is indexed by sample."""

    dataset: Any
    order: Order
    seed: int
    collate: Collate
    on_bad_sample: str

    def __getitem__(self, leaf: Leaf) -> MicroBatch:
        if get_worker_info() is not None:
            return self._read(leaf)
        with untouched():  # in this process the caller's generators are not ours to move
            return self._read(leaf)

    def _read(self, leaf: Leaf) -> MicroBatch:
        ids = self.order.ids(leaf.epoch, leaf.start, leaf.stop)
        samples, good, skipped = [], [], []
        for sample in ids.tolist():
            seed_all(self.seed, "sample", leaf.epoch, sample)
            try:
                samples.append(self.dataset[sample])
                good.append(sample)
            except Exception as error:  # whatever a data set raises, the sample is named
                problem, remedy = _explain(self.dataset, sample, error)
                if self.on_bad_sample == "stop":
                    return MicroBatch(leaf, ids, None, error=(problem, remedy))
                skipped.append((sample, problem))
        if not samples:
            return MicroBatch(leaf, ids, None, error=_nothing_left(leaf, skipped))
        kept = np.array(good, dtype=np.int64)
        return MicroBatch(leaf, kept, self.collate(samples), tuple(skipped))


class _StreamReader(_LeafReader):
    """Read leaves off an iterable: all ranks walk along it, each keeps its own positions.

    A stream that ends begins again. Going on after a resume walks past what was
    consumed, which costs reading it.
    """

    _position = 0
    _samples: Iterator[Any] | None = None

    def _read(self, leaf: Leaf) -> MicroBatch:
        samples = []
        while self._position < leaf.stop:
            sample = self._next()
            if self._position >= leaf.start:
                samples.append(sample)
            self._position += 1
        ids = np.arange(leaf.start, leaf.stop, dtype=np.int64)
        return MicroBatch(leaf, ids, self.collate(samples))

    def _next(self) -> Any:
        for _ in range(2):
            if self._samples is None:
                self._samples = iter(self.dataset)
            for sample in self._samples:
                return sample
            self._samples = None
        raise DataError("the stream of training samples is empty", "check where it reads from")


def _reader(
    dataset: Any, order: Order, seed: int, collate: Collate, on_bad_sample: str
) -> _LeafReader:
    kind = _StreamReader if is_stream(dataset) else _LeafReader
    return kind(dataset, order, seed, collate, on_bad_sample)


def _explain(dataset: Any, sample: int, error: Exception) -> tuple[str, str]:
    """Say which sample is bad, by the name its data set has for it."""
    if isinstance(error, LockstepError):
        return error.problem, error.remedy
    name = dataset.describe(sample) if hasattr(dataset, "describe") else f"sample {sample}"
    return (
        f"{name} cannot be read: {type(error).__name__}: {error}",
        "mend or remove it, or on_bad_sample=skip",
    )


def _nothing_left(leaf: Leaf, skipped: list[tuple[int, str]]) -> tuple[str, str]:
    return (
        f"every sample of a micro-batch was bad, the first because {skipped[0][1]}",
        "look at the data set as a whole before skipping on",
    )
