"""Compare the loss of the same samples in one micro-batch and in three.

Owns: computing both in the process that trains, after its last step. Does not own: the name of a
difference (`verdict.py`).

Every number of ranks takes the same micro-batches. So parity alone cannot find a loss that is a
mean over units (tokens, pixels) where samples have different numbers of them: it is the same mean
on every number of ranks, but not the mean over the global batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.data.batch import MicroBatch, StepBatch
from lockstep.data.feed import to_device
from lockstep.data.order import Leaf
from lockstep.data.reader import is_stream
from lockstep.dist.ddp import unwrap
from lockstep.randomness import derive_seed, set_all, untouched
from lockstep.run.evaluation import evaluating
from lockstep.run.run import Run
from lockstep.step.partial import as_partial
from lockstep.task import Context

MOST_GROUPS = 4
"""How many groups of samples are compared."""
TOLERANCE = 1e-4
"""Largest relative difference of two equal losses: a matrix product of another shape may sum in
another order."""
SIMILAR = 0.01
"""Losses that differ relatively by less do not show how many units they are means over."""
UNITS = "units"
"""The loss is a mean over units, and samples have different numbers of them."""
COUPLED = "coupled"
"""The loss of a sample depends on the others in its micro-batch."""
UNCLEAR = "unclear"
"""The losses of these samples are too similar to say why."""

Blocks = tuple[int, ...]
"""The blocks of a group (0, 1, 2) that form a micro-batch."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The result."""

    why_not: str = ""
    """Why it was not compared, if it was not."""
    num_groups: int = 0
    spread: float = 0.0
    """The largest relative difference."""
    reason: str = ""
    """UNITS, COUPLED or UNCLEAR; empty if the loss does not depend on the cut."""
    ids: tuple[int, ...] = ()
    """The samples whose loss differs most."""
    whole: float = 0.0
    """Their loss in one micro-batch."""
    parts: float = 0.0
    """Their loss in three micro-batches."""
    ratio: float = 0.0
    """Largest ratio of the numbers of units in two of the three micro-batches."""


def measure_cut(run: Run, batch: StepBatch) -> Cut:
    """Compute the loss of some samples of a step, as one micro-batch and as three.

    For one rank, after the last step: then this changes nothing that is traced. The model is in
    evaluation mode meanwhile, because dropout and batch normalisation depend on micro-batches.
    """
    if run.task.gathers:
        return Cut("its loss compares samples")
    if is_stream(run.loader.dataset):
        return Cut("the training data are a stream")
    ids = [int(sample) for micro in batch.micro_batches for sample in micro.ids]
    size = min(max(1, run.contract.plan.leaf_size // 3), len(ids) // 3)
    if not size:
        return Cut(f"a step has {len(ids)} samples")
    starts = range(0, len(ids) - 3 * size + 1, 3 * size)[:MOST_GROUPS]
    found = []
    try:
        with evaluating(unwrap(run.model)), torch.enable_grad(), untouched():
            for start in starts:
                group = _Group(run, batch, ids[start : start + 3 * size], size)
                if group.draws():
                    return Cut("it draws random numbers")
                found.append(group.compare())
    except Exception as error:  # whatever a user's loss may raise on fewer samples
        return Cut(f"the loss of fewer samples fails: {type(error).__name__}: {error}")
    # A loss that compares samples may look like a mean over units in one group, by accident.
    for reason in (COUPLED, UNITS, UNCLEAR, ""):
        if of_it := [one for one in found if one.reason == reason]:
            worst = max(of_it, key=lambda one: one.spread)
            return replace(worst, num_groups=len(found))
    raise AssertionError("a step with three samples has a group")


class _Group:
    """A few samples, to be computed in different micro-batches: three blocks of `size`."""

    def __init__(self, run: Run, batch: StepBatch, ids: Sequence[int], size: int) -> None:
        self.run = run
        self.batch = batch
        self.ids = tuple(ids)
        self.size = size
        self.samples = []
        for sample in ids:
            set_all(derive_seed(run.config.seed, "cut", sample))
            self.samples.append(run.loader.dataset[sample])
        data = self._collated((0, 1, 2), seed=0)
        self.totals: Mapping[str, Tensor] = {}
        self.totals = {
            name: torch.as_tensor(num, device=run.world.device)
            for name, num in run.task.weights(data, self._context()).items()
        }

    def draws(self) -> bool:
        """Return whether the loss depends on random numbers."""
        return self.sums((0, 1, 2), seed=1) != self.sums((0, 1, 2), seed=2)

    def compare(self) -> Cut:
        """Compare the loss in one micro-batch with the loss in three."""
        whole = self.mean((0, 1, 2))
        blocks = [self.sums((block,)) for block in range(3)]
        total, weight = (sum(numbers) for numbers in zip(*blocks, strict=True))
        parts = total if self.totals else total / weight
        means = [value if self.totals else value / num for value, num in blocks]
        scale = max(abs(whole), abs(parts), sum(map(abs, means)) / 3) or 1.0
        spread = abs(whole - parts) / scale
        if not spread > max(TOLERANCE, 4 * self.precision):
            return Cut(spread=spread)
        ratio = 0.0 if self.totals else self._ratio_of_units(means, whole, scale)
        reason = UNCLEAR if ratio is None else UNITS if ratio else COUPLED
        return Cut("", 0, spread, reason, self.ids, whole, parts, ratio or 0.0)

    def _ratio_of_units(self, means: list[float], whole: float, scale: float) -> float | None:
        """Return the largest ratio of the numbers of units in two blocks.

        If the loss is a mean over units, the mean of two blocks in one micro-batch gives the ratio
        of their units. Three pairs must agree with each other and predict the mean of all three.
        They do not if the loss compares samples; then this returns 0.

        Returns:
            None if the means are too similar.
        """
        pairs = ((0, 1), (1, 2), (0, 2))
        closest = min(abs(means[second] - means[first]) for first, second in pairs)
        if closest < SIMILAR * scale:
            return None
        found = []
        for first, second in pairs:
            both = self.mean((first, second))
            if both == means[second]:
                return 0.0
            found.append((both - means[first]) / (means[second] - both))
        one, other, direct = found
        rounding = min(200 * self.precision * scale / closest, 0.005)
        if min(found) <= 0 or abs(one * other / direct - 1) > rounding:
            return 0.0
        units = [1.0, one, direct]
        predicted = sum(n * mean for n, mean in zip(units, means, strict=True)) / sum(units)
        if abs(predicted - whole) > rounding * scale:
            return 0.0
        return max(units) / min(units)

    @property
    def precision(self) -> float:
        """Return the relative rounding of one operation."""
        kinds = {p.dtype for p in self.run.model.parameters() if p.is_floating_point()}
        eps = [torch.finfo(kind).eps for kind in kinds]
        if self.run.world.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
            eps.append(2.0**-10)
        return max(eps, default=torch.finfo(torch.float32).eps)

    def mean(self, blocks: Blocks) -> float:
        """Return the loss of blocks in one micro-batch, as the step would report it."""
        total, weight = self.sums(blocks)
        return total if self.totals else total / weight

    def sums(self, blocks: Blocks, seed: int = 0) -> tuple[float, float]:
        """Return the summed loss of blocks in one micro-batch, and its weight."""
        data = self._collated(blocks, seed)
        leaf = Leaf(self.batch.epoch, seed, 0, len(blocks) * self.size)
        ids = self.batch.micro_batches[0].ids[:1].repeat(len(blocks) * self.size)
        set_all(derive_seed(self.run.config.seed, "cut", seed))
        result = self.run.task.loss(unwrap(self.run.model), data, self._context(seed))
        partial = as_partial(result, MicroBatch(leaf, ids, data), bool(self.totals))
        return float(partial.loss_sum.detach()), float(partial.weight)

    def _collated(self, blocks: Blocks, seed: int) -> Any:
        set_all(derive_seed(self.run.config.seed, "cut", seed))
        numbers = [n for block in blocks for n in range(block * self.size, (block + 1) * self.size)]
        collated = self.run.task.collate([self.samples[n] for n in numbers])
        return to_device(collated, self.run.world.device)

    def _context(self, place: int = 0) -> Context:
        config = self.run.config
        return Context(
            self.run.world,
            config.seed,
            self.batch.step,
            place,
            weights=self.totals,
            exact=config.exact,
        )
