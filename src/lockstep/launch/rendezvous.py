"""What torch's elastic agent asks before each start of the ranks: who is in the group, and where.

Owns: the store of each round, which listens on loopback and nowhere else. Does not own:
how nodes find each other (`member.py`), starting ranks (the agent).

Torch's own rendezvous keeps pickled state in a store that anyone on the network may write
to, and compares wall clocks of different nodes; neither is used here.
"""

import uuid
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from lockstep.dist.addresses import LOOPBACK, listen_on_loopback
from lockstep.launch.member import Membership, RendezvousOverError

STORE_TIMEOUT = timedelta(seconds=60)
"""How long the agent waits for what another node's agent writes after a round began."""


def open_store() -> TCPStore:
    """Return a new store that listens on a free port of the loopback interface."""
    listener = listen_on_loopback()
    port = int(listener.getsockname()[1])
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class OneNodeRendezvous(RendezvousHandler):
    """The rendezvous of a launch on one node: there is nobody to wait for."""

    num_nodes = 1
    node = 0
    loss: str | None = None
    """Which node was lost, and how; on one node, none ever is."""

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex
        self._store: Store | None = None

    def get_backend(self) -> str:
        """Return the name under which torch's events list this."""
        return "lockstep"

    @property
    def use_agent_store(self) -> bool:
        """Say that ranks meet in the agent's store: none of them opens one of its own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a new store for each start, so that no rank finds addresses of a dead one."""
        store = open_store()
        return self._info(store, store.port)

    def _info(self, store: Store, port: int) -> RendezvousInfo:
        self._store = store
        reached_at = RendezvousStoreInfo(LOOPBACK, port)
        return RendezvousInfo(store, self.node, self.num_nodes, reached_at)

    def is_closed(self) -> bool:
        """Say whether another node has left for good."""
        return False

    def set_closed(self) -> None:
        """Do nothing: a node that leaves says so in `shutdown`."""

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for this one to join a new round."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of this launch, the same on all nodes and for all rounds."""
        return self._run_id

    def shutdown(self) -> bool:
        """Leave."""
        self._store = None
        return True


class SeveralNodesRendezvous(OneNodeRendezvous):
    """The rendezvous of a launch on several nodes.

    Node 0 holds the store. The ranks of other nodes reach it through a tunnel that begins at
    their own loopback interface, so that torch's store, which knows no authentication, is
    never reachable from the network.
    """

    def __init__(self, membership: Membership) -> None:
        super().__init__()
        self.membership = membership
        self.num_nodes = membership.place.num_nodes
        self.node = membership.place.node

    @property
    def loss(self) -> str | None:  # type: ignore[override]
        """Say which node was lost, and how, since the round began."""
        return self.membership.loss

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes to begin a new round."""
        own = open_store() if self.node == 0 else None
        try:
            port = self.membership.join(own.port if own is not None else 0)
        except RendezvousOverError as error:
            raise RendezvousClosedError("another node has left") from error
        if own is not None:
            return self._info(own, port)
        store = TCPStore(LOOPBACK, port, timeout=STORE_TIMEOUT, wait_for_workers=False)
        return self._info(store, port)

    def is_closed(self) -> bool:
        """Say whether another node has left for good."""
        return self.membership.is_over

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for this one to join a new round."""
        return self.membership.num_waiting

    def get_run_id(self) -> str:
        """Return the name of this launch, the same on all nodes and for all rounds."""
        return self.membership.run_id

    def shutdown(self) -> bool:
        """Tell the other nodes that this one leaves for good."""
        self.membership.leave()
        return super().shutdown()
