"""Fail together: what goes wrong on one rank is raised on all, in its words.

Owns: how an error travels between ranks, and seeing that they agree. Does not own: what may go
wrong.
"""

import json
from collections.abc import Callable
from typing import NoReturn, TypeVar

from lockstep import errors
from lockstep.errors import ConfigError, LockstepError
from lockstep.runtime import World

T = TypeVar("T")


def together(world: World, action: Callable[[], T]) -> T:
    """Do `action` on every rank; if it fails on one, fail on all in its words. Collective."""
    try:
        result, problem = action(), None
    except LockstepError as error:
        problem = error
    if world.all_max(int(problem is not None))[0]:
        raise_together(world, problem)
    return result


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
