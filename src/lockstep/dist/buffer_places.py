"""The places of a model's buffers, and whether what is there has changed.

Owns: finding them, and noticing that a buffer was written to or another was assigned. Does not
own: what follows from it (`training_buffers.py`, `run/kept_buffers.py`).
"""

from typing import NamedTuple

from torch import Tensor, nn

from lockstep.torch_compat.private import num_writes


class Mark(NamedTuple):
    """What was in a place at one time."""

    buffer: Tensor | None
    num_writes: int
    """How often the buffer had been written to; -1 if nobody counts."""

    def differs(self, other: "Mark") -> bool:
        """Return whether the buffer was written to, or another was assigned, between two marks."""
        return self.buffer is not other.buffer or self.num_writes != other.num_writes


class Place(NamedTuple):
    """The module and attribute of a buffer: a forward pass may assign a new tensor."""

    module: nn.Module
    attribute: str

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
