"""What the JiT tests share: small folders, a small network, and ranks in threads."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.testing import FakeWorld
from lockstep_recipes.jit.model import JiT, Variant
from lockstep_recipes.jit.sample_data import make_images, make_texts
from lockstep_recipes.jit.task import JiTConfig, JiTTask

MINI = Variant(
    patch=4,
    depth=2,
    width=32,
    heads=2,
    bottleneck=8,
    class_tokens=2,
    class_tokens_enter=1,
    native_size=8,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("jit") / "images", num=64, size=8, classes=4)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_texts(tmp_path_factory.mktemp("jit") / "texts", num=32)


@pytest.fixture
def make_task(image_folder: Path) -> Callable[..., JiTTask]:
    def make(**changes: Any) -> JiTTask:
        settings: dict[str, Any] = {
            "variant": "JiT-T/4",
            "image_size": 8,
            "data": image_folder,
        } | changes
        return JiTTask(JiTConfig(**settings))

    return make


@pytest.fixture
def make_mini() -> Callable[..., JiT]:
    """A JiT of a few thousand weights; `random=True` gives it an output that is not zero."""

    def make(*, image_size: int = 8, num_classes: int = 4, random: bool = False) -> JiT:
        torch.manual_seed(0)
        model = JiT(MINI, image_size, num_classes, dropout=0.0)
        if random:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(std=0.2)
        return model

    return make


class ThreadWorld(FakeWorld):
    """One of several ranks that live in threads of this process and really exchange tensors."""

    def __init__(self, rank: int, size: int, slots: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, size)
        self.slots, self.meet = slots, barrier

    def exchange(self, value: Tensor) -> list[Tensor]:
        self.slots[self.rank] = value
        self.meet.wait(30)
        values = list(self.slots)
        self.meet.wait(30)
        return values

    def all_sum(self, value: Tensor) -> Tensor:
        return torch.stack(self.exchange(value)).sum(dim=0)

    def all_gather(self, local: Tensor) -> Tensor:
        return torch.cat(self.exchange(local))


@pytest.fixture
def run_ranks() -> Callable[[int, Callable[[FakeWorld], Any]], list[Any]]:
    """Run a function once per rank and return what each returned, or raised."""

    def run(size: int, work: Callable[[FakeWorld], Any]) -> list[Any]:
        slots: list[Any] = [None] * size
        results: list[Any] = [None] * size
        barrier = threading.Barrier(size)

        def one(rank: int) -> None:
            try:
                results[rank] = work(ThreadWorld(rank, size, slots, barrier))
            except Exception as error:  # handed to the test, which judges it
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    return run


class Constant(nn.Module):
    """Predicts one number everywhere and remembers the labels it was given."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))
        self.labels: list[Tensor] = []

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        self.labels.append(label)
        return self.value.expand_as(x)


@pytest.fixture
def constant() -> Constant:
    return Constant()
