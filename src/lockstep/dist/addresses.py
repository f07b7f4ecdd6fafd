"""The address of this machine to listen on, and its network interface.

Owns: opening a socket on one address, so that nothing listens on all of them, and limiting gloo and
NCCL to one interface. Does not own: the protocol on that socket.
"""

import errno
import ipaddress
import socket

from lockstep.dist.environment import default_variable
from lockstep.errors import LaunchError

LOOPBACK = "127.0.0.1"
BACKLOG = 1024
LOOPBACK_S = 5.0
"""Timeout of a connection within this machine, which normally takes microseconds."""


def names_loopback(host: str) -> bool:
    """Return whether `host` always means the local machine.

    A machine may resolve its own host name to 127.0.1.1, and others resolve it to a real address.
    So names are not resolved here.

    >>> [names_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "node1", "10.0.0.7")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen_on_loopback() -> socket.socket:
    """Return a socket that listens on a free port of the loopback interface."""
    return socket.create_server((LOOPBACK, 0), backlog=BACKLOG)


def check_loopback() -> None:
    """Refuse a machine whose processes cannot reach each other.

    An interface that is down may keep its address, so listening alone proves nothing.

    Raises:
        LaunchError: if the loopback interface is down.
    """
    try:
        with listen_on_loopback() as listener:
            socket.create_connection(listener.getsockname(), LOOPBACK_S).close()
    except OSError as error:
        raise LaunchError(
            f"the ranks of this machine cannot reach each other at {LOOPBACK}: "
            f"{error.strerror or error}",
            "bring the loopback interface up: ip link set lo up",
        ) from error


def listen_at(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on the address of `host`, if this machine has it.

    Returns None if it does not (behind NAT, or in a container), or if a name resolves to loopback
    here although others may need to reach it.

    Raises:
        OSError: if the port is taken.
    """
    for family, address in own_addresses(host):
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    return None


def own_addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses of `host` that this machine can listen on, IPv4 first.

    A loopback address counts only if `names_loopback(host)`.
    """
    found = {
        (family, str(address[0]))
        for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    }
    return [
        (family, address)
        for family, address in sorted(found, key=lambda one: (one[0] != socket.AF_INET, one[1]))
        if names_loopback(address) <= names_loopback(host) and _is_own(family, address)
    ]


def _is_own(family: socket.AddressFamily, address: str) -> bool:
    """Return whether this machine has `address`."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
            return False
        raise
    return True


def choose_interface(host: str) -> None:
    """Let gloo listen only on the interface that leads to `host`, unless a variable names another.

    On one machine NCCL is limited to loopback too. Between machines it chooses its interface
    itself, because it knows about InfiniBand.
    """
    interface = interface_towards(host)
    if interface is not None:
        default_variable("GLOO_SOCKET_IFNAME", interface)
    if interface is not None and host == LOOPBACK:
        default_variable("NCCL_SOCKET_IFNAME", interface)


def interface_towards(host: str) -> str | None:
    """Return the name of the interface through which this machine reaches `host`.

    Returns None without a route, or if a name resolves to loopback only on this machine.
    """
    import psutil

    try:
        for family, _, _, _, where in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(where)  # sends nothing
                own = str(probe.getsockname()[0])
                break
    except OSError:
        return None
    if names_loopback(own) and not names_loopback(host):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.split("%")[0] == own.split("%")[0] for one in addresses):
            return str(name)
    return None
