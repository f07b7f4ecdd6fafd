"""A process listens on the address it was told, and not on all of them."""

import socket
from contextlib import closing

import psutil
import pytest

from lockstep.dist.addresses import interface_towards, listen_at, listen_on_loopback, own_addresses


def test_loopback_is_listened_on_alone() -> None:
    with closing(listen_on_loopback()) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    at = listen_at("localhost", 0)
    assert at is not None
    with closing(at):
        assert at.getsockname()[0] == "127.0.0.1"


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    assert listen_at("198.51.100.7", 29500) is None  # reserved for documentation


def test_a_taken_port_is_an_error_and_not_another_address() -> None:
    with closing(listen_on_loopback()) as taken, pytest.raises(OSError, match="in use"):
        listen_at("127.0.0.1", taken.getsockname()[1])


def test_a_name_that_means_loopback_only_here_is_not_listened_on_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian's /etc/hosts gives a machine's own name 127.0.1.1; others know its real address."""
    resolved = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved)
    assert own_addresses("node1") == []
    assert interface_towards("node1") is None
    assert listen_at("node1", 0) is None


def test_the_interface_towards_loopback_is_the_one_that_has_its_address() -> None:
    name = interface_towards("127.0.0.1")
    assert name is not None
    assert "127.0.0.1" in {one.address for one in psutil.net_if_addrs()[name]}
