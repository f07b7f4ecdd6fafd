"""Do two nodes train together, or end with a sentence, whatever their clocks say and who knocks?

    python benchmarks/rendezvous.py                      40 tries with clocks apart, 1 under attack
    python benchmarks/rendezvous.py --skews 600 --tries 3 --messages 0

Both nodes are launchers on this machine. The second one's wall clock is set ahead by a small
library (tests/launch/skewed_clock.c, built with cc). Under attack, strangers send messages to the
head's port for as long as the job runs: random bytes, pickles, half-open connections, a byte
at a time.
"""

import argparse
import asyncio
import json
import os
import pickle
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 300
SCRIPT = """
import sys, time
from pathlib import Path
import torch
from lockstep import World

with World.enter(timeout_s=60) as world:
    print("group of", world.size, flush=True)
    total = world.all_sum(torch.ones(1))
    Path(sys.argv[1], f"there{world.rank}").touch()
    while not Path(sys.argv[1], "end").exists():
        time.sleep(0.02)
    world.barrier()
    print("trained with", int(total), flush=True)
"""


def free_port() -> int:
    """Return a port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Job:
    """Two launchers of one rank each."""

    def __init__(self, folder: Path, second: dict[str, str]) -> None:
        self.folder = folder
        self.port = free_port()
        (folder / "script.py").write_text(SCRIPT)
        token = secrets.token_hex(16)
        self.outputs = [folder / f"node{rank}.txt" for rank in range(2)]
        self.nodes = []
        for rank, env in enumerate(({}, second)):
            shape = ["--gpus", "1", "--nodes", "2", "--head", f"localhost:{self.port}"]
            words = [Path(sys.executable).parent / "lockstep", "launch", *shape]
            with self.outputs[rank].open("wb") as output:
                self.nodes.append(
                    subprocess.Popen(
                        [*words, "--node-rank", str(rank), folder / "script.py", folder],
                        env={**os.environ, "LOCKSTEP_JOB_TOKEN": token, **env},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    def wait_for_ranks(self) -> None:
        """Wait until a rank of each node trains, or a node has ended."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and not any(n.poll() is not None for n in self.nodes):
            if len(list(self.folder.glob("there*"))) == len(self.nodes):
                return
            time.sleep(0.05)

    def result(self) -> tuple[str, str]:
        """Let the job end; return what came of it, in a word and in full."""
        (self.folder / "end").touch()
        try:
            codes = [node.wait(LIMIT_S) for node in self.nodes]
        except subprocess.TimeoutExpired:
            for node in self.nodes:
                node.kill()
                node.wait()
            return "hung", self.text
        if "group of 1" in self.text:
            return "trained alone", self.text
        if codes == [0, 0] and self.text.count("trained with 2") == 2:
            return "trained together", self.text
        both_say = all("lockstep: " in output.read_text() for output in self.outputs)
        return ("ended with a sentence" if all(codes) and both_say else "other"), self.text

    @property
    def text(self) -> str:
        return "\n".join(output.read_text() for output in self.outputs)


def try_skew(clock: Path, skew_s: int) -> str:
    """Run one job whose second node's clock is ahead."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"LD_PRELOAD": str(clock), "CLOCK_SKEW_S": str(skew_s)}
        job = Job(Path(folder), env)
        job.wait_for_ranks()
        return job.result()[0]


class Evil:
    """Unpickled, it touches a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        """Return what runs when it is unpickled."""
        return Path.touch, (self.path,)


async def attack(port: int, touched: Path, num_messages: int) -> Counter[str]:
    """Send so many messages of each kind in turn; return how many of each were sent."""
    sent: Counter[str] = Counter()
    held: list[asyncio.StreamWriter] = []
    kinds = ("random bytes", "a pickle", "half open", "a byte at a time")
    for turn in range(num_messages):
        kind = kinds[turn % len(kinds)]
        try:
            _, writer = await asyncio.open_connection("localhost", port)
            if kind == "random bytes":
                writer.write(secrets.token_bytes(1 + secrets.randbelow(4096)))
            elif kind == "a pickle":
                writer.write(pickle.dumps(Evil(touched)))
            elif kind == "a byte at a time":
                writer.write(b"l")
            if kind in ("half open", "a byte at a time"):
                held.append(writer)
            else:
                writer.close()
            sent[kind] += 1
        except OSError:
            sent["refused"] += 1
        if len(held) > 500:
            held.pop(0).transport.abort()
    for writer in held:
        writer.transport.abort()
    return sent


def try_attack(num_messages: int) -> dict[str, object]:
    """Run one job under attack."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(folder, {})
        job.wait_for_ranks()
        sent = asyncio.run(attack(job.port, folder / "touched", num_messages))
        result, text = job.result()
        return {
            "sent": dict(sent),
            "result": result,
            "unpickled": (folder / "touched").exists(),
            "frames in the log": text.count("frame #") + text.count("Traceback"),
            "lines in the log": len(text.splitlines()),
        }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skews", type=int, nargs="*", default=[20, 60, 600, 3600])
    parser.add_argument("--tries", type=int, default=10, help="for each skew")
    parser.add_argument("--messages", type=int, default=10_000, help="of strangers; 0 for none")
    parser.add_argument("--json", action="store_true", help="print one object")
    args = parser.parse_args()
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        clock = Path(folder) / "skewed_clock.so"
        source = ROOT / "tests" / "launch" / "skewed_clock.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", clock, source, "-ldl"], check=True)
        for skew_s in args.skews:
            results = Counter(try_skew(clock, skew_s) for _ in range(args.tries))
            found[f"clocks {skew_s} s apart"] = dict(results)
            if not args.json:
                shown = ", ".join(f"{count} {result}" for result, count in results.items())
                print(f"clocks {skew_s:>5} s apart   {args.tries} tries: {shown}", flush=True)
    if args.messages:
        found["under attack"] = under = try_attack(args.messages)
        if not args.json:
            print(f"{args.messages} messages of strangers:")
            for name, value in under.items():
                print(f"  {name:<18} {value}")
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
