"""Launch variables for ranks that are started on this machine without a launcher.

Owns: the variables of a rank, and choosing a free port. Does not own: starting the processes
(`runs.py`, `forked.py`).
"""

import os
import secrets
import socket
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from lockstep.text_input import whole_number

NUM_HELD = 64
"""The number of ports that a process reserves: the last ones it asked for."""
_held: deque[int] = deque()


def rank_variables(
    rank: int, size: int, port: int, *, threads: int | None = None
) -> dict[str, str]:
    """Return the environment of one of `size` ranks, all on this machine."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    if threads is not None:
        values["OMP_NUM_THREADS"] = threads
    return {name: str(value) for name, value in values.items()}


def threads_of_each(num_ranks: int) -> int:
    """Return the CPU threads per rank: OMP_NUM_THREADS, or an equal share of the cores."""
    return given_threads(os.environ) or max(1, (os.cpu_count() or 1) // num_ranks)


def given_threads(env: Mapping[str, str]) -> int | None:
    """Return OMP_NUM_THREADS if it is valid; of a list for nested levels, the first number.

    >>> given_threads({"OMP_NUM_THREADS": "4,2"})
    4
    """
    return whole_number(env.get("OMP_NUM_THREADS", "").split(",")[0].strip()) or None


def free_port() -> int:
    """Return a free port that no other caller of this function gets soon after.

    A process reserves a port with an abstract socket of the same number, until it ends or has asked
    for many more ports. So concurrent processes get different ports, and no file is left behind.
    The ports are below the kernel's ephemeral range, so no outgoing connection uses one before its
    caller does.
    """
    end = _first_ephemeral_port()
    begin = end // 2
    while True:
        port = begin + secrets.randbelow(end - begin)
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            held.bind(f"\0lockstep_port_{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        _held.append(held.detach())
        if len(_held) > NUM_HELD:
            os.close(_held.popleft())
        return port


def _first_ephemeral_port() -> int:
    try:
        limits = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:
        return 32768
    return max(16384, int(limits.split()[0]))
