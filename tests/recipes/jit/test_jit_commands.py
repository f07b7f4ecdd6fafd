"""What `test_guide_commands.py` does not start: the script's defaults and settings."""

import shlex
from pathlib import Path

from typed import place, run, stand_in


def test_the_default_is_two_gpus_and_settings_pass_through(tmp_path: Path) -> None:
    words = 'printf "%q " "$@"; echo'
    command = "BATCH_SIZE=8 GRADIENT_ACCUMULATION_STEPS=2 USE_AMP=false ./train_multi_gpu.sh"
    path = stand_in("torchrun", words, tmp_path)
    total, started = run(command, place("jit", tmp_path), PATH=path).lines
    assert total == "GPUs: 2, batch size per GPU: 8, effective batch size: 32"
    assert shlex.split(started) == [
        *("--nproc_per_node=2", "--master_port=29500", "train.py", "--data_path", "./data/train"),
        *("--batch_size", "8", "--gradient_accumulation_steps", "2", "--lr", "1e-4"),
    ]
