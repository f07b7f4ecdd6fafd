"""Run a script on the processes of this machine, alone or as one of several, on torch's agent.

Owns: the agent's settings, the process that forks the ranks, the exit code. Does not own:
starting, watching and restarting ranks (`agent.py`), signals (`stopping.py`), what a rank does
(`worker.py`).

Workers are forked from a process that has imported torch, so that a restart costs tenths
of a second. That process watches the launcher: without it, it ends, and the workers with it.
"""

import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import TYPE_CHECKING, Any, TextIO

from lockstep.errors import LaunchError, shown
from lockstep.launch.roll_call import call_roll, own_address, parse_head
from lockstep.launch.stopping import SIGNALS, Stopped, StopRequest
from lockstep.launch.worker import check_script, work
from lockstep.text_input import LARGEST

if TYPE_CHECKING:
    from lockstep.launch.agent import Agent

MONITOR_S = 0.02
ANSWER_S = 0.5
"""How long another machine may take to answer before the launcher looks after its own ranks."""
MAX_NODES = 65_536
"""What SLURM takes, too."""
GOODBYE_S = 5.0
"""How long another machine may take to hear that this one leaves."""


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What to run, and on how many processes."""

    words: tuple[str, ...]
    """A script, or -m and a module, and its arguments."""
    num_processes: int
    """On this machine."""
    num_nodes: int = 1
    node_rank: int = 0
    head: str = ""
    """HOST:PORT of node 0; on one machine a free port is taken."""
    restarts: int = 0
    logs: str | None = None
    wait_s: float = 600.0
    """How long to wait for the other machines."""


def launch(command: LaunchRequest) -> int:
    """Run it and return the exit code of the first rank that failed, or 0."""
    _check(command)
    cores_each = max(1, (os.cpu_count() or 1) // command.num_processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(cores_each))
    # Who was told to ignore one (`nohup`, a shell's `&`) has ranks that ignore it, too.
    heard = [name for name in SIGNALS if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # none: `StopRequest` does
    if command.num_nodes > 1:  # restarted workers must not find the addresses of the dead
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with StopRequest(heard, os.environ, _kill_wait_s) as stop:
        try:
            return _launch(command, stop, heard)
        except Stopped:  # before there was an agent
            assert stop.requested is not None
            return 128 + int(stop.requested)


def _launch(command: LaunchRequest, stop: StopRequest, heard: Sequence[str]) -> int:
    with _as_nobody(), _held_back(heard):
        multiprocessing.set_forkserver_preload(preloaded(command.restarts))
        forkserver.ensure_running()  # it imports torch while we do

    from torch.distributed.elastic.rendezvous import RendezvousError

    _shorten_pauses(command.num_nodes)
    # The failing rank has said what is wrong; the agent's own table says it again, worse.
    for chatty in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    _check_gpus(command.num_processes)
    agent = _build_agent(command, stop)
    if command.logs is None:
        stop.log_folder = agent._logs_specs.root_log_dir
    try:
        with _as_nobody():
            result = agent.run()
    except OSError as error:
        raise LaunchError(
            f"the ranks cannot be started: {error}",
            "room in /dev/shm and in the temporary folder, more open files (ulimit -n)",
        ) from error
    except Stopped:
        assert stop.requested is not None
        return agent.code_after_stop(stop.requested)
    except RendezvousError:  # one has given up for good, or is gone
        sys.stderr.write(
            f"lockstep: the {command.num_nodes} machines do not meet again\n"
            "  try: what another of them has said; then the same command on all\n"
        )
        return int(agent.exit_code) or 1
    finally:
        handler = agent._worker_group.spec.rdzv_handler
        goodbye = threading.Thread(target=handler.shutdown, daemon=True)
        goodbye.start()
        goodbye.join(GOODBYE_S)
        if command.logs is None:
            shutil.rmtree(agent._logs_specs.root_log_dir, ignore_errors=True)  # a temporary folder
    return int(agent.exit_code) if result.is_failed() else 0


def _kill_wait_s() -> float:
    from lockstep.launch.slurm_text import kill_wait_s

    return kill_wait_s()


def preloaded(restarts: int) -> list[str]:
    """Return what is imported once, in the process that forks the ranks.

    Exact mode asks for torch's compiler, which takes over a second to import: better once than in
    every rank that goes on; where none does, better only in those that ask.
    """
    return ["lockstep.launch.warm", *(["torch._dynamo"] if restarts else [])]


def _check(command: LaunchRequest) -> None:
    """Refuse what cannot start, before anything does."""
    check_script(command.words)
    if command.num_nodes > 1:
        parse_head(command.head)
    if not 0 < command.num_nodes <= MAX_NODES:
        raise LaunchError(
            f"--nodes {shown(command.num_nodes)} is not a number from 1 to {MAX_NODES:,}",
            "pass --nodes 2, or leave it out on one machine",
        )
    if not 0 <= command.node_rank < command.num_nodes:
        raise LaunchError(
            f"--node-rank {shown(command.node_rank)} of {command.num_nodes} nodes",
            f"pass --node-rank from 0 to {command.num_nodes - 1}",
        )
    if not 0 <= command.restarts <= LARGEST:
        raise LaunchError(
            f"--restarts {shown(command.restarts)} cannot be counted", "pass --restarts 3"
        )


def _check_gpus(num_processes: int) -> None:
    """Refuse to crowd GPUs; a machine without any trains on its cores."""
    from torch.cuda import device_count

    if 0 < device_count() < num_processes:
        raise LaunchError(
            f"{num_processes} processes were asked for, and there are {device_count()} GPUs",
            f"--gpus {device_count()}, or CUDA_VISIBLE_DEVICES= to train on the CPU",
        )


def _build_agent(command: LaunchRequest, stop: StopRequest) -> "Agent":
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    from lockstep.launch.agent import Agent

    where, run_id, own = "localhost:0", uuid.uuid4().hex, "localhost"
    store: object = None
    if command.num_nodes > 1:
        store, run_id = call_roll(
            command.head, command.num_nodes, command.node_rank, command.wait_s
        )
        where, own = command.head, own_address(parse_head(command.head)[0])
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=where,
        run_id=run_id,
        min_nodes=command.num_nodes,
        max_nodes=command.num_nodes,
        local_addr=own,
        is_host=str(command.node_rank == 0),
        join_timeout=int(command.wait_s),
    )
    handler: Any = registry.get_rendezvous_handler(parameters)
    if command.num_nodes > 1:
        handler.num_nodes_waiting = asked_beside(handler.num_nodes_waiting)
        handler.is_closed = asked_beside(handler.is_closed)
    spec = WorkerSpec(
        role="rank",
        local_world_size=command.num_processes,
        entrypoint=work,
        args=command.words,
        rdzv_handler=handler,
        max_restarts=command.restarts,
        monitor_interval=MONITOR_S,
        local_addr=parameters.local_addr,
    )
    others = range(1, command.num_processes)  # the first is heard as it is: `worker.keep_log`
    logs = DefaultLogsSpecs(command.logs, tee=dict.fromkeys(others, Std.ALL))
    agent = Agent(spec, logs, stop=stop, num_nodes=command.num_nodes, start_method="forkserver")
    agent.store = store  # kept open as long as there is somebody to ask it
    return agent


def asked_beside(ask: Callable[[], int]) -> Callable[[], int]:
    """Have the agent ask another machine in a thread, and take 0 for an answer until there is one.

    Where the network is cut, that takes minutes, in which it would neither see that a rank has
    failed nor heed a signal.
    """
    coming: list[Future[int]] = []

    def wait_for(answer: Future[int]) -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    def look() -> int:
        if not coming:
            coming.append(Future())
            threading.Thread(target=wait_for, args=coming, daemon=True).start()
        wait(coming, ANSWER_S)
        return coming.pop().result() if coming[0].done() else 0

    return look


def _shorten_pauses(num_nodes: int) -> None:
    """Have the agent wait for what happens and not for the clock: every restart pays for it.

    Its rendezvous pauses for up to 0.3 s before it begins and for 1 s between two looks, lest
    many machines crowd the store; how long depends on how many there are.
    """
    from torch.distributed.elastic.multiprocessing import tail_log
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    pause_s = min(1.0, 0.01 * (num_nodes - 1))
    dynamic_rendezvous._delay = lambda seconds: time.sleep(pause_s)  # type: ignore[attr-defined]
    tail_log.tail_logfile = follow_log  # type: ignore[assignment]


def follow_log(
    header: str, file: str, dst: TextIO, finished: threading.Event, interval_sec: float, **_: Any
) -> None:
    """Copy the lines of a file as they come, until it is finished: then at once, not after a nap.

    The agent's own sleeps between two looks, and every restart waits for two such naps.
    """
    line, is_last = "", False
    while not os.path.exists(file):
        if finished.wait(interval_sec):
            return
    with open(file, errors="replace") as lines:
        while not is_last:
            is_last = finished.wait(interval_sec)  # what was written before is read after
            for piece in lines:
                line += piece
                if line.endswith("\n"):
                    dst.write(header + line)
                    line = ""
    if line:
        dst.write(f"{header}{line}\n")


@contextmanager
def _as_nobody() -> Iterator[None]:
    """Start processes that do not import our own command again as their main program."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _held_back(names: Sequence[str]) -> Iterator[None]:
    """Start processes that do not die of what SLURM, or a closing terminal, sends to everyone.

    Ranks end with the one that forks them; they listen again (`worker.py`), also to what came
    before they did, and it leaves with us.
    """
    numbers = [signal.Signals[name] for name in names]
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        resource_tracker.ensure_running()  # it lets SIGTERM through again
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
