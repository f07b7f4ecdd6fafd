"""What only hardware can show. Counted and skipped where there is no GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep import RunConfig, fit, read_events
from lockstep.testing import TinyTask, run_ranks

pytestmark = pytest.mark.gpu


def train(folder: Path, **values: object) -> None:
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
    fit(TinyTask(), config)


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
    subprocess.run([sys.executable, __file__, str(tmp_path)], check=True, timeout=110)
    for name, weight in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], weight, rtol=0, atol=1e-12)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_on_a_gpu(tmp_path: Path, precision: str) -> None:
    train(tmp_path, precision=precision, max_steps=40)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


if __name__ == "__main__":
    for label, num_ranks in (("one", 1), ("two", 2)):
        run_ranks(num_ranks, train, Path(sys.argv[1]) / label)
