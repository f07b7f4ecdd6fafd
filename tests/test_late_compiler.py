"""Training that compiles nothing does without torch's compiler, to the same bits."""

import json
import subprocess
import sys
from pathlib import Path

TRAIN = """
import json, sys
from lockstep import RunConfig, fit
from lockstep.testing import TinyTask
import torch
folder, late, *optimizers = sys.argv[1:]
if late == "0":
    import torch._dynamo

class Trained(TinyTask):
    def build_optimizer(self, model, lr):
        return getattr(torch.optim, optimizer)(model.parameters(), lr)

values = {"batch": {"batch_size": 4}, "rate": {"lr": 0.05}, "sinks": {"curves": False}}
values["averages"] = [0.9]
for optimizer in optimizers:
    for steps in (2, 4):
        own = {"output_dir": f"{folder}/{optimizer}", "max_steps": steps}
        fit(Trained(), RunConfig.parse(values | own))
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
step(optimizer, [weight.grad])
seen["moved"] = weight.tolist()
seen["early"] = "torch._dynamo" in sys.modules
for name in ("register_step_pre_hook", "register_step_post_hook"):
    optimizer, weight = one()
    getattr(optimizer, name)(lambda *_, name=name: seen.update({name: True}))
    step(optimizer, [weight.grad])
optimizer, weight = one()
optimizer.step = lambda: seen.update(patched=True)
step(optimizer, [weight.grad])

class Own(torch.optim.SGD):
    def step(self, closure=None):
        seen["own"] = True
        return super().step(closure)

step(one(Own)[0], [])
seen["late"] = "torch._dynamo" in sys.modules
optimizer.zero_grad()
seen["told"] = told()
seen["real"] = torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
optimizer, weight = one()
step(optimizer, [weight.grad])
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


def test_a_run_and_its_resume_import_no_compiler_and_end_with_the_same_bits(
    tmp_path: Path,
) -> None:
    optimizers = ("AdamW", "SGD")
    late = run(TRAIN, tmp_path / "late", 1, *optimizers)
    assert late["loaded"] == []
    early = run(TRAIN, tmp_path / "early", 0, *optimizers)
    assert int(str(early["files"])) > int(str(late["files"])) + 500
    for name in optimizers:
        trained = state(tmp_path / "late" / name)
        assert len(trained) >= 2
        assert trained == state(tmp_path / "early" / name)


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
from lockstep.launch.local import preloaded
for name in preloaded(restarts=0):
    __import__(name)
early = "torch._dynamo" in sys.modules
for name in preloaded(restarts=1):
    __import__(name)
before = len(sys.modules)
torch.use_deterministic_algorithms(True)
print(json.dumps({"early": early, "imported": len(sys.modules) - before}), flush=True)
"""


def test_ranks_that_may_go_on_are_forked_where_what_exact_mode_asks_for_is_there() -> None:
    """Each would import it first, for a second; of those that do not, few ask for it."""
    assert run(FORKED) == {"early": False, "imported": 0}
