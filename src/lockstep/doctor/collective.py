"""Report torch's versions, and run a real all-reduce over a few ranks.

Owns: the versions that torch reports, and the time of one sum over ranks. Started as
`python -m lockstep.doctor.collective FILE NUM_RANKS`, so that `lockstep doctor` itself does not
import torch, and does not hang if the group hangs.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lockstep.bench.collectives import time_together
from lockstep.dist.pace import Clock
from lockstep.harness.forked import run_ranks
from lockstep.world import World

GROUP_S = 20.0
"""Time limit for ranks on one machine to form a group, and for the sum."""


def add_up(num_bytes: int) -> dict[str, Any]:
    """Sum a tensor over all ranks, four times. Collective."""
    with World.enter(timeout_s=GROUP_S) as world:
        local = torch.ones(num_bytes // 4, device=world.device)
        totals: list[torch.Tensor] = []
        clock = Clock(world.device)
        times = [
            time_together(lambda: totals.append(world.all_sum(local)), world, clock)
            for _ in range(4)
        ]
        return {
            "num_ranks": world.size,
            "device": world.device.type,
            "backend": world.backend,
            "num_bytes": num_bytes,
            "seconds": min(times[1:]),  # the first one also connects
            "is_right": all(bool((total == world.size).all()) for total in totals),
        }


def main(argv: Sequence[str]) -> None:
    """Write torch's versions to a file, then the result of the sum."""
    file, num_ranks = Path(argv[0]), int(argv[1])
    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    with suppress(Exception):  # a build without NCCL has no such function
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    file.write_text(json.dumps(facts))
    try:
        if not num_ranks:
            raise RuntimeError("not tried")
        # Fork before anything uses a GPU: a CUDA context does not survive a fork.
        facts["sum"] = run_ranks(num_ranks, add_up, 2**24, timeout_s=2 * GROUP_S)[0]
    except Exception as error:
        # The last line of a traceback that is not indented names the exception.
        lines = [line for line in str(error).splitlines() if line and not line[0].isspace()]
        facts["sum_error"] = lines[-1].removeprefix("lockstep.errors.LaunchError: ")
    facts["num_visible"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    file.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1:])
