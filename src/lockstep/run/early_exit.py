"""Report what is lost when sys.exit() or KeyboardInterrupt leaves an unfinished run.

Owns: turning both into errors with exit codes, so that the run does not look finished or saved.
Does not own: stop signals (`signals.py`), after which a run saves and stops.
"""

from collections.abc import Callable
from contextlib import ExitStack

from lockstep.dist import position
from lockstep.errors import LeftEarlyError, LockstepError, NotSavedError
from lockstep.world import World

EXIT_TIMEOUT_S = 2.0
"""How long a rank that exits waits for the others to exit too; then only one reports it."""


def refuse_early_exit(stack: ExitStack, world: World, unsaved: Callable[[], str]) -> None:
    """Raise an error instead of an exit or interrupt that leaves `stack` before the run ends.

    Args:
        stack: Of the run.
        world: The ranks.
        unsaved: Describes what a run that ended now would lose; "" if everything is saved.
    """

    def convert(kind: object, error: BaseException | None, trace: object) -> None:
        if position.this_rank.has_finished or not isinstance(error, SystemExit | KeyboardInterrupt):
            return
        found = _exited(error, unsaved()) or _interrupted(error, unsaved())
        if found is None:
            return
        for note in getattr(error, "__notes__", []):
            found.add_note(note)
        world.keep_group(kind, found, trace)  # ranks may have left at different collectives
        place = f"left after step {position.this_rank.step} by {type(error).__name__}"
        found.is_shared = world.all_reach(place, EXIT_TIMEOUT_S)
        raise found from error

    stack.push(convert)


def _exited(error: BaseException, unsaved: str) -> LockstepError | None:
    """Return the error for an exit that claims success; one with another code keeps it."""
    if not isinstance(error, SystemExit) or error.code not in (None, 0):
        return None
    return LeftEarlyError(
        "the script called exit() inside a run that had not finished; "
        + (unsaved or "all finished steps are saved"),
        "call exit() after fit has returned; to end a run early, set max_steps or send SIGTERM",
    )


def _interrupted(error: BaseException, unsaved: str) -> LockstepError | None:
    """Return the error for an interrupt that loses steps."""
    if not isinstance(error, KeyboardInterrupt) or not unsaved:
        return None
    return NotSavedError(
        f"stopped by KeyboardInterrupt without saving: {unsaved}",
        "start the same command again; to stop a run and save, press Ctrl-C or send SIGTERM",
    )
