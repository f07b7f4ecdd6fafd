"""One step moves the weights along the gradient of the mean over the global batch, and says so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Loader, PartialLoss, train_step
from lockstep.data.batch import StepBatch
from lockstep.errors import ConfigError
from lockstep.plan import BatchConfig, plan_batches
from lockstep.randomness import seed_all
from lockstep.run.progress import Progress
from lockstep.step.partial import as_partial
from lockstep.step.report import StepReport
from lockstep.step.update import divide, new_non_finite_flag
from lockstep.task import Context
from lockstep.testing import FakeWorld, TinyTask

TASK = TinyTask()
WORLD = FakeWorld()


def first_batch(batch_size: int = 4) -> StepBatch:
    plan = plan_batches(BatchConfig(batch_size=batch_size, global_batch_size=12), 48, 1)
    return next(iter(Loader(TASK.train_data(), WORLD, plan=plan, epochs=1)))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    seed_all(0, "weights")
    model = TASK.build_model()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def true_gradient(model: nn.Module, batch: StepBatch) -> Tensor:
    """Compute the gradient of the mean over all units, as one would by hand."""
    data = {
        key: torch.cat([m.data[key] for m in batch.micro_batches]) for key in ("x", "y", "units")
    }
    error = (model(data["x"]) - data["y"]).square().sum(dim=1)
    mean = (error * data["units"]).sum() / data["units"].sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(mean, list(model.parameters()))])


def step(
    loss: Callable[..., Any] = TASK.loss, batch_size: int = 4, **options: Any
) -> tuple[StepReport, Tensor, Tensor]:
    """Make one step of rate 1; return the report, the true gradient and how the weights moved."""
    model, optimizer = build()
    batch = first_batch(batch_size)
    gradient, before = true_gradient(model, batch), flat(model)
    report = train_step(loss, model, optimizer, batch, WORLD, **options)
    return report, gradient, before - flat(model)


@pytest.mark.parametrize("batch_size", [1, 4, 12])
def test_a_step_follows_the_gradient_of_the_mean_over_all_units(batch_size: int) -> None:
    _, gradient, moved = step(batch_size=batch_size)
    torch.testing.assert_close(moved, gradient, rtol=1e-12, atol=1e-13)


def test_the_reported_norm_is_that_of_the_true_gradient_before_clipping() -> None:
    for limit in (None, 0.1):
        report, gradient, _ = step(max_grad_norm=limit)
        assert float(report.grad_norm) == pytest.approx(float(gradient.norm()), rel=1e-12)


def test_clipping_shortens_the_step_and_keeps_its_direction() -> None:
    _, gradient, moved = step(max_grad_norm=0.1)
    assert float(moved.norm()) == pytest.approx(0.1, rel=1e-5)
    torch.testing.assert_close(moved / moved.norm(), gradient / gradient.norm())


def test_a_small_gradient_is_not_clipped() -> None:
    _, gradient, moved = step(max_grad_norm=1e6)
    torch.testing.assert_close(moved, gradient, rtol=1e-12, atol=1e-13)


def test_a_plain_mean_weighs_as_much_as_it_has_samples() -> None:
    def mean(model: nn.Module, data: dict[str, Tensor], context: Context) -> Tensor:
        return (model(data["x"]) - data["y"]).square().sum(dim=1).mean()

    whole, _, moved_whole = step(mean, batch_size=12)
    cut, _, moved_cut = step(mean, batch_size=4)
    assert float(cut.weight) == float(whole.weight) == 12
    torch.testing.assert_close(moved_cut, moved_whole, rtol=1e-12, atol=1e-13)

    def summed(model: nn.Module, data: dict[str, Tensor], context: Context) -> PartialLoss:
        return PartialLoss(mean(model, data, context) * len(data["x"]), float(len(data["x"])))

    report, _, moved = step(summed, batch_size=4)
    assert torch.equal(moved, moved_cut)
    assert torch.equal(report.sums, cut.sums)


class Shifted(nn.Module):
    """A network with a number of its own, whose gradient is that of the loss as it is."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("batch_size", [12, 4])
def test_no_step_changes_what_the_next_goes_back_with(batch_size: int) -> None:
    def mean(model: Any, data: dict[str, Tensor], context: Context) -> Tensor:
        return (model.net(data["x"]) - data["y"]).square().mean() + model.shift.squeeze()

    def summed(model: Any, data: dict[str, Tensor], context: Context) -> PartialLoss:
        return PartialLoss(mean(model, data, context) * len(data["x"]), float(len(data["x"])))

    ends = []
    for loss in (mean, summed):
        model = Shifted(build()[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            train_step(loss, model, optimizer, first_batch(batch_size), WORLD)
        ends.append(flat(model))
        assert float(model.shift.detach()) == pytest.approx(-0.3)
    assert torch.equal(*ends)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_is_one_number_whatever_its_shape(shape: tuple[int, ...]) -> None:
    def mean(model: nn.Module, data: dict[str, Tensor], context: Context) -> Tensor:
        return (model(data["x"]) - data["y"]).square().mean()

    def shaped(model: nn.Module, data: dict[str, Tensor], context: Context) -> Tensor:
        return mean(model, data, context).reshape(shape)

    assert torch.equal(step(shaped)[2], step(mean)[2])
    assert torch.equal(step(shaped)[0].sums, step(mean)[0].sums)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_the_type_torch_makes_by_default_does_not_matter(kind: torch.dtype) -> None:
    model, optimizer = build()
    torch.set_default_dtype(kind)
    try:
        report = train_step(TASK.loss, model, optimizer, first_batch(), WORLD)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(report.sums, step()[0].sums)


def test_an_optimizers_own_zero_grad_is_called() -> None:
    class Watched(torch.optim.SGD):
        num = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            Watched.num += 1
            super().zero_grad(set_to_none)

    model, _ = build()
    train_step(TASK.loss, model, Watched(model.parameters(), lr=0.1), first_batch(), WORLD)
    assert Watched.num


def test_gradients_of_before_do_not_count() -> None:
    """They may be another network's loss's, or of a step that failed."""
    model, optimizer = build()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    before = flat(model)
    train_step(TASK.loss, model, optimizer, first_batch(), WORLD)
    assert torch.equal(before - flat(model), step()[2])


def test_a_complex_loss_is_refused_in_words() -> None:
    def turned(model: nn.Module, data: dict[str, Tensor], context: Context) -> Tensor:
        return (model(data["x"]) - data["y"]).square().mean() * 1j

    with pytest.raises(ConfigError, match="not one number with a gradient"):
        step(turned)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_step_that_a_gpu_skipped_is_found_when_numbers_are_read(value: float, place: int) -> None:
    """Or a run would move no more, and say nothing."""
    good, progress = step()[0], Progress()
    numbers = [good.sums.clone(), good.grad_norm.clone()]
    numbers[place].view(-1)[0] = abs(value) if place else value
    progress.count(good, first_batch())
    assert progress.sum_pending() is None
    progress.count(StepReport(numbers[0], good.names, numbers[1], []), first_batch())
    assert progress.sum_pending() is not None


def test_parts_are_summed_with_weights_of_their_own() -> None:
    report, _, _ = step()
    units = torch.cat([m.data["units"] for m in first_batch().micro_batches])
    value, weight = report.parts["heavy"]
    assert float(weight) == float((units > 2).sum()) != float(report.weight)
    assert 0 < float(value) < float(report.loss_sum)


def test_a_padding_micro_batch_counts_for_nothing_and_keeps_its_graph() -> None:
    model, _ = build()
    micro = first_batch().micro_batches[0]
    part = TASK.loss(model, micro.data, Context(WORLD, 0, 0, 0))
    padding = type(micro)(type(micro.leaf)(0, 0, 0, 4, is_padding=True), micro.ids, micro.data)
    nothing = as_partial(part, padding)
    assert nothing.loss_sum.item() == nothing.weight.item() == 0
    assert [float(v) for v in nothing.parts["heavy"]] == [0, 0]
    nothing.loss_sum.backward()
    assert all(not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_reported_as_such(bad: float) -> None:
    def loss(model: nn.Module, data: dict[str, Tensor], context: Context) -> PartialLoss:
        part = TASK.loss(model, data, context)
        return PartialLoss(part.loss_sum * bad, part.weight)

    assert bool(step()[0].finite)
    assert not bool(step(loss)[0].finite)


def test_after_a_bad_step_nothing_moves_until_somebody_looks() -> None:
    """As on a GPU, which is asked now and then."""
    model, optimizer = build()
    non_finite = new_non_finite_flag(torch.device("cpu"))
    plan = plan_batches(BatchConfig(batch_size=12), 48, 1)
    states, reports = [], []
    for batch in Loader(TASK.train_data(), WORLD, plan=plan, epochs=1):
        factor = float("inf") if batch.step == 1 else 1.0

        def loss(net: nn.Module, data: Any, context: Context, factor: float = factor) -> Tensor:
            return TASK.loss(net, data, context).loss_sum * factor

        reports.append(train_step(loss, model, optimizer, batch, WORLD, non_finite=non_finite))
        states.append(flat(model).clone())
    assert not torch.equal(states[0], flat(build()[0]))
    assert all(torch.equal(state, states[0]) for state in states)
    assert bool(reports[2].finite)
    assert non_finite.item() == 1.0


def test_a_gradient_that_is_no_number_is_reported_although_the_loss_is_one() -> None:
    def loss(model: nn.Module, data: dict[str, Tensor], context: Context) -> PartialLoss:
        zero = (model(data["x"]) * 0).sum()
        return PartialLoss(TASK.loss(model, data, context).loss_sum + zero.sqrt(), 1.0)

    report, _, moved = step(loss)
    assert bool(torch.isfinite(report.loss_sum))
    assert not bool(report.finite)
    assert not moved.any()


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", init_scale=2.0)])
def test_a_loss_that_is_no_number_moves_nothing_although_its_gradient_is_one(scaler: Any) -> None:
    def loss(model: nn.Module, data: dict[str, Tensor], context: Context) -> PartialLoss:
        part = TASK.loss(model, data, context)
        return PartialLoss(part.loss_sum + float("inf"), part.weight)

    report, _, moved = step(loss, scaler=scaler)
    assert bool(torch.isfinite(report.grad_norm))
    assert not moved.any()


def test_a_step_repeats_bit_for_bit() -> None:
    def noisy(model: nn.Module, data: dict[str, Tensor], context: Context) -> PartialLoss:
        x = torch.nn.functional.dropout(data["x"], 0.5)
        return TASK.loss(model, {**data, "x": x}, context)

    first = step(noisy)[2]
    torch.rand(17)
    assert torch.equal(step(noisy)[2], first)
    assert not torch.equal(step(noisy, seed=1)[2], first)


def test_parts_that_differ_within_a_step_are_refused() -> None:
    model, optimizer = build()

    def loss(model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        made = TinyTask().loss(model, batch, context)
        return PartialLoss(made.loss_sum, made.weight, {"odd": (1.0, 1.0)} if context.place else {})

    with pytest.raises(ConfigError, match="different parts of the loss: none and odd"):
        train_step(loss, model, optimizer, first_batch(), FakeWorld())


def test_a_step_begins_without_the_gradients_of_one_that_failed_or_of_another_loss() -> None:
    model, optimizer = build()

    def loss(model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        if context.place:
            raise ZeroDivisionError
        return TinyTask().loss(model, batch, context)

    batch = first_batch()
    gradient, before = true_gradient(model, batch), flat(model)
    with pytest.raises(ZeroDivisionError):
        train_step(loss, model, optimizer, batch, WORLD)
    model(batch.micro_batches[0].data["x"]).sum().backward()  # as a generator's loss leaves some
    train_step(TASK.loss, model, optimizer, batch, WORLD)
    assert torch.allclose(before - flat(model), gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_of_any_precision_are_divided_by_all_of_the_divisor(dtype: torch.dtype) -> None:
    grads = [torch.full((3,), 1027.0, dtype=dtype), torch.full((2,), 1027.0)]
    wanted = [grad.double() / 100_001.0 for grad in grads]
    divide(grads, torch.tensor(100_001.0, dtype=torch.float64))
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.double(), want, rtol=torch.finfo(grad.dtype).eps, atol=0)


def test_a_weight_that_the_loss_changes_is_cast_anew() -> None:
    """As an average of the weights is, that a loss keeps for itself and has not frozen."""

    def loss(model: nn.Module, data: dict[str, Tensor], context: Context) -> PartialLoss:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        return TASK.loss(model, {name: value.float() for name, value in data.items()}, context)

    def moved(*, keeps: bool) -> Tensor:
        model, optimizer = build()
        autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=keeps)
        train_step(loss, model.float(), optimizer, first_batch(), WORLD, autocast=autocast)
        return flat(model)

    assert torch.equal(moved(keeps=True), moved(keeps=False))


@pytest.mark.parametrize("made", [None, 1.5, {"loss": 1}, torch.ones(()), torch.ones(2).log()])
def test_what_is_no_loss_is_refused(made: Any) -> None:
    with pytest.raises(ConfigError, match="not one number with a gradient"):
        step(lambda *_: made)


def test_a_loss_and_its_weight_may_be_tensors_of_one_element() -> None:
    def loss(*args: Any) -> PartialLoss:
        made = TASK.loss(*args)
        return PartialLoss(made.loss_sum[None], torch.as_tensor(made.weight)[None])

    _, gradient, moved = step(loss)
    assert torch.allclose(moved, gradient)


def test_complex_gradients_are_divided_beside_real_ones() -> None:
    grads = [torch.full((2,), 2 + 4j), torch.full((2,), 6.0)]
    divide(grads, torch.tensor(2.0, dtype=torch.float64))
    assert [grad[0].item() for grad in grads] == [1 + 2j, 3.0]
