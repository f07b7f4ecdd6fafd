"""Torch's elastic agent, which also knows why ranks fail, when to give up, and how to stop.

Owns: watching the ranks of this machine, and deciding whether they start again. Does not own:
starting them (torch does), finding other nodes (`rendezvous.py`), the words (`failure.py`), signals
(`stopping.py`). Importing this imports torch.
"""

import signal
import sys
import time
from collections import Counter
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from lockstep.launch.failure import (
    CRASH_LOOP,
    EXIT_CRASH_LOOP,
    EXIT_EARLY,
    FINAL_CODES,
    Failure,
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
"""Ranks whose machine was left alone notice it, and end. Those that have not by then are stuck."""
PEERS_S = 30.0
"""How long the ranks that are left may take to end after another has failed."""
ABANDONED_PEERS_S = 5.0
"""The same, if they cannot finish anything: a rank that they need has ended."""


class Agent(LocalElasticAgent):
    """Torch's agent for the ranks of one machine.

    The methods it overrides are private by name, and what torch documents to be overridden.

    Args:
        stop: The signals to the launcher.
        wait_s: How long to wait for a node that was lost to come back.
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
        self.has_told = False

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        processes, folders = started_processes(self)
        self.ranks = Ranks(processes, folders, worker_group.workers[0].global_rank)
        self.logs = LogFollowers(folders)
        self.stop.watch(self.ranks)
        return started

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        """Say how the ranks are.

        In place of torch's own, which ends the others before anybody can look at them, and which
        keeps a rank whose script has ended alive: its connections would stay open, and those who
        wait for it would not notice.
        """
        handler = worker_group.spec.rdzv_handler
        ranks = self.ranks
        assert ranks is not None
        if handler.loss is not None:
            return self._end_round(handler.loss)
        if not self.has_told and handler.is_closed():
            self.left_at = self.left_at or time.monotonic()
            self.has_told = time.monotonic() - self.left_at > LEFT_S
            if self.has_told:
                say(f"lockstep: other machines have ended\n{ranks.where()}")
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
        say(others)
        grace_s = ABANDONED_PEERS_S if failure.code == EXIT_EARLY else PEERS_S
        deadline = time.monotonic() + grace_s
        ranks.end(signal.SIGTERM, lambda: deadline)
        return RunResult(state=WorkerState.FAILED)

    def _end_round(self, loss: str) -> RunResult:
        """Say which node was lost; the agent ends the ranks, and waits for it if it may."""
        then = "try: run the same command on every node; it resumes from the last checkpoint"
        if num_restarts_left(self):
            then = f"waiting for it to come back, {self.wait_s:g} s at most"
        say(f"lockstep: {loss}\n  {then}\n")
        self.exit_code = self.exit_code or 1
        return RunResult(state=WorkerState.FAILED)

    def _decide(self, failure: Failure) -> None:
        """Say what happened, and decide whether to try again."""
        self.exit_code = failure.code
        self.seen[failure.identity] += 1
        is_loop = bool(failure.identity) and self.seen[failure.identity] >= CRASH_LOOP
        if is_loop and failure.code not in FINAL_CODES:
            self.exit_code = EXIT_CRASH_LOOP
        if is_loop or failure.code in FINAL_CODES:
            rule_out_restarts(self)
        say(failure.text(num_restarts_left(self), is_loop))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End the ranks that are left: on a signal to the launcher, with time to save."""
        requested = self.stop.requested
        deadline = time.monotonic() + timeout
        if self.ranks is not None and requested is not None:
            self.ranks.end(requested, lambda: self.stop.deadline, report_slow=say)
        elif self.ranks is not None:
            self.ranks.end(death_sig, lambda: deadline)
        shut_down(super()._shutdown, death_sig, timeout)
        self.logs.finish()

    def code_after_stop(self, requested: signal.Signals) -> int:
        """Return what to exit with after a signal: the ranks have saved, or it says that not."""
        self.stop.wait_if_forced()
        self.stop.end_orphans()
        if self.ranks is None:
            return 128 + requested
        codes = self.ranks.codes
        if self.ranks.unsaved():
            say(self.stop.not_saved_text(self.ranks))
            return EXIT_NOT_SAVED
        if EXIT_NOT_SAVED in codes:
            # A rank that leaves by an error has written it down; by a second signal, has said it.
            told = [one for one in self.ranks.records() if one["code"] == EXIT_NOT_SAVED]
            say(from_record(told[0]).text(0, is_loop=False) if told else "")
            return EXIT_NOT_SAVED
        if not any(codes):
            return 0
        records = self.ranks.records()
        # A rank that the signal itself ended, before it listened, is no failure, and those that
        # lost it fail because of it.
        if -requested in codes or not records or records[0]["code"] in EXIT_CODES.values():
            return 128 + requested
        if not self.ranks.position(records[0]["rank"] - self.ranks.first).has_begun:
            return 128 + requested  # an import that was interrupted, for one
        failure = find_failure(self.ranks)
        assert failure is not None
        say(failure.text(0, is_loop=False))
        return failure.code


def say(text: str) -> None:
    """Write to stderr at once."""
    sys.stderr.write(text)
    sys.stderr.flush()
