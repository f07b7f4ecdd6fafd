"""Who of the machines that are to train together is there?

Owns: waiting for all of them, and saying which did not come. Does not own: what happens
then; torch's rendezvous takes over, in the same store.
"""

import re
import socket
import time
import uuid
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

from lockstep.errors import LaunchError, shown
from lockstep.text_input import whole_number

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

POLL_S = 0.1
GRACE_S = 10.0  # for the verdict to reach the others, after all have been waited for
PLACE = "lockstep/node/{}"
READ = "lockstep/read/{}"
VERDICT = "lockstep/roll"


def call_roll(head: str, num_nodes: int, node_rank: int, wait_s: float) -> tuple[object, str]:
    """Wait until all machines are there; return the store they met in, and a name for the run.

    The store must be kept: on the first machine it is the server that all others ask.

    Raises:
        LaunchError: naming the machines that did not come, on all that did.
    """
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    deadline = time.monotonic() + wait_s
    host, port = parse_head(head)
    try:
        store = TCPStore(
            host,
            port,
            is_master=node_rank == 0,
            timeout=timedelta(seconds=max(wait_s, 1.0)),
            wait_for_workers=False,
            multi_tenant=True,
        )
        store.set(PLACE.format(node_rank), socket.gethostname())
        if node_rank == 0:
            missing = _missing(store, PLACE, range(num_nodes), deadline)
            absent = " ".join(map(str, missing))
            store.set(VERDICT, f"missing {absent}" if missing else uuid.uuid4().hex)
        store.set_timeout(timedelta(seconds=wait_s + GRACE_S))
        verdict = store.get(VERDICT).decode()
        store.set(READ.format(node_rank), "")
        if node_rank == 0 and missing:  # the store ends with this process: when all have read
            came = set(range(num_nodes)).difference(missing)
            _missing(store, READ, came, time.monotonic() + GRACE_S)
    except (DistError, RuntimeError, ValueError) as error:
        here = "cannot be opened here" if node_rank == 0 else "does not answer"
        reason = str(error).splitlines()[0]
        raise LaunchError(
            f"the head {head} {here}: {reason}", "the same --head on all, its port free and open"
        ) from error
    if verdict.startswith("missing"):
        raise LaunchError(
            f"of {num_nodes} nodes, these did not come within {wait_s:g} s: node "
            + verdict.removeprefix("missing ").replace(" ", ", "),
            "the same command there with its own --node-rank, or fewer --nodes",
        )
    return store, verdict


def _missing(store: "TCPStore", key: str, nodes: Iterable[int], deadline: float) -> list[int]:
    """Wait for `key` of all `nodes`; return the machines that have not set it in time."""
    missing = list(nodes)
    while missing := [node for node in missing if not store.check([key.format(node)])]:
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    return missing


def parse_head(head: str) -> tuple[str, int]:
    """Return host and port.

    >>> parse_head("node1:29500")
    ('node1', 29500)
    """
    host, _, port = head.rpartition(":")
    number = whole_number(port, most=65_535)
    if not number or re.fullmatch(r"[!-~]{1,255}", host) is None:
        raise LaunchError(f"--head {shown(head)} is not HOST:PORT", "pass --head node1:29500")
    return host, number


def own_address(host: str) -> str:
    """Return the address by which this machine reaches `host`, and so can be reached."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
