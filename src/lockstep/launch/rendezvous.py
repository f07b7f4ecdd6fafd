"""Answer torch's elastic agent before each start of the ranks: which nodes are in the group.

Owns: the store of each round, which listens on loopback only. Does not own: how nodes find each
other (`member.py`), starting ranks (the agent).

Torch's own rendezvous keeps pickled state in a store that anyone on the network can write to, and
compares wall clocks of different nodes; neither is used here.
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
"""How long the agent waits for another node's agent after a round has begun."""


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
    """The rendezvous of a launch on one node, which waits for nobody."""

    num_nodes = 1
    node = 0
    loss: str | None = None
    """The node that was lost, and how; always None on one node."""

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex
        self._store: Store | None = None

    def get_backend(self) -> str:
        """Return the name of this rendezvous in torch's events."""
        return "lockstep"

    @property
    def use_agent_store(self) -> bool:
        """Return True: ranks use the agent's store, and open none of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a new store for each start, so that ranks find no addresses of dead ones."""
        store = open_store()
        return self._info(store, store.port)

    def _info(self, store: Store, port: int) -> RendezvousInfo:
        self._store = store
        reached_at = RendezvousStoreInfo(LOOPBACK, port)
        return RendezvousInfo(store, self.node, self.num_nodes, reached_at)

    def is_closed(self) -> bool:
        """Return whether another node has left for good."""
        return False

    def set_closed(self) -> None:
        """Do nothing: a node tells the others that it leaves in `shutdown`."""

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for this one to join a new round."""
        return 0

    def get_run_id(self) -> str:
        """Return the id of this launch, the same on all nodes and for all rounds."""
        return self._run_id

    def shutdown(self) -> bool:
        """Drop the store."""
        self._store = None
        return True


class SeveralNodesRendezvous(OneNodeRendezvous):
    """The rendezvous of a launch on several nodes.

    Node 0 holds the store. The ranks of other nodes reach it through a tunnel that starts at their
    own loopback interface, so that torch's store, which has no authentication, cannot be reached
    from the network.
    """

    def __init__(self, membership: Membership) -> None:
        super().__init__()
        self.membership = membership
        self.num_nodes = membership.request.num_nodes
        self.node = membership.request.node_rank

    @property
    def loss(self) -> str | None:  # type: ignore[override]
        """Return the node that was lost since the round began, and how."""
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
        """Return whether another node has left for good."""
        return self.membership.is_over

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for this one to join a new round."""
        return self.membership.num_waiting

    def get_run_id(self) -> str:
        """Return the id of this launch, the same on all nodes and for all rounds."""
        return self.membership.run_id

    def shutdown(self) -> bool:
        """Tell the other nodes that this one leaves for good."""
        self.membership.leave()
        return super().shutdown()
