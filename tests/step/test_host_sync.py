"""A step makes the host wait for the device nowhere: whatever would is caught as it is dispatched.

On the CPU nothing waits, so the calls that would wait on a GPU are refused instead: reading a
number out of a tensor, operations whose result has a size that only the device knows, and copies
to the host. The step runs with a fused optimizer and the update that a GPU gets.

Not seen: a wait inside a kernel that has no such operation (torch reports those on a real GPU:
`tests/gpu/test_host_sync.py`), and copies to the device from memory that is not page-locked (the
losses of the recipes are watched for those in `tests/recipes/test_host_sync.py`). Nor is
`to(device)` with a device that was passed in, which here is the tensor's own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import PartialLoss, RunConfig, fit
from lockstep.data.batch import StepBatch
from lockstep.step import train_step as step_module
from lockstep.step.update import GatedUpdate, new_non_finite_flag
from lockstep.task import Context
from lockstep.testing import TinyTask

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
    aten.nonzero_numpy,
    aten._unique,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
}
TO_HOST = (Tensor.cpu, Tensor.item, Tensor.numpy, Tensor.tolist)
INDEXING = (aten.index, aten.index_put, aten.index_put_)
FIRST = 2
"""Steps that may wait: buffers are made, kernels are chosen."""


class Waited(Exception):
    """The host would have waited here."""


class Operations(TorchDispatchMode):
    """Refuses operations whose result, or its size, the host has to read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in READS or (packet is aten.repeat_interleave and len(args) < 2):
            raise Waited(str(func))
        if packet in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise Waited(f"{func} with a mask")
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Refuses copies to the host, which on the CPU do nothing and are dispatched nowhere."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        targets = [*args[1:], *named.values()] if func is Tensor.to else []
        if func in TO_HOST or "cpu" in [t for t in targets if isinstance(t, str)]:
            raise Waited(func.__name__)
        return func(*args, **named)


@contextmanager
def refusing() -> Iterator[None]:
    with Operations(), Copies():
        yield


class FusedTask(TinyTask):
    """Trains as on a GPU, with one of the optimizers that read the flag on the device."""

    def __init__(self, kind: str, wait: Callable[[Tensor], object] | None = None) -> None:
        super().__init__()
        self.kind = kind
        self.wait = wait

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        if self.kind == "sgd":
            return torch.optim.SGD(model.parameters(), lr, momentum=0.9, fused=True)
        return torch.optim.AdamW(model.parameters(), lr, fused=True)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        part = super().loss(model, batch, context)
        if self.wait and context.step >= FIRST:
            self.wait(part.loss_sum.detach()[None])
        return part


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the run update as on a GPU and refuse to wait in a step; return the steps watched."""
    step, watched = step_module.TrainStep.__call__, list[int]()

    def gate(optimizer: Any, device: torch.device, scaler: Any, flag: Tensor | None) -> GatedUpdate:
        return GatedUpdate(new_non_finite_flag(device) if flag is None else flag, flag is not None)

    def watch(self: step_module.TrainStep, batch: StepBatch) -> Any:
        if batch.step < FIRST:
            return step(self, batch)
        with refusing():
            report = step(self, batch)
        watched.append(batch.step)
        return report

    monkeypatch.setattr(step_module, "choose_update", gate)
    monkeypatch.setattr(step_module.TrainStep, "__call__", watch)
    return watched


def train(task: TinyTask, folder: Path, **changes: object) -> None:
    values = {
        "output_dir": str(folder),
        "max_steps": 6,
        "device": "cpu",
        "batch": {"batch_size": 4, "accumulate": 2},
        "max_grad_norm": 1.0,
        "averages": [0.9],
        "sinks": {"curves": False},
        **changes,
    }
    fit(task, RunConfig.parse(values))


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}], ids=["plain", "bf16"])
def test_a_step_of_the_trainer_reads_nothing_from_the_device(
    kind: str, changes: dict[str, object], tmp_path: Path, as_on_a_gpu: list[int]
) -> None:
    train(FusedTask(kind), tmp_path, **changes)
    assert as_on_a_gpu == list(range(FIRST, 6))


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.item(),
    "float": lambda x: float(x),
    "if": lambda x: bool(x > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to, by name": lambda x: x.to(device="cpu"),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "set by a mask": lambda x: x.clone().__setitem__(x > 0, x),
    "select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: x.unique(),
    "repeat": lambda x: torch.repeat_interleave(x.long().clamp(0, 1)),
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("how", WAITS)
def test_the_planted_fault_a_loss_that_waits_is_caught(
    how: str, tmp_path: Path, as_on_a_gpu: list[int]
) -> None:
    with pytest.raises(Waited):
        train(FusedTask("sgd", WAITS[how]), tmp_path)
    assert as_on_a_gpu == []


def test_the_planted_fault_an_update_that_looks_on_the_host_is_caught(
    tmp_path: Path, as_on_a_gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update that a CPU gets reads the flag before each step, as it may."""
    monkeypatch.undo()
    step = step_module.TrainStep.__call__

    def watch(self: step_module.TrainStep, batch: StepBatch) -> Any:
        with refusing():
            return step(self, batch)

    monkeypatch.setattr(step_module.TrainStep, "__call__", watch)
    with pytest.raises(Waited):
        train(FusedTask("sgd"), tmp_path)
