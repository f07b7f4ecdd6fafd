"""Faults at named points of a rank: most are reached by a callback of the run.

Owns: where the points are, and doing a fault there. Does not own: which; the schedule says so.
Where no callback is called yet, and between a save and the disk, functions are wrapped, in the
ranks that are armed with such a fault only.
"""

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from chaos.notes import append, claim, note
from chaos.schedule import ASKED, SAVE_POINTS, Fault, Leg
from lockstep import Callback, RunConfig, StepReport, unwrap
from lockstep.data.batch import StepBatch
from lockstep.phases import Phase
from lockstep.world import World

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


def arm(folder: Path, number: int) -> tuple[Leg, "FaultCallback"]:
    """Arm this rank with its faults; return the leg, and the callback that fires most of them."""
    from chaos import schedule

    legs = schedule.read(folder / "chaos" / "schedule.json")
    leg = legs[number] if number < len(legs) else Leg(1, ())
    armed = Armed(folder, number, leg)
    note(folder, "began", leg=number, attempt=armed.attempt, rank=armed.rank)
    points = {fault.point for fault in armed.faults.values()}
    if "rendezvous" in points:
        watch_rendezvous(armed)
    loses_power = any(fault.kind == "power_loss" for fault in armed.faults.values())
    if loses_power or points & {*SAVE_POINTS, "log_flush"}:
        watch_disk(armed)
    armed.reach("import")
    return leg, FaultCallback(armed)


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


class FaultCallback(Callback):
    """Fires faults at the points of a run that callbacks and phases reach.

    It also writes down every step that is done: when, by whom, with which samples.
    """

    def __init__(self, armed: Armed) -> None:
        self.armed = armed

    def configure(self, task: Any, config: RunConfig, world: World) -> RunConfig:
        """Listen to the phases and collectives, from the building of the run on."""
        self.world = world
        world.phase.listeners.append(self.note_phase)
        return config

    def on_run_start(self, run: Any) -> None:
        """Note where the run begins, and hook into its model and its optimizer."""
        armed = self.armed
        armed.begun_at = armed.step = run.step
        if run.world.is_first:
            rejected = [(path.name, reason) for path, reason in run.resumed.rejected]
            note(armed.folder, "goes_on", leg=armed.number, step=armed.step, rejected=rejected)
        unwrap(run.model).register_forward_pre_hook(lambda *_: armed.reach("forward"))
        unwrap(run.model).register_forward_hook(self.after_forward)
        run.optimizer.register_step_pre_hook(lambda *_: armed.reach("before_update"))

    def note_phase(self, phase: Phase, begins: bool) -> None:
        """Strike where a phase begins or ends; listen to collectives once `configure` is over."""
        if (phase, begins) == ("open folder", True):
            self.world.before_collective = self.before_collective
        points = {
            ("build model", False): "restore",
            ("data", True): "loader_next",
            ("update", False): "after_update",
        }
        if (phase, begins) in points:
            self.armed.reach(points[phase, begins])

    def before_collective(self) -> None:
        """Strike before gradients are sent during the backward pass, or collected after it."""
        points = {"backward": "reduce_send", "exchange": "reduce_recv"}
        if self.world.phase.current in points:
            self.armed.reach(points[self.world.phase.current])

    def after_forward(self, model: Any, args: Any, output: Tensor) -> None:
        """Strike in the middle of the backward pass."""
        if output.requires_grad:
            output.register_hook(lambda _: self.armed.reach("backward"))

    def on_step_end(self, run: Any, batch: StepBatch, report: StepReport) -> None:
        """Write down a step that is done."""
        armed, world = self.armed, run.world
        taken = [m.ids.tolist() for m in batch.micro_batches if m.counts]
        ids = ",".join(str(sample) for leaf in taken for sample in leaf)
        where = f"{armed.number}.{armed.attempt} {world.rank} {world.size}"
        told = f"{time.time():.6f} {os.getpid()} {where} {batch.step + 1} {batch.epoch} {ids}"
        append(armed.folder / "chaos" / "steps.txt", told)
        armed.step = batch.step + 1

    def on_run_end(self, run: Any, result: Any) -> None:
        """Strike when everything is saved."""
        self.armed.reach("shutdown")


# No callback is called before the ranks have met, nor between a save and the disk.


def watch_rendezvous(armed: Armed) -> None:
    """Strike between meeting the other ranks and joining their group."""
    from lockstep import world
    from lockstep.dist import process_group

    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    owner: Any = world if is_alone else process_group
    name = "choose_device" if is_alone else "_open_store"
    plain = getattr(owner, name)

    def watched(*args: Any) -> Any:
        result = plain(*args)
        armed.reach("rendezvous")
        return result

    setattr(owner, name, watched)


def watch_disk(armed: Armed) -> None:
    """Come between the run and the disk: opens, writes, flushes and renames of its files."""
    plain = {name: getattr(os, name) for name in ("open", "write", "fsync", "rename")}
    folder = armed.folder.resolve()
    checkpoints, events = (f"{folder / name}/" for name in ("checkpoints", "events"))

    def path_of(file: Any, folder: int | None = None) -> str:
        """Return the path of an open file, or of a name in an open folder."""
        if isinstance(file, int):
            return os.readlink(f"/proc/self/fd/{file}")
        base = os.readlink(f"/proc/self/fd/{folder}") if folder is not None else os.getcwd()
        return os.path.join(base, os.fspath(file))

    def opening(path: Any, flags: int, *more: Any, **words: Any) -> int:
        if flags & os.O_EXCL and path_of(path, words.get("dir_fd")).startswith(checkpoints):
            armed.reach("ckpt_open")
        return int(plain["open"](path, flags, *more, **words))

    def writing(file: int, content: Any) -> int:
        path = path_of(file)
        half = memoryview(content)[: len(content) // 2]
        if path.startswith(checkpoints):
            Disk.wrote(file)
            armed.reach("ckpt_write", lambda: plain["write"](file, half))
        elif path.startswith(events):
            armed.reach("log_flush", lambda: plain["write"](file, half))
        return int(plain["write"](file, content))

    def flushing(file: int) -> None:
        is_saving = path_of(file).startswith(checkpoints.rstrip("/"))
        if is_saving:
            armed.reach("ckpt_fsync")
        plain["fsync"](file)
        if is_saving and not getattr(os, "chaos_never_flushes", False):
            Disk.flushed(file)

    def renaming(old: Any, new: Any, **words: Any) -> None:
        source, target = (
            path_of(old, words.get("src_dir_fd")),
            path_of(new, words.get("dst_dir_fd")),
        )
        if source.startswith(checkpoints):
            is_removal = os.path.basename(target).startswith(".removing")
            armed.reach("ckpt_prune" if is_removal else "ckpt_rename")
            Disk.moved(source, target)
        plain["rename"](old, new, **words)

    os.open, os.write, os.fsync, os.rename = opening, writing, flushing, renaming


if LAUNCHER in os.environ:
    os.register_at_fork(after_in_child=struck_at_fork)
