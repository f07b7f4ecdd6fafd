"""Every command of the guide runs as printed, in the recipe's folder, under rehearsal."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from PIL import Image

from lockstep import read_events
from lockstep.testing import free_port

RECIPE = Path(__file__).parents[3] / "recipes" / "segmentation"
BIN = Path(sys.executable).parent
FOLDER = Path("log") / "res50_ASPP_lorm" / "rehearsal"

# form: (command, ranks, images per GPU, effective rate)
FORMS = {
    "21 torchrun": ("bash train_torchrun.sh", 2, 8, 0.002),
    "21 ddp": ("bash train_ddp.sh", 2, 8, 0.002),
    "22": ("torchrun --nproc_per_node=4 --standalone train.py --distributed", 4, 16, 0.004),
    "23": (
        "python -m torch.distributed.launch --nproc_per_node=2 --use_env train.py --distributed",
        2,
        16,
        0.002,
    ),
    "24": ("python train.py --layers 50 --model_type res50_ASPP_lorm", 1, 16, 0.001),
    "25": ("python train.py --distributed --local_rank=0", 1, 16, 0.001),
}

pytestmark = [pytest.mark.usefixtures("fixed_ports"), pytest.mark.timeout(600)]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "LOCKSTEP_REHEARSAL": "1",
        "OMP_NUM_THREADS": "1",
    }


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    shutil.copytree(RECIPE, folder, ignore=shutil.ignore_patterns("log", "dataset"))
    try:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=110,
        )
    except subprocess.TimeoutExpired as hang:
        said = [(text or b"").decode() for text in (hang.stdout, hang.stderr)]
        pytest.fail("\n".join(["still running after 110 s:", *said]))


@pytest.mark.parametrize("form", FORMS)
def test_the_guides_command_runs_as_printed(form: str, tmp_path: Path) -> None:
    command, ranks, batch, rate = FORMS[form]
    ended = run(command, tmp_path / "segmentation")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    by = "torchrun, gloo" if ranks > 1 else "python"
    assert lines.count(f"lockstep: segmentation on {ranks} x cpu (started by {by})") == 1
    assert lines.count(f"Effective lr : {rate:g}") == 1, "only the first rank prints"
    total = batch * ranks
    start = f"Batch size: {batch} per GPU, {total} total (x {ranks}), {total} effective"
    assert sum(line.startswith(start) for line in lines) == 1
    assert sum(line.startswith("step ") for line in lines) == 4
    warned = any("but the effective batch is still 16" in line for line in lines)
    assert warned == (ranks > 1 and total == 16), "a rate that grew with a batch that did not"
    assert sum(line.startswith(" * IOU_All 0.") for line in lines) == 1

    folder = tmp_path / "segmentation" / FOLDER
    said = next(line for line in lines if line.startswith("Epoch["))
    assert (folder / "log.txt").read_text() == said + "\n"
    assert "], iou_all[0." in said
    kinds = [event["event"] for event in read_events(folder)]
    assert kinds.count("evaluation") == kinds.count("checkpoint") == 1
    for rank in range(ranks):
        assert len([e for e in read_events(folder, rank) if e["event"] == "step"]) == 4
    with Image.open(folder / "samples" / "step_00000004.png") as picture:
        assert picture.width > 3 * 48
    assert len(list((tmp_path / "segmentation" / "log").rglob("events.out.tfevents.*"))) == 1
    if form == "24":
        check_tensorboard(tmp_path / "segmentation")


def check_tensorboard(folder: Path) -> None:
    """Form 26: `tensorboard --logdir=./log` finds what was written; the port is ours."""
    port = free_port()
    command = ["tensorboard", "--logdir=./log", f"--port={port}", "--load_fast=false"]
    server = subprocess.Popen(
        [str(BIN / command[0]), *command[1:]],
        cwd=folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline, found = time.monotonic() + 60, {}
        while not found and time.monotonic() < deadline:
            time.sleep(0.3)
            try:
                url = f"http://127.0.0.1:{port}/data/plugin/scalars/tags"
                with urllib.request.urlopen(url, timeout=5) as answer:
                    found = json.load(answer)
            except (OSError, ValueError):
                assert server.poll() is None, "tensorboard ended"
        (tags,) = found.values()
        assert "val/miou" in tags
        assert "train/loss" in tags
    finally:
        server.terminate()
        server.wait(20)


def test_torchrun_without_the_flag_is_refused_by_its_name(tmp_path: Path) -> None:
    ended = run("torchrun --nproc_per_node=2 --standalone train.py", tmp_path / "segmentation")
    assert ended.returncode != 0
    said = [line for line in ended.stderr.splitlines() if line.startswith("lockstep: ")]
    assert said == ["lockstep: 2 processes were started without --distributed"]
    assert "exitcode: 2" in ended.stderr.replace(" ", "").replace("exitcode:", "exitcode: ")
    assert "step " not in ended.stdout, "nothing was trained"


def test_the_debug_configuration_is_strict_json_with_the_guides_keys() -> None:
    text = (RECIPE / ".vscode" / "launch.json").read_text()
    (entry,) = json.loads(text)["configurations"]
    assert entry == {
        "name": "Debug DDP Training",
        "type": "python",
        "request": "launch",
        "program": "${workspaceFolder}/train.py",
        "console": "integratedTerminal",
        "args": [
            *("--distributed", "--local_rank", "0"),
            *("--layers", "50", "--model_type", "res50_ASPP_lorm"),
        ],
        "env": {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "12355",
        },
    }
