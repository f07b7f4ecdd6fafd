# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels for what lies between a JiT block's matrix products, forward and backward.

Owns: what a program reads, computes and writes. Does not own: what torch sees of it,
shapes, sizes of programs, launches (`fused.py`).

All of it waits for memory, so what counts is how often an activation is read and written.
In units U of one activation (B, S, W), at H = 8/3 W, a block's kernels move 55 U where
the compiler's own move about 122. Arithmetic is in float32 whatever is read and written.

No sum is made with atomics: they add in the order in which programs happen to end, and
the last bits would change from run to run. A program writes the sum of its own rows, and a
second, small kernel adds these partial sums in a fixed order.

Shapes: B images, S tokens, T = B S, W width, A heads, D width of a head, H hidden width.
"""

from types import SimpleNamespace
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # installs for the CPU lack it; then nothing here is ever called
    HAS_TRITON = False
    triton = SimpleNamespace(jit=lambda kernel: kernel)
    tl = SimpleNamespace(constexpr=float)

EPS = tl.constexpr(1e-6)


def wrap_triton(kernel: Any) -> Any:
    """Let the compiler see the launch; an interpreted kernel (TRITON_INTERPRET=1) is called."""
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
