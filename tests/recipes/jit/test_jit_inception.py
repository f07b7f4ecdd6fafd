"""The FID network loads weights by their published names and refuses anything else."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import DataError
from lockstep.task import Context
from lockstep.testing import FakeWorld
from lockstep_recipes.jit.inception import (
    FidInception,
    MixedE,
    load_inception,
    mean_pool,
)
from lockstep_recipes.jit.model import JiT
from lockstep_recipes.jit.task import JiTTask


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(FidInception().state_dict(), path)
    return path


def test_the_network_has_the_published_names_and_size() -> None:
    with torch.device("meta"):
        model = FidInception()
    state = model.state_dict()
    published = {
        "Conv2d_1a_3x3.conv.weight": (32, 3, 3, 3),
        "Conv2d_4a_3x3.bn.running_var": (192,),
        "Mixed_5b.branch1x1.conv.weight": (64, 192, 1, 1),
        "Mixed_5d.branch3x3dbl_3.conv.weight": (96, 96, 3, 3),
        "Mixed_6a.branch3x3.conv.weight": (384, 288, 3, 3),
        "Mixed_6c.branch7x7_2.conv.weight": (160, 160, 1, 7),
        "Mixed_6e.branch7x7dbl_5.conv.weight": (192, 192, 1, 7),
        "Mixed_7a.branch7x7x3_4.conv.weight": (192, 192, 3, 3),
        "Mixed_7c.branch3x3dbl_3b.conv.weight": (384, 384, 3, 1),
        "Mixed_7c.branch_pool.conv.weight": (192, 2048, 1, 1),
        "fc.weight": (1008, 2048),
        "fc.bias": (1008,),
    }
    assert {name: tuple(state[name].shape) for name in published} == published
    # torchvision's network without its training head has 23,834,568 for 1000 outputs.
    assert sum(p.numel() for p in model.parameters()) == 23_834_568 + 8 * 2049
    assert sum(name.endswith("conv.weight") for name in state) == 94


def test_a_saved_state_loads_and_gives_its_features(weights: Path) -> None:
    model = load_inception(weights)
    image = torch.rand(2, 3, 16, 16) * 2 - 1
    features = model(image)
    assert features.shape == (2, 2048)
    assert torch.isfinite(features).all()
    assert not model.training
    assert not features.requires_grad
    state = torch.load(weights, weights_only=True)
    assert torch.equal(
        model.Mixed_7c.branch1x1.conv.weight, state["Mixed_7c.branch1x1.conv.weight"]
    )


def test_old_files_without_counters_and_with_a_training_head_load(
    weights: Path, tmp_path: Path
) -> None:
    state = torch.load(weights, weights_only=True)
    old = {k: v for k, v in state.items() if "num_batches" not in k}
    old["AuxLogits.fc.weight"] = torch.zeros(3)
    torch.save(old, tmp_path / "old.pth")
    loaded = load_inception(tmp_path / "old.pth")
    image = torch.rand(2, 3, 16, 16) * 2 - 1
    assert torch.equal(loaded(image), load_inception(weights)(image))
    assert not any(name.startswith("AuxLogits") for name in loaded.state_dict())


def test_a_missing_file_is_named_before_anything_is_trained(
    tmp_path: Path, make_task: Callable[..., JiTTask]
) -> None:
    with pytest.raises(DataError, match="nowhere.pth do not exist"):
        make_task(inception_weights=tmp_path / "nowhere.pth")


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\x80\x04N."])
def test_a_file_of_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    with pytest.raises(DataError, match="weights.pth is not"):
        load_inception(path)


def test_another_network_is_refused_with_the_first_difference(
    weights: Path, tmp_path: Path
) -> None:
    state = torch.load(weights, weights_only=True)
    state["fc.weight"] = torch.zeros(1000, 2048)
    torch.save(state, tmp_path / "other.pth")
    with pytest.raises(DataError, match=r"another network.*first: fc.weight"):
        load_inception(tmp_path / "other.pth")
    torch.save({"layer.weight": torch.zeros(3)}, tmp_path / "tiny.pth")
    with pytest.raises(DataError, match="another network"):
        load_inception(tmp_path / "tiny.pth")


def test_pools_do_not_count_their_padding() -> None:
    ones = torch.ones(1, 1, 4, 4)
    assert torch.equal(mean_pool(ones), ones)


@pytest.mark.parametrize("is_last", [True, False])
def test_the_last_block_takes_the_maximum_where_others_average(is_last: bool) -> None:
    block = MixedE(8, max_pool=is_last).eval()
    x = torch.rand(1, 8, 5, 5)
    pooled: Tensor = (
        F.max_pool2d(x, 3, stride=1, padding=1)
        if is_last
        else F.avg_pool2d(F.pad(x, [1] * 4), 3, 1)
    )
    centre = (slice(None), slice(-192, None), slice(1, -1), slice(1, -1))
    torch.testing.assert_close(block(x)[centre], block.branch_pool(pooled)[..., 1:-1, 1:-1])


def test_the_flavour_is_that_of_fid() -> None:
    with torch.device("meta"):
        model = FidInception()
    assert (model.Mixed_7b.max_pool, model.Mixed_7c.max_pool) == (False, True)
    assert model.Mixed_7c.branch1x1.bn.eps == 0.001


def test_with_weights_the_distance_is_called_fid(
    weights: Path,
    make_task: Callable[..., JiTTask],
    make_mini: Callable[..., JiT],
    tmp_path: Path,
) -> None:
    task = make_task(num_fid_samples=2, grid=0, sample_steps=1, inception_weights=weights)
    context = Context(FakeWorld(), seed=0, step=1, place=0, training=False)
    metrics = task.finish_evaluation(make_mini(), context, str(tmp_path))
    assert list(metrics) == ["fid"]
    assert metrics["fid"] >= 0
