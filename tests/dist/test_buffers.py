"""Buffers of a model in a custom loop: after every step, every rank has the first rank's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import CheckpointStore, Loader, World, train_step
from lockstep.parallel import bare
from lockstep.testing import TinyTask, run_ranks

PROBE = torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5)


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def five_lines(num_steps: int, folder: Path | None = None, **options: Any) -> list[list[Any]]:
    """Train without a word about buffers; return what each rank's own evaluations found."""
    found = []
    with World.enter("cpu", timeout_s=20) as world:
        model = world.replicate(normalised())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = Loader(TinyTask().train_data(), world, batch_size=4, epochs=1)
        for batch in loader:
            if batch.step == num_steps:
                break
            train_step(TinyTask().loss, model, optimizer, batch, world, **options)
            if folder is not None:
                CheckpointStore(folder).save_from(world, loader.step, model=model)
            found.append(evaluated(bare(model)))
        if options:
            world.sync_buffers(model)
            found.append(evaluated(bare(model)))
    return found


def evaluated(model: nn.Module) -> list[Any]:
    """Evaluate on this rank alone; ranks need not do so together, nor equally often."""
    model.eval()
    with torch.no_grad():
        made = model(PROBE).tolist()
    model.train()
    return made + [buffer.tolist() for buffer in model.buffers()]


def test_every_rank_evaluates_the_same_model_after_every_step() -> None:
    first, second = run_ranks(2, five_lines, 3)
    assert first == second
    assert first[0] != first[1]  # the statistics move


def test_the_statistics_are_those_of_the_first_rank() -> None:
    # Another rank's forward passes leave no trace in them.
    synchronised = run_ranks(2, five_lines, 2)[0]
    own = run_ranks(2, lambda: five_lines(2, buffers_later=True))[0]
    assert own[:2] == synchronised


def test_statistics_that_are_left_for_later_differ_until_they_are_synchronised() -> None:
    first, second = run_ranks(2, lambda: five_lines(2, buffers_later=True))
    assert first[0] != second[0]
    assert first[-1] == second[-1]


def test_ranks_go_on_from_a_save_with_the_buffers_that_were_saved(tmp_path: Path) -> None:
    first, second = run_ranks(2, lambda: five_lines(2, tmp_path, buffers_later=True))
    assert first == second
    saved = CheckpointStore(tmp_path).latest()[0]
    assert saved is not None
    assert saved.load("model")["1.running_mean"].tolist() in first[1]


class Odd(nn.Module):
    """Buffers of all widths and shapes, with what depends on the rank in each."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        for number, dtype in enumerate(
            (torch.uint8, torch.float64, torch.bool, torch.bfloat16, torch.complex64, torch.int16)
        ):
            value = torch.full((3, number + 1), rank + number).to(dtype)
            self.register_buffer(f"of_{number}", value)
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("none", torch.zeros(0, 4))
        self.register_buffer("expanded", torch.zeros(1).expand(5))


def odd_buffers() -> list[Any]:
    with World.enter("cpu", timeout_s=20) as world:
        model = Odd(world.rank)
        kept = [buffer.data_ptr() for buffer in model.buffers()]
        world.sync_buffers(model)
        assert kept == [buffer.data_ptr() for buffer in model.buffers()]  # in place
        return [(str(buffer.dtype), buffer.tolist()) for buffer in model.buffers()]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_buffers_of_every_kind_become_the_first_ranks(num_ranks: int) -> None:
    expected = [(str(buffer.dtype), buffer.tolist()) for buffer in Odd(0).buffers()]
    assert run_ranks(num_ranks, odd_buffers) == [expected] * num_ranks
