"""Run a script on the processes of this machine, alone or as one of several, on torch's agent.

Owns: the agent's settings, what is said when a rank fails, when not to try again, the
exit code. Does not own: starting and restarting (torch's elastic agent does), what a
rank does (`worker.py`).

Workers are forked from a process that has imported torch, so that a restart costs tenths
of a second. That process watches the launcher: without it, it ends, and the workers with it.
"""

import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import types
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any, TextIO

from lockstep.errors import LaunchError, shown
from lockstep.launch.roll_call import call_roll, own_address, parse_head
from lockstep.launch.worker import PLACE, RECORD, check_script, identity_of, work
from lockstep.text_input import LARGEST

CRASH_LOOP = 3
"""So many times the same error at the same step, and it is not tried again."""
EXIT_CRASH_LOOP = 4
FINAL_CODES = {2, 3, 129, 130, 138, 143}
"""A request that cannot work, a loss that is no number, a stop that was asked for: all are
as true the second time."""
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
"""Passed on to every rank; SLURM announces the time limit with SIGUSR1."""
SHUTDOWN_S = 90
"""How long ranks that were told to stop may save; who signals twice need not wait."""
MONITOR_S = 0.02
ANSWER_S = 0.5
"""How long a rank may take to write down where it is."""
FRAMES = 6
MAX_NODES = 65_536
"""What SLURM takes, too."""
LEFT_S = 15.0
"""Ranks whose machine was left alone notice it, and end. Those that have not by then are stuck."""
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
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(heard)
    if command.num_nodes > 1:  # restarted workers must not find the addresses of the dead
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with _as_nobody(), _held_back(heard):
        multiprocessing.set_forkserver_preload(preloaded(command.restarts))
        forkserver.ensure_running()  # it imports torch while we do

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    _shorten_pauses(command.num_nodes)
    # The failing rank has said what is wrong; the agent's own table says it again, worse.
    for chatty in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    _check_gpus(command.num_processes)
    agent = _build_agent(command)
    try:
        with _as_nobody():
            result = agent.run()
    except OSError as error:
        raise LaunchError(
            f"the ranks cannot be started: {error}",
            "room in /dev/shm and in the temporary folder, more open files (ulimit -n)",
        ) from error
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
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


def _build_agent(command: LaunchRequest) -> Any:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    class Agent(LocalElasticAgent):
        """Torch's agent, which also knows why ranks fail and when to give up."""

        exit_code = 0
        store: object = None

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.seen: Counter[str] = Counter()
            self.left_at, self.has_told = 0.0, False

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            started: dict[int, Any] = super()._start_workers(worker_group)
            spawned: Any = self._pcontext._pc  # type: ignore[union-attr]
            spawned.join = partial(self._join, spawned.join, worker_group.workers[0].global_rank)
            return started

        def _join(self, join: Any, first: int, timeout: float | None = None) -> bool:
            """Say why a rank failed before torch ends those that are left, which may take 30 s."""
            context: Any = self._pcontext
            alive = context._pc.sentinels
            if alive and not connection.wait(alive, timeout):
                return False  # what ends from here on is seen the next time
            ended = [process.exitcode or 0 for process in context._pc.processes]
            if any(ended):
                others = where_others_are(context, first, ended)
                self._take_note(first_failure(context, first, ended))
                sys.stderr.write(others)
                sys.stderr.flush()
            return bool(join(timeout))

        def _monitor_workers(self, worker_group: Any) -> RunResult:
            handler = worker_group.spec.rdzv_handler
            if command.num_nodes > 1 and not self.has_told and handler.is_closed():
                self.left_at = self.left_at or time.monotonic()
                self.has_told = time.monotonic() - self.left_at > LEFT_S
                if self.has_told:
                    there = where_ranks_are(self._pcontext, worker_group.workers[0].global_rank)
                    sys.stderr.write(f"lockstep: other machines have ended\n{there}")
                    sys.stderr.flush()
            result: RunResult = super()._monitor_workers(worker_group)
            return result

        def _take_note(self, failure: Failure) -> None:
            """Say what happened, and decide whether to try again."""
            self.exit_code = failure.code
            self.seen[failure.identity] += 1
            is_loop = bool(failure.identity) and self.seen[failure.identity] >= CRASH_LOOP
            if failure.code in FINAL_CODES:
                self._remaining_restarts = 0
            elif is_loop:
                self._remaining_restarts, self.exit_code = 0, EXIT_CRASH_LOOP
            tries = self._remaining_restarts
            sys.stderr.write(failure.text(tries, is_loop))
            sys.stderr.flush()

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
    settings = _if_known(LocalElasticAgent, shutdown_timeout=SHUTDOWN_S)
    agent = Agent(spec, logs, start_method="forkserver", **settings)
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


def _if_known(kind: type, **settings: Any) -> dict[str, Any]:
    """Return the settings that this version of torch lets us say."""
    import inspect

    known = inspect.signature(kind).parameters
    return {name: value for name, value in settings.items() if name in known}


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
    numbers = [signal.Signals[name] for name in names if name != "SIGINT"]  # which it ignores
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        resource_tracker.ensure_running()  # it lets SIGTERM through again
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a group of ranks ended."""

    rank: int
    code: int
    told: Mapping[str, Any] = field(default_factory=dict)
    """What the rank left of its end, if it could."""
    killed_by: str = ""
    """The signal that ended it, if it could not."""

    @property
    def identity(self) -> str:
        """What makes two failures the same; empty for one that left no error."""
        error = self.told.get("error")
        return identity_of(error, self.told["notes"]) if error else ""

    def text(self, restarts_left: int, is_loop: bool) -> str:
        """Say it, once, for all ranks; what a rank has said itself is not repeated."""
        lines = []
        if self.identity:
            notes = [note.removeprefix(f"on rank {self.rank}, ") for note in self.told["notes"]]
            where = ", ".join([f"rank {self.rank} on {self.told['host']}", *notes])
            lines += [self.told["traceback"].rstrip(), f"lockstep: {where}: {self.told['error']}"]
        elif self.killed_by:
            why = ", as the kernel does when memory runs out" * (self.killed_by == "SIGKILL")
            lines += [f"lockstep: rank {self.rank} was ended by {self.killed_by}{why}"]
        elif self.code not in FINAL_CODES:
            lines += [f"lockstep: rank {self.rank} ended with exit code {self.code}"]
        if is_loop:
            lines += [
                f"lockstep: the same error {CRASH_LOOP} times in the same place; not trying again"
            ]
        elif restarts_left:
            lines += [f"lockstep: all ranks start again ({restarts_left} times at most)"]
        elif self.killed_by:
            lines += ["  try: the same command again; it goes on from the newest checkpoint"]
        return "".join(f"{line}\n" for line in lines)


def first_failure(context: Any, first_rank: int, codes: Sequence[int]) -> Failure:
    """Find the rank that failed before the others did, which failed because of it.

    `codes` are the exit codes of before those that were left are ended.
    """
    for local, code in enumerate(codes):
        if code < 0 and code != -signal.SIGTERM:
            name = signal.Signals(-code).name
            return Failure(first_rank + local, 128 - code, killed_by=name)
    records = [read_record(Path(file).parent / RECORD) for file in context.error_files.values()]
    told = min((r for r in records if r), key=lambda record: float(record["time"]), default=None)
    if told is not None:
        return Failure(told["rank"], told["code"], told)
    local, code = next((n, code) for n, code in enumerate(codes) if code)
    return Failure(first_rank + local, abs(code) + 128 * (code < 0))


def where_others_are(context: Any, first_rank: int, codes: Sequence[int]) -> str:
    """Say what the ranks that are left are at, if another has waited in vain and ended.

    The one that nobody saw coming is among them, and it alone knows why.
    """
    files = context.error_files.values()
    records = filter(None, (read_record(Path(file).parent / RECORD) for file in files))
    in_vain = any(re.search("timed? ?out(?!_s)", record["error"], re.I) for record in records)
    # NCCL's watchdog ends a process with SIGABRT.
    return where_ranks_are(context, first_rank) if in_vain or -signal.SIGABRT in codes else ""


def where_ranks_are(context: Any, first_rank: int) -> str:
    """Ask the ranks that have not ended, and say it."""
    folders = {local: Path(file).parent for local, file in context.error_files.items()}
    left = {
        first_rank + local: (process.pid, folders[local] / PLACE)
        for local, process in enumerate(context._pc.processes)
        if process.exitcode is None and (folders[local] / PLACE).exists()
    }
    for pid, _ in left.values():
        with suppress(ProcessLookupError):  # it has ended since
            os.kill(pid, signal.SIGUSR2)
    time.sleep(ANSWER_S)
    text = ""
    for rank, (_, place) in left.items():
        if rank - first_rank in context._return_values:
            text += f"lockstep: rank {rank} was not there: its script had come to its end, with 0\n"
            continue
        frames = place.read_text().splitlines()[1 : 1 + FRAMES]
        text += f"lockstep: rank {rank} had not ended; it was at\n"
        text += "".join(f"{frame}\n" for frame in frames or ["  (no answer: stopped or gone)"])
    return text


def read_record(path: Path) -> dict[str, Any] | None:
    """Return what a rank left behind, if it did."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
