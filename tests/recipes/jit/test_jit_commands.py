"""Every command of the guide runs as printed, in the recipe's folder, under rehearsal."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from lockstep import read_events

RECIPE = Path(__file__).parents[3] / "recipes" / "jit"
BIN = Path(sys.executable).parent

PLAIN = "--data_path ./data/train --batch_size 64 --epochs 100"
FORMS = {
    "16": "./train_multi_gpu.sh {n}",
    "17": "torchrun --nproc_per_node={n} --master_port=29500 train.py "
    + PLAIN
    + " --use_amp --use_wandb",
    "18": "python -m torch.distributed.launch --nproc_per_node={n} --master_port=29500 train.py "
    + PLAIN,
    "19": "torchrun --nproc_per_node={n} --master_port=29500 train.py --data_path ./data/train "
    "--model JiT-B/4 --img_size 64 --batch_size 64 --epochs 100 --lr 1e-4 --use_amp --use_wandb "
    '--wandb_project "jit-diffusion" --wandb_name "jit-v1-2gpu"',
    "20": "torchrun --nproc_per_node={n} --master_port=29501 train.py " + PLAIN + " --use_amp",
}

# The guide's own numbers of processes: its script on 2 and on 4, all else on 2.
RUNS = [("16", 4), *((form, 2) for form in FORMS)]

# The guide's ports are fixed, so these take turns, and waiting for one's turn counts as time.
pytestmark = [pytest.mark.usefixtures("fixed_ports"), pytest.mark.timeout(600)]


def run(command: str, folder: Path) -> str:
    shutil.copytree(RECIPE, folder, ignore=shutil.ignore_patterns("output", "data", "wandb"))
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "LOCKSTEP_REHEARSAL": "1"}
    ended = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize(("form", "ranks"), RUNS)
def test_the_guides_command_runs_as_printed(form: str, ranks: int, tmp_path: Path) -> None:
    out = run(FORMS[form].format(n=ranks), tmp_path / "jit")
    lines = out.splitlines()
    assert lines.count(f"lockstep: jit on {ranks} x cpu (started by torchrun, gloo)") == 1
    batch = f"Batch size: 64 per GPU, {64 * ranks} total (x {ranks}), {64 * ranks} effective"
    assert sum(line.startswith(batch) for line in lines) == 1
    rate = "0.0001" if form in ("16", "19") else "5e-05"
    assert f"Base LR: {rate}, rule: none, factor: 1, effective LR: {rate}" in lines
    assert sum(line.startswith("step ") for line in lines) == 4, "only the first rank prints"
    if form == "16":
        assert f"effective batch size: {64 * ranks}" in lines[0]

    folder = tmp_path / "jit" / "output" / "rehearsal"
    kinds = [event["event"] for event in read_events(folder)]
    assert kinds.count("evaluation") == 1
    assert kinds.count("checkpoint") == 1
    for rank in range(ranks):
        assert len([e for e in read_events(folder, rank) if e["event"] == "step"]) == 4
    for picture in (folder / "curves.png", folder / "samples" / "step_00000004.png"):
        with Image.open(picture) as image:
            assert min(image.size) >= 64
    offline = list(folder.glob("wandb/offline-run-*"))
    assert len(offline) == (1 if "--use_wandb" in FORMS[form] else 0), "one W&B run, rank 0's"


def test_the_script_for_one_gpu_runs(tmp_path: Path) -> None:
    out = run("./train.sh", tmp_path / "jit")
    assert "Batch size: 64 per GPU, 64 total (x 1), 64 effective (x 1 accumulated)" in out
    assert "lockstep: jit on 1 x cpu (started by python)" in out


def test_the_default_is_two_gpus_and_settings_pass_through(tmp_path: Path) -> None:
    command = "BATCH_SIZE=8 GRADIENT_ACCUMULATION_STEPS=2 USE_AMP=false ./train_multi_gpu.sh"
    assert "8 per GPU, 16 total (x 2), 32 effective (x 2 accumulated)" in run(
        command, tmp_path / "jit"
    )
