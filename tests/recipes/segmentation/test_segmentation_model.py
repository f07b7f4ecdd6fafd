"""The network has the published names, sizes and strides; LoRM is what its formula says."""

import math

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError, DataError
from lockstep_recipes.segmentation.model import (
    LoRM,
    ResNet,
    SegmentationNet,
    feature_size,
    load_backbone,
    shrink_labels,
)


def millions(module: nn.Module) -> float:
    return sum(p.numel() for p in module.parameters()) / 1e6


def test_the_parameter_counts_are_those_of_the_specification() -> None:
    with torch.device("meta"):
        net = SegmentationNet(num_classes=21)
    assert millions(net.backbone) == pytest.approx(23.508, abs=1e-3)
    assert millions(net.head) == pytest.approx(1.25, abs=0.01)
    assert millions(net.lorm) == pytest.approx(8.39, abs=0.01)
    assert millions(net) == pytest.approx(33.2, abs=0.1)


@pytest.mark.parametrize(
    ("layers", "count", "channels"),
    [
        (18, 11.177, 512),
        (34, 21.285, 512),
        (50, 23.508, 2048),
        (101, 42.500, 2048),
        (152, 58.144, 2048),
    ],
)
def test_every_resnet_has_its_published_size(layers: int, count: float, channels: int) -> None:
    with torch.device("meta"):
        net = SegmentationNet(21, layers)
    assert millions(net.backbone) == pytest.approx(count, abs=1e-3)
    assert net.lorm.query.in_channels == channels


def test_the_parameter_names_and_shapes_are_torchvisions() -> None:
    with torch.device("meta"):
        state = ResNet(50).state_dict()
        small = ResNet(18).state_dict()
    assert len(state) == 318  # torchvision's resnet50 has 320, with fc.weight and fc.bias
    for name, shape in {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_var": (64,),
        "layer1.0.conv1.weight": (64, 64, 1, 1),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.running_mean": (256,),
        "layer3.5.conv2.weight": (256, 256, 3, 3),
        "layer4.0.downsample.0.weight": (2048, 1024, 1, 1),
        "layer4.2.bn3.bias": (2048,),
        "layer4.2.conv3.weight": (2048, 512, 1, 1),
    }.items():
        assert tuple(state[name].shape) == shape, name
    assert len(small) == 120
    assert tuple(small["layer2.0.downsample.0.weight"].shape) == (128, 64, 1, 1)
    assert "layer1.0.downsample.0.weight" not in small


def test_strides_and_dilations_are_where_the_specification_puts_them() -> None:
    with torch.device("meta"):
        net = ResNet(50)
    assert net.layer2[0].conv1.stride == (2, 2), "on the first 1x1, not on the 3x3"
    assert net.layer2[0].conv2.stride == (1, 1)
    assert [block.conv2.dilation[0] for block in net.layer3] == [2] * 6
    assert [block.conv2.dilation[0] for block in net.layer4] == [4, 8, 16]
    assert net.layer3[0].conv1.stride == net.layer4[0].conv1.stride == (1, 1)
    assert net.maxpool.ceil_mode
    with torch.device("meta"):
        head = SegmentationNet(21).head
    assert [branch[0].dilation[0] for branch in head.branches] == [1, 12, 18, 24]
    assert [branch[0].padding[0] for branch in head.branches] == [0, 12, 18, 24]


@pytest.mark.parametrize("size", [(33, 33), (40, 61), (48, 17)])
def test_the_grid_is_an_eighth_and_the_logits_have_the_images_size(size: tuple[int, int]) -> None:
    net = SegmentationNet(5, 18, width=4).eval()
    image = torch.randn(2, 3, *size)
    assert net.backbone(image).shape[2:] == tuple(feature_size(n) for n in size)
    logits, lorm = net(image)
    assert logits.shape == (2, 5, *size)
    assert lorm == 0
    assert feature_size(465) == 59


def test_labels_shrink_by_taking_what_stands_there() -> None:
    labels = torch.arange(33 * 33).view(1, 33, 33)
    assert torch.equal(shrink_labels(labels), labels[:, ::8, ::8])
    odd = torch.randint(0, 9, (2, 40, 61))
    assert shrink_labels(odd).shape == (2, feature_size(40), feature_size(61))


def test_lorm_equals_a_slow_loop() -> None:
    torch.manual_seed(0)
    channels, height, width = 6, 3, 4
    lorm = LoRM(channels).double().requires_grad_(False)
    lorm.gamma.data.fill_(0.7)
    x = torch.randn(2, channels, height, width, dtype=torch.float64)
    foreground = torch.rand(2, height, width) < 0.5
    total = 0.0
    for image, here in zip(x, foreground, strict=True):
        at = [image[:, r, c] for r in range(height) for c in range(width)]
        q = [lorm.query.weight[:, :, 0, 0] @ v + lorm.query.bias for v in at]
        k = [lorm.key.weight[:, :, 0, 0] @ v + lorm.key.bias for v in at]
        for i, is_foreground in enumerate(here.flatten().tolist()):
            if not is_foreground:
                continue
            cosines = [float(q[i] @ k[j] / (q[i].norm() * k[j].norm())) for j in range(len(at))]
            mass = sum(math.exp(c) for c in cosines)
            prototype = sum(math.exp(c) / mass * at[j] for j, c in enumerate(cosines))
            total += float((at[i] - 0.7 * prototype).square().sum()) / channels
    assert float(lorm(x, foreground)) == pytest.approx(total, rel=1e-12)
    assert lorm(x, torch.zeros_like(foreground)) == 0


def test_published_weights_load_from_a_local_file_without_the_classifier(tmp_path) -> None:
    source = ResNet(18, width=4)
    stored = source.state_dict() | {"fc.weight": torch.zeros(10, 32), "fc.bias": torch.zeros(10)}
    torch.save(stored, tmp_path / "resnet18.pth")
    target = ResNet(18, width=4)
    load_backbone(target, tmp_path / "resnet18.pth")
    assert torch.equal(target.layer4[1].conv2.weight, source.layer4[1].conv2.weight)
    with pytest.raises(DataError, match=r"resnet18\.pth"):
        load_backbone(ResNet(34, width=4), tmp_path / "resnet18.pth")
    (tmp_path / "noise.pth").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"noise\.pth"):
        load_backbone(target, tmp_path / "noise.pth")


def test_a_resnet_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="20 layers"):
        ResNet(20)
