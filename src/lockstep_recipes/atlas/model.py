"""The policy: geometry and language backbones, their fusion, and an action head.

Owns: the two backbone interfaces, the small language encoder, the layers on top of the
backbones, and freezing a backbone. Does not own: VGGT's blocks (vggt.py), files of episodes,
losses. Actions and states are standardised here.

Shapes: B samples, S images of a sample, L words, G geometry channels, F fusion channels.
"""

import importlib
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep_recipes.atlas.section import Section
from lockstep_recipes.atlas.vggt import (
    PRESETS,
    Aggregator,
    Block,
    Geometry,
    Mlp,
    attend,
    load_aggregator,
    mask_bias,
)
from lockstep_recipes.precision import lowered

MAX_WORDS = 128
VOCABULARY = 4096
LANGUAGE_PRESETS = {"micro": (64, 2, 2), "tiny": (256, 4, 4)}
"""Width, layers, attention heads."""


class ModelConfig(Section):
    """The `model` section."""

    freeze_vggt: bool = True
    freeze_lang_encoder: bool = False
    vggt_checkpoint: Path | None = None
    lang_encoder_name: str | None = None
    geom_output_dim: int = Field(default=512, ge=1)
    fusion_hidden_dim: int = Field(default=1024, ge=8)
    action_dim: int = Field(default=7, ge=2)
    use_pointnet: bool = True
    use_pose: bool = True
    use_quaternion: bool = False
    use_diffusion_head: bool = False
    use_attention_pooling: bool = False
    vggt_preset: Literal["micro", "tiny", "full"] = "tiny"
    lang_preset: Literal["micro", "tiny"] = "tiny"
    allow_random_backbone: bool = True
    """Use random weights if a named checkpoint is missing."""
    has_gripper: bool = True
    """Whether the last column of an action is a gripper."""
    predict_residual: bool = False
    """Predict the change from the previous action, which needs `data.use_last_action`."""
    fusion_layers: int = Field(default=4, ge=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        reasons = {
            "use_quaternion": "the head predicts the columns of the actions as recorded",
            "use_diffusion_head": "one action per frame is regressed, not sampled",
        }
        for name, reason in reasons.items():
            if getattr(self, name):
                raise ConfigError(f"model.{name} is not supported: {reason}", f"set {name}: false")
        heads = _num_heads(self.fusion_hidden_dim)
        if self.fusion_hidden_dim % heads:
            raise ConfigError(
                f"model.fusion_hidden_dim={self.fusion_hidden_dim} cannot be split into {heads} "
                "attention heads",
                f"set fusion_hidden_dim: {self.fusion_hidden_dim // 64 * 64}",
            )
        return self

    @property
    def num_pose(self) -> int:
        """Number of columns of an action without the gripper."""
        return self.action_dim - self.has_gripper


class GeometryBackbone(Protocol):
    """Turns a sample's images into tokens; VGGT's aggregator is one."""

    width: int
    """Channels of a token."""
    gives: frozenset[str]
    """For which of "pose" and "points" it has heads."""

    def __call__(self, images: Tensor) -> Geometry:
        """Take images (B, S, 3, H, W) in 0..1."""


class LanguageBackbone(Protocol):
    """Turns word numbers into a vector per word."""

    hidden_size: int

    def __call__(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Take word numbers and their mask, both (B, L); return (B, L, hidden_size)."""


class Tokenizer(Protocol):
    """Turns instructions into word numbers."""

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return word numbers and their mask, both (B, L)."""


# --- language ------------------------------------------------------------------------------------


def hash_words(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Number words by a checksum, which needs no vocabulary and is the same on every machine.

    >>> tokens, mask = hash_words(["Lift the cup", "lift"])
    >>> tokens.shape, mask.sum(dim=1).tolist(), bool(tokens[0, 1] == tokens[1, 1])
    (torch.Size([2, 4]), [4, 2], True)
    """
    rows = []
    for text in texts:
        words = re.findall(r"\w+|[^\w\s]", text.lower())[: MAX_WORDS - 1]
        numbers = [2 + zlib.crc32(word.encode()) % (VOCABULARY - 2) for word in words]
        rows.append(torch.tensor([1, *numbers]))  # 1 begins every text, so none is empty
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return tokens, tokens > 0


class TextEncoder(nn.Module):
    """A small transformer over hashed words."""

    def __init__(self, preset: str) -> None:
        super().__init__()
        self.hidden_size, layers, heads = LANGUAGE_PRESETS[preset]
        self.words = nn.Embedding(VOCABULARY, self.hidden_size)
        self.places = nn.Embedding(MAX_WORDS, self.hidden_size)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.5)
        blocks = (Block(self.hidden_size, heads, 1.0) for _ in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(self.hidden_size)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        bias = mask_bias(mask, x)
        for block in self.blocks:
            x = block(x, bias=bias)
        out: Tensor = self.norm(x)
        return out


class PretrainedText(nn.Module):
    """A language model that `transformers` reads from a local folder."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.hidden_size = int(inner.config.hidden_size)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.inner(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        return hidden


def pretrained_tokenizer(folder: str) -> Tokenizer:
    """Return the tokenizer of a local language model."""
    inner = _transformers(folder).AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if inner.pad_token is None:
        inner.pad_token = inner.eos_token  # Llama has none; the mask hides padding

    def number(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        made = inner(
            list(texts), padding=True, truncation=True, max_length=MAX_WORDS, return_tensors="pt"
        )
        return made["input_ids"], made["attention_mask"].bool()

    return number


def pretrained_text(folder: str) -> PretrainedText:
    """Return a local language model."""
    model = _transformers(folder).AutoModel.from_pretrained(folder, local_files_only=True)
    return PretrainedText(model)


def _transformers(folder: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise ConfigError(
            f"the language model in {folder} needs transformers, which is not installed",
            "run pip install transformers, or set lang_encoder_name: null for the small encoder",
        ) from None


# --- geometry ------------------------------------------------------------------------------------


class PointNet(nn.Module):
    """One vector from a set of points: (B, 3, N) to (B, 256).

    It uses group normalisation instead of batch normalisation: batches are small, and a
    sample's features must not depend on the other samples on its GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 64), (64, 128), (128, 256)):
            layers += [nn.Conv1d(before, after, 1), nn.GroupNorm(8, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, points: Tensor) -> Tensor:
        features: Tensor = self.layers(points)
        return features.amax(dim=2)


class GeometryEncoder(nn.Module):
    """One vector per image, from a backbone's patches, camera pose and world points.

    A backbone without heads for pose and points gets small ones here. They are trained even
    if the backbone is frozen, since no weights for them exist.
    """

    def __init__(self, backbone: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        self.backbone = backbone
        self.is_frozen = config.freeze_vggt
        width, gives = int(backbone.width), backbone.gives  # type: ignore[arg-type]
        self.patches = nn.Sequential(nn.Linear(width, 256), nn.LayerNorm(256), nn.GELU())
        total = 256
        if config.use_pointnet:
            if "points" not in gives:  # type: ignore[operator]
                self.to_points = nn.Linear(width, 3)
            self.pointnet = PointNet()
            total += 256
        if config.use_pose:
            if "pose" not in gives:  # type: ignore[operator]
                self.camera = Block(width, _num_heads(width), 1.0)
                self.to_pose = nn.Linear(width, 9)
            self.pose = nn.Sequential(nn.Linear(9, 128), nn.GELU())
            total += 128
        self.uses = (config.use_pointnet, config.use_pose)
        self.out = nn.Linear(total, config.geom_output_dim)

    def forward(self, images: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            seen: Geometry = self.backbone(images)
        tokens = torch.stack(seen.layers).mean(dim=0)
        patches = tokens[:, :, seen.patch_start :]
        features = [self.patches(patches.mean(dim=2))]
        if self.uses[0]:
            points = self.to_points(patches) if seen.points is None else seen.points.flatten(2, 3)
            features += [self.pointnet(points.flatten(0, 1).mT).unflatten(0, points.shape[:2])]
        if self.uses[1]:
            pose = seen.pose
            if pose is None:
                pose = self.to_pose(self.camera(seen.layers[-1][:, :, 0]))
            features += [self.pose(pose)]
        out: Tensor = self.out(torch.cat(features, dim=-1))
        return out


# --- fusion and head -----------------------------------------------------------------------------


class CrossAttention(nn.Module):
    """Attention of queries (B, L, F) to a memory (B, M, F)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = _num_heads(width)
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(2, (self.heads, -1))
        k, v = self.kv(memory).unflatten(2, (2, self.heads, -1)).unbind(2)
        out: Tensor = self.proj(attend(q, k, v, bias))
        return out


class FusionLayer(nn.Module):
    """Words attend to each other, then to the images; pre-norm."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.among = CrossAttention(width)
        self.across = CrossAttention(width)
        self.mlp = Mlp(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        own = lowered(self.norms[0](x))
        x = x + self.dropout(self.among(own, own, bias))
        x = x + self.dropout(self.across(self.norms[1](x), memory))
        out: Tensor = x + self.dropout(self.mlp(self.norms[2](x)))
        return out


class AtlasNet(nn.Module):
    """Predict an action from images, an instruction and, optionally, the robot's state.

    Args:
        config: The `model` section.
        geometry: A `GeometryBackbone`.
        language: A `LanguageBackbone`.
        num_images: Number of images in a sample, S: views x times.
        num_own: Number of values of the robot (states, previous actions); 0: none.
    """

    def __init__(
        self,
        config: ModelConfig,
        geometry: nn.Module,
        language: nn.Module,
        num_images: int = 2,
        num_own: int = 0,
    ) -> None:
        super().__init__()
        width = config.fusion_hidden_dim
        self.config = config
        self.geometry = GeometryEncoder(geometry, config)
        self.language = language
        hidden = int(language.hidden_size)  # type: ignore[arg-type]
        self.words = nn.Sequential(nn.Linear(hidden, width), nn.LayerNorm(width))
        self.images = nn.Sequential(nn.Linear(config.geom_output_dim, width), nn.LayerNorm(width))
        self.places = nn.Parameter(0.1 * torch.randn(num_images, width))
        layers = (FusionLayer(width, config.dropout) for _ in range(config.fusion_layers))
        self.fusion = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        if config.use_attention_pooling:
            self.query = nn.Parameter(torch.randn(1, 1, width) * 0.02)
            self.pool = CrossAttention(width)
        if num_own:
            self.own = nn.Sequential(nn.Linear(num_own, width), nn.GELU(), nn.Linear(width, width))
            # The state is often close to the action, so give it a linear path to the output.
            self.straight = nn.Linear(num_own, config.action_dim, bias=False)
            nn.init.zeros_(self.straight.weight)
        self.head = nn.Sequential(
            nn.Linear(width, width // 2),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(width // 2, width // 4),
            nn.GELU(),
            nn.Linear(width // 4, config.action_dim),
        )
        for part in self.frozen_parts():
            part.requires_grad_(False)
        self.train()

    def frozen_parts(self) -> list[nn.Module]:
        """Return the backbones that are not trained."""
        frozen = [self.geometry.backbone] if self.config.freeze_vggt else []
        return [*frozen, self.language] if self.config.freeze_lang_encoder else frozen

    def train(self, mode: bool = True) -> Self:
        """Switch to training; frozen backbones stay in evaluation mode."""
        super().train(mode)
        for part in self.frozen_parts():
            part.eval()
        return self

    def forward(
        self, images: Tensor, tokens: Tensor, mask: Tensor, own: Tensor | None = None
    ) -> Tensor:
        """Return actions (B, A), standardised; a gripper's column is a logit.

        Args:
            images: (B, S, 3, H, W) bytes; the first is the current one of the first view.
            tokens: (B, L) word numbers.
            mask: (B, L), which of them are words.
            own: (B, num_own), standardised.
        """
        pixels = images.to(self.norm.weight.dtype) / 255
        memory = self.images(self.geometry(pixels)) + self.places
        spoken = None if own is None else self.own(own)
        if spoken is not None:
            memory = torch.cat((memory, spoken[:, None]), dim=1)
        memory = lowered(memory)
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and not self.config.freeze_lang_encoder
        ):
            hidden = self.language(tokens, mask)
        x = self.words(hidden.to(self.words[0].weight.dtype))
        bias = mask_bias(mask, x)
        for layer in self.fusion:
            x = layer(x, memory, bias)
        x = self.norm(x)
        if self.config.use_attention_pooling:
            pooled = self.pool(self.query.expand(len(x), -1, -1).to(x.dtype), x, bias)[:, 0]
        else:
            share = mask[..., None].to(x.dtype)
            pooled = (x * share).sum(dim=1) / share.sum(dim=1)
        if own is None or spoken is None:
            action: Tensor = self.head(pooled)
        else:
            action = self.head(pooled + spoken) + self.straight(own)
        return action


def _num_heads(width: int) -> int:
    return max(1, width // 64)


# --- loading backbones -------------------------------------------------------------------


def build_geometry(config: ModelConfig, notes: list[str]) -> Aggregator:
    """Return the aggregator, from a local file if there is one; append its source to `notes`."""
    aggregator = Aggregator(PRESETS[config.vggt_preset])
    path = config.vggt_checkpoint
    if path and path.is_file():
        load_aggregator(aggregator, path)
        return aggregator
    if path:
        missing = f"vggt_checkpoint {path} does not exist"
        if not config.allow_random_backbone:
            raise ConfigError(missing, "correct the path, or set allow_random_backbone: true")
        notes.append(f"{missing}: random weights (vggt_preset {config.vggt_preset}) in its place")
    if config.freeze_vggt:
        notes.append("warning: freeze_vggt keeps random weights; freeze_vggt: false trains them")
    return aggregator


def find_language(config: ModelConfig, notes: list[str] | None = None) -> str | None:
    """Return the folder of a local language model, or None for the small encoder."""
    name = config.lang_encoder_name
    notes = [] if notes is None else notes
    if name and Path(name).is_dir():
        return name
    if name:
        missing = f"lang_encoder_name {name} is not a local folder, and nothing is downloaded"
        if not config.allow_random_backbone:
            raise ConfigError(missing, "name a folder, or set allow_random_backbone: true")
        notes.append(f"{missing}: random weights (lang_preset {config.lang_preset}) in its place")
    if config.freeze_lang_encoder:
        notes.append(
            "warning: freeze_lang_encoder keeps random weights; freeze_lang_encoder: false "
            "trains them"
        )
    return None


def build_language(config: ModelConfig, notes: list[str]) -> TextEncoder | PretrainedText:
    """Return the language backbone, from a local folder if there is one."""
    folder = find_language(config, notes)
    return pretrained_text(folder) if folder else TextEncoder(config.lang_preset)


def build_tokenizer(config: ModelConfig) -> Tokenizer:
    """Return the tokenizer of the language backbone."""
    folder = find_language(config)
    return pretrained_tokenizer(folder) if folder else hash_words
