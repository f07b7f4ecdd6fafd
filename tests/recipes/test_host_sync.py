"""No recipe's loss makes the host wait for the device: torch's `meta` device stands in for a GPU.

Nothing is computed there, so whatever reads a number fails by itself; what would carry numbers
there and wait for them to arrive is seen by the modes below.
"""

import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from test_exact import COMMANDS
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep.task
from lockstep.data.feed import to_device
from lockstep.task import Context, Task
from lockstep.testing import FakeWorld
from lockstep_recipes.atlas.sample_data import make_episodes
from lockstep_recipes.ctclip.task import CTClipTask
from lockstep_recipes.tables import placed

GPU = torch.device("meta")
HOST = torch.device("cpu")
MORE = {
    "protein": ["--use_discrete_diffusion"],
    "atlas": ["--set=data.use_state=true", "--set=data.use_last_action=true"],
}
VARIANTS = [
    *((recipe, []) for recipe in COMMANDS),
    ("protein", ["--use_discrete_diffusion", "--loss=elbo", "--transition=blosum"]),
    ("protein", ["--use_discrete_diffusion", "--loss=elbo", "--vocab=fragment"]),
    ("atlas", ["--set=model.predict_residual=true"]),
    ("ctclip", ["--set=model.clip.loss=siglip"]),
]


class Copies(TorchDispatchMode):
    """Notes where a tensor goes to the other side and the host waits for it."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            self._see(args[0], named.get("device"), named.get("non_blocking"))
        elif func is torch.ops.aten.copy_.default:
            self._see(args[1], args[0].device, len(args) > 2 and args[2])
        return func(*args, **named)

    def _see(self, source: Tensor, target: object, is_queued: object) -> None:
        if target is not None and not is_queued and source.device != target:
            self.found.append(f"{place()}: {tuple(source.shape)}")


class Literals(TorchFunctionMode):
    """Notes where Python's numbers become a tensor on the device, or an index into one."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and made.device == GPU:
            self.found.append(f"{place()}: {tuple(made.shape)}")
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].device == GPU:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(
                isinstance(i, list) or (isinstance(i, Tensor) and i.device == HOST) for i in index
            ):
                self.found.append(f"{place()}: an index")
        return made


def place() -> str:
    """Return the line that led to the call a mode sees: the last that is not torch's."""
    stack = traceback.extract_stack()
    line = [f for f in stack if "torch" not in Path(f.filename).parts and f.filename != __file__]
    return f"{Path(line[-1].filename).name}:{line[-1].lineno} {line[-1].line}"


@contextmanager
def watched() -> Iterator[list[str]]:
    found: list[str] = []
    with Copies(found), Literals(found):
        yield found


def build(recipe: str, folder: Path, more: list[str]) -> Task:
    """Return the recipe's task in miniature."""
    words = [*COMMANDS[recipe], *MORE.get(recipe, []), *more]
    if recipe == "atlas":
        words.append(f"--set=data.data_dir={make_episodes(folder / 'episodes', num=2)}")
    built = import_module(f"lockstep_recipes.{recipe}.flags").build(words)
    if isinstance(built, functools.partial):
        return CTClipTask(built.args[0])
    task: Task = built[0]
    return task


def step(task: Task, model: nn.Module, batch: Any) -> None:
    """Do what a step asks of a task."""
    world = FakeWorld()
    world.device = GPU
    counted = task.weights(batch, Context(world, 0, 0, 0))
    totals = {name: torch.ones((), device=GPU) for name in counted}
    task.loss(model, batch, Context(world, 0, 0, 0, weights=totals)).loss_sum.backward()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do without what the stand-in lacks: generators and autocast."""
    derive = lockstep.task.keyed_generator
    monkeypatch.setattr(lockstep.task, "keyed_generator", lambda _, *key: derive(HOST, *key))
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)


@pytest.mark.parametrize(("recipe", "more"), VARIANTS)
def test_a_loss_asks_the_device_and_does_not_wait(
    recipe: str,
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stand_in: None,
    read_batch: Callable[..., Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_REHEARSAL", str(int(recipe != "atlas")))
    task = build(recipe, tmp_path, more)
    batch, model = to_device(read_batch(task), GPU), task.build_model().to(GPU)
    with watched() as found:
        step(task, model, batch)
    assert not found


def test_whatever_waits_is_seen() -> None:
    there, table = torch.empty(4, 3, device=GPU), torch.arange(3.0)
    waiting: dict[str, Callable[[], object]] = {
        "to": lambda: table.to(there.device),
        "like": lambda: table.to(there),
        "copy": lambda: there.copy_(table),
        "tensor": lambda: torch.tensor([1.0], device=GPU),
        "new": lambda: there.new_tensor([1.0]),
        "list": lambda: there[[0, 1]],
        "index": lambda: there[torch.arange(2)],
    }
    for name, wait in waiting.items():
        with watched() as found:
            wait()
        assert found, name
    for reads in (lambda: there.sum().item(), lambda: there[there > 0], lambda: bool(there.any())):
        with pytest.raises((RuntimeError, NotImplementedError)):
            reads()
    with watched() as found:
        to_device(table, GPU)
        placed(table, GPU)
        _ = there[:, :2] * torch.arange(2, device=GPU) + torch.zeros(())
    assert not found
