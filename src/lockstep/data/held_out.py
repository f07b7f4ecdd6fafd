"""This rank's batches of a held-out set.

Owns: how they are cut and shared out. Does not own: what is measured on them.
"""

import logging
from collections.abc import Iterator
from typing import Any

from lockstep.data.batch import MicroBatch
from lockstep.data.loader import LoaderConfig, read_leaves
from lockstep.data.order import Sequential, leaves_of
from lockstep.data.reader import Collate, build_reader
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
    borrows: bool = False,
) -> Iterator[MicroBatch]:
    """Yield this rank's share of a held-out set, each sample on exactly one rank.

    Batches are cut before they are shared out, so they are the same batches for
    every number of ranks. A rank that `borrows` has as many as any other: one that
    does not count comes first.
    """
    num_leaves = -(-len(dataset) // batch_size)
    plan = BatchPlan(len(dataset), batch_size, num_leaves, len(dataset), world.size)
    leaves = sorted(leaves_of(plan, 0, world.rank), key=lambda leaf: not leaf.borrowed)
    mine = [leaf for leaf in leaves if borrows or not leaf.borrowed]
    reader = build_reader(dataset, Sequential(len(dataset)), seed, collate, config.on_bad_sample)
    for micro_batch in read_leaves(reader, mine, config, world):
        skipped = (f"{reason}; left out" for _, reason in micro_batch.skipped)
        for said in (*micro_batch.faults, *skipped):
            _log.warning("rank %d, evaluation: %s", world.rank, said)
        yield micro_batch
