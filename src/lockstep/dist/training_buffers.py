"""Synchronise buffers that training steps change, such as a running centre or a codebook.

Owns: giving every rank the first rank's after each later step. Does not own: detecting them, or
running statistics of normalisation layers: training does not read them, so they are synchronised
only before they are used (`ddp.sync_buffers`).
"""

from lockstep.dist.buffer_places import BufferChanges, Mark
from lockstep.dist.collectives import Collectives
from lockstep.dist.ddp import all_of_one_form, all_tensors_from_first
from lockstep.torch_compat.private import check_write_counter


class TrainingBuffers:
    """The buffers of a model that a training step has changed on any rank.

    There is nothing to do on one rank, or for a model whose only buffers are running statistics.
    """

    def __init__(self, changes: BufferChanges, world: Collectives) -> None:
        self._changes = changes
        self._world = world
        if world.size > 1 and not all(p.is_statistic for p in changes.places.values()):
            check_write_counter()
        self._changed: set[str] = set()
        """The buffers that steps have changed on any rank, as last agreed."""
        self._reported: dict[str, str] = {}
        """The changed buffers and their forms, as last compared with the other ranks."""
        self._synchronised: list[str] = []

    @property
    def has_news(self) -> bool:
        """Whether a buffer, or its form, has changed on this rank since the last `agree`."""
        return self._world.size > 1 and self._forms() != self._reported

    def agree(self) -> None:
        """Synchronise from now on every buffer that has changed on any rank. Collective.

        A buffer whose shape differs between ranks is not synchronised, such as a cache for the
        longest sequence so far.
        """
        for names in self._world.all_values(sorted(self._changes.changed_in_steps)):
            self._changed.update(names)
        self._reported = self._forms()
        self._synchronised = [*all_of_one_form(self._marks(), self._world)]

    def synchronise(self) -> None:
        """Give every rank the first rank's copy of the agreed buffers. Collective."""
        buffers = [self._changes.places[name].mark().buffer for name in self._synchronised]
        if buffers:
            all_tensors_from_first([b for b in buffers if b is not None], self._world)

    def _forms(self) -> dict[str, str]:
        return {name: mark.form for name, mark in self._marks().items()}

    def _marks(self) -> dict[str, Mark]:
        """Return what is in the places of the changed buffers; nothing where there is no place."""
        names = sorted(self._changed | self._changes.changed_in_steps)
        places = ((name, self._changes.places.get(name)) for name in names)
        return {name: place.mark() if place else Mark(None, -1) for name, place in places}
