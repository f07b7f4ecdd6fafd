"""When the network between two nodes is cut during a save, can both halves commit checkpoints?

    python benchmarks/link_cuts.py [--count 100] [--seed 0] [--at-once 6] [--json] [--keep FOLDER]

In each try, two `lockstep launch --nodes 2` in network namespaces of their own train a small model
in exact mode, with one output folder and a save after every step. Before a random call to the disk
in a random save, a rank waits until the cable between the nodes is pulled: nothing arrives, and
nobody is told. In most of the tries the call then takes long, as on storage behind the same cable:
some seconds, or until another group has taken the folder over. Then one of four things happens:

    restored      the cable is put back after a while, before or after the ranks have given up
    for good      it never is; once both launchers have ended, one node resumes with --nodes 1
    head alone    at once, an operator ends node 0's launcher and resumes there with --nodes 1;
    other alone   or does so on node 1. The half that is left runs on, cut off or connected again

In most tries file locks do not reach the other node: each has a lock file of its own, as on
a file system without network locks. Afterwards the run must have finished, every checkpoint must
verify and equal, bit by bit, that of the same step in a run that was never cut, later checkpoints
must not be of earlier groups, no launcher may have returned 0 unless both nodes trained to the end,
each that failed must have said why, and no process may be left. Prints a table, and exits with 1 if
anything is wrong; needs root. Its columns: cuts with a checkpoint half written, starts refused
because the folder was in use, groups that were refused a commit because another had taken over,
and commits of such groups that were set aside.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lockstep.checkpoint import CheckpointStore, generation
from lockstep.checkpoint import store as store_module
from lockstep.config import RunConfig
from lockstep.task import Context, PartialLoss
from lockstep.testing import TinyTask

HERE = Path(__file__).resolve().parent
NUM_STEPS = 10
STEP_S = 0.02
TIMEOUT_S = 5.0
"""How long a rank waits for another one in a collective."""
WAIT_S = 6.0
"""How long a launcher waits for the other node to come back, where it does not."""
LONG_WAIT_S = 60.0
"""And where it does."""
LIMIT_S = 150.0
"""A launcher that takes longer is stuck."""
RETRY_S = 60.0
"""For so long an operator starts a half again that was told that the folder is in use."""
ENDINGS = ("restored", "for good", "head alone", "other alone")
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18


@dataclass(frozen=True)
class Plan:
    """What happens in one try."""

    ending: str
    is_sharded: bool
    is_background: bool
    keep_last: int
    locks_reach: bool
    restarts: int
    cut_rank: int
    cut_save: int
    cut_place: float
    """Before which call to the disk, as a share of those that the save before it made."""
    stall_s: float
    """How long that call takes then."""
    outlasts: bool
    """Whether so long counts from when another group takes the folder over."""
    pause_s: float
    """Before the cable is put back, or the operator acts."""
    is_restored_later: bool
    """Whether the half that is left is connected again after the operator has acted."""
    is_killed: bool
    """Whether the operator ends the launcher with SIGKILL, or with SIGTERM twice."""
    is_fenced: bool = True
    """Whether ranks look who has taken the folder over; without, a test sees two chains."""

    @classmethod
    def draw(cls, rng: random.Random, ending: str) -> "Plan":
        is_sharded = rng.random() < 0.5
        locks_reach = rng.random() < 0.4
        cut_rank = rng.choice([0, 0, 1]) if is_sharded else 0
        left = {"head alone": 1, "other alone": 0}.get(ending)
        outlasts = cut_rank == left and not locks_reach and rng.random() < 0.9
        return cls(
            ending,
            is_sharded,
            rng.random() < 0.5,
            rng.choice([2, 100]),
            locks_reach,
            2 if ending == "restored" else rng.choice([0, 2]),
            cut_rank,
            rng.randint(2, NUM_STEPS - 2),
            rng.random(),
            rng.choice([0, rng.uniform(0, 15), rng.uniform(5, 15)])
            if not outlasts
            else rng.uniform(0, 0.5),
            outlasts,
            rng.uniform(0, 2 * TIMEOUT_S) if ending == "restored" else rng.uniform(0, 1),
            rng.random() < 0.5,
            rng.random() < 0.5,
        )


# --- A rank ------------------------------------------------------------------------------------


class Moment:
    """Has the cable pulled before one call to the disk, in this process."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        from fencing import CALLS

        self.plan = plan
        self.folder = folder
        self.num_saves = 0
        self.num_calls = 0
        self.target: int | None = None
        self.lock = threading.Lock()
        self.checkpoints = str(folder / "run" / "checkpoints")
        for name in CALLS:
            setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if self.is_of_save(args[0] if args else "."):
                with self.lock:
                    self.num_calls += 1
                    is_now = self.num_calls == self.target
                if is_now:
                    self.cut()
            return real(*args, **named)

        return call

    def is_of_save(self, place: Any) -> bool:
        """Say whether a path, or an open file, is in the folder of checkpoints."""
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else place
            return str(path).startswith(self.checkpoints)
        return False

    def begin_save(self) -> None:
        """Note that a save begins; the one before it tells how many calls to expect."""
        self.num_saves += 1
        with self.lock:
            is_due = self.num_saves == self.plan.cut_save
            is_late = self.target is not None and self.num_calls < self.target
            self.target = max(1, round(self.plan.cut_place * self.num_calls)) if is_due else None
            self.num_calls = 0
        if is_late:
            self.cut()

    def cut(self) -> None:
        """Ask for the cut, once, and go on when it is done."""
        self.target = None
        try:
            os.close(os.open(self.folder / "cut_now", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        deadline = time.monotonic() + 30
        while not os.path.exists(self.folder / "cut_done") and time.monotonic() < deadline:
            time.sleep(0.001)
        own = set(self.folder.glob("run/checkpoints/generation_*"))
        while self.plan.outlasts and time.monotonic() < deadline:
            if set(self.folder.glob("run/checkpoints/generation_*")) - own:
                break
            time.sleep(0.01)
        time.sleep(self.plan.stall_s)


class CutTask(TinyTask):
    """A tiny task that notices its saves, and remembers which group it trains in."""

    def __init__(self, moment: Moment | None) -> None:
        super().__init__(num_samples=48)
        self.moment = moment
        self.has_trained = False
        """Since the last save, which asks for the state more than once."""
        self.awaited: Path | None = None
        """A checkpoint of the other half, to be committed before this one takes a step."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        self.has_trained = True
        deadline = time.monotonic() + 30
        while self.awaited and not self.awaited.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.awaited = None
        time.sleep(STEP_S / 4)  # a step has four micro-batches
        return super().loss(model, batch, context)

    def state(self) -> dict[str, Any]:
        if self.moment is not None and self.has_trained:
            self.moment.begin_save()
        self.has_trained = False
        return {"world_size": int(os.environ.get("WORLD_SIZE", "1"))}


def config(folder: Path, plan: Plan | None = None) -> RunConfig:
    saving = {"every_steps": 1, "keep_last": 100}
    if plan is not None:
        saving |= {"sharded": plan.is_sharded, "background": plan.is_background}
        saving |= {"keep_last": plan.keep_last}
    return RunConfig.parse(
        {
            "output_dir": str(folder / "run"),
            "max_steps": NUM_STEPS,
            "batch": {"batch_size": 2, "global_batch_size": 8},
            "evaluation": {"every_epochs": None},
            "checkpoint": saving,
            "sinks": {"curves": False},
            "exact": True,
            "timeout_s": TIMEOUT_S,
            "device": "cpu",
        }
    )


def be_rank(folder: Path) -> NoReturn:
    """Train as the plan in the folder says."""
    from lockstep_recipes.command import train

    plan = Plan(**json.loads((folder / "plan.json").read_text()))
    is_cut_here = int(os.environ["RANK"]) == plan.cut_rank and os.environ["WORLD_SIZE"] == "2"
    moment = Moment(plan, folder) if is_cut_here else None
    task = CutTask(moment)
    if not plan.is_fenced:
        generation.raise_if_taken_over = lambda *_: None
        store_module._is_stale = lambda *_: False
        if os.environ["WORLD_SIZE"] == "1":
            # A half that resumed would otherwise race the other to the same checkpoint.
            task.awaited = folder / "run" / "checkpoints" / f"step_{plan.cut_save:08d}"
    train(lambda _: (task, config(folder, plan)), [])


# --- Launchers -----------------------------------------------------------------------------------


class Launcher:
    """`lockstep launch` on one of the machines, forked from here, where torch is imported."""

    def __init__(self, what: str, machine: "Machine", folder: Path, words: Sequence[str]) -> None:
        self.what = what
        self.output = folder / f"{what.replace(' ', '_')}.txt"
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 98
            try:
                be_launcher(machine, self.output, [*words, __file__, "--train", str(folder)])
            except SystemExit as left:  # refused before any rank was started
                code = int(left.code or 0)
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def finish(self, limit_s: float = LIMIT_S) -> int | None:
        """Return the exit code; None if it was stuck, and had to be killed."""
        deadline = time.monotonic() + limit_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        return self.code

    def end_by_hand(self, is_killed: bool) -> None:
        """End it as an operator does who does not want to wait."""
        for number in [signal.SIGKILL] if is_killed else [signal.SIGTERM, signal.SIGTERM]:
            if self.poll() is None:
                os.kill(self.pid, number)
                self.finish_within(1.5)
        self.finish(20)

    def finish_within(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    @property
    def sentences(self) -> list[str]:
        """Return what it says went wrong; the line that begins a run is not among it."""
        own = [line for line in self.text.splitlines() if line.startswith("lockstep: ")]
        return [line for line in own if not line.startswith("lockstep: tiny on ")]


def be_launcher(machine: "Machine", output: Path, words: Sequence[str]) -> None:
    """Move to the machine and run the command there."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    # A launcher starts without what pytest, or an earlier launch, has put up in this process.
    logging.getLogger().handlers.clear()
    vars(forkserver._forkserver).update(vars(forkserver.ForkServer()))  # type: ignore[attr-defined]
    machine.enter()
    from lockstep.cli.main import main

    sys.argv = ["lockstep", "launch", *words]
    main()


@dataclass
class Machine:
    """A network namespace with a host name, and perhaps a lock file of its own."""

    name: str
    space: str
    hosts: Path
    own_lock: Path | None = None
    lock: Path | None = None
    env: dict[str, str] = field(default_factory=dict)

    def enter(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)

        def must(code: int) -> None:
            if code:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

        space = os.open(f"/run/netns/{self.space}", os.O_RDONLY)
        must(libc.setns(space, CLONE_NEWNET))
        os.close(space)
        must(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS))
        must(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
        must(libc.mount(str(self.hosts).encode(), b"/etc/hosts", None, MS_BIND, None))
        if self.own_lock is not None and self.lock is not None:
            source, target = str(self.own_lock).encode(), str(self.lock).encode()
            must(libc.mount(source, target, None, MS_BIND, None))
        socket.sethostname(self.name)
        os.environ.update(self.env)

    def processes(self) -> list[int]:
        """Return what runs on it."""
        said = subprocess.run(
            ["ip", "netns", "pids", self.space], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in said.stdout.split()]


# --- One try -------------------------------------------------------------------------------------


class Try:
    """Two nodes that are cut apart once, and what becomes of them."""

    def __init__(self, network: Any, names: Sequence[str], folder: Path, plan: Plan) -> None:
        self.network = network
        self.folder = folder
        self.plan = plan
        self.faults: list[str] = []
        self.is_half_written = False
        (folder / "run").mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps(asdict(plan)))
        token = {"LOCKSTEP_JOB_TOKEN": secrets.token_hex(16), "OMP_NUM_THREADS": "1"}
        self.machines = []
        for name in names:
            machine = Machine(name, network.prefix + name, network.hosts, env=token)
            if not plan.locks_reach:
                machine.lock = folder / "run" / "lock"
                machine.own_lock = folder / f"lock_{name}"
                machine.lock.touch()
                machine.own_lock.touch()
            self.machines.append(machine)
        self.started: list[Launcher] = []

    def launch(self, what: str, node: int, *words: str) -> Launcher:
        one = Launcher(what, self.machines[node], self.folder, ["--gpus", "1", *words])
        self.started.append(one)
        return one

    def run(self) -> None:
        plan = self.plan
        head = f"{self.network.address(self.machines[0].name)}:29500"
        wait_s = LONG_WAIT_S if plan.ending == "restored" else WAIT_S
        shared = ("--nodes", "2", "--head", head, "--wait", f"{wait_s:g}")
        own = ("--restarts", str(plan.restarts), "--node-rank")
        both = [self.launch(f"node {n}", n, *shared, *own, str(n)) for n in range(2)]
        try:
            if self.cut(both):
                getattr(self, plan.ending.replace(" ", "_"))(both)
        finally:
            for name in (machine.name for machine in self.machines):
                self.network.mend(name)
            self.check_processes()

    def cut(self, both: Sequence[Launcher]) -> bool:
        """Pull the cable when a rank asks for it."""
        asked, done = self.folder / "cut_now", self.folder / "cut_done"
        deadline = time.monotonic() + LIMIT_S
        while not asked.exists():
            if time.monotonic() > deadline or None not in [one.poll() for one in both]:
                self.faults.append(f"never came to the cut: {both[0].text[-500:]}")
                return False
            time.sleep(0.002)
        self.network.cut(self.machines[1].name)
        writing = list(self.folder.glob("run/checkpoints/.writing_*"))
        self.is_half_written = bool(writing)
        done.touch()
        return True

    # --- What may happen then ---

    def restored(self, both: Sequence[Launcher]) -> None:
        time.sleep(self.plan.pause_s)
        self.network.mend(self.machines[1].name)
        codes = [one.finish() for one in both]
        if codes != [0, 0]:
            self.faults.append(f"connected again, the launchers returned {codes}")
        self.check_chain()

    def for_good(self, both: Sequence[Launcher]) -> None:
        self.check_failed(both)
        self.finish_alone(self.plan.cut_save % 2)

    def head_alone(self, both: Sequence[Launcher]) -> None:
        self.alone(both, 0)

    def other_alone(self, both: Sequence[Launcher]) -> None:
        self.alone(both, 1)

    def alone(self, both: Sequence[Launcher], node: int) -> None:
        time.sleep(self.plan.pause_s)
        both[node].end_by_hand(self.plan.is_killed)
        if self.plan.is_restored_later:
            threading.Timer(2.0, self.network.mend, [self.machines[1].name]).start()
        self.finish_alone(node)
        self.check_failed([both[1 - node]])
        self.check_chain()  # once more: the other half may have ended later

    def finish_alone(self, node: int) -> None:
        """Resume on one node, as often as the folder is in use by what is left of the other."""
        deadline = time.monotonic() + RETRY_S
        number = 0
        while True:
            number += 1
            one = self.launch(f"node {node} alone {number}", node, "--nodes", "1")
            code = one.finish()
            if code != 2 or "is in use by" not in one.text or time.monotonic() > deadline:
                break
            time.sleep(2)
        if code != 0:
            self.faults.append(f"{one.what} returned {code}: {one.text[-500:]}")
        self.check_chain()

    # --- What must be so ---

    def check_failed(self, launchers: Sequence[Launcher]) -> None:
        """Check that a launcher of half a group did not succeed, and said why."""
        for one in launchers:
            code = one.finish()
            if code is None:
                self.faults.append(f"{one.what} was stuck: {one.text[-500:]}")
            elif code == 0:
                self.faults.append(f"{one.what} returned 0, and was one half of the group")
            elif code < 0 or not one.sentences:
                self.faults.append(f"{one.what} returned {code} without a word: {one.text[-500:]}")

    def check_processes(self) -> None:
        deadline = time.monotonic() + 10
        while True:
            left = [pid for machine in self.machines for pid in machine.processes()]
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if left:
            self.faults.append(f"{len(left)} processes were left: {left}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for one in self.started:
            one.finish(1)

    def check_chain(self) -> None:
        """Check that there is one chain of checkpoints, and that a resume finds its end.

        Both halves compute the same bits, so each checkpoint says how large its group was: up to
        where a half has resumed alone they must be of both, and after that of that half.
        """
        store = CheckpointStore(self.folder / "run" / "checkpoints", recipe="tiny")
        newest, rejected = store.latest()
        if newest is None or newest.step != NUM_STEPS:
            self.faults.append(f"a resume finds {newest.step if newest else None}: {rejected}")
            return
        alone = [one.text for one in self.started if "alone" in one.what and one.poll() == 0]
        resumed = re.search(r"^resumed at step (\d+)", alone[0], re.MULTILINE) if alone else None
        last_of_both = NUM_STEPS
        if alone:
            last_of_both = int(resumed[1]) if resumed else 0
        for step in store._accepted():  # what a resume may go back to
            found = store.open(store.path(step))
            for part in ("model", "optimizer"):
                if not is_same(found.load(part), REFERENCE[step][part]):
                    self.faults.append(f"{part} of step {step} is not that of an unbroken run")
            size = found.load("task")["world_size"]
            if size != (2 if step <= last_of_both else 1):
                half = "both halves, after one had resumed" if size == 2 else "one half"
                self.faults.append(f"step {step} is of {half} at step {last_of_both}")


REFERENCE: dict[int, dict[str, Any]] = {}
"""The checkpoints of a run that was never cut, by their step."""


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def train_unbroken(folder: Path) -> None:
    """Fill in what a run on one rank saves that nobody disturbs."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            from lockstep.trainer import fit

            code = fit(CutTask(None), config(folder)).exit_code
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    store = CheckpointStore(folder / "run" / "checkpoints", recipe="tiny")
    for step in store.steps():
        found = store.open(store.path(step))
        REFERENCE[step] = {part: found.load(part) for part in ("model", "optimizer")}


# --- Many tries ----------------------------------------------------------------------------------


def attempt(network: Any, lane: int, number: int, plan: Plan, folder: Path) -> dict[str, Any]:
    """Make one try, and return what is to be said of it."""
    names = network.names[2 * lane : 2 * lane + 2]
    one = Try(network, names, folder / f"try_{number}", plan)
    began = time.monotonic()
    try:
        one.run()
    except Exception as error:
        one.faults.append(f"{type(error).__name__}: {error}")
    finally:
        for left in one.started:
            left.finish(0)
    superseded = len(list(one.folder.glob("run/checkpoints/superseded_*")))
    return {
        "try": number,
        "plan": asdict(plan),
        "half_written": one.is_half_written,
        "codes": {launcher.what: launcher.code for launcher in one.started},
        "in_use": sum("is in use by" in launcher.text for launcher in one.started),
        "refused": sum("another run took over" in launcher.text for launcher in one.started),
        "superseded": superseded,
        "seconds": time.monotonic() - began,
        "faults": one.faults,
    }


def sweep(
    plans: Sequence[Plan], at_once: int, folder: Path, keeps: bool = False
) -> list[dict[str, Any]]:
    """Make a try of each plan, a few at once, and return what each has found."""
    sys.path.insert(0, str(HERE.parent / "tests" / "launch"))
    from namespaces import network

    import lockstep.cli.main
    import lockstep.launch.local  # noqa: F401 (imported once, not in every launcher)

    lanes = min(at_once, len(plans))
    train_unbroken(folder / "unbroken")

    def run_lane(connected: Any, lane: int) -> None:
        for number in range(lane, len(plans), lanes):
            found = attempt(connected, lane, number, plans[number], folder)
            (folder / f"found_{number}.json").write_text(json.dumps(found))
            if not (found["faults"] or keeps):
                shutil.rmtree(folder / f"try_{number}", ignore_errors=True)

    with network(folder, 2 * lanes) as connected:
        pids = []
        for lane in range(lanes):
            pid = os.fork()
            if pid == 0:
                try:
                    run_lane(connected, lane)
                finally:
                    os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
    files = [folder / f"found_{number}.json" for number in range(len(plans))]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def lines(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table."""
    sums = ("half_written", "in_use", "refused", "superseded")
    titles = ("tries", "one chain", "half written", "in use", "refused", "set aside", "mean s")
    yield f"{'then':12}" + "".join(f"{title:>14}" for title in titles)
    for ending in ENDINGS:
        some = [one for one in found if one["plan"]["ending"] == ending]
        if some:
            mean_s = sum(one["seconds"] for one in some) / len(some)
            cells = [len(some), sum(not one["faults"] for one in some)]
            cells += [sum(int(one[name]) for one in some) for name in sums]
            yield f"{ending:12}" + "".join(f"{n:>14}" for n in cells) + f"{mean_s:>14.1f}"
    codes: Counter[str] = Counter()
    for one in found:
        for what, code in one["codes"].items():
            codes[f"{'alone' if 'alone' in what else 'of two nodes'}: {code}"] += 1
    yield "exit codes  " + ", ".join(f"{what} x {num}" for what, num in sorted(codes.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path, help="a new folder for what the tries leave")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        be_rank(arguments.train)
    torch.set_num_threads(1)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        rng = random.Random(arguments.seed)
        plans = [Plan.draw(rng, ENDINGS[n % len(ENDINGS)]) for n in range(arguments.count)]
        found = sweep(plans, arguments.at_once, folder, bool(arguments.keep))
    faults = [f"try {one['try']}: {fault}" for one in found for fault in one["faults"]]
    num_fine = sum(not one["faults"] for one in found)
    if arguments.json:
        print(json.dumps({"tries": found, "faults": faults}))
    else:
        print("\n".join(lines(found)))
        took_s = time.monotonic() - began
        print(f"{num_fine} of {arguments.count} tries left one chain, in {took_s:.0f} s")
        print("\n".join(faults[:20]))
    return int(num_fine < arguments.count)


if __name__ == "__main__":
    sys.exit(main())
