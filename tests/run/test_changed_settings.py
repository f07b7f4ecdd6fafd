"""A run is taken up with other numbers: accepted with a word, or refused on all ranks."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from whole_run import NUM_SAMPLES, config_for, events, files, run, store, weights

from lockstep import Callback, PartialLoss, RunConfig, fit
from lockstep.callback import RunView
from lockstep.checkpoint import Checkpoint
from lockstep.data.batch import StepBatch
from lockstep.errors import ConfigError, LockstepError
from lockstep.plan import Contract
from lockstep.run.build import plan_run
from lockstep.run.progress import Progress
from lockstep.run.resume import fresh_contract
from lockstep.step.report import StepReport
from lockstep.task import Context
from lockstep.testing import TinyTask, run_ranks
from lockstep.trainer import RunResult


class Unseeded(TinyTask):
    """First weights that no seed decides, and a look at the average in the end."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(os.getpid()))
        return model

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> dict[str, float]:
        return {"seen": float(model[0].weight.detach().sum())}  # of the average


def test_averages_begin_with_the_first_rank_s_weights_on_every_rank(tmp_path: Path) -> None:
    first, second = run(tmp_path, 2, lambda: Unseeded(NUM_SAMPLES), averages=[0.9], max_steps=3)
    assert first.metrics["seen"] == second.metrics["seen"]


def test_a_changed_batch_is_refused_on_all_ranks_and_nothing_is_touched(tmp_path: Path) -> None:
    run(tmp_path, 2, epochs=1)
    before = files(tmp_path)
    errors = run(tmp_path, 2, batch={"batch_size": 4, "global_batch_size": 8, "drop_last": False})
    assert errors[0] == errors[1]
    assert errors[0][0] == "ConfigError"
    assert "batch_size 2 -> 4" in errors[0][1]
    assert files(tmp_path) == before


def test_an_accepted_larger_batch_finishes_the_epochs_that_were_asked_for(tmp_path: Path) -> None:
    """Steps get fewer; what was consumed stays consumed."""
    run(tmp_path, 1, epochs=1, batch={"batch_size": 2, "drop_last": False})
    assert store(tmp_path).steps()[-1] == 10
    batch = {"batch_size": 4, "drop_last": False}
    run(tmp_path, 1, batch=batch, accept_changes=True)
    checkpoint, _ = store(tmp_path).latest()
    assert checkpoint is not None
    assert checkpoint.meta["consumed"] == 2 * NUM_SAMPLES
    assert events(tmp_path, "epoch")[-1]["message"] == "20 of 20 samples, each once"


def test_an_accepted_global_batch_is_taken_on_other_ranks_too(tmp_path: Path) -> None:
    run(tmp_path, 2, max_steps=2)
    batch = {"batch_size": 2, "global_batch_size": 4, "drop_last": False}
    (refused,) = run(tmp_path, 1, batch=batch)
    assert "trained with global_batch_size 8, this run asks for 4" in refused[1]
    run(tmp_path, 1, batch=batch, accept_changes=True)
    checkpoint, _ = store(tmp_path).latest()
    assert checkpoint is not None
    assert checkpoint.meta["contract"]["plan"]["leaves_per_step"] == 2


def test_a_run_sent_back_to_an_older_checkpoint_is_not_overtaken_by_what_it_left(
    of_one: Path, tmp_path: Path
) -> None:
    run(tmp_path, 1)
    changes = {"rate": {"lr": 0.01}, "accept_changes": True}
    run(tmp_path, 1, resume=str(store(tmp_path).path(2)), **changes)
    sent_back = weights(tmp_path)
    assert store(tmp_path).steps()[-1] == 6
    name = "0.weight"
    assert not torch.equal(sent_back[name], weights(of_one)[name])


def test_a_run_sent_to_what_it_had_left_can_always_go_on_from_there(tmp_path: Path) -> None:
    """By a name that followed its checkpoint aside; and before anything is saved anew."""
    saving = {"checkpoint": {"every_epochs": 1, "name_epochs": True}}
    run(tmp_path, 1, **saving)
    left = weights(tmp_path)
    for epoch, step in ((1, 3), (2, 6)):
        (result,) = run(
            tmp_path, 1, resume=f"checkpoint_epoch_{epoch}.pt", max_steps=step, **saving
        )
        assert isinstance(result, RunResult), result
        assert store(tmp_path).steps()[-1] == result.step == step
    assert (tmp_path / "checkpoints" / "checkpoint_epoch_2.pt").resolve().name == "step_00000006"
    assert all(torch.equal(weights(tmp_path)[name], tensor) for name, tensor in left.items())
    run(tmp_path / "new", 1, resume=str(store(tmp_path).path(6)))  # nothing is left to do
    assert store(tmp_path / "new").steps() == [6]
    store(tmp_path / "new").set_aside_after(-1)  # as far as a kill might let it come
    assert "superseded_1_step_00000006: set aside" in run(tmp_path / "new", 1)[0][1]


def test_another_seed_in_mid_epoch_is_refused(tmp_path: Path) -> None:
    """It would be another order: some samples twice, some never."""
    run(tmp_path, 1, max_steps=2)
    (refused,) = run(tmp_path, 1, seed=1)
    assert isinstance(refused, tuple), "it went on"
    assert refused[0] == "ConfigError"
    assert "seed 0 -> 1" in refused[1]


def test_ranks_that_were_told_different_things_are_refused(tmp_path: Path) -> None:
    def one_rank() -> str:
        lr = 0.1 if os.environ["RANK"] == "0" else 0.2
        try:
            fit(TinyTask(NUM_SAMPLES), config_for(tmp_path, rate={"lr": lr}))
        except LockstepError as error:
            return str(error)
        return "finished"

    for said in run_ranks(2, one_rank, timeout_s=30):
        assert "ranks 0 and 1 see different settings" in said


def test_changed_optimizer_settings_need_a_word(tmp_path: Path) -> None:
    class Decayed(TinyTask):
        def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
            return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.3)

    run(tmp_path, 1, max_steps=2)
    (refused,) = run(tmp_path, 1, lambda: Decayed(NUM_SAMPLES))
    assert refused[0] == "ConfigError"
    assert "weight_decay 0.01 -> 0.3" in refused[1]
    run(tmp_path, 1, lambda: Decayed(NUM_SAMPLES), accept_changes=True)
    checkpoint, _ = store(tmp_path).latest()
    assert checkpoint is not None
    assert checkpoint.load("optimizer")["param_groups"][0]["weight_decay"] == 0.3


def contract_of(num_ranks: int = 2, num_samples: int = NUM_SAMPLES, **changes: Any) -> Contract:
    return fresh_contract(settings(**changes), range(num_samples), num_ranks)


def settings(**changes: Any) -> RunConfig:
    return RunConfig.parse({"batch": {"batch_size": 4}, **changes})


def saved(folder: Path, contract: Contract) -> Checkpoint:
    """Save a run with this contract, without its other settings."""
    saving = store(folder)
    saving.save(3, {"progress": Progress(step=3).state()}, {"contract": contract.to_json()})
    return saving.open("step_00000003")


@pytest.mark.parametrize(
    ("changes", "num_ranks", "num_samples"),
    [
        ({"batch": {"batch_size": 8}}, 2, NUM_SAMPLES),
        ({"batch": {"batch_size": 4, "accumulate": 2}}, 2, NUM_SAMPLES),
        ({"batch": {"batch_size": 4, "global_batch_size": 4}}, 1, NUM_SAMPLES),
        ({"rate": {"lr": 2e-3}}, 1, NUM_SAMPLES),
        ({"seed": 1}, 2, NUM_SAMPLES),
        ({}, 2, NUM_SAMPLES - 1),
        ({}, 5, 3 * NUM_SAMPLES),
    ],
)
def test_a_change_of_a_step_needs_accept_changes_and_then_takes_the_new_contract(
    changes: dict[str, Any], num_ranks: int, num_samples: int, tmp_path: Path
) -> None:
    stored = saved(tmp_path, contract_of(1 if num_ranks == 5 else 2))
    task = TinyTask()
    data = range(num_samples)
    with pytest.raises(ConfigError, match="checkpoint|too few"):
        plan_run(task, settings(**changes), data, num_ranks, stored, [])
    accepted = settings(**changes, accept_changes=True)
    contract, listed = plan_run(task, accepted, data, num_ranks, stored, [])
    assert contract == contract_of(num_ranks, num_samples, **changes)
    assert len(listed) == 1


def test_an_impossible_batch_is_not_listed_among_changes(tmp_path: Path) -> None:
    """It is one whatever the checkpoint holds, and accepting changes would not help."""
    fit(TinyTask(NUM_SAMPLES), config_for(tmp_path, max_steps=2))
    changes: dict[str, Any] = {"max_grad_norm": 2.0, "batch": {"batch_size": 8}}
    for accepts in ({}, {"accept_changes": True}):
        with pytest.raises(ConfigError) as caught:
            fit(TinyTask(5), config_for(tmp_path, **changes, **accepts))
        assert caught.value.problem == "a batch of 8 x 1 = 8 is larger than the 5 samples there are"
        assert caught.value.remedy == "pass batch_size=5, or drop_last=false"


class Larger(TinyTask):
    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.3)


def test_accepted_changes_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(TinyTask(NUM_SAMPLES), config_for(tmp_path, max_steps=2))
    assert "accepted a change" not in capsys.readouterr().out
    batch = {"batch_size": 4, "global_batch_size": 4, "drop_last": False}
    changes: dict[str, Any] = {"max_grad_norm": 2.0, "batch": batch, "accept_changes": True}
    fit(Larger(NUM_SAMPLES + 4), config_for(tmp_path, max_steps=4, **changes))
    lines = capsys.readouterr().out.splitlines()
    said = [line for line in lines if line.startswith("warning: accepted a change")]
    for text, line in zip(
        (
            "max_grad_norm None -> 2.0",
            "training data: ",
            "trained with global_batch_size 8, this run asks for 4",
            "optimizer: weight_decay 0.01 -> 0.3",
        ),
        said,
        strict=True,
    ):
        assert f"warning: accepted a change since the checkpoint: {text}" in line or text in line


class Scheduled(TinyTask):
    """One setting of its optimizer follows a schedule: weight decay, or the betas of OneCycleLR."""

    def __init__(self, weight_decay: float = 0.01, one_cycle: bool = False) -> None:
        super().__init__(NUM_SAMPLES)
        self.weight_decay = weight_decay
        self.one_cycle = one_cycle

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        decay = self.weight_decay
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
        if self.one_cycle:
            self.schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=20)
        return optimizer

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        made = super().loss(model, batch, context)
        is_bad = context.training and context.step == 3
        return replace(made, loss_sum=made.loss_sum * (float("nan") if is_bad else 1))


class Schedule(Callback):
    def on_step_end(self, run: RunView, batch: StepBatch, report: StepReport) -> None:
        group = run.optimizer.param_groups[0]
        if run.task.one_cycle:
            rate = group["lr"]
            run.task.schedule.step()
            group["lr"] = rate  # which `fit` sets; the betas stay
        else:
            group["weight_decay"] += 0.01


def train_scheduled(folder: Path, max_steps: int, task: TinyTask, **changes: Any) -> dict[str, Any]:
    config = config_for(folder, max_steps=max_steps, on_non_finite="skip", **changes)
    fit(task, config, [Schedule()])
    checkpoint, _ = store(folder).latest()
    assert checkpoint is not None
    group: dict[str, Any] = checkpoint.load("optimizer")["param_groups"][0]
    return group


@pytest.mark.parametrize("one_cycle", [False, True])
def test_a_run_whose_optimizer_settings_follow_a_schedule_resumes(
    one_cycle: bool, tmp_path: Path
) -> None:
    train_scheduled(tmp_path, 2, Scheduled(one_cycle=one_cycle))
    group = train_scheduled(tmp_path, 4, Scheduled(one_cycle=one_cycle))
    assert one_cycle or group["weight_decay"] == pytest.approx(0.05)


def test_a_run_whose_optimizer_settings_follow_a_schedule_rewinds(tmp_path: Path) -> None:
    fit(Scheduled(), config_for(tmp_path, max_steps=6, on_non_finite="rewind"), [Schedule()])
    assert store(tmp_path).steps()[-1] == 6


def test_a_changed_setting_is_found_behind_a_schedule(tmp_path: Path) -> None:
    train_scheduled(tmp_path, 2, Scheduled())
    with pytest.raises(ConfigError, match=r"weight_decay 0\.01 -> 0\.03"):
        train_scheduled(tmp_path, 4, Scheduled(weight_decay=0.03))  # as scheduled at step 2
    group = train_scheduled(tmp_path, 4, Scheduled(weight_decay=0.3), accept_changes=True)
    assert group["weight_decay"] == pytest.approx(0.32)


def test_a_checkpoint_without_the_settings_as_built_is_compared_by_its_own(tmp_path: Path) -> None:
    run(tmp_path / "new", 1, max_steps=2)
    checkpoint, _ = store(tmp_path / "new").latest()
    assert checkpoint is not None
    meta = {k: v for k, v in checkpoint.meta.items() if k != "optimizer_as_built"}
    assert len(meta) < len(checkpoint.meta)
    store(tmp_path).save(2, {part: checkpoint.load(part) for part in checkpoint.parts}, meta)
    with pytest.raises(ConfigError, match=r"weight_decay 0\.01 -> 0\.3"):
        fit(Scheduled(weight_decay=0.3), config_for(tmp_path))
    (result,) = run(tmp_path, 1)
    assert result.step == 6


@pytest.mark.parametrize(
    ("old", "new", "says", "after"),
    [
        ("AdamW", "RMSprop", "alpha None -> 0.99", "RMSprop goes on"),
        ("SGD", "AdamW", "saved state does not fit", "saved state does not fit"),
    ],
)
def test_another_kind_of_optimizer_is_refused_or_begins_anew(
    old: str, new: str, says: str, after: str, tmp_path: Path
) -> None:
    class Moved(TinyTask):
        kind = old

        def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
            more = {"momentum": 0.9} if self.kind == "SGD" else {}
            kind: type[torch.optim.Optimizer] = getattr(torch.optim, self.kind)
            return kind(model.parameters(), lr=lr, **more)  # type: ignore[call-arg]

    run(tmp_path, 1, lambda: Moved(NUM_SAMPLES), max_steps=2)
    Moved.kind = new
    (refused,) = run(tmp_path, 1, lambda: Moved(NUM_SAMPLES))
    assert says in refused[1]
    (result,) = run(tmp_path, 1, lambda: Moved(NUM_SAMPLES), accept_changes=True)
    assert after in (f"{new} goes on" if isinstance(result, RunResult) else result[1])
