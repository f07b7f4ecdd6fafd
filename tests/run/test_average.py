"""Moving averages follow their closed form; one put into a model comes out again exactly."""

import math

import pytest
import torch
from torch import nn

from lockstep.errors import CheckpointError
from lockstep.run.average import Averages


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()


def move(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype))


@pytest.mark.parametrize("decay", [0.05, 0.5, 0.9, 0.999])
def test_an_average_follows_its_closed_form(decay: float) -> None:
    model = build_model()
    averages = Averages(model, (decay,))
    history = [model[0].weight.detach().clone()]
    for step in range(1, 120):
        move(model, step)
        averages.update(step)
        history.append(model[0].weight.detach().clone())
    decays = [min(decay, (1 + step) / (10 + step)) for step in range(1, 120)]
    kept = [math.prod(decays[k:]) for k in range(120)]  # of what came in at step k, what is left
    shares = [kept[0], *((1 - decays[k - 1]) * kept[k] for k in range(1, 120))]
    assert sum(shares) == pytest.approx(1, rel=1e-12)
    expected = sum(share * weight for share, weight in zip(shares, history, strict=True))
    torch.testing.assert_close(averages.state(decay)["0.weight"], expected, rtol=1e-11, atol=1e-12)


def test_an_average_soon_forgets_the_random_first_weights() -> None:
    model = build_model()
    averages = Averages(model, (0.9999,))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    before = averages.state(0.9999)["0.weight"].abs().max().item()
    for step in range(1, 100):
        averages.update(step)
    assert averages.state(0.9999)["0.weight"].abs().max() < 1e-6 * before


def test_the_first_average_is_the_initial_weights() -> None:
    model = build_model()
    state = Averages(model, (0.9,)).state(0.9)
    assert all(torch.equal(state[name], p) for name, p in model.named_parameters())


def test_weights_come_back_bit_for_bit_after_an_average_was_applied() -> None:
    model = build_model()
    averages = Averages(model, (0.9, 0.5))
    move(model, 1)
    averages.update(1)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    average = {name: p.clone() for name, p in averages.state(0.5).items()}
    with averages.applied(0.5):
        assert all(torch.equal(p, average[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p, average[name]) for name, p in averages.state(0.5).items())


def test_weights_come_back_when_the_evaluation_fails() -> None:
    model = build_model()
    averages = Averages(model, (0.9,))
    move(model, 1)
    before = model[0].weight.detach().clone()
    with pytest.raises(ZeroDivisionError), averages.applied(0.9):
        raise ZeroDivisionError
    assert torch.equal(model[0].weight, before)


def test_a_saved_average_goes_on_as_if_never_stopped() -> None:
    model = build_model()
    straight = Averages(model, (0.9,))
    move(model, 1)
    straight.update(1)
    resumed = Averages(model, (0.9,))
    resumed.load_state(0.9, {name: p.clone() for name, p in straight.state(0.9).items()})
    for averages in (straight, resumed):
        averages.update(2)
    for name, p in straight.state(0.9).items():
        assert torch.equal(p, resumed.state(0.9)[name])


def test_several_averages_move_each_as_if_alone() -> None:
    model = build_model()
    decays = 0.05, 0.5, 0.9
    together = Averages(model, decays)
    alone = [Averages(model, (decay,)) for decay in decays]
    for step in range(1, 5):
        move(model, step)
        for averages in (together, *alone):
            averages.update(step)
    for decay, one in zip(decays, alone, strict=True):
        for name, weight in one.state(decay).items():
            assert torch.equal(together.state(decay)[name], weight), (decay, name)


def test_frozen_weights_are_not_averaged() -> None:
    model = build_model()
    model[0].requires_grad_(False)
    assert list(Averages(model, (0.9,)).state(0.9)) == ["1.weight", "1.bias"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_average_of_half_precision_weights_does_not_lose_small_steps(dtype: torch.dtype) -> None:
    """Its steps are a thousandth of the difference: 16 bits would round every one of them away."""
    model, wide = build_model().to(dtype), build_model().to(dtype).float()
    averages, reference = Averages(model, (0.999,)), Averages(wide, (0.999,))
    with torch.no_grad():
        for p, q in zip(model.parameters(), wide.parameters(), strict=True):
            p.add_(1)
            q.copy_(p)
    for step in range(10_000, 10_100):
        averages.update(step)
        reference.update(step)
    expected = reference.state(0.999)
    assert all(torch.equal(p, expected[name]) for name, p in averages.state(0.999).items())
    assert averages.state(0.999)["0.weight"].dtype == torch.float32
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with averages.applied(0.999):
        for name, p in model.named_parameters():
            assert torch.equal(p, expected[name].to(dtype))
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in averages.state(0.999).items())


def test_other_weights_are_averaged_in_their_own_type() -> None:
    kinds = (torch.float32, torch.float64, torch.complex64, torch.complex128)
    model = nn.ParameterList([torch.ones(2, dtype=kind) for kind in kinds])
    averages = Averages(model, (0.9,))
    averages.update(1)
    assert [p.dtype for p in averages.state(0.9).values()] == list(kinds)


def test_an_average_that_was_saved_in_half_precision_still_loads() -> None:
    model = build_model().to(torch.bfloat16)
    averages = Averages(model, (0.9,))
    move(model, 1)
    saved = {name: p.detach().clone() for name, p in model.named_parameters()}
    averages.load_state(0.9, saved)
    assert all(torch.equal(p, saved[name].float()) for name, p in averages.state(0.9).items())
    averages.load_state(0.9, {name: p.float() for name, p in saved.items()})
    with pytest.raises(CheckpointError, match="the file .* float64"):
        averages.load_state(0.9, {name: p.double() for name, p in saved.items()})
