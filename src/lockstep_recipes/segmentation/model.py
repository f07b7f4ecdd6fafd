"""The network: a ResNet with an output stride of 8, ASPP on top, and LoRM beside it.

Owns: the layers, their names (the trunk's are torchvision's, so that published weights
load), the feature grid, LoRM's error. Does not own: the other losses, or labels, except
the foreground that LoRM needs.

Shapes: B images, H x W pixels, h x w positions on the grid, N = h w, C channels, K classes.
"""

from functools import lru_cache
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError, DataError

BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
LAST_DILATIONS = (4, 8, 16)
ASPP_RATES = (12, 18, 24)


def conv3x3(inside: int, out: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    """Return a 3x3 convolution that keeps the size, apart from its stride."""
    return nn.Conv2d(inside, out, 3, stride, padding=dilation, dilation=dilation, bias=False)


def conv1x1(inside: int, out: int, stride: int = 1) -> nn.Conv2d:
    """Return a 1x1 convolution."""
    return nn.Conv2d(inside, out, 1, stride, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: ResNet 18 and 34."""

    expansion = 1

    def __init__(self, inside: int, planes: int, stride: int, dilation: int) -> None:
        super().__init__()
        self.conv1 = conv3x3(inside, planes, stride, dilation)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = conv3x3(planes, planes, dilation=dilation)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = _shortcut(inside, planes, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; the first 1x1 has the stride."""

    expansion = 4

    def __init__(self, inside: int, planes: int, stride: int, dilation: int) -> None:
        super().__init__()
        out = planes * self.expansion
        self.conv1 = conv1x1(inside, planes, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = conv3x3(planes, planes, dilation=dilation)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = conv1x1(planes, out)
        self.bn3 = nn.BatchNorm2d(out)
        self.downsample = _shortcut(inside, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


def _shortcut(inside: int, out: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inside == out:
        return None
    return nn.Sequential(conv1x1(inside, out, stride), nn.BatchNorm2d(out))


class ResNet(nn.Module):
    """The trunk: (B, 3, H, W) to (B, C, h, w).

    The third and fourth stage use dilation instead of stride: 2, and 4, 8, 16.
    `width` is the number of channels of the first stage; published weights have 64.
    """

    def __init__(self, layers: int = 50, width: int = 64) -> None:
        super().__init__()
        if layers not in BLOCKS:
            known = ", ".join(map(str, BLOCKS))
            raise ConfigError(f"there is no ResNet of {layers} layers", f"use one of {known}")
        block = BasicBlock if layers < 50 else Bottleneck
        counts = BLOCKS[layers]
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True)
        self.channels = width
        self.layer1 = self._stage(block, width, 1, (1,) * counts[0])
        self.layer2 = self._stage(block, 2 * width, 2, (1,) * counts[1])
        self.layer3 = self._stage(block, 4 * width, 1, (2,) * counts[2])
        self.layer4 = self._stage(block, 8 * width, 1, LAST_DILATIONS[: counts[3]])
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def _stage(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        planes: int,
        stride: int,
        dilations: tuple[int, ...],
    ) -> nn.Sequential:
        blocks = []
        for number, dilation in enumerate(dilations):
            blocks.append(block(self.channels, planes, 1 if number else stride, dilation))
            self.channels = planes * block.expansion
        return nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))  # type: ignore[no-any-return]


def feature_size(pixels: int) -> int:
    """Return the number of grid positions for `pixels`: position i is at pixel 8 i.

    >>> feature_size(465)
    59
    """
    halved = -(-pixels // 2)  # 7x7, stride 2, padding 3
    pooled = halved // 2 + 1  # 3x3, stride 2, padding 1; the last window may overlap the border
    return -(-pooled // 2)


def shrink_labels(labels: Tensor) -> Tensor:
    """Return the label at each grid position: (B, H, W) to (B, h, w)."""
    rows, columns = (grid_pixels(n, labels.device) for n in labels.shape[-2:])
    return labels[:, rows[:, None], columns]


@lru_cache(maxsize=256)
def grid_pixels(pixels: int, device: torch.device) -> Tensor:
    """Return the pixel of each grid position."""
    return torch.linspace(0, pixels - 1, feature_size(pixels), device=device).round().long()


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling; every branch maps directly to the classes: (B, K, h, w)."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        convs = [conv1x1(channels, num_classes)]
        convs += [
            nn.Conv2d(channels, num_classes, 3, padding=rate, dilation=rate, bias=False)
            for rate in ASPP_RATES
        ]
        self.branches = nn.ModuleList(map(_normalised, convs))
        self.pooled = _normalised(conv1x1(channels, num_classes))
        self.project = nn.Sequential(
            conv1x1((len(convs) + 1) * num_classes, num_classes), nn.BatchNorm2d(num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        everywhere = self.pooled(x.mean(dim=(2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        seen = [branch(x) for branch in self.branches]
        return self.project(torch.cat([*seen, everywhere], dim=1))  # type: ignore[no-any-return]


def _normalised(conv: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU())


class LoRM(nn.Module):
    """Localization rectification: the distance of features from attention-weighted prototypes.

    With q = Wq x and k = Wk x, A_ij = softmax_j cos(q_i, k_j): position i of the
    foreground should look like gamma sum_j A_ij x_j. The error is the squared distance
    per channel, so that it does not depend on the width.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.query = nn.Conv2d(channels, channels, 1)
        self.key = nn.Conv2d(channels, channels, 1)
        self.gamma = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, foreground: Tensor) -> Tensor:
        """Return the error summed over the positions of `foreground` (B, h, w)."""
        q = F.normalize(self.query(x).flatten(2), dim=1)
        k = F.normalize(self.key(x).flatten(2), dim=1)
        attention = torch.softmax(q.transpose(1, 2) @ k, dim=-1)  # (B, N, N)
        features = x.flatten(2).transpose(1, 2)  # (B, N, C)
        prototypes = self.gamma * (attention.to(features.dtype) @ features)
        error = widen(features - prototypes).square().mean(dim=-1)
        return (error * foreground.flatten(1)).sum()


def widen(x: Tensor) -> Tensor:
    """Return `x` in at least float32: sums in bf16 are too coarse."""
    return x if x.dtype == torch.float64 else x.float()


class SegmentationNet(nn.Module):
    """Images in, logits at the size of the images out; in training, LoRM's error too."""

    def __init__(
        self, num_classes: int, layers: int = 50, width: int = 64, lorm: bool = True
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.backbone = ResNet(layers, width)
        self.head = ASPP(self.backbone.channels, num_classes)
        self.lorm = LoRM(self.backbone.channels) if lorm else None

    def forward(self, image: Tensor, foreground: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the logits (B, K, H, W) and LoRM's summed error, 0 without `foreground`."""
        x = self.backbone(image)
        logits = widen(self.head(x))
        logits = F.interpolate(logits, image.shape[2:], mode="bilinear", align_corners=True)
        if self.lorm is None or foreground is None:
            return logits, logits.new_zeros(())
        return logits, self.lorm(x, foreground)

    def as_channels_last(self) -> Self:
        """Use the memory layout in which convolutions are fastest."""
        return self.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def load_backbone(backbone: ResNet, path: Path) -> None:
    """Load published ResNet weights from a local file, without the classifier.

    Raises:
        DataError: if the file does not hold the weights of this ResNet.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            stored = load_file(path)
        else:
            stored = torch.load(path, map_location="cpu", weights_only=True)
        stored = {name: value for name, value in stored.items() if not name.startswith("fc.")}
        backbone.load_state_dict(stored)
    except Exception as error:  # unpicklers and parsers raise all kinds of errors
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{path} does not hold the weights of this ResNet: {reason}",
            "pass torchvision's file for these --layers, or remove --model_path to train from "
            "scratch",
        ) from error
