"""Batch normalisation over all ranks: N ranks with a batch of b equal one with N x b.

Owns: the statistics and their gradients. Does not own: which models want it.
torch's own version runs on GPUs only, and ranks must equal one on the CPU too.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.runtime import World


class SyncBatchNorm(_BatchNorm):
    """Normalise by the mean and variance of all ranks' micro-batches together.

    In evaluation it is ordinary batch normalisation. Names and values are those of
    `nn.BatchNorm2d`, so checkpoints fit both.
    """

    def __init__(self, like: _BatchNorm, world: World) -> None:
        super().__init__(
            like.num_features, like.eps, like.momentum, like.affine, like.track_running_stats
        )
        # The very same parameters and statistics, wherever they are, trained or frozen.
        self._parameters, self._buffers = like._parameters, like._buffers
        self.train(like.training)
        self.world = world

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`, (batch, channels, ...)."""
        if not self.training:
            return super().forward(x)
        axes = [axis for axis in range(x.ndim) if axis != 1]
        shape = [1, -1] + [1] * (x.ndim - 2)
        wide = x if x.dtype == torch.float64 else x.float()  # sums of bf16 lose what they count
        count = wide.new_tensor([x.numel() / x.shape[1]])
        sums = self.world.all_sum_with_grad(torch.cat([wide.sum(axes), count]))
        mean, num = sums[:-1] / sums[-1], sums[-1]
        centred = wide - mean.view(shape)
        variance = self.world.all_sum_with_grad(centred.square().sum(axes)) / num
        self._remember(mean.detach(), (variance * num / (num - 1)).detach())
        scale = torch.rsqrt(variance + self.eps)
        if not self.affine:
            return (centred * scale.view(shape)).to(x.dtype)
        return (centred * (scale * self.weight).view(shape) + self.bias.view(shape)).to(x.dtype)

    def _check_input_dim(self, input: Tensor) -> None:
        """Take any number of spatial axes."""

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


def synchronise_batch_norm(model: nn.Module, world: World) -> None:
    """Put a `SyncBatchNorm` in the place of every batch normalisation inside `model`."""
    for name, child in model.named_children():
        if isinstance(child, _BatchNorm):
            model.register_module(name, SyncBatchNorm(child, world))
        else:
            synchronise_batch_norm(child, world)


def has_batch_norm(model: nn.Module) -> bool:
    """Say whether `model` normalises over a batch while it is trained; a frozen layer does not."""
    return any(isinstance(m, _BatchNorm) and m.training for m in model.modules())


def synchronises_itself(model: nn.Module) -> bool:
    """Say whether `model` comes with torch's own synchronised batch normalisation."""
    return any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())
