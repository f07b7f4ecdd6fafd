"""Evaluate on held-out samples, each counted once, whatever the number of ranks.

Owns: the pass over the held-out set and the reduction of its sums. Does not
own: what is measured; the task says so.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.agreement import together
from lockstep.data.loader import LoaderConfig, read_held_out
from lockstep.randomness import seed_torch
from lockstep.runtime import World
from lockstep.step import as_partial, number
from lockstep.task import Context, PartialLoss, Task


@torch.no_grad()
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
) -> dict[str, float]:
    """Return the task's metrics over `data`, reduced over ranks. Collective.

    Sums and weights travel in float64 and are divided once, at the end: a mean
    of means would weigh a rank's short last batch too much.
    """
    metrics = task.metrics()
    for metric in metrics.values():
        metric.reset()

    def measure() -> dict[str, Tensor]:
        local: dict[str, Tensor] = {}
        for micro_batch in read_held_out(data, batch_size, world, seed, task.collate, loader):
            place = micro_batch.leaf.place
            seed_torch(world.device, seed, "torch", "evaluation", place)
            context = Context(world, seed, step, place, training=False)
            counted = task.weights(micro_batch.data, context)
            own = {name: number(n, world.device).clamp(min=1) for name, n in counted.items()}
            with autocast or nullcontext():
                result = task.evaluate(model, micro_batch.data, replace(context, weights=own))
            if not isinstance(result, Mapping):
                result = _named(as_partial(result, micro_batch))
            for name, (value, weight) in result.items():
                pair = torch.tensor([float(value), float(weight)], dtype=torch.float64)
                local[name] = local.get(name, torch.zeros(2, dtype=torch.float64)) + pair
        return local

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    local = together(world, measure)
    for module, was_training in modes:  # a part that is frozen in evaluation mode stays there
        module.training = was_training

    # A rank may lack a name, or have no sample at all: all ranks line up all names.
    said = [text.split("\n") for text in world.all_texts("\n".join(local))]
    names = list(dict.fromkeys(name for names in said for name in names if name)) or [""]
    table = torch.stack([local.get(name, torch.zeros(2, dtype=torch.float64)) for name in names])
    sums = world.all_sum(table)
    reduced = {  # a part without a single unit has no mean
        name: float(value / weight)
        for name, (value, weight) in zip(names, sums, strict=True)
        if weight
    }
    return reduced | {name: float(metric.compute()) for name, metric in metrics.items()}


def _named(partial: PartialLoss) -> dict[str, tuple[Tensor, Tensor | float]]:
    return {"loss": (partial.loss_sum, partial.weight), **partial.parts}
