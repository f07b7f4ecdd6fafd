"""Run a script on processes of this machine, alone or as one of several nodes, by torch's agent.

Owns: the agent's settings, the process that forks the ranks, the exit code. Does not own:
starting, watching and restarting ranks (`agent.py`), signals (`stopping.py`), what a rank does
(`worker.py`).

Workers are forked from a process that has imported torch, so that a restart takes tenths of a
second. That process ends when the launcher ends, and the workers end with it.
"""

import logging
import multiprocessing
import os
import shutil
import signal
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from typing import TYPE_CHECKING

from lockstep.dist.addresses import LOOPBACK, check_loopback, choose_interface
from lockstep.errors import LaunchError, plain, shown, write_stderr
from lockstep.launch.handshake import TOKEN_VARIABLE
from lockstep.launch.member import Membership, parse_head
from lockstep.launch.request import LaunchRequest
from lockstep.launch.stopping import SIGNALS, Stopped, StopRequest
from lockstep.launch.worker import check_module, check_script, work
from lockstep.text_input import LARGEST
from lockstep.torch_compat import COMPILER

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import LogsSpecs

    from lockstep.launch.agent import Agent
    from lockstep.launch.rendezvous import OneNodeRendezvous

MONITOR_S = 0.02
MAX_NODES = 65_536
"""SLURM's limit too."""


def launch(command: LaunchRequest) -> int:
    """Run the command and return the exit code of the first rank that failed, or 0."""
    _check(command)
    cores_each = max(1, (os.cpu_count() or 1) // command.num_processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(cores_each))
    # If the launcher was told to ignore a signal (`nohup`, a shell's `&`), its ranks ignore it too.
    handled = [name for name in SIGNALS if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # none: `StopRequest` handles them
    with StopRequest(handled, os.environ, _kill_wait_s) as stop:
        try:
            return _launch(command, stop, handled)
        except Stopped:  # before the agent was created
            assert stop.requested is not None
            return 128 + int(stop.requested)


def _launch(command: LaunchRequest, stop: StopRequest, handled: Sequence[str]) -> int:
    membership = _meet_other_nodes(command)
    try:
        return _run_ranks(command, membership, stop, handled)
    finally:
        if membership is not None:
            membership.leave()


def _meet_other_nodes(command: LaunchRequest) -> Membership | None:
    """Wait for the other nodes, if any, and tell the ranks how many ranks to expect.

    Variables are set before the process that forks the ranks starts, so that it inherits them.
    """
    check_loopback()
    membership = None
    num_ranks = command.num_processes
    if command.num_nodes > 1:
        _check_gpus(command.num_processes)
        membership = Membership(command, os.environ)
        num_ranks = sum(membership.processes)
    os.environ.pop(TOKEN_VARIABLE, None)  # ranks do not need it, and may log their environment
    os.environ["LOCKSTEP_EXPECTED_RANKS"] = str(num_ranks)
    choose_interface(parse_head(command.head)[0] if command.num_nodes > 1 else LOOPBACK)
    return membership


def _run_ranks(
    command: LaunchRequest,
    membership: Membership | None,
    stop: StopRequest,
    handled: Sequence[str],
) -> int:
    """Start the ranks of this node and return the exit code of the first that failed, or 0."""
    with _as_nobody(), _held_back(handled):
        multiprocessing.set_forkserver_preload(preloaded(command.restarts))
        forkserver.ensure_running()  # imports torch in parallel with this process

    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std
    from torch.distributed.elastic.rendezvous import RendezvousError

    from lockstep.launch.rendezvous import OneNodeRendezvous, SeveralNodesRendezvous

    # The failing rank has printed its error; the agent's table would only repeat it.
    for chatty in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    _check_gpus(command.num_processes)
    handler = OneNodeRendezvous() if membership is None else SeveralNodesRendezvous(membership)
    others = range(1, command.num_processes)  # the first rank prints directly: `worker.keep_log`
    logs = DefaultLogsSpecs(command.logs, redirects=dict.fromkeys(others, Std.ALL))
    agent = _build_agent(command, handler, logs, stop)
    if command.logs is None:
        stop.log_folder = logs.root_log_dir
    try:
        with _as_nobody():
            result = agent.run()
    except OSError as error:
        raise LaunchError(
            f"the ranks cannot be started: {error}",
            "free space in /dev/shm and in the temporary folder, and raise the limit of open files "
            "(ulimit -n)",
        ) from error
    except Stopped:
        assert stop.requested is not None
        return agent.code_after_stop(stop.requested)
    except (RendezvousError, DistError):  # another node has given up or is gone
        write_stderr(
            f"lockstep: the {command.num_nodes} nodes could not rendezvous after a restart\n"
            "  try: read the other nodes' errors, then run the same command on every node\n"
        )
        return int(agent.exit_code) or 1
    finally:
        handler.shutdown()
        if command.logs is None:
            shutil.rmtree(logs.root_log_dir, ignore_errors=True)  # a temporary folder
    return int(agent.exit_code) if result.is_failed() else 0


def _kill_wait_s() -> float:
    from lockstep.launch.slurm_text import kill_wait_s

    return kill_wait_s()


def preloaded(restarts: int) -> list[str]:
    """Return the modules to import once, in the process that forks the ranks.

    Exact mode needs torch's compiler, which takes over a second to import. With restarts it is
    imported here, so that restarted ranks need not; without, only the ranks that need it import it.
    """
    return ["lockstep.launch.warm", *([COMPILER] if restarts else [])]


def _check(command: LaunchRequest) -> None:
    """Refuse a command that cannot start, before any process is started."""
    check_script(command.words)
    if command.words[0] == "-m":
        check_module(command.words[1])
    if command.num_nodes > 1 and not command.head:
        raise LaunchError(
            f"--nodes {shown(command.num_nodes)} needs the address of node 0",
            "pass --head HOST:PORT, the same on every node",
        )
    if command.num_nodes > 1:
        parse_head(command.head)
    if not 0 < command.num_nodes <= MAX_NODES:
        raise LaunchError(
            f"--nodes {shown(command.num_nodes)} is not a number from 1 to {MAX_NODES:,}",
            "pass --nodes 2, or leave it out on one machine",
        )
    if not 0 <= command.node_rank < command.num_nodes:
        raise LaunchError(
            f"--node-rank {shown(command.node_rank)} is out of range for {command.num_nodes} nodes",
            f"pass a --node-rank from 0 to {command.num_nodes - 1}",
        )
    if not 0 <= command.restarts <= LARGEST:
        raise LaunchError(
            f"--restarts {shown(command.restarts)} is not a number from 0 to {LARGEST}",
            "pass a number of restarts, such as --restarts 3",
        )
    if command.logs is not None:
        try:
            os.makedirs(command.logs, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"the log folder {plain(command.logs)} cannot be created: {error.strerror}",
                "pass a folder that you may write to: --logs FOLDER",
            ) from error


def _check_gpus(num_processes: int) -> None:
    """Refuse more processes than GPUs; a machine without GPUs trains on its CPU."""
    from torch.cuda import device_count

    if 0 < device_count() < num_processes:
        raise LaunchError(
            f"--gpus {num_processes} asks for more GPUs than this machine has ({device_count()})",
            f"pass --gpus {device_count()}, or set CUDA_VISIBLE_DEVICES= to train on the CPU",
        )


def _build_agent(
    command: LaunchRequest, handler: "OneNodeRendezvous", logs: "LogsSpecs", stop: StopRequest
) -> "Agent":
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from lockstep.launch.agent import Agent

    spec = WorkerSpec(
        role="rank",
        local_world_size=command.num_processes,
        entrypoint=work,
        args=command.words,
        rdzv_handler=handler,
        max_restarts=command.restarts,
        monitor_interval=MONITOR_S,
    )
    return Agent(spec, logs, stop=stop, wait_s=command.wait_s, start_method="forkserver")


@contextmanager
def _as_nobody() -> Iterator[None]:
    """Start processes that do not import the launcher's command as their main module."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _held_back(names: Sequence[str]) -> Iterator[None]:
    """Start processes with these signals blocked: SLURM or a closing terminal signals all of them.

    The process that forks the ranks must outlive such a signal, since the ranks end with it. Ranks
    unblock the signals (`worker.py`), and then receive those sent before.
    """
    numbers = [signal.Signals[name] for name in names]
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        resource_tracker.ensure_running()  # it unblocks SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
