"""`lockstep run RECIPE --gpus 2`: from the command line to two ranks and one exit code."""

import json
import socket
from pathlib import Path

from processes import LAUNCH, LOCKSTEP, Start


def test_a_recipe_trains_on_two_ranks_and_a_hopeless_request_is_refused_once(
    tmp_path: Path, start: Start
) -> None:
    jit = (LOCKSTEP, "run", "jit", "--gpus", "2", "--num_workers", "0")
    sizes = ("--batch_size", "4", "--epochs", "1", "--output_dir")
    rehearsed = start(*jit, *sizes, tmp_path, env={"LOCKSTEP_REHEARSAL": "1"})
    refused = start(*jit, *sizes, tmp_path / "other", "--data_path", tmp_path / "nowhere")

    assert refused.finish() == 2, refused.text
    assert refused.text.count("lockstep: ") == 1, refused.text
    assert str(tmp_path / "nowhere") in refused.text
    assert "\n  try: " in refused.text
    assert "Traceback" not in refused.text

    assert rehearsed.finish() == 0, rehearsed.text
    assert rehearsed.text.count("lockstep: jit on 2 x ") == 1
    assert "Traceback" not in rehearsed.text
    run = json.loads((tmp_path / "rehearsal" / "config.json").read_text())
    assert run["world_size"] == 2


def test_a_rank_that_is_killed_is_named(tmp_path: Path, start: Start) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, time\nos.environ['RANK'] == '1' and os.kill(os.getpid(), 9)\ntime.sleep(60)\n"
    )
    launched = start(*LAUNCH, "2", script)
    assert launched.finish() == 137
    assert f"lockstep: rank 1 on {socket.gethostname()} was killed by SIGKILL" in launched.text
    assert "\n  try: start the same command again" in launched.text
