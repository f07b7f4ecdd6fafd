"""Running statistics of batch normalisation in exact mode.

Owns: moving them micro-batch by micro-batch, in one order for every number of ranks. Does not
own: normalising.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.order import share
from lockstep.dist.collectives import Collectives
from lockstep.errors import ConfigError
from lockstep.torch_compat.private import BATCH_NORMS, check_write_counter, num_writes


class Statistics:
    """Running statistics, moved leaf by leaf in the order of leaves, whoever computed them.

    Every leaf starts from zero statistics, so that what it leaves is its own share; the
    shares of all ranks are then applied one after the other.
    """

    def __init__(self, model: nn.Module) -> None:
        layers: list[Any] = [m for m in model.modules() if isinstance(m, BATCH_NORMS)]
        self._layers = [layer for layer in layers if layer.running_mean is not None]
        pairs = [(m.running_mean, m.running_var) for m in self._layers]
        self._values = [b for pair in pairs for b in pair if b is not None]
        self._counts = [b for m in self._layers if (b := m.num_batches_tracked) is not None]
        known = {id(b) for b in (*self._values, *self._counts)}
        self._others = [(n, b) for n, b in model.named_buffers() if id(b) not in known]
        if self._others:
            check_write_counter()
        self._versions: list[int] = []
        self._before: Tensor | None = None
        self._shares: list[Tensor] = []

    def restore(self) -> None:
        """Go back to where a step started that has failed."""
        if self._before is not None:
            self._write(self._before)
            self._before = None

    def begin(self) -> None:
        """Remember where the step starts; go back there from one that failed."""
        self.restore()
        self._before = self._read()
        self._shares = []
        self._versions = [num_writes(buffer) for _, buffer in self._others]

    def before(self, place: int) -> None:
        """Start a leaf with nothing remembered but how many leaves came before it."""
        assert self._before is not None
        self._write(self._before)
        for layer in self._layers:
            if layer.training:
                layer.running_mean.zero_()
                layer.running_var.zero_()
                layer.num_batches_tracked.add_(place)

    def after(self) -> None:
        """Take the leaf's share."""
        seen = zip(self._others, self._versions, strict=True)
        changed = [name for (name, buffer), version in seen if num_writes(buffer) != version]
        if changed:
            raise ConfigError(
                f"the forward pass changes {', '.join(changed)}, which exact mode cannot merge",
                "keep these buffers unchanged in the forward pass, or set exact=false",
            )
        self._shares.append(self._read())

    def finish(self, num_leaves: int, world: Collectives) -> None:
        """Apply the shares of all leaves. Collective."""
        before, self._before = self._before, None
        if not self._layers or before is None:
            return
        lengths = [len(share(num_leaves, rank, world.size)) for rank in range(world.size)]
        local = torch.stack(self._shares) if self._shares else before[None][:0]
        rows = torch.cat(world.all_parts(local, lengths))
        num_counts = len(self._counts)
        values, counts = before[:-num_counts], before[-num_counts:]
        widths = torch.tensor([2 * m.num_features for m in self._layers], device=before.device)
        kept = before.new_tensor([1 - (m.momentum or 0.0) for m in self._layers])
        averaged = before.new_tensor([m.momentum is None for m in self._layers]).bool()
        trained = before.new_tensor([m.training for m in self._layers]).bool()
        num_calls = torch.zeros_like(counts)
        for place, row in enumerate(rows):
            came = counts + place
            calls = torch.where(trained, row[-num_counts:] - came, 0.0)
            # With no momentum the statistics are plain means over all batches so far.
            decay = torch.where(averaged & (calls > 0), came / (came + calls), kept**calls)
            decay = decay.repeat_interleave(widths)
            own = row[:-num_counts] * trained.repeat_interleave(widths)
            values = values * decay + own
            num_calls += calls
        self._write(torch.cat([values, counts + num_calls]))

    def _read(self) -> Tensor:
        buffers = [*self._values, *self._counts]
        return torch.cat([b.double().flatten() for b in buffers]) if buffers else torch.empty(0)

    @torch.no_grad()
    def _write(self, state: Tensor) -> None:
        buffers = [*self._values, *self._counts]
        values = torch.split(state, [b.numel() for b in buffers])
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value.view_as(buffer))
