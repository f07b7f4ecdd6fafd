"""Batch normalisation over all ranks: N ranks with a batch of b equal one with N x b.

Owns: the statistics and their gradients. Does not own: the choice of models that use it. torch's
own version runs on GPUs only; this one also runs on the CPU.

With accumulation N ranks no longer equal one: the first micro-batches of all ranks are normalised
together, then the second ones, and so on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from lockstep.dist.collectives import Collectives
from lockstep.errors import ConfigError
from lockstep.plan import SplitChange
from lockstep.torch_compat.private import BATCH_NORMS, check_batch_norm_input


class SyncBatchNorm(nn.Module):
    """Normalise by the mean and variance of all ranks' micro-batches together.

    In evaluation it is ordinary batch normalisation. `synchronise_batch_norm` gives a layer a
    class derived from this one and from the layer's class, so that
    `isinstance(layer, nn.BatchNorm2d)` stays true.
    """

    counts = True
    """Whether this rank's micro-batch adds to the statistics; padding does not."""
    world: Collectives
    # Attributes of the layer.
    eps: float
    momentum: float | None
    affine: bool
    weight: Any
    bias: Any
    running_mean: Any
    running_var: Any
    num_batches_tracked: Any

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`, (batch, channels, ...)."""
        if not self.training:
            return super().forward(x)  # type: ignore[no-any-return]
        check_batch_norm_input(self, x)
        axes = [axis for axis in range(x.ndim) if axis != 1]
        shape = [1, -1] + [1] * (x.ndim - 2)
        wide = x if x.dtype == torch.float64 else x.float()  # bf16 cannot hold the count
        count = x.numel() // x.shape[1]
        sums = self._all_sum(torch.cat([wide.sum(axes), wide.new_tensor([count])]))
        mean, num = sums[:-1] / sums[-1], sums[-1]
        if count == 1 and num == 1:  # padding is as large as a micro-batch: all ranks raise this
            raise ConfigError(
                f"batch normalisation has 1 value for each of {x.shape[1]} channels on all ranks "
                "together, and a variance needs 2",
                "set batch.drop_last=true, or change batch.batch_size",
            )
        centred = wide - mean.view(shape)
        variance = self._all_sum(centred.square().sum(axes)) / num
        self._update_statistics(mean.detach(), (variance * num / (num - 1)).detach())
        scale = torch.rsqrt(variance + self.eps)
        if not self.affine:
            return (centred * scale.view(shape)).to(x.dtype)
        normalised: Tensor = centred * (scale * self.weight).view(shape) + self.bias.view(shape)
        return normalised.to(x.dtype)

    def _all_sum(self, local: Tensor) -> Tensor:
        """Return the sum over the ranks whose micro-batches count, carrying gradients. Collective.

        Padding adds zeros that depend on its input, so that all ranks join the backward sum.
        """
        if not self.counts:
            local = local.masked_fill(torch.ones_like(local, dtype=torch.bool), 0.0)
        return self.world.all_sum_with_grad(local)

    def _update_statistics(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked += 1
        momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over all ranks."""


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over all ranks."""


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over all ranks."""


@cache
def synchronised(kind: Any) -> type[SyncBatchNorm] | None:
    """Return `kind` over all ranks, or None if it overrides the computation."""
    for own in (SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d):
        if kind in own.__bases__:
            return own
    # A lazy layer changes its class when its parameters are created.
    if kind.forward is not nn.BatchNorm1d.forward or issubclass(kind, LazyModuleMixin):
        return None
    return type(f"Sync{kind.__name__}", (SyncBatchNorm, kind), {})


def synchronise_batch_norm(model: nn.Module, world: Collectives) -> None:
    """Make every batch normalisation of `model` use the micro-batches of all ranks.

    A layer stays the same object and only changes its class. So it keeps its hooks, and is
    synchronised wherever the model refers to it. torch's own `nn.SyncBatchNorm` is not changed.

    Raises:
        ConfigError: naming a layer that overrides the computation.
    """
    layers: list[tuple[str, Any]] = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, BATCH_NORMS)
        and not isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm)
    ]
    for name, layer in layers:
        kind: Any = type(layer)
        if synchronised(kind) is None or "forward" in vars(layer):
            raise ConfigError(
                f"sync_batch_norm cannot synchronise {name or 'the model'}, a "
                f"{kind.__name__}: that layer overrides the computation of batch normalisation",
                "use nn.BatchNorm1d, nn.BatchNorm2d or nn.BatchNorm3d there, or set "
                "sync_batch_norm=false",
            )
    for _, layer in layers:
        kind = type(layer)
        layer.__class__ = synchronised(kind)
        layer.world = world


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether a layer of `model` normalises over batches, that is, is in training mode."""
    return any(isinstance(m, BATCH_NORMS) and m.training for m in model.modules())


def synchronises_itself(model: nn.Module) -> bool:
    """Return whether `model` contains torch's own synchronised batch normalisation."""
    return any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())


@contextmanager
def padding(model: nn.Module) -> Iterator[None]:
    """Exclude the padding micro-batch in the block from the statistics of every SyncBatchNorm."""
    layers = [m for m in model.modules() if isinstance(m, SyncBatchNorm)]
    for layer in layers:
        layer.counts = False
    try:
        yield
    finally:
        for layer in layers:
            layer.counts = True


def refuse_padding(model: nn.Module, num_leaves: int, world_size: int) -> None:
    """Refuse a step in which torch's own `nn.SyncBatchNorm` would count padding.

    Raises:
        ConfigError: with the micro-batches of the step and the ranks.
    """
    is_padded = num_leaves % world_size > 0
    if is_padded and any(isinstance(m, nn.SyncBatchNorm) and m.training for m in model.modules()):
        num_padding = -num_leaves % world_size
        raise ConfigError(
            f"a step has {num_leaves} micro-batches for {world_size} ranks: nn.SyncBatchNorm would "
            f"count {num_padding} padding micro-batches in its statistics",
            "use nn.BatchNorm layers with sync_batch_norm=true, or make every step fill all ranks: "
            f"set batch.drop_last=true and use a multiple of {world_size} micro-batches",
        )


def refuse_changed_split(model: nn.Module, change: SplitChange) -> None:
    """Refuse micro-batches of a different size if the model normalises over each of them.

    Raises:
        ConfigError: with the samples that statistics saw and would see.
    """
    if has_batch_norm(model):
        was, now = change.was, change.now
        is_synchronised = any(
            isinstance(m, SyncBatchNorm | nn.SyncBatchNorm) for m in model.modules()
        )
        seen = (was.leaf_size, now.leaf_size)
        if is_synchronised:
            seen = (was.samples_at_once, now.samples_at_once)
        change.raise_for_batch_norm(*seen, also=" to Loader")
