"""What `test_guide_commands.py` does not start: training without a launcher, and sampling."""

from pathlib import Path

import pytest
from typed import place, run

from lockstep_recipes.protein.flags import build

TRAIN = (
    "python train.py --pdb_path data/cache --cache_dir data/cache --use_predefined_split "
    "--epochs 300 --batch_size 4 --use_discrete_diffusion --num_diffusion_steps 1000 "
    "--warmup_epochs 20 --learning_rate 5e-4"
)
SAMPLE = (
    "python -m lockstep_recipes.protein.sample --pdb_path rehearsal/sample_data/sample_0000.pt "
    "--checkpoint rehearsal/checkpoints/best_model.pt --output designs.fasta"
)


def test_a_seed_that_is_set_is_that_of_the_weights_and_the_split_too() -> None:
    task, run_config = build(["--set", "seed=3"])
    assert task.config.seed == run_config.seed == 3


@pytest.mark.timeout(300)
def test_without_a_launcher_it_trains_alone_and_samples(tmp_path: Path) -> None:
    ended = run(f"{TRAIN} && {SAMPLE}", place("protein", tmp_path))
    assert "DDP" not in ended.out
    assert "lockstep: protein on 1 x cpu (started by python)" in ended.out
    assert "designs.fasta: 1 designs of 1 chains" in ended.out
    assert (ended.folder / "designs.fasta").read_text().startswith(">sample_0000 design=0")
