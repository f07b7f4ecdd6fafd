"""What runs under chaos: attention, batch normalisation and dropout, a few milliseconds a step.

    python -m chaos.train FOLDER STEPS [LEG [MUTANT]]

Owns: the task and its config. Does not own: the faults (`points.py`), which are armed from
FOLDER/chaos when a leg is named; without one this is a plain run of lockstep.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from chaos.schedule import Leg
from lockstep import Context, PartialLoss, RunConfig, RunResult, Task, fit
from lockstep_recipes import command

Reach = Callable[[str], None]

SAMPLES = 100
"""Eight steps of four leaves and one of two: with three or four ranks some borrow a leaf."""
EVERY = 5
AVERAGE = 0.9


class Net(nn.Module):
    """Tokens of a sample look at each other, then are normalised over the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(6, 16)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Sequential(nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        wide = self.widen(x)
        seen, _ = self.attention(wide, wide, wide, need_weights=False)
        return self.head(self.norm((wide + seen).transpose(1, 2)).mean(dim=2))


class HalvedAdamW(torch.optim.AdamW):
    """AdamW that updates one parameter group after the other; faults strike in between."""

    reach: Reach = staticmethod(lambda point: None)

    def step(self, closure: Any = None) -> None:
        groups = self.param_groups
        for number, group in enumerate(groups):
            if number:
                self.reach("mid_update")
            self.param_groups = [group]
            super().step(closure)
        self.param_groups = groups

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reach("restore")  # the model is restored by then
        super().load_state_dict(state)


class Chaotic(Task):
    """Regression with a weight for each sample.

    Args:
        reach: Called with the name of a point where a fault may strike.
    """

    name = "chaos"

    def __init__(self, reach: Reach = lambda point: None) -> None:
        self.reach = reach

    def build_model(self) -> nn.Module:
        return Net()

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        halves = [list(model.widen.parameters()), []]
        known = {id(p) for p in halves[0]}
        halves[1] = [p for p in model.parameters() if id(p) not in known]
        optimizer = HalvedAdamW([{"params": half} for half in halves], lr=lr)
        optimizer.reach = self.reach
        return optimizer

    def train_data(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(5)
        return list(torch.randn(SAMPLES, 4, 7, generator=generator))

    def eval_data(self) -> list[Tensor]:
        return self.train_data()[:11]

    def loss(self, model: nn.Module, batch: Tensor, context: Context) -> PartialLoss:
        noise = torch.randn(batch[:, :, :6].shape, generator=context.generator("noise"))
        made = model(batch[:, :, :6] + 0.1 * noise)
        error = functional.mse_loss(made, batch[:, :3, 6], reduction="none").sum(dim=1)
        units = 1 + (batch[:, 0, 0] > 0).to(error.dtype)
        return PartialLoss((error * units).sum(), units.sum(), {"plain": (error.sum(), len(error))})


def config_for(folder: Path, num_steps: int, leg: Leg) -> RunConfig:
    """Return the run: exact, saved every few steps, logged at another beat."""
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": num_steps,
        "batch": {"batch_size": 3, "global_batch_size": 12, "drop_last": False},
        "rate": {"lr": 2e-3},
        "schedule": {"warmup_steps": 20},
        "loader": {"num_workers": leg.workers},
        "evaluation": {"every_steps": 40},
        "checkpoint": {
            "every_steps": EVERY,
            "background": leg.background,
            "sharded": leg.sharded,
        },
        "averages": (AVERAGE,),
        "exact": True,
        "device": "cpu",
        "log_every": 3,
        "timeout_s": 60,
        "sinks": {"curves": False},
    }
    return RunConfig.parse(values)


def main(argv: list[str]) -> None:
    folder, num_steps = Path(argv[0]), int(argv[1])
    number = int(argv[2]) if len(argv) > 2 else None
    if len(argv) > 3 and argv[3]:
        from chaos.mutants import MUTANTS

        MUTANTS[argv[3]].plant()
    command.train(lambda _: partial(train, folder, num_steps, number), [])


def train(folder: Path, num_steps: int, number: int | None) -> RunResult:
    """Train plainly, or under the faults of a leg."""
    if number is None:
        return fit(Chaotic(), config_for(folder, num_steps, Leg(1, ())))
    from chaos.points import arm

    leg, faults = arm(folder, number)
    result = fit(Chaotic(faults.armed.reach), config_for(folder, num_steps, leg), [faults])
    faults.armed.reach("shutdown")  # a second time, after everything is closed
    return result


if __name__ == "__main__":
    from chaos import train as imported  # the one that faults and mutants are planted in

    imported.main(sys.argv[1:])
