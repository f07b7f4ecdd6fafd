"""VGGT's aggregator: attention within each image, then over all images, in turns.

Owns: the blocks, the camera and register tokens, positions, reading published weights.
Does not own: VGGT's camera, depth and point heads, which are not built (see model.py), or
whether it is trained. Parameters have VGGT's names, so that its weights load.

Shapes: B samples, S images of a sample, N patches and P = 5 + N tokens of an image,
C channels, D channels of an attention head.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep_recipes.precision import lowered

PATCH = 14
NUM_REGISTERS = 4
ROPE_BASE = 100.0
DINO_SIDE = 37
"""Patches along a side of the images that published weights were trained on: 518 / 14."""
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Of ImageNet, which published weights were trained on."""

Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Preset:
    """How large an aggregator is, and what turns pixels into patch tokens."""

    width: int
    depth: int
    """Pairs of frame and global blocks."""
    heads: int
    has_dino: bool = False
    """DINOv2 ViT-L/14 before the aggregator, as published; else one convolution."""
    layer_scale: float = 0.01
    """What a block's branches are multiplied by at first. The published value suits 24
    pairs; a few blocks that start from random weights would learn very slowly with it."""


PRESETS = {
    "micro": Preset(width=96, depth=2, heads=3, layer_scale=0.1),
    "tiny": Preset(width=192, depth=4, heads=3, layer_scale=0.1),
    "full": Preset(width=1024, depth=24, heads=16, has_dino=True),
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a geometry backbone knows of a sample's images."""

    layers: list[Tensor]
    """The last outputs, each (B, S, P, 2C): after frame attention beside after global."""
    patch_start: int
    """How many tokens stand before the patches; the first of them is the camera's."""
    pose: Tensor | None = None
    """(B, S, 9): translation, quaternion, field of view; None where it has no such head."""
    points: Tensor | None = None
    """(B, S, h, w, 3): where in the world each place of the image is; likewise."""


@lru_cache(maxsize=32)
def rope_table(side: tuple[int, int], dim: int, device: torch.device, dtype: torch.dtype) -> Rope:
    """Return cosines and sines (P, 1, 1, D) of an image's places, half for rows, half for columns.

    Special tokens stand at position 0, patches begin at 1. Sines have the sign that a rotation
    gives the channel they are multiplied with.
    """
    ranges = (torch.arange(1, num + 1, device=device) for num in side)
    rows, columns = torch.meshgrid(*ranges, indexing="ij")
    place = torch.stack((rows.flatten(), columns.flatten()), dim=1)
    place = torch.cat((place.new_zeros(1 + NUM_REGISTERS, 2), place)).to(dtype)
    quarter = dim // 4
    frequencies = ROPE_BASE ** (-torch.arange(quarter, device=device) / quarter).to(dtype)
    angles = place[:, :, None] * frequencies  # P, 2, D / 4
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat((cos, cos), dim=2), torch.cat((-sin, sin), dim=2)
    return cos.flatten(1)[:, None, None], sin.flatten(1)[:, None, None]


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Turn queries and keys (B, P, 2, heads, D) by the angles of their positions."""
    cos, sin = rope
    swapped = x.view(*x.shape[:-1], 2, 2, -1).flip(-2).flatten(-3)
    return x * cos + swapped * sin


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Mix values by queries and keys, all (B, P, heads, D), and lay heads side by side."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return mixed.transpose(1, 2).flatten(2)


def mask_bias(mask: Tensor, like: Tensor) -> Tensor:
    """Return what to add to the scores of attention (B, 1, 1, P), made of which keys count."""
    bias = torch.where(mask, 0.0, -torch.inf).to(like.dtype)
    return lowered(bias)[:, None, None, :]


class Attention(nn.Module):
    """Self-attention with normalised queries and keys."""

    def __init__(self, width: int, heads: int, *, qk_norm: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm = nn.LayerNorm(width // heads) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(width // heads) if qk_norm else nn.Identity()
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, rope: Rope | None = None, bias: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).unbind(2)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(torch.stack((q, k), dim=2).to(v.dtype), rope).unbind(2)
        out: Tensor = self.proj(attend(q.to(v.dtype), k.to(v.dtype), v, bias))
        return out


class LayerScale(nn.Module):
    """A factor per channel, small at first."""

    def __init__(self, width: int, initial: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), initial))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Mlp(nn.Module):
    """Two layers, four times as wide between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    """A pre-norm transformer block with LayerScale."""

    def __init__(
        self,
        width: int,
        heads: int,
        layer_scale: float = 0.01,
        *,
        qk_norm: bool = True,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.attn, self.mlp = Attention(width, heads, qk_norm=qk_norm), Mlp(width)
        self.ls1, self.ls2 = LayerScale(width, layer_scale), LayerScale(width, layer_scale)

    def forward(self, x: Tensor, rope: Rope | None = None, bias: Tensor | None = None) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x), rope, bias))
        out: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return out


class PatchEmbed(nn.Module):
    """One convolution from 14 x 14 pixels to a token: (B, 3, H, W) to (B, N, C)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, PATCH, PATCH)

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.proj(images)
        return tokens.flatten(2).transpose(1, 2)


class DinoEmbed(nn.Module):
    """DINOv2 with registers: what stands before the published aggregator."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.register_tokens = nn.Parameter(torch.zeros(1, NUM_REGISTERS, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 1 + DINO_SIDE**2, width))
        blocks = (Block(width, heads, 1.0, qk_norm=False, eps=1e-6) for _ in range(depth))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width, 1e-6)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embed(images)
        side = (images.shape[2] // PATCH, images.shape[3] // PATCH)
        x = torch.cat((self.cls_token.expand(len(patches), -1, -1), patches), dim=1)
        x = x + self._positions(side).to(x.dtype)
        registers = self.register_tokens.expand(len(x), -1, -1).to(x.dtype)
        x = torch.cat((x[:, :1], registers, x[:, 1:]), dim=1)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)[:, 1 + NUM_REGISTERS :]
        return out

    def _positions(self, side: tuple[int, int]) -> Tensor:
        if side == (DINO_SIDE, DINO_SIDE):
            return self.pos_embed
        grid = self.pos_embed[:, 1:].mT.reshape(1, -1, DINO_SIDE, DINO_SIDE)
        grid = F.interpolate(grid.float(), side, mode="bicubic", antialias=True)
        return torch.cat((self.pos_embed[:, :1], grid.flatten(2).transpose(1, 2)), dim=1)


class Aggregator(nn.Module):
    """Frame and global attention in turns over the tokens of all images of a sample.

    Every image gets a camera token and four registers; those of the first image are
    learned apart from the others', because its camera is the frame of reference.
    """

    gives: frozenset[str] = frozenset()

    mean: Tensor
    std: Tensor

    def __init__(self, preset: Preset, num_outputs: int = 2) -> None:
        super().__init__()
        width = preset.width
        self.width = 2 * width
        self.num_outputs = num_outputs
        self.patch_embed: nn.Module = PatchEmbed(width)
        if preset.has_dino:
            self.patch_embed = DinoEmbed(width, preset.depth, preset.heads)

        def blocks() -> nn.ModuleList:
            made = (Block(width, preset.heads, preset.layer_scale) for _ in range(preset.depth))
            return nn.ModuleList(made)

        self.frame_blocks, self.global_blocks = blocks(), blocks()
        self.head_dim = width // preset.heads
        for name, values in (("mean", MEAN), ("std", STD)):
            numbers = torch.tensor(values, dtype=torch.float64)[:, None, None]
            self.register_buffer(name, numbers, persistent=False)
        self.camera_token = nn.Parameter(1e-6 * torch.randn(1, 2, 1, width))
        self.register_token = nn.Parameter(1e-6 * torch.randn(1, 2, NUM_REGISTERS, width))

    def forward(self, images: Tensor) -> Geometry:
        """Take images (B, S, 3, H, W) in 0..1; sides are multiples of 14."""
        num, count, _, *pixels = images.shape
        standard = (images - self.mean.to(images.dtype)) / self.std.to(images.dtype)
        patches = self.patch_embed(standard.flatten(0, 1))
        special = torch.cat((self.camera_token, self.register_token), dim=2)
        first, others = special[:, :1], special[:, 1:].expand(-1, count - 1, -1, -1)
        special = torch.cat((first, others), dim=1).expand(num, -1, -1, -1).to(patches.dtype)
        tokens = torch.cat((special, patches.unflatten(0, (num, count))), dim=2)

        side = (pixels[0] // PATCH, pixels[1] // PATCH)
        cos, sin = map(lowered, rope_table(side, self.head_dim, images.device, images.dtype))
        rope, rope_all = (cos, sin), (cos.repeat(count, 1, 1, 1), sin.repeat(count, 1, 1, 1))
        pairs: list[tuple[Tensor, Tensor]] = []
        for frame_block, global_block in zip(self.frame_blocks, self.global_blocks, strict=True):
            within = frame_block(tokens.flatten(0, 1), rope).unflatten(0, (num, count))
            tokens = global_block(within.flatten(1, 2), rope_all).unflatten(1, (count, -1))
            pairs.append((within, tokens))
        layers = [torch.cat(pair, dim=-1) for pair in pairs[-self.num_outputs :]]
        return Geometry(layers, patch_start=special.shape[2])


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a local file, by name.

    Raises:
        ConfigError: if it is no file of plain tensors.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
        while isinstance(state, dict) and isinstance(state.get("model"), dict):
            state = state["model"]
        if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
            raise ValueError("it holds no named tensors")
    except Exception as error:  # whatever a damaged file makes torch or safetensors raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        problem = f"{path} holds no weights: {reason}"
        raise ConfigError(problem, "set vggt_checkpoint to a file of weights") from None
    return state


def load_aggregator(aggregator: Aggregator, path: Path) -> None:
    """Fill the aggregator from a checkpoint of VGGT, or of an aggregator alone.

    Raises:
        ConfigError: naming the first tensor that is missing or has another shape.
    """
    found = read_weights(path)
    for prefix in ("module.", "aggregator."):
        inside = {name.removeprefix(prefix): v for name, v in found.items() if prefix in name[:11]}
        found = inside or found
    for name, own in aggregator.state_dict().items():
        other = tuple(found[name].shape) if name in found else "missing"
        if other != tuple(own.shape):
            raise ConfigError(
                f"{path} does not fit: {name} is {other}, not {tuple(own.shape)}",
                "set the vggt_preset it was saved from; published weights are `full`",
            )
    aggregator.load_state_dict(found, strict=False)  # heads are in the file, too


def num_parameters(module: nn.Module) -> int:
    """Return how many numbers a module learns or has learned."""
    return sum(math.prod(p.shape) for p in module.parameters())
