# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What lies between a JiT block's matrix products, as Triton kernels with their gradients.

Owns: SwiGLU; norm and rotation of queries and keys; gated add, norm and modulation; the
sums that their backward passes need; `forward`, which computes what a block does
with them. Does not own: the block, whose plain code (`model.py`) is the definition; the
matrix products, the attention, the choice of blocks that are computed so (`task.py`).

All of it waits for memory, so what counts is how often an activation is read and written.
In units U of one activation (B, S, W), at H = 8/3 W, a block's kernels move 52 U where
the compiler's own move about 122. Arithmetic is in float32 whatever is read and written.

No sum is made with atomics: they add in the order in which programs happen to end, and
the last bits would change from run to run. A program writes the sum of its own rows, and a
second, small kernel adds these partial sums in a fixed order. For the same reason the sizes
below are constants, never tuned by timing.

Two ways of speaking to autograd that spare passes over memory:
    bias     The linear layer before an operator adds `bias.detach()`. The operator's
             backward pass has the gradient of the layer's output in hand, sums it over the
             tokens on the way, and returns it as the gradient of the bias.
    token    An output of stride 0 that stands for a tensor. It is never read; the gradient
             of the tensor comes back through it, to the pass that has use for it.

Shapes: B images, S tokens, T = B S, W width, A heads, D width of a head, H hidden width.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # installs for the CPU lack it; then nothing here is ever called
    HAS_TRITON = False
    triton = SimpleNamespace(jit=lambda kernel: kernel)
    tl = SimpleNamespace(constexpr=float)

if TYPE_CHECKING:
    from lockstep_recipes.jit.model import Attention, Block, SwiGLU

EPS = tl.constexpr(1e-6)

# The best of those tried on an H200 (132 multiprocessors) at B 256, S 288, W 768.
SWIGLU = 8, 256, 4  # rows, columns, warps
SWIGLU_BACKWARD = 128, 4, 512, 4  # rows a program, rows at once, columns, warps
QK = 32, 4  # tokens, warps
QK_BACKWARD = 256, 16, 4  # tokens a program, tokens at once, warps
NORM = 8, 256  # tokens a program at most, columns a warp
NORM_BACKWARD = 40, 256
COLUMN_SUM = 64, 32  # rows at once, columns


def wrap_triton(kernel):
    """Let the compiler see the launch; an interpreted kernel (TRITON_INTERPRET=1) is called."""
    return torch.library.wrap_triton(kernel) if isinstance(kernel, triton.JITFunction) else kernel


def operator(function):
    """Make the function an operator that compiled code launches kernel by kernel."""
    name = f"lockstep_jit::{function.__name__}"
    return torch.library.triton_op(name, function, mutates_args=()) if HAS_TRITON else function


def differentiate(forward, backward, save) -> None:
    """Give an operator its gradient."""
    if HAS_TRITON:
        forward.register_autograd(backward, setup_context=save)


def cdiv(a: int, b: int) -> int:
    """Divide, rounding up."""
    return (a + b - 1) // b


def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is not below n."""
    return 1 << (n - 1).bit_length()


# --- Sums of partial sums ---------------------------------------------------------------------


@triton.jit
def column_sum_kernel(partial, out, P, N, tiles, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out[g, n] = sum over p of partial[g, p, n]; reads partial, a hundredth of a U or less."""
    pid = tl.program_id(0)
    group = (pid // tiles).to(tl.int64)
    col = (pid % tiles) * COLS + tl.arange(0, COLS)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    total = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, P, ROWS):
        at = (group * P + first + row) * N + col
        total += tl.load(partial + at, mask=(first + row < P) & (col < N), other=0.0)
    col = (pid % tiles) * COLS + tl.arange(0, COLS)
    tl.store(out + group * N + col, tl.sum(total, 0), mask=col < N)


def column_sum(partial: Tensor) -> Tensor:
    """Sum (G, P, N) over P."""
    G, P, N = partial.shape
    out = partial.new_empty(G, N)
    rows, cols = COLUMN_SUM
    tiles = cdiv(N, cols)
    wrap_triton(column_sum_kernel)[(G * tiles,)](
        partial, out, P, N, tiles, ROWS=rows, COLS=cols, num_warps=4
    )
    return out


# --- SwiGLU -----------------------------------------------------------------------------------


@triton.jit
def swiglu_kernel(gv, h, T, tiles, H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """SwiGLU: h = silu(gate) * value, from rows gate|value; reads 5.3 U, writes 2.7."""
    pid = tl.program_id(0)
    row = ((pid // tiles) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    col = (pid % tiles) * COLS + tl.arange(0, COLS)[None, :]
    inside = (row < T) & (col < H)
    gate = tl.load(gv + row * (2 * H) + col, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(gv + row * (2 * H) + col + H, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * value
    tl.store(h + row * H + col, result.to(h.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    dh, gv, dgv, partial, T, tiles,
    H: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dgate|dvalue, and their sums over CHUNK rows, for the bias; reads 8 U, writes 5.3."""
    pid = tl.program_id(0)
    chunk = (pid // tiles).to(tl.int64)
    col = (pid % tiles) * COLS + tl.arange(0, COLS)[None, :]
    sum_gate = tl.zeros([ROWS, COLS], tl.float32)
    sum_value = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, CHUNK, ROWS):
        row = chunk * CHUNK + first + tl.arange(0, ROWS)[:, None]
        inside = (row < T) & (col < H)
        at = row * (2 * H) + col
        grad = tl.load(dh + row * H + col, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gv + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(gv + at + H, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        dgate = grad * value * s * (1.0 + gate * (1.0 - s))
        dvalue = grad * gate * s
        tl.store(dgv + at, dgate.to(dgv.dtype.element_ty), mask=inside)
        tl.store(dgv + at + H, dvalue.to(dgv.dtype.element_ty), mask=inside)
        sum_gate += dgate
        sum_value += dvalue
    col = (pid % tiles) * COLS + tl.arange(0, COLS)
    out = partial + chunk * (2 * H) + col
    tl.store(out, tl.sum(sum_gate, 0), mask=col < H)
    tl.store(out + H, tl.sum(sum_value, 0), mask=col < H)


@operator
def swiglu(gv: Tensor, bias: Tensor) -> Tensor:
    """Return silu(gate) * value (B, S, H) of gate|value (B, S, 2H), made with `bias`."""
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
    tiles, chunks = cdiv(H, cols), cdiv(B * S, chunk)
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


# --- Norm and rotation of queries and keys ----------------------------------------------------
# A row of D channels is held as its two halves, which the rotation mixes.


@triton.jit
def load_halves(of, at, inside, D: tl.constexpr):
    """Load both halves of rows as float32."""
    lo = tl.load(of + at, mask=inside, other=0.0).to(tl.float32)
    return lo, tl.load(of + at + D // 2, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_halves(to, at, lo, hi, inside, D: tl.constexpr):
    """Store both halves of rows."""
    tl.store(to + at, lo.to(to.dtype.element_ty), mask=inside)
    tl.store(to + at + D // 2, hi.to(to.dtype.element_ty), mask=inside)


@triton.jit
def turn(lo, hi, w_lo, w_hi, cos, sin, D: tl.constexpr):
    """Normalise rows, weigh and turn them."""
    rstd = tl.rsqrt((tl.sum(lo * lo, 1) + tl.sum(hi * hi, 1)) / D + EPS)[:, None]
    lo = lo * rstd * w_lo
    hi = hi * rstd * w_hi
    return lo * cos - hi * sin, hi * cos + lo * sin


@triton.jit
def turn_back(lo, hi, d_lo, d_hi, w_lo, w_hi, cos, sin, D: tl.constexpr):
    """Undo `turn`: gradients of the two halves, and of the weights before their sum."""
    rstd = tl.rsqrt((tl.sum(lo * lo, 1) + tl.sum(hi * hi, 1)) / D + EPS)[:, None]
    lo = lo * rstd
    hi = hi * rstd
    g_lo = d_lo * cos + d_hi * sin
    g_hi = d_hi * cos - d_lo * sin
    along = ((tl.sum(g_lo * w_lo * lo, 1) + tl.sum(g_hi * w_hi * hi, 1)) / D)[:, None]
    d_lo = rstd * (g_lo * w_lo - lo * along)
    return d_lo, rstd * (g_hi * w_hi - hi * along), g_lo * lo, g_hi * hi


@triton.jit
def qk_kernel(
    qkv, q_weight, k_weight, cos, sin, q, k, T, S,
    A: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Queries and keys of one head and ROWS tokens; reads 2 U, writes 2."""
    pid = tl.program_id(0)
    token = (pid // A) * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, HALF)[None, :]
    fits = j < D // 2
    inside = (token < T) & fits
    c = tl.load(cos + (token % S) * (D // 2) + j, mask=inside, other=0.0)
    s = tl.load(sin + (token % S) * (D // 2) + j, mask=inside, other=0.0)
    at = token.to(tl.int64) * (3 * A * D) + (pid % A) * D + j
    to = token.to(tl.int64) * (A * D) + (pid % A) * D + j
    q_lo, q_hi = load_halves(qkv, at, inside, D)
    k_lo, k_hi = load_halves(qkv, at + A * D, inside, D)
    w_lo, w_hi = load_halves(q_weight, j, fits, D)
    lo, hi = turn(q_lo, q_hi, w_lo, w_hi, c, s, D)
    store_halves(q, to, lo, hi, inside, D)
    w_lo, w_hi = load_halves(k_weight, j, fits, D)
    lo, hi = turn(k_lo, k_hi, w_lo, w_hi, c, s, D)
    store_halves(k, to, lo, hi, inside, D)


@triton.jit
def qk_backward_kernel(
    dq, dk, dv, qkv, q_weight, k_weight, cos, sin, dqkv, partial, T, S,
    q_b, q_s, q_a, k_b, k_s, k_a, v_b, v_s, v_a,
    A: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Packed gradient of one head and CHUNK tokens; reads 5 U, writes 3.

    A row of `partial` is 5 W wide: the bias of q, k and v, then the norm weights of q
    and of k, still head by head. Gradients come in whatever layout attention gives them.
    """
    pid = tl.program_id(0)
    head = pid % A
    chunk = pid // A
    j = tl.arange(0, HALF)[None, :]
    fits = j < D // 2
    qw_lo, qw_hi = load_halves(q_weight, j, fits, D)
    kw_lo, kw_hi = load_halves(k_weight, j, fits, D)
    zero = tl.zeros([ROWS, HALF], tl.float32)
    bq_lo, bq_hi, bk_lo, bk_hi, bv_lo, bv_hi = zero, zero, zero, zero, zero, zero
    wq_lo, wq_hi, wk_lo, wk_hi = zero, zero, zero, zero
    for first in range(0, CHUNK, ROWS):
        token = chunk * CHUNK + first + tl.arange(0, ROWS)[:, None]
        inside = (token < T) & fits
        image = (token // S).to(tl.int64)
        place = token % S
        at = token.to(tl.int64) * (3 * A * D) + head * D + j
        c = tl.load(cos + place * (D // 2) + j, mask=inside, other=0.0)
        s = tl.load(sin + place * (D // 2) + j, mask=inside, other=0.0)
        dq_lo, dq_hi = load_halves(dq, image * q_b + place * q_s + head * q_a + j, inside, D)
        q_lo, q_hi = load_halves(qkv, at, inside, D)
        dk_lo, dk_hi = load_halves(dk, image * k_b + place * k_s + head * k_a + j, inside, D)
        k_lo, k_hi = load_halves(qkv, at + A * D, inside, D)
        dv_lo, dv_hi = load_halves(dv, image * v_b + place * v_s + head * v_a + j, inside, D)

        lo, hi, w_lo, w_hi = turn_back(q_lo, q_hi, dq_lo, dq_hi, qw_lo, qw_hi, c, s, D)
        store_halves(dqkv, at, lo, hi, inside, D)
        bq_lo += lo
        bq_hi += hi
        wq_lo += w_lo
        wq_hi += w_hi
        lo, hi, w_lo, w_hi = turn_back(k_lo, k_hi, dk_lo, dk_hi, kw_lo, kw_hi, c, s, D)
        store_halves(dqkv, at + A * D, lo, hi, inside, D)
        bk_lo += lo
        bk_hi += hi
        wk_lo += w_lo
        wk_hi += w_hi
        store_halves(dqkv, at + 2 * A * D, dv_lo, dv_hi, inside, D)
        bv_lo += dv_lo
        bv_hi += dv_hi
    i = tl.arange(0, HALF)
    to = chunk.to(tl.int64) * (5 * A * D) + head * D + i
    fits = i < D // 2
    store_halves(partial, to, tl.sum(bq_lo, 0), tl.sum(bq_hi, 0), fits, D)
    store_halves(partial, to + A * D, tl.sum(bk_lo, 0), tl.sum(bk_hi, 0), fits, D)
    store_halves(partial, to + 2 * A * D, tl.sum(bv_lo, 0), tl.sum(bv_hi, 0), fits, D)
    store_halves(partial, to + 3 * A * D, tl.sum(wq_lo, 0), tl.sum(wq_hi, 0), fits, D)
    store_halves(partial, to + 4 * A * D, tl.sum(wk_lo, 0), tl.sum(wk_hi, 0), fits, D)


@operator
def qk(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    bias: Tensor, heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return queries, keys and a token for the values, each (B, S, A, D), of qkv (B, S, 3W)."""
    B, S, W = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    shape = B, S, heads, W // heads
    q, k, token = qkv.new_empty(shape), qkv.new_empty(shape), qkv.new_empty(1).expand(shape)
    rows, num_warps = QK
    wrap_triton(qk_kernel)[(cdiv(B * S, rows) * heads,)](
        qkv, q_weight, k_weight, cos, sin, q, k, B * S, S,
        A=heads, D=W // heads, HALF=power_of_2(W // heads // 2), ROWS=rows, num_warps=num_warps,
    )  # fmt: skip
    return q, k, token


@operator
def qk_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor,
    q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of qkv, of its bias (with 2W more), of both norm weights (2, D)."""
    B, S, A, D = dq.shape
    chunk, rows, num_warps = QK_BACKWARD
    chunks = cdiv(B * S, chunk)
    dqkv = torch.empty_like(qkv)
    partial = qkv.new_empty(1, chunks, 5 * A * D, dtype=torch.float32)
    wrap_triton(qk_backward_kernel)[(chunks * A,)](
        dq, dk, dv, qkv, q_weight, k_weight, cos, sin, dqkv, partial, B * S, S,
        dq.stride(0), dq.stride(1), dq.stride(2), dk.stride(0), dk.stride(1), dk.stride(2),
        dv.stride(0), dv.stride(1), dv.stride(2),
        A=A, D=D, HALF=power_of_2(D // 2), CHUNK=chunk, ROWS=rows, num_warps=num_warps,
    )  # fmt: skip
    sums = column_sum(partial)
    return dqkv, sums, column_sum(sums[0, 3 * A * D :].reshape(2, A, D))


def _save_qk(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:-1])


def _back_qk(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    qkv, q_weight, k_weight, cos, sin, bias = ctx.saved_tensors
    dq, dk, dv = (d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk, dv))
    dqkv, sums, dw = qk_backward(dq, dk, dv, qkv, q_weight, k_weight, cos, sin)
    dbias = sums[0, : qkv.shape[-1]].to(bias.dtype)
    return dqkv, dw[0].to(q_weight.dtype), dw[1].to(k_weight.dtype), None, None, dbias, None


differentiate(qk, _back_qk, _save_qk)


class Attach(torch.autograd.Function):
    """Pass `data` on as it is and send its gradient to `token`."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, token: Tensor) -> Tensor:
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


# --- Gated add, norm, modulation --------------------------------------------------------------


@triton.jit
def norm_kernel(
    x, branch, gate, weight, shift, scale, x_new, out, rstd, S, chunks, chunk,
    gate_b, shift_b, scale_b,
    W: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """x_new = x + gate * branch where GATED; out = modulated norm of x_new where NORM.

    One chunk of one image, a token at a time, the next one being loaded meanwhile. Reads and
    writes 1 U each for the norm alone, 2 and 2 for both, 2 and 1 for the add alone.
    """
    pid = tl.program_id(0)
    image = (pid // chunks).to(tl.int64)
    first = (pid % chunks) * chunk
    count = tl.minimum(chunk, S - first)
    col = tl.arange(0, BLOCK)
    fits = col < W
    at = (image * S + first) * W + col
    if GATED:
        g = tl.load(gate + image * gate_b + col, mask=fits, other=0.0).to(tl.float32)
        next_branch = tl.load(branch + at, mask=fits, other=0.0)
    if NORM:
        plus = tl.load(shift + image * shift_b + col, mask=fits, other=0.0).to(tl.float32)
        times = 1.0 + tl.load(scale + image * scale_b + col, mask=fits, other=0.0).to(tl.float32)
        times = times * tl.load(weight + col, mask=fits, other=0.0).to(tl.float32)
    next_x = tl.load(x + at, mask=fits, other=0.0)
    for i in range(count):
        value = next_x.to(tl.float32)
        more = col < tl.where(i + 1 < count, W, 0)
        next_x = tl.load(x + at + W, mask=more, other=0.0)
        if GATED:
            value += g * next_branch.to(tl.float32)
            next_branch = tl.load(branch + at + W, mask=more, other=0.0)
            rounded = value.to(x_new.dtype.element_ty)
            tl.store(x_new + at, rounded, mask=fits)
            value = rounded.to(tl.float32)
        if NORM:
            r = tl.rsqrt(tl.sum(value * value, 0) / W + EPS)
            tl.store(out + at, (value * r * times + plus).to(out.dtype.element_ty), mask=fits)
            tl.store(rstd + image * S + first + i, r)
        at += W


@triton.jit
def norm_backward_kernel(
    d_out, d_new, x_new, rstd, branch, gate, weight, scale, dx, dbranch, partial,
    S, chunks, chunk, gate_b, scale_b, plane,
    W: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Undo `norm_kernel` for one chunk; `d_new` reaches x_new by other ways (the stream).

    The planes of `partial`, each (B, chunks, W): where NORM the sums of d_out and of
    d_out * normalised x; then where GATED those of dx * branch and of dx. Reads 3 U and
    writes 1 for the norm alone, 4 and 2 for both, 2 and 1 for the add alone.
    """
    pid = tl.program_id(0)
    image = (pid // chunks).to(tl.int64)
    first = (pid % chunks) * chunk
    count = tl.minimum(chunk, S - first)
    col = tl.arange(0, BLOCK)
    fits = col < W
    token = image * S + first
    at = token * W + col
    next_d = tl.load(d_new + at, mask=fits, other=0.0)
    if NORM:
        times = 1.0 + tl.load(scale + image * scale_b + col, mask=fits, other=0.0).to(tl.float32)
        times = times * tl.load(weight + col, mask=fits, other=0.0).to(tl.float32)
        next_out = tl.load(d_out + at, mask=fits, other=0.0)
        next_x = tl.load(x_new + at, mask=fits, other=0.0)
        next_r = tl.load(rstd + token)
        sum_out = tl.zeros([BLOCK], tl.float32)
        sum_along = tl.zeros([BLOCK], tl.float32)
    if GATED:
        g = tl.load(gate + image * gate_b + col, mask=fits, other=0.0).to(tl.float32)
        next_branch = tl.load(branch + at, mask=fits, other=0.0)
        sum_gate = tl.zeros([BLOCK], tl.float32)
        sum_total = tl.zeros([BLOCK], tl.float32)
    for i in range(count):
        more = col < tl.where(i + 1 < count, W, 0)
        total = next_d.to(tl.float32)
        next_d = tl.load(d_new + at + W, mask=more, other=0.0)
        if NORM:
            d = next_out.to(tl.float32)
            r = next_r
            unit = next_x.to(tl.float32) * r
            next_out = tl.load(d_out + at + W, mask=more, other=0.0)
            next_x = tl.load(x_new + at + W, mask=more, other=0.0)
            next_r = tl.load(rstd + token + tl.minimum(i + 1, count - 1))
        if GATED:
            b = next_branch.to(tl.float32)
            next_branch = tl.load(branch + at + W, mask=more, other=0.0)
        if NORM:
            sum_out += d
            sum_along += d * unit
            d = d * times
            total += r * (d - unit * (tl.sum(d * unit, 0) / W))
            tl.store(dx + at, total.to(dx.dtype.element_ty), mask=fits)
        if GATED:
            sum_gate += total * b
            sum_total += total
            tl.store(dbranch + at, (g * total).to(dbranch.dtype.element_ty), mask=fits)
        at += W
    to = partial + pid.to(tl.int64) * W + col
    if NORM:
        tl.store(to, sum_out, mask=fits)
        tl.store(to + plane, sum_along, mask=fits)
        to += 2 * plane
    if GATED:
        tl.store(to, sum_gate, mask=fits)
        tl.store(to + plane, sum_total, mask=fits)


@triton.jit
def sum_chunks(first, plane, chunks, fits, W: tl.constexpr, COLS: tl.constexpr):
    """Sum an image's chunks in two planes."""
    a = tl.zeros([COLS], tl.float32)
    b = tl.zeros([COLS], tl.float32)
    for i in range(chunks):
        a += tl.load(first + i * W, mask=fits, other=0.0)
        b += tl.load(first + plane + i * W, mask=fits, other=0.0)
    return a, b


@triton.jit
def norm_finish_kernel(
    partial, gate, weight, scale, per_image, per_weight, B, plane, chunks, tiles, gate_b, scale_b,
    W: tl.constexpr, COLS: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Add an image's partial sums, a twentieth of a U: its own gradients, its share of others.

    per_image (planes, B, W): shift and scale where NORM, gate where GATED.
    per_weight (planes, B, W): norm weight where NORM, bias before the gate where GATED.
    """
    pid = tl.program_id(0)
    image = (pid // tiles).to(tl.int64)
    col = (pid % tiles) * COLS + tl.arange(0, COLS)
    fits = col < W
    first = partial + image * chunks * W + col
    to = per_image + image * W + col
    to_weight = per_weight + image * W + col
    if NORM:
        a, b = sum_chunks(first, plane, chunks, fits, W, COLS)
        w = tl.load(weight + col, mask=fits, other=0.0).to(tl.float32)
        times = 1.0 + tl.load(scale + image * scale_b + col, mask=fits, other=0.0).to(tl.float32)
        tl.store(to, a.to(per_image.dtype.element_ty), mask=fits)
        tl.store(to + B * W, (b * w).to(per_image.dtype.element_ty), mask=fits)
        tl.store(to_weight, b * times, mask=fits)
        first += 2 * plane
        to += 2 * B * W
        to_weight += B * W
    if GATED:
        a, b = sum_chunks(first, plane, chunks, fits, W, COLS)
        g = tl.load(gate + image * gate_b + col, mask=fits, other=0.0).to(tl.float32)
        tl.store(to, a.to(per_image.dtype.element_ty), mask=fits)
        tl.store(to_weight, b * g, mask=fits)


def cut(S: int, W: int, tile: tuple[int, int]) -> tuple[int, int, int, int]:
    """Cut S tokens into equal chunks: how many, how long; the block of a row; warps."""
    longest, columns = tile
    chunks, block = cdiv(S, longest), power_of_2(W)
    return chunks, cdiv(S, chunks), block, min(16, max(1, block // columns))


def undo_norm(
    d_out: Tensor, d_new: Tensor, x_new: Tensor, rstd: Tensor, branch: Tensor, gate: Tensor,
    weight: Tensor, scale: Tensor, dx: Tensor, dbranch: Tensor, gated: bool, norm: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill dx and dbranch; return the sums per image and, over images, of weight and bias."""
    B, S, W = d_new.shape
    chunks, chunk, block, num_warps = cut(S, W, NORM_BACKWARD)
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
    out, rstd = torch.empty_like(x, dtype=shift.dtype), x.new_empty(B, S, dtype=torch.float32)
    chunks, chunk, block, num_warps = cut(S, W, NORM)
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

    `skip` is the token that takes the gradient of x, which is detached; `bias` is that of
    the layer which made `branch`.
    """
    B, S, W = x.shape
    x_new, out = torch.empty_like(x), torch.empty_like(x, dtype=shift.dtype)
    rstd = x.new_empty(B, S, dtype=torch.float32)
    chunks, chunk, block, num_warps = cut(S, W, NORM)
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
    dx, dbranch = torch.empty_like(x_new), torch.empty_like(branch)
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
    dw, dbias = dw.to(saved[4].dtype), dbias.to(bias.dtype)
    return None, dx, dbranch, d_gate, dbias, dw, d_shift, d_scale


differentiate(gated_norm, _back_gated_norm, _save_gated_norm)


@operator
def gated_add(x: Tensor, branch: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """Return x + gate * branch; `bias` is that of the layer which made `branch`."""
    B, S, W = x.shape
    x_new = torch.empty_like(x)
    chunks, chunk, block, num_warps = cut(S, W, NORM)
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
    """Say whether the block may be computed so: on a GPU with triton, and without dropout."""
    weight = block.attention.qkv.weight
    if not HAS_TRITON or weight.device.type != "cuda" or block.attention.dropout.p > 0:
        return False
    is_recent = torch.cuda.get_device_capability(weight.device) >= (8, 0)  # knows bf16
    return is_recent and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)


def forward(block: "Block", x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute `block(x, condition, cos, sin)`."""
    shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = block.modulation(condition).chunk(6, 1)
    x = x.contiguous()
    normed, _, skip = norm(x, block.attention_norm.weight, shift_a, scale_a)
    mixed, bias = attend(block.attention, normed, cos, sin), block.attention.out.bias
    x, normed, _ = gated_norm(
        x.detach(), skip, mixed, gate_a, bias, block.mlp_norm.weight, shift_m, scale_m
    )
    updated: Tensor = gated_add(x, feed(block.mlp, normed), gate_m, block.mlp.out.bias)
    return updated


def attend(layer: "Attention", x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Mix the tokens (B, S, W); the bias of `out` gets its gradient from the gated add."""
    bias, heads = layer.qkv.bias, layer.heads
    qkv = F.linear(x, layer.qkv.weight, bias.detach())
    q, k, token = qk(qkv, layer.q_norm.weight, layer.k_norm.weight, cos, sin, bias, heads)
    values = qkv.detach().unflatten(2, (3, heads, -1))[:, :, 2]
    v = Attach.apply(values, token)
    mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return F.linear(mixed.transpose(1, 2).flatten(2), layer.out.weight, layer.out.bias.detach())


def feed(layer: "SwiGLU", x: Tensor) -> Tensor:
    """Transform each token (B, S, W) by itself; `out`'s bias as in `attend`."""
    bias = layer.gate_and_value.bias
    hidden = swiglu(F.linear(x, layer.gate_and_value.weight, bias.detach()), bias)
    return F.linear(hidden, layer.out.weight, layer.out.bias.detach())
