"""Test doubles, also for users: ranks, a world, a task, a clock.

`run_ranks` starts real processes in a real gloo group. They are forked from one that has already
imported torch, so that hundreds of such tests take minutes.
"""

import torch
from torch import Tensor, nn

from lockstep.dist.detect import Launch
from lockstep.harness.forked import run_ranks as run_ranks
from lockstep.harness.ranks import free_port as free_port
from lockstep.task import Context, PartialLoss, Task
from lockstep.world import World


class FakeWorld(World):
    """A rank without a group: collectives see only this rank."""

    def __init__(self, rank: int = 0, size: int = 1, device: str = "cpu") -> None:
        launch = Launch(rank=rank, size=size, local_rank=rank, local_size=size, launcher="fake")
        super().__init__(launch, torch.device(device), None)

    def all_sum(self, value: Tensor) -> Tensor:
        """Return this rank's value."""
        return value.clone()

    def all_max(self, *values: int) -> list[int]:
        """Return this rank's values."""
        return list(values)

    def all_texts(self, text: str) -> list[str]:
        """Return this rank's text, as if every rank had given it."""
        return [text] * self.size

    def all_lengths(self, length: int) -> list[int]:
        """Return this rank's number, as if every rank had given it."""
        return [length] * self.size

    def all_gather(self, local: Tensor) -> Tensor:
        """Return this rank's rows."""
        return local.clone()


class ManualClock:
    """A clock that only `advance` moves."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now += seconds


class TinyTask(Task):
    """A regression in float64 in which samples have different numbers of units; some have none.

    The loss of a sample is weighted by 0 to 3 units, so ranks and micro-batches rarely have the
    same weight, and a mean of means is visibly wrong.
    """

    name = "tiny"

    def __init__(self, num_samples: int = 48, num_held_out: int = 10, dropout: float = 0.0) -> None:
        self.num_samples = num_samples
        self.num_held_out = num_held_out
        self.dropout = dropout

    def build_model(self) -> nn.Module:
        """Return a small network in float64."""
        layers = (nn.Linear(5, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 3))
        return nn.Sequential(*layers).double()

    def train_data(self) -> list[dict[str, Tensor]]:
        """Return `num_samples` samples, always the same."""
        return _tiny_samples(self.num_samples, seed=1)

    def eval_data(self) -> list[dict[str, Tensor]]:
        """Return held-out samples."""
        return _tiny_samples(self.num_held_out, seed=2)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        """Return the squared error summed over units."""
        error = (model(batch["x"]) - batch["y"]).square().sum(dim=1)
        units = batch["units"]
        largest = (error.detach() * (units > 2)).sum(), (units > 2).sum()
        return PartialLoss((error * units).sum(), units.sum(), {"heavy": largest})


def _tiny_samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    units = torch.randint(0, 4, (count,), generator=generator).double()
    return [{"x": x[i], "y": y[i], "units": units[i]} for i in range(count)]
