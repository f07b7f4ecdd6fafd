"""Moving averages of weights, any number of them.

Owns: the averaged copies, and one fused update per step. Does not own: which average is
evaluated, or the name it is saved under.

An average of bf16 or fp16 weights is kept in float32: its updates are so small that 16 bits
would round them away.
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
        self.add_trained()

    def add_trained(self, others: Collection[str] = ()) -> None:
        """Start to average every weight that is now trained, and those named in `others`.

        A weight that is frozen later is still averaged.
        """
        known = set(self._names)
        for name, parameter in self._model.named_parameters():
            if name not in known and (parameter.requires_grad or name in others):
                self._names.append(name)
                self._sources.append(parameter)
                for copies in self.copies.values():
                    copies.append(parameter.detach().to(kept_in(parameter.dtype), copy=True))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move every average towards the weights after `step` steps: a += (1 - d) (w - a).

        d is the decay, or (1 + step) / (10 + step) while that is smaller: otherwise the random
        first weights would stay in the average for 1 / (1 - decay) steps. All averages of a
        weight are updated one after another, so that the weight is read from memory once.
        """
        if not self.copies:
            return
        rates = [1 - min(decay, (1 + step) / (10 + step)) for decay in self.copies]
        copies = [copy for group in zip(*self.copies.values(), strict=True) for copy in group]
        wide = [source.detach().to(kept_in(source.dtype)) for source in self._sources]
        sources = [source for source in wide for _ in rates]
        foreach("lerp_")(local_rows(copies), local_rows(sources), rates * len(self._sources))

    @contextmanager
    def applied(self, decay: float) -> Iterator[None]:
        """Put one average into the model inside the block, and restore the weights after it."""
        weights = self._swap_in(decay)
        try:
            yield
        finally:
            self._swap_out(decay, weights)

    @torch.no_grad()
    def _swap_in(self, decay: float) -> list[Tensor | None]:
        """Put an average into the model; return the weights whose average has another dtype.

        Other weights are exchanged with their average, which needs no more memory.
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
    def _swap_out(self, decay: float, weights: list[Tensor | None]) -> None:
        """Undo `_swap_in`."""
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
        """Restore what `state` returned.

        The average of a weight that was not trained then starts at the weight itself.

        Args:
            decay: The decay of the average.
            state: The average, by the model's parameter names.
            required: Names that `state` must contain.

        Raises:
            CheckpointError: `state` is not an average of these weights.
        """
        named = dict(self._model.named_parameters())
        found = state.keys() if isinstance(state, Mapping) else ()
        saved = [name for name in named if name in found]
        wanted = [name for name in named if name in {*saved, *required}]
        kinds = {name: getattr(state[name], "dtype", None) for name in saved}
        check_weights(state, {name: _expected(named[name], kinds.get(name)) for name in wanted})
        self.add_trained(saved)
        for name, source, copy in zip(self._names, self._sources, self.copies[decay], strict=True):
            copy.copy_(shard_like(state[name], copy) if name in state else source)


def kept_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an average of weights: 16 bits would round its small updates away.

    >>> kept_in(torch.bfloat16), kept_in(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _expected(parameter: Tensor, found: torch.dtype | None) -> Tensor:
    """Return a template of a saved average; earlier versions used the weight's dtype."""
    dtype = found if found == parameter.dtype else kept_in(parameter.dtype)
    return torch.empty(parameter.shape, dtype=dtype, device="meta")
