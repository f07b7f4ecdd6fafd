"""What `prepare` sets outside of the run is put back when the run ends."""

from contextlib import ExitStack
from pathlib import Path

from torch import nn
from torch._inductor import config as compiler

from lockstep import RunConfig, prepare
from lockstep.testing import FakeWorld, TinyTask


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
