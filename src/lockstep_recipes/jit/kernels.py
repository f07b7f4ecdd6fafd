# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels for everything between a JiT block's matrix products, forward and backward.

Owns: the code of one program. Does not own: torch operators, shapes, program sizes and
launches (`fused.py`).

These operations are limited by memory bandwidth, so the number of reads and writes of an
activation counts. In units U of one activation (B, S, W), at H = 8/3 W, a block's kernels
move 55 U; those that the compiler generates move about 122. Arithmetic is always float32.

No sum uses atomics: these add in the order in which programs finish, so the last bits would
change from run to run. Each program writes the sum of its own rows, and a second, small
kernel adds these partial sums in a fixed order.

Shapes: B images, S tokens, T = B S, W width, A heads, D width of a head, H hidden width.
"""

from types import SimpleNamespace
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # CPU builds lack triton; then nothing here is called
    HAS_TRITON = False
    triton = SimpleNamespace(jit=lambda kernel: kernel)
    tl = SimpleNamespace(constexpr=float)

EPS = tl.constexpr(1e-6)
LOG2_E = tl.constexpr(1.4426950408889634)


def wrap_triton(kernel: Any) -> Any:
    """Make the launch visible to the compiler; call interpreted kernels (TRITON_INTERPRET=1)."""
    return torch.library.wrap_triton(kernel) if isinstance(kernel, triton.JITFunction) else kernel


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


# --- Norm and rotation of queries and keys ----------------------------------------------------
# A row of D channels is kept as two halves, because the rotation mixes them.


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
    """Normalise, weight and rotate rows."""
    rstd = tl.rsqrt((tl.sum(lo * lo, 1) + tl.sum(hi * hi, 1)) / D + EPS)[:, None]
    lo = lo * rstd * w_lo
    hi = hi * rstd * w_hi
    return lo * cos - hi * sin, hi * cos + lo * sin


@triton.jit
def turn_back(lo, hi, d_lo, d_hi, w_lo, w_hi, cos, sin, D: tl.constexpr):
    """Backward of `turn`: gradients of the two halves, and of the weights before their sum."""
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
    A: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute queries and keys of one head and ROWS tokens; reads 2 U, writes 2."""
    pid = tl.program_id(0)
    token = (pid // A) * ROWS + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, D // 2)[None, :]
    inside = token < T
    c = tl.load(cos + (token % S) * (D // 2) + j, mask=inside, other=0.0)
    s = tl.load(sin + (token % S) * (D // 2) + j, mask=inside, other=0.0)
    at = token.to(tl.int64) * (3 * A * D) + (pid % A) * D + j
    to = token.to(tl.int64) * (A * D) + (pid % A) * D + j
    q_lo, q_hi = load_halves(qkv, at, inside, D)
    k_lo, k_hi = load_halves(qkv, at + A * D, inside, D)
    w_lo, w_hi = load_halves(q_weight, j, j < D, D)
    lo, hi = turn(q_lo, q_hi, w_lo, w_hi, c, s, D)
    store_halves(q, to, lo, hi, inside, D)
    w_lo, w_hi = load_halves(k_weight, j, j < D, D)
    lo, hi = turn(k_lo, k_hi, w_lo, w_hi, c, s, D)
    store_halves(k, to, lo, hi, inside, D)


# --- Attention --------------------------------------------------------------------------------
# A program has ROWS tokens of one head and loops over all tokens of the head, COLS at a time.
# So the backward pass computes the scores twice, for sums over keys and for sums over queries:
# one program for both would need atomics, or too many registers. Scores are in base 2.


@triton.jit
def place_of(S: tl.constexpr, A: tl.constexpr, ROWS: tl.constexpr):
    """Return this program's image, head and first token."""
    tiles: tl.constexpr = (S + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    return (pid // tiles // A).to(tl.int64), pid // tiles % A, pid % tiles * ROWS


@triton.jit
def load_rows(of, first, stride, S: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """Load ROWS tokens (ROWS, D) of a head, from the first one at `of`; zeros past the end."""
    row = first + tl.arange(0, ROWS)[:, None]
    return tl.load(of + row * stride + tl.arange(0, D)[None, :], mask=row < S, other=0.0)


@triton.jit
def attention_kernel(
    q, k, qkv, out, lse,
    S: tl.constexpr, A: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Attend with ROWS queries; also store the log-sums (B, A, S). Reads 3 U, writes 1."""
    image, head, first = place_of(S, A, ROWS)
    of = image * S * (A * D) + head * D
    v = qkv + image * S * (3 * A * D) + (2 * A + head) * D
    queries = load_rows(q + of, first, A * D, S, D, ROWS)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D], tl.float32)
    for at in range(0, S, COLS):
        keys = load_rows(k + of, at, A * D, S, D, COLS)
        score = tl.dot(queries, tl.trans(keys))
        if S % COLS > 0:
            score = tl.where(at + tl.arange(0, COLS)[None, :] < S, score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 1) * (LOG2_E / D**0.5))
        p = tl.exp2(score * (LOG2_E / D**0.5) - higher[:, None])
        shrink = tl.exp2(best - higher)
        values = load_rows(v, at, 3 * A * D, S, D, COLS)
        mixed = tl.dot(p.to(values.dtype), values, mixed * shrink[:, None])
        total = total * shrink + tl.sum(p, 1)
        best = higher
    row = first + tl.arange(0, ROWS)
    tl.store(lse + (image * A + head) * S + row, best + tl.log2(total), mask=row < S)
    mixed = (mixed * (1.0 / total)[:, None]).to(out.dtype.element_ty)
    to = out + of + row[:, None] * (A * D) + tl.arange(0, D)[None, :]
    tl.store(to, mixed, mask=row[:, None] < S)


@triton.jit
def store_sum(to, x, N: tl.constexpr, ROWS: tl.constexpr):
    """Store the sum (N,) of low-precision rows (ROWS, N), computed as a matrix product."""
    found = tl.dot(tl.full([16, ROWS], 1.0, x.dtype), x)
    row = tl.arange(0, 16)[:, None]  # all equal
    tl.store(to + 0 * row + tl.arange(0, N)[None, :], found, mask=row == 0)


@triton.jit
def store_turned_back(
    d, qkv, cos, sin, weight, dqkv, bias_sum, weight_sum, first,
    S: tl.constexpr, A: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Backward of rotation and norm for the gradient (ROWS, D) of queries or keys; store sums too.

    Rows past the end may hold anything: their cosines and sines are 0.
    """
    row = first + tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, D // 2)
    d_lo, d_hi = tl.split(tl.permute(tl.reshape(d, [ROWS, 2, D // 2]), [0, 2, 1]))
    lo, hi = load_halves(qkv, row * (3 * A * D) + j[None, :], row < S, D)
    w_lo, w_hi = load_halves(weight, j[None, :], j[None, :] < D, D)
    c = tl.load(cos + row * (D // 2) + j[None, :], mask=row < S, other=0.0)
    s = tl.load(sin + row * (D // 2) + j[None, :], mask=row < S, other=0.0)
    lo, hi, w_lo, w_hi = turn_back(lo, hi, d_lo, d_hi, w_lo, w_hi, c, s, D)
    store_halves(dqkv, row * (3 * A * D) + j[None, :], lo, hi, row < S, D)
    low: tl.constexpr = dqkv.dtype.element_ty
    store_sum(bias_sum, lo.to(low), D // 2, ROWS)
    store_sum(bias_sum + D // 2, hi.to(low), D // 2, ROWS)
    store_sum(weight_sum, w_lo.to(low), D // 2, ROWS)
    store_sum(weight_sum + D // 2, w_hi.to(low), D // 2, ROWS)


@triton.jit
def queries_backward_kernel(
    q, k, qkv, out, d_out, lse, delta, q_weight, cos, sin, dqkv, partial,
    S: tl.constexpr, A: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Gradient of ROWS queries; reads 6 U, writes 1. Stores the sums of d_out * out for the keys.

    `partial` has one row per tile, 5 W wide: the bias of q, k and v, then the norm weights of
    q and of k for each head.
    """
    image, head, first = place_of(S, A, ROWS)
    of = image * S * (A * D) + head * D
    packed = image * S * (3 * A * D) + head * D
    v = qkv + packed + 2 * A * D
    row = first + tl.arange(0, ROWS)
    at_sums = (image * A + head) * S + row
    queries = load_rows(q + of, first, A * D, S, D, ROWS)
    grad = load_rows(d_out + of, first, A * D, S, D, ROWS)
    result = load_rows(out + of, first, A * D, S, D, ROWS)
    sums = tl.load(lse + at_sums, mask=row < S, other=float("inf"))
    along = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(delta + at_sums, along, mask=row < S)
    dq = tl.zeros([ROWS, D], tl.float32)
    for at in range(0, S, COLS):
        keys = load_rows(k + of, at, A * D, S, D, COLS)
        values = load_rows(v, at, 3 * A * D, S, D, COLS)
        score = tl.dot(queries, tl.trans(keys)) * (LOG2_E / D**0.5)
        dp = tl.dot(grad, tl.trans(values))
        p = tl.exp2(score - sums[:, None])
        if S % COLS > 0:
            p = tl.where(at + tl.arange(0, COLS)[None, :] < S, p, 0.0)
        dq = tl.dot((p * (dp - along[:, None])).to(keys.dtype), keys, dq)
    tiles: tl.constexpr = (S + ROWS - 1) // ROWS
    partial += (image * tiles + first // ROWS) * (5 * A * D) + head * D
    store_turned_back(
        dq / D**0.5, qkv + packed, cos, sin, q_weight, dqkv + packed, partial,
        partial + 3 * A * D, first, S, A, D, ROWS,
    )  # fmt: skip


@triton.jit
def keys_backward_kernel(
    q, k, qkv, d_out, lse, delta, k_weight, cos, sin, dqkv, partial,
    S: tl.constexpr, A: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Gradients of ROWS keys and values; reads 6 U, writes 2."""
    image, head, first = place_of(S, A, ROWS)
    of = image * S * (A * D) + head * D
    packed = image * S * (3 * A * D) + (A + head) * D
    lse += (image * A + head) * S
    delta += (image * A + head) * S
    keys = load_rows(k + of, first, A * D, S, D, ROWS)
    values = load_rows(qkv + packed + A * D, first, 3 * A * D, S, D, ROWS)
    tiles: tl.constexpr = (S + ROWS - 1) // ROWS
    partial += (image * tiles + first // ROWS) * (5 * A * D) + (A + head) * D
    # A query's weights add up to 1, so the sum of dv equals the sum of d_out.
    store_sum(partial + A * D, load_rows(d_out + of, first, A * D, S, D, ROWS), D, ROWS)
    dk = tl.zeros([ROWS, D], tl.float32)
    dv = tl.zeros([ROWS, D], tl.float32)
    col = tl.arange(0, COLS)  # of the queries; their sums are loaded one iteration ahead
    next_sums = tl.load(lse + col, mask=col < S, other=float("inf"))
    next_along = tl.load(delta + col, mask=col < S, other=0.0)
    for at in range(0, S, COLS):
        sums = next_sums
        along = next_along
        col = at + COLS + tl.arange(0, COLS)
        next_sums = tl.load(
            lse + col, mask=col < S, other=float("inf")
        )  # makes the power of 2 zero
        next_along = tl.load(delta + col, mask=col < S, other=0.0)
        queries = load_rows(q + of, at, A * D, S, D, COLS)
        grad = load_rows(d_out + of, at, A * D, S, D, COLS)
        score = tl.dot(keys, tl.trans(queries)) * (LOG2_E / D**0.5)
        dp = tl.dot(values, tl.trans(grad))
        p = tl.exp2(score - sums[None, :])
        dv = tl.dot(p.to(grad.dtype), grad, dv)
        dk = tl.dot((p * (dp - along[None, :])).to(queries.dtype), queries, dk)
    row = first + tl.arange(0, ROWS)[:, None]
    to = dqkv + packed + A * D + row * (3 * A * D) + tl.arange(0, D)[None, :]
    tl.store(to, dv.to(dqkv.dtype.element_ty), mask=row < S)
    store_turned_back(
        dk / D**0.5, qkv + packed, cos, sin, k_weight, dqkv + packed, partial,
        partial + 3 * A * D, first, S, A, D, ROWS,
    )  # fmt: skip


# --- Gated add, norm, modulation --------------------------------------------------------------


@triton.jit
def norm_kernel(
    x, branch, gate, weight, shift, scale, x_new, out, rstd, S, chunks, chunk,
    gate_b, shift_b, scale_b,
    W: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """x_new = x + gate * branch where GATED; out = modulated norm of x_new where NORM.

    One chunk of one image, token by token; the next one is loaded meanwhile. Reads and writes
    1 U each for the norm alone, 2 and 2 for both, 2 and 1 for the add alone.
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
    """Backward of `norm_kernel` for one chunk; `d_new` is x_new's gradient from other paths.

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
    """Add an image's partial sums, a twentieth of a U: its own gradients, and its share of others'.

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
