"""What a step reports, and what a run has come to by its steps.

Owns: the sums of losses since the last log line and since the epoch began, and finding the first
step that was no arithmetic. Does not own: taking a step, or what is done about a bad one.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.data.ledger import Ledger
from lockstep.data.loader import StepBatch
from lockstep.data.reader import MicroBatch
from lockstep.errors import ConfigError
from lockstep.task import PartialLoss

MAX_NUMBER = torch.finfo(torch.float32).max
"""A GPU that looks at float64 takes what is larger for infinite, and moves nothing."""
MAX_PENDING = 1000
"""Steps whose numbers may lie on the device before they are added up: 1 MB."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What happened, reduced over ranks and still on the device: reading a field costs a sync."""

    sums: Tensor
    """Loss, weight, then each part's pair, by name."""
    names: list[str]
    """Of the parts."""
    grad_norm: Tensor
    local_rows: list[Tensor]
    """What `sums` is the sum of: a row for each of this rank's micro-batches."""

    @property
    def loss_sum(self) -> Tensor:
        """Return the loss, summed over all units of the step."""
        return self.sums[0]

    @property
    def weight(self) -> Tensor:
        """Return the number of units."""
        return self.sums[1]

    @property
    def parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the (sum, weight) pair of each named part of the loss."""
        pairs = zip(self.sums[2::2], self.sums[3::2], strict=True)
        return dict(zip(self.names, pairs, strict=True))

    @property
    def loss(self) -> Tensor:
        """Return the mean loss over all units of the step."""
        return self.loss_sum / self.weight

    @property
    def finite(self) -> Tensor:
        """Say whether loss and gradient are numbers; alike on all ranks, being reduced."""
        return torch.isfinite(self.loss_sum + self.grad_norm)


def as_partial(
    result: PartialLoss | Tensor, micro_batch: MicroBatch, is_averaged: bool = False
) -> PartialLoss:
    """Return the loss with its weight; a plain mean weighs as much as it has samples.

    A borrowed micro-batch keeps its graph, so that its rank meets the others in
    the reduce, and counts for nothing.
    """
    if isinstance(result, Tensor):
        num_samples = 1 if is_averaged else len(micro_batch.ids)
        mean = None if result.dim() else result
        result = PartialLoss(result * num_samples, float(num_samples), mean=mean)
    if micro_batch.counts:
        return result
    parts = {name: (value * 0, weight * 0) for name, (value, weight) in result.parts.items()}
    return PartialLoss(result.loss_sum * 0, result.weight * 0, parts)


def names_of(part: PartialLoss, before: list[str] | None = None) -> list[str]:
    """Return the names of a loss's parts; those of the micro-batch `before` must be the same.

    Raises:
        ConfigError: they are not, and could not be added up; or it is no loss.
    """
    loss: Any = getattr(part, "loss_sum", part)
    is_real = isinstance(loss, Tensor) and not loss.is_complex()
    if not is_real or loss.numel() != 1 or not loss.requires_grad:
        problem = f"the loss of a micro-batch is {loss!r:.80}, not one number with a gradient"
        raise ConfigError(problem, "a mean, or a PartialLoss; 0 * output.sum() where there is none")
    names = sorted(part.parts)
    if before is not None and names != before:
        said = " and ".join(", ".join(one) or "none" for one in (before, names))
        problem = f"two micro-batches of a step have different parts of the loss: {said}"
        raise ConfigError(problem, "the same for each, with a sum and a weight of 0 for nothing")
    return names


def row_of(part: PartialLoss, names: list[str]) -> Tensor:
    """Lay out sums and weights as one row: loss, weight, then each part's pair, by name."""
    if not names and not isinstance(part.weight, Tensor):  # one launch, where a stack takes three
        is_loss, others = _plain_row(part.weight, part.loss_sum.device)
        return torch.where(is_loss, part.loss_sum.detach().reshape(()), others)
    pairs = [(part.loss_sum, part.weight), *(part.parts[name] for name in names)]
    return torch.stack([number(n, part.loss_sum.device) for pair in pairs for n in pair])


@dataclass
class Progress:
    """Where a run stands; saved whole in every checkpoint."""

    step: int = 0
    consumed: int = 0
    best: float | None = None
    ledger: Ledger = field(default_factory=Ledger)
    interval: dict[str, list[float]] = field(default_factory=dict)
    """Since the last log line: sum and weight of the loss and of each part."""
    epoch: dict[str, list[float]] = field(default_factory=dict)
    """Since the epoch began: likewise."""
    pending: list[tuple[int, StepReport]] = field(default_factory=list)
    """Steps that are not in these sums yet."""
    owes_evaluation: bool = False
    """Whether one was due and failed or was interrupted: a resume begins with it."""
    bad: tuple[int, float, float] | None = None
    """The first step that was no arithmetic, with its loss and gradient norm."""

    def take(self, report: StepReport | None, batch: StepBatch) -> None:
        """Count one finished step, or one that was left out; nothing here waits for the device."""
        self.step = batch.step + 1
        self.consumed = batch.consumed
        if report is None:
            return
        if self.pending and self.pending[-1][1].names != report.names:
            self.settle()  # rows are added up together: they must mean the same
        self.pending.append((batch.step, report))
        if len(self.pending) == MAX_PENDING:
            self.settle()

    def settle(self) -> tuple[int, float, float] | None:
        """Add up the steps that are pending, and return `bad`; this waits for the device."""
        if not self.pending:
            return self.bad
        steps, reports = zip(*self.pending, strict=True)
        self.pending = []
        rows = torch.stack([report.sums for report in reports]).tolist()
        norms = torch.stack([report.grad_norm for report in reports]).tolist()
        for step, row, norm in zip(steps, rows, norms, strict=True):
            if self.bad is None and not (abs(row[0]) <= MAX_NUMBER and norm <= MAX_NUMBER):
                self.bad = step, row[0] / row[1] if row[1] else row[0], norm
            for place, name in enumerate(("loss", *reports[0].names)):
                for sums in (self.interval, self.epoch):
                    value, weight = sums.get(name, (0.0, 0.0))
                    sums[name] = [value + row[2 * place], weight + row[2 * place + 1]]
        return self.bad

    def state(self) -> dict[str, Any]:
        """Return it as a tree of numbers."""
        self.settle()
        saved = {k: v for k, v in vars(self).items() if k not in ("pending", "bad")}
        return {**saved, "ledger": [self.ledger.digest, self.ledger.count]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Progress":
        """Rebuild it from a checkpoint."""
        for key in ("interval", "epoch"):  # tensors, in checkpoints of 0.1
            state[key] = {name: [float(n) for n in sums] for name, sums in state[key].items()}
        return cls(**{**state, "ledger": Ledger(*state["ledger"])})


def number(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a number as float64 on the device, without waiting for it."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64).reshape(())
    return constant(value, device)


@functools.lru_cache(maxsize=256)
def constant(value: float, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a plain number; most are the size of a batch, and made once. Not to be changed."""
    return torch.full((), value, dtype=dtype, device=device)


@functools.lru_cache(maxsize=256)
def _plain_row(weight: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where a row without parts has its loss, and the row but for that."""
    row = torch.tensor([0.0, weight], dtype=torch.float64, device=device)
    return torch.tensor([True, False], device=device), row
