"""Fail together: what goes wrong on one rank is raised on all, in its words.

Owns: how an error travels between ranks. Does not own: what may go wrong.
"""

import json
from collections.abc import Callable
from typing import NoReturn, TypeVar

from lockstep import errors
from lockstep.errors import LockstepError
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
