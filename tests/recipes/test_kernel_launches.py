"""How much a loss asks the device for: in a small step the host is busy launching it, one by one.

Operations on a CPU stand in for launches on a GPU; views and empty memory are none.
"""

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from test_host_sync import build
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.task import Context, Task
from lockstep.testing import FakeWorld

NONE = {"detach", "empty", "empty_like", "_unsafe_view", "lift_fresh", "scalar_tensor"}
LIMITS = {"protein": 420, "atlas": 905}
"""Of a micro-batch of the smallest networks, forward and backward, under autocast."""


class Launches(TorchDispatchMode):
    """Counts what computes, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        self.counted[name] += not (func.is_view or name in NONE)
        return func(*args, **(kwargs or {}))


def take_loss(task: Task, batch: Any) -> tuple[Tensor, list[Tensor], Counter[str]]:
    """Return the loss of a batch under autocast, its gradient, and what was asked for."""
    torch.manual_seed(0)
    model, context = task.build_model(), Context(FakeWorld(), 0, 0, 0)
    with Launches() as launches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = task.loss(model, batch, context).loss_sum
        loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return loss.detach(), grads, +launches.counted


@pytest.mark.parametrize("recipe", LIMITS)
def test_a_loss_asks_for_no_more_than_it_did(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_batch: Callable[..., Any]
) -> None:
    """And what products share is cast once: the same loss to the bit, its gradient to rounding."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_REHEARSAL", str(int(recipe != "atlas")))
    task = build(recipe, tmp_path, [])
    batch = read_batch(task)
    take_loss(task, batch)  # tables are made once
    loss, grads, launches = take_loss(task, batch)
    assert launches.total() <= LIMITS[recipe], launches.most_common()
    model = import_module(f"lockstep_recipes.{recipe}.model")
    monkeypatch.setattr(model, "lowered", lambda x: x)
    apart, grads_apart, launches_apart = take_loss(task, batch)
    assert launches_apart["_to_copy"] > launches["_to_copy"]
    assert torch.equal(loss, apart)
    for one, other in zip(grads, grads_apart, strict=True):
        assert float((one - other).norm()) <= 0.02 * float(other.norm()) + 1e-6
