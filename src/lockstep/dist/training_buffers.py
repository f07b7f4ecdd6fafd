"""Buffers that training steps change: a running centre, a codebook, and the like.

Owns: noticing them, and giving every rank the first rank's after each step from then on. Does not
own: running statistics of normalisation layers, which training does not read; they are
synchronised where they are used (`ddp.sync_buffers`).
"""

import json

from torch import Tensor, nn

from lockstep.dist.agreement import RUNNING_STATISTICS
from lockstep.dist.collectives import Collectives
from lockstep.dist.ddp import all_tensors_from_first
from lockstep.torch_compat.private import (
    NORMS_WITH_STATISTICS,
    check_write_counter,
    num_writes,
)


class TrainingBuffers:
    """The buffers of a model that a training step has changed on any rank.

    A model without other buffers than running statistics has nothing to look at.
    """

    def __init__(self, model: nn.Module, world: Collectives) -> None:
        self._world = world
        self._places: dict[str, tuple[nn.Module, str]] = {}
        """Where each buffer is, by its name: a forward pass may assign another tensor."""
        for above, module in model.named_modules() if world.size > 1 else ():
            for name, _ in module.named_buffers(recurse=False):
                is_norm = isinstance(module, NORMS_WITH_STATISTICS)
                if not (is_norm and name in RUNNING_STATISTICS):
                    self._places[f"{above}.{name}" if above else name] = module, name
        if self._places:
            check_write_counter()
        self._before: dict[str, tuple[Tensor | None, int]] = {}
        self._changed: set[str] = set()
        """What steps have changed on this rank."""
        self._told: dict[str, str] = {}
        """The changed buffers with their forms, as this rank last told the others."""
        self._synchronised: list[str] = []

    @property
    def has_news(self) -> bool:
        """Whether a step changed a buffer on this rank, or its form, that others do not know of."""
        return self._forms() != self._told

    def begin_step(self) -> None:
        """Remember the buffers before the forward passes of a step."""
        self._before = {name: self._state(name) for name in self._places}

    def end_step(self) -> None:
        """Note which buffers the step has changed."""
        for name, (buffer, version) in self._before.items():
            now, version_now = self._state(name)
            if now is not buffer or version_now != version:
                self._changed.add(name)
        self._before = {}

    def agree(self) -> None:
        """Synchronise from here on what has changed on any rank. Collective.

        A buffer whose shape differs between ranks, such as a cache as long as the longest sequence
        so far, is each rank's own.
        """
        self._told = self._forms()
        told = [json.loads(text) for text in self._world.all_texts(json.dumps(self._told))]
        changed = sorted({name for forms in told for name in forms})
        own = json.dumps({name: self._form(name) for name in changed})
        forms = [json.loads(text) for text in self._world.all_texts(own)]
        self._synchronised = [
            name for name in changed if forms[0][name] and len({f[name] for f in forms}) == 1
        ]

    def synchronise(self) -> None:
        """Give every rank the first rank's buffers, of those agreed on. Collective."""
        buffers = [self._state(name)[0] for name in self._synchronised]
        if buffers:
            all_tensors_from_first([b for b in buffers if b is not None], self._world)

    def _forms(self) -> dict[str, str]:
        return {name: self._form(name) for name in sorted(self._changed)}

    def _form(self, name: str) -> str:
        """Return the shape and type of a buffer; empty if this rank has none of the name."""
        buffer = self._state(name)[0] if name in self._places else None
        return "" if buffer is None else f"{buffer.dtype} {tuple(buffer.shape)}"

    def _state(self, name: str) -> tuple[Tensor | None, int]:
        """Return a buffer and how often it was written to."""
        module, own_name = self._places[name]
        buffer = getattr(module, own_name, None)
        return buffer, -1 if buffer is None else num_writes(buffer)
