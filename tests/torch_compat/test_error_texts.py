"""The words that are searched for in torch's errors, as the torch of today says them."""

import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.testing import free_port, run_ranks
from lockstep.torch_compat.error_texts import (
    CPU_ALLOCATOR,
    NOT_DETERMINISTIC,
    TIMED_OUT,
    is_of_collective,
)

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
SENTENCE = "lockstep: rank 0 lost its connection to another rank, which ended\n  try: read that"


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
def test_a_rank_that_another_leaves_alone_says_a_sentence(
    code: str, tmp_path: Path, warm_programs: Path
) -> None:
    said = train_on_two(code, tmp_path, warm_programs / "python")
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


def wait_for_a_rank_that_does_not_answer() -> tuple[str, bool]:
    dist.init_process_group("gloo")
    impatient = dist.new_group(timeout=timedelta(seconds=1))
    said, is_collective = "", False
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(1), group=impatient)
        except RuntimeError as error:
            said, is_collective = str(error), is_of_collective(str(error), type(error).__module__)
    dist.barrier()  # the other rank is here meanwhile
    dist.destroy_process_group()
    return said, is_collective


def test_torch_says_that_another_rank_did_not_answer() -> None:
    said, is_collective = run_ranks(2, wait_for_a_rank_that_does_not_answer)[0]
    assert TIMED_OUT.search(said), said
    assert is_collective, said


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
