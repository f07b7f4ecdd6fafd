"""`lockstep rehearse -- COMMAND`: the very command in miniature, killed and resumed.

Owns: starting the command, killing a rank at its first checkpoint, starting it again, and
what was seen of each phase. Does not own: how a run shrinks (`lockstep.run.rehearsal`), what its
processes do differently (`stage.py`).

What happened is read from the run's own record, `events/rank_0.jsonl`, and from the notes of
its processes. The phases come in this order, so a run that dies or hangs did so in the first
phase that was not seen.
"""

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lockstep.cli.stage import GOING_ON, NOTES, build_stage
from lockstep.errors import ConfigError, closest
from lockstep.harness.command import (
    LAUNCHER_S,
    POLL_S,
    START_S,
    RunningCommand,
    children_of,
    ending_on_signals,
)
from lockstep.harness.failure import Failure
from lockstep.observe.events import Event, read_events

PHASES = ("start", "train", "log", "validate", "save", "kill", "resume", "finish")
HUNG = "hung"
STACK_S = 3.0
"""How long a process that hangs may take to say where."""


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
    """Takes a command through its phases."""

    def __init__(
        self,
        words: Sequence[str],
        stage: Path,
        limit_s: float,
        without: Sequence[str] = (),
        tell: Callable[[Phase], None] = lambda phase: None,
    ) -> None:
        self.words = list(words)
        self.stage = stage
        self.limit_s = limit_s
        self.tell = tell
        self.report = Report(self.words, without=tuple(without))
        self.env = {**build_stage(stage), "LOCKSTEP_TRACEBACK": "1"}  # `Failure` reads it
        self.output = stage / "output.txt"
        self.began = time.time()
        self.killed_at: float | None = None
        self._told = 0.0

    def run(self) -> Report:
        """Play it, and return what was seen."""
        act = RunningCommand(self.words, self.env, self.output)
        try:
            ended = self._follow(act, until="saved")
            if not ended:
                self._kill(act)
                if act.code is not None:  # no launcher that would start it again by itself
                    act.close()
                    act = RunningCommand(self.words, self.env, self.output)
                ended = self._follow(act)
            self._close(act, ended)
        finally:
            act.note_children()
            act.close()
        return self.report

    # --- watching ------------------------------------------------------------

    def _signs(self, *kinds: str, after: bool = False) -> list[Event]:
        """Return the notes and events so far, of some kinds, perhaps only from after the kill."""
        since = (self.killed_at or time.time()) if after else self.began
        signs = [sign for sign in self._all_signs() if sign["time"] >= since]
        signs.sort(key=lambda sign: float(sign["time"]))
        return [sign for sign in signs if sign["event"] in kinds or not kinds]

    def _all_signs(self) -> list[Event]:
        *lines, _ = (self.stage / NOTES).read_text().split("\n")  # the last may be under way
        notes: list[Event] = [json.loads(line) for line in lines]
        stores = [note["folder"] for note in notes if note["event"] == "store"]
        if not stores:
            return notes
        run = Path(stores[0]).parent
        self.report.folder = str(run)
        if not (run / "events" / "rank_0.jsonl").exists():
            return notes
        return notes + list(read_events(run, raw=True))

    def _follow(self, act: RunningCommand, until: str = "") -> str:
        """Wait for a kind of sign; return how the command ended instead, if it did.

        Hung means: no sign of life for `limit_s`.
        """
        num_signs, last = -1, time.monotonic()
        while True:
            code = act.code
            act.note_children()
            signs = self._signs()
            self._look(signs)
            if any(sign["event"] == until for sign in signs):
                return ""
            if code is not None:
                return f"exit code {code}" if code >= 0 else f"ended by signal {-code}"
            if len(signs) != num_signs:
                num_signs, last = len(signs), time.monotonic()
            has_begun = bool(signs) and signs[-1]["time"] > act.began
            limit_s = self.limit_s if has_begun else max(self.limit_s, START_S)
            if time.monotonic() - last > limit_s:
                self._ask_where(act)
                return HUNG
            time.sleep(POLL_S)

    def _ask_where(self, act: RunningCommand) -> None:
        """Have the ranks that hang, and the readers of their data, print their stacks and end."""
        pids = {note["pid"] for note in self._signs("store")}
        everyone = [psutil.Process(act.process.pid), *act.family] if act.code is None else []
        ranks = [process for process in everyone if process.pid in pids]
        readers = [child for rank in ranks for child in children_of(rank)]
        for process in [*readers, *ranks]:  # one after the other, or they talk at the same time
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGABRT)
                process.wait(STACK_S)

    def _kill(self, act: RunningCommand) -> None:
        """End the rank that saved as a power cut would; give its launcher time to notice."""
        saved = self._signs("saved")[0]
        (self.stage / GOING_ON).touch()
        self.killed_at = time.time()
        os.kill(saved["pid"], signal.SIGKILL)
        deadline = time.monotonic() + LAUNCHER_S
        while act.code is None and time.monotonic() < deadline:
            if self._signs("store", after=True):
                break  # it has started the ranks again
            act.note_children()
            time.sleep(POLL_S)
        took = time.time() - self.killed_at
        how = f"the command ended with {act.code} after {took:.1f} s"
        if act.code is None:
            how = "the launcher started the ranks again"
            if not self._signs("store", after=True):
                how = f"the command had not ended after {took:.0f} s, and was ended"
                act.close()
        rank, step = saved["rank"], saved["step"]
        self._see("kill", f"SIGKILL to rank {rank} (process {saved['pid']}) at step {step}; {how}")

    # --- judging -------------------------------------------------------------

    def _see(self, name: str, evidence: str) -> None:
        phase = self.report[name]
        if phase.verdict == "not seen":
            now = time.time() - self.began
            phase.verdict, phase.evidence = "ok", evidence
            phase.seconds, self._told = round(now - self._told, 2), now
            self.tell(phase)

    def _look(self, signs: list[Event]) -> None:
        """Note the phases that the signs show."""
        of = {
            kind: [s for s in signs if s["event"] == kind] for kind in {s["event"] for s in signs}
        }
        if stores := of.get("store", []):
            ranks = {note["rank"] for note in stores}
            if len(ranks) == stores[0]["size"]:
                processes = "1 process" if len(ranks) == 1 else f"{len(ranks)} processes"
                self._see("start", f"{processes} in {self.report.folder}")
        steps = of.get("step", []) or of.get("trained", [])
        if steps and self.report["start"].verdict == "ok":
            self._see("train", f"from step {steps[0]['step']}")
        if logged := of.get("step", []):
            warnings = [f"; warning: {event['message']}" for event in of.get("warning", [])[:1]]
            loss = f"loss {logged[0].get('loss', 0.0):.4g} in events/rank_0.jsonl"
            self._see("log", loss + "".join(warnings))
        if measured := of.get("evaluation", []):
            numbers = list(measured[0].get("metrics", {}).items())[:3]
            said = ", ".join(f"{name} {value:.4g}" for name, value in numbers)
            self._see("validate", f"at step {measured[0]['step']}: {said}")
        if saved := of.get("saved", []):
            self._see("save", f"step {saved[0]['step']}: {saved[0]['path']}")
        if self.killed_at is not None:
            self._look_after_kill([s for s in signs if s["time"] >= self.killed_at])

    def _look_after_kill(self, signs: list[Event]) -> None:
        found = [s for s in signs if s["event"] in ("resume", "loaded") and s["step"] > 0]
        moved = [s["step"] for s in signs if s["event"] in ("step", "trained", "run_end")]
        if found and moved and max(moved) > found[0]["step"]:
            self._see("resume", f"at step {found[0]['step']} from {found[0]['path']}")

    def _close(self, act: RunningCommand, ended: str) -> None:
        """Judge the end."""
        signs = self._signs(after=self.killed_at is not None)
        self._look(self._signs())
        done = [s["step"] for s in signs if s["event"] in ("run_end", "trained", "saved")]
        has_record = bool(self._signs("run_start"))
        is_over = not has_record or any(s["event"] == "run_end" for s in signs)
        if ended == "exit code 0" and is_over and done:
            saved = [s["path"] for s in signs if s["event"] == "saved"]
            self._see(
                "finish",
                f"step {max(done)}, exit code 0" + (f", saved {saved[-1]}" if saved else ""),
            )
            return
        if ended == "exit code 0":
            self.report["finish"].evidence = "exit code 0, but the run does not say it is done"
            return
        read = Failure.read_stacks if ended == HUNG else Failure.read
        failure = read(act.text)
        name = next(p.phase for p in self.report.phases if p.verdict == "not seen")
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


@ending_on_signals()
def rehearse(words: Sequence[str], limit_s: float, without: Sequence[str], as_json: bool) -> int:
    """Rehearse a command, print what was seen, and return the exit code."""
    if not words:
        raise ConfigError("there is no command", "lockstep rehearse -- python train.py")
    for name in without:
        if name not in PHASES:
            near = closest(name, PHASES)
            raise ConfigError(f"there is no phase {name!r}", near or f"one of {', '.join(PHASES)}")

    def tell(phase: Phase) -> None:
        if not as_json:
            took = "" if phase.seconds is None else f"{phase.seconds:.1f} s"
            print(f"  {phase.phase:<9}{phase.verdict:<7}{took:>7}  {phase.evidence}", flush=True)

    stage = Path(tempfile.mkdtemp(prefix="lockstep_rehearsal_"))
    if not as_json:
        print(f"rehearsing: {' '.join(words)}", flush=True)
    try:
        report = Rehearsal(words, stage, limit_s, without, tell).run()
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    is_well = report.verdict == "passed"
    if is_well:
        shutil.rmtree(stage, ignore_errors=True)
    else:
        report.output = str(stage / "output.txt")
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        print(_summary(report), flush=True)
    return 0 if is_well else 1


def _summary(report: Report) -> str:
    unseen = [phase for phase in report.phases if phase.verdict == "not seen"]
    lines = [f"  {phase.phase:<9}not seen         {phase.evidence}".rstrip() for phase in unseen]
    total = sum(phase.seconds or 0 for phase in report.phases)
    if report.verdict == "passed":
        lines.append(f"passed: every phase was seen, in {total:.0f} s")
        if report.without:
            lines[-1] = f"passed, without {', '.join(report.without)}, in {total:.0f} s"
    elif report.failed:
        lines.append(f"failed in {report.failed}; the command's output is in {report.output}")
    else:
        lines.append(
            f"incomplete: {', '.join(report.missing)} not seen; "
            f"the command's output is in {report.output}"
        )
        lines.append("  try: --without PHASE for what this command does not do")
    return "\n".join(lines)
