"""Run a schedule: keep a launcher alive, fire the faults that go by the clock, watch for litter.

Owns: the processes, and the story of what happened. Does not own: whether it was right.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from chaos import schedule
from chaos.notes import Tail, claim, note
from chaos.points import SIGNALS, STOP_S, flip_newest, kill_loader_worker
from chaos.schedule import Fault, Leg

HERE = Path(__file__).resolve().parents[1]
POLL_S = 0.004
GONE_S = 1.0
"""How long after its launcher a rank may live."""


@dataclass
class Story:
    """What happened in a run under chaos, as written down by those who were there."""

    folder: Path
    legs: list[Leg]
    num_steps: int
    notes: list[dict[str, Any]] = field(default_factory=list)
    steps: list[list[str]] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    seconds: float = 0.0
    timed_out: bool = False

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Return the notes of a kind."""
        return [told for told in self.notes if told["kind"] == kind]

    def fault(self, struck: dict[str, Any]) -> Fault:
        """Return the fault that a note tells of."""
        return self.legs[struck["leg"]].faults[struck["fault"]]


class Launcher:
    """A warm process that launches runs, replaced when it is killed.

    Args:
        folder: For what it says and for temporary files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._output = (folder / "said.txt").open("ab")
        self.num_killed = 0
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        # A shell that starts the rig in its background has it ignore Ctrl-C, and all it starts.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "chaos.supervise"],
            env=variables(self.folder),
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def order(self, folder: Path, num_steps: int, first_leg: int, mutant: str) -> None:
        """Have a run taken up from a leg on."""
        assert self.process.stdin is not None
        line = json.dumps([str(folder), num_steps, first_leg, mutant])
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def ranks(self) -> list[psutil.Process]:
        """Return the ranks that are alive: what its fork server has forked."""
        with suppress(psutil.Error):
            servers = psutil.Process(self.pid).children()
            ranks = [child for server in servers for child in server.children()]
            return sorted(ranks, key=lambda rank: rank.pid)
        return []

    def family(self) -> set[psutil.Process]:
        """Return whoever descends from it now."""
        with suppress(psutil.Error):
            return set(psutil.Process(self.pid).children(recursive=True))
        return set()

    def close(self) -> None:
        """End it, and whatever it has started."""
        family = self.family()
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(5 if not self.ranks() else 0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in family:
            with suppress(psutil.Error):
                process.kill()
        self._output.close()

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def variables(folder: Path) -> dict[str, str]:
    """Return the environment of what the rig starts: this package in reach, its own /tmp."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}


def golden(folder: Path, num_steps: int) -> float:
    """Train in one process without a fault; return the seconds it took."""
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "chaos.train", str(folder), str(num_steps)]
    env = variables(folder.parent / f"{folder.name}_launcher")
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def run(
    folder: Path,
    legs: Sequence[Leg],
    num_steps: int,
    launcher: Launcher,
    mutant: str = "",
    limit_s: float = 7200,
) -> Story:
    """Run to the end under a schedule."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "chaos").mkdir(parents=True)
    schedule.write(legs, folder / "chaos" / "schedule.json")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    began = time.monotonic()
    driver = Driver(Story(folder, list(legs), num_steps), launcher, mutant)
    try:
        driver.follow(began + limit_s)
    finally:
        driver.close()
    driver.story.seconds = time.monotonic() - began
    return driver.story


class Driver:
    """Follows a run through its files, and strikes it by the clock."""

    def __init__(self, story: Story, launcher: Launcher, mutant: str) -> None:
        self.story, self.launcher, self.mutant = story, launcher, mutant
        self.folder = story.folder
        self._notes = Tail(self.folder / "chaos" / "notes.jsonl")
        self._steps = Tail(self.folder / "chaos" / "steps.txt")
        self._leg, self._leg_began = -1, 0.0
        self._step = 0
        self._first_step: int | None = None
        """Where the present launch went on; None until it has said so."""
        self._waking: list[tuple[float, int]] = []
        self._due: dict[int, float] = {}
        self._done: set[int] = set()
        launcher.order(self.folder, story.num_steps, 0, mutant)

    def follow(self, deadline: float) -> None:
        """Fire what is due until the run has ended, or time is up."""
        while not self.story.told("ended"):
            self._fire_due()
            self._wake()
            if self.launcher.process.poll() is not None:
                self._read()
                self._bury()
                if self.launcher.process.returncode != -signal.SIGKILL:
                    return
                self.launcher.num_killed += 1
                self.launcher.start()
                first = self._leg + 1
                self.launcher.order(self.folder, self.story.num_steps, first, self.mutant)
            if time.monotonic() > deadline:
                self.story.timed_out = True
                return
            time.sleep(POLL_S)
            self._read()
        self._bury()

    def _read(self) -> None:
        for line in self._notes.lines():
            told = json.loads(line)
            self.story.notes.append(told)
            if told["kind"] == "launch":
                self._leg, self._leg_began, self._first_step = told["leg"], told["time"], None
                self._due, self._done = {}, set()
            if told["kind"] == "goes_on":
                self._first_step = self._step = told["step"]
        for line in self._steps.lines():
            words = line.split()
            self.story.steps.append(words)
            self._step = int(words[5])

    def _fire_due(self) -> None:
        faults = self.story.legs[self._leg].faults if 0 <= self._leg < len(self.story.legs) else ()
        now = time.time()
        for index, fault in enumerate(faults):
            if fault.point or index in self._done:
                continue
            if fault.gap < 0:
                self._due.setdefault(index, self._leg_began + fault.delay_s)
            elif self._first_step is not None and self._step >= self._first_step + fault.gap:
                self._due.setdefault(index, now + fault.delay_s)
            if now >= self._due.get(index, now + 1) and self._fire(index, fault):
                self._done.add(index)

    def _fire(self, index: int, fault: Fault) -> bool:
        """Do a fault from outside; say whether there was somebody to do it to."""
        ranks = self.launcher.ranks()
        if not ranks:
            return False
        if fault.kind == "flip":
            flip_newest(self.folder)
        claim(self.folder, f"{self._leg}_{index}")
        note(self.folder, "struck", leg=self._leg, fault=index, step=self._step)
        pid = ranks[fault.rank % len(ranks)].pid
        with suppress(ProcessLookupError):
            match fault.kind:
                case "kill" | "flip":
                    os.kill(pid, signal.SIGKILL)
                case "segfault":
                    os.kill(pid, signal.SIGSEGV)
                case "launcher":
                    os.kill(self.launcher.pid, signal.SIGKILL)
                case "stop":
                    os.kill(pid, signal.SIGSTOP)
                    self._waking.append((time.monotonic() + STOP_S, pid))
                case "worker":
                    kill_loader_worker(pid)
                case _:
                    os.kill(pid, SIGNALS[fault.kind])
        return True

    def _wake(self) -> None:
        for when, pid in list(self._waking):
            if time.monotonic() > when:
                self._waking.remove((when, pid))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _bury(self) -> None:
        """See that no rank outlives its launch or its launcher for long."""
        ranks = []
        for pid in {told["pid"] for told in self.story.told("began")}:
            with suppress(psutil.NoSuchProcess):
                ranks.append(psutil.Process(pid))
        _, alive = psutil.wait_procs(ranks, timeout=GONE_S)
        logs = len(list((self.launcher.folder / "tmp").glob("torchelastic_*")))
        if self.story.told("ended") and logs > self.launcher.num_killed:  # one dies with each
            self.story.left_behind.append(f"{logs} temporary folders of launches")
        for process in alive:
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    words = " ".join(process.cmdline())
                    self.story.left_behind.append(f"process {process.pid}: {words:.80}")
                    process.kill()

    def close(self) -> None:
        """Wake who sleeps, and read the last notes."""
        for _, pid in self._waking:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._read()
        self._notes.close()
        self._steps.close()
