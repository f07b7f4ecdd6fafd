"""Further steps after those that are timed: some are traced, some have their operations counted.

Owns: which steps, and the figures of one rank and its machine. Does not own: how operations are
counted, kernels traced or limits measured (`operations.py`, `kernels.py`, `limits.py`).
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from lockstep.bench.kernels import TRACE_STEPS, Trace
from lockstep.bench.limits import compute_dtype, copy_limit, dtype_name, matmul_limit, update_bytes
from lockstep.bench.operations import Operations
from lockstep.launch.memory import own_peak_bytes
from lockstep.run.run import Run

COUNTED_STEPS = 4
"""Steps may differ, by the lengths of their samples."""


class ProfiledSteps:
    """The further steps of one rank; every rank takes the same ones."""

    def __init__(self, run: Run, synchronize: Callable[[], None]) -> None:
        self.run = run
        self.synchronize = synchronize
        self.peak_bytes, self.memory_bytes = peak_memory(run.world.device)
        self.trace = Trace(run.world.device, synchronize)
        self.operations = Operations()
        self.num_begun = 0
        self._counting = ExitStack()

    @property
    def is_complete(self) -> bool:
        """Return whether the last step has begun."""
        return self.num_begun >= TRACE_STEPS + COUNTED_STEPS

    def start_step(self) -> None:
        """Begin a step."""
        number = self.num_begun
        self.num_begun += 1
        self._counting.close()  # of a step that is taken again
        if number <= TRACE_STEPS:
            self.trace.start_step(number)
        if number >= TRACE_STEPS:
            self._counting.enter_context(self.operations.counting())

    def end_step(self) -> None:
        """End a step."""
        self._counting.close()

    def finish(self) -> dict[str, Any]:
        """Measure what the machine can do; return all figures. Collective."""
        device, dtype = self.run.world.device, compute_dtype(self.run)
        self.run.world.barrier()  # ranks that share cores or power share them here, too
        limit, side = matmul_limit(device, dtype, self.synchronize)
        return {
            **self.operations.to_json(),
            "dtype": dtype_name(dtype, device),
            "limit_per_s": limit,
            "limit_side": side,
            "bytes_per_s": copy_limit(device, self.synchronize),
            "update_bytes": update_bytes(self.run),
            "peak_bytes": self.peak_bytes,
            "memory_bytes": self.memory_bytes,
            **self.trace.to_json(),
        }


def peak_memory(device: torch.device) -> tuple[int, int]:
    """Return the most bytes in use so far, and the size of the memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)[1]
    return own_peak_bytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
