"""Every command of the guides is understood; what cannot start is refused in a line."""

import os
import sys
from pathlib import Path

import pytest

from lockstep.doctor.command import read_command
from lockstep.errors import LockstepError

RECIPES = Path(__file__).parents[2] / "recipes"
ENV = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("line", "launcher", "num", "port", "script"),
    [
        ("torchrun --nproc_per_node=4 train.py --lr 1e-3", "torchrun", 4, 29500, "train.py"),
        ("torchrun --nproc-per-node 2 --master_port=29501 t.py", "torchrun", 2, 29501, "t.py"),
        ("torchrun --nproc_per_node=2 --standalone t.py --x", "torchrun", 2, None, "t.py"),
        ("python -m torch.distributed.launch --nproc_per_node=8 --master_port=29500 a/t.py --c x",
         "torch.distributed.launch", 8, 29500, "a/t.py"),
        ("python -m torch.distributed.launch --nproc_per_node=2 --use_env t.py",
         "torch.distributed.launch", 2, 29500, "t.py"),
        ("python train.py --layers 50", "python", 1, None, "train.py"),
        ("python -u train.py", "python", 1, None, "train.py"),
        ("python -m mine.train --x", "python", 1, None, "-m"),
        ("lockstep run jit --gpus 2 --epochs 3", "lockstep", 2, None, "-m"),
        ("lockstep launch --gpus 3 t.py --x 1", "lockstep", 3, None, "t.py"),
        ("lockstep launch --gpus 3 -m mine.train --x 1", "lockstep", 3, None, "-m"),
        ("torchrun --nproc_per_node=gpu t.py", "torchrun", 6, 29500, "t.py"),
        ("python -m torch.distributed.run --nproc-per-node=auto t.py",
         "torchrun", 6, 29500, "t.py"),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 t.py", "torchrun", 2, 29500, "t.py"),
    ],
)  # fmt: skip
def test_a_guides_command(
    line: str, launcher: str, num: int, port: int | None, script: str, tmp_path: Path
) -> None:
    found = read_command(line.split(), ENV, tmp_path, num_gpus=6)
    assert (found.launcher, found.num_processes, found.port) == (launcher, num, port)
    assert found.script[0] == script
    assert found.folder == tmp_path


def test_variables_before_the_command_are_its_own(tmp_path: Path) -> None:
    found = read_command(["CUDA_VISIBLE_DEVICES=2,3", "python", "t.py"], ENV, tmp_path)
    assert found.env == {"CUDA_VISIBLE_DEVICES": "2,3"}


def test_five_variables_by_hand(tmp_path: Path) -> None:
    hand = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    found = read_command(["python", "t.py"], {**ENV, **hand}, tmp_path)
    assert (found.launcher, found.world_size, found.port) == ("env", 8, 29500)


def test_accelerate_reads_its_file() -> None:
    folder = RECIPES / "ctclip"
    words = ["accelerate", "launch", "--config_file", "accelerate_config_multi_node.yaml"]
    found = read_command([*words, "train.py", "--config", "c.yaml"], ENV, folder)
    assert (found.num_processes, found.num_nodes, found.port) == (4, 2, 29500)
    assert found.script == ("train.py", "--config", "c.yaml")


@pytest.mark.parametrize(
    ("recipe", "line", "num", "port"),
    [
        ("jit", "./train_multi_gpu.sh 4", 4, 29500),
        ("jit", "bash train.sh", 1, None),
        ("segmentation", "bash train_torchrun.sh", 2, None),
        ("segmentation", "bash train_ddp.sh", 2, 29500),
        ("ctclip", "bash scripts/train_multi_gpu.sh", 2, 29500),
    ],
)
def test_a_guides_shell_script_is_read_through(
    recipe: str, line: str, num: int, port: int | None
) -> None:
    found = read_command(line.split(), ENV, RECIPES / recipe)
    assert (found.num_processes, found.port) == (num, port)
    assert found.script[0] == "train.py"
    assert found.folder == RECIPES / recipe


def test_a_batch_script_is_read_for_what_it_asks_of_slurm(tmp_path: Path) -> None:
    slurm = tmp_path / "sbatch"
    slurm.write_text("#!/bin/sh\n")
    slurm.chmod(0o755)
    env = {**ENV, "PATH": f"{tmp_path}:{ENV['PATH']}"}
    words = ["sbatch", "--time=2:00:00", "scripts/train_slurm_multi_node.sh"]
    found = read_command(words, env, RECIPES / "ctclip")
    assert (found.num_nodes, found.batch["signal"]) == (2, "TERM@120")
    assert found.batch["time"] == "2:00:00"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("no-such-program t.py", "no program"),
        ("./nowhere.sh", "no file"),
        ("bash nowhere.sh", "no script"),
        ("torchrun --nproc_per_node=0 t.py", "is not a number of processes"),
        ("torchrun --nproc_per_node=2", "names no script"),
        ("torchrun --master_port=99999 t.py", "not a port"),
        ("lockstep run jitt", "no recipe 'jitt'"),
        ("lockstep plan", "does not train"),
        ("accelerate launch --config_file nowhere.yaml t.py", "cannot be read"),
        ("ls", "does not know the launcher"),
        ("A=1", "no command"),
    ],
)
def test_what_cannot_start_is_refused(line: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match=words) as caught:
        read_command(line.split(), ENV, tmp_path)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_processes: 2", "no distributed_type"),
        ("distributed_type: MULTI_GPU\nmixed_precision: no", "an unquoted `no`"),
    ],
)
def test_a_file_that_accelerate_would_refuse(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(LockstepError, match=words):
        read_command(["accelerate", "launch", "--config_file", "a.yaml", "t.py"], ENV, tmp_path)


def test_a_script_that_names_its_python_by_path_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "t.sh").write_text(f"{sys.executable} train.py\ntouch ran\n")
    with pytest.raises(LockstepError, match="by its path"):
        read_command(["bash", "t.sh"], ENV, tmp_path)
    assert not (tmp_path / "ran").exists()
