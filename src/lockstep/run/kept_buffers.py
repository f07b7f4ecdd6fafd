"""The buffers of a model as they were before the current step, to undo a step that is dropped.

Owns: running statistics, and the other buffers that steps change. Does not own: deciding that a
step is dropped, or the parameters, which such a step leaves unchanged.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

from lockstep.dist.agreement import RUNNING_STATISTICS
from lockstep.dist.ddp import shares_elements
from lockstep.torch_compat.private import num_writes

Kind = tuple[torch.device, torch.dtype]


class KeptBuffers:
    """Copies of a model's buffers.

    All are copied before the first step; after it, only running statistics and the buffers that
    the first step changed. Buffers of one kind are copied as one tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names: list[str] | None = None
        """The buffers to copy; None before the first step."""
        self._seen: dict[str, tuple[int, int]] = {}
        """Identity and number of writes of each buffer before the first step."""
        self._groups: dict[Kind, list[str]] = {}
        self._copies: dict[Kind, Tensor] = {}
        self._sizes: dict[str, int] = {}

    @torch.no_grad()
    def keep(self, non_finite: Tensor | None) -> None:
        """Copy the buffers before a step.

        Args:
            non_finite: The sticky flag on the GPU: where it is set, the copies stay as they are.
        """
        buffers = {name: b for name, b in self._model.named_buffers() if can_be_copied(b)}
        if not self._seen:
            self._seen = {name: (id(b), num_writes(b)) for name, b in buffers.items()}
        elif self._names is None:
            self._names = [name for name, b in buffers.items() if self._has_changed(name, b)]
        names = buffers if self._names is None else [n for n in self._names if n in buffers]
        groups: dict[Kind, list[str]] = defaultdict(list)
        for name in names:
            groups[buffers[name].device, buffers[name].dtype].append(name)
        copies = {
            kind: torch.cat([buffers[name].flatten() for name in group])
            for kind, group in groups.items()
        }
        if non_finite is not None:
            for kind, copy in copies.items():
                before = self._copies_of(kind, groups[kind])
                if kind[0] == non_finite.device and before is not None:
                    copies[kind] = torch.where(non_finite > 0, before, copy)
        self._groups = groups
        self._copies = copies
        self._sizes = {name: buffers[name].numel() for name in names}

    @torch.no_grad()
    def restore(self) -> None:
        """Give the buffers the values that they had before the step."""
        buffers = dict(self._model.named_buffers())
        for kind in self._groups:
            for name, values in self._pieces(kind).items():
                buffer = buffers.get(name)
                if buffer is not None and buffer.numel() == len(values):  # else it was replaced
                    buffer.copy_(values.view_as(buffer))

    def _copies_of(self, kind: Kind, names: list[str]) -> Tensor | None:
        """Return the copies of these buffers as one tensor, if there are such."""
        known = self._groups.get(kind)
        if known == names:
            return self._copies[kind]
        pieces = self._pieces(kind)
        if not pieces.keys() >= set(names):
            return None
        return torch.cat([pieces[name] for name in names])

    def _pieces(self, kind: Kind) -> dict[str, Tensor]:
        names = self._groups.get(kind)
        if not names:
            return {}
        pieces = torch.split(self._copies[kind], [self._sizes[name] for name in names])
        return dict(zip(names, pieces, strict=True))

    def _has_changed(self, name: str, buffer: Tensor) -> bool:
        is_statistic = name.rpartition(".")[2] in RUNNING_STATISTICS
        return is_statistic or self._seen.get(name) != (id(buffer), num_writes(buffer))


def can_be_copied(buffer: Tensor) -> bool:
    """Return whether a buffer is a plain tensor in memory that can be written to."""
    is_plain = buffer.layout == torch.strided and not buffer.is_quantized and not buffer.is_meta
    return is_plain and not shares_elements(buffer)
