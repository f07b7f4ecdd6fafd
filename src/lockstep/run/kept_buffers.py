"""The buffers of a model as they were before the current step, to undo a step that is dropped.

Owns: running statistics, and the other buffers that steps change. Does not own: deciding that a
step is dropped, or the parameters, which such a step leaves unchanged.
"""

from collections import defaultdict

import torch
from torch import Tensor

from lockstep.dist.buffer_places import BufferChanges, Mark, can_be_copied
from lockstep.dist.same_state import checksum


class KeptBuffers:
    """Copies of a model's buffers.

    A buffer is copied to the host once. After a step has changed it, it is copied before each
    step, as running statistics are from the first. Buffers of one kind are copied as one tensor.
    """

    def __init__(self, changes: BufferChanges) -> None:
        self._changes = changes
        self._marks: dict[str, Mark] = {}
        """The buffers before the current step."""
        self._copies: dict[str, Tensor] = {}
        """Their values, flattened; not of buffers that cannot be written to."""

    @torch.no_grad()
    def keep(self, non_finite: Tensor | None) -> None:
        """Copy the buffers after `begin_step` has marked them.

        Args:
            non_finite: The sticky flag on the GPU: where it is set, the copies stay as they are.
        """
        self._marks = self._changes.marks
        groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = defaultdict(dict)
        for name, mark in self._marks.items():
            buffer = mark.buffer
            if buffer is None or not can_be_copied(buffer):
                self._copies.pop(name, None)
                continue
            if name in self._changes.changing:
                groups[buffer.device, buffer.dtype][name] = buffer.flatten()
            elif name not in self._copies:
                self._copies[name] = buffer.flatten().to("cpu", copy=True)
        for (device, _), values in groups.items():
            together = torch.cat(list(values.values()))
            if non_finite is not None and device == non_finite.device:
                kept = torch.cat([self._kept(name, now) for name, now in values.items()])
                together = torch.where(non_finite > 0, kept, together)
            pieces = torch.split(together, [len(now) for now in values.values()])
            self._copies.update(zip(values, pieces, strict=True))

    @torch.inference_mode()  # may write to tensors that were made in it
    def restore(self) -> None:
        """Put the buffers back that were there before the step, with the values they had."""
        for name, mark in self._marks.items():
            place = self._changes.places[name]
            now = place.mark()
            if now.buffer is not mark.buffer:
                place.assign(mark.buffer)
            if mark.buffer is None or name not in self._copies:
                continue
            kept = self._copies[name].view_as(mark.buffer)
            is_written = name in self._changes.changing or now.differs(mark)
            if is_written or checksum(kept).item() != checksum(mark.buffer).item():
                mark.buffer.copy_(kept)

    def _kept(self, name: str, now: Tensor) -> Tensor:
        """Return the copy of a buffer, or its values now if it was another before."""
        copy = self._copies.get(name, now)
        return copy.to(now) if len(copy) == len(now) else now
