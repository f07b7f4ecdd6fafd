"""A block's own kernels compute what the block does, and are chosen only where they can run.

Run as a script, this file interprets the kernels on the CPU and compares them with the
plain block; triton decides at import whether to interpret, hence a process of its own.
"""

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor import config as compiler

from lockstep_recipes.jit import fused
from lockstep_recipes.jit.model import VARIANTS, Block, JiT, build_jit, modulate
from lockstep_recipes.jit.task import JiTTask, compiler_options

NO_TRITON = importlib.util.find_spec("triton") is None


# --- Whether the kernels are right, interpreted -----------------------------------------------


def make(width: int, heads: int, tokens: int, images: int) -> tuple[Block, list[Tensor]]:
    """Return a block in float64 whose every weight matters, and inputs."""
    torch.manual_seed(0)
    block = Block(width, heads, 0.0).double()
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.ndim == 1:
                parameter.uniform_(-0.5, 0.5)
    angle = torch.rand(tokens, 1, width // heads // 2).double() * 6
    x, condition = torch.randn(images, tokens, width), torch.randn(images, width)
    return block, [x.double(), condition.double(), angle.cos(), angle.sin()]


def results(block: Block, inputs: list[Tensor], *, fp16: bool = False) -> dict[str, Tensor]:
    """Return the output and every gradient."""
    x, condition, cos, sin = inputs
    x, condition = x.clone().requires_grad_(), condition.clone().requires_grad_()
    block.zero_grad()
    with torch.autocast("cpu", torch.float16, enabled=fp16):
        y = block(x, condition, cos, sin)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape, dtype=torch.float64).to(y.dtype))
    found = {"y": y, "x": x.grad, "condition": condition.grad}
    found |= {name: parameter.grad for name, parameter in block.named_parameters()}
    return {name: value.detach().double() for name, value in found.items()}


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Return the norm of each value's error over the value's norm."""
    return {k: ((found[k] - v).norm() / v.norm()).item() for k, v in wanted.items()}


def compare(width: int, heads: int, tokens: int, images: int) -> None:
    """Compare a block with the plain one in float64; in fp16 it may err as the plain one does.

    Not in bf16, to which the interpreter does not round but truncates.
    """
    block, inputs = make(width, heads, tokens, images)
    wanted = results(block, inputs)
    block.float()
    inputs = [value.float() for value in inputs]
    low = [inputs[0].half(), *inputs[1:]]
    plain = errors(results(block, low, fp16=True), wanted)

    block.fused = fused.forward
    full = errors(results(block, inputs), wanted)
    rounded = results(block, low, fp16=True)
    ratios = {name: error / plain[name] for name, error in errors(rounded, wanted).items()}
    print(
        f"W {width} S {tokens}: float32 {max(full.values()):.1e}, fp16 {max(ratios.values()):.2f}"
    )
    assert max(full.values()) < 5e-6, full
    assert max(ratios.values()) < 1.2, ratios
    again = results(block, low, fp16=True)
    assert all(torch.equal(rounded[name], again[name]) for name in rounded)

    chain = [copy.deepcopy(block) for _ in range(3)]
    for one in chain:
        one.fused = None
    plain = chained(chain, JiT.run_blocks, inputs)
    found = chained(chain, fused.run_blocks, inputs)
    assert max(((a - b).norm() / b.norm()).item() for a, b in zip(found, plain, strict=True)) < 5e-6

    strided = inputs[0].repeat_interleave(2, dim=1)[:, ::2]
    with torch.no_grad():
        y = block(strided, *inputs[1:]).double()
    assert ((y - wanted["y"]).norm() / wanted["y"].norm()).item() < 5e-6


def chained(
    blocks: list[Block], through: Callable[..., Tensor], words: list[Tensor]
) -> list[Tensor]:
    """Return what comes out of several blocks, and every gradient."""
    x, condition, cos, sin = words
    asked = [x.clone().requires_grad_(), condition.clone().requires_grad_()]
    asked += [parameter for block in blocks for parameter in block.parameters()]
    y = through(blocks, *asked[:2], cos, sin)
    torch.manual_seed(1)
    return [y, *torch.autograd.grad(y, asked, torch.randn(y.shape))]


@pytest.mark.skipif(NO_TRITON, reason="triton, which interprets its kernels here, is not installed")
def test_interpreted_kernels_compute_what_the_plain_block_does() -> None:
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- Where they are chosen, and what is around them -------------------------------------------


def test_on_the_cpu_and_with_dropout_the_plain_code_runs(
    monkeypatch: pytest.MonkeyPatch, make_task: Callable[..., JiTTask]
) -> None:
    model = make_task().build_model()
    make_task().compile(model)
    assert not any(block.fused for block in model.blocks)

    monkeypatch.setattr(fused, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    assert fused.fits(Block(32, 2, 0.0))
    assert not fused.fits(Block(32, 2, 0.1))
    assert not fused.fits(Block(32, 2, 0.0).double())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not fused.fits(Block(32, 2, 0.0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fused, "HAS_TRITON", False)
    assert not fused.fits(Block(32, 2, 0.0))


def test_a_block_goes_the_way_it_was_set_to() -> None:
    block, (x, condition, cos, sin) = make(32, 2, 5, 1)
    plain = block(x, condition, cos, sin)
    block.fused = lambda block, x, *rest: x + 1
    assert torch.equal(block(x, condition, cos, sin), x + 1)
    block.fused = None
    assert torch.equal(block(x, condition, cos, sin), plain)


def test_the_names_of_the_parameters_are_those_of_older_checkpoints() -> None:
    with torch.device("meta"):
        model = build_jit("JiT-T/4", VARIANTS["JiT-T/4"].native_size, 3)
    names = [name for name in model.state_dict() if not name.startswith("blocks.")]
    linear = ["patch_out", "time.inner", "time.outer", "final_modulation", "head"]
    assert set(names) == {
        *(f"{name}.{part}" for name in linear for part in ("weight", "bias")),
        *("patch_in.weight", "classes.weight", "class_positions", "final_norm.weight"),
    }
    linear = ["attention.qkv", "attention.out", "mlp.gate_and_value", "mlp.out", "modulation"]
    norms = ["attention_norm", "attention.q_norm", "attention.k_norm", "mlp_norm"]
    assert set(model.blocks[0].state_dict()) == {
        *(f"{name}.{part}" for name in linear for part in ("weight", "bias")),
        *(f"{name}.weight" for name in norms),
    }


def whole(model: JiT, image: Tensor, t: Tensor, label: Tensor) -> Tensor:
    """The network in one piece, in float32."""
    num = model.variant.class_tokens
    embedding = model.classes(label)
    condition = torch.nn.functional.silu(model.time(t) + embedding)
    x = model.patch_out(model.patch_in(model.to_patches(image))) + model.positions
    cos, sin = model.cos[num:], model.sin[num:]
    for index, block in enumerate(model.blocks):
        if index == model.variant.class_tokens_enter:
            x = torch.cat([embedding[:, None] + model.class_positions, x], dim=1)
            cos, sin = model.cos, model.sin
        x = block(x, condition, cos, sin)
    shift, scale = model.final_modulation(condition).chunk(2, dim=1)
    x = modulate(model.final_norm(x[:, num:]), shift, scale)
    return model.to_image(model.head(x))


def test_in_float32_the_parts_are_the_whole_bit_for_bit(make_mini: Callable[..., JiT]) -> None:
    model = make_mini(random=True)
    inputs = torch.randn(3, 3, 8, 8), torch.rand(3), torch.tensor([0, 1, 4])
    assert torch.equal(model(*inputs), whole(model, *inputs))


def test_blocks_are_gone_through_in_order_and_some_at_a_time(
    make_mini: Callable[..., JiT], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = make_mini(random=True), []

    def through(blocks: list[torch.nn.Module], *words: Tensor) -> Tensor:
        seen.append(blocks)
        return JiT.run_blocks(blocks, *words)

    inputs = torch.randn(3, 3, 8, 8), torch.rand(3), torch.tensor([0, 1, 4])
    wanted = model(*inputs)
    monkeypatch.setattr(model, "run_blocks", through, raising=False)
    assert torch.equal(model(*inputs), wanted)
    assert [block for some in seen for block in some] == list(model.blocks)
    assert max(map(len, seen)) == model.variant.class_tokens_enter


def test_graphs_are_of_some_blocks_and_the_rest_of_one(
    make_task: Callable[..., JiTTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda what, **_: compiled.append(what) or what)
    monkeypatch.setattr(Block, "compile", lambda self, **_: compiled.append(self))
    for is_on in (True, False):
        model = make_task().build_model()
        with compiler.patch({"triton.cudagraphs": is_on}):
            make_task().compile(model)
        assert (JiT.run_blocks in compiled) is is_on
        assert sum(isinstance(one, Block) for one in compiled) == (not is_on) * len(model.blocks)
        compiled.clear()


def test_under_autocast_the_residual_stream_is_in_low_precision(
    make_mini: Callable[..., JiT],
) -> None:
    model, seen = make_mini(random=True), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, y: seen.extend([inputs[0].dtype, y.dtype]))
    inputs = torch.randn(2, 3, 8, 8), torch.rand(2), torch.tensor([0, 1])
    with torch.autocast("cpu", torch.bfloat16):
        model(*inputs)
    assert seen == [torch.bfloat16] * 4
    seen.clear()
    model(*inputs)
    assert seen == [torch.float32] * 4


def test_the_faulty_reduction_is_off_only_where_torch_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "triton.mix_order_reduction"
    monkeypatch.setattr(torch._inductor, "list_options", lambda: ["triton.cudagraphs", name])
    assert compiler_options() == {name: False}
    monkeypatch.setattr(torch._inductor, "list_options", lambda: ["triton.cudagraphs"])
    assert compiler_options() == {}


if __name__ == "__main__":
    for sizes in [(192, 3, 13, 2), (80, 1, 43, 1), (64, 1, 290, 1)]:
        compare(*sizes)
