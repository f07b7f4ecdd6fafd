"""Can two groups of processes both commit checkpoints into one folder?

    python benchmarks/fencing.py [--seed 0] [--count 100] [--json]

An old group saves a checkpoint and is suspended (SIGSTOP) before a random call to the disk in that
save, as a machine that is swapping or cut off from its network may be. No lock stands between the
two groups. A new group then resumes from the newest checkpoint, takes the folder over and saves
twice, the second time in half of the tries at the step that the old group is about to commit. The
old group continues before the new one has saved, or after that. Afterwards a resume must find the
new group's newest checkpoint, every bit of it, and nothing of the old group that was not there when
the new one took over. Prints a table. `link_cuts.py` cuts the network between two real nodes.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint import CheckpointStore, Written, share_of
from lockstep.errors import CheckpointError, TakenOverError

CALLS = (
    *("open", "write", "fsync", "mkdir", "rename", "replace", "symlink", "unlink", "rmdir"),
    *("listdir", "scandir", "stat", "lstat"),
)
OLD, NEW = 1, 2
BEFORE, DURING = 100, 120
"""The steps that the old group saves undisturbed, and while it is suspended."""


def parts(step: int, group: int) -> dict[str, Any]:
    """Return a state that says which group it is of."""
    generator = torch.Generator().manual_seed(step * 10 + group)
    weight = torch.randn(16, 8, generator=generator)
    return {"model": {"weight": weight, "group": torch.tensor(group)}, "progress": {"step": step}}


def is_of(store: CheckpointStore, step: int, group: int) -> bool:
    found = store.open(store.path(step)).load("model")
    return torch.equal(found["weight"], parts(step, group)["model"]["weight"])


def save(store: CheckpointStore, step: int, group: int, sharded: bool) -> None:
    """Save and name a checkpoint as `fit` does, whole or as two ranks would."""
    if not sharded:
        store.save(step, parts(step, group), {})
    elif store.begin(step):
        shares = [share_of(parts(step, group), rank, 2) for rank in (1, 0)]
        files = {k: v for share in shares for k, v in store.write_share(step, share).items()}
        store.save(step, Written(shares[0].skeletons, files), {})
    store.name(step, f"checkpoint_step_{step}.pt")


def suspend_at(last: int) -> Callable[[], int]:
    """Suspend this process before its `last`-th call to the disk; return what counts them."""
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == last:
                signal.raise_signal(signal.SIGSTOP)
            return real(*args, **named)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    return lambda: count


def in_process(action: Callable[[], int]) -> int:
    """Start `action` in a process of its own, which exits with what it returns."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = action()
        finally:
            os._exit(code)
    return pid


def old_group(folder: Path, keep: int, sharded: bool, last: int, told: Path) -> int:
    """Save twice, suspended in the second; return 0 if that was done, 3 if it was refused."""
    store = CheckpointStore(folder, keep_last=keep)
    store.take_over()
    save(store, BEFORE, OLD, sharded)
    count = suspend_at(last)
    try:
        save(store, DURING, OLD, sharded)
    except TakenOverError:
        return 3
    except CheckpointError as error:
        told.write_text(str(error))
        return 4
    told.write_text(str(count()))
    return 0


def new_group(
    folder: Path, keep: int, sharded: bool, same_step: bool, waits: bool, told: Path
) -> int:
    """Resume, take over and save twice; write down where it resumed and where it got to."""
    store = CheckpointStore(folder, keep_last=keep)
    checkpoint, _ = store.latest()
    start = checkpoint.step if checkpoint else -1
    store.take_over(start)
    store.set_aside_after(start)
    if waits:
        signal.raise_signal(signal.SIGSTOP)
    end = DURING if same_step and start < DURING else DURING + 10
    save(store, end - 5, NEW, sharded)
    save(store, end, NEW, sharded)
    told.write_text(json.dumps([start, end]))
    return 0


def attempt(folder: Path, rng: random.Random, num_calls: int) -> tuple[str, list[str]]:
    """Let both groups meet once; return how the old one ended, and what is wrong afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    keep, sharded, same_step = rng.choice([1, 2, 3]), rng.random() < 0.5, rng.random() < 0.5
    last, waits = rng.randint(1, num_calls), rng.random() < 0.5
    told, told_old = folder.with_suffix(".new"), folder.with_suffix(".old")
    told.unlink(missing_ok=True)
    what = f"keep {keep}, {'sharded' if sharded else 'whole'}, suspended before call {last}, "
    what += "continued first" if waits else "continued last"
    old = in_process(partial(old_group, folder, keep, sharded, last, told_old))
    _, status = os.waitpid(old, os.WUNTRACED)
    is_suspended = os.WIFSTOPPED(status)
    new = in_process(partial(new_group, folder, keep, sharded, same_step, waits, told))
    _, new_status = os.waitpid(new, os.WUNTRACED)
    if is_suspended:
        os.kill(old, signal.SIGCONT)
        _, status = os.waitpid(old, 0)
    if os.WIFSTOPPED(new_status):
        os.kill(new, signal.SIGCONT)
        _, new_status = os.waitpid(new, 0)
    endings = {0: "saved", 3: "refused", 4: "failed"}
    ending = endings.get(os.waitstatus_to_exitcode(status), "crashed")
    if not is_suspended:
        ending = "was done before"
    if os.waitstatus_to_exitcode(new_status) != 0 or not told.exists():
        return ending, [f"{what}: the new group could not save"]
    start, end = json.loads(told.read_text())
    faults = [f"{what}: {fault}" for fault in faults_in(folder, start, end)]
    if ending in ("failed", "crashed"):
        faults.append(f"{what}: the old group {ending}: {told_old.read_text()[:300]}")
    return ending, faults


def faults_in(folder: Path, start: int, end: int) -> list[str]:
    """Return what a third group would find that it should not."""
    store = CheckpointStore(folder, keep_last=None)
    checkpoint, _ = store.latest()
    if checkpoint is None or checkpoint.step != end:
        return [f"a resume finds {checkpoint.step if checkpoint else 'nothing'}, not {end}"]
    if not is_of(store, end, NEW):
        return [f"step {end} is not the new group's"]
    store.take_over(end)
    store.set_stale_aside()
    faults = []
    for step in store.steps():
        group = OLD if step <= start else NEW
        if not is_of(store, step, group):
            faults.append(f"step {step} is that of the old group")
    if store.open(f"checkpoint_step_{end}.pt").step != end:
        faults.append("the name of the new group's checkpoint leads elsewhere")
    return faults


def sweep(count: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Let both groups meet that often."""
    rng, endings, faults = random.Random(seed), Counter[str](), []
    told = folder / "counted"
    pid = in_process(partial(old_group, folder / "counting", 1, True, -1, told))
    os.waitpid(pid, 0)
    num_calls = int(told.read_text())
    for _ in range(count):
        ending, found = attempt(folder / "run", rng, num_calls)
        endings[ending] += 1
        faults += found
    return endings, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        endings, faults = sweep(arguments.count, arguments.seed, Path(name))
    if arguments.json:
        print(json.dumps({"old group": endings, "faults": faults}))
    else:
        for ending, num in endings.most_common():
            print(f"old group {ending:18}{num:>6}")
        print(f"{arguments.count - len(faults)} of {arguments.count} tries left one chain")
        print("\n".join(faults[:20]))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
