"""An order that puts samples of similar length into one micro-batch.

Owns: the permutation of an epoch. Does not own: padding. Like every order it is a function of
(seed, epoch) and the data, the same on any number of ranks, and computable from any position.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.data.order import Ids, Shuffled
from lockstep.randomness import derive_seed


@dataclass(frozen=True, slots=True)
class Grouped:
    """Sort windows of a shuffled epoch by length, split them into leaves, shuffle the leaves.

    A larger window needs less padding, but seeking takes longer, because it sorts one window.
    Samples that do not fill a leaf stay unsorted at the end of the epoch, so that `drop_last`
    does not depend on the length of samples.

    >>> order = Grouped(np.array([5, 1, 9, 2, 6, 8]), batch_size=2, seed=0)
    >>> sorted(order.ids(epoch=3, start=0, stop=6).tolist())
    [0, 1, 2, 3, 4, 5]
    """

    lengths: NDArray[np.int64]
    batch_size: int
    seed: int
    window_leaves: int = 64

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Return the sample ids at positions `start` to `stop` of `epoch`."""
        size = self.batch_size * self.window_leaves
        first = start // size * size
        begins = range(first, min(stop, len(self.lengths)), size)
        windows = [self._window(epoch, begin, size) for begin in begins]
        found = np.concatenate([*windows, np.array([], dtype=np.int64)])
        return found[start - first : stop - first]

    def _window(self, epoch: int, begin: int, size: int) -> Ids:
        end = min(begin + size, len(self.lengths))
        shuffled = Shuffled(len(self.lengths), self.seed).ids(epoch, begin, end)
        num_leaves = (end - begin) // self.batch_size
        whole, rest = np.split(shuffled, [num_leaves * self.batch_size])
        leaves = whole[np.argsort(self.lengths[whole], kind="stable")].reshape(
            num_leaves, self.batch_size
        )
        key = derive_seed(self.seed, "leaves", epoch, begin)
        mixed = np.random.default_rng(key).permutation(num_leaves)
        return np.concatenate([leaves[mixed].ravel(), rest])
