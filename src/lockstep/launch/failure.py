"""Report why a group of ranks ended, and whether a restart can help.

Owns: finding the rank that failed first, naming it, and the exit codes that are final. Does not
own: observing the ranks (`ranks.py`), or restarting them (`agent.py`).
"""

import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import LeftEarlyError
from lockstep.launch.ranks import Ranks
from lockstep.launch.worker import identity_of
from lockstep.signals import EXIT_CODES, EXIT_NOT_SAVED
from lockstep.torch_compat.error_texts import PEER_GONE, TIMED_OUT, is_of_collective

CRASH_LOOP = 3
"""After this many identical failures at the same step, ranks are not restarted."""
EXIT_CRASH_LOOP = 4
EXIT_EARLY = LeftEarlyError.exit_code
"""A rank's script ended with 0 inside a run, or while the others still needed it."""
FINAL_CODES = {2, 3, EXIT_NOT_SAVED, EXIT_EARLY, *EXIT_CODES.values()}
"""Exit codes after which ranks are not restarted, because a restart would not help: a request
that cannot work, a non-finite loss, a script that ends too early on one rank, a requested stop."""
RESUME = "start the same command again; it resumes from the newest checkpoint"
FIND_KILLER = (
    "look at what the script does in that step, and for a message about the process in dmesg"
)
LESS_MEMORY = "lower batch.batch_size or loader.num_workers, or ask for more memory"


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a group of ranks ended."""

    rank: int
    code: int
    lines: tuple[str, ...] = ()
    """The message; empty if the rank has printed its own."""
    identity: str = ""
    """Equal for two failures that are the same; empty if that is unknown."""
    repeated: str = "the same error {times} times in the same place"
    """The message for a crash loop."""
    remedy: str = ""
    loop_remedy: str = ""
    """The remedy in a crash loop."""

    def text(self, restarts_left: int, is_loop: bool) -> str:
        """Return the message, printed once for all ranks."""
        lines = list(self.lines)
        if is_loop:
            lines.append(f"lockstep: {self.repeated.format(times=CRASH_LOOP)}; not trying again")
        elif restarts_left:
            lines.append(f"lockstep: restarting all ranks (restarts left: {restarts_left - 1})")
        remedy = self.loop_remedy if is_loop else self.remedy
        if remedy and (is_loop or not restarts_left):
            lines.append(f"  try: {remedy}")
        return "".join(f"{line}\n" for line in lines)


def find_failure(ranks: Ranks) -> RankFailure | None:
    """Return why ranks have failed, or None if none has.

    Call this before the remaining ranks are ended, or they would be taken for the cause.
    """
    failed = {local: code for local, code in enumerate(ranks.codes) if code}
    if not failed and not ranks.living:
        return _left_run(ranks)
    if not failed:
        return _abandoned(ranks) if ranks.is_abandoned else None
    for local, code in failed.items():
        if code < 0 and code != -signal.SIGTERM:
            return killed(ranks, local, signal.Signals(-code))
    records = ranks.records()
    if records:
        return _left_early(ranks, records[0]) or from_record(records[0])
    local, code = next(iter(failed.items()))
    return from_code(ranks.first + local, code if code > 0 else 128 - code)


def from_record(record: Mapping[str, Any]) -> RankFailure:
    """Return the failure of a rank that left a record of it."""
    rank, code, error = record["rank"], record["code"], record["error"]
    if not error:
        return from_code(rank, code)
    notes = [note.removeprefix(f"on rank {rank}, ") for note in record["notes"]]
    where = ", ".join([f"rank {rank} on {record['host']}", *notes])
    trace = record["traceback"].rstrip()  # empty for an error raised on purpose
    lines = (*filter(None, [trace]), f"lockstep: {where}: {error}")
    return RankFailure(rank, code, lines, identity_of(error, record["notes"]))


def from_code(rank: int, code: int) -> RankFailure:
    """Return the failure of a rank that left only an exit code."""
    if code in FINAL_CODES:  # the rank has printed why
        return RankFailure(rank, code)
    return RankFailure(rank, code, (f"lockstep: rank {rank} exited with code {code}",))


def killed(ranks: Ranks, local: int, number: signal.Signals) -> RankFailure:
    """Return the failure of a rank that a signal ended."""
    rank = ranks.first + local
    position = ranks.position(local)
    memory = ranks.memory.text(ranks.processes[local].pid or 0)
    what = f"rank {rank} on {socket.gethostname()} was killed by {number.name}"
    line = " ".join(filter(None, [f"lockstep: {what}", position.text()]))
    line += f" ({memory})" if memory else ""
    remedy = RESUME
    if number == signal.SIGKILL:
        was_out_of_memory = ranks.memory.was_out_of_memory
        if was_out_of_memory:
            line += "; the kernel's out-of-memory killer did it"
            remedy = LESS_MEMORY
        elif was_out_of_memory is None:
            line += "; the kernel's out-of-memory killer may have done it"
        else:
            line += "; it was not the kernel's out-of-memory killer, which has killed nothing here"
    has_place = position.step is not None or position.has_begun
    return RankFailure(
        rank,
        128 + number,
        (line,),
        identity=f"{number.name} {position.text()}" if has_place else "",
        repeated=f"killed by {number.name} {{times}} times {position.text()}",
        remedy=remedy,
        loop_remedy=LESS_MEMORY if remedy == LESS_MEMORY else FIND_KILLER,
    )


def _left_early(ranks: Ranks, failed: Mapping[str, Any]) -> RankFailure | None:
    """Return the early exit of a rank that made another rank fail, if there is one."""
    error = failed["error"]
    if not error:
        return None
    position = ranks.position(failed["rank"] - ranks.first)
    for local, code in enumerate(ranks.codes):
        record = ranks.record(local)
        ended_at = float(record["time"]) if record else 0.0
        if code != 0 or ended_at > float(failed["time"]):
            continue
        has_lost_peer = _has_lost_peer(failed)
        if not has_lost_peer and not position.needs(ranks.position(local)):
            continue
        failing = ", ".join(filter(None, [f"rank {failed['rank']}", position.text()]))
        consequence = f"{failing}, then failed: {error.splitlines()[0]}"
        if has_lost_peer:
            consequence = f"{failing}, lost its connection to it"
        return early_exit(ranks, local, consequence, failed["traceback"].rstrip())
    return None


def _has_lost_peer(failed: Mapping[str, Any]) -> bool:
    """Return whether a rank failed in a collective because another rank did not answer."""
    error = failed["error"]
    is_lost = PEER_GONE.search(error) or TIMED_OUT.search(error)
    return bool(is_lost) and is_of_collective(error, failed["error_module"])


def _left_run(ranks: Ranks) -> RankFailure | None:
    """Return the failure of ranks that all exited with 0 inside a run and left no record."""
    inside = [local for local in range(len(ranks.codes)) if ranks.position(local).is_in_run]
    if not inside:
        return None
    rank = ranks.first + inside[0]
    what = f"lockstep: rank {rank} on {socket.gethostname()} exited with code 0"
    where = " ".join(filter(None, [what, ranks.position(inside[0]).text()]))
    line = f"{where}, inside a run that had not finished"
    if len(inside) > 1:
        line += f"; so did {len(inside) - 1} more"
    remedy = "look for a call that ends the process there: os._exit() in a thread, exit() in C code"
    return RankFailure(rank, EXIT_EARLY, (line,), remedy=remedy)


def _abandoned(ranks: Ranks) -> RankFailure | None:
    """Return the early exit of a rank that all remaining ranks wait for."""
    living = [(ranks.first + local, ranks.position(local)) for local in ranks.living]
    for local, code in enumerate(ranks.codes):
        if code == 0 and any(one.needs(ranks.position(local)) for _, one in living):
            waiting = (f"rank {rank} waits for it {one.text()}".rstrip() for rank, one in living)
            return early_exit(ranks, local, ", ".join(waiting))
    return None


def early_exit(ranks: Ranks, local: int, consequence: str, traceback: str = "") -> RankFailure:
    """Return the failure of a rank whose script exited with 0 while others needed it.

    Args:
        ranks: All ranks on this machine.
        local: The local rank that exited early.
        consequence: What happened to the others.
        traceback: The traceback of a rank that failed because of it, if one did.
    """
    rank = ranks.first + local
    what = f"lockstep: rank {rank} on {socket.gethostname()} exited with code 0"
    where = " ".join(filter(None, [what, ranks.position(local).text()]))
    remedy = (
        "let all ranks end the script at the same point: find the exit() or return that only rank "
        f"{rank} reaches"
    )
    line = f"{where}, but the others still needed it: {consequence}"
    lines = (traceback, line) if traceback else (line,)
    return RankFailure(rank, EXIT_EARLY, lines, remedy=remedy)


def waited_in_vain(ranks: Ranks, codes: Sequence[int | None]) -> bool:
    """Return whether a rank timed out waiting, so that the cause is a rank still running.

    NCCL's watchdog ends a process with SIGABRT.
    """
    timed_out = any(TIMED_OUT.search(record["error"]) for record in ranks.records())
    return timed_out or -signal.SIGABRT in codes
