"""What decides the bits of a computation beside its inputs: threads, kernels, versions.

Owns: making kernels repeat themselves, and the fingerprint that says under which the bits were
made. Does not own: the order in which ranks add (`tree.py`).
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch

from lockstep.config import RunConfig
from lockstep.dist.environment import default_variable
from lockstep.errors import ConfigError
from lockstep.torch_errors import NOT_DETERMINISTIC

T = TypeVar("T")


def set_numerics(config: RunConfig, device: torch.device, stack: ExitStack) -> None:
    """Set threads and, in exact mode, kernels that repeat themselves, until the stack closes."""

    def put(write: Callable[[T], object], value: T, before: T) -> None:
        stack.callback(write, before)
        write(value)

    num_threads = config.num_threads or (1 if config.exact else None)
    if num_threads:
        put(torch.set_num_threads, num_threads, torch.get_num_threads())
    if not config.exact:
        return
    was_on = torch.are_deterministic_algorithms_enabled()
    put(torch.use_deterministic_algorithms, True, was_on)
    # Memory that is read before it is written is a fault of its own, and filling it costs time.
    deterministic: Any = torch.utils.deterministic
    fill = partial(setattr, deterministic, "fill_uninitialized_memory")
    put(fill, False, deterministic.fill_uninitialized_memory)
    if config.compile:
        # Under DDP the compiler would cut the model where buckets end: other kernels, other bits.
        dynamo: Any = torch._dynamo.config
        put(partial(setattr, dynamo, "optimize_ddp"), False, dynamo.optimize_ddp)
    if device.type == "cuda":
        default_variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS adds as it pleases
        cudnn = torch.backends.cudnn
        put(partial(setattr, cudnn, "benchmark"), False, cudnn.benchmark)


def raise_if_not_deterministic(error: RuntimeError) -> None:
    """Say in our words that torch has no kernel that repeats itself for something in the model.

    Raises:
        ConfigError: with the name of the kernel.
    """
    name, found, _ = str(error).partition(NOT_DETERMINISTIC)
    if found:
        raise ConfigError(
            f"exact: {name} adds in another order each time it runs on a GPU",
            "use another operation (for a loss: reduction='none' and .sum()), or set exact=false",
        ) from error


def fingerprint(device: torch.device) -> dict[str, str]:
    """Return what must be the same for the same bits to come out."""
    facts = {
        "torch": str(torch.__version__),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "matmul": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        facts["cuda"] = str(torch.version.cuda)
    return facts


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return what is no longer as it was, old and new."""
    names = sorted(before.keys() | now.keys())
    return [
        f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in names
        if before.get(name) != now.get(name)
    ]
