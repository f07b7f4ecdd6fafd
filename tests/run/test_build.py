"""What `prepare` sets outside of the run is put back when the run ends."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as compiler
from torch.utils.data import DataLoader
from whole_run import config_for

from lockstep import RunConfig, fit, prepare
from lockstep.errors import ConfigError
from lockstep.testing import FakeWorld, TinyTask


class Loaded(TinyTask):
    """Returns a DataLoader of its training or of its held-out data."""

    def __init__(self, method: str) -> None:
        super().__init__()
        batches = DataLoader(TinyTask().train_data())  # type: ignore[arg-type,var-annotated]
        setattr(self, method, lambda: batches)


@pytest.mark.parametrize("method", ["train_data", "eval_data"])
def test_a_torch_data_loader_is_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the data are a torch DataLoader"):
        fit(Loaded(method), config_for(tmp_path))


class Optimized(TinyTask):
    """Builds something else than an optimizer that takes one gradient."""

    def __init__(self, build: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.build = build

    def build_optimizer(self, model: nn.Module, lr: float) -> Any:
        return self.build(model)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda model: None, "build_optimizer returned None, not a torch.optim.Optimizer"),
        (lambda model: [], "build_optimizer returned []"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS.step needs a closure"),
    ],
)
def test_what_cannot_take_a_step_is_refused(
    build: Callable[[nn.Module], Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        fit(Optimized(build), config_for(tmp_path))
    assert caught.value.problem.startswith(said)


class Watched(TinyTask):
    """Notes whether compiled code would be replayed as a graph."""

    def compile(self, model: nn.Module) -> None:
        self.replays_graphs = compiler.triton.cudagraphs


def test_the_compiler_replays_graphs_until_the_run_ends(tmp_path: Path) -> None:
    before, task = compiler.triton.cudagraphs, Watched()
    config = RunConfig.parse({"output_dir": str(tmp_path), "max_steps": 1, "compile": "graphs"})
    with ExitStack() as stack:
        prepare(task, config, FakeWorld(), stack)
        assert compiler.triton.cudagraphs
    assert task.replays_graphs
    assert not before
    assert not compiler.triton.cudagraphs
