"""Metrics of a prediction: binned chi angles, recovery, perplexity, and baselines.

Owns: how predictions are measured, as sums and weights. Does not own: the network,
or reducing over ranks, which the core does.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep_recipes.protein.model import NUM_BINS
from lockstep_recipes.protein.residues import FREQUENCIES, UNKNOWN, periodic_chis, turn_costs
from lockstep_recipes.tables import beside, placed

BIN_WIDTH = 2 * math.pi / NUM_BINS
SMOOTHING = 0.1
"""Label smoothing: the share of a bin's target that goes to its two neighbours together."""
AROUND = torch.tensor([0, -1, 1, NUM_BINS // 2, NUM_BINS // 2 - 1, NUM_BINS // 2 + 1])
"""Offsets from a bin to itself and its neighbours, then to those half a turn away."""
SHARES = -torch.tensor([1 - SMOOTHING, SMOOTHING / 2, SMOOTHING / 2], dtype=torch.float64)
"""Weights of a bin and its neighbours in the smoothed cross entropy."""
NEAR = math.radians(20)
COMMON_CHIS = tuple(math.radians(angle) for angle in (-67.5, 177.5, 177.5, -177.5))
"""The centre of each chi's most common bin, counted over the full-atom training chains."""

Pair = tuple[Tensor, Tensor | float]


def chi_bins(angles: Tensor) -> Tensor:
    """Return the 5-degree bin of each angle, given in radians.

    >>> chi_bins(torch.tensor([-math.pi, 0.0, math.pi - 1e-3])).tolist()
    [0, 36, 71]
    """
    return ((angles + math.pi) / BIN_WIDTH).floor().long() % NUM_BINS


def bin_centres(bins: Tensor) -> Tensor:
    """Return the angle in radians at the centre of each bin."""
    return (bins + 0.5) * BIN_WIDTH - math.pi


def chi_nats(logits: Tensor, angles: Tensor, aatype: Tensor) -> Tensor:
    """Return the smoothed cross entropy (B, L, 4) of chi angles.

    For chi angles that are symmetric under half a turn, the better of the two bins counts.
    """
    log_p = logits.log_softmax(dim=-1)
    bins = (chi_bins(angles)[..., None] + placed(AROUND, angles.device)) % NUM_BINS
    near = log_p.gather(-1, bins).view(*angles.shape, 2, 3)
    nats = (near * beside(SHARES, near)).sum(dim=-1)  # as they are, and half a turn away
    return (nats + beside(turn_costs(), nats)[aatype]).amin(dim=-1)


def chi_error(predicted: Tensor, angles: Tensor, aatype: Tensor) -> Tensor:
    """Return the circular distance of angles (B, L, 4), modulo symmetric half turns."""
    apart = (predicted - angles + math.pi) % (2 * math.pi) - math.pi
    apart = apart.abs()
    periodic = placed(periodic_chis(), aatype.device)[aatype]
    return torch.where(periodic, torch.minimum(apart, math.pi - apart), apart)


def measure_sequence(log_p: Tensor, aatype: Tensor) -> dict[str, Pair]:
    """Compare log-probabilities of residues (B, L, 20) with the truth."""
    known = aatype != UNKNOWN
    truth = aatype.clamp(max=UNKNOWN - 1)
    nats = -log_p.gather(-1, truth[..., None]).squeeze(-1)
    hits = log_p.argmax(dim=-1) == truth
    return {
        "recovery": ((hits & known).sum(), known.sum()),
        "nats": ((nats * known).sum(), known.sum()),
    }


def measure_chis(
    predicted: Tensor, angles: Tensor, mask: Tensor, aatype: Tensor
) -> dict[str, Pair]:
    """Compare chi angles (B, L, 4) in radians with the truth, in degrees."""
    error = chi_error(predicted, angles, aatype)
    first = mask[..., 0]
    return {
        "chi_mae": (torch.rad2deg(error * mask).sum(), mask.sum()),
        "chi1_mae": (torch.rad2deg(error[..., 0] * first).sum(), first.sum()),
        "chi_within_20": (((error <= NEAR) & mask).sum(), mask.sum()),
    }


def measure_baselines(batch: Mapping[str, Tensor]) -> dict[str, Pair]:
    """Measure guesses without a network: database frequencies and the most common chi bins."""
    frequencies = (torch.tensor(FREQUENCIES) / sum(FREQUENCIES)).log().to(batch["chi"])
    aatype = batch["aatype"]
    measured = measure_sequence(frequencies.expand(*aatype.shape, -1), aatype)
    common = torch.tensor(COMMON_CHIS).to(batch["chi"])
    chis = measure_chis(common, batch["chi"], batch["chi_mask"], aatype)
    return {f"unigram_{name}": pair for name, pair in measured.items()} | {
        f"common_{name}": pair for name, pair in chis.items()
    }
