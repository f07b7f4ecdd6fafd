"""The progress of a run: its step, the samples consumed, the sums since the last log line.

Owns: the sums of losses since the last log line and since the epoch began, and finding the first
non-finite step. Does not own: taking a step.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.data.batch import StepBatch
from lockstep.data.ledger import Ledger
from lockstep.step.report import StepReport

OLD_NAMES = {"owes_evaluation": "evaluation_pending"}
"""Fields that older checkpoints store under another name."""
MAX_PENDING = 1000
"""The most steps whose numbers stay on the device before they are added up: on a GPU, two blocks of
512 bytes each, 1 MB in all."""


@dataclass
class Progress:
    """The progress of a run, saved in every checkpoint."""

    step: int = 0
    consumed: int = 0
    best: float | None = None
    """The best metric so far. Evaluations update it on the first rank only, which compares them."""
    ledger: Ledger = field(default_factory=Ledger)
    interval: dict[str, list[float]] = field(default_factory=dict)
    """Sum and weight of the loss and of each part since the last log line."""
    epoch: dict[str, list[float]] = field(default_factory=dict)
    """Sum and weight of the loss and of each part since the epoch began."""
    pending: list[tuple[int, list[str], Tensor, Tensor]] = field(default_factory=list)
    """Steps that are not in these sums yet: the step, the names of its parts, its sums, its
    gradient norm."""
    evaluation_pending: bool = False
    """Whether an evaluation was due and failed or was interrupted. A resume starts with it."""
    non_finite_step: tuple[int, float, float, float] | None = None
    """The first non-finite step, with its loss, gradient norm and weight."""

    def count(self, report: StepReport | None, batch: StepBatch) -> None:
        """Count a finished step, or a skipped one (None), without waiting for the device."""
        self.step = batch.step + 1
        self.consumed = batch.consumed
        if report is None:
            return
        if self.pending and self.pending[-1][1] != report.names:
            self.sum_pending()  # rows are added up together, so they need the same columns
        self.pending.append((batch.step, report.names, report.sums, report.grad_norm))
        if len(self.pending) == MAX_PENDING:
            self.sum_pending()

    def sum_pending(self) -> tuple[int, float, float, float] | None:
        """Add up the pending steps, and return `non_finite_step`. This waits for the device."""
        if not self.pending:
            return self.non_finite_step
        steps, (names, *_), sums, norms = zip(*self.pending, strict=True)
        self.pending = []
        rows = zip(steps, torch.stack(sums).tolist(), torch.stack(norms).tolist(), strict=True)
        for step, row, norm in rows:
            if self.non_finite_step is None and not math.isfinite(row[0] + norm):
                self.non_finite_step = step, row[0] / row[1] if row[1] else row[0], norm, row[1]
            for place, name in enumerate(("loss", *names)):
                for totals in (self.interval, self.epoch):
                    value, weight = totals.get(name, (0.0, 0.0))
                    totals[name] = [value + row[2 * place], weight + row[2 * place + 1]]
        return self.non_finite_step

    def state(self) -> dict[str, Any]:
        """Return the progress as a tree of numbers."""
        self.sum_pending()
        saved = {k: v for k, v in vars(self).items() if k not in ("pending", "non_finite_step")}
        return {**saved, "ledger": [self.ledger.digest, self.ledger.count]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Progress":
        """Rebuild the progress from a checkpoint."""
        for key in ("interval", "epoch"):  # tensors in checkpoints of version 0.1
            state[key] = {name: [float(n) for n in sums] for name, sums in state[key].items()}
        return cls(**{**state, "ledger": Ledger(*state["ledger"])})
