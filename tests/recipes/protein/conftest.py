"""What the protein tests share: small chains, a small task, PDB lines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep_recipes.protein.data import Split, chains_of
from lockstep_recipes.protein.sample_data import make_cache, make_chains
from lockstep_recipes.protein.structure import Chain
from lockstep_recipes.protein.task import ProteinConfig, ProteinTask

SMALL = {
    "use_discrete_diffusion": True,
    "hidden_dim": 16,
    "num_layers": 1,
    "num_neighbors": 6,
    "num_designs": 2,
    "sample_steps": 3,
}


class InMemory(ProteinTask):
    """The task on chains that are already here."""

    def __init__(self, config: ProteinConfig, train: list[Chain], held_out: list[Chain]) -> None:
        super().__init__(config)
        self.chains = train, held_out

    @property
    def split(self) -> Split:  # type: ignore[override]
        train, held_out = self.chains
        return Split(chains_of(train), chains_of(held_out), Path("memory"), False)


@pytest.fixture(scope="session")
def chains() -> list[Chain]:
    return make_chains(12, seed=1, min_length=10, max_length=16)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("protein") / "cache", num=40, num_held_out=4)


@pytest.fixture
def make_task(chains: list[Chain]) -> Callable[..., InMemory]:
    def make(**changes: Any) -> InMemory:
        return InMemory(ProteinConfig(**{**SMALL, **changes}), chains[:8], chains[8:])

    return make


@pytest.fixture
def batch(chains: list[Chain]) -> dict[str, torch.Tensor]:
    task = InMemory(ProteinConfig(), chains, [])
    data = task.train_data()
    return task.collate([data[i] for i in range(4)])
