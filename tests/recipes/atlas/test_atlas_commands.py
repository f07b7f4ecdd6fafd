"""What `test_guide_commands.py` does not start: our own launcher, another rule for the rate."""

from pathlib import Path

import pytest
from typed import place, run

OURS = (
    "lockstep run atlas --gpus 2 --config atlas/configs/train_config.yaml "
    "--set training.lr_scaling=sqrt"
)


@pytest.mark.timeout(300)
def test_lockstep_run_scales_the_rate_as_it_is_told(tmp_path: Path) -> None:
    ended = run(OURS, place("atlas", tmp_path))
    said = "  Base LR: 0.0001, Effective LR (scaled by 1.41421): 0.000141421"
    for line in ("lockstep: atlas on 2 x cpu (started by lockstep launch, gloo)", said):
        assert ended.lines.count(line) == 1, ended.out
    assert (ended.folder / "rehearsal" / "checkpoints" / "checkpoint_epoch_10.pt").is_dir()
