"""Node 0's side of the rendezvous: which nodes are present or missing, when a round begins.

Owns: the one port of a job that can be reached from the network. Does not own: the other nodes'
side (`member.py`), the interface to torch (`rendezvous.py`).

Runs in its own event loop, so nothing here needs a lock. Time is measured by the monotonic clock of
this node only; the clocks of other nodes are never used.
"""

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any

from lockstep.dist.addresses import BACKLOG, LOOPBACK
from lockstep.errors import write_stderr
from lockstep.launch.handshake import (
    BROKEN,
    HANDSHAKE_S,
    LINE_BYTES,
    TOKEN_VARIABLE,
    WrongTokenError,
    receive,
    send,
    splice,
    welcome_node,
)

BEAT_S = 2.0
"""Interval at which each side of a connection sends a heartbeat."""
MISSED_BEATS = 15
"""A node that misses this many heartbeats in a row counts as lost. Heartbeats are counted, not
timed, so that a job survives when SLURM suspends and resumes all of it."""
PROBE_S = 5.0
"""Time that the earlier connection of a node gets to answer when the node connects again."""
GONE = "its launcher ended, or the network cut it off"
MAX_STRANGERS = 128
"""Maximum number of connections that have not proved the token yet. Above it, those older than
`STALE_S` are dropped. A proof takes milliseconds, but the ranks of a large job connect at once."""
STALE_S = 1.0
MAX_FRESH_STRANGERS = 512
"""Above this number the oldest is dropped whatever its age: a process may often open only 1,024
files, and the nodes that have proved the token need some of them."""
MAX_NAMED_STRANGERS = 8
"""Maximum number of addresses with a wrong token to name, so that a flood does not fill the log."""
NOTICE_S = 10.0
"""A node that has waited this long for others names them."""


@dataclass(eq=False, slots=True)
class Member:
    """A node whose launcher is connected."""

    node: int
    num_nodes: int
    num_processes: int
    host: str
    launcher: str
    """A random id of its launcher; a restarted node has a different one."""
    run_id: str
    """The id of this launch if the node knows it already, else empty."""
    writer: asyncio.StreamWriter
    is_joining: bool = False
    """Whether it waits for the next round to begin."""
    is_waited_for: bool = False
    """Whether it was told that others wait for it, which is done once."""
    store_port: int = 0
    """Only for node 0: the loopback port of its store for the next round."""
    beats_missed: int = 0
    has_left: bool = False
    """Whether it said goodbye; a node that did not is lost."""
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it answers a probe, or its connection ends."""

    @property
    def title(self) -> str:
        """Return number and host of the node."""
        return f"node {self.node} ({self.host})"


class Coordinator:
    """Admits the nodes of a job and begins its rounds.

    A round is one start of all ranks. It begins when all nodes have asked to join it.
    """

    def __init__(self, token: bytes, num_nodes: int, wait_s: float) -> None:
        self.token = token
        self.num_nodes = num_nodes
        self.wait_s = wait_s
        self.run_id = ""
        """Empty until all nodes have joined. If node 0 was restarted, the id that the other nodes
        know is kept."""
        self.members: dict[int, Member] = {}
        self.processes: list[int] = []
        """The number of ranks on each node; empty until all nodes have joined once."""
        self.round = 0
        self.store_port = 0
        self.is_over = False
        """Whether a node has left for good, so that there can be no further round."""
        self.refusal: tuple[str, str] | None = None
        """Problem and remedy, if the job cannot begin."""
        self._strangers: dict[asyncio.StreamWriter, float] = {}
        """Connections without a proof, each with the time it was opened, oldest first."""
        self._named: set[str] = set()
        self._deadline: asyncio.TimerHandle | None = None
        self._notice: asyncio.TimerHandle | None = None
        self._server: asyncio.Server | None = None
        self._heart: asyncio.Task[None] | None = None
        self._all_gone = asyncio.Event()

    async def open(self, addresses: list[str] | None, port: int) -> None:
        """Listen on these addresses of this node; on all of them if None."""
        self._server = await asyncio.start_server(
            self._serve, addresses, port, limit=LINE_BYTES, backlog=BACKLOG
        )
        self._heart = asyncio.create_task(self._beat())
        self._wait_for_nodes()

    async def close(self, within_s: float) -> None:
        """Stop listening after all nodes have disconnected, or after `within_s`."""
        self._stop_waiting()
        if self.members:
            self._all_gone.clear()
            try:
                async with asyncio.timeout(within_s):
                    await self._all_gone.wait()
            except TimeoutError:
                pass
        if self._heart is not None:
            self._heart.cancel()
        if self._server is not None:
            self._server.close()

    # --- Connections -------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, trusted or not."""
        try:
            message = await self._admit(reader, writer)
            if message["kind"] == "store":
                await self._tunnel(message["round"], reader, writer)
            elif message["kind"] == "member":
                await self._keep(self._read_member(message, writer), reader)
        except WrongTokenError:
            self._name_stranger(writer)
        except (*BROKEN, KeyError, TypeError):
            pass  # the connection ended, or was not from one of our launchers
        finally:
            writer.close()

    async def _admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> dict[str, Any]:
        """Check that a new connection knows the token, and return its first message."""
        now = asyncio.get_running_loop().time()
        while len(self._strangers) >= MAX_STRANGERS:
            oldest, since = next(iter(self._strangers.items()))
            if len(self._strangers) < MAX_FRESH_STRANGERS and now - since < STALE_S:
                break
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = now
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await welcome_node(reader, writer, self.token)
                return await receive(reader)
        finally:
            self._strangers.pop(writer, None)

    def _name_stranger(self, writer: asyncio.StreamWriter) -> None:
        peer = str((writer.get_extra_info("peername") or ("an unknown address",))[0])
        if peer in self._named or len(self._named) >= MAX_NAMED_STRANGERS:
            return
        self._named.add(peer)
        write_stderr(
            f"lockstep: refused a launcher on {peer}: its job token differs\n"
            f"  try: set {TOKEN_VARIABLE} to the same value on every node, or copy node 0's key "
            "file there\n"
        )

    async def _tunnel(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Connect a rank of another node to the store of the round it belongs to."""
        if number == self.round:
            store = await asyncio.open_connection(LOOPBACK, self.store_port, limit=LINE_BYTES)
            await splice((reader, writer), store)

    @staticmethod
    def _read_member(message: dict[str, Any], writer: asyncio.StreamWriter) -> Member:
        return Member(
            node=int(message["node"]),
            num_nodes=int(message["num_nodes"]),
            num_processes=int(message["num_processes"]),
            host=str(message["host"])[:64],
            launcher=str(message["launcher"]),
            run_id=str(message["run_id"])[:64],
            writer=writer,
        )

    async def _keep(self, member: Member, reader: asyncio.StreamReader) -> None:
        """Handle the messages of a node until its connection ends."""
        await self._drop_predecessor(member)
        if not self._enter(member):
            return
        reason = GONE
        try:
            while True:
                message = await receive(reader)
                member.beats_missed = 0
                if message["kind"] == "join":
                    self._join(member, int(message["store_port"]))
                elif message["kind"] == "alive":
                    member.probed.set()
                elif message["kind"] == "goodbye":
                    member.has_left = True
                    return
        except BROKEN:
            if member.beats_missed >= MISSED_BEATS:
                reason = f"it sent no heartbeat for {BEAT_S * MISSED_BEATS:g} s"
        finally:
            self._leave(member, reason)

    async def _drop_predecessor(self, member: Member) -> None:
        """Drop an earlier connection of the same node, unless another launcher answers there.

        A machine that loses power or its network does not close its connections. Without a probe, a
        node that comes back would be taken for a duplicate until the old connection times out.
        """
        while (present := self.members.get(member.node)) is not None:
            # A launcher has one connection at a time, so its own earlier one is not probed.
            if present.launcher != member.launcher and await self._answers(present):
                return
            present.writer.transport.abort()
            self._leave(present, GONE)

    async def _answers(self, member: Member) -> bool:
        """Probe a node, and return whether it answers in time."""
        member.probed.clear()
        send(member.writer, "probe")
        try:
            async with asyncio.timeout(PROBE_S):
                await member.probed.wait()
        except TimeoutError:
            return False
        return self.members.get(member.node) is member

    # --- What happens --------------------------------------------------------------

    def _enter(self, member: Member) -> bool:
        """Admit a node, or send it the reason for the refusal; return whether it was admitted."""
        if self.refusal is None and (fault := self._fault_of(member)) is not None:
            self._refuse(member, *fault)
            if not self.processes:  # nothing runs yet: stop all nodes, since the commands differ
                self._refuse_all(*fault)
            return False
        if self.refusal is not None:
            self._refuse(member, *self.refusal)
            return False
        self.members[member.node] = member
        self.run_id = self.run_id or member.run_id
        if self.processes:
            self._welcome(member)
        elif len(self.members) == self.num_nodes:
            self._stop_waiting()
            self.run_id = self.run_id or uuid.uuid4().hex
            self.processes = [self.members[node].num_processes for node in range(self.num_nodes)]
            for one in self.members.values():
                self._welcome(one)
        return True

    def _fault_of(self, member: Member) -> tuple[str, str] | None:
        """Return problem and remedy, if a node does not fit the others."""
        if member.num_nodes != self.num_nodes:
            return (
                f"{member.title} was started with --nodes {member.num_nodes}, node 0 with "
                f"--nodes {self.num_nodes}",
                "pass the same --nodes on every node",
            )
        if not 0 <= member.node < self.num_nodes:
            return (
                f"{member.host} was started with --node-rank {member.node}, but there are "
                f"{self.num_nodes} nodes",
                f"pass a different --node-rank on each node, from 0 to {self.num_nodes - 1}",
            )
        if (present := self.members.get(member.node)) is not None:
            return (
                f"--node-rank {member.node} was passed twice: on {present.host} and on "
                f"{member.host}",
                "pass a different --node-rank on each node",
            )
        if self.processes and member.num_processes != self.processes[member.node]:
            return (
                f"{member.title} came back with {member.num_processes} processes instead of "
                f"{self.processes[member.node]}",
                f"pass --gpus {self.processes[member.node]} there, or start all nodes again",
            )
        return None

    def _welcome(self, member: Member) -> None:
        send(member.writer, "welcome", run_id=self.run_id, processes=self.processes)

    def _join(self, member: Member, store_port: int) -> None:
        """Note that a node is ready for a new round; begin it when all are."""
        member.store_port = store_port
        if self.refusal is not None:
            self._refuse(member, *self.refusal)
            return
        if self.is_over:
            send(member.writer, "over")
            return
        member.is_joining = True
        joining = [one for one in self.members.values() if one.is_joining]
        if len(joining) < self.num_nodes:
            for one in self.members.values():
                if not one.is_joining and not one.is_waited_for:
                    one.is_waited_for = True
                    send(one.writer, "waiting", count=len(joining))
            if self._deadline is None:
                self._wait_for_nodes()
            return
        self._stop_waiting()
        self.round += 1
        self.store_port = self.members[0].store_port
        for one in joining:
            one.is_joining = False
            one.is_waited_for = False
            send(one.writer, "round", round=self.round)

    def _leave(self, member: Member, reason: str) -> None:
        """Tell the other nodes that one is gone."""
        member.probed.set()
        if self.members.get(member.node) is not member:
            return  # it was replaced, and the others were told
        del self.members[member.node]
        if not self.members:
            self._all_gone.set()
        if not self.processes:
            return  # it may reconnect; if it does not, it is reported as missing
        if member.has_left:
            self.is_over = True
            self._stop_waiting()
        for one in self.members.values():
            if not member.has_left:
                send(one.writer, "lost", title=member.title, reason=reason)
            elif one.is_joining:
                one.is_joining = False
                send(one.writer, "over")
            else:
                send(one.writer, "left")

    def _refuse_all(self, problem: str, remedy: str) -> None:
        self._stop_waiting()
        self.refusal = (problem, remedy)
        for one in self.members.values():
            self._refuse(one, problem, remedy)

    @staticmethod
    def _refuse(member: Member, problem: str, remedy: str) -> None:
        send(member.writer, "refused", problem=problem, remedy=remedy)

    # --- Time ------------------------------------------------------------------------

    def _wait_for_nodes(self) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self.wait_s, self._give_up)
        self._notice = loop.call_later(NOTICE_S, self._say_who_is_missing)

    def _stop_waiting(self) -> None:
        for timer in (self._deadline, self._notice):
            if timer is not None:
                timer.cancel()
        self._deadline = None

    def _missing(self) -> str:
        """Return the numbers of the missing nodes, as in "node 2" or "nodes 1, 2"."""
        here = {node for node, one in self.members.items() if one.is_joining or not self.processes}
        missing = [str(node) for node in range(self.num_nodes) if node not in here]
        return f"node{'s' if len(missing) > 1 else ''} {', '.join(missing)}"

    def _give_up(self) -> None:
        self._deadline = None
        join = "come back" if self.round else "join"
        self._refuse_all(
            f"of {self.num_nodes} nodes, {self._missing()} did not {join} within {self.wait_s:g} s",
            "run the same command there with its own --node-rank, or pass a smaller --nodes",
        )

    def _say_who_is_missing(self) -> None:
        write_stderr(
            f"lockstep: of {self.num_nodes} nodes, still waiting for {self._missing()} "
            f"(up to {self.wait_s:g} s)\n"
        )

    async def _beat(self) -> None:
        """Send every node a heartbeat, and drop the nodes that send none."""
        while True:
            await asyncio.sleep(BEAT_S)
            for one in list(self.members.values()):
                one.beats_missed += 1
                if one.beats_missed >= MISSED_BEATS:
                    one.writer.transport.abort()
                else:
                    send(one.writer, "beat")
