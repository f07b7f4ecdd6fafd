"""What chaos brought to light, each as a test of its own."""

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
    assert finished.code == 0
atexit.register(print, "taken down")
os._exit(5)
"""


def test_a_rank_that_is_done_is_not_taken_down_piece_by_piece(tmp_path: Path) -> None:
    """Whoever forked it ends it by `os._exit`; in its place ran seconds of torch's destructors."""
    script = tmp_path / "script.py"
    script.write_text("import os\nos._exit(0)\n")
    env = os.environ | {
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
        "LOCAL_RANK": "1",
        "RANK": "1",
    }
    command = [sys.executable, "-c", A_RANK, str(script)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (5, ""), ended.stderr
