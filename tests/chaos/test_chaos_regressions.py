"""What chaos brought to light, each as a test of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

A_RANK = """
import atexit, os, sys
from lockstep.launch.worker import work
try:
    work(sys.argv[1])
except SystemExit as finished:
    code = finished.code
atexit.register(print, "taken down")
os._exit(code)
"""


def ended_rank(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a rank that is ended by whoever forked it."""
    (folder / "script.py").write_text(script)
    env = os.environ | {
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
        "LOCAL_RANK": "1",
        "RANK": "1",
    }
    command = [sys.executable, "-c", A_RANK, str(folder / "script.py")]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_a_rank_that_is_done_is_not_taken_down_piece_by_piece(tmp_path: Path) -> None:
    """Whoever forked it ends it by `os._exit`; in its place ran seconds of torch's destructors."""
    ended = ended_rank(tmp_path, "import os\nos._exit(5)\n")
    assert (ended.returncode, ended.stdout) == (5, ""), ended.stderr


def test_a_rank_stopped_by_ctrl_c_before_it_trains_is_the_cause(tmp_path: Path) -> None:
    """It left no record, and the launch ended with 143: the code of the ranks ended after it."""
    assert ended_rank(tmp_path, "raise KeyboardInterrupt\n").returncode == 130
    assert json.loads((tmp_path / "end.json").read_text())["code"] == 130
