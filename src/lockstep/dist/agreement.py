"""Fail together: what goes wrong on one rank is raised on all, in its words.

Owns: how an error travels between ranks, and seeing that they agree. Does not own: what may go
wrong.
"""

import hashlib
import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from torch import Tensor

from lockstep import errors
from lockstep.data.contents import contents_of, same_contents
from lockstep.dist.collectives import Collectives
from lockstep.errors import ConfigError, LockstepError, OtherRankError, StopRequested

T = TypeVar("T")

SAME_STATE = (
    "make it the same on every rank: sum it over ranks (context.world.all_sum) or key it by "
    "sample, or leave it out of Task.state()"
)
RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Of batch normalization: every rank has its own, and checkpoints keep the first rank's."""


def together(world: Collectives, action: Callable[[], T], *, every_exception: bool = False) -> T:
    """Do `action` on every rank; if it fails on one, fail on all in its words. Collective.

    Args:
        every_exception: Agree on exceptions of any kind, for code of the task. The rank that
            raised one raises it again; the others raise an OtherRankError. Not where `action`
            holds collectives without a vote before each: a rank that fails would meet those of
            the others with its vote.
    """
    problem: Exception | None = None
    try:
        result = action()
    except Exception as error:
        if is_shared(error):  # the other ranks raise it too: they do not vote here
            raise
        if not (every_exception or isinstance(error, LockstepError)):
            raise
        problem = error
    agree_to_continue(world, problem)
    return result


def is_shared(error: BaseException) -> bool:
    """Say whether every rank leaves with this error, or with one about it."""
    return getattr(error, "is_shared", False)


@contextmanager
def voting_before_collectives(world: Collectives) -> Iterator[None]:
    """Hold a vote before each collective of `world` in the block.

    A rank that fails in the block then meets a vote of the others, whatever they do next.
    """
    before = world.before_collective
    world.before_collective = lambda: agree_to_continue(world)
    try:
        yield
    finally:
        world.before_collective = before


def agree_to_continue(world: Collectives, problem: Exception | None = None, stop: int = 0) -> None:
    """Raise on every rank what one of them met: an error, or a request to stop. Collective.

    `together` ends with this vote, so an action may hold further votes of this kind: a rank whose
    action fails meets the next vote of the others, and all of them leave with its error.

    Args:
        problem: This rank's error.
        stop: The exit code of this rank's stop signal, or 0.

    Raises:
        LockstepError: a rank had a problem; this rank's own if the others cannot be reached. A
            `problem` of another kind is raised as it is.
        StopRequested: none had, and a rank was asked to stop.
    """
    with _own_error_if_cut_off(problem):
        stop, failed = world.all_max(stop, int(problem is not None))
    if failed:
        raise_together(world, problem)
    if stop:
        raise StopRequested(stop)


def raise_together(world: Collectives, problem: Exception | None) -> NoReturn:
    """Raise the first rank's error that has one, on every rank. Collective.

    An exception that is not ours is raised where it came up, with its traceback; the other ranks
    raise an OtherRankError.
    """
    if problem is not None and is_shared(problem):  # then it is on every rank
        raise problem
    with _own_error_if_cut_off(problem):
        texts = world.all_texts(json.dumps(_story(problem)))
    stories = [json.loads(text) for text in texts]
    rank, (kind, text, remedy) = next((r, story) for r, story in enumerate(stories) if story)
    if problem is not None and not isinstance(problem, LockstepError):
        problem.is_shared = True  # type: ignore[attr-defined]
        raise problem
    where = "" if all(stories) else f"rank {rank}: "
    error: LockstepError = getattr(errors, kind)(where + text, remedy)
    error.is_shared = True
    raise error


@contextmanager
def _own_error_if_cut_off(problem: Exception | None) -> Iterator[None]:
    """Raise this rank's own error where the block cannot reach the others, if it has one."""
    try:
        yield
    except RuntimeError as unreachable:
        if problem is None:
            raise
        raise problem from unreachable


def _story(problem: Exception | None) -> list[str]:
    """Return an error as ranks tell each other: its kind, what is wrong, and what to try."""
    if problem is None:
        return []
    if isinstance(problem, LockstepError):
        # Of an error that a task derived from ours, the name that every rank knows.
        kinds = [kind.__name__ for kind in type(problem).__mro__ if hasattr(errors, kind.__name__)]
        return [kinds[0], problem.problem, problem.remedy]
    place = traceback.extract_tb(problem.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno} in {place.name}"
    text = f"{type(problem).__name__}: {problem!s:.1000} ({where})"
    return [OtherRankError.__name__, text, "read the traceback that this rank prints"]


def check_same(
    what: str,
    local: str,
    world: Collectives,
    remedy: str = "pass the same flags on every node, and use folders that all nodes share",
) -> None:
    """Refuse a run whose ranks do not agree on something they must share. Collective."""
    said = world.all_texts(local)
    if len(set(said)) > 1:
        rank = next(rank for rank, text in enumerate(said) if text != said[0])
        short = " against ".join(_around_difference(said[0], said[rank]))
        raise ConfigError(
            f"ranks 0 and {rank} see different {what}: {short}",
            remedy,
        )


def _around_difference(a: str, b: str) -> tuple[str, str]:
    """Return both texts, cut to where they part."""
    start = max(0, next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0) - 30)
    return a[start : start + 60], b[start : start + 60]


def state_difference(state: Mapping[str, Any], world: Collectives) -> str:
    """Say where a task's state differs between ranks; nothing if it is the same. Collective.

    A checkpoint keeps the first rank's state only. Floats may differ by rounding.
    """
    if world.size == 1:
        return ""
    own = {name: [contents_of(value), _shown(value)] for name, value in _values(state)}
    return first_difference(own, world, _first_difference)


def first_difference(
    own: Mapping[str, Any],
    world: Collectives,
    describe: Callable[[Mapping[str, Any], Mapping[str, Any], int], str],
) -> str:
    """Compare named values with the first rank's; return one difference, or "". Collective.

    Ranks vote on a hash of the values. Only where it differs do they exchange the values.

    Args:
        describe: Says how the first rank's values differ from those of another rank.
    """
    if world.size == 1:
        return ""
    text = json.dumps(own)
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    label = int.from_bytes(digest, "little")
    highest, lowest = world.all_max(label, -label)
    if highest == -lowest:
        return ""
    first = json.loads(world.all_texts(text if world.is_first else "{}")[0])
    said = world.all_texts(describe(first, own, world.rank))
    return next((difference for difference in said if difference), "")


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
