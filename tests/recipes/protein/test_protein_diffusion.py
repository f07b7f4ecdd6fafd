"""The noise, its bounds and its reverse do what their formulas say."""

import itertools
import math

import pytest
import torch

from lockstep_recipes.protein import evaluate
from lockstep_recipes.protein.diffusion import (
    Absorbing,
    Kernel,
    alpha_bars,
    build_process,
    draw,
    elbo_weights,
    spread,
)
from lockstep_recipes.protein.residues import (
    FREQUENCIES,
    LETTERS,
    NAMES,
    NUMBER,
    UNKNOWN,
    blosum62,
    build_vocabulary,
    fragments_of,
    periodic_chis,
)

RESIDUES = build_vocabulary("residue")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- Weights and corruption -------------------------------------------------------------------


def test_the_elbo_weights_are_those_of_the_cosine() -> None:
    left = alpha_bars(1000, "cosine")
    weights = elbo_weights(left)
    assert float(weights[1]) == 1.0
    assert float(weights[10]) == pytest.approx(0.19, abs=5e-4)
    assert float(weights[500]) == pytest.approx(0.0038, abs=5e-5)
    assert float((weights * (1 - left)).sum()) == pytest.approx(1.0, abs=1e-12)
    assert float((1 - left[1:]).mean()) == pytest.approx(0.364, abs=1e-3)


def test_the_linear_schedule_weighs_by_one_over_t() -> None:
    weights = elbo_weights(alpha_bars(50, "linear"))
    assert torch.allclose(weights[1:], 1 / torch.arange(1, 51, dtype=torch.float64))


@pytest.mark.parametrize("t", [1, 300, 700, 1000])
def test_tokens_are_masked_at_the_rate_of_the_schedule(t: int) -> None:
    process = build_process(RESIDUES, "absorbing", 1000, "cosine")
    x0 = torch.randint(0, 20, (4, 5000, 1), generator=generator())
    x_t = process.corrupt(x0, torch.full((4,), t), generator(1))
    masked = process.is_scored(x_t)
    assert float(masked.float().mean()) == pytest.approx(
        1 - math.cos(math.pi / 2 * t / 1000), abs=0.01
    )
    assert torch.equal(x_t[~masked], x0[~masked])


def test_without_diffusion_one_step_masks_the_given_share() -> None:
    process = Absorbing(RESIDUES, torch.tensor([1.0, 0.85], dtype=torch.float64))
    assert process.times(torch.rand(9)).tolist() == [1] * 9
    x_t = process.corrupt(torch.zeros(1, 20000, 1).long(), torch.tensor([1]), generator())
    assert float((x_t == 20).float().mean()) == pytest.approx(0.15, abs=0.01)


def test_times_are_spread_over_the_global_batch_whatever_rank_holds_a_place() -> None:
    for leaves, rows in ((1, 16), (4, 4), (8, 2), (16, 1)):
        u = torch.cat([spread(rows, place, 0, "t", 5) for place in range(leaves)]).sort().values
        gaps = torch.diff(torch.cat([u, u[:1] + 1]))
        assert u.unique().numel() == 16, "no two chains share a time"
        assert float(gaps.max()) < 2.7 / 16, (leaves, rows)
    alone = torch.stack([spread(4, 3, 0, "t", step) for step in range(4000)])
    assert torch.allclose(alone.mean(dim=0), torch.tensor(0.5).double(), atol=0.02)


def test_the_estimate_of_the_elbo_is_unbiased() -> None:
    process = build_process(RESIDUES, "absorbing", 100, "cosine")
    assert isinstance(process, Absorbing)
    x0 = torch.randint(0, 20, (4000, 10, 1), generator=generator())
    logits = torch.zeros(4000, 10, 1, 20)
    u = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    for t, factor in (process.bound_times(u), (process.times(u), torch.ones(4000))):
        x_t = process.corrupt(x0, t, generator(2))
        nats = (process.bound(logits, x0, x_t, t) * factor[:, None, None]).sum() / x0.numel()
        assert float(nats) == pytest.approx(math.log(20), rel=0.1), "uniform guesses cost ln 20"
    clipped = process.bound(logits, x0, x_t, t, clip=5.0)
    assert float(clipped.max()) == pytest.approx(5 * math.log(20), rel=1e-5)


# --- Kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["uniform", "blosum"])
def test_kernels_are_probabilities_and_end_in_their_prior(kind: str) -> None:
    process = build_process(RESIDUES, kind, 200, "cosine")  # type: ignore[arg-type]
    assert isinstance(process, Kernel)
    for matrices in (process.one_step, process.cumulative):
        assert (matrices >= 0).all()
        assert torch.allclose(matrices.sum(dim=-1), torch.ones(201, 20).double(), atol=1e-9)
    apart = (process.cumulative[-1] - process.prior).abs().sum(dim=-1) / 2
    assert float(apart.max()) < 0.02, "nothing of the data is left at T"
    if kind == "uniform":
        left = alpha_bars(200, "cosine")[:, None, None]
        exact = left * torch.eye(20).double() + (1 - left) / 20
        assert torch.allclose(process.cumulative, exact, atol=1e-12)


def test_blosum_turns_residues_into_similar_ones_first() -> None:
    process = build_process(RESIDUES, "blosum", 200, "cosine")
    assert isinstance(process, Kernel)
    row = process.cumulative[60][LETTERS.index("I")]
    assert row[LETTERS.index("V")] > 3 * row[LETTERS.index("D")]


@pytest.mark.parametrize("kind", ["uniform", "blosum"])
def test_the_posterior_is_that_of_brute_force(kind: str) -> None:
    process = build_process(RESIDUES, kind, 12, "cosine")  # type: ignore[arg-type]
    assert isinstance(process, Kernel)
    for t, s in ((1, 0), (5, 4), (9, 3), (12, 11)):
        bridge = torch.linalg.multi_dot(
            [torch.eye(20).double(), *process.one_step[s + 1 : t + 1], torch.eye(20).double()]
        )
        times, given = torch.tensor([t]), None if s == t - 1 else torch.tensor([s])
        for x0, x_t in itertools.product((0, 7, 19), (0, 4, 13)):
            # P(x_s, x_t | x_0) over all x_s, by Bayes.
            joint = process.cumulative[s][x0] * bridge[:, x_t]
            truth = torch.eye(20).double()[x0].view(1, 1, 1, 20)
            q = process.posterior(truth, torch.tensor([[[x_t]]]), times, given).flatten()
            assert torch.allclose(q, joint / joint.sum(), atol=1e-10)
    p0 = torch.rand(1, 3, 1, 20, generator=generator()).double().softmax(dim=-1)
    mixed = process.posterior(p0, torch.tensor([[[1], [2], [3]]]), torch.tensor([6]))
    assert torch.allclose(mixed.sum(dim=-1), torch.ones(1, 3, 1).double(), atol=1e-10)


@pytest.mark.parametrize("kind", ["uniform", "blosum"])
def test_a_perfect_prediction_costs_nothing_and_a_guess_costs_something(kind: str) -> None:
    process = build_process(RESIDUES, kind, 50, "cosine")  # type: ignore[arg-type]
    x0 = torch.randint(0, 20, (6, 40, 1), generator=generator())
    t = torch.tensor([1, 10, 20, 30, 40, 50])
    x_t = process.corrupt(x0, t, generator(1))
    perfect = 60.0 * torch.nn.functional.one_hot(x0, 20)
    assert float(process.bound(perfect, x0, x_t, t).max()) < 1e-3
    assert float(process.bound(torch.zeros(6, 40, 1, 20), x0, x_t, t).mean()) > 0.5


def test_a_kernel_moves_tokens_as_often_as_it_says() -> None:
    process = build_process(RESIDUES, "uniform", 100, "cosine")
    x0 = torch.full((1, 20000, 1), 3)
    stayed = (process.corrupt(x0, torch.tensor([50]), generator()) == 3).float().mean()
    left = math.cos(math.pi / 4)
    assert float(stayed) == pytest.approx(left + (1 - left) / 20, abs=0.01)


def test_unknown_residues_are_never_turned_into_known_ones() -> None:
    aatype = torch.full((1, 50), UNKNOWN)
    for kind in ("absorbing", "uniform", "blosum"):
        process = build_process(RESIDUES, kind, 10, "cosine")  # type: ignore[arg-type]
        x0 = RESIDUES.tokens(aatype)
        assert (process.corrupt(x0, torch.tensor([5]), generator()) == RESIDUES.mask).all()


def test_draws_follow_their_probabilities() -> None:
    p = torch.tensor([0.1, 0.0, 0.6, 0.3])
    drawn = draw(p.log().expand(20000, -1), generator())
    counts = torch.bincount(drawn, minlength=4) / 20000
    assert torch.allclose(counts, p, atol=0.015)


# --- Residues, fragments, chi bins --------------------------------------------------------------


def test_the_table_of_scores_is_symmetric_and_its_own_best() -> None:
    table = blosum62()
    assert torch.equal(table, table.T)
    assert (table.diagonal() > (table - 99 * torch.eye(20).long()).max(dim=0).values).all()
    assert table.diagonal().sum() == 116
    assert table[LETTERS.index("W"), LETTERS.index("W")] == 11


def test_the_frequencies_have_the_entropy_of_the_database() -> None:
    p = torch.tensor(FREQUENCIES)
    p = p / p.sum()
    assert float(-(p * p.log()).sum()) == pytest.approx(2.889, abs=1e-3)


def test_all_twenty_residues_have_fragments_of_their_own() -> None:
    slots = [tuple(fragments_of(name)) for name in NAMES]
    assert len(set(slots)) == 20
    assert {len(slot) for slot in slots} == {5}, "the number of slots tells nothing"
    assert sum(part not in ("EOS", "PAD") for slot in slots for part in slot) == 54


@pytest.mark.parametrize("kind", ["residue", "fragment"])
def test_residues_are_read_back_from_their_tokens(kind: str) -> None:
    vocabulary = build_vocabulary(kind)
    tokens = vocabulary.tokens(torch.arange(20))
    logits = 20.0 * torch.nn.functional.one_hot(tokens, vocabulary.num_states).float()
    log_p = vocabulary.residues(logits)
    assert torch.equal(log_p.argmax(dim=-1), torch.arange(20))
    assert torch.allclose(log_p.exp().sum(dim=-1), torch.ones(20))
    assert (vocabulary.tokens(torch.tensor([UNKNOWN])) == vocabulary.mask).all()


def test_bins_are_five_degrees_and_their_centres_lie_inside() -> None:
    bins = torch.arange(72)
    centres = evaluate.bin_centres(bins)
    assert torch.equal(evaluate.chi_bins(centres), bins)
    assert math.degrees(float(centres[0])) == pytest.approx(-177.5)
    angles = torch.linspace(-math.pi, math.pi, 999)
    off = evaluate.chi_error(
        evaluate.bin_centres(evaluate.chi_bins(angles))[:, None],
        angles[:, None],
        torch.zeros(999).long(),
    )
    assert math.degrees(float(off.max())) <= 2.51


@pytest.mark.parametrize(("name", "chi"), [("ASP", 1), ("GLU", 2), ("PHE", 1), ("TYR", 1)])
def test_half_a_turn_is_forgiven_where_it_changes_nothing(name: str, chi: int) -> None:
    aatype = torch.tensor([[NUMBER[name]]])
    angles = torch.full((1, 1, 4), 0.3)
    turned = angles + math.pi - 2 * math.pi
    error = evaluate.chi_error(turned, angles, aatype)[0, 0]
    expected = [0.0 if index == chi else math.pi for index in range(4)]
    assert error.tolist() == pytest.approx(expected, abs=1e-5)
    logits = torch.zeros(1, 1, 4, 72)
    logits[..., evaluate.chi_bins(turned)[0, 0, 0]] = 8.0
    nats = evaluate.chi_nats(logits, angles, aatype)[0, 0]
    assert nats[chi] < 1.2
    assert all(nats[index] > 5 for index in range(4) if index != chi)


def test_chi_nats_and_their_gradient_are_those_of_the_formula() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 42, 4, 72, generator=draw, dtype=torch.float64)
    logits[1] = 0.0  # all bins alike: both ways round are as good, and share the gradient
    angles = (2 * torch.rand(2, 42, 4, generator=draw) - 1) * math.pi
    aatype = torch.arange(84).view(2, 42) % 21
    bins, periodic = evaluate.chi_bins(angles), periodic_chis()[aatype]

    def formula(logits: torch.Tensor) -> torch.Tensor:
        target = torch.eye(72, dtype=logits.dtype)[bins]
        target = 0.9 * target + 0.05 * (target.roll(1, -1) + target.roll(-1, -1))
        log_p = logits.log_softmax(-1)
        straight, turned = (-(log_p * way).sum(-1) for way in (target, target.roll(36, -1)))
        return torch.where(periodic, torch.minimum(straight, turned), straight)

    found = []
    for function in (formula, lambda x: evaluate.chi_nats(x, angles, aatype)):
        leaf = logits.clone().requires_grad_()
        nats = function(leaf)
        found.append((nats.detach(), *torch.autograd.grad(nats.square().sum(), leaf)))
    for expected, seen in zip(*found, strict=True):
        assert torch.allclose(expected, seen, rtol=0, atol=1e-12)


def test_errors_go_around_the_circle_and_neighbouring_bins_share_the_target() -> None:
    aatype = torch.tensor([[NUMBER["SER"]]])
    near, far = torch.full((1, 1, 4), 3.1), torch.full((1, 1, 4), -3.1)
    assert float(evaluate.chi_error(near, far, aatype)[0, 0, 0]) == pytest.approx(0.0832, abs=1e-3)
    angles = torch.full((1, 1, 4), -math.pi + 0.01)  # the first bin; its neighbour is the last
    cost = []
    for bin_ in (0, 1, 71, 36):
        logits = torch.zeros(1, 1, 4, 72)
        logits[..., bin_] = 5.0
        cost.append(float(evaluate.chi_nats(logits, angles, aatype)[0, 0, 0]))
    assert cost[1] == pytest.approx(cost[2])
    assert cost[0] < cost[1] < cost[3]
