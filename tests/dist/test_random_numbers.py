"""NumPy's and Python's random numbers in a loss: keyed by place, also on N ranks and resumed."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep import CheckpointStore, PartialLoss, RunConfig, fit
from lockstep.task import Context
from lockstep.testing import TinyTask, run_ranks

NUM_STEPS = 6


def draw(library: str, count: int) -> Tensor:
    if library == "numpy":
        return torch.from_numpy(np.random.rand(count))
    return torch.tensor([random.random() for _ in range(count)], dtype=torch.float64)


class Noisy(TinyTask):
    """Disturbs every sample, in training and in evaluation; notes what it drew in training."""

    library = "numpy"

    def __init__(self, note: Path) -> None:
        super().__init__(num_samples=32, num_held_out=9)
        self.note = note

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        noise = draw(self.library, len(batch["x"]))
        if context.training:
            with (self.note / f"drawn_{context.world.rank}").open("a") as file:
                file.write(f"{context.step} {context.place} {noise.tolist()}\n")
        return super().loss(model, {**batch, "x": batch["x"] + noise[:, None]}, context)


class NoisyPython(Noisy):
    library = "python"


class Masked(Noisy):
    """Counts the units of a random mask beforehand, which the loss draws again."""

    def mask(self, batch: dict[str, Tensor]) -> Tensor:
        return (draw(self.library, len(batch["x"])) < 0.7).double()

    def weights(self, batch: dict[str, Tensor], context: Context) -> dict[str, Tensor]:
        return {"masked": self.mask(batch).sum(), "all": torch.tensor(float(len(batch["x"])))}

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        mask = self.mask(batch)
        error = (model(batch["x"]) - batch["y"]).square().sum(dim=1)
        loss = (error * mask).sum() / context.weights["masked"]
        counted = (mask.sum(), torch.ones(()))
        return PartialLoss(loss + error.sum() / context.weights["all"], 1.0, {"masked": counted})


class MaskedPython(Masked):
    library = "python"


def train(folder: Path, kind: type[Noisy], max_steps: int) -> dict[str, float]:
    # Two micro-batches a step: their gradients add up to the same bits on one rank and on two.
    config: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": max_steps,
        "batch": {"batch_size": 2, "global_batch_size": 4},
        "rate": {"lr": 0.05},
        "evaluation": {"every_steps": NUM_STEPS, "save_best": False, "batch_size": 2},
        "checkpoint": {"every_steps": 3},
        "sinks": {"curves": False},
        "device": "cpu",
        "timeout_s": 60,
    }
    return fit(kind(folder), RunConfig.parse(config)).metrics


def run(
    folder: Path, num_ranks: int, kind: type[Noisy], max_steps: int = NUM_STEPS
) -> dict[str, float]:
    """Train, and return what the first rank measured."""
    folder.mkdir(exist_ok=True)
    metrics: list[dict[str, float]] = run_ranks(num_ranks, train, folder, kind, max_steps)
    return metrics[0]


def weights(folder: Path) -> dict[str, Tensor]:
    checkpoint, _ = CheckpointStore(folder / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    assert checkpoint.step == NUM_STEPS
    loaded: dict[str, Tensor] = checkpoint.load("model")
    return loaded


def assert_same_bits(a: Path, b: Path) -> None:
    for name, tensor in weights(a).items():
        assert torch.equal(tensor, weights(b)[name]), name


@pytest.mark.parametrize("kind", [Noisy, NoisyPython, Masked, MaskedPython])
def test_two_ranks_draw_what_one_does(kind: type[Noisy], tmp_path: Path) -> None:
    one = run(tmp_path / "1", 1, kind)
    two = run(tmp_path / "2", 2, kind)
    assert_same_bits(tmp_path / "1", tmp_path / "2")
    assert one == two, "evaluation"


@pytest.mark.parametrize("kind", [Noisy, NoisyPython, Masked])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_resume_draws_what_the_run_would_have(
    num_ranks: int, kind: type[Noisy], tmp_path: Path
) -> None:
    straight = run(tmp_path / "straight", num_ranks, kind)
    run(tmp_path / "resumed", num_ranks, kind, max_steps=3)
    resumed = run(tmp_path / "resumed", num_ranks, kind)
    assert_same_bits(tmp_path / "straight", tmp_path / "resumed")
    assert straight == resumed, "evaluation"


@pytest.mark.parametrize("kind", [Noisy, NoisyPython])
def test_every_micro_batch_draws_numbers_of_its_own(kind: type[Noisy], tmp_path: Path) -> None:
    run(tmp_path, 2, kind)
    lines = [line for file in tmp_path.glob("drawn_*") for line in file.read_text().splitlines()]
    drawn = {line.split(" ", 2)[2] for line in lines}
    assert len(drawn) == len(lines) == 2 * NUM_STEPS
