"""Evaluate on held-out samples, each counted once, whatever the number of ranks.

Owns: the pass over the held-out set and the reduction of its sums. Does not
own: what is measured; the task says so.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.batch import MicroBatch
from lockstep.data.held_out import read_held_out
from lockstep.data.loader import LoaderConfig
from lockstep.data.order import share
from lockstep.dist.agreement import agree_to_continue, together
from lockstep.dist.fsdp import is_sharded
from lockstep.dist.world import World
from lockstep.exact.tree import TreeSum, sum_nodes
from lockstep.randomness import seed_everything
from lockstep.signals import StopRequested
from lockstep.step.partial import as_partial, number
from lockstep.task import Context, Task


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients, and every module back to what it was.

    A part that is frozen in evaluation mode stays there.
    """
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

    Sums and weights travel in float64 and are divided once, at the end: a mean
    of means would weigh a rank's short last batch too much. They are added along one tree
    over the batches, so that the number of ranks does not show in the last bit either.
    Where the model is cut over ranks, all make as many passes.
    Where terms of the loss have units of their own, the data are read twice: first to count.

    Args:
        stop_code: Called before every batch; returns the exit code of a stop signal that this
            rank has received, or 0.

    Raises:
        Exception: what the task raised, on the rank where it did; on the others, an
            OtherRankError that names this rank. With a sharded model the others are not told.
        StopRequested: on all ranks, before the same batch, if a rank was asked to stop. What was
            measured until then is dropped.
    """
    pads_rounds = is_sharded(model)

    def begin_metrics() -> Mapping[str, Any]:
        metrics = task.metrics()
        for metric in metrics.values():
            metric.reset()
            if isinstance(metric, nn.Module):
                metric.to(world.device)
        return metrics

    metrics = together(world, begin_metrics, every_exception=True)

    typical: Mapping[str, Tensor | float] = {}
    if type(task).evaluate is Task.evaluate and type(task).weights is not Task.weights:
        how: Any = {"batch_size": batch_size, "seed": seed, "step": step, "loader": loader}
        typical = evaluate(_Units(task), model, data, world, **how, stop_code=stop_code)
    num_leaves = -(-len(data) // batch_size)
    places = share(num_leaves, world.rank, world.size)
    local: dict[str, TreeSum] = {}  # of the sum, flat, and the weight behind it
    num_added: dict[str, int] = {}

    def add(name: str, index: int, blank: Tensor, *rows: Tensor) -> None:
        """Add a row to a sum; a batch that did not measure `name` has added nothing to it."""
        tree = local.setdefault(name, TreeSum(num_leaves))
        for place in places[num_added.get(name, 0) : index]:
            tree.add((0, place), [blank.clone()])
        for row in rows:
            tree.add((0, places[index]), [row])
        num_added[name] = index + 1

    def measure() -> None:
        batches = read_held_out(data, batch_size, world, seed, task.collate, loader, pads_rounds)
        num_rounds = -(-num_leaves // world.size)
        for micro_batch in _in_rounds(batches, num_rounds, world, stop_code):
            place = micro_batch.leaf.place
            context = Context(world, seed, step, place, training=False, counts=micro_batch.counts)
            seed_everything(world.device, seed, "evaluation", place)
            counted = (typical or task.weights(micro_batch.data, context)).items()
            own = {k: (n := number(v, world.device)).masked_fill(n <= 0, 1) for k, v in counted}
            seed_everything(world.device, seed, "evaluation", place)
            with autocast or nullcontext():
                result = task.evaluate(model, micro_batch.data, replace(context, weights=own))
            if not micro_batch.counts:  # and comes first: what it has left in the metrics goes
                for metric in metrics.values():
                    metric.reset()
                continue
            if not isinstance(result, Mapping):
                part = as_partial(result, micro_batch, bool(typical))
                result = {"loss": (part.loss_sum, part.weight), **part.parts}
            for name, (value, weight) in result.items():
                value, weight = (torch.as_tensor(n, dtype=torch.float64) for n in (value, weight))
                local_shapes[name] = value.shape
                row = torch.cat([value.ravel().cpu(), weight.reshape(1).cpu()])
                add(name, place - places.start, torch.zeros_like(row), row)

    local_shapes: dict[str, Sequence[int]] = {}
    try:
        with evaluating(model):
            together(world, measure, every_exception=can_agree(model, world))
    except StopRequested:
        for metric in metrics.values():
            metric.reset()
        raise

    # A rank may lack a name, or have no sample at all: all ranks line up all names.
    shapes: dict[str, Sequence[int]] = {}
    for text in world.all_texts(json.dumps(local_shapes)):
        shapes |= json.loads(text)
    lengths = [math.prod(shape) + 1 for shape in shapes.values()]
    blanks = [torch.zeros(length, dtype=torch.float64) for length in lengths]
    for name, blank in zip(shapes, blanks, strict=True):
        add(name, len(places), blank)
    sums: dict[str, Tensor] = {}
    if shapes:  # side by side, for one collective
        nodes = zip(*(local[name].nodes for name in shapes), strict=True)
        beside = [(same[0][0], [torch.cat([row for _, (row,) in same])]) for same in nodes]
        total = sum_nodes(TreeSum(num_leaves, beside), torch.cat(blanks), world)
        sums = dict(zip(shapes, torch.split(total, lengths), strict=True))
    means = {  # what has not a single unit has no mean
        name: (row[:-1] / row[-1]).reshape(shapes[name]) for name, row in sums.items() if row[-1]
    }

    def report() -> dict[str, float]:
        measured = {name: float(metric.compute()) for name, metric in metrics.items()}
        return {**task.derive(means), **measured}

    return together(world, report, every_exception=True)


def can_agree(model: nn.Module, world: World) -> bool:
    """Say whether ranks can agree on an exception that one of them met while it called `model`.

    The forward passes of a sharded model are collectives, in which the others would be waiting.
    """
    return world.size == 1 or not is_sharded(model)


def _in_rounds(
    batches: Iterator[MicroBatch],
    num_rounds: int,
    world: World,
    stop_code: Callable[[], int] | None,
) -> Iterator[MicroBatch]:
    """Yield this rank's batches, each after all ranks have agreed to continue. Collective.

    Ranks may have one batch more or less than others, so they vote `num_rounds` times each. The
    vote comes between reading a batch and computing on it: where the model is sharded, every
    forward pass is a collective, and a rank that cannot read its batch must not miss one.
    """
    for _ in range(num_rounds):
        batch = next(batches, None)
        agree_to_continue(world, stop=stop_code() if stop_code else 0)
        if batch is not None:
            yield batch


class _Units(Task):
    """Measures how many units of each term a held-out batch has on the average.

    Divided by these, terms come out, in the mean over batches, as means over all units.
    """

    def __init__(self, task: Task) -> None:
        self.weights, self.collate = task.weights, task.collate  # type: ignore[method-assign]

    def evaluate(self, model: nn.Module, batch: Any, context: Context) -> dict[str, Any]:
        return {name: (num, 1.0) for name, num in self.weights(batch, context).items()}
