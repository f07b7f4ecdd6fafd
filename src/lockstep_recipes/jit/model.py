"""The JiT network: from a noisy image, a time and a class to a prediction of the same shape.

Owns: the variants, the layers, their initialisation. Does not own: the meaning of the
prediction (clean image, noise or velocity), the loss, the sampler, or the fused computation
of a block on a GPU (`fused.py`).

Shapes:
    B  images                     P  patch side in pixels
    H  image side in pixels       G  patches per side, H / P
    N  patches, G * G             K  class tokens
    S  tokens, N or K + N         W  width
    A  heads                      D  width of a head, W / A
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError, closest

EPS = 1e-6
TIME_FEATURES = 256
LONGEST_PERIOD = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The sizes of a JiT."""

    patch: int
    depth: int
    width: int
    heads: int
    bottleneck: int
    class_tokens: int
    class_tokens_enter: int
    """Index of the first block that sees the class tokens."""
    native_size: int
    dropout: float = 0.0
    """Applied only in the middle half of the blocks."""


def _base(patch: int, native_size: int) -> Variant:
    return Variant(
        patch=patch,
        depth=12,
        width=768,
        heads=12,
        bottleneck=128,
        class_tokens=32,
        class_tokens_enter=4,
        native_size=native_size,
    )


VARIANTS: dict[str, Variant] = {
    "JiT-B/4": _base(patch=4, native_size=64),
    "JiT-B/16": _base(patch=16, native_size=256),
    "JiT-B/32": _base(patch=32, native_size=512),
    "JiT-L/16": Variant(
        patch=16,
        depth=24,
        width=1024,
        heads=16,
        bottleneck=128,
        class_tokens=32,
        class_tokens_enter=8,
        native_size=256,
    ),
    "JiT-H/16": Variant(
        patch=16,
        depth=32,
        width=1280,
        heads=16,
        bottleneck=256,
        class_tokens=32,
        class_tokens_enter=10,
        native_size=256,
        dropout=0.2,
    ),
    # Where G's class tokens enter, and its dropout, are not published: a third of
    # the depth as in B and L, and H's dropout.
    "JiT-G/16": Variant(
        patch=16,
        depth=40,
        width=1664,
        heads=16,
        bottleneck=256,
        class_tokens=32,
        class_tokens_enter=13,
        native_size=256,
        dropout=0.2,
    ),
    "JiT-T/4": Variant(
        patch=4,
        depth=6,
        width=192,
        heads=3,
        bottleneck=48,
        class_tokens=8,
        class_tokens_enter=2,
        native_size=64,
    ),
}


def find_variant(name: str) -> Variant:
    """Return the variant called `name`.

    Raises:
        ConfigError: if there is none; the remedy names the nearest one.
    """
    if name not in VARIANTS:
        near = closest(name, VARIANTS)
        known = ", ".join(VARIANTS)
        remedy = f"use {near}" if near else "use JiT-B/4 (64 px) or JiT-T/4 (tiny)"
        raise ConfigError(f"there is no model {name!r}; known: {known}", remedy)
    return VARIANTS[name]


def check_image_size(name: str, image_size: int) -> None:
    """Refuse an image size that is not a multiple of the variant's patch."""
    patch = find_variant(name).patch
    if image_size < patch or image_size % patch:
        below = image_size - image_size % patch
        nearest = f"{below} or {below + patch}" if below else str(patch)
        raise ConfigError(
            f"image_size={image_size} is not a multiple of the {patch}-pixel patches of {name}",
            f"use image_size={nearest}",
        )


def build_jit(
    name: str, image_size: int, num_classes: int, *, dropout: float | None = None
) -> "JiT":
    """Build the variant `name` for square images of `image_size` pixels.

    With `num_classes` 0 it is unconditional: only the null class is left.
    `dropout` overrides the variant's.

    Raises:
        ConfigError: for an unknown variant, or an image that is not a multiple of its patch.
    """
    check_image_size(name, image_size)
    variant = find_variant(name)
    return JiT(variant, image_size, num_classes, variant.dropout if dropout is None else dropout)


def position_table(grid: int, width: int) -> Tensor:
    """Return position embeddings (N, W): sinusoids of the row, then of the column."""
    num_waves = width // 4
    rate = LONGEST_PERIOD ** (-torch.arange(num_waves) / num_waves)
    angle = torch.arange(grid)[:, None] * rate  # (G, W/4)
    wave = torch.cat([angle.sin(), angle.cos()], dim=1)  # (G, W/2)
    rows = wave[:, None].expand(grid, grid, -1)
    columns = wave[None].expand(grid, grid, -1)
    return torch.cat([columns, rows], dim=2).reshape(grid * grid, -1)


def rotation_table(grid: int, head_width: int, num_unrotated: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines (K + N, 1, D/2) that rotate queries and keys.

    A quarter of a head's channels rotates with the row and another with the column,
    each paired with the channel half a head later. The first `num_unrotated` tokens
    (the class tokens) have no position and are not rotated.
    """
    num_waves = head_width // 4
    rate = LONGEST_PERIOD ** (-torch.arange(num_waves) / num_waves)
    angle = torch.arange(grid)[:, None] * rate  # (G, D/4)
    rows = angle[:, None].expand(grid, grid, -1)
    columns = angle[None].expand(grid, grid, -1)
    turn = torch.cat([rows, columns], dim=2).reshape(grid * grid, -1)  # (N, D/2)
    turn = torch.cat([turn.new_zeros(num_unrotated, turn.shape[1]), turn])[:, None]
    return turn.cos(), turn.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs of `x` (B, S, A, D) by the angles of their tokens."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Scale and shift the tokens (B, S, W) of each image by its own (B, W)."""
    return x * (1 + scale[:, None]) + shift[:, None]


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm that computes and returns float32, even under autocast."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)


class Attention(nn.Module):
    """Self-attention with normalised, rotated queries and keys."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm = RMSNorm(width // heads)
        self.k_norm = RMSNorm(width // heads)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend over the tokens (B, S, W)."""
        out: Tensor = self.dropout(self.out(self.mix(self.qkv(x), cos, sin)))
        return out

    def mix(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return attention (B, S, W) over queries, keys and values (B, S, 3W)."""
        q, k, v = qkv.view(*qkv.shape[:2], 3, self.heads, -1).unbind(2)  # (B, S, A, D) each
        q = rotate(self.q_norm(q), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(k), cos, sin).to(v.dtype)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        )
        return mixed.transpose(1, 2).flatten(2)


class SwiGLU(nn.Module):
    """Gated feed-forward layer; its hidden width is two thirds of four times the input's."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        hidden = int(width * 4 * 2 / 3)
        self.gate_and_value = nn.Linear(width, 2 * hidden)
        self.out = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token (B, S, W) separately."""
        gate, value = self.gate_and_value(x).chunk(2, dim=-1)
        out: Tensor = self.out(self.dropout(F.silu(gate) * value))
        return out


class Block(nn.Module):
    """Attention, then feed-forward; time and class shift, scale and gate both (adaLN-Zero).

    `forward` defines the block. `fused`, if `JiTTask.compile` has set it, computes the same
    up to rounding, with fewer passes over memory.
    """

    fused: Callable[["Block", Tensor, Tensor, Tensor, Tensor], Tensor] | None = None

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = RMSNorm(width)
        self.mlp = SwiGLU(width, dropout)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Update the tokens (B, S, W) under the condition (B, W), to which SiLU was applied."""
        if self.fused is not None:
            return self.fused(self, x, condition, cos, sin)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition).chunk(6, 1)
        mixed = self.attention(modulate(self.attention_norm(x), shift_a, scale_a), cos, sin)
        x = x + gate_a[:, None] * mixed
        fed = self.mlp(modulate(self.mlp_norm(x), shift_m, scale_m))
        updated: Tensor = x + gate_m[:, None] * fed
        return updated


class TimeEmbedding(nn.Module):
    """Embed t, from 0 to 1, by sinusoids and a small network."""

    rate: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        num_waves = TIME_FEATURES // 2
        rate = torch.exp(-math.log(LONGEST_PERIOD) * torch.arange(num_waves) / num_waves)
        self.register_buffer("rate", rate, persistent=False)
        self.inner = nn.Linear(TIME_FEATURES, width)
        self.outer = nn.Linear(width, width)

    def forward(self, t: Tensor) -> Tensor:
        """Embed the times (B,) as (B, W)."""
        angle = t.float()[:, None] * self.rate
        embedding: Tensor = self.outer(
            F.silu(self.inner(torch.cat([angle.cos(), angle.sin()], dim=1)))
        )
        return embedding


def run_blocks(
    blocks: list[nn.Module], x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Update the tokens by some blocks."""
    for block in blocks:
        x = block(x, condition, cos, sin)
    return x


class JiT(nn.Module):
    """The network. The class number `null_class` means "no class"."""

    run_blocks = staticmethod(run_blocks)
    positions: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, variant: Variant, image_size: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        width = variant.width
        depth = variant.depth
        self.variant = variant
        self.image_size = image_size
        self.num_classes = num_classes
        self.null_class = num_classes
        grid = image_size // variant.patch
        patch_values = 3 * variant.patch**2

        self.patch_in = nn.Linear(patch_values, variant.bottleneck, bias=False)
        self.patch_out = nn.Linear(variant.bottleneck, width)
        self.time = TimeEmbedding(width)
        self.classes = nn.Embedding(num_classes + 1, width)
        self.class_positions = nn.Parameter(torch.empty(variant.class_tokens, width))
        self.blocks = nn.ModuleList(
            Block(width, variant.heads, dropout if depth <= 4 * i < 3 * depth else 0.0)
            for i in range(depth)
        )
        self.final_norm = RMSNorm(width)
        self.final_modulation = nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, patch_values)

        self.register_buffer("positions", position_table(grid, width), persistent=False)
        head_width = width // variant.heads
        cos, sin = rotation_table(grid, head_width, variant.class_tokens)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise: every block starts as the identity, and the output is zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for embedding in (self.classes.weight, self.class_positions):
            nn.init.normal_(embedding, std=0.02)
        for layer in (self.time.inner, self.time.outer):
            nn.init.normal_(layer.weight, std=0.02)
        modulations = [module for name, module in self.named_modules() if "modulation" in name]
        for module in (*modulations, self.head):
            assert isinstance(module, nn.Linear)
            nn.init.zeros_(module.weight)

    def forward(self, image: Tensor, t: Tensor, label: Tensor) -> Tensor:
        """Predict (B, 3, H, H) from noisy images (B, 3, H, H), times (B,) and classes (B,)."""
        x, condition, class_embedding = self.embed(image, t, label)
        blocks = list(self.blocks)
        enter = self.variant.class_tokens_enter
        num_class_tokens = self.variant.class_tokens
        cos = self.cos[num_class_tokens:]
        sin = self.sin[num_class_tokens:]
        x = self.run_blocks(blocks[:enter], x, condition, cos, sin)
        class_tokens = class_embedding[:, None] + self.class_positions  # (B, K, W)
        x = torch.cat([class_tokens.to(x.dtype), x], dim=1)
        for first in range(enter, len(blocks), enter):  # in groups of one size: compiled once
            x = self.run_blocks(blocks[first : first + enter], x, condition, self.cos, self.sin)
        return self.read_out(x, condition)

    def embed(self, image: Tensor, t: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the patches as tokens (B, N, W), the condition (B, W) and the class embedding.

        The tokens keep the dtype of their layer's output: under autocast the whole residual
        stream is in low precision, as in the published network.
        """
        class_embedding = self.classes(label)
        condition = F.silu(self.time(t) + class_embedding)
        x = self.patch_out(self.patch_in(self.to_patches(image)))
        return x + self.positions.to(x.dtype), condition, class_embedding

    def read_out(self, x: Tensor, condition: Tensor) -> Tensor:
        """Turn the tokens (B, K + N, W) into the prediction (B, 3, H, H)."""
        x = x[:, self.variant.class_tokens :]
        shift, scale = self.final_modulation(condition).chunk(2, dim=1)
        return self.to_image(self.head(modulate(self.final_norm(x), shift, scale)))

    def to_patches(self, image: Tensor) -> Tensor:
        """Split images (B, 3, H, H) into rows of patches (B, N, 3 P P)."""
        side = self.image_size // self.variant.patch
        patch = self.variant.patch
        cut = image.reshape(-1, 3, side, patch, side, patch)
        return cut.permute(0, 2, 4, 1, 3, 5).reshape(-1, side * side, 3 * patch * patch)

    def to_image(self, patches: Tensor) -> Tensor:
        """Undo `to_patches`."""
        side = self.image_size // self.variant.patch
        patch = self.variant.patch
        cut = patches.reshape(-1, side, side, 3, patch, patch)
        return cut.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, side * patch, side * patch)
