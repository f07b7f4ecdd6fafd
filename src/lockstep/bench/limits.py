"""What the machine can do at best: a large matrix product, a large copy, as measured here.

Owns: the two measurements, and the bytes an update of the weights cannot do without. Does not
own: what a step does of it.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.dist.fsdp import local_rows
from lockstep.run.run import Run

FIRST_SIDE, LAST_SIDE = 512, 8192
"""Square matrices, each twice as large as the one before."""
LONG_S = 0.005
"""A product that takes so long is large enough; the next would take eight times as long."""
COPY_BYTES = 256 << 20
"""More than any cache holds."""
TOGETHER, TIMES, ENOUGH_S = 4, 5, 0.3
"""So many one after the other, so often and so long at least: the fastest is the limit."""


def fastest(action: Callable[[], object], settle: Callable[[], None]) -> float:
    """Return the seconds that something takes at best; the first time does not count."""
    action()
    times: list[float] = []
    while len(times) < TIMES or TOGETHER * sum(times) < ENOUGH_S:
        settle()
        began = time.perf_counter()
        for _ in range(TOGETHER):
            action()
        settle()
        times.append((time.perf_counter() - began) / TOGETHER)
    return min(times)


@torch.no_grad()
def matmul_limit(
    device: torch.device, dtype: torch.dtype, settle: Callable[[], None]
) -> tuple[float, int]:
    """Return the most operations a second that products of matrices reach, and their side."""
    best, best_side, side = 0.0, 0, FIRST_SIDE
    while side <= LAST_SIDE:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        seconds = fastest(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), settle)  # type: ignore[misc]
        if 2 * side**3 / seconds > best:
            best, best_side = 2 * side**3 / seconds, side
        if seconds > LONG_S:
            break
        side *= 2
    return best, best_side


def copy_limit(device: torch.device, settle: Callable[[], None]) -> float:
    """Return the bytes a second that a large copy reads and writes, counted both ways."""
    source = torch.ones(
        COPY_BYTES // 4, device=device
    )  # memory that was never written is no memory
    target = torch.ones_like(source)
    return 2 * COPY_BYTES / fastest(lambda: target.copy_(source), settle)


def update_bytes(run: Run) -> int:
    """Return the bytes that the optimizer and the averages read and write on this rank.

    Each gradient is read; each weight, each state of the optimizer that has the shape of the
    weight, and each average is read and written; averages read the weights once more.
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


def trained_in(run: Run) -> torch.dtype:
    """Return the precision of the run's matrix products: autocast's, or the weights'."""
    if run.autocast is not None:
        return run.autocast.fast_dtype
    kinds = (p.dtype for p in run.model.parameters() if p.is_floating_point())
    return next(kinds, torch.float32)


def says_dtype(dtype: torch.dtype, device: torch.device) -> str:
    """Return the name of a precision, TF32 where float32 products run in it.

    >>> says_dtype(torch.bfloat16, torch.device("cpu"))
    'bf16'
    """
    if dtype == torch.float32 and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    name = str(dtype).removeprefix("torch.")
    return name.replace("bfloat", "bf").replace("float", "fp")
