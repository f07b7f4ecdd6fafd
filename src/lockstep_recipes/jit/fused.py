# mypy: allow-untyped-calls
"""A JiT block computed with fused kernels (`kernels.py`) between its matrix products.

Owns: the kernels as torch operators with gradients, their launches and sizes; `run_blocks`,
which computes blocks with them. Does not own: the block itself, which the plain code in
`model.py` defines; the choice of blocks to compute this way (`task.py`).

Program sizes are constants and never tuned by timing: they determine the order of sums, so
runs with different sizes would differ in the last bits.

Two conventions with autograd that save passes over memory:
    bias     The linear layer before an operator adds `bias.detach()`. The operator's
             backward pass computes the gradient of the layer's output anyway, sums it over
             the tokens, and returns the sum as the gradient of the bias.
    token    An output of stride 0 that stands for a tensor. It is never read; it carries
             the tensor's gradient back to the pass that needs it.

Shapes: B images, S tokens, W width, A heads, D width of a head, H hidden width.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lockstep.torch_compat.private import foreach
from lockstep_recipes.jit.kernels import (
    HAS_TRITON,
    attention_kernel,
    column_sum_kernel,
    keys_backward_kernel,
    norm_backward_kernel,
    norm_finish_kernel,
    norm_kernel,
    qk_kernel,
    queries_backward_kernel,
    swiglu_backward_kernel,
    swiglu_kernel,
    wrap_triton,
)

if TYPE_CHECKING:
    from lockstep_recipes.jit.model import Attention, Block

# The fastest of those tried on an H200 (132 multiprocessors) at B 256, S 288, W 768.
SWIGLU = 8, 256, 4  # rows, columns, warps
SWIGLU_BACKWARD = 128, 4, 512, 4  # rows per program, rows at once, columns, warps
QK = 32, 4  # tokens, warps
ATTENTION = 64, 32, 4, 3  # queries per program, keys at once, warps, pipeline stages
QUERIES_BACKWARD = 64, 32, 4, 3
KEYS_BACKWARD = 64, 32, 4, 3  # as many per program as queries: they share partial sums
NORM = 8, 256  # most tokens per program, columns per warp
NORM_BACKWARD = 40, 256
COLUMN_SUM = 256, 32, 8  # rows at once, columns, warps
MOST_TOKENS = 512  # longer sequences were not compared with cuDNN


def operator(function: Any) -> Any:
    """Register the function as a torch operator whose kernels compiled code launches."""
    name = f"lockstep_jit::{function.__name__}"
    return torch.library.triton_op(name, function, mutates_args=()) if HAS_TRITON else function


def differentiate(forward: Any, backward: Any, save: Any) -> None:
    """Register the backward pass of an operator."""
    if HAS_TRITON:
        forward.register_autograd(backward, setup_context=save)


def cdiv(a: int, b: int) -> int:
    """Divide, rounding up."""
    return (a + b - 1) // b


def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is not below n."""
    return 1 << (n - 1).bit_length()


# --- Sums of partial sums ---------------------------------------------------------------------


def column_sum(partial: Tensor) -> Tensor:
    """Sum (G, P, N) over P."""
    G, P, N = partial.shape
    out = partial.new_empty(G, N)
    rows, cols, num_warps = COLUMN_SUM
    tiles = cdiv(N, cols)
    wrap_triton(column_sum_kernel)[(G * tiles,)](
        partial, out, P, N, tiles, ROWS=rows, COLS=cols, num_warps=num_warps
    )
    return out


# --- Weights in low precision -----------------------------------------------------------------
# Under autocast, compiled code would cast each weight, bias and gradient separately, and the
# weights again in the backward pass.


@torch.library.custom_op("lockstep_jit::recast", mutates_args=())
def recast(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Cast tensors to another dtype in one pass."""
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    foreach("copy_")(copies, tensors)
    return copies


@recast.register_fake
def _like_recast(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]


def _save_recast(ctx: Any, inputs: tuple[list[Tensor], torch.dtype], output: list[Tensor]) -> None:
    ctx.dtype = inputs[0][0].dtype


def _back_recast(ctx: Any, gradients: list[Tensor]) -> tuple[list[Tensor], None]:
    return recast(gradients, ctx.dtype), None


recast.register_autograd(_back_recast, setup_context=_save_recast)


def layers_of(blocks: Sequence["Block"]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return weights and biases of each block's five layers, in the dtype of autocast.

    The biases carry no gradient: all but the first layer's get it from the next operator.
    """
    weights = list[Tensor]()
    biases = list[Tensor]()
    for block in blocks:
        feed = block.mlp
        layer = block.attention
        layers = block.modulation, layer.qkv, layer.out, feed.gate_and_value, feed.out
        weights += [*(layer.weight for layer in layers), block.modulation.bias]
        biases += [layer.bias.detach() for layer in layers[1:]]
    device = weights[0].device.type
    dtype = torch.get_autocast_dtype(device)
    if torch.is_autocast_enabled(device) and weights[0].dtype != dtype:
        weights = recast(weights, dtype)
        biases = recast(biases, dtype)
    found = []
    for n in range(len(blocks)):
        *own, first = weights[6 * n : 6 * n + 6]
        found.append((own, [first, *biases[4 * n : 4 * n + 4]]))
    return found


# --- SwiGLU -----------------------------------------------------------------------------------


@operator
def swiglu(gv: Tensor, bias: Tensor) -> Tensor:
    """Return silu(gate) * value (B, S, H) for gate|value (B, S, 2H), made with `bias`."""
    B, S, H = gv.shape[0], gv.shape[1], gv.shape[2] // 2
    h = gv.new_empty(B, S, H)
    rows, cols, num_warps = SWIGLU
    tiles = cdiv(H, cols)
    wrap_triton(swiglu_kernel)[(cdiv(B * S, rows) * tiles,)](
        gv, h, B * S, tiles, H=H, ROWS=rows, COLS=cols, num_warps=num_warps
    )
    return h


@operator
def swiglu_backward(dh: Tensor, gv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate|value and of its bias (1, 2H)."""
    B, S, H = dh.shape
    dgv = torch.empty_like(gv)
    chunk, rows, cols, num_warps = SWIGLU_BACKWARD
    tiles = cdiv(H, cols)
    chunks = cdiv(B * S, chunk)
    partial = gv.new_empty(1, chunks, 2 * H, dtype=torch.float32)
    wrap_triton(swiglu_backward_kernel)[(chunks * tiles,)](
        dh, gv, dgv, partial, B * S, tiles,
        H=H, CHUNK=chunk, ROWS=rows, COLS=cols, num_warps=num_warps,
    )  # fmt: skip
    return dgv, column_sum(partial)


def _save_swiglu(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back_swiglu(ctx: Any, dh: Tensor) -> tuple[Tensor, ...]:
    gv, bias = ctx.saved_tensors
    dgv, dbias = swiglu_backward(dh.contiguous(), gv)
    return dgv, dbias[0].to(bias.dtype)


differentiate(swiglu, _back_swiglu, _save_swiglu)


# --- Attention --------------------------------------------------------------------------------


@operator
def attention(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    bias: Tensor, heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return attention (B, S, W) over qkv (B, S, 3W), made with `bias`, and tensors for backward.

    These are queries and keys (B, S, W), and the logarithms (B, A, S) of the softmax sums.
    """
    B, S, W = qkv.shape[0], int(qkv.shape[1]), qkv.shape[2] // 3
    out, q, k = (qkv.new_empty(B, S, W) for _ in range(3))
    lse = qkv.new_empty(B, heads, S, dtype=torch.float32)
    rows, num_warps = QK
    wrap_triton(qk_kernel)[(cdiv(B * S, rows) * heads,)](
        qkv, q_weight, k_weight, cos, sin, q, k, B * S, S,
        A=heads, D=W // heads, ROWS=rows, num_warps=num_warps,
    )  # fmt: skip
    launch_attention(attention_kernel, ATTENTION, (B, S, heads, W // heads), q, k, qkv, out, lse)
    return out, q, k, lse


def launch_attention(
    kernel: Any, sizes: tuple[int, int, int, int], shape: tuple[int, int, int, int], *args: Tensor
) -> None:
    """Launch one program for each head and tile of tokens; `shape` is B, S, A, D."""
    B, S, A, D = shape
    rows, cols, num_warps, num_stages = sizes
    wrap_triton(kernel)[(B * A * cdiv(S, rows),)](
        *args, S=S, A=A, D=D, ROWS=rows, COLS=cols, num_warps=num_warps, num_stages=num_stages
    )


@operator
def attention_backward(
    d_out: Tensor, out: Tensor, q: Tensor, k: Tensor, lse: Tensor, qkv: Tensor,
    q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of qkv, of its bias (with 2W more), and of both norm weights (2, D)."""
    B, S, W, A = out.shape[0], int(out.shape[1]), out.shape[2], lse.shape[1]
    dqkv = torch.empty_like(qkv)
    delta = torch.empty_like(lse)
    tiles = B * cdiv(S, QUERIES_BACKWARD[0])
    partial = qkv.new_empty(1, tiles, 5 * W, dtype=torch.float32)
    launch_attention(
        queries_backward_kernel, QUERIES_BACKWARD, (B, S, A, W // A),
        q, k, qkv, out, d_out, lse, delta, q_weight, cos, sin, dqkv, partial,
    )  # fmt: skip
    launch_attention(
        keys_backward_kernel, KEYS_BACKWARD, (B, S, A, W // A),
        q, k, qkv, d_out, lse, delta, k_weight, cos, sin, dqkv, partial,
    )  # fmt: skip
    sums = column_sum(partial)
    return dqkv, sums, column_sum(sums[0, 3 * W :].reshape(2, A, W // A))


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[:-1])


def _back_attention(ctx: Any, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *saved, bias = ctx.saved_tensors
    dqkv, sums, dw = attention_backward(d_out.contiguous(), *saved)
    qkv, q_weight, k_weight = saved[4:7]
    dbias = sums[0, : qkv.shape[-1]].to(bias.dtype)
    return dqkv, dw[0].to(q_weight.dtype), dw[1].to(k_weight.dtype), None, None, dbias, None


differentiate(attention, _back_attention, _save_attention)


def _operations(qkv: tuple[int, int, int], *_: Any, **__: Any) -> int:
    B, S, W3 = qkv
    return 4 * B * S * S * W3 // 3


def _operations_backward(d_out: tuple[int, int, int], *_: Any, **__: Any) -> int:
    B, S, W = d_out
    return 10 * B * S * S * W  # as torch counts it: the scores are computed twice


if HAS_TRITON:
    register_flop_formula(torch.ops.lockstep_jit.attention)(_operations)
    register_flop_formula(torch.ops.lockstep_jit.attention_backward)(_operations_backward)


# --- Gated add, norm, modulation --------------------------------------------------------------


def chunks_of(S: int, W: int, tile: tuple[int, int]) -> tuple[int, int, int, int]:
    """Split S tokens into equal chunks: return their number, length, row block and warps."""
    longest, columns = tile
    chunks = cdiv(S, longest)
    block = power_of_2(W)
    return chunks, cdiv(S, chunks), block, min(16, max(1, block // columns))


def undo_norm(
    d_out: Tensor, d_new: Tensor, x_new: Tensor, rstd: Tensor, branch: Tensor, gate: Tensor,
    weight: Tensor, scale: Tensor, dx: Tensor, dbranch: Tensor, gated: bool, norm: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill dx and dbranch; return the sums per image, and those of weight and bias over images."""
    B, S, W = d_new.shape
    chunks, chunk, block, num_warps = chunks_of(S, W, NORM_BACKWARD)
    plane = B * chunks * W
    partial = d_new.new_empty(2 * (gated + norm), B, chunks, W, dtype=torch.float32)
    wrap_triton(norm_backward_kernel)[(B * chunks,)](
        d_out, d_new, x_new, rstd, branch, gate, weight, scale, dx, dbranch, partial,
        S, chunks, chunk, gate.stride(0), scale.stride(0), plane,
        W=W, BLOCK=block, GATED=gated, NORM=norm, num_warps=num_warps,
    )  # fmt: skip
    per_image = scale.new_empty(gated + 2 * norm, B, W)
    per_weight = d_new.new_empty(gated + norm, B, W, dtype=torch.float32)
    cols = min(256, block)
    tiles = cdiv(W, cols)
    wrap_triton(norm_finish_kernel)[(B * tiles,)](
        partial, gate, weight, scale, per_image, per_weight, B, plane, chunks, tiles,
        gate.stride(0), scale.stride(0), W=W, COLS=cols, GATED=gated, NORM=norm, num_warps=2,
    )  # fmt: skip
    return per_image, column_sum(per_weight)


@operator
def norm(x: Tensor, weight: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the modulated norm of x (B, S, W), 1 / root mean square (B, S), a token for x."""
    B, S, W = x.shape
    out = torch.empty_like(x, dtype=shift.dtype)
    rstd = x.new_empty(B, S, dtype=torch.float32)
    chunks, chunk, block, num_warps = chunks_of(S, W, NORM)
    wrap_triton(norm_kernel)[(B * chunks,)](
        x, x, shift, weight, shift, scale, out, out, rstd, S, chunks, chunk,
        0, shift.stride(0), scale.stride(0),
        W=W, BLOCK=block, GATED=False, NORM=True, num_warps=num_warps,
    )  # fmt: skip
    return out, rstd, x.new_empty(1).expand(B, S, W)


@operator
def norm_backward(
    d_out: Tensor, d_new: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, (shift, scale) per image (2, B, W), and weight (1, W)."""
    dx = torch.empty_like(x)
    sums = undo_norm(d_out, d_new, x, rstd, x, scale, weight, scale, dx, dx, False, True)
    return dx, *sums


def _save_norm(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, scale = inputs
    ctx.save_for_backward(x, output[1], weight, scale)


def _back_norm(ctx: Any, d_out: Tensor, _: Tensor, d_skip: Tensor) -> tuple[Tensor, ...]:
    x, rstd, weight, scale = ctx.saved_tensors
    dx, per_image, dw = norm_backward(
        d_out.contiguous(), d_skip.contiguous(), x, rstd, weight, scale
    )
    return dx, dw[0].to(weight.dtype), per_image[0], per_image[1]


differentiate(norm, _back_norm, _save_norm)


@operator
def gated_norm(
    x: Tensor, skip: Tensor, branch: Tensor, gate: Tensor, bias: Tensor,
    weight: Tensor, shift: Tensor, scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return x + gate * branch, its modulated norm, and 1 / root mean square.

    `skip` receives the gradient of x, which is detached: x itself, or a token. `bias` belongs to
    the layer that computed `branch`.
    """
    B, S, W = x.shape
    x_new = torch.empty_like(x)
    out = torch.empty_like(x, dtype=shift.dtype)
    rstd = x.new_empty(B, S, dtype=torch.float32)
    chunks, chunk, block, num_warps = chunks_of(S, W, NORM)
    wrap_triton(norm_kernel)[(B * chunks,)](
        x, branch, gate, weight, shift, scale, x_new, out, rstd, S, chunks, chunk,
        gate.stride(0), shift.stride(0), scale.stride(0),
        W=W, BLOCK=block, GATED=True, NORM=True, num_warps=num_warps,
    )  # fmt: skip
    return x_new, out, rstd


@operator
def gated_norm_backward(
    d_new: Tensor, d_out: Tensor, x_new: Tensor, rstd: Tensor, branch: Tensor, gate: Tensor,
    weight: Tensor, scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dx, dbranch, (shift, scale, gate) per image (3, B, W), (weight, bias) (2, W)."""
    dx = torch.empty_like(x_new)
    dbranch = torch.empty_like(branch)
    sums = undo_norm(
        d_out, d_new, x_new, rstd, branch, gate, weight, scale, dx, dbranch, True, True
    )
    return dx, dbranch, *sums


def _save_gated_norm(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    _, _, branch, gate, bias, weight, _, scale = inputs
    ctx.save_for_backward(output[0], output[2], branch, gate, weight, scale, bias)


def _back_gated_norm(
    ctx: Any, d_new: Tensor, d_out: Tensor, _: Tensor
) -> tuple[Tensor | None, ...]:
    *saved, bias = ctx.saved_tensors
    dx, dbranch, (d_shift, d_scale, d_gate), (dw, dbias) = gated_norm_backward(
        d_new.contiguous(), d_out.contiguous(), *saved
    )
    dw = dw.to(saved[4].dtype)
    dbias = dbias.to(bias.dtype)
    return None, dx, dbranch, d_gate, dbias, dw, d_shift, d_scale


differentiate(gated_norm, _back_gated_norm, _save_gated_norm)


@operator
def gated_add(x: Tensor, branch: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """Return x + gate * branch; `bias` belongs to the layer that computed `branch`."""
    B, S, W = x.shape
    x_new = torch.empty_like(x)
    chunks, chunk, block, num_warps = chunks_of(S, W, NORM)
    wrap_triton(norm_kernel)[(B * chunks,)](
        x, branch, gate, gate, gate, gate, x_new, x_new, x_new, S, chunks, chunk,
        gate.stride(0), 0, 0, W=W, BLOCK=block, GATED=True, NORM=False, num_warps=num_warps,
    )  # fmt: skip
    return x_new


@operator
def gated_add_backward(
    d_new: Tensor, branch: Tensor, gate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dbranch, gate per image (1, B, W), and bias (1, W)."""
    d = torch.empty_like(branch)
    sums = undo_norm(d_new, d_new, branch, branch, branch, gate, gate, gate, d, d, True, False)
    return d, *sums


def _save_gated_add(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _back_gated_add(ctx: Any, d_new: Tensor) -> tuple[Tensor, ...]:
    branch, gate, bias = ctx.saved_tensors
    dbranch, d_gate, dbias = gated_add_backward(d_new.contiguous(), branch, gate)
    return d_new, dbranch, d_gate[0], dbias[0].to(bias.dtype)


differentiate(gated_add, _back_gated_add, _save_gated_add)


# --- A block ----------------------------------------------------------------------------------


def fits(block: "Block") -> bool:
    """Return whether the block can be fused: on a GPU with triton, and without dropout."""
    weight = block.attention.qkv.weight
    if not HAS_TRITON or weight.device.type != "cuda" or block.attention.dropout.p > 0:
        return False
    is_recent = torch.cuda.get_device_capability(weight.device) >= (8, 0)  # bf16
    return is_recent and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)


def forward(block: "Block", x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute `block(x, condition, cos, sin)`."""
    return run_blocks([block], x, condition, cos, sin)


def run_blocks(
    blocks: Sequence["Block"], x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Compute some blocks, one after the other.

    The last residual addition of a block is fused with the first norm of the next one.
    """
    x = x.contiguous()
    added = None
    for block, (weights, biases) in zip(blocks, layers_of(blocks), strict=True):
        layer = block.attention
        feed = block.mlp
        modulation = F.linear(condition, weights[0], biases[0])
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation.chunk(6, 1)
        first = block.attention_norm.weight
        second = block.mlp_norm.weight

        if added is None:
            normed, _, skip = norm(x, first, shift_a, scale_a)
        else:
            x, normed, _ = gated_norm(x.detach(), x, *added, first, shift_a, scale_a)
            skip = x
        mixed = mix(layer, F.linear(normed, weights[1], biases[1]), cos, sin)
        mixed = F.linear(mixed, weights[2], biases[2])
        x, normed, _ = gated_norm(
            x.detach(), skip, mixed, gate_a, layer.out.bias, second, shift_m, scale_m
        )
        hidden = F.linear(normed, weights[3], biases[3])
        hidden = swiglu(hidden, feed.gate_and_value.bias)
        added = F.linear(hidden, weights[4], biases[4]), gate_m, feed.out.bias
    updated: Tensor = gated_add(x, *added) if added else x
    return updated


def mix(layer: "Attention", qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return attention over qkv (B, S, 3W), which was computed with the layer's detached bias.

    Short sequences in low precision use the fused kernels, others the layer's own code.
    """
    bias = layer.qkv.bias
    D = qkv.shape[2] // 3 // layer.heads
    is_low = qkv.dtype in (torch.bfloat16, torch.float16)
    if not is_low or qkv.shape[1] > MOST_TOKENS or D not in (16, 32, 64, 128):
        nothing = (bias - bias.detach()).to(qkv.dtype)  # zero, but it leads to the bias's gradient
        return layer.mix(qkv + nothing, cos, sin)
    q_weight = layer.q_norm.weight
    k_weight = layer.k_norm.weight
    mixed: Tensor = attention(qkv, q_weight, k_weight, cos, sin, bias, layer.heads)[0]
    return mixed
