"""A command that a tool started is ended with all its children, however the tool is ended."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.harness import command as command_module
from lockstep.harness.command import RunningCommand, ending_on_signals, follow

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

from processes import Forked

pytestmark = pytest.mark.timeout(300)

SLEEPER = """
import os, subprocess, time
import lockstep
child = subprocess.Popen(["sleep", "100"], start_new_session=True)
open("pids.part", "w").write(f"{os.getpid()} {child.pid}")
os.rename("pids.part", "pids")
time.sleep(100)
"""


@pytest.mark.parametrize("verb", ["rehearse", "certify resume", "bench step", "doctor"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_nothing_running(
    verb: str, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SLEEPER)
    words = [*verb.split(), "--", sys.executable, "train.py"]
    command = Forked(words, tmp_path / "said.txt", {"TMPDIR": str(tmp_path)})
    try:
        while not (tmp_path / "pids").exists():
            assert command.poll() is None
            time.sleep(0.05)
        started, below = map(psutil.Process, map(int, (tmp_path / "pids").read_text().split()))
        os.kill(command.pid, number)
        code = command.wait(60)
        if number == signal.SIGKILL:  # the kernel then ends what was started, and not what that did
            below.kill()
        assert psutil.wait_procs([started, below], 30)[1] == []
    finally:
        command.process.kill()
        command.wait()
    if number == signal.SIGKILL:
        assert code == -number
    else:
        assert code == 128 + number
        assert not list(tmp_path.glob("lockstep_*"))


@pytest.mark.timeout(60)
def test_a_signal_while_a_command_is_checked_does_not_keep_it_from_being_ended(
    tmp_path: Path,
) -> None:
    def interrupt(number: int, _: object) -> None:
        raise InterruptedError

    command = RunningCommand(["sleep", "100"], {}, tmp_path / "output.txt")
    before = signal.signal(signal.SIGPROF, interrupt)
    try:
        for _ in range(300):
            with contextlib.suppress(InterruptedError):
                signal.setitimer(signal.ITIMER_PROF, 0.001)
                while command.code is None:
                    pass
    finally:
        signal.signal(signal.SIGPROF, before)
    command.close()
    assert command.code == -signal.SIGKILL


def test_following_ends_without_progress_or_when_it_is_enough(tmp_path: Path) -> None:
    command = RunningCommand(["sleep", "100"], {}, tmp_path / "output.txt")
    looks = iter(range(100))
    try:
        assert follow([command], lambda: ("the same", 0.2)) is None
        assert follow([command], lambda: (next(looks), 0.2), lambda: next(looks) > 20) == 0
        assert command.code is None
    finally:
        command.close()


def test_after_a_failure_the_other_commands_may_end_by_themselves(tmp_path: Path) -> None:
    failed = RunningCommand(["sh", "-c", "exit 3"], {}, tmp_path / "failed.txt")
    waits = f"while kill -0 {failed.process.pid}; do sleep 0.05; done; exit 4"
    other = RunningCommand(["sh", "-c", waits], {}, tmp_path / "other.txt")
    try:
        assert follow([failed, other], lambda: (None, 60.0)) == 3
        assert other.code == 4
    finally:
        other.close()


def test_a_signal_while_a_command_is_started_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler raises inside Popen, once the process exists."""
    started: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            started.append(self.pid)
            signal.raise_signal(signal.SIGHUP)

    monkeypatch.setattr(command_module.subprocess, "Popen", Interrupted)
    with pytest.raises(SystemExit), ending_on_signals():
        RunningCommand(["sleep", "100"], {}, tmp_path / "output.txt")
    (left,) = started
    assert not psutil.pid_exists(left)


def test_what_a_command_prints_at_once_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            self.wait()  # it has printed before this process goes on

    monkeypatch.setattr(command_module.subprocess, "Popen", Late)
    assert RunningCommand(["echo", "told"], {}, tmp_path / "output.txt").text == "told\n"
