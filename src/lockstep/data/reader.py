"""Read and collate the samples of one leaf, or name the sample that cannot be read.

Owns: turning a leaf into a micro-batch, in a worker process or in this one. Does not own: worker
processes (`workers.py`). Before each sample the random generators are seeded by (seed, epoch,
sample). So augmentation repeats on resume and does not depend on the number of workers or ranks.
A data set that reads a leaf in one call (`__getitems__`) is seeded by the first sample.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, Subset

from lockstep.contents import contents_of
from lockstep.data.batch import MicroBatch
from lockstep.data.order import Ids, Leaf, Order, mix
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.randomness import derive_seed, seed_all, set_all, untouched

Collate = Callable[[list[Any]], Any]

WINDOW = 1024
"""The number of positions to look up at once: an order takes about as long for 16 as for 1024."""


NUM_TRIED = 64
"""The number of samples to try as a stand-in for a micro-batch without a good one."""


def is_stream(dataset: Any) -> bool:
    """Return whether a data set is a stream, which is read in order and has no index."""
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return isinstance(dataset, IterableDataset) or not indexed


def refuse_data_loader(dataset: Any) -> None:
    """Refuse a torch DataLoader, whose batches would be taken for samples."""
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            "the data are a torch DataLoader, but lockstep itself batches, shuffles and starts "
            "workers",
            "pass its data set (loader.dataset), and set batch.batch_size and loader.num_workers",
        )


@dataclass
class _Window:
    """The samples at consecutive positions of an epoch, and a seed for each."""

    epoch: int
    start: int
    ids: Ids
    seeds: list[int]

    def holds(self, leaf: Leaf) -> bool:
        stop = self.start + len(self.ids)
        return leaf.epoch == self.epoch and self.start <= leaf.start <= leaf.stop <= stop


@dataclass
class LeafReader:
    """Read one leaf from a data set that is indexed by sample."""

    dataset: Any
    order: Order
    seed: int
    collate: Collate
    on_bad_sample: str
    _window: _Window | None = None

    def __getitem__(self, leaf: Leaf) -> MicroBatch:
        with untouched():  # restores the generators of the training process
            return self.read(leaf)

    def read(self, leaf: Leaf) -> MicroBatch:
        """Read a leaf; this seeds the global generators."""
        ids, seeds = self._look_up(leaf)
        samples = self._in_one_call(leaf, ids)
        if samples is not None:
            return self._collated(leaf, ids, samples)
        return self._one_by_one(leaf, ids, seeds)

    def _one_by_one(self, leaf: Leaf, ids: Ids, seeds: list[int]) -> MicroBatch:
        """Read a leaf sample by sample, each with the generators seeded for it (10 us)."""
        samples, good, skipped = [], [], []
        for sample, seed in zip(ids.tolist(), seeds, strict=True):
            set_all(seed)
            try:
                samples.append(self.dataset[sample])
                good.append(sample)
            except Exception as error:  # name the sample, whatever the data set raises
                problem, remedy = _explain(self.dataset, sample, error)
                if self.on_bad_sample == "stop":
                    return MicroBatch(leaf, ids, None, error=(problem, remedy))
                skipped.append((sample, problem))
        kept = np.array(good, dtype=np.int64) if skipped else ids
        if samples:
            return self._collated(leaf, kept, samples, tuple(skipped))
        samples = self._stand_in(leaf)
        if not samples:
            problem = (
                f"every sample of a micro-batch was bad, and so were the next {NUM_TRIED}; the "
                f"first because {skipped[0][1]}"
            )
            remedy = "check the data set before you continue with on_bad_sample=skip"
            return MicroBatch(leaf, ids, None, error=(problem, remedy))
        return replace(self._collated(leaf, kept, samples, tuple(skipped)), is_stand_in=True)

    def _stand_in(self, leaf: Leaf) -> list[Any]:
        """Return as many good samples as a leaf has, or fewer, from the positions after it."""
        num_samples = getattr(self.order, "num_samples", len(self.dataset))
        samples: list[Any] = []
        for position in range(leaf.stop, leaf.stop + min(num_samples, NUM_TRIED)):
            start = position % num_samples
            ids = self.order.ids(leaf.epoch, start, start + 1)
            set_all(*sample_seeds(self.seed, leaf.epoch, ids))
            with suppress(Exception):
                samples.append(self.dataset[int(ids[0])])
            if len(samples) == leaf.stop - leaf.start:
                break
        return samples

    def _in_one_call(self, leaf: Leaf, ids: Ids) -> list[Any] | None:
        """Read a leaf with `__getitems__`; return None if the data set has none, or it fails."""
        if not hasattr(self.dataset, "__getitems__") or isinstance(self.dataset, Subset):
            return None  # a Subset has it, but reads samples one by one
        seed_all(self.seed, "samples", leaf.epoch, int(ids[0]))
        try:
            samples = list(self.dataset.__getitems__(ids.tolist()))
            return samples if len(samples) == len(ids) else None
        except Exception:  # reading one by one will name the bad sample
            return None

    def _look_up(self, leaf: Leaf) -> tuple[Ids, list[int]]:
        """Return a leaf's samples and their seeds; keep those of the next leaves for later."""
        window = self._window
        if window is None or not window.holds(leaf):
            num_samples = getattr(self.order, "num_samples", len(self.dataset))
            stop = max(min(leaf.start + WINDOW, num_samples), leaf.stop)
            ids = self.order.ids(leaf.epoch, leaf.start, stop)
            seeds = sample_seeds(self.seed, leaf.epoch, ids)
            self._window = window = _Window(leaf.epoch, leaf.start, ids, seeds)
        here = slice(leaf.start - window.start, leaf.stop - window.start)
        return window.ids[here], window.seeds[here]

    def _collated(
        self, leaf: Leaf, ids: Ids, samples: list[Any], skipped: tuple[tuple[int, str], ...] = ()
    ) -> MicroBatch:
        try:
            return MicroBatch(leaf, ids, self.collate(samples), skipped)
        except Exception as error:  # returned, not raised, so that all ranks can fail together
            names = names_of(self.dataset, ids)
            problem = f"cannot make a batch of {names}: {type(error).__name__}: {error}"
            remedy = "return samples of the same shape and keys, or pass another collate"
            return MicroBatch(leaf, ids, None, error=(problem, remedy))


@dataclass
class StreamReader(LeafReader):
    """Read leaves from an iterable: every rank reads all samples and keeps its own.

    A stream that ends is read again from the start. A resumed run reads the samples before its
    position again.
    """

    num_printed: int = 0
    """The number of samples at the start of the stream whose contents to keep."""
    contents: dict[str, list[Any]] = field(default_factory=dict)
    """The contents of these samples, by position."""
    _position: int = 0
    _samples: Iterator[Any] | None = None

    def read(self, leaf: Leaf) -> MicroBatch:
        """Read up to the end of a leaf; this seeds the global generators."""
        if leaf.start < self._position:  # a step is repeated
            if self._samples is self.dataset:
                problem = "a step must be repeated, but an iterator cannot start again"
                raise DataError(problem, "pass an object with __iter__ instead of an iterator")
            self._samples = None
            self._position = 0
        samples = []
        while self._position < leaf.stop:
            set_all(*sample_seeds(self.seed, leaf.epoch, np.array([self._position])))
            try:
                sample = self._next()
            except Exception as error:
                message = _explain(self.dataset, self._position, error)
                return MicroBatch(leaf, np.array([], dtype=np.int64), None, error=message)
            if self._position < self.num_printed:  # before collate, which may change it in place
                self.contents[str(self._position)] = contents_of(sample)
            if self._position >= leaf.start:
                samples.append(sample)
            self._position += 1
        return self._collated(leaf, np.arange(leaf.start, leaf.stop, dtype=np.int64), samples)

    def _next(self) -> Any:
        for _ in range(2):
            if self._samples is None:
                self._samples = iter(self.dataset)
            for sample in self._samples:
                return sample
            self._samples = None
        problem = "the stream of training samples is empty, or is an iterator at its end"
        raise DataError(problem, "check its source, or pass an object with __iter__")


def build_reader(
    dataset: Any, order: Order, seed: int, collate: Collate, on_bad_sample: str
) -> LeafReader:
    """Return the reader for a data set with an index, or for a stream."""
    kind = StreamReader if is_stream(dataset) else LeafReader
    return kind(dataset, order, seed, collate, on_bad_sample)


def sample_seeds(seed: int, epoch: int, ids: Ids) -> list[int]:
    """Return the seed of the generators for each sample; `derive_seed` for each would take 2 us."""
    key = np.uint64(derive_seed(seed, "sample", epoch))
    seeds: list[int] = (mix(ids.astype(np.uint64) ^ key) >> np.uint64(1)).tolist()
    return seeds


def _explain(dataset: Any, sample: int, error: Exception) -> tuple[str, str]:
    """Return problem and remedy for a bad sample, with the data set's name for it."""
    if isinstance(error, LockstepError):
        return error.problem, error.remedy
    return (
        f"{_name(dataset, sample)} cannot be read: {type(error).__name__}: {error}",
        "fix or remove it" + ("" if is_stream(dataset) else ", or set on_bad_sample=skip"),
    )


def names_of(dataset: Any, ids: Ids) -> str:
    """Return the names of the first eight samples."""
    return ", ".join(_name(dataset, sample) for sample in ids.tolist()[:8])


def _name(dataset: Any, sample: int) -> str:
    try:
        return str(dataset.describe(sample))
    except Exception:  # no names, or none for a bad sample
        return f"sample {sample}"
