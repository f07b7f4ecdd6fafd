"""A step with its tensors listed at once is torch's own step, bit for bit, or is left to torch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lockstep.adam import step_at_once

KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (AdamW, {"weight_decay": 0.1}),
    "Adam": (Adam, {"weight_decay": 0.1}),
    "decoupled": (Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "other numbers": (AdamW, {"betas": (0.8, 0.9), "eps": 1e-3, "maximize": True}),
}


def build(kind: type[Optimizer], **settings: Any) -> tuple[nn.Module, Any]:
    """Return a small network and its optimizer, which has two groups and has taken a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}]
    optimizer: Any = kind(groups, lr=0.01, **settings)
    make_gradients(model, 0)
    optimizer.step()
    return model, optimizer


def make_gradients(model: nn.Module, step: int) -> list[Tensor]:
    torch.manual_seed(100 + step)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return [p.grad for p in model.parameters() if p.grad is not None]


def everything(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    moved = [p.detach() for p in model.parameters()]
    return [*moved, *(value for of_one in optimizer.state.values() for value in of_one.values())]


@pytest.mark.parametrize("bad", [None, 0.0, 1.0])
@pytest.mark.parametrize("name", KINDS)
def test_it_is_torchs_own_step_to_the_bit(name: str, bad: float | None) -> None:
    kind, settings = KINDS[name]
    model, optimizer = build(kind, fused=True, **settings)
    model_too, theirs = build(kind, fused=True, **settings)
    for step in range(1, 4):
        for one in (optimizer, theirs):
            one.param_groups[1]["lr"] = 0.02 / step
            if bad is not None:
                one.found_inf, one.grad_scale = torch.tensor(bad), torch.tensor(3.0)
        grads = make_gradients(model, step)
        with torch.no_grad():
            assert step_at_once(optimizer, grads)
        make_gradients(model_too, step)
        theirs.step()
    for a, b in zip(everything(model, optimizer), everything(model_too, theirs), strict=True):
        assert torch.equal(a, b)
    assert float(optimizer.state[model[0].weight]["step"]) == (1 if bad else 4)


def left_alone(model: nn.Module, optimizer: Any, grads: list[Tensor]) -> bool:
    """Say whether the step was refused, and nothing touched."""
    before = copy.deepcopy(everything(model, optimizer))
    with torch.no_grad():
        taken = step_at_once(optimizer, grads)
    same = [torch.equal(a, b) for a, b in zip(before, everything(model, optimizer), strict=True)]
    return not taken and all(same)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SGD, {"fused": True}),
        (AdamW, {"fused": False}),
        (AdamW, {"fused": True, "amsgrad": True}),
        (AdamW, {"fused": None}),
    ],
)
def test_any_other_step_is_left_to_torch(kind: type[Optimizer], settings: dict[str, Any]) -> None:
    model, optimizer = build(kind, **settings)
    assert left_alone(model, optimizer, make_gradients(model, 1))


def test_so_is_one_whose_lists_would_not_match() -> None:
    model, optimizer = build(AdamW, fused=True)
    grads = make_gradients(model, 1)
    assert left_alone(model, optimizer, grads[:-1])  # a parameter without a gradient
    assert left_alone(model, optimizer, [*grads[:-1], grads[-1].half()])
    optimizer.param_groups[1]["lr"] = torch.tensor(0.1)
    assert left_alone(model, optimizer, grads)
    optimizer.param_groups[1]["lr"] = 0.1
    optimizer.param_groups.reverse()
    assert left_alone(model, optimizer, grads)  # the moments lie in another order
    optimizer.param_groups.reverse()
    state = optimizer.state.pop(model[1].bias)
    assert left_alone(model, optimizer, grads)
    optimizer.state[model[1].bias] = state
    with torch.no_grad():
        assert step_at_once(optimizer, grads)


def test_the_first_step_of_all_is_torchs() -> None:
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters(), fused=True)
    grads = make_gradients(model, 0)
    assert left_alone(model, optimizer, grads)
    assert not any(optimizer.state[p] for p in model.parameters())  # which leaves them there
    assert left_alone(model, optimizer, grads)
