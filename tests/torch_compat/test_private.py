"""What lockstep uses of torch that is private: each name is here, is used here alone, and may go.

Where a torch lacks one, either something else does the same, or a sentence says what is missing.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker
from torch.utils.flop_counter import FlopCounterMode

from lockstep import RunConfig, fit
from lockstep.dist.batch_norm import SyncBatchNorm2d
from lockstep.errors import ConfigError
from lockstep.testing import TinyTask, run_ranks
from lockstep.torch_compat import private

SRC = Path(__file__).resolve().parents[2] / "src"
ROOM = SRC / "lockstep" / "torch_compat" / "private.py"
COMPILER = ROOM.with_name("__init__.py")
FILES = sorted(SRC.rglob("*.py"))

# --- Nobody else uses a private name ----------------------------------------------------------

# Not torch's: `os._exit`, what a namedtuple has, the flags that an ArgumentParser knows, and what
# `multiprocessing` runs and keeps when Python ends.
PYTHONS_OWN = {"_exit", "_replace", "_fields", "_asdict", "_option_string_actions"}
PYTHONS_OWN |= {"_run_finalizers", "_resource_tracker", "_pid"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_in(source: str) -> set[str]:
    """Return the private names that a module of ours defines."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found |= {node.attr} if is_own else set()
    return {name for name in found if is_private(name)}


def private_words(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and name of whatever private is imported or reached in other objects."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            paths = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                paths.append(node.module or "")
            yield from ((node.lineno, word) for path in paths for word in path.split("."))
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch."):
            yield from ((node.lineno, word) for word in re.findall(r"\w+", str(node.value)))


def foreign_words(source: str, ours: set[str]) -> list[str]:
    """Return the private names in `source` that are neither ours nor Python's."""
    known = ours | PYTHONS_OWN
    found = private_words(source)
    return [
        f"line {line}: {name}" for line, name in found if is_private(name) and name not in known
    ]


OURS = {name for file in FILES if file != ROOM for name in defined_in(file.read_text())}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(SRC).as_posix())
def test_private_names_are_used_in_one_room(file: Path) -> None:
    found = foreign_words(file.read_text(), OURS)
    if file in (ROOM, COMPILER):
        assert found, "the guard has gone blind"
    else:
        assert not found


@pytest.mark.parametrize(
    "planted",
    [
        "import torch._inductor",
        "from torch._inductor import config",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "from torch._C._autograd import DeviceType",
        "torch._foreach_mul_(weights, 2)",
        "version = buffer._version",
        "self.reducer._rebuild_buckets()",
        "self._check_reducer_finalized()",
        "inner = getattr(model, '_orig_mod', model)",
        "if hasattr(torch, '_foreach_div_'): pass",
        "importlib.import_module('torch._dynamo')",
        "class Mine(DataLoader):\n    def f(self):\n        return self._get_iterator()",
    ],
)
def test_the_guard_of_private_names_can_fail(planted: str) -> None:
    assert foreign_words(planted, OURS)


def test_the_guard_of_private_names_lets_our_own_pass() -> None:
    own = (
        "class A:\n    _b = 1\n    def _c(self, other):\n        self._d = other._b + other._c(1)\n"
    )
    assert not foreign_words(own + "os._exit(1)", defined_in(own))


# --- A name that is missing -------------------------------------------------------------------


def test_what_is_missing_is_named_with_the_version() -> None:
    with pytest.raises(ConfigError) as caught:
        private.needed(Tensor, "_not_there", "to see which buffers a step changes")
    assert str(caught.value) == (
        f"torch {torch.__version__} has no Tensor._not_there, which lockstep needs to see which "
        "buffers a step changes\n  try: install a version of torch that lockstep was tested with: "
        "see docs/versions.md"
    )


class OptimizedModule(nn.Module):
    """Called like torch's, and keeping the module elsewhere."""


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda: private.check_reducer(SimpleNamespace(reducer=1)), "reducer._rebuild_buckets"),  # type: ignore[arg-type]
        (lambda: private.check_write_counter(object), "object._version"),
        (lambda: private.check_scaler(object()), "_found_inf_per_device"),  # type: ignore[arg-type]
        (lambda: private.uncompiled(OptimizedModule()), "_orig_mod"),
        (lambda: private.gather_flat(SimpleNamespace()), "all_gather_into_tensor"),
        (lambda: private.check_agent(SimpleNamespace()), "_start_workers"),
        (lambda: private.started_processes(SimpleNamespace()), "_pcontext"),
        (lambda: private.started_processes(SimpleNamespace(_pcontext=1)), "_pc.processes"),
        (lambda: private.num_restarts_left(SimpleNamespace()), "_remaining_restarts"),
        (lambda: private.rule_out_restarts(SimpleNamespace()), "_remaining_restarts"),
    ],
)
def test_without_a_name_that_nothing_replaces_nothing_is_done(use: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"has no {name}") + "|" + rf"\.{name},"):
        use()


@pytest.mark.parametrize(
    ("use", "module"),
    [(private.cuts_at_buckets, "_dynamo"), (private.replays_graphs, "_inductor")],
)
def test_a_compiler_without_its_setting_is_refused(
    use: Any, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, module, SimpleNamespace(config=SimpleNamespace()))
    with pytest.raises(ConfigError, match=rf"has no torch\.{module}\.config\."):
        use()


@pytest.mark.parametrize(
    ("owner", "name", "use"),
    [
        (
            torch.distributed,
            "_compute_bucket_assignment_by_size",
            lambda: private.assign_buckets([torch.ones(1)], [1]),
        ),
        (torch.autograd, "DeviceType", lambda: private.ran_on_gpu(SimpleNamespace())),
        (FlopCounterMode, "_count_flops", lambda: private.operation_counter({}, print)),
    ],
)
def test_a_measurement_without_its_name_is_refused(
    owner: Any, name: str, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(ConfigError, match=rf"has no .*\b{name}, which lockstep needs"):
        use()


class Unreached(TinyTask):
    """A task whose run must be refused before its first step."""

    def loss(self, model: nn.Module, batch: Any, context: Any) -> Any:
        raise AssertionError("the first step has begun")


def start(folder: str, settings: dict[str, Any]) -> str:
    """Start a run; return why it was refused, or how far it came."""
    common = {"max_steps": 1, "device": "cpu", "batch": {"batch_size": 4}}
    try:
        fit(Unreached(), RunConfig.parse({"output_dir": folder, **common, **settings}))
    except (ConfigError, AssertionError) as error:
        return str(error)
    raise AssertionError("it ran to its end")


@pytest.mark.parametrize(
    ("num_ranks", "owner", "missing", "settings"),
    [
        (1, torch.amp.GradScaler, "_found_inf_per_device", {"precision": "fp16"}),
        (1, torch._dynamo.config, "optimize_ddp", {"compile": True, "exact": True}),
        (1, torch._inductor.config.triton, "cudagraphs", {"compile": True}),
        *((2, torch.distributed.Reducer, method, {}) for method in private.REDUCER_METHODS),
    ],
)
def test_a_run_that_needs_a_missing_name_is_refused_before_its_first_step(
    num_ranks: int,
    owner: Any,
    missing: str,
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(owner, missing)
        refused = run_ranks(num_ranks, start, str(tmp_path), settings)
    for reason in refused:
        assert re.match(rf"torch {re.escape(torch.__version__)} has no \S*\b{missing}, ", reason)
    assert run_ranks(1, start, str(tmp_path), {}) == ["the first step has begun"]


def test_names_that_something_replaces_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = SimpleNamespace()
    assert not private.reads_flag(plain)
    assert not private.is_compiled(plain)
    assert private.without_gradient(plain) == []
    private.check_batch_norm_input(nn.Linear(1, 1), torch.zeros(1))
    monkeypatch.setattr(torch, "_inductor", plain)
    monkeypatch.delattr(worker, "WorkerInfo")
    private.set_worker_info(1, 4, 7, "data")
    assert get_worker_info() is None
    assert private.known_options({"triton.cudagraphs": True}) == {}
    assert private.base_of(nn.Linear, nn.Conv2d) == (nn.Linear, nn.Conv2d)
    assert private.aten_operator("_of_another_torch") is None


# --- Each name does what it is used for -------------------------------------------------------

LISTS = [torch.tensor([0.1, -0.0]), torch.tensor([[3.0]])], [torch.ones(2), torch.ones(1, 1) / 3]


@pytest.mark.parametrize(
    ("operation", "others"),
    [
        ("add", (0.0,)),
        ("add_", (LISTS[1],)),
        ("copy_", (LISTS[1],)),
        ("div_", (torch.tensor(3.0),)),
        ("lerp_", (LISTS[1], [0.1, 0.7])),
    ],
)
def test_a_loop_gives_the_bits_of_the_kernel_for_lists(
    operation: str, others: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = private.foreach(operation)
    assert kernel is getattr(torch, f"_foreach_{operation}")
    monkeypatch.delattr(torch, f"_foreach_{operation}")
    results = []
    for apply in (kernel, private.foreach(operation)):
        tensors = [tensor.clone() for tensor in LISTS[0]]
        returned = apply(tensors, *others)
        changed = tensors if operation.endswith("_") else returned
        results.append([tensor.view(torch.int32).tolist() for tensor in changed])
    assert results[0] == results[1]


def test_writes_in_place_are_counted() -> None:
    buffer = torch.zeros(2)
    before = private.num_writes(buffer)
    buffer.add_(1)
    assert private.num_writes(buffer) > before
    with torch.inference_mode():
        assert private.num_writes(torch.zeros(2)) == -1


def test_batch_normalisation_of_every_kind_is_known() -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d)
    base: Any = nn.BatchNorm1d.__base__
    foreign = type("OfAnotherPackage", (base,), {})
    for kind in (*kinds, SyncBatchNorm2d, foreign):
        assert issubclass(kind, private.BATCH_NORMS)
        assert issubclass(kind, private.NORMS_WITH_STATISTICS)
    assert issubclass(nn.InstanceNorm3d, private.NORMS_WITH_STATISTICS)
    for kind in (nn.InstanceNorm1d, nn.LayerNorm, nn.GroupNorm, nn.Module):
        assert not issubclass(kind, private.BATCH_NORMS)


def test_batch_normalisation_checks_its_input() -> None:
    with pytest.raises(ValueError, match="expected 4D input"):
        private.check_batch_norm_input(nn.BatchNorm2d(3), torch.zeros(2, 3))


def test_a_compiled_module_is_found_again() -> None:
    module = nn.Linear(1, 1)
    assert private.uncompiled(torch.compile(module)) is module
    assert private.uncompiled(module) is module
    assert not private.is_compiled(module)
    module.compile()
    assert private.is_compiled(module)


def test_a_data_set_can_ask_which_worker_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_worker_info", None)
    private.set_worker_info(1, 4, 7, "data")
    info: Any = get_worker_info()
    assert (info.id, info.num_workers, info.seed, info.dataset) == (1, 4, 7, "data")


def test_what_a_script_registered_runs_at_the_end_of_a_forked_rank() -> None:
    code = "import atexit, os; from lockstep.torch_compat import private; atexit.register(print, 7)"
    code += "; private.run_exit_functions(); print(end='', flush=True); os._exit(0)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "7\n"


def test_the_compilers_settings_are_read_and_set() -> None:
    for read, write in (
        (private.cuts_at_buckets, private.cut_at_buckets),
        (private.replays_graphs, private.replay_graphs),
    ):
        before = read()
        try:
            write(not before)
            assert read() is not before
        finally:
            write(before)
    options = {"triton.cudagraphs": True, "no such option": True}
    assert private.known_options(options) == {"triton.cudagraphs": True}


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_a_fused_optimizer_leaves_the_weights_if_the_flag_is_set(kind: type[Optimizer]) -> None:
    weight = nn.Parameter(torch.ones(3))
    fused: Any = kind
    optimizer = fused([weight], lr=0.1, fused=True)
    assert private.reads_flag(optimizer)
    assert not private.reads_flag(fused([weight], lr=0.1, fused=False))
    for flag in (1.0, 0.0):
        weight.grad = torch.full((3,), float("nan") if flag else 1.0)
        private.step_unless(torch.tensor(flag), optimizer)
        assert bool((weight == 1).all()) == bool(flag)


def test_a_scaler_tells_where_steps_overflowed() -> None:
    scaler = torch.amp.GradScaler("cpu")
    weight = nn.Parameter(torch.ones(3))
    optimizer = SGD([weight], lr=0.1)
    scaler.scale(weight.sum() * torch.inf).backward()  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizer)
    assert [float(flag) for flag in private.overflow_flags(scaler, optimizer)] == [1.0]


def leave_a_parameter_out() -> tuple[list[int], list[int], int]:
    torch.distributed.init_process_group("gloo")
    model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])
    model.forward = lambda x: model[2](model[0](x))  # type: ignore[method-assign]
    replica = DistributedDataParallel(model, **private.no_buffer_sync())  # type: ignore[arg-type]
    private.check_reducer(replica)
    replica(torch.ones(1, 2)).sum().backward()
    missing = private.without_gradient(replica)
    num_buckets = len(private.zero_buckets(replica))
    private.send_zeros(replica, 0)
    complete = DistributedDataParallel(nn.Linear(2, 2))
    complete(torch.ones(1, 2)).sum().backward()
    named = private.without_gradient(complete)
    torch.distributed.destroy_process_group()
    return missing, named, num_buckets


def test_a_replica_names_what_has_no_gradient_and_sends_zeros() -> None:
    assert run_ranks(2, leave_a_parameter_out) == [([1], [], 1)] * 2


def bucket_sizes() -> tuple[list[int], list[int]]:
    """Return the sizes of the buckets of a replica after two passes, and of the forecast."""
    torch.distributed.init_process_group("gloo")
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(9)))
    replica = DistributedDataParallel(model, bucket_cap_mb=1)
    for _ in range(2):  # the second forward pass rebuilds buckets in the order of gradients
        replica(torch.ones(1, 256)).sum().backward()
    replica(torch.ones(1, 256))
    real = [bucket.buffer().numel() for bucket in private.zero_buckets(replica)]
    torch.distributed.destroy_process_group()
    backward: list[Tensor] = list(model.parameters())[::-1]
    forecast = private.assign_buckets(backward, [1 << 20])
    return real, [sum(backward[index].numel() for index in bucket) for bucket in forecast]


def test_buckets_are_forecast_as_a_replica_has_them() -> None:
    (real, forecast), _ = run_ranks(2, bucket_sizes)
    assert real == forecast
    assert len(real) == 3


def test_operators_of_a_profile_did_not_run_on_a_gpu() -> None:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        torch.ones(2).add(1)
    events: Any = trace.events()  # type: ignore[no-untyped-call]
    assert events
    assert not any(private.ran_on_gpu(event) for event in events)
    assert private.ran_on_gpu(SimpleNamespace(device_type=torch.autograd.DeviceType.CUDA))


def test_operations_are_counted_and_those_without_a_formula_named() -> None:
    names: list[str] = []
    with private.operation_counter({}, names.append) as counter:
        torch.ones(2, 3).mm(torch.ones(3, 4)).exp()
    assert counter.get_total_flops() == 2 * 2 * 3 * 4
    assert "aten.exp" in names
    assert "aten.mm" not in names


def test_the_attention_of_a_cpu_has_its_operators() -> None:
    for name in (private.ATTENTION_ON_CPU, f"{private.ATTENTION_ON_CPU}_backward"):
        assert private.aten_operator(name) is getattr(torch.ops.aten, name)
