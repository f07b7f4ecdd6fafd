"""The loop: step; then log, evaluate, save when due; stop cleanly.

Owns: the life of a run, from the launch to the exit code. Does not own: any
arithmetic; it calls the parts in order. Whatever must be alike on all ranks is
decided from reduced values or by `World.all_max`, never by one rank.
"""

import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep import errors
from lockstep.average import Averages
from lockstep.checkpoint.state import load_model_state, snapshot
from lockstep.checkpoint.store import Checkpoint, CheckpointStore, FolderLock
from lockstep.checkpoint.writer import BackgroundWriter
from lockstep.config import Cadence, RunConfig
from lockstep.data.loader import Loader, StepBatch, is_stream, plan_for
from lockstep.data.order import Ledger
from lockstep.errors import CheckpointError, ConfigError, LockstepError, NonFiniteError
from lockstep.evaluation import evaluate
from lockstep.observe.console import Console
from lockstep.observe.events import EventLog
from lockstep.observe.sinks import Sinks
from lockstep.observe.throughput import Throughput
from lockstep.parallel import bare, replicate
from lockstep.plan import Contract, resume_contract, scaled_rate
from lockstep.randomness import seed_all
from lockstep.runtime import World
from lockstep.schedule import build_schedule, warmup_length
from lockstep.signals import EXIT_CODES, StopSignals
from lockstep.step import StepReport, train_step
from lockstep.task import Context, Task

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended: where it stands, what it measured, and the exit code it deserves."""

    step: int
    metrics: dict[str, float]
    folder: Path
    exit_code: int = 0


def fit(task: Task, config: RunConfig) -> RunResult:
    """Train `task` as `config` says, on as many ranks as were launched.

    Goes on from the newest good checkpoint in `config.output_dir` if there is
    one. SIGTERM and Ctrl-C save at the next step, on all ranks alike; a second
    signal leaves at once.

    Raises:
        LockstepError: the same on every rank, with what is wrong and what to try.
    """
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        world = stack.enter_context(World.enter(config.device, config.timeout_s))
        run = _prepare(task, config, world, stack)
        return run.train(signals)


@dataclass
class Progress:
    """Where a run stands; saved whole in every checkpoint."""

    step: int = 0
    consumed: int = 0
    best: float | None = None
    ledger: Ledger = field(default_factory=Ledger)
    interval: dict[str, Tensor] = field(default_factory=dict)
    """Since the last log line: (sum, weight) of the loss and of each part."""
    epoch: dict[str, Tensor] = field(default_factory=dict)
    """Since the epoch began: likewise."""

    def take(self, report: StepReport, batch: StepBatch) -> None:
        """Count one finished step; nothing here waits for the device."""
        self.step = batch.step + 1
        self.consumed = batch.consumed
        pairs = {"loss": (report.loss_sum, report.weight), **report.parts}
        for name, pair in pairs.items():
            pair_sums = torch.stack(pair)
            for sums in (self.interval, self.epoch):
                sums[name] = sums[name] + pair_sums if name in sums else pair_sums

    def state(self) -> dict[str, Any]:
        """Return it as a tree of numbers and tensors."""
        ledger = [self.ledger.digest, self.ledger.count]
        return {**vars(self), "ledger": ledger}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> "Progress":
        """Rebuild it from a checkpoint."""
        for key in ("interval", "epoch"):
            state[key] = {name: sums.to(device) for name, sums in state[key].items()}
        return cls(**{**state, "ledger": Ledger(*state["ledger"])})


@dataclass
class _Run:
    """The parts of one run, and what is done with them."""

    task: Task
    config: RunConfig
    world: World
    contract: Contract
    loader: Loader
    held_out: Any
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    base_rates: list[float]
    averages: Averages
    scaler: torch.amp.GradScaler | None
    autocast: torch.autocast | None
    progress: Progress
    store: CheckpointStore
    writer: BackgroundWriter
    events: EventLog
    resumed_from: int
    throughput: Throughput = field(default_factory=Throughput)
    metrics: dict[str, float] = field(default_factory=dict)
    local_ledger: Ledger = field(default_factory=Ledger)
    report: StepReport | None = None
    saved_step: int | None = None
    evaluated_step: int | None = None

    def train(self, signals: StopSignals) -> RunResult:
        """Run the steps that are left."""
        plan, total_steps = self.contract.plan, self.loader.total_steps
        schedule = build_schedule(self.config.schedule, plan.steps_per_epoch, total_steps)
        began = time.monotonic()
        batches = iter(self.loader)
        upcoming = self._fetch(batches)
        stopped_by = 0
        while self.progress.step < total_steps:
            stopped_by = self._agree(signals, upcoming)
            if stopped_by:
                break
            assert isinstance(upcoming, StepBatch)

            # ---- the step ----
            for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
                group["lr"] = base * schedule(self.progress.step)
            self.report = train_step(
                self.task.loss,
                self.model,
                self.optimizer,
                upcoming,
                self.world,
                seed=self.config.seed,
                max_grad_norm=self.config.max_grad_norm,
                autocast=self.autocast,
                scaler=self.scaler,
            )
            self.averages.update()
            self.progress.take(self.report, upcoming)
            self._enter_into_ledger(upcoming)
            upcoming = self._fetch(batches)  # while the device is still busy
            self.throughput.step_done(plan.global_batch)
            if self.world.device.type == "cpu":  # on a GPU this would wait for it every step
                self._check_finite()

            # ---- once in a while ----
            step = self.progress.step
            if step % self.config.log_every == 0 or step == total_steps:
                self._log()
            with self.throughput.pausing():
                if step % plan.steps_per_epoch == 0:
                    self._close_epoch()
                if self.held_out is not None and self._is_due(self.config.evaluation):
                    self._evaluate()
                if self._is_due(self.config.checkpoint):
                    self._save()

        if self.saved_step != self.progress.step:
            self._save()
        self.writer.wait()
        self.world.barrier()
        if stopped_by:
            name = {code: number.name for number, code in EXIT_CODES.items()}[stopped_by]
            self.events.write("stop", self.progress.step, reason=name, exit_code=stopped_by)
        self.events.write("run_end", self.progress.step, seconds=time.monotonic() - began)
        return RunResult(self.progress.step, self.metrics, Path(self.config.output_dir), stopped_by)

    def _fetch(self, batches: Iterator[StepBatch]) -> StepBatch | LockstepError | None:
        with self.throughput.waiting():
            try:
                return next(batches, None)
            except LockstepError as error:
                return error

    def _agree(self, signals: StopSignals, upcoming: object) -> int:
        """Return the exit code to stop with, or 0; raise on all ranks what one of them met."""
        problem = upcoming if isinstance(upcoming, LockstepError) else None
        try:
            self.writer.poll()
        except LockstepError as error:
            problem = error
        stop, failed = self.world.all_max(signals.exit_code, int(problem is not None))
        if failed:
            raise_together(self.world, problem)
        return stop

    def _is_due(self, when: Cadence) -> bool:
        step = self.progress.step
        at_end = step == self.loader.total_steps
        return at_end or when.is_due(step, self.contract.plan.steps_per_epoch)

    def _enter_into_ledger(self, batch: StepBatch) -> None:
        for micro_batch in batch.micro_batches:
            if micro_batch.counts:
                self.local_ledger.add(batch.epoch, micro_batch.visited)
                for sample, reason in micro_batch.skipped:
                    self.events.write(
                        "sample_skipped", self.progress.step, sample=sample, reason=reason
                    )

    def _sum_ledger(self) -> Ledger:
        """Add every rank's entries to the run's ledger. Collective."""
        self.progress.ledger = self.progress.ledger.plus(self.local_ledger, self.world.all_sum)
        self.local_ledger = Ledger()
        return self.progress.ledger

    def _check_finite(self) -> None:
        """Raise, on all ranks alike, when the last step was no longer arithmetic."""
        report = self.report
        if report is None:
            return
        # With a scaler an overflowing gradient is routine: it skips the step and scales down.
        finite = torch.isfinite(report.loss_sum) if self.scaler else report.finite
        if not bool(finite):
            raise NonFiniteError(
                f"step {self.progress.step}: loss {float(report.loss):g}, gradient norm "
                f"{float(report.grad_norm):g}; nothing of it was saved",
                "a lower learning rate, a longer warm-up, or precision=fp32; "
                "the newest checkpoint is from before",
            )

    def _log(self) -> None:
        self._check_finite()
        assert self.report is not None
        step, plan = self.progress.step, self.contract.plan
        timing = self.throughput.interval()
        # Steps are as slow as their slowest rank; waiting is worth knowing where it is worst.
        table = self.world.all_gather(
            torch.tensor([[timing["step_time_s"], timing["data_wait_share"]]])
        )
        step_time, wait_share = (float(column.max()) for column in table.T)
        means = {name: float(sums[0] / sums[1]) for name, sums in self.progress.interval.items()}
        self.progress.interval = {}
        self.events.write(
            "step",
            step,
            loss=means.pop("loss"),
            parts=means,
            learning_rate=self.optimizer.param_groups[0]["lr"],
            grad_norm=float(self.report.grad_norm),
            epoch=self.progress.consumed / plan.samples_per_epoch,
            samples=self.progress.consumed,
            ledger=str(self._sum_ledger()),
            samples_per_second=plan.global_batch / step_time,
            step_time_s=step_time,
            data_wait_share=wait_share,
            local_step_time_s=timing["step_time_s"],
            local_data_wait_share=timing["data_wait_share"],
        )

    def _close_epoch(self) -> None:
        """Say what the epoch consumed, and prove it."""
        plan = self.contract.plan
        epoch = self.progress.step // plan.steps_per_epoch
        seen = self._sum_ledger()
        expected = Ledger.of_epoch(self.loader.order, plan, epoch - 1)
        loss_sum, weight = self.progress.epoch["loss"]
        verdict = "each once" if seen == expected else "NOT each once"
        self.events.write(
            "epoch",
            self.progress.step,
            epoch=epoch,
            loss=float(loss_sum / weight),
            samples=seen.count,
            num_samples=plan.samples_per_epoch,
            each_once=seen == expected,
            message=f"{seen.count} of {plan.samples_per_epoch} samples, {verdict}",
        )
        self.progress.epoch = {}
        self.progress.ledger = Ledger()

    def _evaluate(self) -> None:
        """Evaluate the weights and their first average; sample or draw with the better one."""
        config, model = self.config, bare(self.model)
        step = self.evaluated_step = self.progress.step

        def measure() -> dict[str, float]:
            return evaluate(
                self.task,
                model,
                self.held_out,
                self.world,
                batch_size=config.evaluation.batch_size or self.contract.plan.batch_size,
                seed=config.seed,
                step=step,
                loader=config.loader,
                autocast=self.autocast,
            )

        context = Context(self.world, config.seed, step, 0, training=False)
        self.metrics = measure()
        if not config.averages:
            self.metrics |= self.task.finish_evaluation(model, context, config.output_dir)
        else:
            with self.averages.applied(config.averages[0]):
                self.metrics |= {f"ema_{name}": value for name, value in measure().items()}
                self.metrics |= self.task.finish_evaluation(model, context, config.output_dir)
        self.events.write("evaluation", step, metrics=self.metrics)

    def _save(self) -> None:
        """Copy the state of the run to host memory and let the writer store it. Collective."""
        self._check_finite()
        began = time.monotonic()
        step, plan = self.progress.step, self.contract.plan
        self.saved_step = step
        self._sum_ledger()
        names = []
        if step % plan.steps_per_epoch == 0 and self.config.checkpoint.every_steps is None:
            names.append(f"checkpoint_epoch_{step // plan.steps_per_epoch}.pt")
        if self._is_best():
            names.append("best_model.pt")
        if self.world.is_first:
            parts = snapshot(self._parts())
            meta = {
                "contract": self.contract.to_json(),
                "consumed": self.progress.consumed,
                "ledger": str(self.progress.ledger),
                "epochs_completed": step // plan.steps_per_epoch,
                "metrics": self.metrics if self.evaluated_step == step else {},
                "config": json.loads(self.config.model_dump_json()),
                "versions": versions(),
            }

            def write() -> None:
                self.store.save(step, parts, meta)
                for name in names:
                    self.store.name(step, name)

            self.writer.submit(write)
            if not self.config.checkpoint.background:
                self.writer.wait()
        path = str(self.store.folder / f"step_{step:08d}")
        self.events.write("checkpoint", step, path=path, stall_s=time.monotonic() - began)

    def _is_best(self) -> bool:
        value = self.metrics.get(self.config.evaluation.best_metric)
        if value is None or self.evaluated_step != self.progress.step:
            return False
        sign = 1 if self.config.evaluation.best_is == "lowest" else -1
        if self.progress.best is not None and sign * value >= sign * self.progress.best:
            return False
        self.progress.best = value
        return True

    def _parts(self) -> dict[str, Any]:
        """Return all that a resumed run needs, by name."""
        averages = {
            f"average_{decay}": self.averages.state(decay) for decay in self.config.averages
        }
        return {
            "model": bare(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": self.progress.state(),
            "task": self.task.state(),
            **averages,
            **({"scaler": self.scaler.state_dict()} if self.scaler else {}),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take back what `_parts` saved."""
        load_model_state(bare(self.model), checkpoint.load("model"))
        self.optimizer.load_state_dict(checkpoint.load("optimizer"))
        self.progress = Progress.from_state(checkpoint.load("progress"), self.world.device)
        self.task.load_state(checkpoint.load("task"))
        for decay in self.config.averages:
            name = f"average_{decay}"
            if name not in checkpoint.parts:
                raise CheckpointError(
                    f"{checkpoint.path} holds no average of decay {decay}",
                    f"averages as saved: {[p for p in checkpoint.parts if p.startswith('average')]}",
                )
            self.averages.load_state(decay, checkpoint.load(name))
        if self.scaler and "scaler" in checkpoint.parts:
            self.scaler.load_state_dict(checkpoint.load("scaler"))
        self.loader.consumed = self.progress.consumed
        self.resumed_from = self.saved_step = self.progress.step


def _prepare(task: Task, config: RunConfig, world: World, stack: ExitStack) -> _Run:
    """Build every part of the run, refusing on all ranks alike what cannot work."""
    folder = Path(config.output_dir)
    store = CheckpointStore(folder / "checkpoints", keep_last=config.checkpoint.keep_last, recipe=task.name)
    if world.is_first:
        lock = FolderLock(folder)
        together(world, lock.acquire)
        stack.callback(lock.release)
    else:
        together(world, lambda: None)
    data = together(world, task.train_data)
    held_out = together(world, task.eval_data)
    checkpoint, rejected = together(world, lambda: choose_checkpoint(store, config.resume))
    _check_same_length(data, world)
    contract = together(world, lambda: agree_on_contract(config, data, world.size, checkpoint))
    total_steps = together(world, lambda: count_steps(config, contract, is_stream(data)))

    seed_all(config.seed, "weights")
    model = task.build_model().to(world.device)
    optimizer = task.build_optimizer(model, contract.effective_lr)
    precision = choose_precision(config.precision, world.device)
    writer = BackgroundWriter()
    stack.callback(writer.close)
    events = EventLog(folder, world.rank)
    run = _Run(
        task=task,
        config=config,
        world=world,
        contract=contract,
        loader=Loader(
            data,
            world,
            plan=contract.plan,
            total_steps=total_steps,
            seed=config.seed,
            order=task.order(data, config.seed),
            collate=task.collate,
            config=config.loader,
        ),
        held_out=held_out,
        model=model,
        optimizer=optimizer,
        base_rates=[group["lr"] for group in optimizer.param_groups],
        averages=Averages(model, config.averages),
        scaler=torch.amp.GradScaler(world.device.type) if precision == torch.float16 else None,
        autocast=torch.autocast(world.device.type, precision) if precision else None,
        progress=Progress(),
        store=store,
        writer=writer,
        events=events,
        resumed_from=0,
    )
    if checkpoint is not None:
        together(world, lambda: run.restore(checkpoint))
    if config.compile:
        model.compile()
    run.model = replicate(model, world)
    _open_console(run, stack, rejected, checkpoint)
    return run


def _open_console(
    run: _Run, stack: ExitStack, rejected: list[tuple[Path, str]], checkpoint: Checkpoint | None
) -> None:
    """Let the first rank speak: who trains, on what, from where; and write it down."""
    config, world, events = run.config, run.world, run.events
    if world.is_first:
        console = Console(run.loader.total_steps)
        stack.callback(console.close)
        sinks = Sinks(
            config.sinks,
            Path(config.output_dir),
            json.loads(config.model_dump_json()),
            resume_step=checkpoint.step if checkpoint else None,
            warn=console.note,
        )
        stack.callback(sinks.close)
        events.listeners += [console, sinks]
        write_config(config, world)
        for line in banner(run):
            console.note(line)
        for path, reason in rejected:
            console.note(f"passed over {path}: {reason}")
    facts = {"world_size": world.size, "recipe": run.task.name, "contract": run.contract.to_json()}
    events.write("run_start", run.progress.step, **facts)
    if checkpoint is not None:
        events.write("resume", run.progress.step, path=str(checkpoint.path))


def banner(run: _Run) -> list[str]:
    """Return what a run says of itself before its first step."""
    world, schedule = run.world, run.config.schedule
    device = f"{world.size} x {world.device.type}"
    backend = f", {world.backend}" if world.backend else ""
    lines = [f"lockstep: {run.task.name} on {device} (started by {world.launcher}{backend})"]
    lines += [*run.task.banner(world, run.contract), *run.contract.describe()]
    total_steps = run.loader.total_steps
    warmup = warmup_length(schedule, run.contract.plan.steps_per_epoch)
    if warmup > total_steps:
        lines.append(f"warning: the warm-up of {warmup} steps is longer than the run of {total_steps}")
    rate, plan = run.config.rate, run.contract.plan
    if rate.lr_scaling == "linear" and world.size > 1 and plan.global_batch == rate.reference_batch:
        lines.append(
            f"warning: linear scaling multiplies the rate by {world.size}, but the effective batch "
            f"is still {plan.global_batch}"
        )
    return lines


def together(world: World, action: Callable[[], T]) -> T:
    """Do `action` on every rank; if it fails on one, fail on all with that one's words. Collective."""
    try:
        result, problem = action(), None
    except LockstepError as error:
        problem = error
    if world.all_max(int(problem is not None))[0]:
        raise_together(world, problem)
    return result


def raise_together(world: World, problem: LockstepError | None) -> None:
    """Raise the first rank's error that has one, on every rank. Collective."""
    said = [type(problem).__name__, *problem.args] if problem else []
    stories = [json.loads(text) for text in world.all_texts(json.dumps(said))]
    rank, (kind, text, remedy) = next((r, story) for r, story in enumerate(stories) if story)
    where = "" if all(stories) else f"rank {rank}: "
    raise getattr(errors, kind)(where + text, remedy)


def choose_checkpoint(
    store: CheckpointStore, resume: str
) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """Return the checkpoint to go on from, and why newer ones were passed over."""
    if resume not in ("auto", "never"):
        return store.open(resume), []
    checkpoint, rejected = store.latest()
    if resume == "never" and (checkpoint or rejected):
        found = checkpoint.path if checkpoint else rejected[0][0]
        raise ConfigError(
            f"{found} is from an earlier run, and resume is 'never'",
            "resume=auto to go on with it, or another output_dir",
        )
    if checkpoint is None and rejected:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in rejected)
        raise CheckpointError(f"no checkpoint in {store.folder} is whole ({reasons})", "another output_dir")
    return checkpoint, rejected


def count_steps(config: RunConfig, contract: Contract, is_endless: bool) -> int:
    """Return the run's length in steps, from epochs or steps, whichever ends first."""
    if is_endless and config.max_steps is None:
        raise ConfigError("a data set without length has no epochs to count", "max_steps=1000")
    if config.epochs is None and config.max_steps is None:
        raise ConfigError("how long to train was not said", "epochs=10, or max_steps=1000")
    by_epochs = config.epochs * contract.plan.steps_per_epoch if config.epochs else math.inf
    return int(min(by_epochs, config.max_steps or math.inf))


def _check_same_length(data: Any, world: World) -> None:
    lengths = world.all_texts("stream" if is_stream(data) else str(len(data)))
    if len(set(lengths)) > 1:
        raise errors.DataError(
            f"ranks see different numbers of samples: {', '.join(lengths)}",
            "the same data folder on every node",
        )


def agree_on_contract(
    config: RunConfig, data: Any, world_size: int, checkpoint: Checkpoint | None
) -> Contract:
    """Return the batch and rate contract: fresh, or the checkpoint's on this many ranks."""
    plan = plan_for(data, config.batch, world_size)
    effective = scaled_rate(config.rate, world_size, plan.global_batch)
    fresh = Contract(plan, config.rate.lr, config.rate.lr_scaling, effective)
    if checkpoint is None:
        return fresh
    stored = Contract.from_json(checkpoint.meta["contract"])
    return resume_contract(stored, fresh, config.accept_changes)


def choose_precision(wanted: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype to compute in, or None for plain float32."""
    if wanted == "auto":
        on_gpu = device.type == "cuda"
        wanted = ("bf16" if torch.cuda.is_bf16_supported() else "fp16") if on_gpu else "fp32"
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted]


def versions() -> dict[str, str]:
    """Return what a later reader must know to repeat the run."""
    return {"python": platform.python_version(), "torch": str(torch.__version__)}


def write_config(config: RunConfig, world: World) -> None:
    """Write the resolved config into the run folder, as it was understood."""
    facts = {"world_size": world.size, "versions": versions()}
    text = json.dumps({"config": json.loads(config.model_dump_json()), **facts}, indent=2)
    (Path(config.output_dir) / "config.json").write_text(text + "\n")
