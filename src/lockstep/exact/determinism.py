"""Make kernels deterministic, and record the threads, hardware and versions that affect bits.

Owns: the settings of exact mode, and the fingerprint of the machine. Does not own: the order in
which ranks add (`tree.py`).
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch

from lockstep.config import RunConfig
from lockstep.dist.environment import default_variable
from lockstep.errors import ConfigError
from lockstep.torch_compat.error_texts import NOT_DETERMINISTIC
from lockstep.torch_compat.private import cut_at_buckets, cuts_at_buckets

T = TypeVar("T")


def set_numerics(config: RunConfig, device: torch.device, stack: ExitStack) -> None:
    """Set threads and, in exact mode, deterministic kernels, until the stack closes."""

    def set_until_close(write: Callable[[T], object], value: T, before: T) -> None:
        stack.callback(write, before)
        write(value)

    num_threads = config.num_threads or (1 if config.exact else None)
    if num_threads:
        set_until_close(torch.set_num_threads, num_threads, torch.get_num_threads())
    if not config.exact:
        return
    was_on = torch.are_deterministic_algorithms_enabled()
    set_until_close(torch.use_deterministic_algorithms, True, was_on)
    # Filling new memory costs time, and helps only code that reads uninitialised memory.
    deterministic: Any = torch.utils.deterministic
    fill = partial(setattr, deterministic, "fill_uninitialized_memory")
    set_until_close(fill, False, deterministic.fill_uninitialized_memory)
    if config.compile:
        # With DDP the compiler would split the model at bucket borders, which changes kernels.
        set_until_close(cut_at_buckets, False, cuts_at_buckets())
    if device.type == "cuda":
        default_variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS deterministic
        cudnn = torch.backends.cudnn
        set_until_close(partial(setattr, cudnn, "benchmark"), False, cudnn.benchmark)


def raise_if_not_deterministic(error: RuntimeError) -> None:
    """Raise a ConfigError if torch has no deterministic kernel for an operation of the model.

    Raises:
        ConfigError: with the name of the kernel.
    """
    name, found, _ = str(error).partition(NOT_DETERMINISTIC)
    if found:
        raise ConfigError(
            f"exact=true: {name} adds in a different order each time it runs on a GPU",
            "use another operation (for a loss: reduction='none' and .sum()), or set exact=false",
        ) from error


def fingerprint(device: torch.device) -> dict[str, str]:
    """Return the facts that must be the same to get the same bits."""
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
    """Return the changed facts, as "name old -> new"."""
    names = sorted(before.keys() | now.keys())
    return [
        f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in names
        if before.get(name) != now.get(name)
    ]
