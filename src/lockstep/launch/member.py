"""This node's side of the rendezvous: connecting, joining a round, noticing a lost node.

Owns: the connection to node 0, and the tunnel through which this node's ranks reach the store
there. Does not own: node 0's side (`coordinator.py`), starting ranks (`local.py`).

A separate thread keeps the connection alive: the launcher does not wait for the network while it
watches its ranks, and heartbeats continue while it waits for them.
"""

import asyncio
import os
import random
import re
import secrets
import socket
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from lockstep.dist.addresses import LOOPBACK, own_addresses
from lockstep.errors import LaunchError, shown, write_stderr
from lockstep.launch import coordinator
from lockstep.launch.coordinator import Coordinator
from lockstep.launch.handshake import (
    BROKEN,
    HANDSHAKE_S,
    LINE_BYTES,
    TOKEN_VARIABLE,
    WrongTokenError,
    greet_head,
    job_token,
    key_path,
    receive,
    send,
    splice,
)
from lockstep.launch.request import LaunchRequest
from lockstep.text_input import whole_number

RETRY_S = 0.2
TUNNEL_S = 60.0
"""How long a rank's connection to the store may wait for node 0 to answer."""
LEAVE_TIMEOUT_S = 5.0
"""How long to wait until the other nodes know that this one leaves."""
HEAD_REMEDY = (
    "pass the same --head on every node, with a port that is free on node 0 and reachable from the "
    "other nodes"
)

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Result = TypeVar("Result")


class RendezvousOverError(Exception):
    """Another node has left for good; there is no further round."""


class LinkLostError(Exception):
    """The connection to node 0 ended."""


class Membership:
    """This node's membership in a job of several nodes.

    `Membership(request, env)` returns when all nodes have joined. If one is missing or they do not
    fit together, it raises the same error on all of them.
    """

    def __init__(self, request: LaunchRequest, env: Mapping[str, str]) -> None:
        self.request = request
        self.host, self.port = parse_head(request.head)
        self.token = job_token(env)
        self.key_path = key_path(env)
        self.launcher = secrets.token_hex(8)
        """Distinguishes this launcher from another one with the same --node-rank."""
        self.run_id = ""
        self.processes: list[int] = []
        """The number of ranks on each node."""
        self.num_waiting = 0
        """The number of nodes that wait for this one to join a new round, as of node 0's last
        message."""
        self.is_over = False
        """Whether another node has left for good."""
        self.loss: str | None = None
        """The node that was lost since the round began, and how."""
        self._link: asyncio.StreamWriter | None = None
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._refusal: LaunchError | None = None
        self._beats_missed = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._tunnel: asyncio.Server | None = None
        self._coordinator: Coordinator | None = None
        self._loop = asyncio.new_event_loop()
        # A flood of connections may exhaust the file descriptors; asyncio retries by itself.
        self._loop.set_exception_handler(lambda *_: None)
        self._thread = threading.Thread(target=self._run_loop, name="rendezvous", daemon=True)
        self._thread.start()
        try:
            self._call(self._enter())
        except BaseException:
            self.leave()
            raise

    def join(self, store_port: int = 0) -> int:
        """Wait until all nodes begin a round; return the local port of its store.

        Node 0 passes the port of the store it made for this round.

        Raises:
            RendezvousOverError: if another node has left for good.
            LaunchError: naming the nodes that did not join.
        """
        return self._call(self._join(store_port))

    def leave(self) -> None:
        """Tell the others that this node leaves for good. Safe to call twice."""
        if not self._thread.is_alive():
            return
        ended = asyncio.run_coroutine_threadsafe(self._leave(), self._loop)
        try:
            ended.result(2 * LEAVE_TIMEOUT_S)
        except TimeoutError:
            pass
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(LEAVE_TIMEOUT_S)

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # --- In the thread ---------------------------------------------------------------

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end_tasks())
        self._loop.close()

    @staticmethod
    async def _end_tasks() -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.sleep(0)  # sockets close in the next iteration of the event loop

    async def _enter(self) -> None:
        if self.request.node_rank == 0:
            await self._open_head()
        await self._connect(self._loop.time() + self.request.wait_s)

    async def _open_head(self) -> None:
        """Listen on the addresses that --head names here.

        If it names none of this machine's addresses (NAT, a container), or a loopback address under
        a name other than localhost (Debian's 127.0.1.1), listen on all. Every connection must prove
        the token.
        """
        own = Coordinator(self.token, self.request.num_nodes, self.request.wait_s)
        try:
            addresses = [address for _, address in own_addresses(self.host)]
            await own.open(addresses or None, self.port)
        except OSError as error:
            raise LaunchError(
                f"node 0 cannot listen on {self.request.head}: {_reason(error)}", HEAD_REMEDY
            ) from error
        self._coordinator = own

    async def _connect(self, deadline: float) -> None:
        """Connect to node 0 and wait until all nodes have joined."""
        reader, writer = await self._dial(deadline)
        self._link = writer
        self._answer = self._loop.create_future()
        self._beats_missed = 0
        self._start(self._listen(reader, writer))
        self._start(self._beat(writer))
        send(
            writer,
            "member",
            node=self.request.node_rank,
            num_nodes=self.request.num_nodes,
            num_processes=self.request.num_processes,
            host=socket.gethostname(),
            launcher=self.launcher,
            run_id=self.run_id,
        )
        try:
            answer = await self._answer
        except LinkLostError as lost:
            raise LaunchError(
                f"node 0 at {self.request.head} ended before all {self.request.num_nodes} nodes "
                "had joined",
                "read what node 0 printed, then run the same command on every node",
            ) from lost
        processes = [int(count) for count in answer["processes"]]
        if self.processes and self.processes != processes:
            raise LaunchError(
                f"node 0 was started again with {sum(processes)} ranks in all instead of "
                f"{sum(self.processes)}",
                "pass the same --nodes and --gpus as before, or start all nodes again",
            )
        self.processes = processes
        self.run_id = str(answer["run_id"])

    async def _dial(self, deadline: float) -> Stream:
        """Connect to node 0 and prove the token; retry until the deadline."""
        notice = self._loop.time() + coordinator.NOTICE_S
        while True:
            writer = None
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    host = self.host
                    if self._coordinator is not None and not own_addresses(host):
                        host = LOOPBACK  # this is node 0, which listens on all addresses
                    reader, writer = await asyncio.open_connection(
                        host, self.port, limit=LINE_BYTES, happy_eyeballs_delay=0.25
                    )
                    await greet_head(reader, writer, self.token)
                    return reader, writer
            except WrongTokenError as error:
                raise LaunchError(
                    f"node 0 at {self.request.head} refused this node: the job token differs",
                    f"set {TOKEN_VARIABLE} to the same value on every node, or copy the key file "
                    f"{self.key_path} from node 0",
                ) from error
            except BROKEN as error:
                if writer is not None:
                    writer.close()
                if self._loop.time() >= deadline:
                    raise LaunchError(
                        f"node 0 at {self.request.head} did not answer within "
                        f"{self.request.wait_s:g} s: {_reason(error)}",
                        HEAD_REMEDY,
                    ) from error
                if self._loop.time() >= notice:
                    notice = deadline + 1
                    why = f"does not answer yet: {_reason(error)}"
                    write_stderr(f"lockstep: node 0 at {self.request.head} {why}\n")
            # Connections that failed at the same time should not retry at the same time.
            await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.5))

    async def _join(self, store_port: int) -> int:
        deadline = self._loop.time() + self.request.wait_s
        while True:
            if self._refusal is not None:
                raise self._refusal
            if self.is_over:
                raise RendezvousOverError
            if self._link is None:
                await self._connect(deadline)
            assert self._link is not None
            self._answer = self._loop.create_future()
            send(self._link, "join", store_port=store_port)
            try:
                answer = await self._answer
            except LinkLostError:  # node 0 is gone, and may be started again
                continue
            if answer["kind"] == "over":
                raise RendezvousOverError
            return await self._open_tunnel(int(answer["round"]), store_port)

    async def _open_tunnel(self, number: int, store_port: int) -> int:
        """Return a loopback port of this node that leads to the store of a round."""
        if store_port:  # the store is on this node
            return store_port
        if self._tunnel is not None:
            self._tunnel.close()

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                head = await self._dial(self._loop.time() + TUNNEL_S)
                send(head[1], "store", round=number)
                await splice((reader, writer), head)
            except (*BROKEN, LaunchError):
                pass  # the rank reports its lost connection itself
            finally:
                writer.close()

        self._tunnel = await asyncio.start_server(pass_on, LOOPBACK, 0, limit=LINE_BYTES)
        return int(self._tunnel.sockets[0].getsockname()[1])

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle node 0's messages until the connection ends."""
        reason = coordinator.GONE
        try:
            while True:
                message = await receive(reader)
                self._beats_missed = 0
                self._take(message)
        except (*BROKEN, KeyError, TypeError):
            if self._beats_missed >= coordinator.MISSED_BEATS:
                silence_s = coordinator.BEAT_S * coordinator.MISSED_BEATS
                reason = f"it sent no heartbeat for {silence_s:g} s"
        finally:
            writer.close()
            self._link = None
            if not self.is_over:
                self.loss = f"node 0 ({self.request.head}) is gone: {reason}"
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(LinkLostError())

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "round":
            # Messages arrive in order, so earlier reports belong to the previous round.
            self.num_waiting = 0
            self.loss = None
        is_waiting = self._answer is not None and not self._answer.done()
        if kind in ("welcome", "round", "over"):
            self.is_over = self.is_over or kind == "over"
            if is_waiting:
                self._answer.set_result(message)  # type: ignore[union-attr]
        elif kind == "refused":
            self._refusal = LaunchError(str(message["problem"]), str(message["remedy"]))
            if is_waiting:
                self._answer.set_exception(self._refusal)  # type: ignore[union-attr]
        elif kind == "waiting":
            self.num_waiting = int(message["count"])
        elif kind == "probe" and self._link is not None:
            send(self._link, "alive")
        elif kind == "left":
            self.is_over = True
        elif kind == "lost":
            self.loss = f"{message['title']} is gone: {message['reason']}"

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        """Send node 0 a heartbeat, and drop the connection if it sends none."""
        while not writer.is_closing():
            await asyncio.sleep(coordinator.BEAT_S)
            self._beats_missed += 1
            if self._beats_missed >= coordinator.MISSED_BEATS:
                writer.transport.abort()
            else:
                send(writer, "beat")

    async def _leave(self) -> None:
        if self._tunnel is not None:
            self._tunnel.close()
        if self._link is not None:
            writer = self._link
            send(writer, "goodbye")
            try:
                async with asyncio.timeout(LEAVE_TIMEOUT_S):
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
            except BROKEN:
                pass
        if self._coordinator is not None:
            await self._coordinator.close(LEAVE_TIMEOUT_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # asyncio keeps only weak references to tasks
        task.add_done_callback(self._tasks.discard)


def _reason(error: BaseException) -> str:
    """Return in a few words why a connection failed."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, EOFError):
        return "the connection ended"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    if isinstance(error, OSError) and error.strerror:  # for example a name that does not resolve
        return error.strerror
    return str(error) or type(error).__name__


def parse_head(head: str) -> tuple[str, int]:
    """Return host and port.

    >>> parse_head("node1:29500"), parse_head("[fd00::2]:29500")
    (('node1', 29500), ('fd00::2', 29500))
    """
    host, _, port = head.rpartition(":")
    number = whole_number(port, most=65_535)
    if not number or re.fullmatch(r"[!-~]{1,255}", host) is None:
        raise LaunchError(f"--head {shown(head)} is not HOST:PORT", "pass --head node1:29500")
    return host.strip("[]"), number
