"""Node 0's side of the rendezvous: who is there, when a round begins, who is missing.

Owns: the one port of a job that can be reached from the network. Does not own: the nodes'
side (`member.py`), what torch makes of it (`rendezvous.py`).

Runs in an event loop of its own, so nothing here needs a lock. Time is measured with a
monotonic clock on this node alone; what other nodes' clocks say is never looked at.
"""

import asyncio
import sys
import uuid
from dataclasses import dataclass, field
from typing import Any

from lockstep.dist.addresses import BACKLOG, LOOPBACK
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
"""How often each side of a connection gives a sign of life."""
MISSED_BEATS = 15
"""So many in a row, and a node counts as lost. Counted and not timed, so that a job that SLURM
suspends and resumes as a whole does not fall apart."""
PROBE_S = 5.0
"""How long an earlier connection of a node may take to answer when the node connects again."""
GONE = "its launcher ended, or the network cut it off"
MAX_STRANGERS = 128
"""Connections that have not proved the token yet. One more, and those older than `STALE_S` are
dropped: a proof takes milliseconds, but the ranks of a large job connect all at once."""
STALE_S = 1.0
MAX_FRESH_STRANGERS = 512
"""One more, and the oldest is dropped however young it is: processes may often open no more than
1,024 files, and those who have proved the token need some of them."""
MAX_NAMED_STRANGERS = 8
"""So many addresses with a wrong token are named; a flood must not fill the log."""
NOTICE_S = 10.0
"""After so long, a node that waits for others says for whom."""


@dataclass(eq=False, slots=True)
class Member:
    """A node whose launcher is connected."""

    node: int
    num_nodes: int
    num_processes: int
    host: str
    launcher: str
    """A random id of its launcher: a node that was started again has another one."""
    run_id: str
    """The id of this launch, as far as the node knows it already; else empty."""
    writer: asyncio.StreamWriter
    is_joining: bool = False
    """Whether it waits for the next round to begin."""
    is_waited_for: bool = False
    """Whether it knows that others wait for it: once is enough, however many they are."""
    store_port: int = 0
    """Of node 0: where its store for the next round listens, on loopback."""
    beats_missed: int = 0
    has_left: bool = False
    """Whether it said goodbye; one that did not is lost."""
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it answers a probe, or its connection ends."""

    @property
    def title(self) -> str:
        """Say which node this is."""
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
        """Empty until all have come. Node 0 may have been started again: then the other nodes know
        the id of this launch, and it stays."""
        self.members: dict[int, Member] = {}
        self.processes: list[int] = []
        """How many ranks each node starts; empty until all have come once."""
        self.round = 0
        self.store_port = 0
        self.is_over = False
        """Whether a node has left for good, so that there can be no further round."""
        self.refusal: tuple[str, str] | None = None
        """Problem and remedy, once the job cannot begin."""
        self._strangers: dict[asyncio.StreamWriter, float] = {}
        """When each of them connected, oldest first."""
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
        """Stop listening, once those who were told that it is over have heard it."""
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
        """Serve one connection, whoever it is from."""
        try:
            message = await self._admit(reader, writer)
            if message["kind"] == "store":
                await self._tunnel(message["round"], reader, writer)
            elif message["kind"] == "member":
                await self._keep(self._read_member(message, writer), reader)
        except WrongTokenError:
            self._name_stranger(writer)
        except (*BROKEN, KeyError, TypeError):
            pass  # it ended, or was no launcher of ours
        finally:
            writer.close()

    async def _admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> dict[str, Any]:
        """Have a stranger prove the token, and return what it wants."""
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
        sys.stderr.write(
            f"lockstep: a launcher on {peer} was turned away: its job token differs\n"
            f"  try: set {TOKEN_VARIABLE} to the same value on every node, or copy the key file\n"
        )
        sys.stderr.flush()

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
        """Hear what a node says for as long as it is there."""
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
                reason = f"it gave no sign of life for {BEAT_S * MISSED_BEATS:g} s"
        finally:
            self._leave(member, reason)

    async def _drop_predecessor(self, member: Member) -> None:
        """Drop an earlier connection of the same node, unless another launcher answers there.

        A machine that loses power or its network closes no connection. Without a probe, a node
        that comes back would be taken for a duplicate until its old connection misses its beats.
        """
        while (present := self.members.get(member.node)) is not None:
            # A launcher has one connection at a time, so its own earlier one needs no probe.
            if present.launcher != member.launcher and await self._answers(present):
                return
            present.writer.transport.abort()
            self._leave(present, GONE)

    async def _answers(self, member: Member) -> bool:
        """Ask a node for a sign of life."""
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
        """Take a node in, or say why not."""
        if self.refusal is None and (fault := self._fault_of(member)) is not None:
            self._refuse(member, *fault)
            if not self.processes:  # nothing runs yet: all stop, since the commands differ
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
        """Return problem and remedy, if a node does not fit in."""
        if member.num_nodes != self.num_nodes:
            return (
                f"{member.title} was started with --nodes {member.num_nodes}, node 0 with "
                f"--nodes {self.num_nodes}",
                "pass the same --nodes on every node",
            )
        if not 0 <= member.node < self.num_nodes:
            return (
                f"there is no node {member.node} among {self.num_nodes}",
                f"pass --node-rank 0 to {self.num_nodes - 1}, another one on each node",
            )
        if (present := self.members.get(member.node)) is not None:
            return (
                f"--node-rank {member.node} was passed twice: on {present.host} and on "
                f"{member.host}",
                "pass another --node-rank on each node",
            )
        if self.processes and member.num_processes != self.processes[member.node]:
            return (
                f"{member.title} came back with {member.num_processes} processes, and had "
                f"{self.processes[member.node]} before",
                f"pass --gpus {self.processes[member.node]} there, or start all nodes again",
            )
        return None

    def _welcome(self, member: Member) -> None:
        send(member.writer, "welcome", run_id=self.run_id, processes=self.processes)

    def _join(self, member: Member, store_port: int) -> None:
        """Note that a node wants a new round; begin it if all do."""
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
        """Tell the others that a node is no longer there."""
        member.probed.set()
        if self.members.get(member.node) is not member:
            return  # it was replaced, and the others know
        del self.members[member.node]
        if not self.members:
            self._all_gone.set()
        if not self.processes:
            return  # it may come again; if it does not, it will be named
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
        """Name the nodes that are waited for."""
        here = {node for node, one in self.members.items() if one.is_joining or not self.processes}
        return ", ".join(str(node) for node in range(self.num_nodes) if node not in here)

    def _give_up(self) -> None:
        self._deadline = None
        came = "come back" if self.round else "come"
        self._refuse_all(
            f"of {self.num_nodes} nodes, these did not {came} within {self.wait_s:g} s: node "
            f"{self._missing()}",
            "run the same command there with its own --node-rank, or pass fewer --nodes",
        )

    def _say_who_is_missing(self) -> None:
        sys.stderr.write(
            f"lockstep: still waiting for node {self._missing()} of {self.num_nodes} nodes "
            f"({self.wait_s:g} s at most)\n"
        )
        sys.stderr.flush()

    async def _beat(self) -> None:
        """Give every node a sign of life, and drop those that give none."""
        while True:
            await asyncio.sleep(BEAT_S)
            for one in list(self.members.values()):
                one.beats_missed += 1
                if one.beats_missed >= MISSED_BEATS:
                    one.writer.transport.abort()
                else:
                    send(one.writer, "beat")
