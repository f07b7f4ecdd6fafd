"""Moving averages follow their closed form; one put into a model comes out again exactly."""

import pytest
import torch
from torch import nn

from lockstep.average import Averages


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()


def move(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype))


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999])
def test_an_average_follows_its_closed_form(decay: float) -> None:
    model = build_model()
    averages = Averages(model, (decay,))
    history = [model[0].weight.detach().clone()]
    for step in range(7):
        move(model, step)
        averages.update()
        history.append(model[0].weight.detach().clone())
    expected = decay**7 * history[0]
    for k, weight in enumerate(history[1:], start=1):
        expected += (1 - decay) * decay ** (7 - k) * weight
    torch.testing.assert_close(averages.state(decay)["0.weight"], expected, rtol=1e-12, atol=1e-13)


def test_the_first_average_is_the_initial_weights() -> None:
    model = build_model()
    state = Averages(model, (0.9,)).state(0.9)
    assert all(torch.equal(state[name], p) for name, p in model.named_parameters())


def test_weights_come_back_bit_for_bit_after_an_average_was_applied() -> None:
    model = build_model()
    averages = Averages(model, (0.9, 0.5))
    move(model, 1)
    averages.update()
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
    straight.update()
    resumed = Averages(model, (0.9,))
    resumed.load_state(0.9, {name: p.clone() for name, p in straight.state(0.9).items()})
    for averages in (straight, resumed):
        averages.update()
    for name, p in straight.state(0.9).items():
        assert torch.equal(p, resumed.state(0.9)[name])


def test_frozen_weights_are_not_averaged() -> None:
    model = build_model()
    model[0].requires_grad_(False)
    assert list(Averages(model, (0.9,)).state(0.9)) == ["1.weight", "1.bias"]
