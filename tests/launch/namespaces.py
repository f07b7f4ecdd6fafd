"""Machines that are none: network namespaces on one switch, each with a host name of its own.

Whatever listens beyond loopback on one of them can be reached from the others, as on a real
network; `ss` in one of them lists its sockets and no others. Needs root.
"""

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_counter = itertools.count()
ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


class Network:
    """Machines by the names `node0`, `node1`, ... with the addresses 10.77.0.10, .11, ..."""

    def __init__(self, folder: Path, size: int) -> None:
        self.prefix = f"lkrdzv{os.getpid()}x{next(_counter)}-"
        self.names = [f"node{index}" for index in range(size)]
        self.hosts = folder / "hosts"
        named = "".join(f"{self.address(name)} {name}\n" for name in self.names)
        self.hosts.write_text(f"127.0.0.1 localhost\n{named}")

    @staticmethod
    def address(name: str) -> str:
        return f"10.77.0.{10 + int(name.removeprefix('node'))}"

    def on(self, name: str, *command: str | Path) -> tuple[str, ...]:
        """Return the words that run a command on one of the machines."""
        enter = ("ip", "netns", "exec", self.prefix + name, "unshare", "--mount", "--uts")
        shell = ("sh", "-c", ENTER, "sh", str(self.hosts), name)
        return (*enter, *shell, *map(str, command))

    def ask(self, name: str, *command: str) -> str:
        """Run a command on one of the machines and return what it prints."""
        asked = subprocess.run(self.on(name, *command), capture_output=True, text=True, check=True)
        return asked.stdout

    def listeners(self, name: str) -> set[str]:
        """Return the addresses that something listens on, without the port."""
        lines = self.ask(name, "ss", "-Hltn").splitlines()
        return {line.split()[3].rpartition(":")[0] for line in lines}

    def connect(self) -> None:
        switch = f"{self.prefix}switch"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for name in self.names:
            space = self.prefix + name
            _ip("netns", "add", space)
            peer = ("type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", switch, "link", "add", name, *peer)
            _ip("-n", switch, "link", "set", name, "master", "br0", "up")
            _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", "eth0", "up")

    def cut(self, name: str) -> None:
        """Pull the cable of a machine: nothing arrives, and nobody is told."""
        _ip("-n", f"{self.prefix}switch", "link", "set", name, "down")

    def mend(self, name: str) -> None:
        """Put the cable of a machine back."""
        _ip("-n", f"{self.prefix}switch", "link", "set", name, "up")

    def without_loopback(self, name: str) -> None:
        _ip("-n", self.prefix + name, "link", "set", "lo", "down")

    def remove(self) -> None:
        for name in (*self.names, "switch"):
            subprocess.run(["ip", "netns", "del", self.prefix + name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def network(folder: Path, size: int) -> Iterator[Network]:
    """Connect machines for as long as the context lasts."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    machines = Network(folder, size)
    try:
        machines.connect()
        yield machines
    finally:
        machines.remove()
