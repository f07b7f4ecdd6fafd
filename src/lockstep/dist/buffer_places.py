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


class BufferChanges:
    """Notices which buffers of a model change in its steps, and between them.

    Writes that autograd does not count, as through `.data`, are found by comparing contents. That
    waits for the device, so it is done in the first, second, fourth, eighth, ... step of this
    process. It finds every change since the comparison before, also one in a step between.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.places = buffer_places(model)
        self.marks: dict[str, Mark] = {}
        """The buffers before the current step."""
        self.changing: set[str] = set()
        """The buffers that have changed in a step or between two, and those that may have: running
        statistics, and buffers whose writes nobody counts."""
        self.changed_in_steps: set[str] = set()
        """The buffers that steps have changed, without running statistics."""
        self._num_steps = 0
        self._contents: dict[str, tuple[Mark, int]] = {}

    def begin_step(self) -> None:
        """Mark the buffers before a step."""
        if self._compares_contents:  # finding the places takes as long as a small layer
            self.places = buffer_places(self._model)
            places = self.places.items()
            self.changing |= {name for name, p in places if p.attribute in RUNNING_STATISTICS}
        if not self._num_steps:
            self._contents = _contents(self.places)
        self._num_steps += 1
        self.mark()

    def mark(self) -> None:
        """Mark the buffers again, so that changes until now are not the step's."""
        before = self.marks
        self.marks = {name: place.mark() for name, place in self.places.items()}
        for name, mark in self.marks.items():
            if mark.num_writes < 0 or mark.differs(before.get(name, mark)):
                self.changing.add(name)

    def end_step(self) -> None:
        """Note which buffers the step has changed."""
        for name, before in self.marks.items():
            place = self.places[name]
            if not place.is_statistic and place.mark().differs(before):
                self.changed_in_steps.add(name)
        self.changed_in_steps.update(self.uncounted_writes())
        self.changing |= self.changed_in_steps

    def uncounted_writes(self) -> list[str]:
        """Return the buffers with uncounted writes, if contents are compared in this step."""
        if not self._compares_contents:
            return []
        before, self._contents = self._contents, _contents(self.places)
        return [
            name
            for name, (mark, contents) in self._contents.items()
            if name in before and not mark.differs(before[name][0]) and contents != before[name][1]
        ]

    @property
    def _compares_contents(self) -> bool:
        return not self._num_steps & (self._num_steps - 1)


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
