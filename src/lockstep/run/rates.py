"""The learning rate of each parameter group: its base rate times a factor.

Owns: the base rates, and refusing a rate that something else has set. Does not own: the factor
(`schedule.py`), or the optimizer.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lockstep.errors import ConfigError

Groups = Sequence[dict[str, Any]]
"""The parameter groups of an optimizer."""


class LearningRates:
    """The learning rates of an optimizer's parameter groups.

    For a group added during the run, the base rate is the rate it was added with.
    """

    def __init__(self, groups: Groups) -> None:
        self.base: list[float] = []
        """The rate that each group was built or added with."""
        self.factor: float | None = None
        """The last argument of `set`."""
        self._given: list[float] = []
        """The rate that `set` gave each group, or nothing if it has not set them yet."""
        self.note_new(groups)

    def note_new(self, groups: Groups) -> None:
        """Remember the rates of the groups that are new."""
        self.base += [group["lr"] for group in groups[len(self.base) :]]

    def note_restored(self) -> None:
        """Accept the rates that a checkpoint has restored."""
        self._given = []

    def set(self, groups: Groups, factor: float) -> None:
        """Give every group its base rate times `factor`.

        Raises:
            ConfigError: a group no longer has the rate that the last call gave it.
        """
        if len(groups) < len(self.base):
            raise ConfigError(
                f"the optimizer has {len(groups)} parameter groups, but had {len(self.base)} "
                "before",
                "keep the groups, and freeze parameters with requires_grad_(False)",
            )
        self._refuse_other(groups)
        self.note_new(groups)
        for group, base in zip(groups, self.base, strict=True):
            group["lr"] = base * factor
        self._given = [group["lr"] for group in groups]
        self.factor = factor

    def _refuse_other(self, groups: Groups) -> None:
        """Refuse a rate that a callback or a scheduler has set, since it would be overridden."""
        for number, (group, given) in enumerate(zip(groups, self._given, strict=False)):
            rate = group["lr"]
            if not isinstance(rate, Tensor) and rate != given:
                error = ConfigError(
                    f"the learning rate of parameter group {number} was set to {rate:g}, and the "
                    f"run's schedule, which had set {given:g}, would override it",
                    "set rate and schedule in the config, or write the loop with a Trainer and "
                    "without run.set_rate (docs/own_loop.md)",
                )
                error.is_before_update = True
                raise error
