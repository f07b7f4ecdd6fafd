"""The ledger: a digest of the samples consumed, over all ranks, kills and resumes.

Owns: the digest. Does not own: the order that it is compared with.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor, tensor

from lockstep.data.order import Ids, Order, Sequential, Shuffled, mix
from lockstep.plan import BatchPlan
from lockstep.randomness import derive_seed


@dataclass(unsafe_hash=True)
class Ledger:
    """A running digest of the (epoch, sample) pairs consumed since the epoch began.

    It is a sum of hashes, so it does not depend on the order of samples, and the ledgers of ranks
    can be added.
    """

    digest: int = 0
    count: int = 0

    def add(self, epoch: int, ids: Ids) -> None:
        """Count `ids` as consumed in `epoch`."""
        key = np.uint64(derive_seed("ledger", epoch))
        with np.errstate(over="ignore"):
            self.digest += int(mix(ids.astype(np.uint64) ^ key).sum(dtype=np.uint64))
        self.digest %= 2**64
        self.count += len(ids)

    def plus(self, local: "Ledger", all_sum: Callable[[Tensor], Tensor]) -> "Ledger":
        """Return this ledger with every rank's local entries added.

        64-bit sums wrap around the same way in any order, so ranks add up exactly.
        """
        signed = local.digest - 2**64 if local.digest >= 2**63 else local.digest
        digest, count = all_sum(tensor([signed, local.count])).tolist()
        return Ledger((self.digest + digest) % 2**64, self.count + count)

    @classmethod
    def of_epoch(
        cls, order: Order, plan: BatchPlan, epoch: int, end: int | None = None
    ) -> "Ledger":
        """Return the expected ledger of `epoch`, complete or up to position `end`.

        If the epoch drops no samples, it is every sample once, whatever the order returns. If it
        drops some, each sample counts only once, so that an order that repeats one is detected.
        """
        end = plan.samples_per_epoch if end is None else end
        if end == plan.num_samples:
            order = Sequential(plan.num_samples)
        is_trusted = type(order) in (Sequential, Shuffled)
        visited = np.zeros(0 if is_trusted else plan.num_samples, dtype=bool)
        ledger = cls()
        for start in range(0, end, 1 << 20):
            stop = min(start + (1 << 20), end)
            ids = order.ids(epoch, start, stop)
            ledger.add(epoch, ids)
            if not is_trusted:
                visited[ids] = True
        if not is_trusted:
            ledger.count = int(visited.sum())
        return ledger

    def __str__(self) -> str:
        return f"{self.digest:016x}"
