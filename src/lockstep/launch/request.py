"""A script to run on processes of this machine, as given on the command line."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A script to run, and the processes to run it on."""

    words: tuple[str, ...]
    """A script, or -m and a module, and its arguments."""
    num_processes: int
    """On this machine."""
    num_nodes: int = 1
    node_rank: int = 0
    head: str = ""
    """HOST:PORT of node 0; empty on one machine, where a free port is used."""
    restarts: int = 0
    logs: str | None = None
    wait_s: float = 600.0
    """How long to wait for the other machines."""
