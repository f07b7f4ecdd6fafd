"""The task to train: a model, its data, and a loss that has not been averaged yet.

Owns: the contract between a task and the core that trains it. Does not own: batches,
ranks, devices, steps. The core never looks inside a batch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from lockstep.data.order import Order
from lockstep.dist.agreement import agree_to_continue
from lockstep.errors import ConfigError
from lockstep.exact.contrastive import GatheredRows
from lockstep.plan import Contract, SplitChange
from lockstep.randomness import keyed_generator

if TYPE_CHECKING:
    from lockstep.world import World


@dataclass(frozen=True, slots=True)
class PartialLoss:
    """A loss that has been summed but not yet averaged.

    `weight` counts the units inside `loss_sum`: images, masked residues,
    scribbled pixels, pairs. Keeping the two apart lets the core divide by the
    weight of the whole step, so the gradient does not depend on how the units
    are distributed over ranks and micro-batches. `parts` are more (sum, weight) pairs to
    log under their names, which must be the same for all micro-batches of a step. They
    carry no gradient.
    """

    loss_sum: Tensor
    weight: Tensor | float
    parts: Mapping[str, tuple[Tensor, Tensor | float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Context:
    """What a loss can use besides its model and its batch."""

    world: "World"
    seed: int
    step: int
    """Number of weight updates so far."""
    place: int
    """Index of this micro-batch in the step's global batch, on any rank."""
    training: bool = True
    counts: bool = True
    """Whether this micro-batch counts, or is padding (weight 0) for a rank without one."""
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    """The counts of `Task.weights`, summed over the whole step; never 0, so you can divide."""
    gathered: GatheredRows | None = None
    """In exact mode: the other leaves of the step, on any rank."""
    exact: bool = False
    stop_code: Callable[[], int] | None = None
    """In `finish_evaluation`: the exit code of this rank's stop signal, or 0."""
    changed_split: SplitChange | None = None
    """In a custom loop resumed with other micro-batches: the old and new ones."""

    def raise_if_stopping(self) -> None:
        """End a long `finish_evaluation` if any rank was asked to stop. Collective.

        Call it in every iteration of a long loop, equally often on every rank: the ranks agree
        and stop in the same iteration. The run then saves, and repeats the evaluation after a
        resume. Clean up in a `finally`, and do not catch StopRequested. Outside
        `finish_evaluation` this does nothing.
        """
        if self.stop_code is not None:
            agree_to_continue(self.world, stop=self.stop_code())

    def generator(self, stream: str) -> torch.Generator:
        """Return the random stream called `stream` of this micro-batch.

        It differs between micro-batches, repeats on resume, and is the same for
        every number of ranks. In evaluation it does not depend on the step, so
        that two evaluations differ only by their weights.
        """
        step = self.step if self.training else "evaluation"
        return keyed_generator(self.world.device, self.seed, stream, step, self.place)

    def gather(self, local: Tensor) -> Tensor:
        """Concatenate `local` over all ranks, in rank order, with gradients. Collective.

        In exact mode: over all micro-batches of the step, one row for each sample.
        """
        if self.gathered:
            return self.gathered.gather(local)
        self._check_gather()
        return self.world.all_gather(local if self.counts else local[:0])

    def gather_start(self, local: Tensor) -> int:
        """Return the first row of this rank in `gather(local)`. Collective."""
        if self.gathered:
            return self.gathered.start
        self._check_gather()
        return sum(self.world.all_lengths(len(local) if self.counts else 0)[: self.world.rank])

    def _check_gather(self) -> None:
        if self.training and self.changed_split is not None:
            self.changed_split.raise_for_gather()
        if self.exact:
            raise ConfigError(
                "the loss calls context.gather, which exact mode must know before the first step",
                "set gathers = True in the task",
            )
        if not self.training and self.world.size > 1:
            raise ConfigError(
                "context.gather was called in an evaluation, where ranks have different numbers of "
                "batches",
                "define Task.evaluate without context.gather",
            )


class Task:
    """What to train. Override what differs from the defaults, and always `loss`."""

    name = "custom"
    """Written into every checkpoint; a checkpoint with another name is refused."""
    gathers: bool = False
    """The loss compares the samples of one micro-batch on all ranks. A run then resumes only with
    the same number of them (batch_size x ranks), because the loss depends on it. A step that
    does not fit in memory then ends the run, as other ranks may wait inside their passes. The same
    holds, on several ranks, for a loss or model that calls another collective of `World` in its
    forward pass, from its first such call on."""

    calls_model_equally: bool = False
    """`finish_evaluation` calls the model as a module, equally often on every rank. Then
    `parallel=fsdp` does not gather all weights on every rank for it."""

    may_change: tuple[str, ...] = ()
    """Dotted names of `settings` that may change before a resume, such as data paths. A change of
    any other is refused."""

    def settings(self) -> dict[str, Any]:
        """Return the task's settings as JSON values, to record; the same on all ranks."""
        return {}

    def build_model(self) -> nn.Module:
        """Return the model, with its initial weights, on the CPU."""
        raise NotImplementedError

    def train_data(self) -> Any:
        """Return the training samples: anything with `len` and an integer index, or an iterable.

        They must be the same on every rank. Torch, NumPy and Python's `random` are seeded before,
        and again before `eval_data`: if both make a random split of the same samples, give
        the split its own generator (`torch.Generator().manual_seed(0)`).
        """
        raise NotImplementedError

    def eval_data(self) -> Any | None:
        """Return the held-out samples, or None if there are none."""
        return None

    def order(self, data: Any, seed: int) -> Order | None:
        """Return the order to visit `data` in; None shuffles it again every epoch."""
        return None

    def banner(self, world: "World", contract: Contract) -> list[str]:
        """Return more lines for the first rank to print before the first step."""
        return []

    def build_optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Return the optimizer at the base rate; the core applies the schedule to its groups."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=lr, fused=all(p.is_cuda for p in trained))

    def compile(self, model: nn.Module) -> None:
        """Compile `model` in place; a stack of identical blocks compiles faster block by block."""
        model.compile()

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the modules that `parallel=fsdp` gathers one at a time (default: those in lists).

        Each must be called as a module, since its weights are available only then, and must not
        share parameters with another.
        """
        lists = (part for part in model.modules() if isinstance(part, nn.ModuleList))
        return [block for blocks in lists for block in blocks]

    def loss(self, model: nn.Module, batch: Any, context: Context) -> PartialLoss | Tensor:
        """Return the summed loss of a micro-batch and its weight.

        A plain scalar means: the mean over the samples of the micro-batch.
        """
        raise NotImplementedError

    def weights(self, batch: Any, context: Context) -> Mapping[str, Tensor | float]:
        """Count the units of each term of the loss, if terms have different units.

        A loss such as mean over scribbled pixels + mean over other pixels cannot be
        divided by one weight. The core counts before the backward pass, and passes the
        step's totals to `loss` as `context.weights`. Such a loss divides each term
        itself, and returns their sum with weight 1 and the terms as `parts`.

        Return the same names for every micro-batch on every rank, and for each one finite number,
        0 or more. Anything else ends the run with a ConfigError on all ranks. A number that is
        already on a GPU is not waited for: a wrong one there makes the step non-finite.

        An evaluation counts all held-out units first. Its `context.weights` are those of an
        average batch, so that each term becomes a mean over all units. A task that overrides
        `evaluate` returns sums, and gets the weights of the batch itself.
        """
        return {}

    def evaluate(
        self, model: nn.Module, batch: Any, context: Context
    ) -> Mapping[str, tuple[Tensor, Tensor | float]] | PartialLoss | Tensor:
        """Return named (sum, weight) pairs of one held-out batch; by default the loss.

        A sum may be a tensor of any shape, such as a confusion matrix, for `derive` to read. Keep
        nothing of a batch that does not count (`context.counts`): another rank has it too.
        """
        return self.loss(model, batch, context)

    def derive(self, means: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Return the metrics of an evaluation, from means over all held-out samples of all ranks.

        Compute here what is not a mean itself, such as a perplexity or an IoU.
        """
        return {name: float(mean) for name, mean in means.items() if mean.numel() == 1}

    def metrics(self) -> Mapping[str, Any]:
        """Return torchmetrics objects that `evaluate` updates; the core resets and reads them."""
        return {}

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> Mapping[str, float | Path]:
        """Finish an evaluation (sample, draw); return metrics that are already reduced.

        Collective: every rank calls it, with the evaluated weights. `folder` is the run's
        folder; only the first rank may write there. A returned path is that of a picture.

        Torch, NumPy and Python's `random` are seeded before by the run's seed and the step, the
        same on every rank. Ranks that share the work draw from a generator for each sample instead.

        A stop signal cannot interrupt it unless it calls `context.raise_if_stopping()`: do so
        if it takes longer than a few seconds.
        """
        return {}

    def collate(self, samples: list[Any]) -> Any:
        """Turn a list of samples into a batch."""
        return default_collate(samples)

    def state(self) -> dict[str, Any]:
        """Return the state that the task needs after a resume (statistics, vocabularies).

        It must be the same on every rank: checkpoints keep that of the first one. Ranks are
        compared after the first step and at every save, and a difference ends the run. Only
        running statistics of batch normalization may differ, as in the model.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; called before `build_model`, after `train_data`."""
