"""What the launch tests start: join the others, add the ranks up, say who and where one is.

It accepts `--local-rank=K` as torch.distributed.launch gives it, and ends as any script ends,
which is when a gloo group likes to abort.
"""

import json
import sys

import torch
import torch.distributed as dist

from lockstep.world import World

_kept: list[object] = []


def meet(local_rank: int | None = None, timeout_s: float = 60) -> dict[str, object]:
    """Join the group this process was launched into and add the ranks up."""
    with World.enter(timeout_s=timeout_s, local_rank=local_rank) as world:
        total = world.all_sum(torch.tensor([world.rank + 1.0], device=world.device))
        if world.size > 1:
            # As after training: a wrapped model keeps the group's threads, and they were busy.
            _kept.append(dist.group.WORLD)
            works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(60)]
            for work in works:
                work.wait()
        return {
            "rank": world.rank,
            "size": world.size,
            "local_rank": world.local_rank,
            "local_size": world.local_size,
            "device": str(world.device),
            "launcher": world.launcher,
            "sum": total.item(),
        }


if __name__ == "__main__":
    from lockstep_recipes.command import Flags

    flags = Flags("meet", "Add the ranks up.", "torchrun --nproc_per_node=2 meet.py")
    flags.add_argument("--local_rank", type=int)
    flags.add_argument("--group_first", action="store_true", help="make the group oneself")
    args = flags.read(sys.argv[1:])
    if args.group_first:
        dist.init_process_group("gloo")
    # One write, so that two ranks do not tear each other's lines.
    sys.stdout.write(json.dumps(meet(args.local_rank)) + "\n")
