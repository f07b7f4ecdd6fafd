"""The network has the published sizes and starts where the theory says."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep_recipes.jit.model import (
    VARIANTS,
    JiT,
    build_jit,
    position_table,
    rotate,
    rotation_table,
)


def count_millions(model: nn.Module) -> float:
    return sum(p.numel() for p in model.parameters()) / 1e6


@pytest.mark.parametrize(
    ("name", "num_classes", "millions", "within"),
    [
        ("JiT-B/4", 1000, 130.5, 0.1),
        ("JiT-B/4", 0, 129.7, 0.1),
        ("JiT-B/16", 1000, 131.1, 0.1),
        ("JiT-B/32", 1000, 133.2, 0.1),
        ("JiT-L/16", 1000, 458.9, 0.1),
        ("JiT-H/16", 1000, 952.5, 0.1),
        ("JiT-G/16", 1000, 2000.0, 50.0),
        ("JiT-T/4", 0, 4.2, 0.1),
    ],
)
def test_every_variant_has_the_tabled_number_of_weights(
    name: str, num_classes: int, millions: float, within: float
) -> None:
    with torch.device("meta"):
        model = build_jit(name, VARIANTS[name].native_size, num_classes)
    assert count_millions(model) == pytest.approx(millions, abs=within)


def test_an_unknown_variant_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="JiT-L/1'") as caught:
        build_jit("JiT-L/1", 64, 10)
    assert caught.value.remedy == "use JiT-L/16"


def test_an_image_that_patches_do_not_tile_is_refused() -> None:
    with pytest.raises(ConfigError, match="image_size=66") as caught:
        build_jit("JiT-B/4", 66, 10)
    assert "64 or 68" in caught.value.remedy


def test_the_first_prediction_is_zero(make_mini: Callable[..., JiT]) -> None:
    out = make_mini()(torch.randn(3, 3, 8, 8), torch.rand(3), torch.tensor([0, 1, 4]))
    assert torch.equal(out, torch.zeros(3, 3, 8, 8))


def test_patches_come_back_as_the_same_image(make_mini: Callable[..., JiT]) -> None:
    model, image = make_mini(image_size=12), torch.randn(2, 3, 12, 12)
    assert torch.equal(model.to_image(model.to_patches(image)), image)
    first_patch = model.to_patches(image)[0, 0].reshape(3, 4, 4)
    assert torch.equal(first_patch, image[0, :, :4, :4])


def test_every_weight_gets_a_gradient(make_mini: Callable[..., JiT]) -> None:
    model = make_mini(random=True)
    model(torch.randn(2, 3, 8, 8), torch.rand(2), torch.tensor([0, 4])).square().sum().backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not idle


def test_class_and_time_change_the_prediction(make_mini: Callable[..., JiT]) -> None:
    model, image = make_mini(random=True), torch.randn(1, 3, 8, 8)
    half, one = torch.tensor([0.5]), torch.tensor([1])
    out = model(image, half, one)
    assert not torch.allclose(out, model(image, half, torch.tensor([2])))
    assert not torch.allclose(out, model(image, torch.tensor([0.6]), one))


def test_images_of_a_batch_do_not_mix(make_mini: Callable[..., JiT]) -> None:
    model = make_mini(random=True)
    image, t, label = torch.randn(3, 3, 8, 8), torch.rand(3), torch.tensor([0, 1, 2])
    alone = torch.cat([model(image[i : i + 1], t[i : i + 1], label[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(model(image, t, label), alone)


def test_rotation_sees_the_distance_between_patches_and_not_their_place() -> None:
    grid, width, num_class_tokens = 5, 16, 3
    cos, sin = rotation_table(grid, width, num_class_tokens)
    q, k = torch.randn(2, width)

    def score(a: tuple[int, int], b: tuple[int, int]) -> Tensor:
        def turned(x: Tensor, place: tuple[int, int]) -> Tensor:
            index = num_class_tokens + place[0] * grid + place[1]
            return rotate(x[None, None, None], cos[index : index + 1], sin[index : index + 1])

        return (turned(q, a) * turned(k, b)).sum()

    torch.testing.assert_close(score((0, 0), (1, 3)), score((2, 1), (3, 4)))
    for other in ((3, 1), (1, 2), (2, 3)):  # transposed, another column, another row
        assert not torch.isclose(score((0, 0), (1, 3)), score((0, 0), other))


def test_class_tokens_are_not_rotated() -> None:
    cos, sin = rotation_table(4, 16, num_unrotated=3)
    x = torch.randn(1, 3, 2, 16)
    assert torch.equal(rotate(x, cos[:3], sin[:3]), x)
    assert cos.shape == (3 + 16, 1, 8)


def test_every_patch_has_its_own_position() -> None:
    table = position_table(6, 32)
    assert table.shape == (36, 32)
    assert torch.cdist(table, table).fill_diagonal_(1).min() > 0.1


@pytest.mark.parametrize(("name", "inside"), [("JiT-H/16", range(8, 24)), ("JiT-T/4", range(2, 5))])
def test_only_the_middle_half_of_the_blocks_drops_out(name: str, inside: range) -> None:
    with torch.device("meta"):
        model = build_jit(name, VARIANTS[name].native_size, 0, dropout=0.2)
    active = [
        index
        for index, block in enumerate(model.blocks)
        if any(isinstance(part, nn.Dropout) and part.p > 0 for part in block.modules())
    ]
    assert active == list(inside)


def test_tables_stay_out_of_the_checkpoint(make_mini: Callable[..., JiT]) -> None:
    model = make_mini()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_the_network_is_one_graph(make_mini: Callable[..., JiT]) -> None:
    model = make_mini(random=True)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    inputs = torch.randn(2, 3, 8, 8), torch.rand(2), torch.tensor([0, 1])
    torch.testing.assert_close(compiled(*inputs), model(*inputs))


def test_autocast_stays_close_to_full_precision(make_mini: Callable[..., JiT]) -> None:
    model = make_mini(random=True)
    inputs = torch.randn(2, 3, 8, 8), torch.rand(2), torch.tensor([0, 1])
    exact = model(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(*inputs)
    assert (exact - rounded).abs().max() < 0.05 * exact.abs().max()
