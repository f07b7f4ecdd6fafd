"""JiT's own kernels against its plain block, on a GPU: values, gradients, bits, and a run."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep import RunConfig, fit, read_events
from lockstep_recipes.jit import fused
from lockstep_recipes.jit.model import Block
from lockstep_recipes.jit.sample_data import make_images
from lockstep_recipes.jit.task import JiTConfig, JiTTask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # torch's compiler warns of its own doings
    pytest.mark.skipif(not fused.HAS_TRITON, reason="triton is not installed"),
]

WIDTH, HEADS = 768, 12
Found = dict[str, Tensor]


def make(tokens: int, images: int = 4) -> tuple[Block, list[Tensor]]:
    """Return a block whose every weight matters, and inputs that bf16 can hold."""
    torch.manual_seed(0)
    block = Block(WIDTH, HEADS, 0.0).cuda()
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.ndim == 1:
                parameter.uniform_(-0.5, 0.5)
    angle = torch.rand(tokens, 1, WIDTH // HEADS // 2).cuda() * 6
    x = torch.randn(images, tokens, WIDTH).cuda().bfloat16().float()
    return block, [x, torch.randn(images, WIDTH).cuda(), angle.cos(), angle.sin()]


def results(block: Block, inputs: list[Tensor], low: torch.dtype | None = None) -> Found:
    """Return the output and every gradient; the attention is of the kind that repeats its bits."""
    x, condition, cos, sin = inputs
    x = x.detach().to(low or x.dtype, copy=True).requires_grad_()
    condition = condition.detach().clone().requires_grad_()
    block.zero_grad()
    with sdpa_kernel(SDPBackend.MATH):
        with torch.autocast("cuda", low, enabled=low is not None):
            y = block(x, condition, cos, sin)
        generator = torch.Generator("cuda").manual_seed(1)
        y.backward(torch.randn(y.shape, device="cuda", generator=generator).to(y.dtype))
    found = {"y": y, "x": x.grad, "condition": condition.grad}
    found |= {name: parameter.grad for name, parameter in block.named_parameters()}
    return {name: value.detach().double() for name, value in found.items()}


def errors(found: Found, wanted: Found) -> dict[str, float]:
    """Return the norm of each value's error over the value's norm."""
    return {k: ((found[k] - v).norm() / v.norm()).item() for k, v in wanted.items()}


def exact(block: Block, inputs: list[Tensor]) -> Found:
    """Return what the plain block computes in float64."""
    assert block.fused is None
    return results(copy.deepcopy(block).double(), [value.double() for value in inputs])


@pytest.mark.parametrize("tokens", [256, 288, 257])
def test_a_fused_block_is_the_plain_one(tokens: int) -> None:
    block, inputs = make(tokens)
    wanted = exact(block, inputs)
    lows = torch.bfloat16, torch.float16
    plain = {low: errors(results(block, inputs, low), wanted) for low in lows}
    assert fused.fits(block)
    block.fused = fused.forward
    full = errors(results(block, inputs), wanted)
    assert max(full.values()) < 2e-5, full
    for low, allowed in plain.items():
        for name, error in errors(results(block, inputs, low), wanted).items():
            assert error < 1.2 * allowed[name] + 1e-4, (low, name, error, allowed[name])


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_the_same_block_twice_has_the_same_bits(low: torch.dtype | None) -> None:
    block, inputs = make(288, images=32)
    block.fused = fused.forward
    once = results(block, inputs, low)
    for _ in range(3):
        again = results(block, inputs, low)
        assert [name for name in once if not torch.equal(once[name], again[name])] == []


def test_a_compiled_block_takes_any_batch_and_needs_no_gradient() -> None:
    torch._dynamo.reset()
    block, inputs = make(288, images=6)
    plain = copy.deepcopy(block)
    block.fused = fused.forward
    block.compile()
    for images, tokens in ((6, 288), (5, 288), (3, 257)):
        x, condition, cos, sin = inputs
        some = [x[:images, :tokens], condition[:images], cos[:tokens], sin[:tokens]]
        wanted = exact(plain, some)
        found = errors(results(block, some), wanted)
        assert max(found.values()) < 2e-5, found
        with torch.no_grad():
            y = block(*some).double()
        assert ((y - wanted["y"]).norm() / wanted["y"].norm()).item() < 2e-5


def losses(folder: Path, data: Path, batch: int, how: bool | str = True) -> list[float]:
    """Train a small JiT, compiled and in bf16, with an evaluation at the end."""
    torch._dynamo.reset()
    task = JiTTask(
        JiTConfig(
            variant="JiT-T/4",
            image_size=32,
            data=data,
            val_fraction=0.1,
            grid=3,
            num_fid_samples=0,
            sample_steps=2,
        )
    )
    config = {
        "output_dir": str(folder),
        "max_steps": 8,
        "batch": {"batch_size": batch},
        "rate": {"lr": 5e-4},
        "log_every": 1,
        "evaluation": {"every_steps": 8},
        "checkpoint": {"every_steps": 8},
        "sinks": {"curves": False},
        "precision": "bf16",
        "compile": how,
    }
    fit(task, RunConfig.parse(config))
    return [event["loss"] for event in read_events(folder) if event["event"] == "step"]


@pytest.mark.timeout(400)  # three compilations of everything
@pytest.mark.parametrize("batch", [24, 64])
def test_a_compiled_run_loses_as_with_plain_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    data = make_images(tmp_path / "images", num=256, size=32)
    calls = []
    forward = fused.forward
    monkeypatch.setattr(fused, "fits", lambda block: calls.append(block))  # None: plain
    plain = losses(tmp_path / "plain", data, batch)
    assert len(calls) == 6
    monkeypatch.undo()
    assert fused.forward is forward
    for how in (True, "graphs"):
        found = losses(tmp_path / f"fused {how}", data, batch, how)
        assert found == pytest.approx(plain, rel=0.01), how
    assert min(plain) < 0.9 * plain[0]
