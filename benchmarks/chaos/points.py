"""Faults at named points of a rank: lockstep's functions are wrapped before it trains.

Owns: where the points are, and doing a fault there. Does not own: which; the schedule says so.
Only what a launch is armed with is wrapped, but for one line a step that every rank writes
down: who took which samples, and when.
"""

import ctypes
import errno
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaos.notes import append, claim, note
from chaos.schedule import ASKED, SAVE_POINTS, Fault, Leg

LAUNCHER = "CHAOS_LAUNCHER"
"""Names the process that launches, in the environment of all it starts."""
SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT, "usr1": signal.SIGUSR1}
STOP_S = 1.0
OWN_EXIT_CODE = 7
TEARS = ("kill", "segfault", "power_loss", "no_space")
"""Faults that may leave half of what was being written."""


class PlantedError(Exception):
    """An error nobody foresaw."""


# --- Doing it ---------------------------------------------------------------------------------


def strike(fault: Fault, folder: Path) -> None:
    """Do a fault to this process."""
    own = os.getpid()
    match fault.kind:
        case "kill":
            os.kill(own, signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(OWN_EXIT_CODE)
        case "exception":
            raise PlantedError(str(fault))
        case "no_space":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "io_error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        case "stop":
            wake = f"sleep {STOP_S}; kill -CONT {own}"
            subprocess.Popen(["sh", "-c", wake], start_new_session=True, close_fds=True)
            os.kill(own, signal.SIGSTOP)
        case "launcher":
            os.kill(int(os.environ[LAUNCHER]), signal.SIGKILL)
        case "worker":
            kill_loader_worker(own)
        case "second":
            start_second(folder)
        case "flip":
            flip_newest(folder)
            os.kill(own, signal.SIGKILL)
        case "power_loss":
            Disk.lose_power()
            os.kill(own, signal.SIGKILL)
        case _ if fault.kind in ASKED:
            os.kill(own, SIGNALS[fault.kind])


def kill_loader_worker(rank_pid: int) -> None:
    """Kill a process that reads samples for a rank, if it has one."""
    import psutil

    with suppress(psutil.Error):
        for child in psutil.Process(rank_pid).children():
            if child.name() not in ("tee", "sh"):
                child.kill()
                return


def start_second(folder: Path) -> None:
    """Start a second run in the folder while this one holds it, and wait for its end."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    words = [*sys.argv[1:3], str(10**6), *sys.argv[4:]]
    command = [sys.executable, "-m", "chaos.train", *words]
    code = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, check=False).returncode
    note(folder, "second_left", code=code)


def flip_newest(folder: Path) -> None:
    """Turn over one bit of the newest checkpoint, where there is an older one to go back to."""
    steps = sorted((folder / "checkpoints").glob("step_*"))
    if len(steps) < 2:
        return
    for path in sorted(steps[-1].glob("[mo]*.safetensors")):  # of the model, of the optimizer
        with suppress(OSError), path.open("r+b") as file:
            # In a weight and not in the header; in its mantissa, so that the run would go on.
            place = os.fstat(file.fileno()).st_size - 6
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 0x20]))
            note(folder, "damaged", path=steps[-1].name)
            return


class Disk:
    """What a power loss would take: bytes and names that were never flushed.

    Everything a save writes, renames and flushes is noted. Losing power empties every file that
    was written to since it was flushed, and takes back every rename in a folder that was not.
    """

    unflushed: dict[str, None] = {}
    renamed: list[tuple[str, str]] = []

    @classmethod
    def wrote(cls, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if "/checkpoints/" in path:  # what the rig itself writes down is safe
            cls.unflushed[path] = None

    @classmethod
    def flushed(cls, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        cls.unflushed.pop(path, None)
        cls.renamed = [pair for pair in cls.renamed if os.path.dirname(pair[1]) != path]

    @classmethod
    def moved(cls, old: str, new: str) -> None:
        old, new = os.path.realpath(old), os.path.realpath(new)
        cls.renamed.append((old, new))
        cls.unflushed = {path.replace(old, new, 1): None for path in cls.unflushed}

    @classmethod
    def lose_power(cls) -> None:
        for path in cls.unflushed:
            with suppress(OSError):
                os.truncate(path, 0)
        for old, new in reversed(cls.renamed):
            with suppress(OSError):
                os.replace(new, old)


# --- Where it strikes -------------------------------------------------------------------------


class Armed:
    """The faults of this rank in this launch, and how far the launch has come."""

    def __init__(self, folder: Path, number: int, leg: Leg) -> None:
        self.folder, self.number = folder, number
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.faults = {
            index: fault
            for index, fault in enumerate(leg.faults)
            if fault.point and fault.attempt == self.attempt and self._is_mine(fault, leg)
        }
        self.passed = dict.fromkeys(self.faults, 0)
        self.begun_at: int | None = None
        self.step = 0

    def _is_mine(self, fault: Fault, leg: Leg) -> bool:
        first_alone = SAVE_POINTS[3:] if leg.sharded else SAVE_POINTS
        on_first = fault.point in (*first_alone, "log_flush") or fault.kind == "power_loss"
        return self.rank == (0 if on_first else fault.rank % leg.size)

    def reach(self, point: str, before: Callable[[], object] | None = None) -> None:
        """Strike if something is due at this point; `before` is done just before that."""
        for index, fault in self.faults.items():
            if fault.point != point or self._is_early(fault):
                continue
            self.passed[index] += 1
            if self.passed[index] == fault.nth and claim(self.folder, f"{self.number}_{index}"):
                note(self.folder, "struck", leg=self.number, fault=index, step=self.step)
                if before and fault.kind in TEARS:
                    before()
                strike(fault, self.folder)

    def _is_early(self, fault: Fault) -> bool:
        return self.begun_at is not None and self.step < self.begun_at + fault.gap


def arm(folder: Path, number: int) -> Leg:
    """Wrap what this rank is to be struck in; return the leg."""
    from chaos import schedule

    legs = schedule.read(folder / "chaos" / "schedule.json")
    leg = legs[number] if number < len(legs) else Leg(1, ())
    armed = Armed(folder, number, leg)
    note(folder, "began", leg=number, attempt=armed.attempt, rank=armed.rank)
    keep_count(armed)
    points = {fault.point for fault in armed.faults.values()}
    for point in points:
        PLACES.get(point, lambda armed: None)(armed)
    if points & set(SAVE_POINTS) or any(f.kind == "power_loss" for f in armed.faults.values()):
        watch_saves(armed)
    armed.reach("import")
    return leg


def arm_fork(folder: Path, number: int, leg: Leg) -> None:
    """Leave word of a fault for whichever rank is forked next."""
    path = word_at_fork(os.getpid())
    path.unlink(missing_ok=True)
    for index, fault in enumerate(leg.faults):
        if fault.point == "fork":
            told = {"folder": str(folder), "leg": number, "index": index, "kind": fault.kind}
            path.write_text(json.dumps(told))


def word_at_fork(launcher: int) -> Path:
    return Path(tempfile.gettempdir()) / f"chaos_at_fork_{launcher}"


def struck_at_fork() -> None:
    """Strike in a process that was just forked, before anything else happens in it."""
    path = word_at_fork(int(os.environ[LAUNCHER]))
    try:
        told = json.loads(path.read_text())
        path.unlink()
    except (OSError, ValueError):
        return
    folder = Path(told["folder"])
    note(folder, "struck", leg=told["leg"], fault=told["index"], step=0)
    strike(Fault(told["kind"], "fork"), folder)


def around(
    owner: Any,
    name: str,
    before: Callable[..., object] | None = None,
    after: Callable[..., object] | None = None,
) -> None:
    """Have `before` and `after` called with the arguments each time `owner.name` is."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def wrapped(*args: Any, **words: Any) -> Any:
        if before:
            before(*args)
        result = plain(*args, **words)
        if after:
            after(*args)
        return result

    setattr(owner, name, wrapped)


def keep_count(armed: Armed) -> None:
    """Write down every step that is done: when, by whom, with which samples."""
    from lockstep.trainer import Trainer

    path = armed.folder / "chaos" / "steps.txt"

    def begin(trainer: Any, run: Any, *_: Any) -> None:
        armed.begun_at = armed.step = run.progress.step
        if run.world.is_first:
            rejected = [(path.name, reason) for path, reason in run.rejected]
            note(armed.folder, "goes_on", leg=armed.number, step=armed.step, rejected=rejected)

    def record_step(trainer: Any, report: Any, batch: Any) -> None:
        world = trainer.run.world
        taken = [m.ids.tolist() for m in batch.micro_batches if m.counts]
        ids = ",".join(str(sample) for leaf in taken for sample in leaf)
        where = f"{armed.number}.{armed.attempt} {world.rank} {world.size}"
        told = f"{time.time():.6f} {os.getpid()} {where} {batch.step + 1} {batch.epoch} {ids}"
        append(path, told)
        armed.step = batch.step + 1

    around(Trainer, "__init__", begin)
    around(Trainer, "record_step", record_step)


def _rendezvous(armed: Armed) -> None:
    from lockstep.dist import process_group, world

    around(process_group, "_open_store", after=lambda *_: armed.reach("rendezvous"))
    if os.environ.get("WORLD_SIZE", "1") == "1":
        around(world, "choose_device", lambda *_: armed.reach("rendezvous"))


def _restore(armed: Armed) -> None:
    from lockstep.run import build as setup

    # Half of it is loaded by then; where nothing is to be restored, the model was just built.
    around(setup.Run, "_load_optimizer", lambda *_: armed.reach("restore"))
    around(setup, "fingerprint", lambda *_: armed.reach("restore"))


def _loader_next(armed: Armed) -> None:
    from lockstep.trainer import Trainer

    around(Trainer, "_fetch", lambda *_: armed.reach("loader_next"))


def _forward(armed: Armed) -> None:
    from chaos.train import Net

    around(Net, "forward", lambda *_: armed.reach("forward"))


def _backward(armed: Armed) -> None:
    from chaos.train import Chaotic

    plain = Chaotic.loss

    def loss(task: Any, model: Any, batch: Any, context: Any) -> Any:
        part = plain(task, model, batch, context)
        if context.training:
            part.loss_sum.register_hook(lambda _: armed.reach("backward"))
        return part

    Chaotic.loss = loss  # type: ignore[method-assign]


def _reduce_send(armed: Armed) -> None:
    from lockstep.dist.world import World

    around(World, "exchange", lambda *_: armed.reach("reduce_send"))


def _reduce_recv(armed: Armed) -> None:
    from lockstep.dist.world import World

    around(World, "all_pieces", lambda *_: armed.reach("reduce_recv"))


def _before_update(armed: Armed) -> None:
    import torch

    around(torch.optim.AdamW, "step", lambda *_: armed.reach("before_update"))


def _mid_update(armed: Armed) -> None:
    import torch

    plain = torch.optim.AdamW.step

    def step(optimizer: Any, *args: Any) -> None:
        groups = optimizer.param_groups
        for number, group in enumerate(groups):
            if number:
                armed.reach("mid_update")
            optimizer.param_groups = [group]
            plain(optimizer, *args)
        optimizer.param_groups = groups

    torch.optim.AdamW.step = step  # type: ignore[method-assign]


def _after_update(armed: Armed) -> None:
    from lockstep.trainer import Trainer

    around(Trainer, "record_step", lambda *_: armed.reach("after_update"))


def _log_flush(armed: Armed) -> None:
    from lockstep.observe.events import EventLog

    def torn(log: Any, text: str) -> Callable[[], object]:
        return lambda: os.write(log._file, text[: len(text) // 2].encode())

    around(EventLog, "_append", lambda log, text: armed.reach("log_flush", torn(log, text)))


def _shutdown(armed: Armed) -> None:
    from lockstep.dist.world import World
    from lockstep.trainer import Trainer

    around(Trainer, "finish", lambda *_: armed.reach("shutdown"))
    around(World, "leave", lambda *_: armed.reach("shutdown"))


def watch_saves(armed: Armed) -> None:
    """Come between a save and the disk: its opens, writes, flushes and renames."""
    from lockstep.checkpoint.store import CheckpointStore

    saving = threading.local()
    plain_prune = CheckpointStore._prune
    plain = {name: getattr(os, name) for name in ("open", "write", "fsync", "rename")}

    def watched(write: Callable[..., Any]) -> Callable[..., Any]:
        def save(*args: Any) -> Any:
            was_saving, saving.now = is_now(), True
            try:
                return write(*args)
            finally:
                saving.now = was_saving

        return save

    def is_now() -> bool:
        return getattr(saving, "now", False)

    def opening(path: Any, flags: int, *more: Any, **words: Any) -> int:
        if is_now() and flags & os.O_EXCL:
            armed.reach("ckpt_open")
        return int(plain["open"](path, flags, *more, **words))

    def writing(file: int, content: Any) -> int:
        if is_now():
            Disk.wrote(file)
            half = memoryview(content)[: len(content) // 2]
            armed.reach("ckpt_write", lambda: plain["write"](file, half))
        return int(plain["write"](file, content))

    def flushing(file: int) -> None:
        if is_now():
            armed.reach("ckpt_fsync")
            plain["fsync"](file)
            if not getattr(os, "chaos_never_flushes", False):
                Disk.flushed(file)
            return
        plain["fsync"](file)

    def renaming(old: Any, new: Any, **words: Any) -> None:
        if is_now():
            armed.reach("ckpt_rename")
            Disk.moved(os.fspath(old), os.fspath(new))
        plain["rename"](old, new, **words)

    def pruning(*args: Any) -> None:
        armed.reach("ckpt_prune")
        plain_prune(*args)

    for name in ("save", "write_share"):
        setattr(CheckpointStore, name, watched(getattr(CheckpointStore, name)))
    CheckpointStore._prune = pruning  # type: ignore[method-assign]
    os.open, os.write, os.fsync, os.rename = opening, writing, flushing, renaming


PLACES: dict[str, Callable[[Armed], None]] = {
    "rendezvous": _rendezvous,
    "restore": _restore,
    "loader_next": _loader_next,
    "forward": _forward,
    "backward": _backward,
    "reduce_send": _reduce_send,
    "reduce_recv": _reduce_recv,
    "before_update": _before_update,
    "mid_update": _mid_update,
    "after_update": _after_update,
    "log_flush": _log_flush,
    "shutdown": _shutdown,
}

if LAUNCHER in os.environ:
    os.register_at_fork(after_in_child=struck_at_fork)
