"""Synchronise buffers that training steps change, such as a running centre or a codebook.

Owns: detecting them, and giving every rank the first rank's after each later step. Does not own:
running statistics of normalisation layers: training does not read them, so they are synchronised
only before they are used (`ddp.sync_buffers`).
"""

from torch import nn

from lockstep.dist.buffer_places import Mark, UncountedWrites, buffer_places
from lockstep.dist.collectives import Collectives
from lockstep.dist.ddp import all_of_one_form, all_tensors_from_first
from lockstep.torch_compat.private import check_write_counter


class TrainingBuffers:
    """The buffers of a model that a training step has changed on any rank.

    There is nothing to do for a model whose only buffers are running statistics.
    """

    def __init__(self, model: nn.Module, world: Collectives) -> None:
        self._world = world
        places = buffer_places(model) if world.size > 1 else {}
        self._places = {name: p for name, p in places.items() if not p.is_statistic}
        if self._places:
            check_write_counter()
        self._before: dict[str, Mark] = {}
        self._uncounted = UncountedWrites()
        self._changed: set[str] = set()
        """The buffers that steps have changed: on this rank, or as another rank has reported."""
        self._reported: dict[str, str] = {}
        """The changed buffers and their forms, as last compared with the other ranks."""
        self._synchronised: list[str] = []

    @property
    def has_news(self) -> bool:
        """Whether a buffer, or its form, has changed on this rank since the last `agree`."""
        return self._forms() != self._reported

    def begin_step(self) -> None:
        """Remember the buffers before the forward passes of a step."""
        self._uncounted.begin_step(self._places)
        self._before = {name: place.mark() for name, place in self._places.items()}

    def end_step(self) -> None:
        """Note which buffers the step has changed."""
        for name, before in self._before.items():
            if self._places[name].mark().differs(before):
                self._changed.add(name)
        self._changed.update(self._uncounted.find(self._places))
        self._before = {}

    def agree(self) -> None:
        """Synchronise from now on every buffer that has changed on any rank. Collective.

        A buffer whose shape differs between ranks is not synchronised, such as a cache for the
        longest sequence so far.
        """
        for names in self._world.all_values(sorted(self._changed)):
            self._changed.update(names)
        self._reported = self._forms()
        self._synchronised = [*all_of_one_form(self._marks(), self._world)]

    def synchronise(self) -> None:
        """Give every rank the first rank's copy of the agreed buffers. Collective."""
        buffers = [self._places[name].mark().buffer for name in self._synchronised]
        if buffers:
            all_tensors_from_first([b for b in buffers if b is not None], self._world)

    def _forms(self) -> dict[str, str]:
        return {name: mark.form for name, mark in self._marks().items()}

    def _marks(self) -> dict[str, Mark]:
        """Return what is in the places of the changed buffers; nothing where there is no place."""
        places = ((name, self._places.get(name)) for name in sorted(self._changed))
        return {name: place.mark() if place else Mark(None, -1) for name, place in places}
