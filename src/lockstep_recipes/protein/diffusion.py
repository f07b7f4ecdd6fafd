"""Discrete diffusion: how a sequence is corrupted, the loss, and how one is sampled.

Owns: noise schedules, the forward processes, their bounds and their reverse steps.
Does not own: the network; only its logits come in. A time t runs from 0 (data) to T.

Shapes: B chains, L residues, S tokens of a residue, K states of a token. Times are on the
device of their tokens.
"""

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.randomness import keyed_generator
from lockstep_recipes.protein.residues import Vocabulary, blosum62
from lockstep_recipes.tables import beside, placed

Transition = Literal["absorbing", "uniform", "blosum"]
GOLDEN = (math.sqrt(5) - 1) / 2
CE_SHARE = 0.01
"""Weight of the plain cross entropy added to a kernel's bound (Austin et al. 2021)."""


def alpha_bars(num_steps: int, shape: str) -> Tensor:
    """Return the share of the data left after t steps (T + 1); shape is "cosine" or "linear"."""
    t = torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
    left = torch.cos(math.pi / 2 * t) if shape == "cosine" else 1 - t
    left[-1] = 0.0
    return left


def elbo_weights(alpha_bar: Tensor) -> Tensor:
    """Return the weight of the cross entropy over masked tokens at each t (T + 1), 0 at t = 0.

    >>> [round(float(w), 4) for w in elbo_weights(alpha_bars(1000, "cosine"))[[1, 10, 500]]]
    [1.0, 0.19, 0.0038]
    """
    weights = (alpha_bar[:-1] - alpha_bar[1:]) / (1 - alpha_bar[1:])
    return torch.cat([torch.zeros_like(weights[:1]), weights])


@lru_cache(maxsize=64)
def spread(num: int, place: int, *key: int | str) -> Tensor:
    """Return `num` numbers in [0, 1), evenly spaced, shifted at random by `key` and by `place`.

    Within a micro-batch they are 1 / num apart; the micro-batches of a step (places) are
    offset by the golden ratio. So the global batch covers [0, 1) evenly on any number of
    ranks, and each single number is uniform.
    """
    offset = torch.rand((), generator=keyed_generator(torch.device("cpu"), *key)).double()
    numbers = (torch.arange(num, dtype=torch.float64) + place * GOLDEN % 1) / num
    return (numbers + offset) % 1


class Absorbing:
    """A token turns into MASK with probability 1 - alpha_bar(t), and stays MASK.

    With one step and alpha_bar = (1, 1 - ratio) it is plain masked training.
    """

    def __init__(self, vocabulary: Vocabulary, alpha_bar: Tensor) -> None:
        self.vocabulary = vocabulary
        self.alpha_bar = alpha_bar
        self.num_steps = len(alpha_bar) - 1
        self.weights = elbo_weights(alpha_bar)

    def times(self, u: Tensor) -> Tensor:
        """Turn numbers in [0, 1) into times 1 to T, all equally likely."""
        return (u * self.num_steps).long() + 1

    def bound_times(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return times, and the factors with which `bound` at these times estimates the ELBO.

        A time is drawn with the probability of its share of the bound, weight x mask ratio.
        That share is the increase of the mask ratio, so the shares sum to 1.
        """
        ratio = 1 - self.alpha_bar
        t = torch.searchsorted(ratio / ratio[-1], u, right=True).clamp(1, self.num_steps)
        likely = (ratio[t] - ratio[t - 1]) / ratio[-1]
        return t, 1 / (self.num_steps * likely)

    def corrupt(self, x0: Tensor, t: Tensor, generator: torch.Generator) -> Tensor:
        """Return x_t (B, L, S) for times t (B)."""
        chance = torch.rand(x0.shape, generator=generator, device=x0.device)
        kept = beside(self.alpha_bar, chance)[t]
        return torch.where(chance < kept[:, None, None], x0, self.vocabulary.mask)

    def is_scored(self, x_t: Tensor) -> Tensor:
        """Return which tokens to predict."""
        return x_t == self.vocabulary.mask

    def bound(
        self, logits: Tensor, x0: Tensor, x_t: Tensor, t: Tensor, clip: float | None = None
    ) -> Tensor:
        """Return nats (B, L, S) whose mean over uniform t is the ELBO, T x weight clipped."""
        factor = self.num_steps * placed(self.weights, t.device)[t]
        factor = (factor.clamp(max=clip) if clip else factor).to(logits.dtype)
        return cross_entropy(logits, x0) * self.is_scored(x_t) * factor[:, None, None]

    def end_nats(self, x0: Tensor) -> Tensor:
        """Return the information left in x_T about x_0, in nats (B, L, S): zero."""
        return torch.zeros_like(x0, dtype=torch.float64)

    def noise(self, x0: Tensor, generator: torch.Generator) -> Tensor:
        """Return x_T: all MASK."""
        return torch.full_like(x0, self.vocabulary.mask)

    def step_back(
        self,
        x_t: Tensor,
        logits: Tensor,
        t: int,
        s: int,
        generator: torch.Generator,
        *,
        adaptive: bool,
    ) -> Tensor:
        """Reveal some masked residues (B, L), sampled from the network; revealed ones stay.

        Each is revealed with probability (alpha_bar(s) - alpha_bar(t)) / (1 - alpha_bar(t)).
        `adaptive` reveals as many: those with the largest margin between the two best states.
        """
        left = self.alpha_bar
        share = 1.0 if s == 0 else float((left[s] - left[t]) / (1 - left[t]))
        log_p = self.vocabulary.residues(logits)
        hidden = self.is_scored(x_t).any(dim=-1)
        if adaptive:
            best = log_p.exp().topk(2, dim=-1).values
            margin = torch.where(hidden, best[..., 0] - best[..., 1], -1.0)
            num = torch.ceil(share * hidden.sum(dim=1)).long()
            rank = margin.argsort(dim=1, descending=True).argsort(dim=1)
            revealed = hidden & (rank < num[:, None])
        else:
            chance = torch.rand(hidden.shape, generator=generator)
            revealed = hidden & (chance < share)
        drawn = self.vocabulary.tokens(draw(log_p, generator))
        return torch.where(revealed[..., None], drawn, x_t)


class Kernel:
    """A token moves among K states by one matrix per step: Q_t = (1 - b_t) I + b_t P_t.

    P_t is uniform, or softmax(BLOSUM62 / temperature) with a temperature that rises with t,
    so that residues turn into similar ones first.
    """

    def __init__(self, vocabulary: Vocabulary, alpha_bar: Tensor, kind: Transition) -> None:
        self.vocabulary = vocabulary
        self.num_steps = len(alpha_bar) - 1
        self.weights = elbo_weights(alpha_bar)
        num_states = vocabulary.num_states
        beta = 1 - alpha_bar[1:] / alpha_bar[:-1]
        if kind == "uniform":
            jump = torch.full((num_states, num_states), 1 / num_states, dtype=torch.float64)
            jumps = jump.expand(self.num_steps, -1, -1)
        else:
            temperature = torch.linspace(2, 8, self.num_steps, dtype=torch.float64)
            jumps = (blosum62() / temperature[:, None, None]).softmax(dim=-1)
        identity = torch.eye(num_states, dtype=torch.float64)
        steps = (1 - beta)[:, None, None] * identity + beta[:, None, None] * jumps
        bars = [identity]
        for step in steps:
            bars.append(bars[-1] @ step)
        self.one_step = torch.cat([identity[None], steps])
        """Q_t[i, j], the probability of j after i, for t = 0 (the identity) to T."""
        self.cumulative = torch.stack(bars)
        """Q_1 Q_2 ... Q_t."""
        self.prior = bars[-1].mean(dim=0)
        self.left = (torch.xlogy(bars[-1], bars[-1]) - bars[-1] * self.prior.log()).sum(dim=-1)

    def times(self, u: Tensor) -> Tensor:
        """Turn numbers in [0, 1) into times 1 to T, all equally likely."""
        return (u * self.num_steps).long() + 1

    def bound_times(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return times, and the factors with which `bound` at these times estimates the ELBO."""
        return self.times(u), torch.ones_like(u)

    def corrupt(self, x0: Tensor, t: Tensor, generator: torch.Generator) -> Tensor:
        """Return x_t (B, L, S) for times t (B); MASK, an unknown residue, stays."""
        bars = placed(self.cumulative, t.device)[t]
        rows = pick(bars, x0.clamp(max=self.vocabulary.num_states - 1))
        x_t = draw(rows.log(), generator)
        return torch.where(x0 == self.vocabulary.mask, x0, x_t)

    def is_scored(self, x_t: Tensor) -> Tensor:
        """Return which tokens to predict: all, since any may have changed."""
        return torch.ones_like(x_t, dtype=torch.bool)

    def posterior(self, p0: Tensor, x_t: Tensor, t: Tensor, s: Tensor | None = None) -> Tensor:
        """Return the mean of q(x_s | x_t, x_0) over x_0 ~ p0 (B, L, S, K); s is t - 1 unless given.

        q(x_s | x_t, x_0) = Q_{s+1..t}[x_s, x_t] Qbar_s[x_0, x_s] / Qbar_t[x_0, x_t]
        """
        if s is None:
            s = t - 1
            bridge = placed(self.one_step, t.device)[t]
        else:
            spans = [torch.arange(int(i) + 1, int(j) + 1) for i, j in zip(s, t, strict=True)]
            bridge = torch.stack([_product(self.one_step[span]) for span in spans])
        x_t = x_t.clamp(max=self.vocabulary.num_states - 1)
        bars = placed(self.cumulative, t.device)
        likelihood = pick(bridge.transpose(1, 2).to(p0.dtype), x_t)
        evidence = pick(bars[t].transpose(1, 2).to(p0.dtype), x_t)
        tiny = torch.finfo(p0.dtype).tiny
        mixed = torch.einsum("blsk,bkj->blsj", p0 / evidence.clamp(min=tiny), bars[s].to(p0.dtype))
        return likelihood * mixed

    def bound(
        self, logits: Tensor, x0: Tensor, x_t: Tensor, t: Tensor, clip: float | None = None
    ) -> Tensor:
        """Return T x KL(q(x_{t-1} | x_t, x_0) || p(x_{t-1} | x_t)), in nats (B, L, S).

        `clip` lowers the factor T at early times as for masking: there, a single changed token
        would weigh as much as a whole chain.
        """
        states = self.vocabulary.num_states
        truth = functional.one_hot(x0.clamp(max=states - 1), states).to(logits)
        q = self.posterior(truth, x_t, t)
        p = self.posterior(logits.softmax(dim=-1), x_t, t).clamp(min=1e-12)
        kl = (torch.xlogy(q, q) - q * p.log()).sum(dim=-1).clamp(min=0)
        weights = placed(self.weights, t.device)[t]
        factor = torch.full_like(weights, self.num_steps)
        factor = torch.minimum(factor, clip / weights) if clip else factor
        return kl * factor.to(kl.dtype)[:, None, None]

    def end_nats(self, x0: Tensor) -> Tensor:
        """Return KL(q(x_T | x_0) || prior), in nats (B, L, S); with few steps it is not zero."""
        return placed(self.left, x0.device)[x0.clamp(max=self.vocabulary.num_states - 1)]

    def noise(self, x0: Tensor, generator: torch.Generator) -> Tensor:
        """Return x_T, drawn from the stationary distribution."""
        return draw(placed(self.prior, x0.device).log().expand(*x0.shape, -1), generator)

    def step_back(
        self,
        x_t: Tensor,
        logits: Tensor,
        t: int,
        s: int,
        generator: torch.Generator,
        *,
        adaptive: bool,
    ) -> Tensor:
        """Draw x_s given x_t; the last step draws residues."""
        if s == 0:
            return self.vocabulary.tokens(draw(self.vocabulary.residues(logits), generator))
        times = torch.full((len(x_t),), t)
        p = self.posterior(logits.softmax(dim=-1), x_t, times, torch.full_like(times, s))
        return draw(p.clamp(min=1e-30).log(), generator)


def build_process(
    vocabulary: Vocabulary, transition: Transition, num_steps: int, shape: str
) -> Absorbing | Kernel:
    """Return the forward process of a diffusion."""
    left = alpha_bars(num_steps, shape)
    if transition == "absorbing":
        return Absorbing(vocabulary, left)
    return Kernel(vocabulary, left, transition)


def cross_entropy(logits: Tensor, x0: Tensor) -> Tensor:
    """Return the nats (B, L, S) of the true tokens, 0 for those of an unknown residue."""
    rows = logits.flatten(0, -2)
    truth = x0.flatten()
    states = logits.shape[-1]
    nats = functional.cross_entropy(rows, truth, reduction="none", ignore_index=states)
    return nats.view(x0.shape)


def draw(log_p: Tensor, generator: torch.Generator) -> Tensor:
    """Sample a state from each row of log-probabilities (..., K), on the generator's device."""
    edges = log_p.double().softmax(dim=-1).cumsum(dim=-1)
    chance = torch.rand(
        edges.shape[:-1], generator=generator, dtype=edges.dtype, device=edges.device
    )
    drawn = (edges < chance[..., None]).sum(dim=-1)
    return drawn.clamp(max=log_p.shape[-1] - 1)


def pick(matrices: Tensor, x: Tensor) -> Tensor:
    """Return the row x of each chain's matrix: (B, K, K) and (B, L, S) give (B, L, S, K)."""
    chain = torch.arange(len(x), device=x.device)[:, None, None]
    return matrices[chain, x]


def _product(matrices: Tensor) -> Tensor:
    result = torch.eye(matrices.shape[-1], dtype=matrices.dtype)
    for matrix in matrices:
        result = result @ matrix
    return result
