"""What a recipe brings: a model, its data, and a loss that has not been averaged yet.

Owns: the contract between what is trained and the core that trains it. Does
not own: batches, ranks, devices, steps. The core never looks inside a batch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from lockstep.data.order import Order
from lockstep.dist.agreement import agree_to_continue
from lockstep.dist.world import World
from lockstep.errors import ConfigError
from lockstep.exact.contrastive import GatheredRows
from lockstep.plan import Contract, CutChange
from lockstep.randomness import keyed_generator


@dataclass(frozen=True, slots=True)
class PartialLoss:
    """A loss that has been summed but not yet averaged.

    `weight` counts the units inside `loss_sum`: images, masked residues,
    scribbled pixels, pairs. Keeping the two apart lets the core divide by the
    weight of the whole step, so the gradient does not depend on how the units
    fell on ranks and micro-batches. `parts` are further (sum, weight) pairs to
    report under their names, alike for all micro-batches of a step; they carry no
    gradient.
    """

    loss_sum: Tensor
    weight: Tensor | float
    parts: Mapping[str, tuple[Tensor, Tensor | float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Context:
    """What a loss may know beside its model and its batch."""

    world: World
    seed: int
    step: int
    """Weight updates made so far."""
    place: int
    """Which micro-batch of the step's global batch this is, whatever rank holds it."""
    training: bool = True
    counts: bool = True
    """Whether this micro-batch adds to the step, or only keeps its rank in company."""
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    """What `Task.weights` counted, summed over the whole step; never 0, so divide by it."""
    gathered: GatheredRows | None = None
    """In exact mode, the other leaves of the step, whatever ranks have them."""
    exact: bool = False
    stop_code: Callable[[], int] | None = None
    """In `finish_evaluation`: the exit code of this rank's stop signal, or 0."""
    changed_cut: CutChange | None = None
    """In a custom loop that was resumed with other micro-batches: what they were and are."""

    def raise_if_stopping(self) -> None:
        """Leave a long `finish_evaluation` if any rank was asked to stop. Collective.

        Call it in every round of a long loop, equally often on every rank: they agree, so all of
        them leave in the same round. The run then saves, and repeats the evaluation when it
        resumes. Clean up in a `finally`, and let the StopRequested pass. Outside of
        `finish_evaluation` this does nothing.
        """
        if self.stop_code is not None:
            agree_to_continue(self.world, stop=self.stop_code())

    def generator(self, stream: str) -> torch.Generator:
        """Return the random stream called `stream` of this micro-batch.

        It differs between micro-batches, repeats on resume, and is the same for
        every number of ranks. In evaluation it does not depend on the step, so
        that two evaluations differ by their weights alone.
        """
        step = self.step if self.training else "evaluation"
        return keyed_generator(self.world.device, self.seed, stream, step, self.place)

    def gather(self, local: Tensor) -> Tensor:
        """Concatenate `local` over all ranks, in rank order, carrying gradients. Collective.

        In exact mode: over all micro-batches of the step, one row for each sample.
        """
        if self.gathered:
            return self.gathered.gather(local)
        self._check_gather()
        return self.world.all_gather(local if self.counts else local[:0])

    def gather_start(self, local: Tensor) -> int:
        """Return the row at which `gather(local)` holds this rank's rows. Collective."""
        if self.gathered:
            return self.gathered.start
        self._check_gather()
        return sum(self.world.all_lengths(len(local) if self.counts else 0)[: self.world.rank])

    def _check_gather(self) -> None:
        if self.training and self.changed_cut is not None:
            self.changed_cut.raise_for_gather()
        if self.exact:
            raise ConfigError(
                "the loss gathers, and exact mode must know that before the first step",
                "set gathers = True in the task",
            )
        if not self.training and self.world.size > 1:
            raise ConfigError(
                "a gather in evaluation: ranks hold different numbers of held-out batches",
                "define Task.evaluate so that it does not gather",
            )


class Task:
    """What is trained. Override what differs from the defaults; `loss` always does."""

    name = "custom"
    """Written into every checkpoint; a checkpoint of another name is refused."""
    gathers: bool = False
    """The loss compares the samples of all ranks of a micro-batch. A run then goes on with the
    same number of them (batch_size x ranks) only: with another, it would be another loss."""

    calls_alike: bool = False
    """`finish_evaluation` calls the model as a module, as often on every rank. Under
    `parallel=fsdp` it then does without all of the weights on each of them."""

    may_change: tuple[str, ...] = ()
    """Which of `settings` may change before a run goes on, by their dotted names: where data lie,
    what is drawn. Any other that has changed is refused."""

    def settings(self) -> dict[str, Any]:
        """Return what the task was built with, as JSON has it: recorded, and alike on all ranks."""
        return {}

    def build_model(self) -> nn.Module:
        """Return the model, with its initial weights, on the CPU."""
        raise NotImplementedError

    def train_data(self) -> Any:
        """Return the training samples: anything with `len` and an integer index, or an iterable.

        They must be the same on every rank. Torch, NumPy and Python's `random` are seeded before,
        and again before `eval_data`: where both make a random split of the same samples, give
        the split a generator of its own (`torch.Generator().manual_seed(0)`).
        """
        raise NotImplementedError

    def eval_data(self) -> Any | None:
        """Return the held-out samples, or None when there is nothing to evaluate."""
        return None

    def order(self, data: Any, seed: int) -> Order | None:
        """Return the order to visit `data` in; None shuffles it anew every epoch."""
        return None

    def banner(self, world: World, contract: Contract) -> list[str]:
        """Return further lines for the first rank to print before the first step."""
        return []

    def build_optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        """Return the optimizer at the base rate; the core applies the schedule to its groups."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=lr, fused=all(p.is_cuda for p in trained))

    def compile(self, model: nn.Module) -> None:
        """Compile `model` in place; a stack of equal blocks compiles faster block by block."""
        model.compile()

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return what `parallel=fsdp` gathers as one: by default what is in a list of modules.

        Each is called as a module (its weights are nowhere else in reach), and has parameters
        that no other has.
        """
        lists = (part for part in model.modules() if isinstance(part, nn.ModuleList))
        return [block for blocks in lists for block in blocks]

    def loss(self, model: nn.Module, batch: Any, context: Context) -> PartialLoss | Tensor:
        """Return the summed loss of a micro-batch and its weight.

        A plain scalar is taken as a mean over the samples of the micro-batch.
        """
        raise NotImplementedError

    def weights(self, batch: Any, context: Context) -> Mapping[str, Tensor | float]:
        """Count the units of each term of the loss, where terms have different units.

        A loss such as mean over scribbled pixels + mean over other pixels cannot be
        divided by one weight. The core counts before the backward pass, and hands the
        step's totals to `loss` as `context.weights`. Such a loss divides each term
        itself, returns their sum with weight 1, and its terms as `parts`.

        An evaluation counts all held-out units first, and its `context.weights` are those of an
        average batch: each term comes out as a mean over all units. Only with an `evaluate` of
        the task's own they are those of its batch; that returns sums.
        """
        return {}

    def evaluate(
        self, model: nn.Module, batch: Any, context: Context
    ) -> Mapping[str, tuple[Tensor, Tensor | float]] | PartialLoss | Tensor:
        """Return named (sum, weight) pairs of one held-out batch; by default the loss.

        A sum may be a tensor of any shape, a confusion matrix say, for `derive` to read. Keep
        nothing of a batch that does not count (`context.counts`): it is another rank's, too.
        """
        return self.loss(model, batch, context)

    def derive(self, means: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Return what an evaluation reports, from means over all held-out samples of all ranks.

        Here belongs what is no mean but follows from some: a perplexity, an IoU.
        """
        return {name: float(mean) for name, mean in means.items() if mean.numel() == 1}

    def metrics(self) -> Mapping[str, Any]:
        """Return torchmetrics objects that `evaluate` updates; the core resets and reads them."""
        return {}

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> Mapping[str, float | Path]:
        """Do what needs the whole model once (sample, draw); return numbers already reduced.

        Collective: every rank calls it, with the weights that were evaluated.
        `folder` is the run's folder; only the first rank may write there. A path
        that is returned names a picture.

        A stop signal cannot interrupt it unless it calls `context.raise_if_stopping()`: do so
        where it takes longer than a few seconds.
        """
        return {}

    def collate(self, samples: list[Any]) -> Any:
        """Turn a list of samples into a batch."""
        return default_collate(samples)

    def state(self) -> dict[str, Any]:
        """Return what the task itself must remember across a resume (statistics, vocabularies).

        It must be the same on every rank: checkpoints keep the first rank's. Ranks are compared
        after the first step and at every save, and refused where they differ. Only running
        statistics of batch normalization may be a rank's own, as they are in the model.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned; called before `build_model`, after `train_data`."""
