"""Time all-reduces of many sizes, in a run or between the processes of this machine.

Owns: measuring, starting processes for it, and the table. Does not own: the fit (`link.py`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from lockstep.bench.link import Link, fit_link
from lockstep.dist.collectives import Collectives
from lockstep.dist.pace import Clock
from lockstep.errors import ConfigError
from lockstep.harness.forked import run_ranks
from lockstep.world import World

LIMIT_S = 300.0
NUM_REPEATS = 8
SIZES_BYTES = tuple(4096 * 4**power for power in range(7))
"""4 KiB to 16 MiB."""
SIZE_S = 0.3
"""Time limit for all repeats of one size, after the first three."""


@dataclass(frozen=True, slots=True)
class AllReduceTimes:
    """The times of all-reduces between processes of this machine."""

    ranks: int
    backend: str
    device: str
    times: list[tuple[int, float]]
    link: Link

    def lines(self) -> list[str]:
        """Return the times as lines of a table."""
        lines = [f"  {'bytes':>12}{'ms':>12}{'GB/s':>12}{'fit ms':>12}"]
        for size, seconds in self.times:
            gb_per_s = 2 * (self.ranks - 1) / self.ranks * size / seconds / 1e9
            fit_ms = 1e3 * self.link.ring_s(size, self.ranks)
            lines.append(f"  {size:>12}{1e3 * seconds:>12.3f}{gb_per_s:>12.3f}{fit_ms:>12.3f}")
        link = self.link
        return [
            *lines,
            f"fit: {1e6 * link.latency_s:.3g} us a message, {link.bytes_per_s / 1e9:.3g} GB/s each "
            f"way, {100 * link.spread:.0f} % off ({self.ranks} x {self.device}, {self.backend})",
        ]


def choose_ranks(asked: int) -> int:
    """Return the number of processes: `asked`, else one for each GPU, and at least 2."""
    num_gpus = torch.cuda.device_count()
    ranks = asked or max(2, num_gpus)
    if ranks < 2:
        raise ConfigError(f"--gpus {ranks}: an all-reduce needs 2 processes", "pass --gpus 2")
    if 0 < num_gpus < ranks:
        raise ConfigError(
            f"--gpus {ranks}: this machine has {num_gpus}",
            f"pass --gpus {num_gpus}, or fewer"
            if num_gpus > 1
            else "set CUDA_VISIBLE_DEVICES= to measure between processes on CPUs",
        )
    return ranks


def measure_collectives(ranks: int) -> AllReduceTimes:
    """Time all-reduces between `ranks` processes, each on its own GPU if there are GPUs."""
    results = run_ranks(ranks, _time_as_rank, timeout_s=LIMIT_S)
    backend, device, _ = results[0]
    all_times = zip(*(times for _, _, times in results), strict=True)
    slowest = [(same[0][0], max(seconds for _, seconds in same)) for same in all_times]
    return AllReduceTimes(ranks, backend, device, slowest, fit_link(slowest, ranks))


def _time_as_rank() -> tuple[str, str, list[tuple[int, float]]]:
    with World.enter() as world:
        return str(world.backend), world.device.type, time_sizes(world, Clock(world.device))


def time_together(action: Callable[[], object], world: Collectives, clock: Clock) -> float:
    """Return the time of an action that all ranks start together. Collective."""
    world.barrier()
    clock.synchronize()
    began = time.perf_counter()
    action()
    clock.synchronize()
    return time.perf_counter() - began


def time_sizes(world: Collectives, clock: Clock) -> list[tuple[int, float]]:
    """Return the time of an all-reduce of each size. Collective."""
    results = []
    for num_bytes in SIZES_BYTES:
        message = torch.zeros(num_bytes // 4, device=world.device)

        def send(message: torch.Tensor = message) -> None:
            world.all_sum_later(message).wait()

        times: list[float] = []
        spent_us = 0
        while len(times) < 3 or (len(times) < 3 * NUM_REPEATS and spent_us < SIZE_S * 1e6):
            times.append(time_together(send, world, clock))
            (spent_us,) = world.all_max(int(sum(times) * 1e6))  # so that all ranks stop together
        results.append((num_bytes, median(times[1:])))
    return results
