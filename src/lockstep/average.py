"""Moving averages of weights, any number of them.

Owns: the averaged copies, one fused update per step. Does not own: which
average is evaluated or saved under which name.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lockstep.checkpoint.state import check_weights
from lockstep.sharding import cut_like, held


class Averages:
    """Exponential moving averages of a model's trained weights, one per decay."""

    def __init__(self, model: nn.Module, decays: tuple[float, ...]) -> None:
        self._model = model
        self._names: list[str] = []
        self._sources: list[Tensor] = []
        self.copies: dict[float, list[Tensor]] = {decay: [] for decay in decays}
        self.follow()

    def follow(self, also: Collection[str] = ()) -> None:
        """Average every weight that is trained by now, and those named `also`, from here on.

        A weight that is frozen later stays: its average still moves towards it.
        """
        known = set(self._names)
        for name, parameter in self._model.named_parameters():
            if name not in known and (parameter.requires_grad or name in also):
                self._names.append(name)
                self._sources.append(parameter)
                for copies in self.copies.values():
                    copies.append(parameter.detach().clone())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move every average towards the weights after `step` steps: a += (1 - d) (w - a).

        d is the decay, or (1 + step) / (10 + step) while that is smaller: else the
        random first weights would stay in the average for 1 / (1 - decay) steps. All averages of
        a weight follow each other, so that it comes from memory once.
        """
        if not self.copies:
            return
        rates = [1 - min(decay, (1 + step) / (10 + step)) for decay in self.copies]
        copies = [copy for of_one in zip(*self.copies.values(), strict=True) for copy in of_one]
        sources = [source for source in self._sources for _ in rates]
        torch._foreach_lerp_(held(copies), held(sources), rates * len(self._sources))

    @contextmanager
    def applied(self, decay: float) -> Iterator[None]:
        """Put one average into the model inside the block, and the weights back after."""
        self._swap(decay)
        try:
            yield
        finally:
            self._swap(decay)

    @torch.no_grad()
    def _swap(self, decay: float) -> None:
        for source, copy in zip(self._sources, self.copies[decay], strict=True):
            held = source.detach().clone()
            source.copy_(copy)
            copy.copy_(held)

    def state(self, decay: float) -> dict[str, Tensor]:
        """Return one average under the model's parameter names."""
        return dict(zip(self._names, self.copies[decay], strict=True))

    @torch.no_grad()
    def load_state(
        self, decay: float, state: Mapping[str, Tensor], required: Collection[str] = ()
    ) -> None:
        """Take back what `state` returned.

        The average of a weight that was not trained at that time begins with the weight itself.

        Args:
            decay: Whose average it is.
            state: The average, by the model's parameter names.
            required: Names that it must hold.

        Raises:
            CheckpointError: it is not an average of these weights.
        """
        named = dict(self._model.named_parameters())
        found = state.keys() if isinstance(state, Mapping) else ()
        saved = [name for name in named if name in found]
        check_weights(state, {name: named[name] for name in named if name in {*saved, *required}})
        self.follow(also=saved)
        for name, source, copy in zip(self._names, self._sources, self.copies[decay], strict=True):
            copy.copy_(cut_like(state[name], copy) if name in state else source)
