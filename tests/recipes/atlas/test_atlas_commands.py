"""Every command of the guide runs as printed, from the folder above `atlas`, under rehearsal."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from lockstep import read_events

RECIPE = Path(__file__).parents[3] / "recipes" / "atlas"
BIN = Path(sys.executable).parent
CONFIG = "--config atlas/configs/train_config.yaml"
TEN = f"torchrun --nproc_per_node=8 atlas/train.py {CONFIG}"
ELEVEN = (
    "python -m torch.distributed.launch --nproc_per_node=8 --master_port=29500 "
    f"atlas/train.py {CONFIG}"
)
TWELVE = f"""
trap 'kill $started 2>/dev/null' EXIT
export MASTER_ADDR=localhost
export MASTER_PORT=29500
export WORLD_SIZE=8
for k in 0 1 2 3 4 5 6 7; do
  export RANK=$k
  export LOCAL_RANK=$k
  CUDA_VISIBLE_DEVICES=$k python atlas/train.py {CONFIG} &
  started="$started $!"
done
for k in $started; do wait $k || exit 1; done
"""
FOURTEEN = f"CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node=4 atlas/train.py {CONFIG}"
OURS = f"lockstep run atlas --gpus 2 {CONFIG} --set training.lr_scaling=sqrt"

# form: (command, ranks, effective rate, started by)
FORMS = {
    "11": (ELEVEN, 8, 8e-4, "torchrun"),
    "12": (TWELVE, 8, 8e-4, "env"),
    "14": (FOURTEEN, 4, 4e-4, "torchrun"),
    "ours": (OURS, 2, 1e-4 * 2**0.5, "torchrun"),
}

pytestmark = [pytest.mark.usefixtures("fixed_ports"), pytest.mark.timeout(600)]


def run(command: str, folder: Path) -> list[str]:
    if not (folder / "atlas").exists():
        shutil.copytree(RECIPE, folder / "atlas")
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "LOCKSTEP_REHEARSAL": "1"}
    started = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=env | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = started.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)  # the processes of form 12 are bash's children
        out, err = started.communicate()
        pytest.fail("\n".join(["still running after 150 s:", out, err]))
    assert started.returncode == 0, out + err
    return out.splitlines()


def check(lines: list[str], ranks: int, rate: float) -> None:
    start = lines.index("Training setup:")
    assert lines[start + 1 : start + 5] == [
        "  Distributed: True",
        f"  World size: {ranks}",
        "  Rank: 0, Local rank: 0",
        f"  Base LR: 0.0001, Effective LR (scaled by {rate / 1e-4:g}): {rate:g}",
    ]
    assert lines.count("Training setup:") == 1, "only the first rank prints"
    batch = f"Batch size: 8 per GPU, {8 * ranks} total (x {ranks}), {16 * ranks} effective"
    assert sum(line.startswith(batch) for line in lines) == 1


def test_the_guides_run_and_its_resume(tmp_path: Path) -> None:
    """Form 15 is form 10 with a key in the environment; form 13 goes on from its tenth epoch."""
    lines = run(f"export WANDB_API_KEY=your_key\n{TEN}", tmp_path)
    check(lines, 8, 8e-4)
    assert sum(line.startswith("step ") for line in lines) == 10
    folder = tmp_path / "rehearsal"
    assert (folder / "checkpoints" / "checkpoint_epoch_10.pt").is_dir()
    assert (folder / "checkpoints" / "best_model.pt").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["atlas", "rehearsal"]
    with Image.open(folder / "samples" / "step_00000010.png") as picture:
        assert picture.width > 600
    (measured,) = [e["metrics"] for e in read_events(folder) if e["event"] == "evaluation"]
    names = {"pose_l1", "pose_l2", "gripper_accuracy"}
    both = {f"{kind}{name}" for kind in ("", "mean_", "repeat_") for name in names}
    assert {"loss", "pose_loss", "gripper_loss", *both} == set(measured)

    lines = run(f"{TEN} --resume checkpoints/checkpoint_epoch_10.pt", tmp_path)
    check(lines, 8, 8e-4)
    assert sum(line.startswith("resumed at step 10 from ") for line in lines) == 1
    assert [line.split()[1] for line in lines if line.startswith("epoch ")] == ["11", "12"]
    assert len([e for e in read_events(folder, rank=7) if e["event"] == "step"]) == 12


@pytest.mark.parametrize("form", FORMS)
def test_the_guides_other_commands_run_as_printed(form: str, tmp_path: Path) -> None:
    command, ranks, rate, by = FORMS[form]
    lines = run(command, tmp_path)
    assert lines.count(f"lockstep: atlas on {ranks} x cpu (started by {by}, gloo)") == 1
    check(lines, ranks, rate)
    assert sum(line.startswith("step ") for line in lines) == 10
    assert (tmp_path / "rehearsal" / "checkpoints" / "checkpoint_epoch_10.pt").is_dir()
