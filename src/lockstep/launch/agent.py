"""Torch's elastic agent, extended: why ranks failed, when to restart or give up, how to stop.

Owns: watching the ranks of this machine, and deciding whether to restart them. Does not own:
starting them (torch does), finding other nodes (`rendezvous.py`), messages (`failure.py`), signals
(`stopping.py`). Importing this imports torch.
"""

import signal
import time
from collections import Counter
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from lockstep.errors import write_stderr
from lockstep.launch.failure import (
    CRASH_LOOP,
    EXIT_CRASH_LOOP,
    EXIT_EARLY,
    FINAL_CODES,
    RankFailure,
    find_failure,
    from_record,
    waited_in_vain,
)
from lockstep.launch.logs import LogFollowers
from lockstep.launch.ranks import Ranks
from lockstep.launch.stopping import StopRequest
from lockstep.signals import EXIT_CODES, EXIT_NOT_SAVED
from lockstep.torch_compat.private import (
    check_agent,
    num_restarts_left,
    rule_out_restarts,
    shut_down,
    started_processes,
)

LEFT_S = 15.0
"""Ranks fail soon after the other nodes have left; those still running after this are stuck."""
PEERS_S = 30.0
"""Time that the remaining ranks get to end after another rank has failed."""
ABANDONED_PEERS_S = 5.0
"""The same if they cannot finish anything, because a rank that they need has ended."""


class Agent(LocalElasticAgent):
    """Torch's agent for the ranks of one machine.

    The methods it overrides have private names, but torch documents them for overriding.

    Args:
        stop: The signals to the launcher.
        wait_s: How long to wait for a lost node to come back.
    """

    def __init__(self, *args: Any, stop: StopRequest, wait_s: float, **settings: Any) -> None:
        check_agent(LocalElasticAgent)
        super().__init__(*args, **settings)
        self.stop = stop
        self.wait_s = wait_s
        self.exit_code = 0
        self.ranks: Ranks | None = None
        self.logs = LogFollowers([])
        self.seen: Counter[str] = Counter()
        self.left_at = 0.0
        self.has_reported_stuck = False

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        processes, folders = started_processes(self)
        self.ranks = Ranks(processes, folders, worker_group.workers[0].global_rank)
        self.logs = LogFollowers(folders)
        self.stop.watch(self.ranks)
        return started

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        """Return the state of the ranks.

        Replaces torch's method, which ends the other ranks before they can be inspected and keeps
        a rank alive after its script has ended: its connections would stay open, and the ranks that
        wait for it would not notice.
        """
        handler = worker_group.spec.rdzv_handler
        ranks = self.ranks
        assert ranks is not None
        if handler.loss is not None:
            return self._end_round(handler.loss)
        if not self.has_reported_stuck and handler.is_closed():
            self.left_at = self.left_at or time.monotonic()
            self.has_reported_stuck = time.monotonic() - self.left_at > LEFT_S
            if self.has_reported_stuck:
                ended = "lockstep: the launchers on the other nodes have ended"
                write_stderr(f"{ended}\n{ranks.where()}")
        ranks.look()
        codes = ranks.codes
        failure = find_failure(ranks)
        if failure is None and all(code == 0 for code in codes):
            self.logs.finish()
            returned = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=returned)
        if failure is None:
            return RunResult(state=WorkerState.HEALTHY)
        others = ranks.where() if waited_in_vain(ranks, codes) else ""
        self._decide(failure)
        write_stderr(others)
        grace_s = ABANDONED_PEERS_S if failure.code == EXIT_EARLY else PEERS_S
        deadline = time.monotonic() + grace_s
        ranks.end(signal.SIGTERM, lambda: deadline)
        return RunResult(state=WorkerState.FAILED)

    def _end_round(self, loss: str) -> RunResult:
        """Report a lost node, so that the agent ends the ranks; it then waits if it may restart."""
        then = "try: run the same command on every node; it resumes from the newest checkpoint"
        if num_restarts_left(self):
            then = f"waiting up to {self.wait_s:g} s for it to come back"
        write_stderr(f"lockstep: {loss}\n  {then}\n")
        self.exit_code = self.exit_code or 1
        return RunResult(state=WorkerState.FAILED)

    def _decide(self, failure: RankFailure) -> None:
        """Report a failure, and decide whether to restart the ranks."""
        self.exit_code = failure.code
        self.seen[failure.identity] += 1
        is_loop = bool(failure.identity) and self.seen[failure.identity] >= CRASH_LOOP
        if is_loop and failure.code not in FINAL_CODES:
            self.exit_code = EXIT_CRASH_LOOP
        if is_loop or failure.code in FINAL_CODES:
            rule_out_restarts(self)
        write_stderr(failure.text(num_restarts_left(self), is_loop))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End the remaining ranks; after a signal to the launcher they get time to save."""
        requested = self.stop.requested
        deadline = time.monotonic() + timeout
        if self.ranks is not None and requested is not None:
            self.ranks.end(requested, lambda: self.stop.deadline, report_slow=write_stderr)
        elif self.ranks is not None:
            self.ranks.end(death_sig, lambda: deadline)
        shut_down(super()._shutdown, death_sig, timeout)
        self.logs.finish()

    def code_after_stop(self, requested: signal.Signals) -> int:
        """Return the exit code after a signal, and report ranks that have not saved."""
        self.stop.wait_if_forced()
        self.stop.end_orphans()
        if self.ranks is None:
            return 128 + requested
        codes = self.ranks.codes
        if self.ranks.unsaved():
            write_stderr(self.stop.not_saved_text(self.ranks))
            return EXIT_NOT_SAVED
        if EXIT_NOT_SAVED in codes:
            # A rank that failed has left a record; one that left at a second signal has printed it.
            unsaved = [one for one in self.ranks.records() if one["code"] == EXIT_NOT_SAVED]
            write_stderr(from_record(unsaved[0]).text(0, is_loop=False) if unsaved else "")
            return EXIT_NOT_SAVED
        if not any(codes):
            return 0
        records = self.ranks.records()
        # A rank that the signal ended before it had installed its handlers has not failed, and the
        # ranks that lost it fail only because of that.
        if -requested in codes or not records or records[0]["code"] in EXIT_CODES.values():
            return 128 + requested
        if not self.ranks.position(records[0]["rank"] - self.ranks.first).has_begun:
            return 128 + requested  # interrupted while importing, for example
        failure = find_failure(self.ranks)
        assert failure is not None
        write_stderr(failure.text(0, is_loop=False))
        return failure.code
