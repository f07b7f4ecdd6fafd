"""Training that compiles nothing does without torch's compiler, to the same bits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import json, sys
from lockstep import RunConfig, fit
from lockstep.testing import TinyTask
import torch
folder, optimizer, late = sys.argv[1:]
if late == "0":
    import torch._dynamo

class Trained(TinyTask):
    def build_optimizer(self, model, lr):
        return getattr(torch.optim, optimizer)(model.parameters(), lr)

values = {"output_dir": folder, "max_steps": 4, "batch": {"batch_size": 4}, "rate": {"lr": 0.05},
          "sinks": {"curves": False}, "averages": [0.9]}
for steps in (2, 4):
    fit(Trained(), RunConfig.parse({**values, "max_steps": steps}))
loaded = sorted(name for name in sys.modules if name.startswith(("torch._dynamo", "sympy")))
print(json.dumps({"loaded": loaded, "files": len(sys.modules)}))
"""

WATCHED = """
import functools, json, sys
import torch
from torch import nn
from lockstep.late_compiler import bare_step, defer_compiler, step

def told():  # whether torch has asked the compiler to leave `zero_grad` alone
    function = torch.optim.Optimizer.zero_grad.__wrapped__
    return "functools.partial" not in repr(function.__dynamo_disable)

def one(kind=torch.optim.SGD):
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return kind([weight], 1.0), weight

seen = {}
defer_compiler()
optimizer, weight = one()
step(optimizer)
seen["moved"] = weight.tolist()
seen["early"] = "torch._dynamo" in sys.modules
for name in ("register_step_pre_hook", "register_step_post_hook"):
    optimizer, weight = one()
    getattr(optimizer, name)(lambda *_, name=name: seen.update({name: True}))
    step(optimizer)
optimizer, weight = one()
optimizer.step = lambda: seen.update(patched=True)
step(optimizer)

class Own(torch.optim.SGD):
    def step(self, closure=None):
        seen["own"] = True
        return super().step(closure)

step(one(Own)[0])
seen["late"] = "torch._dynamo" in sys.modules
optimizer.zero_grad()
seen["told"] = told()
seen["real"] = torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
optimizer, weight = one()
step(optimizer)
seen["moved late"] = weight.tolist()

ours = torch.optim.SGD.step
torch.optim.SGD.step = functools.wraps(ours)(lambda self: ours(self))
seen["watched class"] = bare_step(one()[0]) is None
print(json.dumps(seen))
"""

COMPILED = """
import json, sys
import torch
from lockstep.late_compiler import defer_compiler

defer_compiler()
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0)
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
assert "torch._dynamo" not in sys.modules
torch._dynamo.utils.counters.clear()
assert "torch._dynamo" in sys.modules
double = torch.compile(lambda x: 2 * x, backend="eager")
six = float(double(torch.tensor(3.0)))
print(json.dumps({"six": six, "real": torch._dynamo.__file__ is not None}))
"""


def run(code: str, *words: object) -> dict[str, object]:
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def state(folder: Path) -> dict[str, bytes]:
    newest = folder / "checkpoints" / "step_00000004"
    return {file.name: file.read_bytes() for file in sorted(newest.glob("*.safetensors"))}


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_run_and_its_resume_import_no_compiler_and_end_with_the_same_bits(
    optimizer: str, tmp_path: Path
) -> None:
    late = run(TRAIN, tmp_path / "late", optimizer, 1)
    assert late["loaded"] == []
    early = run(TRAIN, tmp_path / "early", optimizer, 0)
    assert int(str(early["files"])) > int(str(late["files"])) + 500
    assert state(tmp_path / "late") == state(tmp_path / "early")


def test_who_looks_on_at_a_step_is_not_passed_over() -> None:
    assert run(WATCHED) == {
        "moved": [0.0, 0.0],
        "early": False,
        "register_step_pre_hook": True,
        "register_step_post_hook": True,
        "patched": True,
        "own": True,
        "late": True,
        "told": True,
        "real": True,
        "moved late": [0.0, 0.0],
        "watched class": True,
    }


def test_what_is_compiled_is_compiled() -> None:
    assert run(COMPILED) == {"six": 6.0, "real": True}


FORKED = """
import json, sys
import torch
import lockstep.launch.warm
before = len(sys.modules)
torch.use_deterministic_algorithms(True)
print(json.dumps({"imported": len(sys.modules) - before}), flush=True)
"""


def test_ranks_are_forked_where_what_exact_mode_asks_for_is_there() -> None:
    """A rank that goes on after a kill would import it first, for a second."""
    assert run(FORKED) == {"imported": 0}
