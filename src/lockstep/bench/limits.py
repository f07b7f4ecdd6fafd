"""What this machine reaches at best: the speed of a large matrix product and of a large copy.

Owns: the two measurements, and the bytes that an update of the weights must move. Does not own:
how near a step comes (`work.py`).
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.dist.fsdp import local_rows
from lockstep.run.run import Run

FIRST_SIDE, LAST_SIDE = 512, 8192
"""Sides of square matrices, doubled each time."""
LONG_S = 0.005
"""A product that takes longer is large enough; the next one would take eight times as long."""
COPY_BYTES = 256 << 20
"""Larger than any cache."""
NUM_IN_A_ROW = 4
"""Number of calls that are timed together."""
MIN_REPEATS = 5
MIN_S = 0.3
"""Smallest number of repeats, and their shortest total time; the fastest is the limit."""


def fastest(
    action: Callable[[], object],
    synchronize: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the shortest time of an action, in seconds; the first call does not count."""
    action()
    times: list[float] = []
    while len(times) < MIN_REPEATS or NUM_IN_A_ROW * sum(times) < MIN_S:
        synchronize()
        began = clock()
        for _ in range(NUM_IN_A_ROW):
            action()
        synchronize()
        times.append((clock() - began) / NUM_IN_A_ROW)
    return min(times)


@torch.no_grad()
def matmul_limit(
    device: torch.device,
    dtype: torch.dtype,
    synchronize: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, int]:
    """Return the most operations per second that matrix products reach, and their side."""
    best = 0.0
    best_side = 0
    side = FIRST_SIDE
    while side <= LAST_SIDE:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        seconds = fastest(partial(torch.mm, a, b, out=out), synchronize, clock)
        if 2 * side**3 / seconds > best:
            best, best_side = 2 * side**3 / seconds, side
        if seconds > LONG_S:
            break
        side *= 2
    return best, best_side


def copy_limit(device: torch.device, synchronize: Callable[[], None]) -> float:
    """Return the bytes per second that a large copy moves, reads and writes added up."""
    # Filled with ones: the kernel allocates pages only when they are written.
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.ones_like(source)
    return 2 * COPY_BYTES / fastest(lambda: target.copy_(source), synchronize)


def update_bytes(run: Run) -> int:
    """Return the bytes that the optimizer and the averages read and write on this rank.

    Each gradient is read. Each weight, each average and each optimizer state with dimensions is
    read and written. Averages read the weights once more.
    """
    moved = 0
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            states = run.optimizer.state.get(parameter, {}).values()
            large = [v for v in states if isinstance(v, Tensor) and v.dim()]
            moved += 3 * _bytes([parameter]) + 2 * _bytes(large)
    averages = [_bytes(copies) for copies in run.averages.copies.values()]
    return moved + 2 * sum(averages) + max(averages, default=0)


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.nbytes for tensor in local_rows(tensors))


def compute_dtype(run: Run) -> torch.dtype:
    """Return the dtype of the run's matrix products: that of autocast, or of the weights."""
    if run.autocast is not None:
        return run.autocast.fast_dtype
    kinds = (p.dtype for p in run.model.parameters() if p.is_floating_point())
    return next(kinds, torch.float32)


def dtype_name(dtype: torch.dtype, device: torch.device) -> str:
    """Return the short name of a dtype; TF32 if float32 products run in it.

    >>> dtype_name(torch.bfloat16, torch.device("cpu"))
    'bf16'
    """
    if dtype == torch.float32 and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    name = str(dtype).removeprefix("torch.")
    return name.replace("bfloat", "bf").replace("float", "fp")
