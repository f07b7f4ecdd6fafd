"""Running statistics of batch normalisation in exact mode.

Owns: updating them micro-batch by micro-batch, in one order on any number of ranks. Does not own:
normalising.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.order import share
from lockstep.dist.buffer_places import BufferChanges, Mark
from lockstep.dist.collectives import Collectives
from lockstep.dist.same_state import checksum
from lockstep.errors import ConfigError
from lockstep.torch_compat.private import BATCH_NORMS, check_write_counter


class Statistics:
    """Running statistics, updated leaf by leaf in the order of leaves, on whatever rank they are.

    Every leaf starts from zero statistics and so computes only its own update. The updates of all
    ranks are then applied one after another.
    """

    def __init__(self, model: nn.Module) -> None:
        layers: list[Any] = [m for m in model.modules() if isinstance(m, BATCH_NORMS)]
        self._layers = [layer for layer in layers if layer.running_mean is not None]
        self._values = [b for m in self._layers for b in (m.running_mean, m.running_var)]
        self._counts = [m.num_batches_tracked for m in self._layers]
        known = {id(b) for b in (*self._values, *self._counts)}
        self._changes = BufferChanges(model)
        places = self._changes.places.items()
        self._others = {name for name, p in places if id(p.mark().buffer) not in known}
        if self._others:
            check_write_counter()
        self._before: Tensor | None = None
        self._updates: list[Tensor] = []

    def restore(self) -> None:
        """Restore the statistics from before a failed step."""
        if self._before is not None:
            self._write(self._before)
            self._before = None

    def begin(self) -> None:
        """Copy the statistics before a step; first restore those from before a failed one."""
        self.restore()
        self._before = self._read()
        self._updates = []
        self._changes.begin_step()

    def before(self, place: int) -> None:
        """Start a leaf with zero statistics and the number of leaves before it."""
        assert self._before is not None
        self._write(self._before)
        for layer in self._layers:
            if layer.training:
                layer.running_mean.zero_()
                layer.running_var.zero_()
                layer.num_batches_tracked.add_(place)

    def after(self) -> None:
        """Keep the leaf's update."""
        before = self._changes.marks
        others = {n: p for n, p in self._changes.places.items() if n in self._others}
        changed = [n for n, p in others.items() if _has_changed(before[n], p.mark())]
        if changed := changed + self._changes.uncounted_writes():
            raise ConfigError(
                f"the forward pass changes {', '.join(changed)}, which exact mode cannot merge",
                "keep these buffers unchanged in the forward pass, or set exact=false",
            )
        self._updates.append(self._read())

    def finish(self, num_leaves: int, world: Collectives) -> None:
        """Apply the updates of all leaves. Collective."""
        before = self._before
        self._before = None
        if not self._layers or before is None:
            return
        lengths = [len(share(num_leaves, rank, world.size)) for rank in range(world.size)]
        local = torch.stack(self._updates) if self._updates else before[None][:0]
        rows = torch.cat(world.all_parts(local, lengths))
        num_counts = len(self._counts)
        values, counts = before[:-num_counts], before[-num_counts:]
        widths = torch.tensor([2 * m.num_features for m in self._layers], device=before.device)
        kept = before.new_tensor([1 - (m.momentum or 0.0) for m in self._layers])
        averaged = before.new_tensor([m.momentum is None for m in self._layers]).bool()
        trained = before.new_tensor([m.training for m in self._layers]).bool()
        num_calls = torch.zeros_like(counts)
        for place, row in enumerate(rows):
            num_before = counts + place
            calls = torch.where(trained, row[-num_counts:] - num_before, 0.0)
            # Without momentum the statistics are plain means over all batches so far.
            mean_decay = num_before / (num_before + calls)
            decay = torch.where(averaged & (calls > 0), mean_decay, kept**calls)
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


def _has_changed(before: Mark, now: Mark) -> bool:
    """Return whether a buffer was written to, or one of other values assigned in its place.

    A cache may be assigned again with the same values, or longer than before.
    """
    if now.buffer is before.buffer or now.buffer is None or before.buffer is None:
        return now.num_writes != before.num_writes
    same_form = now.form == before.form
    return same_form and checksum(now.buffer).item() != checksum(before.buffer).item()
