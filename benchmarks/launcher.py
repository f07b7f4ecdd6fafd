"""How fast does a run go on after a kill, and does anybody stay when the launcher is killed?

    python benchmarks/launcher.py [--kills 20] [--orphans 20] [--at_once 20] [--json FILE]

Kills ranks of a small CPU run under `lockstep launch` and under torchrun, in the same sitting,
and measures from the kill to the next step that is done; kills launchers and looks for workers
a second later; starts many launches at once. Prints a table.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
SCRIPT = """
import os, sys, time, torch
from lockstep import RunConfig, fit
from lockstep.testing import TinyTask
folder = sys.argv[1]
os.makedirs(folder, exist_ok=True)
open(f"{folder}/pid_{os.environ['RANK']}", "w").write(str(os.getpid()))
class Task(TinyTask):
    def loss(self, model, batch, context):
        time.sleep(0.02)
        if context.world.rank == 0:
            open(f"{folder}/beat", "w").write(f"{os.getpid()} {context.step} {time.time()}")
        return super().loss(model, batch, context)
fit(Task(64), RunConfig.parse({
    "output_dir": folder, "max_steps": int(sys.argv[2]), "batch": {"batch_size": 4},
    "device": "cpu", "evaluation": {"every_epochs": None},
    "checkpoint": {"every_steps": 5, "background": False},
    "sinks": {"curves": False}, "log_every": 1, "timeout_s": 60}))
"""


def beat(folder: Path) -> tuple[int, int, float]:
    """Return who computed a step last, which, and when."""
    try:
        pid, step, when = (folder / "beat").read_text().split()
        return int(pid), int(step), float(when)
    except (OSError, ValueError):
        return 0, -1, 0.0


def wait(is_so, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def command(launcher: str, restarts: int, script: Path, folder: Path, steps: int) -> list[str]:
    if launcher == "lockstep":
        head = [str(BIN / "lockstep"), "launch", "--gpus", "2", "--restarts", str(restarts)]
    else:
        head = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node=2"]
        head += [f"--max-restarts={restarts}"]
    return [*head, str(script), str(folder), str(steps)]


def start(words: list[str]) -> subprocess.Popen[bytes]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(words, env=env, stdout=quiet, stderr=quiet, start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def recoveries(launcher: str, num: int, script: Path, folder: Path) -> list[float]:
    """Return the seconds from each kill of a rank to the next step."""
    process = start(command(launcher, num + 1, script, folder, 10**6))
    try:
        return [recovery(folder, kill % 2, beat(folder)[1] + 8) for kill in range(num)]
    finally:
        end(process)


def recovery(folder: Path, rank: int, step: int) -> float:
    """Kill a rank once `step` is reached; return the seconds until a new process computes."""
    wait(lambda: beat(folder)[1] >= step)
    old, killed = beat(folder)[0], time.time()
    os.kill(int((folder / f"pid_{rank}").read_text()), signal.SIGKILL)
    wait(lambda: beat(folder)[0] not in (0, old) and beat(folder)[2] > killed)
    return beat(folder)[2] - killed


def orphan_time(script: Path, folder: Path) -> float:
    """Return how long workers live on after `kill -9` of their launcher."""
    process = start(command("lockstep", 0, script, folder, 10**6))
    wait(lambda: beat(folder)[1] >= 2)
    pids = [int((folder / f"pid_{rank}").read_text()) for rank in range(2)]
    began = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    wait(lambda: not any(map(is_alive, pids)), 30)
    process.wait()
    return time.monotonic() - began


def many(num: int, script: Path, folder: Path) -> tuple[int, int]:
    """Start launches at once; return how many ended well, and how many ran two ranks of theirs."""
    launches = [start(command("lockstep", 0, script, folder / str(n), 3)) for n in range(num)]
    codes = [launch.wait(600) for launch in launches]
    sizes = 0
    for number in range(num):
        first = folder / str(number) / "events" / "rank_0.jsonl"
        second = folder / str(number) / "events" / "rank_1.jsonl"
        started = json.loads(first.read_text().splitlines()[0]) if first.exists() else {}
        sizes += started.get("world_size") == 2 and second.exists()
    return codes.count(0), sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--orphans", type=int, default=20)
    parser.add_argument("--at_once", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[tuple[str, str]] = []
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        for launcher in ("lockstep", "torchrun") if args.kills else ():
            times = recoveries(launcher, args.kills, script, Path(folder) / launcher)
            found[launcher] = times
            rows.append(
                (
                    f"kill -9 of a rank, {launcher}: to the next step, {len(times)} kills",
                    f"median {statistics.median(times):.2f} s, worst {max(times):.2f} s",
                )
            )
        if args.orphans:
            own = Path(folder) / "orphans"
            times = [orphan_time(script, own / str(n)) for n in range(args.orphans)]
            found["orphans"] = times
            within = sum(t < 1 for t in times)
            rows.append(
                (
                    "kill -9 of the launcher: no worker after a second",
                    f"{within} of {len(times)}, worst {max(times):.2f} s",
                )
            )
        if args.at_once:
            well, sizes = many(args.at_once, script, Path(folder) / "many")
            found["at_once"] = [well, sizes]
            rows.append(
                (
                    "launches at once: ended well, with two ranks of their own",
                    f"{well} and {sizes} of {args.at_once}",
                )
            )
    for name, value in rows:
        print(f"{name:<66}{value}")
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
