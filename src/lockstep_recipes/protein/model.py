"""A message-passing network that predicts residues from a backbone and a noisy sequence.

Owns: the features of a backbone, the encoder, which sees only these, and the decoder, which
also sees noisy tokens and the time. All features are distances, so rotating or moving a
chain changes nothing. Does not own: noise, losses.

Shapes: B chains, L residues, N neighbours, H width, S tokens of a residue, K states.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep_recipes.precision import lowered

NUM_BINS = 72
NUM_CHIS = 4
NUM_RBF = 16
REACH = 32
"""Larger offsets along the chain share a class; residues of other stretches share another."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """The encoder's output: nodes (B, L, H), edges (B, L, N, H), and each residue's neighbours."""

    nodes: Tensor
    edges: Tensor
    neighbours: Tensor
    """(B, L, N), numbered through all residues of the batch."""
    near: Tensor
    """Which of the N neighbours exist (B, L, N)."""


def five_atoms(coords: Tensor) -> Tensor:
    """Add a virtual CB to N, CA, C and O: (B, L, 4, 3) becomes (B, L, 5, 3)."""
    n, ca, c = coords[..., 0, :], coords[..., 1, :], coords[..., 2, :]
    b = ca - n
    c = c - ca
    a = torch.linalg.cross(b, c)
    cb = ca - 0.58273431 * a + 0.56802827 * b - 0.54067466 * c
    return torch.cat([coords, cb[..., None, :]], dim=-2)


def gather_neighbours(values: Tensor, neighbours: Tensor) -> Tensor:
    """Return the values (B, L, ...) of each residue's neighbours (B, L, N, ...)."""
    taken = values.flatten(0, 1).index_select(0, neighbours.flatten())
    return taken.view(*neighbours.shape, *values.shape[2:])


class Message(nn.Module):
    """A three-layer MLP on (own node, edge, other node).

    Its first layer is a sum of three, so that nodes are multiplied once, not once per edge.
    """

    def __init__(self, width: int, other_width: int) -> None:
        super().__init__()
        self.own = nn.Linear(width, width)
        self.edge = nn.Linear(width, width, bias=False)
        self.other = nn.Linear(other_width, width, bias=False)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, width)

    def forward(self, own: Tensor, edges: Tensor, others: Tensor, neighbours: Tensor) -> Tensor:
        first = (
            self.own(own)[:, :, None]
            + self.edge(edges)
            + gather_neighbours(self.other(others), neighbours)
        )
        return self.third(functional.gelu(self.second(functional.gelu(first))))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Update nodes from their neighbours, then each by an MLP; the encoder also updates edges."""

    def __init__(self, width: int, other_width: int, dropout: float, scale: float, edges: bool):
        super().__init__()
        self.scale = scale
        self.message = Message(width, other_width)
        self.norm_message = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.norm_feed = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.edge_message = Message(width, width) if edges else None
        self.norm_edge = nn.LayerNorm(width) if edges else None

    def forward(
        self, backbone: Backbone, seen: Tensor | None = None, film: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        nodes = backbone.nodes
        edges = backbone.edges
        neighbours = backbone.neighbours
        own = lowered(nodes)
        low_edges = lowered(edges)
        others = own if seen is None else torch.cat([own, seen], dim=-1)
        messages = self.message(own, low_edges, others, neighbours)
        total = (messages * backbone.near[..., None]).sum(dim=2) / self.scale
        nodes = self.norm_message(nodes + self.dropout(total))
        if film is not None:
            gain, shift = film[:, None].chunk(2, dim=-1)
            nodes = nodes * (1 + gain) + shift
        nodes = self.norm_feed(nodes + self.dropout(self.feed(nodes)))
        if self.edge_message is not None and self.norm_edge is not None:
            own = lowered(nodes)
            update = self.edge_message(own, low_edges, own, neighbours)
            edges = self.norm_edge(edges + self.dropout(update))
        return nodes, edges


class ProteinNet(nn.Module):
    """Encode a backbone; from noisy tokens and a time, predict clean tokens and chi angles.

    The heads start at zero, so the first loss is the log of the number of choices.
    """

    def __init__(
        self,
        num_states: int = 20,
        num_slots: int = 1,
        width: int = 128,
        num_layers: int = 3,
        num_neighbours: int = 30,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.num_states = num_states
        self.num_slots = num_slots
        self.width = width
        self.num_neighbours = num_neighbours
        self.offset = nn.Embedding(2 * REACH + 2, 16)
        self.embed_edge = nn.Linear(25 * NUM_RBF + 16, width)
        self.norm_edge = nn.LayerNorm(width)
        self.first_node = nn.Parameter(torch.zeros(width))
        self.encoder = nn.ModuleList(
            Layer(width, width, dropout, num_neighbours, edges=True) for _ in range(num_layers)
        )
        self.embed_token = nn.Embedding(num_slots * (num_states + 1), width)
        self.embed_time = nn.Sequential(nn.Linear(width, width), nn.SiLU())
        self.film = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(num_layers))
        self.decoder = nn.ModuleList(
            Layer(width, 2 * width, dropout, num_neighbours, edges=False) for _ in range(num_layers)
        )
        self.token_head = nn.Linear(width, num_slots * num_states)
        self.chi_head = nn.Linear(width, NUM_CHIS * NUM_BINS)
        for layer in (*self.film, self.token_head, self.chi_head):
            assert isinstance(layer, nn.Linear)
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(
        self, coords: Tensor, segment: Tensor, tokens: Tensor, level: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return logits of tokens (B, L, S, K) and of chi bins (B, L, 4, 72).

        Args:
            coords: N, CA, C and O (B, L, 4, 3).
            segment: the unbroken stretch that a residue belongs to (B, L); -1 is padding.
            tokens: noisy tokens (B, L, S).
            level: the time t / T of each chain (B).
        """
        return self.decode(self.encode(coords, segment), tokens, level)

    def encode(self, coords: Tensor, segment: Tensor) -> Backbone:
        """Encode the backbone alone."""
        coords = coords.to(self.first_node.dtype)
        with torch.no_grad():
            places = torch.arange(segment.numel(), device=segment.device).view(segment.shape)
            neighbours, near = self._nearest(coords[:, :, 1], segment >= 0)
            neighbours = neighbours + places[:, :1, None]
            atoms = five_atoms(coords)
            others = gather_neighbours(atoms, neighbours)
            apart = atoms[:, :, None, :, None] - others[:, :, :, None]  # (B, L, N, 5, 5, 3)
            distances = apart.square().sum(dim=-1).add(1e-6).sqrt().flatten(3)
            centres = rbf_centres(coords.device, coords.dtype)
            spread = 20.0 / NUM_RBF
            rbf = (distances[..., None] - centres).div_(spread).square_().neg_().exp_().flatten(3)
            offset = (neighbours - places[..., None]).clamp(-REACH, REACH) + REACH
            same = gather_neighbours(segment, neighbours) == segment[..., None]
            offset = torch.where(same, offset, 2 * REACH + 1)
        edges = self.norm_edge(self.embed_edge(torch.cat([rbf, self.offset(offset)], dim=-1)))
        nodes = self.first_node.expand(*segment.shape, -1)
        backbone = Backbone(nodes, edges, neighbours, near)
        for layer in self.encoder:
            nodes, edges = layer(backbone)
            backbone = Backbone(nodes, edges, neighbours, near)
        return backbone

    def decode(self, backbone: Backbone, tokens: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """Predict every residue from the backbone, the noisy tokens around it and the time."""
        each = self.num_states + 1
        slots = torch.arange(0, self.num_slots * each, each, device=tokens.device)
        seen = self.embed_token(tokens + slots).sum(dim=2)
        time = self.embed_time(sinusoids(level.to(seen.dtype), self.width))
        nodes = backbone.nodes + seen
        edges = lowered(backbone.edges)
        seen = lowered(seen)
        for layer, film in zip(self.decoder, self.film, strict=True):
            now = Backbone(nodes, edges, backbone.neighbours, backbone.near)
            nodes, _ = layer(now, seen, film(time))
        nodes = lowered(nodes)
        logits = self.token_head(nodes).unflatten(-1, (self.num_slots, self.num_states))
        chi_logits = self.chi_head(nodes).unflatten(-1, (NUM_CHIS, NUM_BINS))
        return _full(logits), _full(chi_logits)

    def _nearest(self, ca: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
        """Return each residue's nearest ones (B, L, N), itself first, and which of them exist."""
        far = torch.cdist(ca, ca, compute_mode="donot_use_mm_for_euclid_dist")
        far = torch.where(exists[:, None], far, torch.inf)
        num = min(self.num_neighbours, ca.shape[1])
        distance, neighbours = far.topk(num, dim=-1, largest=False)
        return neighbours, distance < torch.inf


@lru_cache(maxsize=32)
def rbf_centres(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the centres of the radial basis functions that describe a distance."""
    return torch.linspace(2.0, 22.0, NUM_RBF, device=device, dtype=dtype)


@lru_cache(maxsize=32)
def wave_turns(num: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the number of half turns of each wave from time 0 to 1."""
    return torch.logspace(0, 2, num, device=device, dtype=dtype)


def sinusoids(level: Tensor, width: int) -> Tensor:
    """Return sinusoidal features (B, width) of a number from 0 to 1, of half a turn to fifty."""
    angles = level[:, None] * wave_turns(width // 2, level.device, level.dtype) * math.pi
    waves = torch.cat([angles.sin(), angles.cos()], dim=-1)
    return functional.pad(waves, (0, 1)) if width % 2 else waves


def _full(logits: Tensor) -> Tensor:
    """Return logits in float32, before anything is summed."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
