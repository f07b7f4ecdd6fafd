"""Inception-v3 as the common FID tools use it: images to 2048 features.

Owns: the network and the loading of its published weights from a local file.
Does not own: the statistics of the features, nor any download. Parameter names are
those of the published state (`Mixed_5b.branch1x1.conv.weight`, ...).

It differs from the classifier in three places that change the score: average pools
do not count their padding, the last block's pool takes the maximum, and images
are resized to 299 bilinearly without antialiasing.

Shapes: B images, C channels, H x W pixels.
"""

import warnings
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import DataError

INPUT_SIZE = 299
NUM_FEATURES = 2048
NUM_OUTPUTS = 1008

Pair = tuple[int, int]


class Conv(nn.Module):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: int | Pair = 1,
        *,
        stride: int = 1,
        padding: int | Pair = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(channels_out, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W)."""
        return F.relu(self.bn(self.conv(x)), inplace=True)


def row(channels_in: int, channels_out: int, length: int) -> Conv:
    """Return a convolution over `length` pixels of a row."""
    return Conv(channels_in, channels_out, (1, length), padding=(0, length // 2))


def column(channels_in: int, channels_out: int, length: int) -> Conv:
    """Return a convolution over `length` pixels of a column."""
    return Conv(channels_in, channels_out, (length, 1), padding=(length // 2, 0))


def mean_pool(x: Tensor) -> Tensor:
    """Average 3 x 3 pixels; beyond the border there is nothing, not zeros."""
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


class MixedA(nn.Module):
    """35 x 35 pixels: 1x1, 5x5, twice 3x3, and a pooled branch."""

    def __init__(self, channels: int, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(channels, 64)
        self.branch5x5_1 = Conv(channels, 48)
        self.branch5x5_2 = Conv(48, 64, 5, padding=2)
        self.branch3x3dbl_1 = Conv(channels, 64)
        self.branch3x3dbl_2 = Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Conv(96, 96, 3, padding=1)
        self.branch_pool = Conv(channels, pooled)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to the branches side by side."""
        wide = self.branch5x5_2(self.branch5x5_1(x))
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        pooled = self.branch_pool(mean_pool(x))
        return torch.cat([self.branch1x1(x), wide, double, pooled], 1)


class MixedB(nn.Module):
    """From 35 x 35 to 17 x 17 pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch3x3 = Conv(channels, 384, 3, stride=2)
        self.branch3x3dbl_1 = Conv(channels, 64)
        self.branch3x3dbl_2 = Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Conv(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to the branches side by side."""
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), double, F.max_pool2d(x, 3, stride=2)], 1)


class MixedC(nn.Module):
    """17 x 17 pixels: 7x7 convolutions as a row and a column."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(768, 192)
        self.branch7x7_1 = Conv(768, inner)
        self.branch7x7_2 = row(inner, inner, 7)
        self.branch7x7_3 = column(inner, 192, 7)
        self.branch7x7dbl_1 = Conv(768, inner)
        self.branch7x7dbl_2 = column(inner, inner, 7)
        self.branch7x7dbl_3 = row(inner, inner, 7)
        self.branch7x7dbl_4 = column(inner, inner, 7)
        self.branch7x7dbl_5 = row(inner, 192, 7)
        self.branch_pool = Conv(768, 192)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to the branches side by side."""
        single = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        pooled = self.branch_pool(mean_pool(x))
        return torch.cat([self.branch1x1(x), single, double, pooled], 1)


class MixedD(nn.Module):
    """From 17 x 17 to 8 x 8 pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch3x3_1 = Conv(channels, 192)
        self.branch3x3_2 = Conv(192, 320, 3, stride=2)
        self.branch7x7x3_1 = Conv(channels, 192)
        self.branch7x7x3_2 = row(192, 192, 7)
        self.branch7x7x3_3 = column(192, 192, 7)
        self.branch7x7x3_4 = Conv(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to the branches side by side."""
        small = self.branch3x3_2(self.branch3x3_1(x))
        large = self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x)))
        return torch.cat([small, self.branch7x7x3_4(large), F.max_pool2d(x, 3, stride=2)], 1)


class MixedE(nn.Module):
    """8 x 8 pixels: a row and a column side by side; the pool is a mean or, last, a maximum."""

    def __init__(self, channels: int, *, max_pool: bool) -> None:
        super().__init__()
        self.max_pool = max_pool
        self.branch1x1 = Conv(channels, 320)
        self.branch3x3_1 = Conv(channels, 384)
        self.branch3x3_2a = row(384, 384, 3)
        self.branch3x3_2b = column(384, 384, 3)
        self.branch3x3dbl_1 = Conv(channels, 448)
        self.branch3x3dbl_2 = Conv(448, 384, 3, padding=1)
        self.branch3x3dbl_3a = row(384, 384, 3)
        self.branch3x3dbl_3b = column(384, 384, 3)
        self.branch_pool = Conv(channels, 192)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to the branches side by side."""
        single = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pool = F.max_pool2d(x, 3, stride=1, padding=1) if self.max_pool else mean_pool(x)
        branches = [
            self.branch1x1(x),
            self.branch3x3_2a(single),
            self.branch3x3_2b(single),
            self.branch3x3dbl_3a(double),
            self.branch3x3dbl_3b(double),
            self.branch_pool(pool),
        ]
        return torch.cat(branches, 1)


class FidInception(nn.Module):
    """The network up to its last pool. `fc` is there for the weights file, and unused."""

    num_features = NUM_FEATURES

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Conv(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Conv(32, 32, 3)
        self.Conv2d_2b_3x3 = Conv(32, 64, 3, padding=1)
        self.Conv2d_3b_1x1 = Conv(64, 80)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3)
        self.Mixed_5b = MixedA(192, pooled=32)
        self.Mixed_5c = MixedA(256, pooled=64)
        self.Mixed_5d = MixedA(288, pooled=64)
        self.Mixed_6a = MixedB(288)
        self.Mixed_6b = MixedC(inner=128)
        self.Mixed_6c = MixedC(inner=160)
        self.Mixed_6d = MixedC(inner=160)
        self.Mixed_6e = MixedC(inner=192)
        self.Mixed_7a = MixedD(768)
        self.Mixed_7b = MixedE(1280, max_pool=False)
        self.Mixed_7c = MixedE(2048, max_pool=True)
        self.fc = nn.Linear(NUM_FEATURES, NUM_OUTPUTS)

    def forward(self, image: Tensor) -> Tensor:
        """Return features (B, 2048) of images (B, 3, H, W) between -1 and 1."""
        size = (INPUT_SIZE, INPUT_SIZE)
        x = F.interpolate(image, size, mode="bilinear", align_corners=False)
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x))
        x = F.max_pool2d(x, 3, stride=2)
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))
        x = self.Mixed_6a(x)
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(x))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        features: Tensor = x.mean(dim=(2, 3))
        return features


def load_inception(path: Path | str) -> FidInception:
    """Build the network with the weights of a local file, ready to use.

    Raises:
        DataError: if the file is missing, unreadable, or holds another network.
    """
    path = Path(path)
    remedy = "download the FID weights pt_inception-2015-12-05-6726825d.pth before the run"
    if not path.is_file():
        raise DataError(f"the Inception weights {path} do not exist", remedy)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's doubts about a foreign file: we say it better
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError, EOFError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"{path} is not a file of weights: {reason}", remedy) from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise DataError(f"{path} is not a state_dict of tensors", remedy)

    model = FidInception()
    wanted = model.state_dict()
    # Old files lack the counters, and torchvision's hold a training head of no use here.
    counters = {k: v for k, v in wanted.items() if k.endswith("num_batches_tracked")}
    state = counters | {k: v for k, v in state.items() if not k.startswith("AuxLogits.")}
    wrong = sorted(wanted.keys() ^ state.keys())
    wrong += [k for k in wanted if k in state and state[k].shape != wanted[k].shape]
    if wrong:
        raise DataError(
            f"{path} holds another network: {len(wrong)} of {len(wanted)} entries are missing, "
            f"unknown or of another shape (first: {wrong[0]})",
            remedy,
        )
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)
