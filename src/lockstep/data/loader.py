"""A batch iterator whose only state is one integer: the samples consumed.

Owns: reading leaves (micro-batches) in order, in worker processes or in this one, and yielding
them step by step. Does not own: the order, reading a leaf, the copy to the device.
"""

import logging
import math
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import default_collate

from lockstep.data.batch import MicroBatch, StepBatch
from lockstep.data.feed import to_device
from lockstep.data.fingerprint import (
    NUM_SAMPLES,
    check_same_samples,
    differences,
    is_full_fingerprint_due,
    take_fingerprint,
)
from lockstep.data.order import (
    Leaf,
    Order,
    Sequential,
    Shuffled,
    consumed_after,
    leaves_of,
    num_leaves_of,
    step_of,
)
from lockstep.data.reader import (
    Collate,
    LeafReader,
    StreamReader,
    build_reader,
    is_stream,
    refuse_data_loader,
)
from lockstep.data.workers import LoaderConfig, read_in_workers
from lockstep.dist.agreement import check_same, first_of_ranks
from lockstep.dist.collectives import Collectives
from lockstep.dist.environment import is_rehearsal
from lockstep.errors import (
    ConfigError,
    DataError,
    LockstepError,
    OutOfMemoryError,
    own_exit_code,
)
from lockstep.plan import MAX_COUNT, BatchConfig, BatchPlan, SplitChange, plan_batches, plan_change

if TYPE_CHECKING:
    from lockstep.world import World

_log = logging.getLogger("lockstep")

STREAM_LENGTH = MAX_COUNT
"""A stream is one endless epoch, in which a sample's id is its position."""
SAME_DATA = (
    "seed before building the data (torch.manual_seed(0)), or build it once and load it from a "
    "file; sort file lists"
)
SAME_STREAM = (
    "draw random numbers from the global generators of torch, NumPy or Python, which are seeded "
    "for each sample, or give the stream's own generator a fixed seed"
)


class Loader:
    """Iterate over the steps of a run: `for batch in Loader(dataset, world, batch_size=32)`.

    Every rank must iterate. Ranks that begin at different steps, or with different samples, are
    refused.

    Pass `plan` or `batch_size`. To continue where a run stopped, call `load_state_dict`, or
    `seek`: samples before that position are not read.

    A resume on a different number of ranks may split a step into other micro-batches. `train_step`
    refuses them if that changes the loss, unless `accept_changes` is true. Likewise the first
    iteration after a resume refuses data that changed since the checkpoint.

    With LOCKSTEP_REHEARSAL=1 a custom loop is two epochs of two steps, and the first rank says so.
    """

    def __init__(
        self,
        dataset: Any,
        world: "World",
        *,
        batch_size: int = 32,
        plan: BatchPlan | None = None,
        epochs: int | None = None,
        max_steps: int | None = None,
        seed: int = 0,
        order: Order | None = None,
        collate: Collate = default_collate,
        config: LoaderConfig | None = None,
        accept_changes: bool = False,
    ) -> None:
        refuse_data_loader(dataset)
        is_shortened = is_rehearsal() and not world.is_in_run
        if is_shortened:
            plan, epochs, max_steps = _rehearsed(dataset, batch_size, plan, world.size)
        self._accepts_changes = accept_changes
        self._changed_split: SplitChange | None = None
        self.plan = plan or plan_for(dataset, BatchConfig(batch_size=batch_size), world.size)
        if max_steps is None and is_stream(dataset):
            raise ConfigError(
                "a data set without length has no epochs to count", "set max_steps=1000"
            )
        if max_steps is None and epochs is None:
            raise ConfigError("neither epochs nor max_steps is set", "set one of them: epochs=10")
        self._epochs = epochs
        self._max_steps = max_steps
        shuffled = Shuffled(self.plan.num_samples, seed)
        self.order = order or (Sequential(STREAM_LENGTH) if is_stream(dataset) else shuffled)
        self.dataset = dataset
        self._world = world
        self.consumed = 0
        self._shift = 0
        """Steps taken so far, minus those that the current plan needs for `consumed` samples."""
        self._config = config or LoaderConfig()
        self._reader = build_reader(dataset, self.order, seed, collate, self._config.on_bad_sample)
        self._fingerprint: dict[str, Any] | None = None
        """The fingerprint of the data, taken once; see `take_fingerprint`."""
        self._saved_fingerprint: dict[str, Any] = {}
        """The checkpoint's fingerprint of the data, until the data are compared with it."""
        self.is_compared = world.size == 1
        """Whether ranks are known to see the same samples."""
        if isinstance(self._reader, StreamReader) and not self.is_compared:
            self._reader.num_printed = NUM_SAMPLES
        if is_shortened:
            world.report_rehearsal(f"the loop ends after {self.total_steps} steps")

    def __len__(self) -> int:
        """Return the number of remaining steps."""
        return max(0, self.total_steps - self.step)

    @property
    def total_steps(self) -> int:
        """Return the length of the run in steps, by epochs or steps, whichever ends first."""
        steps = math.inf if self._max_steps is None else self._max_steps
        epochs = math.inf if self._epochs is None else self._epochs
        return int(min(steps, epochs * self.plan.steps_per_epoch + self._shift))

    @property
    def step(self) -> int:
        """Return the number of steps that have been yielded."""
        return step_of(self.plan, self.consumed) + self._shift

    @property
    def at_epoch_end(self) -> bool:
        """Return whether the last yielded step was the last of its epoch."""
        return self.consumed > 0 and self.consumed % self.plan.samples_per_epoch == 0

    def consumed_before(self, step: int) -> int:
        """Return the number of samples that are consumed after `step` steps."""
        own = step - self._shift
        return consumed_after(self.plan, own - 1) if own else 0

    def seek(self, step: int, consumed: int) -> None:
        """Continue after `step` steps and `consumed` samples.

        `step` follows from `consumed`, unless an earlier part of the run had another batch size.
        """
        self.consumed = consumed
        self._shift = step - step_of(self.plan, consumed)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the plan, seed and data fingerprint that it refers to.

        In a custom loop it also contains the states of the callbacks.
        """
        facts = {
            "plan": asdict(self.plan),
            "seed": self._reader.seed,
            "data": self._take_fingerprint(),
        }
        loop = self._world.custom_loop
        states = {"callbacks": loop.state_dict()} if loop is not None else {}
        return {"step": self.step, "consumed": self.consumed, **facts, **states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state_dict`, with the same global batch.

        The first iteration compares the data with the checkpoint's fingerprint, if it has one.

        Raises:
            ConfigError: if samples, batch size or seed have changed since.
        """
        seeds = ("seed", state.get("seed", self._reader.seed), self._reader.seed)
        stored = BatchPlan.from_json(state["plan"])
        start_over = "use another folder to start from scratch"
        if changed := plan_change(stored, self.plan, seeds, instead=start_over):
            raise ConfigError(*changed)
        self.plan = stored.on_ranks(self.plan.world_size)
        if self.plan.leaf_size != stored.leaf_size and self._world.is_first:
            _log.warning(
                "resumed on %d ranks instead of %d: micro-batches of %d samples instead of %d, "
                "still %d samples a step",
                self.plan.world_size,
                stored.world_size,
                self.plan.leaf_size,
                stored.leaf_size,
                self.plan.global_batch,
            )
        if not self._accepts_changes:
            change = SplitChange(stored, self.plan)
            self._changed_split = change if change.matters else None
        self._saved_fingerprint = state.get("data", {})
        self._fingerprint = None  # take it again, of the samples in the checkpoint's fingerprint
        self.seek(state["step"], state["consumed"])
        if self._world.custom_loop is not None:
            self._world.custom_loop.load_state_dict(state.get("callbacks", {}))

    def __iter__(self) -> Iterator[StepBatch]:
        self._begin_together()
        steps = range(self.step, self.total_steps)
        rank = self._world.rank
        loop = self._world.custom_loop
        plan = self.plan
        shift = self._shift
        wanted = (leaf for step in steps for leaf in leaves_of(plan, step - shift, rank))
        read = read_leaves(self._reader, wanted, self._config, self._world)
        for step in steps:
            num_leaves = num_leaves_of(plan, step - shift)
            with self._world.phase("data"):
                mine = self._read_step(read, math.ceil(num_leaves / plan.world_size))
            # Count the samples before yielding: a save inside the loop body has trained on them.
            self.consumed = consumed_after(plan, step - shift)
            epoch = mine[0].leaf.epoch
            batch = StepBatch(step, epoch, mine, self.consumed, num_leaves, self._changed_split)
            yield batch
            if loop is not None and loop.is_over(batch, is_last=step + 1 == self.total_steps):
                return

    @own_exit_code()
    def _begin_together(self) -> None:
        """Refuse ranks that begin at different steps, or that have different samples."""
        place = f"step {self.step} of {self.total_steps}, {self.plan.num_samples} samples"
        check_same("start positions", place, self._world)
        if not self.is_compared and not is_stream(self.dataset):
            own = self._take_fingerprint()
            check_same_samples("training", self.dataset, own, self._world, SAME_DATA)
            self.is_compared = True
        self._check_unchanged()

    def _take_fingerprint(self) -> dict[str, Any]:
        """Return the fingerprint of the data, comparable with the checkpoint's if there is one."""
        if self._fingerprint is None:
            is_full = is_full_fingerprint_due(self._world)
            seed = self._reader.seed
            saved = self._saved_fingerprint
            self._fingerprint = take_fingerprint(self.dataset, seed, saved or None, is_full)
            self._fingerprint.pop("old_samples", None)
        return self._fingerprint

    def _check_unchanged(self) -> None:
        """Refuse data that changed since the checkpoint. Collective after a resume."""
        saved = self._saved_fingerprint
        if not saved:
            return
        own = differences(saved, self._take_fingerprint(), self.dataset)
        self._saved_fingerprint = {}
        change = first_of_ranks(own, self._world)  # not every rank reads all files
        if not change:
            return
        problem = f"the training data changed since the checkpoint: {change}"
        if not self._accepts_changes:
            error = ConfigError(
                problem, "train on the data of the checkpoint, or pass Loader(accept_changes=True)"
            )
            error.is_shared = True
            raise error
        if self._world.is_first:
            _log.warning("%s; accepted", problem)

    @own_exit_code()
    def _read_step(self, read: Iterator[MicroBatch], num_leaves: int) -> list[MicroBatch]:
        """Read this rank's micro-batches of a step; compare the first samples of a stream.

        A stream cannot be compared before its first step, because reading it moves its position.
        """
        if self.is_compared:
            return [next(read) for _ in range(num_leaves)]
        failure: LockstepError | None = None
        try:
            mine = [next(read) for _ in range(num_leaves)]
        except LockstepError as error:  # the other ranks wait in the comparison below
            failure = error
        assert isinstance(self._reader, StreamReader)
        own = {"samples": self._reader.contents}
        check_same_samples("training", self.dataset, own, self._world, SAME_STREAM)
        self.is_compared = True
        if failure:
            raise failure
        return mine


def plan_for(dataset: Any, batch: BatchConfig, world_size: int) -> BatchPlan:
    """Return the batch plan for a data set; a stream counts as one endless epoch."""
    if not is_stream(dataset):
        return plan_batches(batch, len(dataset), world_size)
    plan = plan_batches(batch, STREAM_LENGTH, world_size)
    return replace(plan, num_samples=STREAM_LENGTH, samples_per_epoch=STREAM_LENGTH)


def _rehearsed(
    dataset: Any, batch_size: int, plan: BatchPlan | None, world_size: int
) -> tuple[BatchPlan | None, int | None, int | None]:
    """Return plan, epochs and max_steps of a rehearsal: two epochs of two steps, or four steps."""
    num_epochs = steps_per_epoch = 2
    if plan is not None or is_stream(dataset):
        return plan, None, num_epochs * steps_per_epoch
    num_samples = min(len(dataset), steps_per_epoch * batch_size * world_size)
    plan = plan_batches(BatchConfig(batch_size=batch_size), num_samples, world_size)
    return plan, num_epochs, None


def read_leaves(
    reader: LeafReader, leaves: Iterable[Leaf], config: LoaderConfig, world: Collectives
) -> Iterator[MicroBatch]:
    """Read leaves, with prefetching worker processes if there are any; move them to the device."""
    read: Generator[MicroBatch] = (reader[leaf] for leaf in leaves)
    if config.num_workers and not isinstance(reader, StreamReader):
        read = read_in_workers(
            reader,
            leaves,
            config.timeout_s,
            device=world.device,
            num_workers=config.num_workers,
            prefetch=config.prefetch,
        )
    with closing(read):
        for micro_batch in read:
            if micro_batch.error is not None:
                raise DataError(*micro_batch.error)
            yield replace(micro_batch, data=_copied(micro_batch.data, world.device))


def _copied(data: Any, device: torch.device) -> Any:
    """Return `data` on the device.

    Raises:
        OutOfMemoryError: they do not fit. Ranks can agree on it, as on a bad sample.
    """
    try:
        return to_device(data, device)
    except torch.OutOfMemoryError as error:
        problem = str(error).partition("\n")[0]
    # Outside the handler, because the caught exception keeps tensors alive.
    raise OutOfMemoryError(
        f"a batch could not be copied to {device}: {problem}", "lower batch_size"
    )
