"""Synchronise buffers that training steps change, such as a running centre or a codebook.

Owns: detecting them, and giving every rank the first rank's after each later step. Does not own:
running statistics of normalisation layers: training does not read them, so they are synchronised
only before they are used (`ddp.sync_buffers`).
"""

import json

from torch import nn

from lockstep.dist.agreement import RUNNING_STATISTICS
from lockstep.dist.buffer_places import Mark, Place, buffer_places
from lockstep.dist.collectives import Collectives
from lockstep.dist.ddp import all_tensors_from_first
from lockstep.torch_compat.private import NORMS_WITH_STATISTICS, check_write_counter


class TrainingBuffers:
    """The buffers of a model that a training step has changed on any rank.

    There is nothing to do for a model whose only buffers are running statistics.
    """

    def __init__(self, model: nn.Module, world: Collectives) -> None:
        self._world = world
        places = buffer_places(model) if world.size > 1 else {}
        self._places = {name: p for name, p in places.items() if not _is_statistic(p)}
        if self._places:
            check_write_counter()
        self._before: dict[str, Mark] = {}
        self._changed: set[str] = set()
        """The buffers that steps have changed on this rank."""
        self._reported: dict[str, str] = {}
        """The changed buffers and their forms, as last sent to the other ranks."""
        self._synchronised: list[str] = []

    @property
    def has_news(self) -> bool:
        """Whether a buffer, or its form, has changed on this rank since the last `agree`."""
        return self._forms() != self._reported

    def begin_step(self) -> None:
        """Remember the buffers before the forward passes of a step."""
        self._before = {name: place.mark() for name, place in self._places.items()}

    def end_step(self) -> None:
        """Note which buffers the step has changed."""
        for name, before in self._before.items():
            if self._places[name].mark().differs(before):
                self._changed.add(name)
        self._before = {}

    def agree(self) -> None:
        """Synchronise from now on every buffer that has changed on any rank. Collective.

        A buffer whose shape differs between ranks is not synchronised, such as a cache for the
        longest sequence so far.
        """
        self._reported = self._forms()
        texts = self._world.all_texts(json.dumps(self._reported))
        changed = sorted({name for text in texts for name in json.loads(text)})
        own = json.dumps({name: self._form(name) for name in changed})
        forms = [json.loads(text) for text in self._world.all_texts(own)]
        self._synchronised = [
            name for name in changed if forms[0][name] and len({f[name] for f in forms}) == 1
        ]

    def synchronise(self) -> None:
        """Give every rank the first rank's copy of the agreed buffers. Collective."""
        buffers = [self._places[name].mark().buffer for name in self._synchronised]
        if buffers:
            all_tensors_from_first([b for b in buffers if b is not None], self._world)

    def _forms(self) -> dict[str, str]:
        return {name: self._form(name) for name in sorted(self._changed)}

    def _form(self, name: str) -> str:
        """Return the shape and type of a buffer; "" if this rank has no buffer of the name."""
        buffer = self._places[name].mark().buffer if name in self._places else None
        return "" if buffer is None else f"{buffer.dtype} {tuple(buffer.shape)}"


def _is_statistic(place: Place) -> bool:
    is_norm = isinstance(place.module, NORMS_WITH_STATISTICS)
    return is_norm and place.attribute in RUNNING_STATISTICS
