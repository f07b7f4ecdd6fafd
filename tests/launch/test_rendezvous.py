"""Nodes that meet: who may join, who is missing or lost, what listens, and what clocks matter not.

A stranger on the network can neither join a job, nor stop it, nor have anything unpickled.
"""

import asyncio
import base64
import json
import os
import pickle
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from namespaces import Network, network
from processes import BIN, HERE, LAUNCH, Fork, Start, Started, wait_until

from lockstep.errors import LaunchError
from lockstep.launch import coordinator, handshake
from lockstep.launch.coordinator import Coordinator, Member
from lockstep.launch.handshake import job_token
from lockstep.launch.member import Membership, RendezvousOverError
from lockstep.launch.request import LaunchRequest
from lockstep.testing import free_port

MEET = HERE / "meet.py"
LOCKSTEP = BIN / "lockstep"
STAY = """
import os, sys, time
from lockstep import World

with World.enter(timeout_s=60) as world:
    world.barrier()
    open(f"{sys.argv[1]}/there{world.rank}", "w").close()
    while not os.path.exists(f"{sys.argv[1]}/end"):
        time.sleep(0.02)
    world.barrier()
"""


@pytest.fixture
def stay(tmp_path: Path) -> Path:
    """Return a script that joins, waits for a file called `end`, and joins again."""
    path = tmp_path / "stay.py"
    path.write_text(STAY)
    return path


def wait_for_ranks(folder: Path, size: int, *launched: Started) -> None:
    def are_there() -> bool:
        assert all(one.process.poll() is None for one in launched), [one.text for one in launched]
        return len(list(folder.glob("there*"))) == size

    wait_until(are_there, "all ranks")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Network]:
    """Connect two machines, and a third that belongs to a stranger."""
    with network(tmp_path, 3) as connected:
        yield connected


def nodes_of(num: int, port: int | None = None, *words: str) -> list[tuple[str, ...]]:
    """Return the command of each node, all on this machine."""
    head = f"--head=localhost:{port or free_port()}"
    return [(*LAUNCH, "1", f"--nodes={num}", head, f"--node-rank={n}", *words) for n in range(num)]


# --- One node: nothing listens beyond loopback ----------------------------------------------------


def test_a_launch_on_one_node_listens_on_loopback_alone(
    machines: Network, stay: Path, tmp_path: Path, start: Start
) -> None:
    run = start(*machines.on("node0", LOCKSTEP, "launch", "--gpus", "2", stay, tmp_path))
    wait_for_ranks(tmp_path, 2, run)
    assert machines.listeners("node0") == {"127.0.0.1"}
    (tmp_path / "end").touch()
    assert run.finish() == 0, run.text


def test_ranks_started_by_hand_on_one_machine_listen_on_loopback_alone(
    machines: Network, stay: Path, tmp_path: Path, start: Start
) -> None:
    both = [
        start(
            *machines.on("node0", sys.executable, stay, tmp_path),
            env={
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
            },
        )
        for rank in range(2)
    ]
    wait_for_ranks(tmp_path, 2, *both)
    assert machines.listeners("node0") == {"127.0.0.1"}
    (tmp_path / "end").touch()
    assert [one.finish() for one in both] == [0, 0], both[0].text + both[1].text


def test_ranks_started_by_hand_on_two_machines_listen_on_the_address_of_the_head(
    machines: Network, stay: Path, tmp_path: Path, start: Start
) -> None:
    both = [
        start(
            *machines.on(f"node{rank}", sys.executable, stay, tmp_path),
            env={
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "node0",
                "MASTER_PORT": "29500",
            },
        )
        for rank in range(2)
    ]
    wait_for_ranks(tmp_path, 2, *both)
    assert machines.listeners("node0") == {"10.77.0.10"}
    (tmp_path / "end").touch()
    assert [one.finish() for one in both] == [0, 0], both[0].text + both[1].text


@pytest.mark.parametrize("by", ["launch", "hand"])
def test_a_machine_whose_loopback_is_down_is_refused_in_a_sentence(
    by: str, machines: Network, stay: Path, tmp_path: Path, start: Start
) -> None:
    machines.without_loopback("node0")
    words: tuple[str | Path, ...] = (LOCKSTEP, "launch", "--gpus", "2", MEET)
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    if by == "hand":
        words = (sys.executable, MEET)
    run = start(*machines.on("node0", *words), env=env if by == "hand" else {})
    assert run.finish() == 2, run.text
    assert "the ranks of this machine cannot reach each other at 127.0.0.1: " in run.text
    assert "try: bring the loopback interface up: ip link set lo up" in run.text
    assert "frame #" not in run.text
    assert "c10d" not in run.text


# --- Several nodes, and a stranger ----------------------------------------------------------------


def start_two(
    machines: Network, start: Start, folder: Path, script: Path, *words: str
) -> list[Started]:
    shape = ("--gpus", "1", "--nodes", "2", "--head", "node0:29500", *words)
    return [
        start(
            *machines.on(name, LOCKSTEP, "launch", *shape, "--node-rank", str(rank)),
            *(script, folder),
        )
        for rank, name in enumerate(machines.names[:2])
    ]


def test_two_machines_listen_on_the_address_of_the_head_and_their_own(
    machines: Network, stay: Path, tmp_path: Path, start: Start
) -> None:
    both = start_two(machines, start, tmp_path, stay)
    wait_for_ranks(tmp_path, 2, *both)
    assert machines.listeners("node0") == {"127.0.0.1", "10.77.0.10"}
    assert machines.listeners("node1") == {"127.0.0.1", "10.77.0.11"}
    at_head = machines.ask("node0", "ss", "-Hltnp").splitlines()
    launcher = [line for line in at_head if "10.77.0.10:" in line and f"pid={both[0].pid}" in line]
    assert len(launcher) <= 1, "of the launcher, one port can be reached from the network"
    (tmp_path / "end").touch()
    assert [one.finish() for one in both] == [0, 0], both[0].text + both[1].text


ATTACK = """
import base64, contextlib, pickle, secrets, socket, sys, time
from datetime import timedelta
from pathlib import Path

address, touched, count = sys.argv[1], sys.argv[2], int(sys.argv[3])

class Evil:
    def __reduce__(self):
        return Path.touch, (Path(touched),)

evil = pickle.dumps(Evil())

def connect():
    return socket.create_connection((address, 29500), timeout=10)

# As torch's own rendezvous would be attacked: a state that runs code when it is unpickled.
from torch.distributed import TCPStore
with contextlib.suppress(Exception):
    store = TCPStore(address, 29500, None, False, timedelta(seconds=2), False)
    run_id = store.get("lockstep/roll").decode()
    for _ in range(20):
        store.set("torch.rendezvous." + run_id, base64.b64encode(evil))
        time.sleep(0.05)

held = []
for turn in range(count):
    with contextlib.suppress(OSError):
        one = connect()
        if turn % 4 == 0:  # half open: says nothing, and stays
            held.append(one)
            continue
        if turn % 4 == 1:  # a byte at a time
            one.send(b"l")
            held.append(one)
            continue
        if turn % 4 == 2:
            one.sendall(evil)
        else:
            one.sendall(secrets.token_bytes(1 + secrets.randbelow(4096)))
        one.close()
    held = held[-256:]
for one in held:
    with contextlib.suppress(OSError):
        one.send(b"o")
print("tried", count)
"""


def test_a_stranger_can_neither_join_nor_stop_a_job_nor_have_anything_unpickled(
    machines: Network, stay: Path, tmp_path: Path, start: Start
) -> None:
    (tmp_path / "attack.py").write_text(ATTACK)
    both = start_two(machines, start, tmp_path, stay)
    wait_for_ranks(tmp_path, 2, *both)
    words = (tmp_path / "attack.py", "10.77.0.10", tmp_path / "touched", "400")
    stranger = start(*machines.on("node2", sys.executable, *words))
    assert stranger.finish() == 0, stranger.text
    assert "tried 400" in stranger.text
    assert not (tmp_path / "touched").exists(), "what a stranger sent was unpickled"
    # A launcher with another token is turned away, and the job goes on.
    shape = ("--gpus", "1", "--nodes", "2", "--node-rank", "1", "--head", "node0:29500")
    other = {"LOCKSTEP_JOB_TOKEN": secrets.token_hex(16)}
    intruder = start(*machines.on("node2", LOCKSTEP, "launch", *shape, stay, tmp_path), env=other)
    assert intruder.finish() == 2, intruder.text
    (tmp_path / "end").touch()
    assert [one.finish() for one in both] == [0, 0], both[0].text + both[1].text
    for one in both:
        assert "frame #" not in one.text
        assert "Traceback" not in one.text
    assert both[0].text.count("refused a launcher on 10.77.0.12") == 1, both[0].text


def test_the_planted_fault_what_is_unpickled_would_be_seen(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "touched",)

    pickle.loads(base64.b64decode(base64.b64encode(pickle.dumps(Evil()))))
    assert (tmp_path / "touched").exists()


IMPATIENT = (
    "import sys; from lockstep.launch import coordinator; "
    "coordinator.BEAT_S, coordinator.MISSED_BEATS = 0.5, 10; "
    "from lockstep.cli.main import main; main()"
)


def test_a_machine_that_is_cut_off_is_named_on_the_other_and_both_end(
    machines: Network, tmp_path: Path, start: Start
) -> None:
    script = tmp_path / "sleep.py"  # its ranks would never notice
    script.write_text(
        "import os, time; open('there' + os.environ['RANK'], 'w').close(); time.sleep(300)"
    )
    shape = ("launch", "--gpus", "1", "--nodes", "2", "--head", "node0:29500", "--node-rank")
    both = [
        start(
            *machines.on(name, "env", "-C", tmp_path, sys.executable, "-c", IMPATIENT),
            *(*shape, str(rank), script),
        )
        for rank, name in enumerate(machines.names[:2])
    ]
    wait_for_ranks(tmp_path, 2, *both)
    machines.cut("node1")
    assert [one.finish(60) for one in both] == [1, 1]
    silence = "is gone: it sent no heartbeat for 5 s\n  try: run the same command on every"
    assert f"lockstep: node 1 (node1) {silence}" in both[0].text, both[0].text
    assert f"lockstep: node 0 (node0:29500) {silence}" in both[1].text, both[1].text


# --- Nodes whose commands differ ------------------------------------------------------------------


def test_another_token_is_one_sentence_on_both_nodes(start: Start) -> None:
    first, second = nodes_of(2)
    head = start(*first, MEET)
    # A process of its own: pytest would keep to itself what a thread of a fork raises.
    another = {"LOCKSTEP_JOB_TOKEN": secrets.token_hex(16)}
    other = start(LOCKSTEP, *second[1:], MEET, env=another)
    assert other.finish() == 2, other.text
    assert other.text.count("\n") == 2
    assert "refused this node: the job token differs\n  try: set LOCKSTEP_JOB_" in other.text
    turned_away = "lockstep: refused a launcher on 127.0.0.1: its job token differs\n  try:"
    assert head.text.count(turned_away) == 1, head.text
    assert head.process.poll() is None, "it still waits for the right one"


def test_nodes_that_were_told_different_numbers_of_nodes_all_say_so(start: Start) -> None:
    port = free_port()
    commands = [nodes_of(2, port)[0], nodes_of(3, port)[1]]
    for one in [start(*command, MEET) for command in commands]:
        assert one.finish() == 2, one.text
        assert "was started with --nodes 3, node 0 with --nodes 2\n  try: pass the" in one.text
        assert one.text.count("\n") == 2


def test_a_node_rank_that_was_given_twice_is_named_on_all_nodes(start: Start) -> None:
    commands = nodes_of(3)
    for one in [start(*commands[rank], MEET) for rank in (0, 1, 1)]:
        assert one.finish() == 2, one.text
        assert "lockstep: --node-rank 1 was passed twice: on " in one.text
        assert one.text.count("\n") == 2


def test_a_head_that_never_comes_is_said_in_a_sentence(start: Start) -> None:
    _, second = nodes_of(2, None, "--wait=1")
    alone = start(LOCKSTEP, *second[1:], MEET)
    assert alone.finish() == 2, alone.text
    said = "did not answer within 1 s: Connection refused\n  try: pass the same --head"
    assert said in alone.text
    assert alone.text.count("\n") == 2


def test_a_head_whose_port_is_taken_is_said_in_a_sentence(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first, _ = nodes_of(2, taken.getsockname()[1])
        head = start(LOCKSTEP, *first[1:], MEET)
        assert head.finish() == 2, head.text
    assert "node 0 cannot listen on " in head.text
    assert "in use\n  try: pass the same --head" in head.text
    assert head.text.count("\n") == 2


# --- A group of another size ----------------------------------------------------------------------


def test_half_a_group_is_refused_before_it_trains(tmp_path: Path, start: Start) -> None:
    script = tmp_path / "half.py"
    script.write_text(
        "import os\n"
        "os.environ['WORLD_SIZE'] = os.environ['LOCAL_WORLD_SIZE'] = '1'\n"
        "os.environ['RANK'] = os.environ['LOCAL_RANK'] = '0'\n"
        "from lockstep import World\n"
        "World.enter()\n"
        "print('trained alone')\n"
    )
    run = start(*LAUNCH, "2", script)
    assert run.finish() == 2, run.text
    assert "trained alone" not in run.text
    assert "the group has 1 ranks, and 2 were asked for (LOCKSTEP_EXPECTED_RANKS)" in run.text


def test_nodes_with_different_numbers_of_processes_form_one_group(start: Start) -> None:
    commands = nodes_of(2)
    more = ("2" if word == "1" else word for word in commands[1])
    both = [start(*commands[0], MEET), start(*more, MEET)]
    assert [one.finish() for one in both] == [0, 0], both[0].text + both[1].text
    lines = (both[0].text + both[1].text).replace("[rank1]:", "").splitlines()
    stories = [json.loads(line) for line in lines]
    assert sorted((one["rank"], one["size"], one["sum"]) for one in stories) == [
        (0, 3, 6.0),
        (1, 3, 6.0),
        (2, 3, 6.0),
    ]


@pytest.fixture(scope="module")
def skewed_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library that sets the wall clock of the processes that load it ahead."""
    library = tmp_path_factory.mktemp("clock") / "skewed_clock.so"
    words = ["cc", "-shared", "-fPIC", "-o", library, HERE / "skewed_clock.c", "-ldl"]
    subprocess.run(words, check=True)
    return library


@pytest.mark.parametrize("ahead", [0, 1])
def test_nodes_whose_clocks_differ_train_together(
    ahead: int, skewed_clock: Path, start: Start
) -> None:
    """By more than anything waits for: whoever compared times would find one long past."""
    skewed = {"LD_PRELOAD": str(skewed_clock), "CLOCK_SKEW_S": "3600"}
    shape = ("launch", "--gpus", "1", "--nodes", "2", "--head", f"localhost:{free_port()}")
    both = [
        start(LOCKSTEP, *shape, "--node-rank", str(rank), MEET, env=env)
        for rank, env in enumerate([skewed, {}] if ahead == 0 else [{}, skewed])
    ]
    assert [one.finish() for one in both] == [0, 0], both[0].text + both[1].text
    assert all('"size": 2' in one.text for one in both), both[0].text + both[1].text


def test_the_clock_of_these_tests_is_ahead(skewed_clock: Path) -> None:
    env = {**os.environ, "LD_PRELOAD": str(skewed_clock), "CLOCK_SKEW_S": "3600"}
    words = [sys.executable, "-c", "import time; print(time.time())"]
    shown = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
    assert 3_500 < float(shown) - time.time() < 3_700


def test_a_script_that_makes_its_own_group_reaches_the_store_from_every_node(start: Start) -> None:
    both = [start(*command, MEET, "--group_first") for command in nodes_of(2)]
    assert [one.finish() for one in both] == [0, 0], both[0].text + both[1].text
    assert all('"sum": 3.0' in one.text for one in both)


# --- A node that dies -----------------------------------------------------------------------------


def test_a_node_whose_launcher_is_killed_is_named_and_the_others_end(
    stay: Path, tmp_path: Path, start: Start
) -> None:
    head, other = (start(*command, stay, tmp_path) for command in nodes_of(2))
    wait_for_ranks(tmp_path, 2, head, other)
    os.kill(other.pid, signal.SIGKILL)
    assert head.finish() == 1, head.text
    said = "is gone: its launcher ended, or the network cut it off\n  try: run the same command"
    assert "lockstep: node 1 (" in head.text
    assert said in head.text


@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_that_comes_back_is_waited_for_and_all_train_on(
    killed: int, stay: Path, tmp_path: Path, start: Start
) -> None:
    commands = nodes_of(2, None, "--restarts=2")
    both = [start(*command, stay, tmp_path) for command in commands]
    wait_for_ranks(tmp_path, 2, *both)
    os.kill(both[killed].pid, signal.SIGKILL)
    said = "waiting up to 600 s for it to come back"
    wait_until(lambda: said in both[1 - killed].text, said)
    for file in tmp_path.glob("there*"):
        file.unlink()
    both[killed] = start(*commands[killed], stay, tmp_path)
    wait_for_ranks(tmp_path, 2, *both)
    (tmp_path / "end").touch()
    assert [one.finish() for one in both] == [0, 0], both[0].text + both[1].text


# --- The parts ------------------------------------------------------------------------------------


def launch_request(node: int, port: int, num_nodes: int = 2, wait_s: float = 60.0) -> LaunchRequest:
    return LaunchRequest((), 1, num_nodes, node, f"localhost:{port}", wait_s=wait_s)


class Node(threading.Thread):
    """One node in a thread: it meets the others, and keeps what came of it."""

    def __init__(self, where: LaunchRequest, token: str) -> None:
        super().__init__(daemon=True)
        self.where = where
        self.env = {"LOCKSTEP_JOB_TOKEN": token}
        self.membership: Membership | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.membership = Membership(self.where, self.env)
        except LaunchError as error:
            self.error = error

    def entered(self) -> Membership:
        self.join(30)
        assert self.membership is not None, self.error
        return self.membership


class Silent:
    """Node 1 of a machine that lost its power: connected, and never heard of again."""

    def __init__(self, port: int, token: str, num_nodes: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.writer = self.loop.run_until_complete(self.enter(port, token, num_nodes))

    async def enter(self, port: int, token: str, num_nodes: int) -> asyncio.StreamWriter:
        while True:
            try:
                reader, writer = await asyncio.open_connection("localhost", port)
                break
            except ConnectionRefusedError:  # node 0 does not listen yet
                await asyncio.sleep(0.02)
        await handshake.greet_head(reader, writer, token.encode())
        who = {"node": 1, "num_nodes": num_nodes, "num_processes": 1, "host": "vm"}
        handshake.send(writer, "member", **who, launcher="0", run_id="")
        await writer.drain()
        return writer

    def close(self) -> None:
        self.writer.transport.abort()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


@pytest.fixture
def pair(job_token: str) -> Iterator[list[Membership]]:
    """Return two nodes that have met."""
    port = free_port()
    nodes = [Node(launch_request(rank, port), job_token) for rank in range(2)]
    met = [node.entered() for node in nodes]
    yield met
    for one in reversed(met):
        one.leave()


def in_thread(results: list[object], one: Membership, store_port: int) -> threading.Thread:
    def join() -> None:
        try:
            results.append(one.join(store_port))
        except RendezvousOverError as over:
            results.append(over)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    return thread


def test_a_round_begins_when_all_have_joined_and_the_store_is_reached_from_both(
    pair: list[Membership],
) -> None:
    from lockstep.launch.rendezvous import SeveralNodesRendezvous

    handlers = [SeveralNodesRendezvous(one) for one in pair]
    for text in (b"first round", b"second round"):
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(handlers[1].next_rendezvous)
            wait_until(lambda: pair[0].num_waiting == 1, "node 0 hears of it", 20)
            first = handlers[0].next_rendezvous()
            second = joined.result(30)
        assert (first.rank, second.rank) == (0, 1)
        assert (first.world_size, second.world_size) == (2, 2)
        assert not first.store.check(["key"]), "each round has a store of its own"
        second.store.set("key", text)
        assert first.store.get("key") == text
    assert handlers[0].get_run_id() == handlers[1].get_run_id() != ""


def in_loop(one: Membership, message: dict[str, object]) -> None:
    """Have a node receive a message, and return when it has."""
    received = threading.Event()
    one._loop.call_soon_threadsafe(one._take, message)
    one._loop.call_soon_threadsafe(received.set)
    assert received.wait(20)


def test_reports_from_before_a_round_do_not_end_it_and_later_ones_do(
    pair: list[Membership],
) -> None:
    results: list[object] = []
    thread = in_thread(results, pair[0], 1)
    wait_until(lambda: pair[1].num_waiting == 1, "node 1 hears of it", 20)
    # Both were sent before node 0 read that this node joins, and arrive after it said so.
    lost = {"kind": "lost", "title": "node 2 (c)", "reason": "its launcher ended"}
    in_loop(pair[0], {"kind": "waiting", "count": 1})
    in_loop(pair[0], lost)
    pair[1].join()
    thread.join(20)
    assert [one.num_waiting for one in pair] == [0, 0]
    assert [one.loss for one in pair] == [None, None]
    in_loop(pair[0], lost)
    assert pair[0].loss == "node 2 (c) is gone: its launcher ended"


def test_a_node_that_leaves_ends_the_wait_of_one_that_joins(pair: list[Membership]) -> None:
    results: list[object] = []
    thread = in_thread(results, pair[0], 1)
    wait_until(lambda: pair[1].num_waiting == 1, "node 1 hears of it", 20)
    pair[1].leave()
    thread.join(20)
    assert isinstance(results[0], RendezvousOverError)
    assert pair[0].is_over


def test_a_new_launcher_of_node_0_keeps_the_id_of_the_launch(
    pair: list[Membership], job_token: str
) -> None:
    known = pair[1].run_id
    old = pair[0]
    assert old._coordinator is not None
    assert old._coordinator._server is not None
    old._loop.call_soon_threadsafe(old._coordinator._server.close)
    old._loop.call_soon_threadsafe(old._loop.stop)  # as when it is killed: without a goodbye
    old._thread.join(20)
    wait_until(lambda: pair[1]._link is None, "node 1 loses node 0", 20)
    head = Node(launch_request(0, old.port), job_token)
    results: list[object] = []
    thread = in_thread(results, pair[1], 0)
    pair[0] = head.entered()
    pair[0].join(1)
    thread.join(20)
    assert [one.run_id for one in pair] == [known, known]


@pytest.mark.parametrize("when", ["before the first round", "in a round"])
def test_a_node_that_vanished_without_a_word_comes_back_at_once(
    when: str, job_token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "PROBE_S", 0.5, raising=False)
    port = free_port()
    num_nodes = 3 if when == "before the first round" else 2
    nodes = [Node(launch_request(0, port, num_nodes), job_token)]
    vanished = Silent(port, job_token, num_nodes)
    if when == "in a round":
        head = nodes[0].entered()
    else:
        nodes.append(Node(launch_request(2, port, num_nodes), job_token))
    nodes.append(Node(launch_request(1, port, num_nodes), job_token))
    met = [node.entered() for node in nodes]
    assert [sum(one.processes) for one in met] == [num_nodes] * num_nodes
    if when == "in a round":
        wait_until(lambda: head.loss is not None, "node 0 hears that node 1 was lost")
        assert head.loss == "node 1 (vm) is gone: its launcher ended, or the network cut it off"
    vanished.close()
    for one in reversed(met):
        one.leave()


def test_a_second_launcher_of_a_node_is_refused_while_the_first_one_answers(
    pair: list[Membership], job_token: str
) -> None:
    second = Node(launch_request(1, pair[0].port), job_token)
    second.join(30)
    assert isinstance(second.error, LaunchError)
    host = socket.gethostname()
    said = f"--node-rank 1 was passed twice: on {host} and on {host}"
    assert second.error.problem == said
    assert [one.loss for one in pair] == [None, None]


def test_a_launcher_that_connects_again_replaces_its_own_connection(
    pair: list[Membership],
) -> None:
    """As after a cut that this node noticed first: no probe, and nobody is refused."""
    again = pair[1]
    asyncio.run_coroutine_threadsafe(again._connect(again._loop.time() + 30), again._loop).result(
        30
    )
    wait_until(lambda: pair[0].loss is not None, "node 0 hears of it", 20)


def test_a_job_that_is_suspended_as_a_whole_does_not_fall_apart(
    monkeypatch: pytest.MonkeyPatch, job_token: str
) -> None:
    """Beats are counted by those who wait for them: what sleeps counts none."""
    monkeypatch.setattr(coordinator, "BEAT_S", 0.05)
    monkeypatch.setattr(coordinator, "MISSED_BEATS", 10)
    port = free_port()
    nodes = [Node(launch_request(rank, port), job_token) for rank in range(2)]
    met = [node.entered() for node in nodes]
    for one in met:  # both event loops stand still for far longer than ten beats
        one._loop.call_soon_threadsafe(time.sleep, 1.5)
    time.sleep(2.0)
    assert [one.loss for one in met] == [None, None]
    for one in reversed(met):
        one.leave()


def test_strangers_do_not_keep_nodes_from_meeting(job_token: str) -> None:
    """2,000 connections of four kinds, and then the other node comes."""
    port = free_port()
    first = Node(launch_request(0, port), job_token)

    async def flood() -> int:
        held = []
        sent = 0
        for turn in range(2_000):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:  # node 0 does not listen yet
                await asyncio.sleep(0.02)
                continue
            sent += 1
            junk = (b"", b"l", handshake.MAGIC + b"\0" * 64, secrets.token_bytes(3000))[turn % 4]
            writer.write(junk)
            if turn % 4 < 2:
                held.append(writer)  # half open, or a byte and no more
            else:
                writer.close()
        second = Node(launch_request(1, port), job_token)
        while second.is_alive():
            await asyncio.sleep(0.02)
        for writer in held:
            writer.transport.abort()
        await asyncio.sleep(0)
        met.append(second.entered())
        return sent

    met: list[Membership] = []
    assert asyncio.run(flood()) > 1_500
    assert first.entered().processes == [1, 1]
    for one in (met[0], first.entered()):
        one.leave()


def test_ranks_that_all_connect_at_once_do_not_push_each_other_out(
    job_token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "STALE_S", 3_600.0, raising=False)  # however slow this is

    async def prove_all() -> list[BaseException | None]:
        head = Coordinator(job_token.encode(), 2, 60)
        await head.open(["127.0.0.1"], port)
        ranks = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
        proofs = (handshake.greet_head(*rank, job_token.encode()) for rank in ranks)
        results = await asyncio.gather(*proofs, return_exceptions=True)
        for _, writer in ranks:
            writer.close()
        await head.close(1)
        return results

    port = free_port()
    assert [result for result in asyncio.run(prove_all()) if result is not None] == []


@pytest.mark.parametrize(("stale_s", "most", "kept"), [(0.0, 512, 128), (3_600.0, 150, 150)])
def test_connections_that_prove_nothing_make_room(
    stale_s: float, most: int, kept: int, job_token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "STALE_S", stale_s)
    monkeypatch.setattr(coordinator, "MAX_FRESH_STRANGERS", most)

    async def hold() -> int:
        head = Coordinator(job_token.encode(), 2, 60)
        await head.open(["127.0.0.1"], port)
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        await held[-1][0].readexactly(len(handshake.MAGIC))  # the last one has been accepted
        count = len(head._strangers)
        for _, writer in held:
            writer.transport.abort()
        await head.close(1)
        return count

    port = free_port()
    assert asyncio.run(hold()) == kept


class Sent:
    """Stands for the connection of a node, and keeps the kinds of messages sent to it."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def is_closing(self) -> bool:
        return False

    def write(self, line: bytes) -> None:
        self.kinds.append(json.loads(line)["kind"])


def test_a_node_hears_once_in_a_round_that_others_wait() -> None:
    sent = [Sent() for _ in range(4)]

    async def begin_two_rounds() -> None:
        head = Coordinator(b"", 4, 60)
        members = [
            Member(node, 4, 1, "host", str(node), "", writer)  # type: ignore[arg-type]
            for node, writer in enumerate(sent)
        ]
        for member in members:
            head._enter(member)
        for _ in range(2):
            for member in members:
                head._join(member, 1)
        await head.close(0)

    asyncio.run(begin_two_rounds())
    assert sent[3].kinds == ["welcome", "waiting", "round", "waiting", "round"]


def test_a_late_rank_of_an_earlier_round_does_not_reach_the_store(job_token: str) -> None:
    async def ask(number: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await handshake.greet_head(reader, writer, job_token.encode())
        handshake.send(writer, "store", round=number)
        answer = await asyncio.wait_for(reader.read(5), 20)
        writer.close()
        await writer.wait_closed()
        return answer

    async def try_both() -> list[bytes]:
        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"store")
            writer.close()

        store = await asyncio.start_server(serve, "127.0.0.1", 0)
        head = Coordinator(job_token.encode(), 2, 60)
        await head.open(["127.0.0.1"], port)
        head.round = 2
        head.store_port = store.sockets[0].getsockname()[1]
        answers = [await ask(1), await ask(2)]
        await head.close(1)
        store.close()
        return answers

    port = free_port()
    assert asyncio.run(try_both()) == [b"", b"store"]


def test_a_head_that_does_not_know_the_token_is_not_trusted(job_token: str) -> None:
    """Whoever answers in the head's place, and accepts every proof, has to prove it too."""

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(handshake.MAGIC + bytes(handshake.NONCE_BYTES))
        await reader.readexactly(len(handshake.MAGIC) + 64)
        writer.write(handshake.ACCEPTED + bytes(handshake.PROOF_BYTES))
        writer.close()

    async def meet_it() -> None:
        server = await asyncio.start_server(pretend, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            await handshake.greet_head(reader, writer, job_token.encode())
        finally:
            writer.close()
            await writer.wait_closed()
            server.close()

    with pytest.raises(handshake.WrongTokenError):
        asyncio.run(meet_it())


# --- The token ------------------------------------------------------------------------------------


def test_the_key_file_is_made_once_and_for_its_owner_alone(tmp_path: Path, fork: Fork) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    path = handshake.key_path(env)

    def read_it() -> int:
        os.write(1, job_token(env) + b"\n")
        return 0

    ranks = fork(read_it, read_it, read_it)
    assert ranks.exit_codes() == [0, 0, 0]
    assert len(set(ranks.text.split())) == 1, "all nodes that share a home have one key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["job_key"]


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("0123456789abcdef0123", 0o644, "may be read by others (owner {uid}, mode 0644)"),
        ("short", 0o600, "has 5 characters, fewer than 16"),
    ],
)
def test_a_key_file_that_does_not_protect_is_refused(
    text: str, mode: int, said: str, tmp_path: Path
) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    path = handshake.key_path(env)
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(LaunchError) as refused:
        job_token(env)
    assert said.format(uid=os.geteuid()) in refused.value.problem


def test_a_token_that_could_be_guessed_is_refused() -> None:
    with pytest.raises(LaunchError, match="LOCKSTEP_JOB_TOKEN has 5 characters"):
        job_token({"LOCKSTEP_JOB_TOKEN": "12345"})


def test_ranks_do_not_see_the_token(tmp_path: Path, start: Start) -> None:
    script = tmp_path / "look.py"
    script.write_text("import os; print('token' if 'LOCKSTEP_JOB_TOKEN' in os.environ else 'none')")
    both = [start(*command, script) for command in nodes_of(2)]
    assert [one.finish() for one in both] == [0, 0]
    assert [one.text for one in both] == ["none\n", "none\n"]
