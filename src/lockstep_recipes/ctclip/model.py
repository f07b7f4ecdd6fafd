"""The image and text encoders and their shared space.

Owns: CTViT, the transformer over words, the codebook, the projections, the temperature.
Does not own: the loss, which needs the embeddings of other ranks.

Shapes: B samples, T slabs in depth, h x w patches in the plane, C channels, L words.
"""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep_recipes.ctclip.config import Clip, ImageEncoder, TextEncoder
from lockstep_recipes.ctclip.text import PAD, import_transformers

ATTENTION_SCALE = 8.0
"""Scale of cosine attention: queries and keys have length one."""
FIRST_TAU = {"softmax": 1.0, "siglip": math.log(10)}
FIRST_SHIFT = -10.0
"""Initial bias of SigLIP, since nearly all pairs are negatives."""
COMMITMENT = 0.25
"""Commitment weight: pull of a token to its code, relative to that of a code to its tokens."""


class CosineAttention(nn.Module):
    """Attention by the angle between queries and keys, with learned scales."""

    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.q_scale = nn.Parameter(torch.ones(dim_head))
        self.k_scale = nn.Parameter(torch.ones(dim_head))
        self.out = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend within each row: x (N, L, C), bias (heads, L, L)."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q = (F.normalize(q, dim=-1) * self.q_scale).to(v.dtype).transpose(1, 2)
        k = (F.normalize(k, dim=-1) * self.k_scale).to(v.dtype).transpose(1, 2)
        mask = None if bias is None else bias[None].to(v.dtype)
        mixed = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), attn_mask=mask, scale=ATTENTION_SCALE
        )
        made: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return made


class GatedFeedForward(nn.Module):
    """GEGLU with two thirds of the usual width, so it has as many weights as without a gate."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        inner = round(dim / 3) * 8
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * inner, bias=False)
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(self.norm(x)).chunk(2, dim=-1)
        made: Tensor = self.down(value * F.gelu(gate))
        return made


class PositionGenerator(nn.Module):
    """Encode positions by a depth-wise convolution that is causal in depth."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        spread = 27**-0.5
        self.weight = nn.Parameter(torch.empty(dim, 3, 3, 3).uniform_(-spread, spread))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        is_mixed = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_mixed else x.dtype
        padded = F.pad(x.permute(0, 4, 1, 2, 3), (1, 1, 1, 1, 2, 0))
        made: Tensor = _DepthWise.apply(  # type: ignore[no-untyped-call]
            padded.to(dtype), self.weight.to(dtype)
        )
        return made.permute(0, 2, 3, 4, 1) + self.bias.to(dtype)


class _DepthWise(torch.autograd.Function):
    """A depth-wise 3 x 3 x 3 convolution, (B, C, T, h, w), without padding.

    cuDNN computes the gradient of the weights with one launch per channel: at full size, nine
    tenths of a training step. Here it takes one sum for each of the 27 weights.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv3d(x, weight[:, None], groups=len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        turned = weight.flip(1, 2, 3)[:, None]
        x_grad = F.conv3d(F.pad(grad, (2,) * 6), turned, groups=len(weight))
        depth, height, width = grad.shape[2:]
        sums = [
            (grad * x[:, :, z : z + depth, row : row + height, column : column + width]).sum(
                (0, 2, 3, 4)
            )
            for z in range(3)
            for row in range(3)
            for column in range(3)
        ]
        return x_grad, torch.stack(sums, dim=1).view_as(weight)


class PlaneBias(nn.Module):
    """An attention bias for each pair of patches, computed from their offset by a small network."""

    offsets: Tensor
    index: Tensor

    def __init__(self, side: int, dim: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, dim), nn.LeakyReLU(0.1), nn.Linear(dim, dim), nn.LeakyReLU(0.1)
        )
        self.out = nn.Linear(dim, heads)
        offsets, index = _ways(side)
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("index", index, persistent=False)

    def forward(self) -> Tensor:
        """Return (heads, side^2, side^2)."""
        # Each offset once, not each pair: 2,209 rows instead of 331,776.
        ways: Tensor = self.out(self.layers(self.offsets))
        return ways[self.index].permute(2, 0, 1)


def _ways(side: int) -> tuple[Tensor, Tensor]:
    """Return the offsets in a square on a log scale, and the index of each pair's offset."""
    span = torch.arange(1 - side, side)
    offsets = torch.stack(torch.meshgrid(span, span, indexing="ij"), dim=-1).flatten(0, 1).float()
    place = torch.stack(torch.meshgrid(*[torch.arange(side)] * 2, indexing="ij"), -1).flatten(0, 1)
    apart = place[:, None] - place[None] + side - 1
    return offsets.sign() * offsets.abs().log1p(), apart[..., 0] * (2 * side - 1) + apart[..., 1]


class Layer(nn.Module):
    """Positions, attention and feed-forward, each with a residual connection."""

    def __init__(self, config: ImageEncoder) -> None:
        super().__init__()
        self.position = PositionGenerator(config.dim)
        self.attention = CosineAttention(config.dim, config.heads, config.dim_head)
        self.feed_forward = GatedFeedForward(config.dim)

    def spatial(self, x: Tensor, bias: Tensor) -> Tensor:
        """Attend among the patches of each slab."""
        x = x + self.position(x)
        rows = x.flatten(2, 3).flatten(0, 1)
        x = x + self.attention(rows, bias).view_as(x)
        forward: Tensor = self.feed_forward(x)
        return x + forward

    def temporal(self, x: Tensor) -> Tensor:
        """Attend among the slabs at each position."""
        x = x + self.position(x)
        columns = x.flatten(2, 3).transpose(1, 2)
        mixed = self.attention(columns.flatten(0, 1)).view_as(columns)
        x = x + mixed.transpose(1, 2).view_as(x)
        forward: Tensor = self.feed_forward(x)
        return x + forward


class Codebook(nn.Module):
    """Replace each token by its nearest code, with a straight-through gradient."""

    def __init__(self, num_codes: int, dim: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(num_codes, dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of x (B, ..., C), and each sample's mean distance to them (B,)."""
        x = F.normalize(x, dim=-1)
        codes = F.normalize(self.codes, dim=-1)
        with torch.no_grad():
            nearest = (x @ codes.T.to(x.dtype)).argmax(dim=-1)
        chosen = codes[nearest].to(x.dtype)
        apart = 1 - (x.detach() * chosen).sum(-1) + COMMITMENT * (1 - (x * chosen.detach()).sum(-1))
        return x + (chosen - x).detach(), apart.flatten(1).mean(1)


class CTViT(nn.Module):
    """Attention within slabs, then along the depth: (B, 1, D, H, W) to (B, h * w * C)."""

    def __init__(self, config: ImageEncoder) -> None:
        super().__init__()
        self.config = config
        size = config.temporal_patch_size * config.patch_size**2
        self.embed = nn.Sequential(
            nn.LayerNorm(size), nn.Linear(size, config.dim), nn.LayerNorm(config.dim)
        )
        side = config.image_size // config.patch_size
        self.bias = PlaneBias(side, config.dim, config.heads)
        self.spatial = nn.ModuleList(Layer(config) for _ in range(config.spatial_depth))
        self.spatial_norm = nn.LayerNorm(config.dim)
        self.temporal = nn.ModuleList(Layer(config) for _ in range(config.temporal_depth))
        self.temporal_norm = nn.LayerNorm(config.dim)
        self.codebook = Codebook(config.codebook_size, config.dim) if config.codebook_size else None

    def forward(self, volume: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of each volume, and its distance to the codebook (0 without one)."""
        p = self.config.patch_size
        t = self.config.temporal_patch_size
        num, _, depth, height, width = volume.shape
        patches = volume.view(num, depth // t, t, height // p, p, width // p, p)
        x = self.embed(patches.permute(0, 1, 3, 5, 2, 4, 6).flatten(4))  # B T h w (t p p)
        bias = self.bias()
        for layer in self.spatial:
            x = layer.spatial(x, bias)  # type: ignore[operator]
        x = self.spatial_norm(x)
        for layer in self.temporal:
            x = layer.temporal(x)  # type: ignore[operator]
        x = self.temporal_norm(x)
        apart = x.new_zeros(len(x))
        if self.codebook is not None:
            x, apart = self.codebook(x)
        return x.mean(dim=1).flatten(1), apart


class WordBlock(nn.Module):
    """Attention and feed-forward over words."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.feed_forward = GatedFeedForward(dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        forward: Tensor = self.feed_forward(x)
        return x + forward


class WordTower(nn.Module):
    """A transformer over words: tokens (B, L) to (B, C), taken from the first token.

    A convolution over neighbouring words comes first: it binds "no" to the next word, and
    replaces position embeddings.
    """

    def __init__(self, num_words: int, config: TextEncoder) -> None:
        super().__init__()
        self.dim = config.dim
        self.words = nn.Embedding(num_words, config.dim, padding_idx=PAD)
        nn.init.normal_(self.words.weight, std=0.5)
        self.neighbours = nn.Conv1d(config.dim, config.dim, 5, padding=2)
        self.blocks = nn.ModuleList(
            WordBlock(config.dim, config.heads) for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens != PAD
        # Zero the padding, or a text would depend on the length of others in the batch.
        x = self.words(tokens) * mask[..., None]
        x = x + self.neighbours(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x, mask)
        made: Tensor = self.norm(x[:, 0])
        return made


class LocalTower(nn.Module):
    """A local Hugging Face model: tokens as `LocalTokenizer` numbers them, to (B, C)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        transformers = import_transformers(path)
        self.inner: Any = transformers.AutoModel.from_pretrained(path, local_files_only=True)
        self.dim: int = self.inner.config.hidden_size
        if getattr(self.inner, "pooler", None) is not None:
            self.inner.pooler.requires_grad_(False)  # the first token does not need it

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens != PAD
        numbers = (tokens - 1).clamp(min=0)
        found = self.inner(input_ids=numbers, attention_mask=mask.long())
        return found.last_hidden_state[:, 0]  # type: ignore[no-any-return]


class CTClip(nn.Module):
    """Both encoders, projected to unit vectors of one space."""

    def __init__(self, image: CTViT, text: WordTower | LocalTower, config: Clip) -> None:
        super().__init__()
        if config.dim_text not in (None, text.dim):
            raise ConfigError(
                f"model.clip.dim_text is {config.dim_text}, the text encoder gives {text.dim}",
                "leave dim_text out",
            )
        self.image_tower = image
        self.text_tower = text
        self.image_projection = nn.Linear(config.dim_image, config.dim_latent, bias=False)
        self.text_projection = nn.Linear(text.dim, config.dim_latent, bias=False)
        tau = FIRST_TAU[config.loss] if config.tau is None else config.tau
        self.tau = nn.Parameter(torch.tensor(tau))
        self.shift = nn.Parameter(torch.tensor(FIRST_SHIFT)) if config.loss == "siglip" else None

    def forward(self, volume: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Return unit embeddings (B, latent), the temperature, SigLIP's bias, code distances (B,).

        All trained parameters are used in this call, as DDP requires.
        """
        described, apart = self.image_tower(volume.to(self.tau.dtype))
        made = {
            "image": direction(self.image_projection(described)),
            "text": self.embed_text(tokens),
            "scale": self.tau.exp(),
            "apart": apart,
        }
        return made if self.shift is None else made | {"shift": self.shift}

    def embed_text(self, tokens: Tensor) -> Tensor:
        """Return the unit embeddings of texts."""
        return direction(self.text_projection(self.text_tower(tokens)))


def direction(x: Tensor) -> Tensor:
    """Scale rows to length one, in at least single precision."""
    return F.normalize(x if x.dtype == torch.float64 else x.float(), dim=-1)
