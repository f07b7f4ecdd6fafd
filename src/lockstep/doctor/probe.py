"""Look into a job without training it: run its script up to `fit`, then measure what it would do.

Owns: the stand-in for `fit`, and one look at each part of the run the script asks for:
folder, data, contract, model, loader, step, save. Nothing stays behind. Does not own:
what the numbers mean; `job.py` judges them. Started as `python -m lockstep.doctor.probe`
in a process of its own, since a user's script does what it likes.
"""

import importlib
import importlib.util
import json
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from torch import Tensor, nn

import lockstep.run.build
import lockstep.step.train_step
import lockstep.trainer
from lockstep.checkpoint import Checkpoint, CheckpointStore, FolderLock, flatten, snapshot
from lockstep.checkpoint.layout import flush_folder, num_bytes
from lockstep.config import RunConfig
from lockstep.data.batch import StepBatch
from lockstep.data.loader import Loader
from lockstep.data.order import leaves_of
from lockstep.data.reader import build_reader, is_stream
from lockstep.dist.detect import Launch
from lockstep.dist.environment import launched, leave_process
from lockstep.dist.world import World, choose_device
from lockstep.doctor.findings import Findings
from lockstep.errors import DataError, LockstepError
from lockstep.launch.worker import run_script
from lockstep.randomness import seed_all, seed_everything
from lockstep.run.average import Averages
from lockstep.run.build import choose_precision
from lockstep.run.resume import agree_on_contract, choose_checkpoint
from lockstep.schedule import warmup_length
from lockstep.step.train_step import train_step
from lockstep.task import Task

LOOK_S = 3.0
"""How long to read, and how long to step, once both have started."""
PATIENCE_S = 30.0
"""A first step longer than this is taken as it is, though it also warmed up."""
MAX_STEPS = 20
OWN_LOOP = "a loop of its own: not looked into"


class Stop(Exception):
    """A stage failed, and has been noted."""


class Look:
    """One look at a job, stage by stage, each noted before the next begins."""

    def __init__(self, file: Path, world_size: int, local_size: int) -> None:
        self.file = file
        self.world_size = world_size
        self.local_size = local_size
        self.found = Findings()
        self.note("script")

    def note(self, stage: str, **values: Any) -> None:
        """Write down what is known, and what is being looked at now."""
        for name, value in values.items():
            setattr(self.found, name, value)
        self.found.stage = stage
        self.found.write(self.file)

    def attempt(self, stage: str, action: Callable[[], None], *, goes_on: bool = False) -> None:
        """Do one stage; what is wrong with it is noted in a sentence."""
        self.note(stage)
        try:
            action()
            self.found.seen.append(stage)
        except LockstepError as error:
            self.found.problems[stage] = [error.problem, error.remedy]
        except Exception as error:
            self.found.problems[stage] = [_in_a_line(error), ""]
        self.found.write(self.file)
        if stage in self.found.problems and not goes_on:
            raise Stop

    def fit(self, task: Task, config: RunConfig, callbacks: Sequence[Any] = ()) -> NoReturn:
        """Look at everything that `fit` would use, and end the process."""
        try:
            self.look(task, config)
        finally:
            leave_process(0)

    def look(self, task: Task, config: RunConfig) -> None:
        """Look at everything that `fit` would use, until something is wrong."""
        self.task, self.config = task, config
        values = json.loads(config.model_dump_json())
        self.found.task, self.found.config = task.name, values
        self.found.output_dir = str(Path(config.output_dir).absolute())
        self.attempt("folder", self._folder, goes_on=True)
        try:
            for stage in ("data", "resume", "contract", "samples", "model"):
                self.attempt(stage, getattr(self, f"_{stage}"))
            self.attempt("loader", self._loader)
            self.attempt("step", self._step)
            if "folder" not in self.found.problems:
                self.attempt("save", self._save)
        except Stop:
            pass
        finally:
            self._tidy()

    def _folder(self) -> None:
        """Write, flush and rename where the run will, and leave no trace."""
        base = Path(self.found.output_dir)
        if (base / "lock").exists():
            FolderLock(base).acquire().release()
        while not base.exists() and base != base.parent:
            base = base.parent
        self.found.free_disk_bytes = shutil.disk_usage(base).free
        self.found.file_system = _file_system(base)
        scratch = base / f".lockstep_doctor_{os.getpid()}"
        try:
            scratch.mkdir()
            self.note("folder", scratch=str(scratch))
            with (scratch / "written").open("wb") as file:
                file.write(b"x" * 4096)
                file.flush()
                os.fsync(file.fileno())
            os.rename(scratch / "written", scratch / "renamed")
            flush_folder(scratch)
        except OSError as error:
            raise DataError(f"cannot save in {base}: {error.strerror}", "") from error

    def _data(self) -> None:
        cpu, seed = torch.device("cpu"), self.config.seed
        seed_everything(cpu, seed, "training data")
        self.data = self.task.train_data()
        self.found.is_stream = is_stream(self.data)
        self.found.num_samples = 0 if self.found.is_stream else len(self.data)
        seed_everything(cpu, seed, "held-out data")
        held_out = self.task.eval_data()
        self.found.num_held_out = 0 if held_out is None else len(held_out)

    def _resume(self) -> None:
        config = self.config
        store = CheckpointStore(
            Path(config.output_dir) / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            recipe=self.task.name,
        )
        if "folder" in self.found.problems:  # said once is enough
            self.checkpoint: Checkpoint | None = None
            return
        self.checkpoint, rejected = choose_checkpoint(store, config.resume)
        self.found.resumed_from = self.checkpoint.path.name if self.checkpoint else ""
        self.found.rejected = [f"{path.name}: {reason}" for path, reason in rejected]

    def _contract(self) -> None:
        config, found = self.config, self.found
        self.contract = agree_on_contract(
            config, self.data, self.world_size, self.checkpoint, self.task.gathers
        )
        plan = self.contract.plan
        self.world = World(Launch(), choose_device(Launch(), config.device), None)
        self.order = self.task.order(self.data, config.seed)
        loader = self._build_loader(config.max_steps, config.epochs)
        found.device = str(self.world.device)
        found.contract = self.contract.describe()
        found.total_steps = loader.total_steps
        found.steps_per_epoch = plan.steps_per_epoch
        found.warmup_steps = warmup_length(config.schedule, plan.steps_per_epoch)
        found.global_batch, found.accumulate = plan.global_batch, plan.accumulate

    def _build_loader(self, max_steps: int | None, epochs: int | None) -> Loader:
        return Loader(
            self.data,
            self.world,
            plan=self.contract.plan,
            epochs=epochs,
            max_steps=max_steps,
            seed=self.config.seed,
            order=self.order,
            collate=self.task.collate,
            config=self.config.loader,
        )

    def _samples(self) -> None:
        """Read the first sample that each rank will need."""
        if self.found.is_stream:
            return
        order = self._build_loader(1, None).order
        reader = build_reader(self.data, order, self.config.seed, lambda samples: samples, "stop")
        for rank in range(self.world_size):
            leaf = leaves_of(self.contract.plan, 0, rank)[0]
            read = reader[replace(leaf, stop=leaf.start + 1)]
            if read.error is not None:
                raise DataError(f"rank {rank}: {read.error[0]}", read.error[1])
            self.found.samples_read += 1

    def _model(self) -> None:
        self.found.free_memory_bytes = free_memory(self.world.device)
        seed_all(self.config.seed, "weights")
        if self.checkpoint is not None:
            self.task.load_state(self.checkpoint.load("task"))
        self.model: nn.Module = self.task.build_model().to(self.world.device)
        self.optimizer = self.task.build_optimizer(self.model, self.contract.effective_lr)
        self.averages = Averages(self.model, self.config.averages)
        self._count(self.model)

    def _count(self, model: nn.Module) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        self.found.num_parameters = sum(p.numel() for p in model.parameters())
        self.found.num_trained = sum(p.numel() for p in trained)
        self.found.trained_bytes = num_bytes(trained)

    def _loader(self) -> None:
        """Read as many batches as fit into a few seconds, as the run would read them."""
        config = self.config.loader
        batches = iter(self._build_loader(4 * MAX_STEPS, None))
        # What workers had ready before anyone asked does not count.
        queued = -(-config.num_workers * config.prefetch // self.contract.plan.accumulate)
        self.batch = next(batches)
        self._weigh(self.batch)
        began = last = time.perf_counter()
        times = []
        for self.batch in batches:
            now = time.perf_counter()
            times.append(now - last)
            last = now
            if now - began > LOOK_S or len(times) >= queued + MAX_STEPS:
                break
        counted = times[queued:] or times
        self.found.read_s = sum(counted) / len(counted)
        self.found.num_batches_read = len(times) + 1
        self._worker_bytes = _bytes_of_children()
        del batches  # ends the workers

    def _weigh(self, batch: StepBatch) -> None:
        with suppress(LockstepError):  # a batch may hold what no checkpoint could
            tensors = list(_tensors(batch.micro_batches[0].data))
            self.found.batch_bytes = num_bytes(tensors)
            self.found.batch_tensors = len(tensors)

    def _step(self) -> None:
        """Take a few steps with the batch that was read, and see what they need."""
        task, config, device = self.task, self.config, self.world.device
        precision = choose_precision(config.precision, device)
        scaler = torch.amp.GradScaler(device.type) if precision == torch.float16 else None

        def step() -> Any:
            report = train_step(
                task.loss,
                self.model,
                self.optimizer,
                self.batch,
                self.world,
                weights=task.weights,
                seed=config.seed,
                max_grad_norm=config.max_grad_norm,
                autocast=torch.autocast(device.type, precision) if precision else None,
                scaler=scaler,
            )
            self.averages.update(1)
            return report.loss

        self.time_steps(step, device)

    def time_steps(self, step: Callable[[], Any], device: torch.device) -> None:
        """Call `step` for a few seconds; note its time, its loss and its memory."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        times: list[float] = []
        while len(times) <= MAX_STEPS and sum(times) < (LOOK_S if times[1:] else PATIENCE_S):
            began = time.perf_counter()
            loss = float(step())  # waits for the device
            times.append(time.perf_counter() - began)
            self.found.loss = self.found.loss or f"{loss:.6g}"
            if not math.isfinite(loss):
                self.found.loss = f"{loss:.6g}"
        counted = times[1:] or times  # the first one also warms up
        self.found.step_s = sum(counted) / len(counted)
        self.found.num_steps = len(times)
        if device.type == "cuda":
            self.found.memory_bytes = torch.cuda.max_memory_reserved(device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            self.found.memory_bytes = peak + getattr(self, "_worker_bytes", 0)

    def _save(self) -> None:
        """Save a checkpoint as the run would, beside where it would, and remove it."""
        parts = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **{f"average_{d}": self.averages.state(d) for d in self.config.averages},
        }
        self.save_parts(parts)

    def save_parts(self, parts: dict[str, Any]) -> None:
        """Measure how large these parts are and how long saving them takes."""
        self.found.checkpoint_bytes = sum(num_bytes(flatten(p)[0].values()) for p in parts.values())
        if self.found.checkpoint_bytes > self.found.free_disk_bytes:
            return
        began = time.perf_counter()
        CheckpointStore(Path(self.found.scratch) / "checkpoints").save(1, snapshot(parts), {})
        self.found.save_s = time.perf_counter() - began

    def _tidy(self) -> None:
        if self.found.scratch:
            shutil.rmtree(self.found.scratch, ignore_errors=True)


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device; on the host, within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free


def _bytes_of_children() -> int:
    """Return the memory that child processes hold for themselves."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += child.memory_full_info().uss
    return total


def _file_system(path: Path) -> str:
    """Return the kind of file system a folder lies on, as the kernel calls it."""
    best = ("", "")
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, point, kind, *_ = line.split()
            if path.resolve().is_relative_to(point) and len(point) >= len(best[0]):
                best = (point, kind)
    return best[1]


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)


def _in_a_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def watch(look: Look) -> None:
    """Put the look in the place of `fit`, and of the loops that go without it."""
    trainer: Any = lockstep.trainer
    trainer.fit = look.fit
    setup: Any = lockstep.run.build
    setup.prepare = lambda task, config, *more: look.fit(task, config)
    step: Any = lockstep.step.train_step
    step.train_step = _first_step(look)

    def train(build: Callable[[Sequence[str]], Any], argv: Sequence[str]) -> NoReturn:
        built: Any = None

        def make() -> None:
            nonlocal built
            built = build(argv)

        with suppress(Stop):
            look.attempt("script", make)
            if not callable(built):
                look.fit(*built)
            elif launched().size > 1:  # it would join a group that is not there
                look.note("script", unseen=OWN_LOOP)
            else:
                look.attempt("script", built)
        leave_process(0)

    if importlib.util.find_spec("lockstep_recipes"):
        commands: Any = importlib.import_module("lockstep_recipes.command")
        commands.train = train


def _first_step(look: Look) -> Callable[..., NoReturn]:
    """Return what a loop of its own meets in place of its first step: a look at the step alone."""
    real = train_step

    def first_step(
        loss: Any, model: nn.Module, optimizer: Any, batch: StepBatch, world: World, **options: Any
    ) -> NoReturn:
        look.found.task = "a loop of its own"
        look.found.device = str(world.device)
        look.found.free_memory_bytes = free_memory(world.device)

        def step() -> Any:
            return real(loss, model, optimizer, batch, world, **options).loss

        with suppress(Stop):
            look._count(model)
            look._weigh(batch)
            look.attempt("step", lambda: look.time_steps(step, world.device))
        look.note("step", unseen="a loop of its own: only its first step was looked into")
        leave_process(0)

    return first_step


def main(argv: Sequence[str]) -> NoReturn:
    """Run `python WORDS` with the look in place: FILE WORLD_SIZE LOCAL_SIZE WORDS..."""
    file, world_size, local_size, *words = argv
    look = Look(Path(file), int(world_size), int(local_size))
    watch(look)
    if sys.path and sys.path[0] in ("", os.getcwd()):
        sys.path.pop(0)  # `python train.py` does not look here, but beside the script
    problem = ["it ends without a call of lockstep.fit or train_step", "a script that trains"]
    try:
        run_script(words)
    except SystemExit as left:
        if left.code not in (None, 0):
            said = left.code if isinstance(left.code, str) else f"it leaves with code {left.code}"
            problem = [said, ""]
    except KeyboardInterrupt:
        problem = ["it was interrupted", ""]
    except LockstepError as error:
        problem = [error.problem, error.remedy]
    except BaseException as error:
        problem = [_in_a_line(error), ""]
    look.found.problems["script"] = problem
    look.note("script")
    leave_process(0)


if __name__ == "__main__":
    # Under its own name, not `__main__`, or the hooks would be set in a second copy of it.
    importlib.import_module("lockstep.doctor.probe").main(sys.argv[1:])
