"""This rank's batches of a held-out set.

Owns: the batches, and the rank of each. Does not own: what is measured on them.
"""

import logging
from collections.abc import Iterator
from typing import Any

from lockstep.data.batch import MicroBatch
from lockstep.data.loader import read_leaves
from lockstep.data.order import Sequential, leaves_of
from lockstep.data.reader import Collate, build_reader
from lockstep.data.workers import LoaderConfig
from lockstep.dist.collectives import Collectives
from lockstep.plan import BatchPlan

_log = logging.getLogger("lockstep")


def read_held_out(
    dataset: Any,
    batch_size: int,
    world: Collectives,
    seed: int,
    collate: Collate,
    config: LoaderConfig,
    pads: bool = False,
) -> Iterator[MicroBatch]:
    """Yield this rank's share of a held-out set, each sample on exactly one rank.

    Batches do not depend on the number of ranks. If `pads` is true, all ranks get the same number
    of batches: on some ranks a padding batch, which does not count, comes first.
    """
    num_leaves = -(-len(dataset) // batch_size)
    plan = BatchPlan(len(dataset), batch_size, num_leaves, len(dataset), world.size)
    leaves = sorted(leaves_of(plan, 0, world.rank), key=lambda leaf: not leaf.is_padding)
    mine = [leaf for leaf in leaves if pads or not leaf.is_padding]
    reader = build_reader(dataset, Sequential(len(dataset)), seed, collate, config.on_bad_sample)
    for micro_batch in read_leaves(reader, mine, config, world):
        skipped = (f"{reason}; skipped" for _, reason in micro_batch.skipped)
        for message in (*micro_batch.faults, *skipped):
            _log.warning("rank %d, evaluation: %s", world.rank, message)
        yield micro_batch
