"""Evaluate on held-out samples, each counted once on any number of ranks.

Owns: the pass over the held-out set and the reduction of its sums. Does not own: the metrics,
which the task defines.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.data.batch import MicroBatch
from lockstep.data.held_out import read_held_out
from lockstep.data.order import share
from lockstep.data.workers import LoaderConfig
from lockstep.dist.agreement import agree_to_continue, together
from lockstep.dist.fsdp import is_sharded
from lockstep.errors import ConfigError, DataError, StopRequested, shown
from lockstep.exact.tree import TreeSum, sum_nodes
from lockstep.randomness import seed_everything
from lockstep.step.partial import as_partial, number
from lockstep.task import Context, PartialLoss, Task
from lockstep.world import World

SAME_SHAPE = "return sums of the same shape from evaluate for every held-out batch"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients, then restore the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def evaluate(
    task: Task,
    model: nn.Module,
    data: Any,
    world: World,
    *,
    batch_size: int,
    seed: int,
    step: int,
    loader: LoaderConfig,
    autocast: AbstractContextManager[Any] | None = None,
    stop_code: Callable[[], int] | None = None,
) -> dict[str, float]:
    """Return the task's metrics over `data`, reduced over ranks. Collective.

    Sums and weights are reduced in float64 and divided once, at the end: a mean of means would
    give too much weight to a rank's short last batch. They are added along one tree over the
    batches, so the result has the same bits on any number of ranks. With a sharded model every
    rank makes the same number of passes. If a task overrides `weights`, the data are read
    twice: first to count the units of each term.

    Args:
        stop_code: Called before every batch; returns the exit code of a stop signal that this
            rank has received, or 0.

    Raises:
        Exception: raised by the task, on that rank; the other ranks raise an OtherRankError that
            names it, except with a sharded model.
        StopRequested: on all ranks, before the same batch, if a rank was asked to stop. The
            results so far are dropped.
    """
    metrics = together(world, lambda: _new_metrics(task, world.device), every_exception=True)
    num_batches = -(-len(data) // batch_size)
    pads_rounds = is_sharded(model)
    has_units = type(task).evaluate is Task.evaluate and type(task).weights is not Task.weights
    mean_units: Mapping[str, Tensor | float] = {}
    if has_units:
        mean_units = evaluate(
            _Units(task),
            model,
            data,
            world,
            batch_size=batch_size,
            seed=seed,
            step=step,
            loader=loader,
            stop_code=stop_code,
        )
    sums = _Sums(num_batches, world)

    def measure(micro_batch: MicroBatch) -> PartialLoss | Tensor | Mapping[str, Any]:
        place = micro_batch.leaf.place
        context = Context(world, seed, step, place, training=False, counts=micro_batch.counts)
        seed_everything(world.device, seed, "evaluation", place)
        units = mean_units or task.weights(micro_batch.data, context)
        divisors = {name: _divisor(num, world.device) for name, num in units.items()}
        seed_everything(world.device, seed, "evaluation", place)
        with autocast or nullcontext():
            return task.evaluate(model, micro_batch.data, replace(context, weights=divisors))

    def measure_all() -> None:
        batches = read_held_out(data, batch_size, world, seed, task.collate, loader, pads_rounds)
        if metrics and pads_rounds:
            batches = _without_stand_ins(batches)
        for micro_batch in _in_rounds(batches, -(-num_batches // world.size), world, stop_code):
            if micro_batch.is_stand_in and not pads_rounds:
                continue
            result = measure(micro_batch)
            if micro_batch.is_stand_in:
                continue
            if not micro_batch.counts:  # padding comes first, so this resets only its own results
                _reset(metrics)
                continue
            if not isinstance(result, Mapping):
                part = as_partial(result, micro_batch, is_averaged=has_units)
                result = {"loss": (part.loss_sum, part.weight), **part.parts}
            sums.add(micro_batch.leaf.place, result)

    try:
        with evaluating(model):
            together(world, measure_all, every_exception=can_agree(model, world))
    except StopRequested:
        _reset(metrics)
        raise
    means = sums.means()

    def report() -> dict[str, float]:
        measured = {name: float(metric.compute()) for name, metric in metrics.items()}
        return as_numbers({**task.derive(means), **measured})

    return together(world, report, every_exception=True)


def as_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as floats, from any real numbers, also those of NumPy and torch.

    >>> as_numbers({"loss": torch.tensor(0.5), "accuracy": np.float32(1)})
    {'loss': 0.5, 'accuracy': 1.0}

    Raises:
        ConfigError: a metric is not a number.
    """
    return {name: _as_number(name, value) for name, value in metrics.items()}


def _as_number(name: str, value: Any) -> float:
    is_array = isinstance(value, Tensor | np.ndarray | np.generic)
    plain = value.item() if is_array and math.prod(value.shape) == 1 else value
    if not isinstance(plain, Real):
        raise ConfigError(
            f"the metric {name!r} is {shown(value)}, not a number",
            "return one number for each metric",
        )
    return float(plain)


def _new_metrics(task: Task, device: torch.device) -> Mapping[str, Any]:
    metrics = task.metrics()
    _reset(metrics)
    for metric in metrics.values():
        if isinstance(metric, nn.Module):
            metric.to(device)
    return metrics


def _reset(metrics: Mapping[str, Any]) -> None:
    for metric in metrics.values():
        metric.reset()


def _divisor(num_units: Tensor | float, device: torch.device) -> Tensor:
    num = number(num_units, device)
    return num.masked_fill(num <= 0, 1)


class _Sums:
    """The sums of held-out batches by name, added along one tree over all batches."""

    def __init__(self, num_batches: int, world: World) -> None:
        self.world = world
        self.num_batches = num_batches
        self._places = share(num_batches, world.rank, world.size)
        self._trees: dict[str, TreeSum] = {}
        """By name: a row for each of this rank's batches, with the flattened sum and its weight."""
        self._num_added: dict[str, int] = {}
        self._shapes: dict[str, Sequence[int]] = {}

    def add(self, place: int, measured: Mapping[str, tuple[Any, Any]]) -> None:
        """Add the sums and weights of the batch at `place`."""
        for name, (value, weight) in measured.items():
            value = torch.as_tensor(value, dtype=torch.float64)
            weight = torch.as_tensor(weight, dtype=torch.float64)
            if weight.numel() != 1:
                raise ConfigError(
                    f"the weight of {name!r} is {shown(weight)}, not one number",
                    "return the number of units in the sum from evaluate",
                )
            before = self._shapes.setdefault(name, value.shape)
            if before != value.shape:
                raise ConfigError(
                    f"{name!r} has shape {tuple(before)} in one held-out batch and "
                    f"{tuple(value.shape)} in another",
                    SAME_SHAPE,
                )
            row = torch.cat([value.ravel().cpu(), weight.reshape(1).cpu()])
            self._add_zeros(name, place, row)
            self._trees[name].add((0, place), [row])
            self._num_added[name] += 1

    def _add_zeros(self, name: str, stop: int, like: Tensor) -> None:
        """Add a row of zeros for each batch before `stop` that did not measure `name`."""
        tree = self._trees.setdefault(name, TreeSum(self.num_batches))
        added = self._num_added.get(name, 0)
        missed = range(self._places.start + added, stop)
        for place in missed:
            tree.add((0, place), [torch.zeros_like(like)])
        self._num_added[name] = added + len(missed)

    def means(self) -> dict[str, Tensor]:
        """Return sum / weight of each name that any rank measured. Collective."""
        shapes: dict[str, Sequence[int]] = {}
        ranks: dict[str, int] = {}
        for rank, found in enumerate(self.world.all_values(self._shapes)):
            for name, shape in found.items():
                if shapes.setdefault(name, shape) != shape:
                    error = ConfigError(
                        f"{name!r} has shape {tuple(shapes[name])} on rank {ranks[name]} and "
                        f"{tuple(shape)} on rank {rank}",
                        SAME_SHAPE,
                    )
                    error.is_shared = True
                    raise error
                ranks.setdefault(name, rank)
        means = {}
        for name, shape in shapes.items():
            zeros = torch.zeros(math.prod(shape) + 1, dtype=torch.float64)
            self._add_zeros(name, self._places.stop, zeros)
            total = sum_nodes(self._trees[name], zeros, self.world)
            if total[-1]:  # without any unit there is no mean
                means[name] = (total[:-1] / total[-1]).reshape(shape)
        return means


def can_agree(model: nn.Module, world: World) -> bool:
    """Return whether all ranks can be informed of an exception raised while calling `model`.

    With a sharded model they cannot: the other ranks wait in the collectives of a forward pass.
    """
    return world.size == 1 or not is_sharded(model)


def _without_stand_ins(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """Refuse a stand-in: a pass over it could not be taken out of a metric again."""
    for batch in batches:
        if batch.is_stand_in:
            raise DataError(
                f"every sample of a held-out batch is bad, the first because {batch.skipped[0][1]}",
                "remove the bad samples, or raise evaluation.batch_size",
            )
        yield batch


def _in_rounds(
    batches: Iterator[MicroBatch],
    num_rounds: int,
    world: World,
    stop_code: Callable[[], int] | None,
) -> Iterator[MicroBatch]:
    """Yield this rank's batches, each after all ranks have agreed to continue. Collective.

    Some ranks may have one batch less, so each rank votes `num_rounds` times. The vote comes
    after reading a batch and before computing on it: with a sharded model a forward pass is a
    collective, and all ranks must skip it if one cannot read its batch.
    """
    for _ in range(num_rounds):
        batch = next(batches, None)
        agree_to_continue(world, stop=stop_code() if stop_code else 0)
        if batch is not None:
            yield batch


class _Units(Task):
    """Measures the mean number of units of each term in a held-out batch.

    A term divided by it, and averaged over batches, is a mean over all units.
    """

    def __init__(self, task: Task) -> None:
        self.weights, self.collate = task.weights, task.collate  # type: ignore[method-assign]

    def evaluate(self, model: nn.Module, batch: Any, context: Context) -> dict[str, Any]:
        return {name: (num, 1.0) for name, num in self.weights(batch, context).items()}
