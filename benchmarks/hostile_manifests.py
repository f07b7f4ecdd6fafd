"""Does a manifest that somebody changed and sealed again ever end a resume in a traceback?

    python benchmarks/hostile_manifests.py [--seed 0] [--count 400] [--commands 10] [--json]

Trains tiny runs on one rank, on two, and on two that save a shard each. Then, `count` times: takes
one of their folders, changes one to three places in the newest manifest (values of other types,
huge numbers, deep nesting, missing keys, lone surrogates), computes its hash again, and resumes
with `fit`. A resume may train on, fall back to the previous checkpoint, or refuse in one sentence
(a LockstepError, exit code 2); each within 2 s of CPU time and 1 GB. `commands` more are resumed as
a recipe under `lockstep launch`, whose output must hold no traceback. Prints a table.
"""

import argparse
import copy
import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep import RunConfig, fit, read_events
from lockstep.errors import LockstepError
from lockstep.testing import TinyTask, run_ranks

LIMIT_S = 2.0
LIMIT_BYTES = 2**30
HANGS_AFTER_S = 120
DEEP = "@deep"
"""Stands for a nesting that `json.dumps` itself could not write."""
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**30, -(10**30),
    10**400, 0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), float("-inf"),
    "", "x", "0", "nan", "inf", "None", "\ud800", "\udcff\x00", "../x", "/etc/passwd", "a\nb",
    "\x1b[31m", "x" * 5000, [], {}, [[]], [None] * 3, [0, 0], {"x": 1}, {"dict": []},
    {"list": []}, {"tensor": "x"}, {"float": "nan"}, {"dict": [["a", 1], ["a", 2]]},
    {"dict": [[None, 1]]}, {"tensor": 3},
    DEEP + "20", DEEP + "90", DEEP + "150", DEEP + "400", DEEP + "2000", DEEP + "100000",
)  # fmt: skip


class Source(NamedTuple):
    """A folder of a run, and how it is resumed."""

    name: str
    folder: Path
    num_ranks: int
    sharded: bool


def config_of(folder: Path, max_steps: int, **others: Any) -> RunConfig:
    """Return the settings of a tiny run with everything a checkpoint may hold."""
    values = {
        "output_dir": str(folder),
        "max_steps": max_steps,
        "batch": {"batch_size": 2, "global_batch_size": 8},
        "checkpoint": {"every_steps": 2, "name_steps": True, "background": False},
        "evaluation": {"every_steps": 4},
        "averages": [0.9],
        "sinks": {"curves": False},
        "device": "cpu",
        "log_every": 3,
        "num_threads": 1,
    }
    return RunConfig.parse({**values, **others})


def train(folder: Path, max_steps: int, sharded: bool = False, accept: bool = False) -> Any:
    """Train the tiny run up to a step, from wherever it stands."""
    saving = {"every_steps": 2, "name_steps": True, "background": False, "sharded": sharded}
    config = config_of(folder, max_steps, checkpoint=saving, accept_changes=accept)
    return fit(TinyTask(24, 4), config)


def sources(folder: Path) -> list[Source]:
    """Train the runs whose manifests are changed."""
    made = []
    for name, num_ranks, sharded in (("one", 1, False), ("two", 2, False), ("sharded", 2, True)):
        run_ranks(num_ranks, train, folder / name, 4, sharded)
        made.append(Source(name, folder / name, num_ranks, sharded))
    return made


# --- Changing a manifest ----------------------------------------------------------------


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a tree of JSON."""
    items: Any = ()
    if isinstance(node, dict):
        items = node.items()
    elif isinstance(node, list):
        items = enumerate(node)
    return [path, *(inner for key, value in items for inner in places(value, (*path, key)))]


def value_at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def change(tree: dict[str, Any], rng: random.Random) -> str:
    """Change one place of a manifest; return what was done."""
    # The meta data are a small part of a manifest, and what most of the code reads.
    within = rng.choice(["meta", "meta", "skeletons", "files", None])
    start = (within,) if within in tree else ()
    found = [path for path in places(value_at(tree, start), start) if path]
    path = rng.choice(found)
    above, key = value_at(tree, path[:-1]), path[-1]
    action = rng.choice(["replace", "replace", "replace", "remove", "move", "nudge", "rename"])
    if action == "remove":
        del above[key]
    elif action == "move":
        above[key] = copy.deepcopy(value_at(tree, rng.choice(found)))
    elif action == "nudge" and isinstance(above[key], int | float):
        above[key] = rng.choice([above[key] + 1, -above[key], above[key] * 10**6, str(above[key])])
    elif action == "rename" and isinstance(above, dict):
        above[rng.choice(["x", "", "\ud800", "params", f"{key} "])] = above.pop(key)
    else:
        action, above[key] = "replace", copy.deepcopy(rng.choice(VALUES))
    return f"{action} {'.'.join(map(str, path))}"


def sealed(tree: dict[str, Any]) -> bytes:
    """Return a manifest as text with a hash that is right."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in tree.items())
    body = f"{{{lines}"
    for value in VALUES:
        if isinstance(value, str) and value.startswith(DEEP):
            depth = int(value.removeprefix(DEEP))
            body = body.replace(f'"{value}"', "[" * depth + "]" * depth)
    raw = body.encode()
    return raw + f',\n"sha256": "{hashlib.sha256(raw).hexdigest()}"}}\n'.encode()


def mutate(folder: Path, seed: str) -> list[str]:
    """Change the newest manifest of a run; return what was done."""
    rng = random.Random(seed)
    newest = max((folder / "checkpoints").glob("step_*"))
    tree = json.loads((newest / "manifest.json").read_text())
    del tree["sha256"]
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        try:
            done.append(change(tree, rng))
        except (KeyError, TypeError, IndexError, OverflowError):  # an earlier change removed it
            continue
    (newest / "manifest.json").write_bytes(sealed(tree))
    return done


# --- Resuming ---------------------------------------------------------------------------


class Outcome(NamedTuple):
    """How a resume ended, and what it took."""

    kind: str
    said: str
    cpu_s: float
    grown_bytes: int


def resumed(action: Callable[[], Any], output: Path) -> Outcome:
    """Resume in a process of its own, as the changes may ask for any amount of memory or time."""
    told = output.with_suffix(".json")
    pid = os.fork()
    if pid == 0:
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with output.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            began = time.process_time()
            kind, said = "trained on", ""
            try:
                action()
            except LockstepError as error:
                kind, said = "refused", error.problem
                if error.exit_code != 2:
                    kind = f"EXIT CODE {error.exit_code}"
            except BaseException:
                kind, said = "TRACEBACK", traceback.format_exc()
            cpu_s = time.process_time() - began
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            told.write_text(json.dumps([kind, said, cpu_s, grown]))
        finally:
            os._exit(0)
    deadline = time.monotonic() + HANGS_AFTER_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return Outcome("HANG", f"no end after {HANGS_AFTER_S} s", HANGS_AFTER_S, 0)
        time.sleep(0.01)
    if not told.exists():
        return Outcome("TRACEBACK", "the process died", 0.0, 0)
    outcome = Outcome(*json.loads(told.read_text()))
    if outcome.kind in ("refused", "trained on", "fell back"):
        if outcome.cpu_s > LIMIT_S:
            outcome = outcome._replace(kind="SLOW")
        if outcome.grown_bytes > LIMIT_BYTES:
            outcome = outcome._replace(kind="MEMORY")
    return outcome


def attempt(source: Source, number: int, seed: int, folder: Path) -> tuple[list[str], Outcome]:
    """Change a copy of a run's newest manifest, and resume it."""
    place = folder / "attempt"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source.folder, place, symlinks=True)
    done = mutate(place, f"{seed} {number}")
    accept = bool(number % 2)  # a user who accepts changes meets more of what is in a manifest
    outcome = resumed(lambda: train(place, 6, accept=accept), folder / f"output_{number}")
    resumes = [
        event["step"] for event in read_events(place, raw=True) if event["event"] == "resume"
    ]
    if outcome.kind == "trained on" and resumes == [2]:
        outcome = outcome._replace(kind="fell back")
    (folder / f"output_{number}").unlink(missing_ok=True)
    (folder / f"output_{number}.json").unlink(missing_ok=True)
    return done, outcome


def sweep(count: int, seed: int, folder: Path) -> tuple[Counter[str], list[str], float]:
    """Try that many manifests; return the outcomes, what is bad, and the longest CPU time."""
    counts, bad, longest_s = Counter[str](), [], 0.0
    runs = sources(folder)
    train(folder / "warm", 2)  # or the first one that is tried pays for imports
    for number in range(count):
        source = runs[number % len(runs)]
        done, outcome = attempt(source, number, seed, folder)
        counts[outcome.kind] += 1
        longest_s = max(longest_s, outcome.cpu_s)
        if outcome.kind.isupper():
            bad.append(f"{number} {source.name}, {'; '.join(done)}: {outcome.kind}\n{outcome.said}")
    return counts, bad, longest_s


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
from hostile_manifests import config_of
from lockstep.testing import TinyTask
from lockstep_recipes.command import train
train(lambda words: (TinyTask(24, 4), config_of(Path({folder!r}), 6)), [])
"""


def by_command(count: int, seed: int, folder: Path) -> list[str]:
    """Resume some as a recipe; return what ends in anything but words."""
    bad = []
    runs = sources(folder / "for commands")
    for number in range(count):
        source, place = runs[number % len(runs)], folder / "command"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(source.folder, place, symlinks=True)
        done = mutate(place, f"{seed} command {number}")
        script = folder / "train.py"
        benchmarks = str(Path(__file__).parent)
        script.write_text(SCRIPT.format(benchmarks=benchmarks, folder=str(place)))
        lockstep = str(Path(sys.executable).with_name("lockstep"))
        command = [lockstep, "launch", "--gpus", "1", str(script)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        said = ended.stdout + ended.stderr
        if ended.returncode not in (0, 2) or "Traceback" in said:
            bad.append(f"command {number}, {'; '.join(done)}: exit {ended.returncode}\n{said}")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--commands", type=int, default=10, help="more, through lockstep launch")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        counts, bad, longest_s = sweep(arguments.count, arguments.seed, Path(name))
        bad += by_command(arguments.commands, arguments.seed, Path(name))
    if arguments.json:
        print(json.dumps({"outcomes": counts, "longest_cpu_s": longest_s, "bad": bad}))
    else:
        for kind, num in counts.most_common():
            print(f"{kind:12}{num:>6}")
        print(
            f"longest {longest_s:.2f} s of CPU time; {arguments.commands} commands; {len(bad)} bad"
        )
        print("\n".join(bad[:20]))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
