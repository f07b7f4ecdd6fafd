"""Read one leaf: its samples, collated, or the name of the one that cannot be read.

Owns: what happens between a leaf and a micro-batch, in a worker process or in
this one. Every sample is read with the random generators seeded by (seed,
epoch, sample), so augmentation repeats on resume and depends neither on the
number of workers nor on the number of ranks; where a data set reads a leaf in one
call (`__getitems__`), by the first sample of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset

from lockstep.data.batch import MicroBatch
from lockstep.data.contents import contents_of
from lockstep.data.order import Ids, Leaf, Order, mix
from lockstep.errors import DataError, LockstepError
from lockstep.randomness import derive_seed, others_were_used, seed_all, set_all, untouched

Collate = Callable[[list[Any]], Any]

WINDOW = 1024
"""How many positions are looked up at once: 16 cost an order nearly as much."""


def is_stream(dataset: Any) -> bool:
    """Say whether samples can only be had one after the other."""
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return isinstance(dataset, IterableDataset) or not indexed


@dataclass
class LeafReader:
    """Read one leaf from a data set that is indexed by sample."""

    dataset: Any
    order: Order
    seed: int
    collate: Collate
    on_bad_sample: str
    _ahead: tuple[int, int, Ids, list[int]] = (0, 0, np.array([], dtype=np.int64), [])
    """An epoch, a position in it, and the samples from there on, with their seeds."""
    _draws: bool | None = None
    """Whether samples draw from NumPy or Python's `random`; None until the first leaf."""
    _seeded = 0
    """What these two were seeded by last."""

    def __getitem__(self, leaf: Leaf) -> MicroBatch:
        with untouched():  # in this process the caller's generators are not ours to move
            return self.read(leaf)

    def read(self, leaf: Leaf) -> MicroBatch:
        """Read a leaf, moving the global generators."""
        ids, _ = wanted = self._looked_up(leaf)
        if (all_of_it := self._at_once(leaf, ids)) is not None:
            return self._collated(leaf, ids, all_of_it)
        known, micro_batch = self._draws, self._one_by_one(leaf, *wanted)
        if not known:
            self._draws = others_were_used(self._seeded)
        return self._one_by_one(leaf, *wanted) if known is False and self._draws else micro_batch

    def _one_by_one(self, leaf: Leaf, ids: Ids, seeds: list[int]) -> MicroBatch:
        """Read a leaf sample by sample.

        Where no sample has drawn from NumPy or Python's `random`, these are seeded once a leaf.
        Should one do so after all, its leaf is read again. Torch is seeded for each sample: one
        may ask for the seed, and draw by itself.
        """
        samples, good, skipped = [], [], []
        for index, (sample, seed) in enumerate(zip(ids.tolist(), seeds, strict=True)):
            if index and self._draws is False:
                torch.default_generator.manual_seed(seed)
            else:
                set_all(seed)
                self._seeded = seed
            try:
                samples.append(self.dataset[sample])
                good.append(sample)
            except Exception as error:  # whatever a data set raises, the sample is named
                problem, remedy = _explain(self.dataset, sample, error)
                if self.on_bad_sample == "stop":
                    return MicroBatch(leaf, ids, None, error=(problem, remedy))
                skipped.append((sample, problem))
        if not samples:
            problem = f"every sample of a micro-batch was bad, the first because {skipped[0][1]}"
            remedy = "look at the data set as a whole before skipping on"
            return MicroBatch(leaf, ids, None, error=(problem, remedy))
        kept = np.array(good, dtype=np.int64) if skipped else ids
        return self._collated(leaf, kept, samples, tuple(skipped))

    def _at_once(self, leaf: Leaf, ids: Ids) -> list[Any] | None:
        """Read a leaf in one call where the data set offers it; None if not, or if that fails."""
        if not hasattr(self.dataset, "__getitems__") or isinstance(self.dataset, Subset):
            return None  # a subset would offer it, and read one by one itself
        seed_all(self.seed, "samples", leaf.epoch, int(ids[0]))
        try:
            samples = list(self.dataset.__getitems__(ids.tolist()))
            return samples if len(samples) == len(ids) else None
        except Exception:  # one by one, the bad one will be named
            return None

    def _looked_up(self, leaf: Leaf) -> tuple[Ids, list[int]]:
        """Return a leaf's samples and their seeds, looking up those of the next ones with them."""
        epoch, start, ids, _ = self._ahead
        if leaf.epoch != epoch or not start <= leaf.start <= leaf.stop <= start + len(ids):
            num_samples = getattr(self.order, "num_samples", len(self.dataset))  # or fewer
            start, stop = leaf.start, min(leaf.start + WINDOW, num_samples)
            ids = self.order.ids(leaf.epoch, start, max(stop, leaf.stop))
            self._ahead = leaf.epoch, start, ids, sample_seeds(self.seed, leaf.epoch, ids)
        here = slice(leaf.start - start, leaf.stop - start)
        return ids[here], self._ahead[3][here]

    def _collated(
        self, leaf: Leaf, ids: Ids, samples: list[Any], skipped: tuple[tuple[int, str], ...] = ()
    ) -> MicroBatch:
        try:
            return MicroBatch(leaf, ids, self.collate(samples), skipped)
        except Exception as error:  # likewise: raised here, it would be one rank's alone
            names = names_of(self.dataset, ids)
            problem = f"cannot make a batch of {names}: {type(error).__name__}: {error}"
            return MicroBatch(leaf, ids, None, error=(problem, "samples alike, or another collate"))


@dataclass
class StreamReader(LeafReader):
    """Read leaves off an iterable: all ranks walk along it, each keeps its own positions.

    A stream that ends begins again. Going on after a resume walks past what was
    consumed, which costs reading it.
    """

    num_printed: int = 0
    """How many samples from the start of the stream to keep the contents of."""
    contents: dict[str, list[Any]] = field(default_factory=dict)
    """These contents, by position."""
    _position: int = 0
    _samples: Iterator[Any] | None = None

    def read(self, leaf: Leaf) -> MicroBatch:
        """Walk on to the end of a leaf, moving the global generators."""
        if leaf.start < self._position:  # a step is taken again
            if self._samples is self.dataset:
                problem = (
                    "a step must be repeated, and an iterator cannot start again from its beginning"
                )
                raise DataError(problem, "pass an object with __iter__ in place of an iterator")
            self._samples, self._position = None, 0
        samples = []
        while self._position < leaf.stop:
            set_all(*sample_seeds(self.seed, leaf.epoch, np.array([self._position])))
            try:
                sample = self._next()
            except Exception as error:
                story = _explain(self.dataset, self._position, error)
                return MicroBatch(leaf, np.array([], dtype=np.int64), None, error=story)
            if self._position < self.num_printed:  # now: a collate may change it in place
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
        problem = "the stream of training samples is empty, or an iterator at its end"
        raise DataError(problem, "check where it reads from, or an object with __iter__")


def build_reader(
    dataset: Any, order: Order, seed: int, collate: Collate, on_bad_sample: str
) -> LeafReader:
    """Return the reader that fits a data set: by index, or along a stream."""
    kind = StreamReader if is_stream(dataset) else LeafReader
    return kind(dataset, order, seed, collate, on_bad_sample)


def sample_seeds(seed: int, epoch: int, ids: Ids) -> list[int]:
    """Return what the generators are seeded by for each sample; a hash of each would take 2 us."""
    key = np.uint64(derive_seed(seed, "sample", epoch))
    seeds: list[int] = (mix(ids.astype(np.uint64) ^ key) >> np.uint64(1)).tolist()
    return seeds


def _explain(dataset: Any, sample: int, error: Exception) -> tuple[str, str]:
    """Say which sample is bad, by the name its data set has for it."""
    if isinstance(error, LockstepError):
        return error.problem, error.remedy
    return (
        f"{_name(dataset, sample)} cannot be read: {type(error).__name__}: {error}",
        "mend or remove it" + ("" if is_stream(dataset) else ", or on_bad_sample=skip"),
    )


def names_of(dataset: Any, ids: Ids) -> str:
    """Name the first few of some samples."""
    return ", ".join(_name(dataset, sample) for sample in ids.tolist()[:8])


def _name(dataset: Any, sample: int) -> str:
    try:
        return str(dataset.describe(sample))
    except Exception:  # it has no names, or none for a bad sample: that is not what is to be told
        return f"sample {sample}"
