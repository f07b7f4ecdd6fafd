"""A run that an earlier version of lockstep began is continued by this one.

`earlier_version/` holds what commit fedfc92 left after 22 of 44 steps of this task.
"""

import shutil
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep import CheckpointStore, Context, PartialLoss, RunConfig, Task, read_events
from lockstep.testing import run_ranks

EARLIER = Path(__file__).with_name("earlier_version")


class Saved(Task):
    name = "saved"

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=lr)

    def train_data(self) -> list[Tensor]:
        return list(torch.randn(64, 5, generator=torch.Generator().manual_seed(0)))

    def eval_data(self) -> list[Tensor]:
        return self.train_data()[:8]

    def loss(self, model: nn.Module, batch: Tensor, context: Context) -> PartialLoss:
        error = (model(batch[:, :4])[:, 0] - batch[:, 4]).square()
        return PartialLoss(error.sum(), len(error), {"error": (error.sum(), len(error))})


def train(folder: Path) -> None:
    from lockstep import fit

    values = {
        "output_dir": str(folder),
        "max_steps": 44,
        "batch": {"batch_size": 8},
        "rate": {"lr": 1e-2},
        "schedule": {"warmup_steps": 3},
        "checkpoint": {"every_steps": 11},
        "averages": (0.9,),
        "max_grad_norm": 1.0,
        "device": "cpu",
        "log_every": 5,
        "sinks": {"curves": False},
    }
    fit(Saved(), RunConfig.parse(values))


def parts_of(folder: Path) -> dict[str, Tensor]:
    checkpoint, rejected = CheckpointStore(folder / "checkpoints", recipe="saved").latest()
    assert checkpoint is not None
    assert (checkpoint.step, rejected) == (44, [])
    weights, averages = checkpoint.load("model"), checkpoint.load("average_0.9")
    return {**weights, **{f"average {name}": value for name, value in averages.items()}}


def test_a_run_of_an_earlier_version_resumes_where_it_stopped(tmp_path: Path) -> None:
    """Straight and resumed end with the same weights, up to the rounding of another machine."""
    shutil.copytree(EARLIER, tmp_path / "resumed")
    run_ranks(1, train, tmp_path / "resumed")
    run_ranks(1, train, tmp_path / "straight")
    everything = read_events(tmp_path / "resumed", raw=True)
    assert [event["step"] for event in everything if event["event"] == "resume"] == [22]
    epochs = [e for e in read_events(tmp_path / "resumed") if e["event"] == "epoch"]
    assert [epoch["each_once"] for epoch in epochs] == [True] * 5
    resumed, straight = parts_of(tmp_path / "resumed"), parts_of(tmp_path / "straight")
    assert resumed.keys() == straight.keys()
    for name, value in straight.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-4, atol=1e-5, msg=name)
