"""Fail together: raise an error of one rank on all ranks.

Owns: sending an error between ranks, and checking that ranks agree. Does not own: the causes of
errors.
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
from lockstep.contents import contents_of, same_contents
from lockstep.dist.collectives import Collectives
from lockstep.errors import ConfigError, LockstepError, OtherRankError, StopRequested

T = TypeVar("T")

SAME_STATE = (
    "make it the same on every rank: sum it over ranks (context.world.all_sum) or key it by "
    "sample, or remove it from Task.state()"
)
RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of batch normalisation. They may differ between ranks; checkpoints keep the first
rank's."""


def together(world: Collectives, action: Callable[[], T], *, every_exception: bool = False) -> T:
    """Do `action` on every rank; if it fails on one, raise its error on all. Collective.

    Args:
        every_exception: Agree on exceptions of any kind, for code of the task. The rank that
            raised one raises it again; the others raise an OtherRankError. Do not use it if
            `action` contains collectives without a vote before each: the vote of a rank that
            fails would be paired with a collective of the others.
    """
    problem: Exception | None = None
    try:
        result = action()
    except Exception as error:
        if is_shared(error):  # the other ranks raise it too, and do not vote here
            raise
        if not (every_exception or isinstance(error, LockstepError)):
            raise
        problem = error
    agree_to_continue(world, problem)
    return result


def call_together(world: Collectives, action: Callable[[], T]) -> T:
    """Call code of a task or callback; raise its exception on all ranks. Collective.

    The code may contain collectives, because ranks vote before each.
    """

    def call() -> T:
        with before_each_collective(world, lambda: agree_to_continue(world)):
            return action()

    return together(world, call, every_exception=True)


def naming(place: str, action: Callable[[], T]) -> T:
    """Call code of a task or callback; an exception gets a note of the place."""
    try:
        return action()
    except Exception as error:
        error.add_note(f"in {place}")
        raise


def is_shared(error: BaseException) -> bool:
    """Return whether every rank raises this error, or one about it."""
    return getattr(error, "is_shared", False)


@contextmanager
def before_each_collective(world: Collectives, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` before each collective of `world` in the block.

    If it is a vote, the vote of a rank that fails in the block is paired with one of the others.
    """
    before = world.before_collective
    world.before_collective = action
    try:
        yield
    finally:
        world.before_collective = before


def agree_to_continue(world: Collectives, problem: Exception | None = None, stop: int = 0) -> None:
    """Raise on every rank if one has an error or a request to stop. Collective.

    `together` ends with this vote. So an action may contain more of these votes: if the action
    fails on one rank, its vote is paired with the next vote of the others, and all raise its error.

    Args:
        problem: This rank's error.
        stop: The exit code of this rank's stop signal, or 0.

    Raises:
        LockstepError: a rank has a problem; this rank's own if the others cannot be reached. A
            `problem` of another kind is raised unchanged.
        StopRequested: no rank has a problem, and one was asked to stop.
    """
    with _own_error_if_cut_off(problem):
        stop, failed = world.all_max(stop, int(problem is not None))
    if failed:
        raise_together(world, problem)
    if stop:
        raise StopRequested(stop)


def raise_together(world: Collectives, problem: Exception | None) -> NoReturn:
    """Raise the error of the first rank that has one, on every rank. Collective.

    A rank raises its own exception, with its traceback, if that is not a LockstepError; the other
    ranks raise an OtherRankError.
    """
    if problem is not None and is_shared(problem):  # every rank has it
        raise problem
    with _own_error_if_cut_off(problem):
        reports = world.all_values(_as_parts(problem))
    rank, (kind, text, remedy) = next((r, report) for r, report in enumerate(reports) if report)
    if problem is not None and not isinstance(problem, LockstepError):
        problem.is_shared = True  # type: ignore[attr-defined]
        raise problem
    where = "" if all(reports) else f"rank {rank}: "
    error: LockstepError = getattr(errors, kind)(where + text, remedy)
    error.is_shared = True
    raise error


@contextmanager
def _own_error_if_cut_off(problem: Exception | None) -> Iterator[None]:
    """Raise this rank's own error, if any, when the block cannot reach the other ranks."""
    try:
        yield
    except RuntimeError as unreachable:
        if problem is None:
            raise
        raise problem from unreachable


def _as_parts(problem: Exception | None) -> list[str]:
    """Return an error to send to other ranks: class name, problem and remedy; [] for None."""
    if problem is None:
        return []
    if isinstance(problem, LockstepError):
        # A task may derive its own class; send the nearest one that every rank knows.
        kinds = [kind.__name__ for kind in type(problem).__mro__ if hasattr(errors, kind.__name__)]
        return [kinds[0], problem.problem, problem.remedy]
    place = traceback.extract_tb(problem.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno} in {place.name}"
    where = ", ".join([where, *getattr(problem, "__notes__", [])])
    text = f"{type(problem).__name__}: {problem!s:.1000} ({where})"
    return [OtherRankError.__name__, text, "read the traceback that the failing rank prints"]


def check_same(
    what: str,
    local: str,
    world: Collectives,
    remedy: str = "pass the same flags on every node, and use folders that all nodes share",
) -> None:
    """Refuse a run whose ranks have different values where they must be the same. Collective."""
    texts = world.all_texts(local)
    if len(set(texts)) > 1:
        rank = next(rank for rank, text in enumerate(texts) if text != texts[0])
        short = " vs ".join(_around_difference(texts[0], texts[rank]))
        raise ConfigError(f"ranks 0 and {rank} see different {what}: {short}", remedy)


def _around_difference(a: str, b: str) -> tuple[str, str]:
    """Return the part of both texts around their first difference."""
    start = max(0, next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0) - 30)
    return a[start : start + 60], b[start : start + 60]


def state_difference(state: Mapping[str, Any], world: Collectives) -> str:
    """Describe where a task's state differs between ranks; "" if it is the same. Collective.

    A checkpoint keeps the first rank's state only. Floats may differ by rounding.
    """
    if world.size == 1:
        return ""
    own = {name: [contents_of(value), _shown(value)] for name, value in _values(state)}
    return first_difference(own, world, _different_key)


def first_difference(
    own: Mapping[str, Any],
    world: Collectives,
    describe: Callable[[Mapping[str, Any], Mapping[str, Any], int], str],
) -> str:
    """Compare named values with the first rank's; return one difference, or "". Collective.

    Ranks compare a hash of the values. Only if it differs do they exchange the values.

    Args:
        describe: Describes how the first rank's values differ from those of another rank.
    """
    if world.size == 1 or is_same(own, world):
        return ""
    first = world.all_values(own if world.is_first else {})[0]
    return first_of_ranks(describe(first, own, world.rank), world)


def is_same(own: Any, world: Collectives) -> bool:
    """Return whether a value that JSON can hold is the same on every rank. Collective."""
    digest = hashlib.blake2b(json.dumps(own).encode(), digest_size=7).digest()
    label = int.from_bytes(digest, "little")
    highest, lowest = world.all_max(label, -label)
    return highest == -lowest


def first_of_ranks(own: T, world: Collectives) -> T:
    """Return the first rank's value that is not empty, or an empty one. Collective.

    Args:
        own: A text, list or dict that JSON can hold.
    """
    return next((value for value in world.all_values(own) if value), own)


def _values(state: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a state by dotted name: each tensor, and each value at the top."""
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
    """Return a single value as text; "" for any other value."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    is_single = isinstance(value, int | float | str | None)
    return repr(value)[:40] if is_single else ""


def _different_key(first: Mapping[str, Any], own: Mapping[str, Any], rank: int) -> str:
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
