"""The callback of `lockstep doctor -- COMMAND`, which measures a few real steps of a job.

Owns: the settings of the trial, and its measurements: folder, checkpoint, batch, samples,
loader, step, memory, save. The job's own `fit` builds everything else. Nothing of the script runs
after the trial, and nothing is written into the job's folder. Does not own: starting the ranks
(`trial.py`), or judging the numbers (`job.py`).
"""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil
import torch
from torch import nn

from lockstep.callback import Callback, RunView
from lockstep.checkpoint import Checkpoint, CheckpointStore, FolderLock
from lockstep.checkpoint.layout import flush_folder, num_bytes
from lockstep.config import RunConfig
from lockstep.data.batch import StepBatch
from lockstep.data.loader import STREAM_LENGTH
from lockstep.data.order import leaves_of
from lockstep.data.reader import build_reader, is_stream
from lockstep.dist.ddp import unwrap
from lockstep.dist.environment import launched_rank, leave_process, tool_folder
from lockstep.dist.fsdp import is_sharded, local_rows
from lockstep.doctor.findings import Findings, findings_file
from lockstep.errors import CheckpointError, DataError, LockstepError
from lockstep.harness.attach import read_settings
from lockstep.harness.command import descendants
from lockstep.launch.memory import ControlGroup, free_host_bytes, own_peak_bytes
from lockstep.nested import tensors_in
from lockstep.observe.events import log_name
from lockstep.observe.sinks import SinkConfig
from lockstep.phases import Phase
from lockstep.plan import BatchConfig, BatchPlan, Contract, RateConfig, plan_batches, scaled_rate
from lockstep.run.build import build_loader, check_model, plan_run
from lockstep.run.resume import (
    changed_data,
    choose_checkpoint,
    take_fingerprints,
)
from lockstep.run.run import Run
from lockstep.run_files import refuse_link, refuse_shared
from lockstep.schedule import warmup_length
from lockstep.step.report import StepReport
from lockstep.task import Task
from lockstep.world import World

Checked = TypeVar("Checked")
MEASURE_S = 3.0
"""How long to read, and how long to train, after both have started."""
WARM_UP_S = 30.0
"""If the first step takes longer than this, it is measured although it includes the warm-up."""
MAX_STEPS = 20
LEAVE_TIMEOUT_S = 10.0
"""How long a rank waits for the others before it exits."""
FAR_AWAY = 10**6
"""Maximum steps of a trial. It stops long before, so that nothing is due at its end."""
CUSTOM_LOOP = "a custom loop: only its first step was checked"

TRIAL_PHASE_OF: dict[Phase, str] = {
    "open folder": "folder",
    "build data": "data",
    "find checkpoint": "resume",
    "plan batches": "contract",
    "build model": "model",
    "data": "loader",
    "forward": "step",
    "backward": "step",
    "exchange": "step",
    "update": "step",
    "save": "save",
}


class DoctorCallback(Callback):
    """One rank's trial of a job."""

    communicates = True
    world: World
    task: Task
    config: RunConfig
    """The job's own settings, not those of the trial."""

    def __init__(self) -> None:
        self.folder = tool_folder()
        self.world_size = int(read_settings(self.folder)["world_size"])
        """The number of ranks that the job will have."""
        self.file = findings_file(self.folder, launched_rank())
        self.found = Findings()
        self.checkpoint: Checkpoint | None = None
        self._open: list[tuple[float, BaseException | None]] = []
        """For each current phase: when it began, and which exception was being handled then."""
        self._times: list[float] = []
        self._began = 0.0
        self._worker_bytes = 0

    # --- Notes -----------------------------------------------------------------

    def begin(self, phase: str) -> None:
        """Record that a phase has started."""
        if self.found.phase != phase:
            self.found.phase = phase
            self.found.write(self.file)

    def end(self, phase: str) -> None:
        """Record that a phase succeeded."""
        if phase not in self.found.passed:
            self.found.passed.append(phase)
            self.found.write(self.file)

    def note_failure(self, phase: str, error: BaseException) -> None:
        """Record that a phase failed, and why."""
        found = self.found
        found.phase = phase
        found.failed_at = time.time()
        found.problems[phase] = [one_line(error), ""]
        if isinstance(error, LockstepError):
            found.problems[phase] = [error.problem, error.remedy]
        found.write(self.file)

    def check(self, phase: str, action: Callable[[], Checked]) -> Checked:
        """Run a check of this callback as part of a phase; end the process if it fails."""
        self.begin(phase)
        try:
            return action()
        except Exception as error:
            self.note_failure(phase, error)
            leave_process(1)

    def note_phase(self, phase: Phase, begins: bool) -> None:
        """Record a phase of the run; end the process if it failed."""
        name = TRIAL_PHASE_OF.get(phase)
        if name is None:
            return
        if begins:
            self._open.append((time.perf_counter(), sys.exception()))
            self.begin(name)
            if phase == "save":
                self._leave_without_room()
            return
        began, outer = self._open.pop()
        error = sys.exception()
        if error is not None and error is not outer:
            if phase == "build model" and isinstance(error, CheckpointError):
                name = "resume"  # it is restored there
            self.note_failure(
                "data" if phase == "find checkpoint" and is_about_data(error) else name, error
            )
            leave_process(1)
        if phase in ("build data", "find checkpoint", "build model"):
            self.end(name)
        if phase == "save":
            self.found.save_s = time.perf_counter() - began

    # --- The settings of the trial -----------------------------------------------

    def configure(self, task: Task, config: RunConfig, world: Any) -> RunConfig:
        """Check the job's folder and checkpoint; return settings for a few steps elsewhere."""
        found = self.found
        self.task = task
        self.world = world
        self.config = config
        found.task = task.name
        found.config = json.loads(config.model_dump_json())
        found.output_dir = str(Path(config.output_dir).absolute())
        found.device = str(world.device)
        found.num_ranks = world.size
        found.free_memory_bytes = free_memory(world.device)
        spans_ranks = config.parallel == "fsdp" or config.sync_batch_norm
        if spans_ranks and world.size == 1 < self.world_size:
            found.needs_group = True
            found.write(self.file)
            leave_process(0)
        self.end("script")
        world.phase.listeners.append(self.note_phase)
        scratch = ""
        if world.is_first:
            scratch = self._check_folder()
        of_first = world.all_values([scratch, found.free_disk_bytes])[0]
        found.scratch, found.free_disk_bytes = of_first
        if found.scratch:
            self.check("resume", self._find_checkpoint)
            self.end("resume")
        plan = self.check("contract", self._plan_without_data)
        return self._trial_config(plan, world.size)

    def _check_folder(self) -> str:
        """Make the trial's folder where the run will save, and return it; "" if that fails."""
        self.begin("folder")
        try:
            scratch = self._make_scratch()
        except LockstepError as error:  # all else can still be checked
            self.note_failure("folder", error)
            self.found.failed_at = 0.0
            return ""
        self.end("folder")
        return scratch

    def _make_scratch(self) -> str:
        base = Path(self.found.output_dir)
        if base.is_dir():
            refuse_link(base, log_name(0))
            refuse_shared(base, self.config.allow_shared_folder)
        if (base / "lock").exists():
            FolderLock(base).acquire().release()
        while not base.exists() and base != base.parent:
            base = base.parent
        self.found.free_disk_bytes = shutil.disk_usage(base).free
        self.found.file_system = file_system_of(base)
        scratch = base / f".{self.folder.name}"
        try:
            scratch.mkdir()
            self.found.scratch = str(scratch)
            self.found.write(self.file)
            with (scratch / "written").open("wb") as file:
                file.write(b"x" * 4096)
                file.flush()
                os.fsync(file.fileno())
            os.rename(scratch / "written", scratch / "renamed")
            flush_folder(scratch)
        except OSError as error:
            raise DataError(
                f"cannot save in {base}: {error.strerror}",
                "use a folder you may write to (output_dir, save_dir)",
            ) from error
        return str(scratch)

    def _find_checkpoint(self) -> None:
        """Find the checkpoint from which the job would resume."""
        config = self.config
        store = CheckpointStore(
            Path(config.output_dir) / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            recipe=self.task.name,
        )
        self.checkpoint, rejected = choose_checkpoint(store, config.resume)
        self.found.resumed_from = self.checkpoint.path.name if self.checkpoint else ""
        self.found.rejected = [f"{path.name}: {reason}" for path, reason in rejected]

    def _plan_without_data(self) -> BatchPlan:
        """Return the number of micro-batches of each rank of the job, before the data exist."""
        config, saved = self.config, self.checkpoint
        if saved is not None and "contract" in saved.meta and not config.accept_changes:
            stored = Contract.from_json(saved.meta["contract"]).plan
            if self.world_size <= stored.global_batch:
                return stored.on_ranks(self.world_size)
        return plan_batches(config.batch, STREAM_LENGTH, self.world_size)

    def _trial_config(self, plan: BatchPlan, num_ranks: int) -> RunConfig:
        """Return the job's settings with the trial's folder and more steps than it will take.

        A rank gets as many micro-batches as it will have in the job. Changes since the checkpoint
        are accepted here: whether the job may make them is checked against its own settings.
        """
        config = self.config
        batch: dict[str, Any] = {"batch_size": plan.leaf_size, "drop_last": config.batch.drop_last}
        first_step = 0
        saved = self.checkpoint
        if saved is not None and self._has_room_for(saved):
            first_step = saved.step
            batch["global_batch_size"] = plan.leaf_size * plan.accumulate * num_ranks
        else:
            saved = None
            batch["accumulate"] = plan.accumulate
        rate = scaled_rate(config.rate, self.world_size, plan.global_batch)
        return config.model_copy(
            update={
                "output_dir": self.found.scratch or str(self.folder / "output"),
                "resume": str(saved.path.absolute()) if saved else "never",
                "accept_changes": True,
                "batch": BatchConfig(**batch),
                "rate": RateConfig(lr=rate),
                "epochs": None,
                "max_steps": first_step + FAR_AWAY,
                "sinks": SinkConfig(),
                "on_out_of_memory": "stop",
                "on_non_finite": "skip",
            }
        )

    def _has_room_for(self, saved: Checkpoint) -> bool:
        """Return whether the trial can copy a checkpoint and save another one."""
        size = sum(file.stat().st_size for file in saved.path.iterdir() if file.is_file())
        return 2 * size < self.found.free_disk_bytes

    # --- The trial -----------------------------------------------------------------

    def on_run_start(self, run: Any) -> None:
        """Check what depends on the job's real number of ranks; then time the loader."""
        found = self.found
        self.communicates = False  # later on: a vote after each step would be timed
        if run.is_custom_loop:
            found.task = "a custom loop"
            found.device = str(run.world.device)
            found.free_memory_bytes = free_memory(run.world.device)
            self.count(run.model)
            self.end("script")
            return
        data, held_out = run.loader.dataset, run.held_out
        found.is_stream = is_stream(data)
        found.num_samples = 0 if found.is_stream else len(data)
        found.num_held_out = 0 if held_out is None else len(held_out)
        contract = self.check("contract", lambda: self._check_contract(run))
        self.end("contract")
        self.check("samples", lambda: self._read_first_samples(run, contract.plan))
        self.end("samples")
        self.count(run.model)
        self.check("loader", lambda: self._time_loader(run))
        self.end("loader")
        run.held_out = None
        run.config = run.config.saving_every(FAR_AWAY, waits=True)

    def _check_contract(self, run: Run) -> Contract:
        """Return the batch and learning rate of the job on its real number of ranks."""
        task, config, saved, found = self.task, self.config, self.checkpoint, self.found
        data = run.loader.dataset
        changes = []
        if saved is not None:
            now = take_fingerprints(data, run.held_out, config.seed, saved, False)
            changes = changed_data(saved, now, {"training": data, "held-out": run.held_out})
        contract, _ = plan_run(task, config, data, self.world_size, saved, changes)
        plan = contract.plan
        loader = build_loader(task, config, data, run.world, plan)
        check_model(unwrap(run.model), loader, saved, config)
        found.contract = contract.describe()
        found.total_steps = loader.total_steps
        found.steps_per_epoch = plan.steps_per_epoch
        found.warmup_steps = warmup_length(config.schedule, plan.steps_per_epoch)
        found.global_batch = plan.global_batch
        found.accumulate = plan.accumulate
        return contract

    def _read_first_samples(self, run: Run, plan: BatchPlan) -> None:
        """Read the first sample that each rank of the job will need."""
        if self.found.is_stream:
            return
        seed = self.config.seed
        reader = build_reader(run.loader.dataset, run.loader.order, seed, list, "stop")
        for rank in range(self.world_size):
            leaf = leaves_of(plan, 0, rank)[0]
            read = reader[replace(leaf, stop=leaf.start + 1)]
            if read.error is not None:
                problem, remedy = read.error
                raise DataError(f"rank {rank}: {problem}", remedy)
            self.found.samples_read += 1

    def count(self, model: nn.Module) -> None:
        """Count the parameters, over all shards."""
        trained = [p for p in model.parameters() if p.requires_grad]
        self.found.num_parameters = sum(p.numel() for p in model.parameters())
        self.found.num_trained = sum(p.numel() for p in trained)
        self.found.trained_bytes = num_bytes(trained)
        self.found.is_sharded = is_sharded(unwrap(model))

    def _time_loader(self, run: Run) -> None:
        """Read as many batches as fit into a few seconds; then go back to the first."""
        loader, config = run.loader, run.config.loader
        step, consumed = loader.step, loader.consumed
        # What workers have ready before the first request does not count.
        queued = -(-config.num_workers * config.prefetch // run.contract.plan.accumulate)
        batches = iter(loader)
        self._weigh(next(batches))
        began = last = time.perf_counter()
        times: list[float] = []
        while len(times) < queued + MAX_STEPS and last - began < MEASURE_S:
            next(batches)
            now = time.perf_counter()
            times.append(now - last)
            last = now
        counted = times[queued:] or times
        self.found.read_s = sum(counted) / len(counted)
        self.found.num_batches_read = len(times) + 1
        self._worker_bytes = memory_of_children()
        batches.close()  # type: ignore[attr-defined]  # a generator: this ends the workers
        loader.seek(step, consumed)

    def _weigh(self, batch: StepBatch) -> None:
        tensors = list(tensors_in(batch.micro_batches[0].data))
        self.found.batch_bytes = num_bytes(tensors)
        self.found.batch_tensors = len(tensors)

    def on_step_start(self, run: RunView, batch: StepBatch) -> None:
        """Start the clock."""
        self.begin("step")
        device = run.world.device
        if run.is_custom_loop:
            self._weigh(batch)
            run.world.phase.listeners.append(self.note_phase)
        if device.type == "cuda" and not self._times:
            torch.cuda.reset_peak_memory_stats(device)
        self._began = time.perf_counter()

    def on_step_end(self, run: Any, batch: StepBatch, report: StepReport) -> None:
        """Record a step's time, loss and memory; stop after a few seconds."""
        found, device = self.found, run.world.device
        loss = float(report.loss)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._times.append(time.perf_counter() - self._began)
        if not found.loss or not math.isfinite(loss):
            found.loss = f"{loss:.6g}"
        found.num_steps = len(self._times)
        found.memory_bytes = peak_memory(device) + self._worker_bytes
        found.state_bytes = state_bytes(run.model, run.optimizer)
        counted = self._times[1:] or self._times  # the first one also warms up
        found.step_s = sum(counted) / len(counted)
        if run.is_custom_loop:
            found.unchecked = CUSTOM_LOOP
            self.end("step")
            leave_process(0)
        if not found.checkpoint_bytes:
            found.checkpoint_bytes = num_bytes(tensors_in(run.parts()))
        self.end("step")
        if self._has_measured_enough(loss):
            run.stop("lockstep doctor has measured enough steps")

    def _has_measured_enough(self, loss: float) -> bool:
        first, *others = self._times
        is_slow = first > WARM_UP_S and not self.config.compile
        is_done = sum(others) > MEASURE_S or len(others) >= MAX_STEPS
        return is_slow or is_done or not math.isfinite(loss)

    def _leave_without_room(self) -> None:
        """End the process before a save that would fill the disk."""
        found = self.found
        if found.scratch and found.checkpoint_bytes > found.free_disk_bytes:
            self._leave()

    def on_run_end(self, run: RunView, result: Any) -> None:
        """End the process: nothing of the script runs after a trial."""
        self._leave()

    def _leave(self) -> NoReturn:
        """End the process when all ranks have come here, so that none is still in a collective."""
        self.end("save")
        self.world.all_reach("the end of the trial", LEAVE_TIMEOUT_S)
        leave_process(0)


def is_about_data(error: BaseException) -> bool:
    """Return whether the problem is a sample or a data file, and not a checkpoint."""
    return isinstance(error, DataError) or not isinstance(error, LockstepError)


def state_bytes(model: nn.Module, optimizer: Any) -> int:
    """Return the bytes of weights, gradients and optimizer state that this rank holds."""
    weights = list(model.parameters())
    gradients = [p for p in weights if p.requires_grad]
    moments = tensors_in(list(optimizer.state.values()))
    return num_bytes(local_rows([*weights, *gradients, *moments]))


def peak_memory(device: torch.device) -> int:
    """Return the most memory that this process has held so far on a device."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    return own_peak_bytes()


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes(ControlGroup.own())


def memory_of_children() -> int:
    """Return the memory that child processes do not share."""
    total = 0
    for child in descendants():
        with suppress(psutil.Error):
            total += child.memory_full_info().uss
    return total


def file_system_of(path: Path) -> str:
    """Return the kernel's name for the type of file system of a folder."""
    best = ("", "")
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, point, kind, *_ = line.split()
            if path.resolve().is_relative_to(point) and len(point) >= len(best[0]):
                best = (point, kind)
    return best[1]


def one_line(error: BaseException) -> str:
    """Return an exception as one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
