"""Finishing an evaluation on real ranks while one of them is asked to stop."""

from pathlib import Path
from typing import Any

from lockstep import World
from lockstep.errors import StopRequested
from lockstep.task import Context, Task
from lockstep.testing import run_ranks

NEVER = 1_000_000


def finish_on(num_ranks: int, task: Task, model: Any, folder: Path, stop_at: int) -> list[Any]:
    """Return of each rank how it ended, and how often it asked whether to stop.

    The last rank is asked to stop when it asks for the time numbered `stop_at`, from 0.
    """

    def one_rank() -> tuple[str, int]:
        num_asked = 0

        def stop_code() -> int:
            nonlocal num_asked
            num_asked += 1
            is_stopped = num_asked > stop_at and world.rank == world.size - 1
            return 143 if is_stopped else 0

        with World.enter("cpu", timeout_s=20) as world:
            context = Context(world, 0, 12, 0, training=False, stop_code=stop_code)
            try:
                task.finish_evaluation(model, context, str(folder))
            except StopRequested:
                return "stopped", num_asked
            return "finished", num_asked

    return run_ranks(num_ranks, one_rank)
