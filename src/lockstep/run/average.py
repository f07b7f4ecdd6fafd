"""Moving averages of weights, any number of them.

Owns: the averaged copies, one fused update per step. Does not own: which
average is evaluated or saved under which name.

An average of bf16 or fp16 weights is kept in float32: a step of it is a small part of the
difference, and would be rounded away.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lockstep.checkpoint.state import check_weights
from lockstep.dist.fsdp import local_rows, shard_like
from lockstep.torch_compat.private import foreach


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
                    copies.append(parameter.detach().to(kept_in(parameter.dtype), copy=True))

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
        wide = [source.detach().to(kept_in(source.dtype)) for source in self._sources]
        sources = [source for source in wide for _ in rates]
        foreach("lerp_")(local_rows(copies), local_rows(sources), rates * len(self._sources))

    @contextmanager
    def applied(self, decay: float) -> Iterator[None]:
        """Put one average into the model inside the block, and the weights back after."""
        weights = self._put(decay)
        try:
            yield
        finally:
            self._take_back(decay, weights)

    @torch.no_grad()
    def _put(self, decay: float) -> list[Tensor | None]:
        """Put an average into the model; return the weights that its copies cannot hold.

        A copy of the weights' own type holds them meanwhile, so that no memory is needed.
        """
        weights: list[Tensor | None] = []
        for source, copy in zip(self._sources, self.copies[decay], strict=True):
            weight = source.detach().clone()
            source.copy_(copy)
            is_wider = copy.dtype != source.dtype
            weights.append(weight if is_wider else None)
            if not is_wider:
                copy.copy_(weight)
        return weights

    @torch.no_grad()
    def _take_back(self, decay: float, weights: list[Tensor | None]) -> None:
        """Undo `_put`."""
        for source, copy, weight in zip(self._sources, self.copies[decay], weights, strict=True):
            if weight is not None:
                source.copy_(weight)
                continue
            average = source.detach().clone()
            source.copy_(copy)
            copy.copy_(average)

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
        wanted = [name for name in named if name in {*saved, *required}]
        kinds = {name: getattr(state[name], "dtype", None) for name in saved}
        check_weights(state, {name: _expected(named[name], kinds.get(name)) for name in wanted})
        self.follow(also=saved)
        for name, source, copy in zip(self._names, self._sources, self.copies[decay], strict=True):
            copy.copy_(shard_like(state[name], copy) if name in state else source)


def kept_in(dtype: torch.dtype) -> torch.dtype:
    """Return what an average of weights is kept in: 16 bits would not hold its small steps.

    >>> kept_in(torch.bfloat16), kept_in(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _expected(parameter: Tensor, found: torch.dtype | None) -> Tensor:
    """Return what a saved average must look like; earlier versions kept it in the weight's type."""
    dtype = found if found == parameter.dtype else kept_in(parameter.dtype)
    return torch.empty(parameter.shape, dtype=dtype, device="meta")
