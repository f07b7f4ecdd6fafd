"""It learns: four episodes by heart, and which block to move to from the instruction alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import fit
from lockstep.testing import run_ranks
from lockstep_recipes.atlas.sample_data import make_episodes
from lockstep_recipes.atlas.task import AtlasTask


class RawGripper(AtlasTask):
    """A fault: the gripper's target as recorded, -1 or 1, which no sigmoid reaches."""

    def _standardised(self, actions):
        return torch.cat((super()._standardised(actions)[..., :-1], actions[..., -1:]), dim=-1)


class DeafTask(AtlasTask):
    """A fault: every instruction is the same to it."""

    def _predict(self, model, batch):
        return super()._predict(model, {**batch, "tokens": torch.ones_like(batch["tokens"])})


class Shuffled(AtlasTask):
    """Evaluates with each instruction exchanged for that of its twin."""

    def evaluate(self, model, batch, context):
        right = super().evaluate(model, batch, context)
        held_out = self.held_out
        other = {int(t[-2]): t for t in held_out.tokens}  # the colour is the last word but one
        a, b = other.values()
        swapped = torch.where((batch["tokens"] == a).all(dim=1, keepdim=True), b, a)
        wrong = super().evaluate(model, {**batch, "tokens": swapped}, context)
        return {**right, **{f"swapped_{name}": pair for name, pair in wrong.items()}}


def overfit(tmp_path: Path, settings: Any, kind: type[AtlasTask], steps: int, make_task: Any):
    root = make_episodes(tmp_path / "four", num=4, num_val=0, frames=8, size=56)
    task = make_task(
        type("Both", (Shuffled, kind), {}),
        model={"geom_output_dim": 128, "fusion_hidden_dim": 128, "fusion_layers": 2},
        data={"data_dir": root, "val_split": "train", "cache_images": True},
        weight_decay=0.0,
    )
    config = settings(
        tmp_path / "run",
        epochs=steps,
        max_steps=steps,
        batch={"batch_size": 32},
        schedule={"shape": "cosine", "warmup_steps": 20},
        evaluation={"every_steps": steps, "batch_size": 32, "save_best": False},
        checkpoint={"every_steps": steps},
        max_grad_norm=1.0,  # as the recipe has it
        log_every=100,
    )

    def action():
        return fit(task, config).metrics

    (measured,) = run_ranks(1, action, timeout_s=110)
    print({name: round(value, 4) for name, value in measured.items()})
    return measured


def is_learned(measured: dict[str, float]) -> bool:
    # The loss as well: against a target of -1 the accuracy may be right, but the loss stays.
    is_held = measured["gripper_accuracy"] > 0.95 and measured["gripper_loss"] < 0.05
    return measured["pose_l1"] < 0.05 and is_held


def test_four_episodes_are_learned_and_exchanged_instructions_hurt(
    tmp_path: Path, make_task, settings
) -> None:
    measured = overfit(tmp_path, settings, AtlasTask, 240, make_task)
    assert is_learned(measured)
    assert measured["pose_l1"] < measured["repeat_pose_l1"] < measured["mean_pose_l1"]
    assert measured["swapped_pose_l1"] > 10 * measured["pose_l1"]
    assert measured["swapped_pose_l1"] > 0.5


@pytest.mark.parametrize("kind", [AtlasTask, RawGripper])
def test_a_gripper_that_is_right_costs_nothing(kind, make_task, read_batch) -> None:
    task = make_task(kind)
    batch = read_batch(task, 24)
    assert set(batch["action"][:, 6].tolist()) == {-1.0, 1.0}
    answers = torch.cat((torch.zeros(24, 6), 30 * batch["action"][:, 6:]), dim=1)
    cost = task._loss(answers, batch).parts["gripper"][0]
    assert (float(cost) < 1e-6) == (kind is AtlasTask), "the fault is seen"


@pytest.mark.parametrize("kind", [AtlasTask, DeafTask])
def test_twins_differ_by_their_instruction_alone(kind, make_task) -> None:
    task = make_task(kind)
    data, model = task.train_data(), task.build_model().eval()
    twins = task.collate([data[2], data[6 + 2]])
    assert torch.equal(twins["images"][0], twins["images"][1])
    assert float((twins["action"][0] - twins["action"][1]).abs().max()) > 0.5
    with torch.no_grad():
        first, second = task._predict(model, twins)
    assert torch.equal(first, second) == (kind is DeafTask), "the fault is seen"
