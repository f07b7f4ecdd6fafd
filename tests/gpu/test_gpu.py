"""What only hardware can show. Counted and skipped where there is no GPU."""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from lockstep import PartialLoss, RunConfig, Task, fit, read_events
from lockstep.errors import NonFiniteError
from lockstep.task import Context
from lockstep.testing import TinyTask, run_ranks

pytestmark = pytest.mark.gpu


def train(folder: Path, task: Task | None = None, **values: object) -> None:
    config = RunConfig.parse(
        {
            "output_dir": str(folder),
            "max_steps": 8,
            "batch": {"batch_size": 4, "global_batch_size": 16},
            "rate": {"lr": 0.05},
            "log_every": 1,
            "averages": [0.9],
            "checkpoint": {"every_steps": 4},
            "sinks": {"curves": False},
            **values,
        }
    )
    fit(task or TinyTask(), config)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / "step_00000008" / "model.safetensors")


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in read_events(folder) if event["event"] == "step"]


def test_a_gpu_run_matches_the_cpu_in_float64(tmp_path: Path) -> None:
    train(tmp_path / "gpu", device="cuda")
    train(tmp_path / "cpu", device="cpu")
    for name, weight in weights(tmp_path / "cpu").items():
        torch.testing.assert_close(weights(tmp_path / "gpu")[name], weight, rtol=0, atol=1e-9)


def test_resume_on_a_gpu_equals_never_stopping_bit_for_bit(tmp_path: Path) -> None:
    train(tmp_path / "straight")
    train(tmp_path / "resumed", max_steps=4)
    train(tmp_path / "resumed")
    for name, weight in weights(tmp_path / "straight").items():
        assert torch.equal(weights(tmp_path / "resumed")[name], weight), name


def test_two_ranks_may_share_a_gpu_and_still_equal_one(tmp_path: Path) -> None:
    # A process that has touched CUDA cannot fork ranks that use it: a fresh one does.
    for label, num_ranks in (("one", "1"), ("two", "2")):
        words = ["tiny", num_ranks, str(tmp_path / label)]
        subprocess.run([sys.executable, __file__, *words], check=True, timeout=110)
    for name, weight in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], weight, rtol=0, atol=1e-12)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_on_a_gpu(tmp_path: Path, precision: str) -> None:
    train(tmp_path, precision=precision, max_steps=40)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


# --- Exact mode: ranks that share the GPU, over gloo, in bf16 ---------------------------------


class Words(nn.Module):
    """Attention with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.tokens(tokens)) @ self.tokens.weight.T


class WordsTask(Task):
    name = "words"

    def build_model(self) -> nn.Module:
        return Words()

    def train_data(self) -> list[Tensor]:
        return list(torch.randint(0, 64, (256, 33), generator=torch.Generator().manual_seed(0)))

    def loss(self, model: nn.Module, batch: Tensor, context: Context) -> PartialLoss:
        scores, wanted = model(batch[:, :-1]).transpose(1, 2).float(), batch[:, 1:]
        each = functional.cross_entropy(scores, wanted, reduction="none")
        counted = wanted > 9
        return PartialLoss((each * counted).sum(), counted.sum())


class PicturesTask(WordsTask):
    """Convolutions, channels last, with batch normalisation."""

    name = "pictures"

    def build_model(self) -> nn.Module:
        layers = (
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 8),
        )
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def train_data(self) -> list[Tensor]:
        return list(torch.randn(256, 3, 24, 24, generator=torch.Generator().manual_seed(0)))

    def loss(self, model: nn.Module, batch: Tensor, context: Context) -> PartialLoss:
        wanted = batch.flatten(1)[:, :8].argmax(dim=1)
        return PartialLoss(
            functional.cross_entropy(model(batch), wanted, reduction="sum"), len(batch)
        )


TASKS = {task.name: task for task in (WordsTask, PicturesTask)}


def train_exactly(name: str, folder: Path, more: dict[str, Any]) -> None:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 12,
        "batch": {"batch_size": 8, "global_batch_size": 32},
        "rate": {"lr": 1e-3},
        "precision": "bf16",
        "averages": [0.9],
        "checkpoint": {"every_steps": 4},
        "sinks": {"curves": False},
        "exact": True,
        **more,
    }
    fit(TASKS[name](), RunConfig.parse(values))


def state_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted((folder / "checkpoints" / "step_00000012").glob("*.safetensors")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


PLANS = {"1": [(1, 12)], "2": [(2, 12)], "1 again": [(1, 12)], "2 to 1": [(2, 5), (1, 12)]}
"""Which numbers of ranks train, and up to which step."""


@pytest.mark.parametrize("how", ["eager", "compiled", "graphs"])
@pytest.mark.parametrize("name", TASKS)
def test_one_hash_for_one_and_two_ranks(name: str, how: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, __file__, name, how, str(tmp_path)], check=True, timeout=280)
    hashes = {plan: state_of(tmp_path / plan) for plan in PLANS}
    print(name, how, hashes)
    assert len(set(hashes.values())) == 1, hashes


# --- Faults inside a step ---------------------------------------------------------------------


class Hungry(TinyTask):
    """Asks the GPU for more than it has, in the backward pass, with more than two samples."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        made = super().loss(model, batch, context)
        if context.training and context.step >= 3 and len(batch["x"]) > 2:
            made.loss_sum.register_hook(lambda grad: torch.empty(1 << 45, device=grad.device))
        return made


class Poisoned(TinyTask):
    """Its loss is no number at step 5."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        made = super().loss(model, batch, context)
        bad = float("nan") if context.step == 5 and context.place == 1 else 1.0
        return PartialLoss(made.loss_sum * bad, made.weight, made.parts)


def test_a_gpu_out_of_memory_goes_on_with_half(tmp_path: Path) -> None:
    train(tmp_path / "straight")
    train(tmp_path / "hit", Hungry())
    (event,) = [e for e in read_events(tmp_path / "hit") if e["event"] == "out_of_memory"]
    assert (event["step"], event["batch_size"]) == (3, 2)
    for name, weight in weights(tmp_path / "straight").items():
        torch.testing.assert_close(weights(tmp_path / "hit")[name], weight, rtol=0, atol=1e-12)


def test_a_bad_number_freezes_the_gpu_s_weights_until_it_is_noticed(tmp_path: Path) -> None:
    """Nothing waits for the device: the look comes at step 8, the state kept is that of step 5."""
    with pytest.raises(NonFiniteError, match="step 6: "):
        train(tmp_path / "run", Poisoned(), log_every=8, checkpoint={"every_steps": 8})
    train(tmp_path / "five", max_steps=5)
    kept = load_file(tmp_path / "run" / "non_finite" / "step_00000005" / "model.safetensors")
    five = load_file(tmp_path / "five" / "checkpoints" / "step_00000005" / "model.safetensors")
    assert all(torch.equal(kept[name], five[name]) for name in five)


class Clipped(TinyTask):
    """Float32 weights under a fused optimizer, which may divide the gradients itself."""

    def __init__(self, is_watched: bool) -> None:
        super().__init__()
        self.is_watched = is_watched
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []

    def build_model(self) -> nn.Module:
        return super().build_model().float()

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        floats = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
        return super().loss(model, floats, context)

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
        if self.is_watched:  # somebody looks at the gradients: they are divided before
            optimizer.register_step_pre_hook(lambda *_: self.before.append(norm_of(model)))
        optimizer.register_step_post_hook(lambda *_: self.after.append(norm_of(model)))
        return optimizer


def norm_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()


def test_gradients_divided_in_the_optimizer_or_before_it_move_the_weights_alike(
    tmp_path: Path,
) -> None:
    watched, alone = Clipped(is_watched=True), Clipped(is_watched=False)
    train(tmp_path / "inside", alone, max_grad_norm=0.5)
    train(tmp_path / "before", watched, max_grad_norm=0.5)
    for name, weight in weights(tmp_path / "before").items():
        torch.testing.assert_close(weights(tmp_path / "inside")[name], weight, rtol=0, atol=1e-5)
    assert len(alone.after) == len(watched.before) == 8
    for seen in (watched.before, watched.after, alone.after):
        torch.testing.assert_close(torch.stack(seen), torch.stack(watched.before))
    assert 0.4 < max(watched.before) < 0.5001


if __name__ == "__main__":
    task, flag, where = sys.argv[1:]
    if task == "tiny":
        run_ranks(int(flag), train, Path(where))
    else:
        for label, stages in PLANS.items():
            for num_ranks, stop in stages:
                how = {"eager": False, "compiled": True}.get(flag, flag)
                more = {"compile": how, "max_steps": stop}
                run_ranks(num_ranks, train_exactly, task, Path(where) / label, more, timeout_s=120)
