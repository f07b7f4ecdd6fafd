"""Fail together: what goes wrong on one rank is raised on all, in its words.

Owns: how an error travels between ranks, and seeing that they agree. Does not own: what may go
wrong.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import numpy as np
from torch import Tensor

from lockstep import errors
from lockstep.data.contents import contents_of, same_contents
from lockstep.errors import ConfigError, LockstepError
from lockstep.runtime import World
from lockstep.signals import StopRequested

T = TypeVar("T")

SAME_STATE = (
    "make it the same on every rank: sum it over ranks (context.world.all_sum) or key it by "
    "sample, or leave it out of Task.state()"
)
RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Of batch normalization: every rank has its own, and checkpoints keep the first rank's."""


def together(world: World, action: Callable[[], T]) -> T:
    """Do `action` on every rank; if it fails on one, fail on all in its words. Collective."""
    problem = None
    try:
        result = action()
    except LockstepError as error:
        if error.is_shared:  # the other ranks raise it too: they do not vote here
            raise
        problem = error
    agree_to_continue(world, problem)
    return result


def agree_to_continue(world: World, problem: LockstepError | None = None, stop: int = 0) -> None:
    """Raise on every rank what one of them met: an error, or a request to stop. Collective.

    `together` ends with this vote, so an action may hold further votes of this kind: a rank whose
    action fails meets the next vote of the others, and all of them leave with its error.

    Args:
        problem: This rank's error.
        stop: The exit code of this rank's stop signal, or 0.

    Raises:
        LockstepError: a rank had a problem.
        StopRequested: none had, and a rank was asked to stop.
    """
    stop, failed = world.all_max(stop, int(problem is not None))
    if failed:
        raise_together(world, problem)
    if stop:
        raise StopRequested(stop)


def raise_together(world: World, problem: LockstepError | None) -> NoReturn:
    """Raise the first rank's error that has one, on every rank. Collective."""
    # Of an error that a task derived from ours, the name that every rank knows.
    kinds = [kind.__name__ for kind in type(problem).__mro__ if hasattr(errors, kind.__name__)]
    said = [kinds[0], problem.problem, problem.remedy] if problem else []
    stories = [json.loads(text) for text in world.all_texts(json.dumps(said))]
    rank, (kind, text, remedy) = next((r, story) for r, story in enumerate(stories) if story)
    where = "" if all(stories) else f"rank {rank}: "
    error: LockstepError = getattr(errors, kind)(where + text, remedy)
    error.is_shared = True
    raise error


def check_alike(what: str, local: str, world: World) -> None:
    """Refuse a run whose ranks do not agree on something they must share. Collective."""
    said = world.all_texts(local)
    if len(set(said)) > 1:
        rank = next(rank for rank, text in enumerate(said) if text != said[0])
        short = " against ".join(_around_difference(said[0], said[rank]))
        raise ConfigError(
            f"ranks 0 and {rank} see different {what}: {short}",
            "the same flags everywhere, and folders that all nodes share",
        )


def _around_difference(a: str, b: str) -> tuple[str, str]:
    """Return both texts, cut to where they part."""
    start = max(0, next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0) - 30)
    return a[start : start + 60], b[start : start + 60]


def state_difference(state: Mapping[str, Any], world: World) -> str:
    """Say where a task's state differs between ranks; nothing if it is the same. Collective.

    A checkpoint keeps the first rank's state only. Floats may differ by rounding.
    """
    if world.size == 1:
        return ""
    own = {name: [contents_of(value), _shown(value)] for name, value in _values(state)}
    text = json.dumps(own)
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    label = int.from_bytes(digest, "little")
    highest, lowest = world.all_max(label, -label)
    if highest == -lowest:
        return ""
    first = json.loads(world.all_texts(text if world.is_first else "{}")[0])
    own_difference = _first_difference(first, own, world.rank)
    differences = [json.loads(said) for said in world.all_texts(json.dumps(own_difference))]
    return next((said for said in differences if said), "")


def _values(state: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a state holds by dotted name: each tensor, and each value at the top."""
    for key, value in state.items():
        name = f"{above}{key}"
        is_branch = isinstance(value, Mapping) and any(
            isinstance(part, Tensor | np.ndarray | Mapping) for part in value.values()
        )
        if is_branch:
            yield from _values(value, f"{name}.")
        elif name.rpartition(".")[2] not in RUNNING_STATISTICS:
            yield name, value


def _shown(value: Any) -> str:
    """Return a single value as text; of others, nothing."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    is_single = isinstance(value, int | float | str | None)
    return repr(value)[:40] if is_single else ""


def _first_difference(first: Mapping[str, Any], own: Mapping[str, Any], rank: int) -> str:
    for name in {**first, **own}:
        if name not in own:
            return f"key {name!r} is on rank 0 and not on rank {rank}"
        if name not in first:
            return f"key {name!r} is on rank {rank} and not on rank 0"
        (there, there_shown), (here, here_shown) = first[name], own[name]
        if not same_contents(there, here):
            if there_shown and here_shown:
                return f"key {name!r} is {there_shown} on rank 0 and {here_shown} on rank {rank}"
            return f"key {name!r} is not the same on ranks 0 and {rank}"
    return ""
