"""The places of a model's buffers, and whether what is there has changed.

Owns: finding them, and noticing that a buffer was written to, counted by autograd or not, or
another was assigned. Does not own: what follows from it (`ddp.py`, `training_buffers.py`,
`run/kept_buffers.py`, `exact/statistics.py`).
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.dist.agreement import RUNNING_STATISTICS
from lockstep.dist.same_state import checksums
from lockstep.torch_compat.private import NORMS_WITH_STATISTICS, num_writes


class Mark(NamedTuple):
    """What was in a place at one time."""

    buffer: Tensor | None
    num_writes: int
    """How often the buffer had been written to; -1 if nobody counts."""

    def differs(self, other: "Mark") -> bool:
        """Return whether the buffer was written to, or another was assigned, between two marks."""
        return self.buffer is not other.buffer or self.num_writes != other.num_writes

    @property
    def form(self) -> str:
        """The type and shape of the buffer; "" if there is none that can be copied to."""
        buffer = self.buffer
        if buffer is None or not can_be_copied(buffer):
            return ""
        return f"{buffer.dtype} {tuple(buffer.shape)}"


class Place(NamedTuple):
    """The module and attribute of a buffer: a forward pass may assign a new tensor."""

    module: nn.Module
    attribute: str

    @property
    def is_statistic(self) -> bool:
        """Whether the buffer is a running statistic of normalisation: its form never changes."""
        is_norm = isinstance(self.module, NORMS_WITH_STATISTICS)
        return is_norm and self.attribute in RUNNING_STATISTICS

    def mark(self) -> Mark:
        """Return what is there now."""
        buffer = getattr(self.module, self.attribute, None)
        return Mark(buffer, -1 if buffer is None else num_writes(buffer))

    def assign(self, buffer: Tensor | None) -> None:
        """Put a buffer there."""
        setattr(self.module, self.attribute, buffer)


def buffer_places(model: nn.Module) -> dict[str, Place]:
    """Return the place of each buffer by name."""
    return {
        f"{above}.{attribute}" if above else attribute: Place(module, attribute)
        for above, module in model.named_modules()
        for attribute, _ in module.named_buffers(recurse=False)
    }


class UncountedWrites:
    """Notices writes that autograd does not count, as through `.data`, by comparing contents.

    That waits for the device, so it is done in the first, second, fourth, eighth, ... step of this
    process. It finds every change since the comparison before, also one in a step between.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._seen: dict[str, tuple[Mark, int]] = {}

    @property
    def are_looked_for(self) -> bool:
        """Whether contents are compared in this step."""
        return not self._num_steps & (self._num_steps - 1)

    def begin_step(self, places: Mapping[str, Place]) -> None:
        """Count a step; remember the contents before the first."""
        if not self._num_steps:
            self.find(places)
        self._num_steps += 1

    def find(self, places: Mapping[str, Place]) -> list[str]:
        """Return the buffers with uncounted writes, if contents are compared in this step."""
        if not self.are_looked_for:
            return []
        before, self._seen = self._seen, _contents(places)
        return [
            name
            for name, (mark, contents) in self._seen.items()
            if name in before and not mark.differs(before[name][0]) and contents != before[name][1]
        ]


def _contents(places: Mapping[str, Place]) -> dict[str, tuple[Mark, int]]:
    """Return the marks and checksums of all buffers but statistics; waits for the device."""
    marks = {name: place.mark() for name, place in places.items() if not place.is_statistic}
    plain = Tensor.__torch_dispatch__  # a subclass may not show its bytes
    buffers = {
        name: mark.buffer
        for name, mark in marks.items()
        if mark.form and mark.buffer is not None
        if type(mark.buffer).__torch_dispatch__ is plain
    }
    return {name: (marks[name], number) for name, number in checksums(buffers).items()}


def can_be_copied(buffer: Tensor) -> bool:
    """Return whether a buffer is a plain tensor in memory that can be written to."""
    is_plain = buffer.layout == torch.strided and not buffer.is_quantized and not buffer.is_meta
    return is_plain and not _shares_elements(buffer)


def _shares_elements(tensor: Tensor) -> bool:
    """Return whether several indices share one element: such a tensor cannot be written to."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)
