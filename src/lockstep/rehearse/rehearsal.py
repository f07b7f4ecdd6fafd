"""Rehearse a command: run a few of its steps, kill it, resume it, and judge each phase.

Owns: starting the command, killing a rank at its first checkpoint, starting it again, and the
verdict of each phase. Does not own: the number of steps (`lockstep.run.rehearsal`), the notes of
its processes (`callback.py`), or the output (`cli/rehearse.py`).

The phases are detected from the run's events, `events/rank_0.jsonl`, and from the notes of its
ranks. They come in a fixed order, so a run that fails or hangs does so in the first phase that was
not seen.
"""

import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lockstep.harness.attach import KILLED, attached, read_notes
from lockstep.harness.command import LAUNCHER_S, START_S, RunningCommand, descendants, follow
from lockstep.harness.failure import CommandFailure
from lockstep.observe.events import read_events
from lockstep.rehearse.callback import CALLBACK

REHEARSED = ("start", "train", "log", "validate", "save", "kill", "resume", "finish")
HUNG = "hung"
STACK_S = 3.0
"""How long a hung process may take to print its stack."""

Record = Mapping[str, Any]
"""A note of a rank, or an event of the run."""
Records = defaultdict[str, list[Record]]
"""Notes and events by their kind, in order of time."""


@dataclass
class PhaseResult:
    """A part of a run, and whether it worked."""

    phase: str
    verdict: str = "not seen"
    """`ok`, `failed`, or `not seen`."""
    seconds: float | None = None
    evidence: str = ""


@dataclass
class Report:
    """The result of a rehearsal."""

    command: list[str]
    phases: list[PhaseResult] = field(
        default_factory=lambda: [PhaseResult(name) for name in REHEARSED]
    )
    folder: str | None = None
    """The folder of the rehearsed run."""
    output: str | None = None
    """The file with the command's output, which is kept unless the rehearsal passed."""
    without: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> PhaseResult:
        return self.phases[REHEARSED.index(name)]

    @property
    def failed(self) -> str | None:
        """Return the phase that failed, if any."""
        return next((phase.phase for phase in self.phases if phase.verdict == "failed"), None)

    @property
    def missing(self) -> list[str]:
        """Return the required phases that were not seen."""
        unseen = [phase.phase for phase in self.phases if phase.verdict == "not seen"]
        return [name for name in unseen if name not in self.without]

    @property
    def verdict(self) -> str:
        """Return `failed`, `incomplete` or `passed`."""
        return "failed" if self.failed else "incomplete" if self.missing else "passed"

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {"verdict": self.verdict, "failed": self.failed, "missing": self.missing} | asdict(
            self
        )


class Rehearsal:
    """Rehearses one command.

    Args:
        words: The command.
        folder: A folder for its output, its ranks' notes, and the checkpoints of a custom loop.
        limit_s: The longest time without progress.
        without: The phases that are not required.
        on_phase: Called with each phase that was seen, or failed.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        limit_s: float,
        without: Sequence[str] = (),
        on_phase: Callable[[PhaseResult], None] = lambda phase: None,
    ) -> None:
        self.folder = folder
        self.limit_s = limit_s
        self.on_phase = on_phase
        self.report = Report(list(words), without=tuple(without))
        self.env = {
            **attached(folder, CALLBACK),
            "LOCKSTEP_REHEARSAL": "1",
            "LOCKSTEP_REHEARSAL_FOLDER": str(folder),
            "LOCKSTEP_TRACEBACK": "1",  # `CommandFailure` reads it
        }
        self.began = time.time()
        self.killed_at: float | None = None
        self._seen_s = 0.0
        """Seconds from the start to the last phase that was seen."""

    def run(self) -> Report:
        """Run the command through all phases, and return the report."""
        command = self._start()
        try:
            ended = self._follow(command, until="saved")
            if not ended:
                self._kill(command)
                if command.code is not None:  # no launcher has restarted it
                    command.close()
                    command = self._start()
                ended = self._follow(command)
            self._judge_end(command, ended)
        finally:
            command.close()
        return self.report

    def _start(self) -> RunningCommand:
        return RunningCommand(self.report.command, self.env, self.folder / "output.txt")

    # --- watching ------------------------------------------------------------

    def _records(self, after_kill: bool = False) -> Records:
        """Return the notes and events so far."""
        notes = read_notes(self.folder)
        records = list(notes)
        if runs := [note["output_dir"] for note in notes if note["event"] == "run"]:
            self.report.folder = runs[0]
            if Path(runs[0], "events", "rank_0.jsonl").exists():
                records += read_events(runs[0], raw=True)
        since = (self.killed_at or time.time()) if after_kill else self.began
        found: Records = defaultdict(list)
        for record in sorted(records, key=lambda record: float(record["time"])):
            if record["time"] >= since:
                found[record["event"]].append(record)
        return found

    def _follow(self, command: RunningCommand, until: str = "") -> str:
        """Wait for a record of the kind `until`; if the command ends before, return how.

        The result is "hung" after `limit_s` without a new record.
        """
        records: Records

        def progress() -> tuple[int, float]:
            nonlocal records
            records = self._records()
            self._detect_phases(records)
            has_begun = any(note["time"] > command.began for note in records["process"])
            limit_s = self.limit_s if has_begun else max(self.limit_s, START_S)
            return sum(map(len, records.values())), limit_s

        code = follow([command], progress, lambda: bool(records[until]))
        if records[until]:
            return ""
        if code is None:
            self._print_stacks(command)
            return HUNG
        return f"exit code {code}" if code >= 0 else f"ended by signal {-code}"

    def _print_stacks(self, command: RunningCommand) -> None:
        """Make hung ranks and their loader workers print their stacks and end."""
        pids = {note["pid"] for note in self._records()["process"]}
        alive = [psutil.Process(command.process.pid), *command.family]
        ranks = [process for process in alive if process.pid in pids]
        workers = [child for rank in ranks for child in descendants(rank)]
        for process in [*workers, *ranks]:  # one after another, so that output is not mixed
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGABRT)
                process.wait(STACK_S)

    def _kill(self, command: RunningCommand) -> None:
        """Kill the rank that saved, and give its launcher time to react."""
        saved = self._records()["saved"][0]
        (self.folder / KILLED).touch()
        self.killed_at = time.time()
        os.kill(saved["pid"], signal.SIGKILL)
        has_reacted = follow(
            [command],
            lambda: (None, LAUNCHER_S),
            is_enough=lambda: bool(self._records(after_kill=True)["process"]),
        )
        took_s = time.time() - self.killed_at
        if command.code is not None:
            how = f"the command ended with {command.code} after {took_s:.1f} s"
        elif has_reacted is not None:
            how = "the launcher started the ranks again"
        else:
            how = f"the command had not ended after {took_s:.0f} s, and was killed"
            command.close()
        target = f"rank {saved['rank']} (process {saved['pid']})"
        self._mark_seen("kill", f"SIGKILL to {target} at step {saved['step']}; {how}")

    # --- judging -------------------------------------------------------------

    def _mark_seen(self, name: str, evidence: str) -> None:
        phase = self.report[name]
        if phase.verdict == "not seen":
            now_s = time.time() - self.began
            phase.verdict = "ok"
            phase.evidence = evidence
            phase.seconds = round(now_s - self._seen_s, 2)
            self._seen_s = now_s
            self.on_phase(phase)

    def _detect_phases(self, records: Records) -> None:
        """Mark the phases that the records prove."""
        if started := records["start"]:
            ranks = {note["rank"] for note in started}
            if len(ranks) == started[0]["size"]:
                where = f" in {self.report.folder}" if self.report.folder else ""
                processes = "1 process" if len(ranks) == 1 else f"{len(ranks)} processes"
                self._mark_seen("start", processes + where)
        if records["trained"]:
            self._mark_seen("train", f"from step {records['trained'][0]['step']}")
        if logged := records["step"]:
            warnings = [f"; warning: {event['message']}" for event in records["warning"][:1]]
            loss = f"loss {logged[0].get('loss', 0.0):.4g} in events/rank_0.jsonl"
            self._mark_seen("log", loss + "".join(warnings))
        if measured := records["evaluation"]:
            numbers = list(measured[0].get("metrics", {}).items())[:3]
            metrics = ", ".join(f"{name} {value:.4g}" for name, value in numbers)
            self._mark_seen("validate", f"at step {measured[0]['step']}: {metrics}")
        if saved := records["saved"]:
            self._mark_seen("save", f"step {saved[0]['step']}: {saved[0]['path']}")
        if self.killed_at is not None:
            self._detect_resume(self._records(after_kill=True), saved[0])

    def _detect_resume(self, records: Records, saved: Record) -> None:
        """Mark `resume` if training continued from the checkpoint of the killed run."""
        resumed = [note["step"] for note in records["start"] if note["step"] > 0]
        trained = [note["step"] for note in records["trained"]]
        if resumed and max(trained, default=0) > resumed[0]:
            self._mark_seen("resume", f"at step {resumed[0]} from {saved['path']}")

    def _judge_end(self, command: RunningCommand, ended: str) -> None:
        """Judge how the command ended."""
        self._detect_phases(self._records())
        if ended == "exit code 0":
            self._judge_exit()
            return
        read = CommandFailure.read_stacks if ended == HUNG else CommandFailure.read
        failure = read(command.text)
        name = next(phase.phase for phase in self.report.phases if phase.verdict == "not seen")
        if name == "validate" and failure.is_about_saving:  # the run has no held-out data
            name = "save"
        phase = self.report[name]
        phase.verdict = "failed"
        where = f" at {failure.place}" if failure.place else ""
        if ended == HUNG:
            phase.evidence = f"no progress for {self.limit_s:g} s{where}"
        else:
            phase.evidence = f"{ended}: {failure.error}{where}"
        self.on_phase(phase)

    def _judge_exit(self) -> None:
        """Mark `finish` if a command with exit code 0 has finished its run."""
        records = self._records(after_kill=self.killed_at is not None)
        steps = [r["step"] for kind in ("run_end", "trained", "saved") for r in records[kind]]
        has_events = bool(self._records()["run_start"])
        if not steps or (has_events and not records["run_end"]):
            self.report["finish"].evidence = "exit code 0, but the run has not finished"
            return
        saved = f", saved {records['saved'][-1]['path']}" if records["saved"] else ""
        self._mark_seen("finish", f"step {max(steps)}, exit code 0{saved}")
