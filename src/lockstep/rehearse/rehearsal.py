"""A command in miniature, killed and resumed: what each of its phases showed.

Owns: starting the command, killing a rank at its first checkpoint, starting it again, and what was
seen of each phase. Does not own: how a run shrinks (`lockstep.run.rehearsal`), what its processes
note (`callback.py`), or what is printed (`cli/rehearse.py`).

What happened is read from the run's own record, `events/rank_0.jsonl`, and from the notes of its
ranks. The phases come in this order, so a run that dies or hangs did so in the first phase that was
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
from lockstep.harness.command import LAUNCHER_S, POLL_S, START_S, RunningCommand, children_of
from lockstep.harness.failure import Failure
from lockstep.observe.events import read_events
from lockstep.rehearse.callback import CALLBACK

PHASES = ("start", "train", "log", "validate", "save", "kill", "resume", "finish")
HUNG = "hung"
STACK_S = 3.0
"""How long a process that hangs may take to say where."""

Sign = Mapping[str, Any]
"""A note of a rank, or an event of the run."""
Signs = defaultdict[str, list[Sign]]
"""By their kind, in order of time."""


@dataclass
class Phase:
    """One thing a run must be able to do."""

    phase: str
    verdict: str = "not seen"
    """`ok`, `failed`, or `not seen`."""
    seconds: float | None = None
    evidence: str = ""


@dataclass
class Report:
    """What a rehearsal showed."""

    command: list[str]
    phases: list[Phase] = field(default_factory=lambda: [Phase(name) for name in PHASES])
    folder: str | None = None
    """The rehearsed run's own."""
    output: str | None = None
    """What the command printed; kept unless all is well."""
    without: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Phase:
        return self.phases[PHASES.index(name)]

    @property
    def failed(self) -> str | None:
        """Return the phase in which it went wrong."""
        return next((phase.phase for phase in self.phases if phase.verdict == "failed"), None)

    @property
    def missing(self) -> list[str]:
        """Return the phases that should have been seen and were not."""
        unseen = [phase.phase for phase in self.phases if phase.verdict == "not seen"]
        return [name for name in unseen if name not in self.without]

    @property
    def verdict(self) -> str:
        """Return one word for all of it."""
        return "failed" if self.failed else "incomplete" if self.missing else "passed"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"verdict": self.verdict, "failed": self.failed, "missing": self.missing} | asdict(
            self
        )


class Rehearsal:
    """Takes a command through its phases.

    Args:
        words: The command.
        folder: For what it prints, its ranks' notes, and the checkpoints of a loop of one's own.
        limit_s: How long it may go without a sign of life.
        without: The phases that need not be seen.
        tell: Is told of each phase that was seen, or failed.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        limit_s: float,
        without: Sequence[str] = (),
        tell: Callable[[Phase], None] = lambda phase: None,
    ) -> None:
        self.folder = folder
        self.limit_s = limit_s
        self.tell = tell
        self.report = Report(list(words), without=tuple(without))
        self.env = {
            **attached(folder, CALLBACK),
            "LOCKSTEP_REHEARSAL": "1",
            "LOCKSTEP_REHEARSAL_FOLDER": str(folder),
            "LOCKSTEP_TRACEBACK": "1",  # `Failure` reads it
        }
        self.began = time.time()
        self.killed_at: float | None = None
        self._seen_s = 0.0
        """When the last phase was seen."""

    def run(self) -> Report:
        """Take the command through all phases, and return what was seen."""
        command = self._start()
        try:
            ended = self._follow(command, until="saved")
            if not ended:
                self._kill(command)
                if command.code is not None:  # no launcher that would start it again by itself
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

    def _signs(self, after_kill: bool = False) -> Signs:
        """Return the notes and events so far."""
        notes = read_notes(self.folder)
        signs = list(notes)
        if runs := [note["output_dir"] for note in notes if note["event"] == "run"]:
            self.report.folder = runs[0]
            if Path(runs[0], "events", "rank_0.jsonl").exists():
                signs += read_events(runs[0], raw=True)
        since = (self.killed_at or time.time()) if after_kill else self.began
        found: Signs = defaultdict(list)
        for sign in sorted(signs, key=lambda sign: float(sign["time"])):
            if sign["time"] >= since:
                found[sign["event"]].append(sign)
        return found

    def _follow(self, command: RunningCommand, until: str = "") -> str:
        """Wait for a kind of sign; return how the command ended instead, if it did.

        Hung means: no sign of life for `limit_s`.
        """
        num_signs, last = -1, time.monotonic()
        while True:
            code = command.code
            command.note_children()
            signs = self._signs()
            self._look(signs)
            if signs[until]:
                return ""
            if code is not None:
                return f"exit code {code}" if code >= 0 else f"ended by signal {-code}"
            num = sum(map(len, signs.values()))
            if num != num_signs:
                num_signs, last = num, time.monotonic()
            has_begun = any(note["time"] > command.began for note in signs["process"])
            limit_s = self.limit_s if has_begun else max(self.limit_s, START_S)
            if time.monotonic() - last > limit_s:
                self._ask_where(command)
                return HUNG
            time.sleep(POLL_S)

    def _ask_where(self, command: RunningCommand) -> None:
        """Have the ranks that hang, and the readers of their data, print their stacks and end."""
        pids = {note["pid"] for note in self._signs()["process"]}
        alive = [psutil.Process(command.process.pid), *command.family]
        ranks = [process for process in alive if process.pid in pids]
        readers = [child for rank in ranks for child in children_of(rank)]
        for process in [*readers, *ranks]:  # one after the other, or they talk at the same time
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGABRT)
                process.wait(STACK_S)

    def _kill(self, command: RunningCommand) -> None:
        """End the rank that saved as a power cut would; give its launcher time to notice."""
        saved = self._signs()["saved"][0]
        (self.folder / KILLED).touch()
        self.killed_at = time.time()
        os.kill(saved["pid"], signal.SIGKILL)
        deadline = time.monotonic() + LAUNCHER_S
        was_restarted = False
        while command.code is None and not was_restarted and time.monotonic() < deadline:
            command.note_children()
            time.sleep(POLL_S)
            was_restarted = bool(self._signs(after_kill=True)["process"])
        took_s = time.time() - self.killed_at
        if command.code is not None:
            how = f"the command ended with {command.code} after {took_s:.1f} s"
        elif was_restarted:
            how = "the launcher started the ranks again"
        else:
            how = f"the command had not ended after {took_s:.0f} s, and was ended"
            command.close()
        rank, step = saved["rank"], saved["step"]
        self._see("kill", f"SIGKILL to rank {rank} (process {saved['pid']}) at step {step}; {how}")

    # --- judging -------------------------------------------------------------

    def _see(self, name: str, evidence: str) -> None:
        phase = self.report[name]
        if phase.verdict == "not seen":
            now = time.time() - self.began
            phase.verdict, phase.evidence = "ok", evidence
            phase.seconds, self._seen_s = round(now - self._seen_s, 2), now
            self.tell(phase)

    def _look(self, signs: Signs) -> None:
        """Note the phases that the signs show."""
        if started := signs["start"]:
            ranks = {note["rank"] for note in started}
            if len(ranks) == started[0]["size"]:
                where = f" in {self.report.folder}" if self.report.folder else ""
                processes = "1 process" if len(ranks) == 1 else f"{len(ranks)} processes"
                self._see("start", processes + where)
        if signs["trained"]:
            self._see("train", f"from step {signs['trained'][0]['step']}")
        if logged := signs["step"]:
            warnings = [f"; warning: {event['message']}" for event in signs["warning"][:1]]
            loss = f"loss {logged[0].get('loss', 0.0):.4g} in events/rank_0.jsonl"
            self._see("log", loss + "".join(warnings))
        if measured := signs["evaluation"]:
            numbers = list(measured[0].get("metrics", {}).items())[:3]
            said = ", ".join(f"{name} {value:.4g}" for name, value in numbers)
            self._see("validate", f"at step {measured[0]['step']}: {said}")
        if saved := signs["saved"]:
            self._see("save", f"step {saved[0]['step']}: {saved[0]['path']}")
        if self.killed_at is not None:
            self._look_for_resume(self._signs(after_kill=True), saved[0])

    def _look_for_resume(self, signs: Signs, saved: Sign) -> None:
        """See whether training went on from the checkpoint that the killed run had saved."""
        resumed = [note["step"] for note in signs["start"] if note["step"] > 0]
        trained = [note["step"] for note in signs["trained"]]
        if resumed and max(trained, default=0) > resumed[0]:
            self._see("resume", f"at step {resumed[0]} from {saved['path']}")

    def _judge_end(self, command: RunningCommand, ended: str) -> None:
        """Judge how the command ended."""
        self._look(self._signs())
        if ended == "exit code 0":
            self._judge_exit()
            return
        failure = (Failure.read_stacks if ended == HUNG else Failure.read)(command.text)
        name = next(phase.phase for phase in self.report.phases if phase.verdict == "not seen")
        if name == "validate" and failure.is_about_saving:  # nothing is held out
            name = "save"
        phase = self.report[name]
        phase.verdict = "failed"
        where = f" at {failure.place}" if failure.place else ""
        if ended == HUNG:
            phase.evidence = f"no sign of life for {self.limit_s:g} s{where}"
        else:
            phase.evidence = f"{ended}: {failure.error}{where}"
        self.tell(phase)

    def _judge_exit(self) -> None:
        """See whether a command that ended well had come to the end of its run."""
        signs = self._signs(after_kill=self.killed_at is not None)
        done = [s["step"] for kind in ("run_end", "trained", "saved") for s in signs[kind]]
        has_record = bool(self._signs()["run_start"])
        if not done or (has_record and not signs["run_end"]):
            self.report["finish"].evidence = "exit code 0, but the run does not say it is done"
            return
        saved = f", saved {signs['saved'][-1]['path']}" if signs["saved"] else ""
        self._see("finish", f"step {max(done)}, exit code 0{saved}")
