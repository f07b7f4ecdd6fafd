"""Private names of torch and Python, and public ones that not every version has.

Owns: every such name, and the fallback if this version of torch does not have it: a slower way, or
an error with the name and the version. Does not own: the texts of torch's errors
(`error_texts.py`). `docs/versions.md` lists the names, and on which versions the tests ran.
"""

import atexit
import inspect
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.errors import ConfigError
from lockstep.torch_compat.error_texts import WITHOUT_GRADIENT


def needed(owner: Any, path: str, use: str) -> Any:
    """Return the attribute at a dotted path below a class, module or object of torch.

    Raises:
        ConfigError: this version of torch does not have it, and nothing can replace it.
    """
    found = owner
    for name in path.split("."):
        if not hasattr(found, name):
            where = getattr(owner, "__name__", type(owner).__name__)
            raise ConfigError(
                f"torch {torch.__version__} has no {where}.{path}, which lockstep needs {use}",
                "install a version of torch that lockstep was tested with: see docs/versions.md",
            )
        found = getattr(found, name)
    return found


# --- Tensors ---------------------------------------------------------------------------------


def foreach(operation: str) -> Callable[..., Any]:
    """Return torch's kernel that applies an operation to a list of tensors, or a loop over them.

    >>> list(foreach("add")([torch.ones(1), torch.zeros(1)], 2.0))
    [tensor([3.]), tensor([2.])]
    """
    fused = getattr(torch, f"_foreach_{operation}", None)
    return fused if fused is not None else _one_by_one(operation)


def _one_by_one(operation: str) -> Callable[..., Any]:
    """Return a loop with the same result as torch's kernel for lists, bit for bit."""

    def loop(tensors: list[Tensor], *others: Any) -> list[Tensor]:
        columns = (other if isinstance(other, list) else [other] * len(tensors) for other in others)
        rows = zip(tensors, *columns, strict=True)
        return [getattr(tensor, operation)(*operands) for tensor, *operands in rows]

    return loop


def check_write_counter(tensors: Any = Tensor) -> None:
    """Refuse, before training, a version of torch in which `num_writes` cannot work."""
    needed(tensors, "_version", "to see which buffers a step changes")


def num_writes(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place, as counted by autograd; -1 if unknown.

    Autograd does not count writes to a tensor that was made in inference mode, and torch may stop
    to tell.
    """
    return -1 if tensor.is_inference() else getattr(tensor, "_version", -1)


def aten_operator(name: str) -> Any:
    """Return an operator of torch's library, or None if this build does not have it."""
    return getattr(torch.ops.aten, name, None)


ATTENTION_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
"""The operator of torch's fused attention on a CPU; its backward pass appends `_backward`."""


# --- Modules ---------------------------------------------------------------------------------


def base_of(*layers: type[nn.Module]) -> tuple[type[nn.Module], ...]:
    """Return the private base class that these layers share, or the layers if there is none.

    A layer of another package may be derived from that class and from none of these.
    """
    bases = layers[0].__mro__
    shared = next(base for base in bases if all(issubclass(layer, base) for layer in layers))
    return layers if shared is nn.Module else (shared,)


BATCH_NORMS = base_of(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The classes of all batch normalisations, for `isinstance`."""
NORMS_WITH_STATISTICS = (*BATCH_NORMS, *base_of(nn.InstanceNorm1d, nn.InstanceNorm2d))
"""The classes of all layers that may keep running statistics."""


def check_batch_norm_input(layer: nn.Module, x: Tensor) -> None:
    """Refuse a tensor with the wrong number of axes for a layer of batch normalisation.

    A version of torch without this check leaves it to the layer itself.
    """
    check = getattr(layer, "_check_input_dim", None)
    if check is not None:
        check(x)


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called; False if torch does not tell."""
    return getattr(module, "_compiled_call_impl", None) is not None


def uncompiled(module: Any) -> Any:
    """Return the module that `torch.compile` was given, or `module` itself if it is not compiled.

    Raises:
        ConfigError: it is compiled, and this version of torch keeps the module elsewhere.
    """
    if type(module).__name__ != "OptimizedModule":
        return module
    return needed(module, "_orig_mod", "to find the module that torch.compile was given")


# --- DistributedDataParallel -----------------------------------------------------------------

REDUCER_METHODS = ("_rebuild_buckets", "_get_zeros_like_grad_buckets", "_run_comm_hook")


def no_buffer_sync() -> dict[str, bool]:
    """Return the option that keeps a forward pass from copying buffers; torch 2.13 renamed it."""
    known = inspect.signature(DistributedDataParallel).parameters
    renamed = "forward_sync_buffers" in known
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": False}


def check_reducer(model: DistributedDataParallel) -> None:
    """Refuse, before training, a version of torch in which `send_zeros` cannot work."""
    for method in REDUCER_METHODS:
        needed(model, f"reducer.{method}", "when a step fails on one rank of several")


def zero_buckets(model: DistributedDataParallel) -> Any:
    """Return the buckets in which gradients are sent, filled with zeros."""
    return model.reducer._get_zeros_like_grad_buckets()


def send_zeros(model: DistributedDataParallel, num_sent: int) -> None:
    """Send zeros for the remaining buckets of a backward pass that failed after `num_sent`."""
    with suppress(RuntimeError):  # a backward pass has begun: it is done
        model.reducer._rebuild_buckets()  # part of the second step's forward pass
    for bucket in zero_buckets(model)[num_sent:]:
        model.reducer._run_comm_hook(bucket).wait()


def assign_buckets(parameters: list[Tensor], limits_bytes: list[int]) -> list[list[int]]:
    """Return the indices of the parameters in each bucket that DDP would make, in order."""
    path = "distributed._compute_bucket_assignment_by_size"
    assign = needed(torch, path, "to forecast how gradients are sent")
    num = len(parameters)
    buckets, _ = assign(parameters, limits_bytes, [False] * num, list(range(num)))
    return [list(indices) for indices in buckets]


def without_gradient(model: DistributedDataParallel) -> list[int]:
    """Return the trained parameters that the last backward pass left without a gradient.

    The list is empty if all have one, and if this version of torch does not tell.
    """
    check = getattr(model, "_check_reducer_finalized", None)
    if check is None:
        return []
    try:
        check()
    except RuntimeError as error:
        found = WITHOUT_GRADIENT.search(str(error))
        return [int(number) for number in found[1].split()] if found else []
    return []


# --- Optimizers ------------------------------------------------------------------------------


def reads_flag(optimizer: Optimizer) -> bool:
    """Return whether an optimizer reads on the GPU whether to step, as torch's fused ones do.

    If torch no longer tells, the host reads the flag: correct too, and slower.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(flag: Tensor, optimizer: Optimizer) -> None:
    """Let an optimizer that `reads_flag` step unless the flag is 1."""
    gated: Any = optimizer
    gated.found_inf = flag  # as GradScaler does
    try:
        optimizer.step()
    finally:
        gated.found_inf = None


def check_scaler(scaler: GradScaler) -> None:
    """Refuse, before training, a version of torch in which `overflow_flags` cannot work."""
    needed(scaler, "_found_inf_per_device", "to skip a step in fp16: train in bf16 or fp32")


def overflow_flags(scaler: GradScaler, optimizer: Optimizer) -> list[Tensor]:
    """Return the flags, one on each device, by which a scaler skips a step that overflowed."""
    return list(scaler._found_inf_per_device(optimizer).values())


# --- Data loading ----------------------------------------------------------------------------


def set_worker_info(number: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Make `torch.utils.data.get_worker_info` describe this process, a worker of our loader.

    Torch has no public way to set this. If this version keeps it elsewhere, a data set in a worker
    is told the same as in the training process: that there is no worker.
    """
    with suppress(ImportError):
        from torch.utils.data._utils import worker

        if hasattr(worker, "WorkerInfo") and hasattr(worker, "_worker_info"):
            worker._worker_info = worker.WorkerInfo(
                id=number, num_workers=num_workers, seed=seed, dataset=dataset
            )


# --- Collectives -----------------------------------------------------------------------------


def gather_flat(distributed: Any) -> Callable[..., Any]:
    """Return the collective that gathers pieces into one tensor; torch 2.13 renamed it."""
    renamed = getattr(distributed, "all_gather_single", None)
    if renamed is not None:
        return renamed  # type: ignore[no-any-return]
    return needed(distributed, "all_gather_into_tensor", "to gather shares")  # type: ignore[no-any-return]


# --- Processes -------------------------------------------------------------------------------

AGENT_METHODS = ("_start_workers", "_monitor_workers", "_shutdown")
"""The methods of torch's elastic agent that the launcher's own agent overrides."""


def check_agent(agent: Any) -> None:
    """Refuse to launch with a torch whose elastic agent would not call the launcher's methods."""
    for method in AGENT_METHODS:
        needed(agent, method, "to watch the ranks of a launch")


def shut_down(shutdown: Callable[..., None], number: signal.Signals, timeout_s: int) -> None:
    """Call an elastic agent's own `_shutdown`, which takes no timeout in torch 2.11."""
    takes_timeout = "timeout" in inspect.signature(shutdown).parameters
    shutdown(number, **({"timeout": timeout_s} if takes_timeout else {}))


def started_processes(agent: Any) -> tuple[list[Any], list[Path]]:
    """Return the processes of an elastic agent's ranks, and the folder of each, by local rank."""
    context = needed(agent, "_pcontext", "to watch the ranks of a launch")
    processes = needed(context, "_pc.processes", "to watch the ranks of a launch")
    return processes, [Path(file).parent for _, file in sorted(context.error_files.items())]


def num_restarts_left(agent: Any) -> int:
    """Return how often an elastic agent may still restart its ranks."""
    return int(needed(agent, "_remaining_restarts", "to start ranks again"))


def rule_out_restarts(agent: Any) -> None:
    """Keep an elastic agent from restarting its ranks, whatever its settings say."""
    if num_restarts_left(agent):
        agent._remaining_restarts = 0


def run_exit_functions() -> None:
    """Run the functions registered with `atexit`, which Python skips in a forked process."""
    needed(atexit, "_run_exitfuncs", "to run exit functions in forked ranks")()


# --- Compiler --------------------------------------------------------------------------------


def cuts_at_buckets() -> bool:
    """Return whether the compiler splits a replicated model at the ends of gradient buckets."""
    path = "_dynamo.config.optimize_ddp"
    return bool(needed(torch, path, "to compile in exact mode"))


def cut_at_buckets(is_cut: bool) -> None:
    """Set whether the compiler splits a replicated model at the ends of gradient buckets."""
    from torch._dynamo import config as compiler

    compiler.optimize_ddp = is_cut


def replays_graphs() -> bool:
    """Return whether compiled code is recorded and replayed as CUDA graphs."""
    path = "_inductor.config.triton.cudagraphs"
    return bool(needed(torch, path, "to set whether compiled code runs as CUDA graphs"))


def replay_graphs(is_replayed: bool) -> None:
    """Set whether compiled code is recorded and replayed as CUDA graphs."""
    from torch._inductor import config as compiler

    compiler.triton.cudagraphs = is_replayed


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that this version's `torch.compile` knows; none if it does not tell."""
    listed = getattr(torch._inductor, "list_options", list)
    return {name: value for name, value in options.items() if name in listed()}


# --- Profiler and counter of operations ------------------------------------------------------


def ran_on_gpu(event: Any) -> bool:
    """Return whether an event of torch's profiler is from the GPU's timeline.

    Raises:
        ConfigError: this version of torch does not tell.
    """
    kinds = needed(torch.autograd, "DeviceType", "to tell kernels from what the host does")
    return bool(event.device_type == kinds.CUDA)


def operation_counter(formulas: dict[Any, Any], note_uncounted: Callable[[str], None]) -> Any:
    """Return torch's `FlopCounterMode`, extended to report operators without a formula.

    Args:
        formulas: More formulas, by operator.
        note_uncounted: Called with the name of each operator that has none.

    Raises:
        ConfigError: this torch has no place to look at every operator.
    """
    from torch.utils.flop_counter import FlopCounterMode

    needed(FlopCounterMode, "_count_flops", "to name operators that are not counted")

    class Counter(FlopCounterMode):
        def _count_flops(self, operator: Any, out: Any, args: Any, kwargs: Any) -> Any:
            if operator not in self.flop_registry:
                note_uncounted(str(operator))
            return super()._count_flops(operator, out, args, kwargs)  # type: ignore[no-untyped-call]

    return Counter(display=False, custom_mapping=formulas)
