"""Does any damage to a checkpoint pass unnoticed, and does retention ever remove too much?

    python benchmarks/checkpoint_damage.py [--seed 0] [--count 1000] [--sequences 1000] [--json]

Damages the newer of two checkpoints, whole and sharded in turn, and looks what a resume would
take: `found` is a rejection with a reason, `fell back` the older one taken in its place, `silent`
a damaged one loaded. Then saves, names, damages and goes back at random, in processes that are
killed at a random call to the disk, and counts what is left. Prints a table.
"""

import argparse
import functools
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint import Checkpoint, CheckpointStore, Written, flatten, share_of
from lockstep.errors import CheckpointError

CALLS = ("open", "write", "fsync", "mkdir", "rename", "replace", "symlink", "unlink", "rmdir")
NUM_SHARES = 3
OLD, NEW = 1, 2


def parts(step: int) -> dict[str, Any]:
    """Return a state that differs in every tensor from that of any other step."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(64, 24, generator=generator)
    moments = torch.rand(64, 24, generator=generator)
    return {
        "model": {"weight": weight, "bias": torch.full((24,), float(step)), "tied": weight},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step)), "m": moments}}, "lr": 0.1},
    }


def save_shared(store: CheckpointStore, step: int, num_shares: int = NUM_SHARES) -> None:
    """Save as that many ranks would, one after the other."""
    if store.begin(step):
        shares = [share_of(parts(step), rank, num_shares) for rank in range(num_shares)]
        files = {k: v for share in shares for k, v in store.write_share(step, share).items()}
        store.save(step, Written(shares[0].skeletons, files), {"position": step})


def digest(tree: Any) -> str:
    """Return a hash of every bit of a tree: names, types, shapes, ties, bytes and plain values."""
    tensors, skeleton = flatten(tree)
    found = hashlib.sha256(json.dumps(skeleton).encode())
    for name, tensor in tensors.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.contiguous().unsqueeze(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@functools.cache
def digests(step: int) -> dict[str, str]:
    return {part: digest(tree) for part, tree in parts(step).items()}


def is_right(checkpoint: Checkpoint) -> bool:
    """Say whether a checkpoint holds the bits of its step."""
    expected = digests(checkpoint.step)
    return all(digest(checkpoint.load(part)) == right for part, right in expected.items())


# --- Damage ----------------------------------------------------------------------------


def flip(rng: random.Random, folder: Path) -> None:
    file = rng.choice(sorted(folder.iterdir()))
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def truncate(rng: random.Random, folder: Path) -> None:
    file = rng.choice(sorted(folder.iterdir()))
    os.truncate(file, rng.randrange(file.stat().st_size))


def zero_block(rng: random.Random, folder: Path) -> None:
    """Zero up to 4 KiB, where there is something to zero."""
    file = rng.choice(sorted(folder.iterdir()))
    content = file.read_bytes()
    length = rng.choice([1, 16, 512, 4096])
    start = rng.choice([n for n in range(len(content)) if content[n]])
    block = bytes(len(content[start : start + length]))
    file.write_bytes(content[:start] + block + content[start + length :])


def swap(rng: random.Random, folder: Path) -> None:
    one, other = rng.sample(sorted(folder.glob("*.safetensors")), 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def take_from_other_step(rng: random.Random, folder: Path) -> None:
    file = rng.choice(sorted(folder.glob("*.safetensors")))
    shutil.copy(folder.with_name("step_00000001") / file.name, file)


def remove(rng: random.Random, folder: Path) -> None:
    rng.choice(sorted(folder.iterdir())).unlink()


def take_old_manifest(rng: random.Random, folder: Path) -> None:
    shutil.copy(folder.with_name("step_00000001") / "manifest.json", folder)


def double_manifest(rng: random.Random, folder: Path) -> None:
    """Write the manifest, or the one of another step, after itself."""
    file = folder / "manifest.json"
    source = folder.with_name(rng.choice(["step_00000001", folder.name]))
    file.write_bytes(file.read_bytes() + (source / file.name).read_bytes())


def double_key(rng: random.Random, folder: Path) -> None:
    """Give the manifest one of its keys twice, as a careless merge would."""
    file = folder / "manifest.json"
    lines = file.read_bytes().split(b"\n")
    position = rng.randrange(len(lines) - 2)
    lines.insert(position, lines[rng.randrange(1, len(lines) - 2)])
    file.write_bytes(b"\n".join(lines))


def take_whole_other_step(rng: random.Random, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step_00000001"), folder)


def put_foreign(rng: random.Random, folder: Path) -> None:
    """Put what another program saved in the place of one of our files, or of all of them."""
    names = [rng.choice(sorted(os.listdir(folder)))]
    if rng.random() < 0.5:
        shutil.rmtree(folder)
        folder.mkdir()
        names += ["model.pt", ".metadata", "__0_0.distcp"]
    for name in names:
        with (folder / name).open("wb") as file:
            torch.save(parts(NEW), file)


BYTES = {"bit flip": flip, "truncation": truncate, "zeroed block": zero_block}
FILES = {
    "swapped files": swap,
    "file of another step": take_from_other_step,
    "missing file": remove,
    "old manifest": take_old_manifest,
    "manifest twice": double_manifest,
    "manifest key twice": double_key,
    "another step whole": take_whole_other_step,
    "foreign files": put_foreign,
}
Damage = Callable[[random.Random, Path], None]


def look(store: CheckpointStore) -> set[str]:
    """Return what a resume would make of a damaged newest checkpoint."""
    try:
        checkpoint, rejected = store.latest()
    except CheckpointError:
        return {"found"}
    outcome = {"found"} if any(path == store.path(NEW) for path, _ in rejected) else set()
    if checkpoint is None:
        return outcome
    with suppress(CheckpointError):
        is_good = is_right(checkpoint)
        if checkpoint.step == NEW:
            return {"silent"}
        return outcome | ({"fell back"} if is_good else {"silent"})
    return {"found"}


def damage(kind: Damage, count: int, seed: int, folder: Path) -> Counter[str]:
    """Do one kind of damage `count` times and count the outcomes."""
    rng, outcomes = random.Random(f"{seed} {kind.__name__}"), Counter[str]()
    stores = []
    for name in ("whole", "shared"):
        store = CheckpointStore(folder / kind.__name__ / name)
        for step in (OLD, NEW):
            if name == "whole":
                store.save(step, parts(step), {"position": step})
            else:
                save_shared(store, step)
        shutil.copytree(store.path(NEW), store.folder / ".good")
        stores.append(store)
    for turn in range(count):
        store = stores[turn % 2]
        kind(rng, store.path(NEW))
        outcomes.update({"done": 1} | dict.fromkeys(look(store), 1))
        shutil.rmtree(store.path(NEW))
        shutil.copytree(store.folder / ".good", store.path(NEW))
    return outcomes


# --- Kills -----------------------------------------------------------------------------


def die_at(last: int, *, torn: bool = False) -> None:
    """Let the `last`-th call to the disk from now kill this process, half done or just done."""
    count = 0

    def deadly(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == last:
                try:
                    if torn and name == "write":
                        real(args[0], bytes(args[1])[: len(args[1]) // 2])
                    elif torn:
                        real(*args, **kwargs)
                finally:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, deadly(name, getattr(os, name)))


def killed(action: Callable[[], object], last: int, *, torn: bool = False) -> bool:
    """Do `action` in a process of its own that dies at its `last`-th call; say if it did."""
    pid = os.fork()
    if pid == 0:
        try:
            die_at(last, torn=torn)
            action()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def valid_steps(store: CheckpointStore) -> set[int]:
    """Return the steps whose checkpoints verify and hold the right bits."""
    valid = set()
    for step in store.steps():
        with suppress(CheckpointError):
            if is_right(store.open(store.path(step))):
                valid.add(step)
    return valid


def follow(store: CheckpointStore, rng: random.Random, num_turns: int) -> list[str]:
    """Save, name, damage and go back at random, mostly killed on the way; return what was lost."""
    lost, step = [], 0
    for turn in range(num_turns):
        before = valid_steps(store)
        action = rng.choice(["save", "save", "save", "save_shared", "name", "damage", "go back"])
        if action == "damage" and len(before) > 1:
            flip(rng, store.path(rng.choice(sorted(before))))
            continue
        if action == "name" and before:
            named = rng.choice(sorted(before))
            killed(lambda: store.name(named, "best_model.pt"), rng.randint(1, 12))  # noqa: B023
            continue
        if action == "go back" and before:
            step = rng.choice(sorted(before))
            before = {older for older in before if older <= step}
            killed(lambda: store.set_aside_after(step), rng.randint(1, 12))  # noqa: B023
        elif action == "save_shared":
            step += 1
            killed(lambda: save_shared(store, step), rng.randint(1, 110), torn=bool(turn % 2))  # noqa: B023
        else:
            step += 1
            save = lambda: store.save(step, parts(step), {})  # noqa: B023, E731
            killed(save, rng.randint(1, 90), torn=bool(turn % 2))
        after = valid_steps(store)
        must = min(len(before), store.keep_last or len(before))
        if len(after) < must:
            lost.append(f"{action}: {sorted(before)} became {sorted(after)}")
        if before and max(after, default=-1) < max(before):
            lost.append(f"{action}: the newest, {max(before)}, is gone; left: {sorted(after)}")
    return lost


def sequences(count: int, seed: int, folder: Path) -> tuple[int, list[str]]:
    """Follow that many random sequences; return how many processes were at risk, and losses."""
    num_turns, lost = 5, []
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        store = CheckpointStore(folder / "sequence", keep_last=rng.choice([1, 2, 2, 3]))
        lost += [f"sequence {number}: {what}" for what in follow(store, rng, num_turns)]
        shutil.rmtree(store.folder, ignore_errors=True)
    return count * num_turns, lost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000, help="of each kind of damage to bytes")
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = {k: damage(v, arguments.count, arguments.seed, folder) for k, v in BYTES.items()}
        few = max(2, arguments.count // 10)
        table |= {k: damage(v, few, arguments.seed, folder) for k, v in FILES.items()}
        num_turns, lost = sequences(arguments.sequences, arguments.seed, folder)
    num_silent = sum(outcomes["silent"] for outcomes in table.values())
    if arguments.json:
        found = {"damage": table, "turns": num_turns, "lost": lost, "silent": num_silent}
        print(json.dumps(found))
    else:
        columns = ("done", "found", "fell back", "silent")
        print(f"{'damage':24}" + "".join(f"{column:>11}" for column in columns))
        for kind, outcomes in table.items():
            print(f"{kind:24}" + "".join(f"{outcomes[column]:>11}" for column in columns))
        print(f"{num_turns} actions in {arguments.sequences} sequences, {len(lost)} losses")
        print("\n".join(lost[:20]))
    return int(bool(num_silent or lost))


if __name__ == "__main__":
    sys.exit(main())
