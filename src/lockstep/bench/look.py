"""Further steps after those that are timed: some are traced, some counted.

Owns: which steps, and what one rank finds in them and says of its machine. Does not own: how
it is counted, traced or measured (`operations.py`, `kernels.py`, `limits.py`).
"""

import os
import resource
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lockstep.bench.kernels import TRACE_STEPS, Trace
from lockstep.bench.limits import copy_limit, matmul_limit, says_dtype, trained_in, update_bytes
from lockstep.bench.operations import Operations
from lockstep.run.run import Run

COUNTED_STEPS = 4
"""Steps may differ, by the lengths of what they read."""


class Look:
    """What one rank sees in further steps; every rank takes the same ones."""

    def __init__(self, run: Run, settle: Callable[[], None]) -> None:
        self.run, self.settle = run, settle
        self.peak_bytes, self.memory_bytes = peak_memory(run.world.device)
        self.trace = Trace(run.world.device, settle)
        self.operations = Operations()
        self.num_begun = 0

    def next_step(self) -> bool:
        """Begin a step; say whether enough were looked at."""
        number, self.num_begun = self.num_begun, self.num_begun + 1
        if number <= TRACE_STEPS:
            self.trace.next_step(number)
        return number == TRACE_STEPS + COUNTED_STEPS

    def looking(self) -> AbstractContextManager[None]:
        """Return the block inside which the step that was begun is to be taken."""
        return self.operations.counting() if self.num_begun > TRACE_STEPS else nullcontext()

    def finish(self) -> dict[str, Any]:
        """Measure what the machine can do; return all that was found. Collective."""
        device, dtype = self.run.world.device, trained_in(self.run)
        self.run.world.barrier()  # ranks that share cores or power share them here, too
        limit, side = matmul_limit(device, dtype, self.settle)
        return {
            **self.operations.to_json(),
            "dtype": says_dtype(dtype, device),
            "limit_per_s": limit,
            "limit_side": side,
            "bytes_per_s": copy_limit(device, self.settle),
            "update_bytes": update_bytes(self.run),
            "peak_bytes": self.peak_bytes,
            "memory_bytes": self.memory_bytes,
            **self.trace.to_json(),
        }


def peak_memory(device: torch.device) -> tuple[int, int]:
    """Return the most bytes that were in use so far, and how many there are."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)[1]
    unit = 1 if sys.platform == "darwin" else 1024
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, there
