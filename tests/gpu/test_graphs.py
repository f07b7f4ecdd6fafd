"""A step whose kernels are replayed as one moves the weights as one whose kernels are named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from lockstep import PartialLoss, RunConfig, Task, fit
from lockstep.task import Context

pytestmark = pytest.mark.gpu


class Small(Task):
    """Convolutions, dropout and running statistics, far too small for a GPU."""

    name = "small"

    def build_model(self) -> nn.Module:
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 36, 4))

    def train_data(self) -> list[Tensor]:
        return list(torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(1)))

    def loss(self, model: nn.Module, batch: Tensor, context: Context) -> PartialLoss:
        wanted = batch.mean(dim=(2, 3)).argmax(dim=1)
        nats = functional.cross_entropy(model(batch), wanted, reduction="sum")
        return PartialLoss(nats, float(len(batch)))


def train(folder: Path, how: object, max_steps: int) -> dict[str, Tensor]:
    torch._dynamo.reset()
    values = {
        "output_dir": str(folder),
        "max_steps": max_steps,
        "batch": {"batch_size": 8, "accumulate": 2},
        "rate": {"lr": 0.01},
        "averages": [0.9],
        "compile": how,
        "checkpoint": {"every_steps": 3},
        "sinks": {"curves": False},
    }
    fit(Small(), RunConfig.parse(values))
    return load_file(folder / "checkpoints" / f"step_{max_steps:08d}" / "model.safetensors")


@pytest.mark.timeout(400)
def test_graphs_move_the_weights_alike_over_micro_batches_and_a_resume(tmp_path: Path) -> None:
    named = train(tmp_path / "named", True, 9)
    replayed = train(tmp_path / "replayed", "graphs", 9)
    train(tmp_path / "resumed", "graphs", 6)
    resumed = train(tmp_path / "resumed", "graphs", 9)
    for name, weight in named.items():
        torch.testing.assert_close(replayed[name], weight, rtol=1e-5, atol=1e-6)
        assert torch.equal(replayed[name], resumed[name]), name
