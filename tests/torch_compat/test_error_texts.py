"""The words that are searched for in torch's errors, as the torch of today says them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.testing import free_port
from lockstep.torch_compat.error_texts import CPU_ALLOCATOR, NOT_DETERMINISTIC

FIT = """
from lockstep import RunConfig, fit
from lockstep.testing import TinyTask

class Failing(TinyTask):
    def loss(self, model, batch, context):
        if context.step == 3 and context.world.rank == 1:
            raise ValueError("the planted fault")
        return super().loss(model, batch, context)

fit(Failing(num_samples=64), RunConfig(output_dir="run", max_steps=6, device="cpu",
                                       batch={"batch_size": 4}, sinks={"curves": False}))
"""
OWN_LOOP = """
import torch
from lockstep import Loader, World, train_step

world = World.enter(device="cpu")
model = world.replicate(torch.nn.Linear(2, 1))
data = [torch.ones(2) * i for i in range(64)]

def loss(model, batch, context):
    if context.step == 3 and world.rank == 1:
        raise ValueError("the planted fault")
    return model(batch).mean()

optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in Loader(data, world, batch_size=4, epochs=1):
    train_step(loss, model, optimizer, batch, world)
"""
SENTENCE = "lockstep: rank 0 lost its connection: another rank ended\n  try: read the error of that"


def train_on_two(code: str, folder: Path, python: Path, **env: str) -> str:
    """Start two ranks by hand; return what they say. Torchrun might end one before it speaks."""
    (folder / "train.py").write_text(code)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    output = folder / "output.txt"
    with output.open("a") as file:
        ranks = [
            subprocess.Popen(
                [str(python), "train.py"],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **common, "RANK": rank, **env},
                stdout=file,
                stderr=file,
            )
            for rank in ("0", "1")
        ]
        codes = [rank.wait(90) for rank in ranks]
    said = output.read_text()
    assert codes == [1, 1], said
    return said


def rank_tracebacks(text: str) -> list[str]:
    """Return the errors of the ranks' tracebacks: those that pass through the script."""
    return re.findall(r'train\.py", line .*?\n(?:\[rank\d\]: )?(\w+Error): ', text, re.DOTALL)


@pytest.mark.parametrize("code", [FIT, OWN_LOOP])
def test_a_rank_that_another_leaves_alone_says_a_sentence(code: str, tmp_path: Path) -> None:
    said = train_on_two(code, tmp_path, Path(sys.executable))
    assert rank_tracebacks(said) == ["ValueError"], said
    assert said.count(SENTENCE) == 1, said
    assert "GLHF" not in said
    assert said.index("the planted fault") < said.index(SENTENCE)


def test_whoever_asks_for_tracebacks_gets_both(tmp_path: Path, warm_programs: Path) -> None:
    said = train_on_two(FIT, tmp_path, warm_programs / "python", LOCKSTEP_TRACEBACK="1")
    assert rank_tracebacks(said) == ["ValueError", "RuntimeError"], said
    assert SENTENCE not in said


def test_an_error_of_the_scripts_own_in_such_words_keeps_its_traceback(
    tmp_path: Path, warm_programs: Path
) -> None:
    own = FIT.replace('ValueError("the planted fault")', 'RuntimeError("upload: reset by peer")')
    said = train_on_two(own, tmp_path, warm_programs / "python")
    assert rank_tracebacks(said) == ["RuntimeError"], said
    assert said.count(SENTENCE) == 1, said


def test_torch_says_that_the_host_has_no_memory() -> None:
    with pytest.raises(RuntimeError, match=CPU_ALLOCATOR):
        torch.empty(2**60)


def test_torch_says_which_operation_is_not_deterministic() -> None:
    code = (
        "import torch; torch.use_deterministic_algorithms(True); "
        "torch.zeros(4).put_(torch.tensor([0]), torch.ones(1), accumulate=False)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert NOT_DETERMINISTIC in ended.stderr, ended.stderr
