"""A command that a tool started is ended with all its children, however the tool is ended."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

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
