"""Build every part of a run, or refuse on all ranks alike what cannot work.

Owns: the order in which things come to life: folder, data, contract, model,
optimizer, checkpoint. Does not own: what happens then; that is the trainer's.
"""

import json
import platform
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.agreement import together
from lockstep.average import Averages
from lockstep.batch_norm import synchronise_batch_norm
from lockstep.checkpoint import Checkpoint, CheckpointStore, FolderLock, load_model_state
from lockstep.config import RunConfig
from lockstep.data.ledger import Ledger
from lockstep.data.loader import Loader, StepBatch, plan_for
from lockstep.data.reader import is_stream
from lockstep.errors import CheckpointError, ConfigError
from lockstep.parallel import bare, replicate
from lockstep.plan import Contract, resume_contract, scaled_rate
from lockstep.randomness import seed_all
from lockstep.rehearsal import rehearsed
from lockstep.runtime import World
from lockstep.step import StepReport
from lockstep.task import Task


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
class Run:
    """The parts of one run."""

    task: Task
    config: RunConfig
    world: World
    contract: Contract
    loader: Loader
    held_out: Any
    model: nn.Module
    optimizer: Optimizer
    base_rates: list[float]
    averages: Averages
    scaler: torch.amp.GradScaler | None
    autocast: torch.autocast | None
    store: CheckpointStore
    progress: Progress = field(default_factory=Progress)
    resumed_from: Checkpoint | None = None
    rejected: list[tuple[Path, str]] = field(default_factory=list)

    def parts(self) -> dict[str, Any]:
        """Return all that a resumed run needs, by name."""
        return {
            "model": bare(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": self.progress.state(),
            "task": self.task.state(),
            **{f"average_{d}": self.averages.state(d) for d in self.config.averages},
            **({"scaler": self.scaler.state_dict()} if self.scaler else {}),
        }

    def set_rate(self, factor: float) -> None:
        """Give every parameter group its base rate times `factor`."""
        for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = base * factor

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take back what `parts` returned; the task's own part came before the model."""
        load_model_state(bare(self.model), checkpoint.load("model"))
        self._load_optimizer(checkpoint.load("optimizer"))
        self.progress = Progress.from_state(checkpoint.load("progress"), self.world.device)
        for decay in self.config.averages:
            name = f"average_{decay}"
            saved = [p.partition("_")[2] for p in checkpoint.parts if p.startswith("average_")]
            if name not in checkpoint.parts:
                raise CheckpointError(
                    f"{checkpoint.path} holds no average of decay {decay}",
                    f"the decays it was saved with: {', '.join(saved) or 'none'}",
                )
            self.averages.load_state(decay, checkpoint.load(name))
        if self.scaler and "scaler" in checkpoint.parts:
            self.scaler.load_state_dict(checkpoint.load("scaler"))
        self.progress.consumed = self._consumed_now(checkpoint)
        self.loader.seek(self.progress.step, self.progress.consumed)
        self.resumed_from = checkpoint

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """Take back the optimizer's state, but not silently its old settings."""
        apart = {"params", "lr", "initial_lr", "fused", "foreach", "capturable", "differentiable"}
        asked = [
            {name: value for name, value in group.items() if name not in apart}
            for group in self.optimizer.param_groups
        ]
        try:
            self.optimizer.load_state_dict(state)
        except ValueError as error:
            raise CheckpointError(
                f"the optimizer's saved state does not fit: {error}", "the same parameter groups"
            ) from error
        for group, wanted in zip(self.optimizer.param_groups, asked, strict=True):
            changed = {name: value for name, value in wanted.items() if group[name] != value}
            if changed and not self.config.accept_changes:
                old = ", ".join(f"{n} {group[n]} -> {value}" for n, value in changed.items())
                raise ConfigError(
                    f"the checkpoint was trained with another optimizer: {old}",
                    "the old settings, or accept_changes=true to go on with the new ones",
                )
            group.update(changed)

    def _consumed_now(self, checkpoint: Checkpoint) -> int:
        """Return the position, moved to a whole step where an accepted change cut epochs anew."""
        stored, plan = Contract.from_json(checkpoint.meta["contract"]).plan, self.contract.plan
        kept = (stored.samples_per_epoch, stored.global_batch)
        if kept == (plan.samples_per_epoch, plan.global_batch):
            return self.progress.consumed
        epochs, into = divmod(self.progress.consumed, stored.samples_per_epoch)
        whole = min(into, plan.samples_per_epoch - 1) // plan.global_batch * plan.global_batch
        return epochs * plan.samples_per_epoch + whole


def prepare(task: Task, config: RunConfig, world: World, stack: ExitStack) -> Run:
    """Build the run, restored from its checkpoint where there is one. Collective."""
    config = rehearsed(config)
    folder = Path(config.output_dir)
    settings = config.model_dump_json(exclude={"output_dir"}) + json.dumps(task.settings())
    check_alike("settings", settings, world)
    together(world, lambda: _take_folder(folder, world, stack))
    data = together(world, task.train_data)
    held_out = together(world, lambda: _held_out(task))
    check_alike("numbers of training samples", _length(data), world)
    check_alike("numbers of held-out samples", _length(held_out), world)
    store = CheckpointStore(
        folder / "checkpoints", keep_last=config.checkpoint.keep_last, recipe=task.name
    )
    checkpoint, rejected = together(world, lambda: choose_checkpoint(store, config.resume))
    found = f"{checkpoint.path.name} {checkpoint.meta.get('ledger')}" if checkpoint else "none"
    check_alike("checkpoints to go on from", found, world)
    contract = together(
        world, lambda: agree_on_contract(config, data, world.size, checkpoint, task.gathers)
    )
    if checkpoint is not None:  # before the model: a vocabulary may size its embedding
        together(world, lambda: task.load_state(checkpoint.load("task")))

    def build_loader() -> Loader:
        if is_stream(data) and (config.schedule.warmup_epochs or not config.checkpoint.every_steps):
            raise ConfigError(
                "a stream of training data has no epochs to warm up by or to save after",
                "schedule.warmup_steps and checkpoint.every_steps",
            )
        return Loader(
            data,
            world,
            plan=contract.plan,
            epochs=config.epochs,
            max_steps=config.max_steps,
            seed=config.seed,
            order=task.order(data, config.seed),
            collate=task.collate,
            config=config.loader,
        )

    loader = together(world, build_loader)
    together(world, lambda: _settle_folder(folder, task, config, world))
    seed_all(config.seed, "weights")
    model = together(world, task.build_model).to(world.device)
    if config.sync_batch_norm and world.size > 1:
        synchronise_batch_norm(model, world)
    optimizer = together(world, lambda: task.build_optimizer(model, contract.effective_lr))
    precision = choose_precision(config.precision, world.device)
    run = Run(
        task=task,
        config=config,
        world=world,
        contract=contract,
        loader=loader,
        held_out=held_out,
        model=model,
        optimizer=optimizer,
        base_rates=[group["lr"] for group in optimizer.param_groups],
        averages=Averages(model, config.averages),
        scaler=torch.amp.GradScaler(world.device.type) if precision == torch.float16 else None,
        autocast=torch.autocast(world.device.type, precision) if precision else None,
        store=store,
        rejected=rejected,
    )
    if checkpoint is not None:
        together(world, lambda: run.restore(checkpoint))
        together(world, lambda: _settle(store, checkpoint, world))
    if config.compile:
        task.compile(model)
    run.model = replicate(model, world)
    return run


def _settle(store: CheckpointStore, checkpoint: Checkpoint, world: World) -> None:
    """Make the checkpoint the run goes on from the newest here, with the names it was to have."""
    if not world.is_first:
        return
    is_own = checkpoint.path.resolve().parent == store.folder.resolve()
    store.set_aside_after(checkpoint.step if is_own else -1)
    for name in checkpoint.meta.get("names", []) if is_own else []:
        store.name(checkpoint.step, name)


def _take_folder(folder: Path, world: World, stack: ExitStack) -> None:
    """Lock the run's folder, on the first rank, until the run ends."""
    if world.is_first:
        lock = FolderLock(folder)
        lock.acquire()
        stack.callback(lock.release)


def _settle_folder(folder: Path, task: Task, config: RunConfig, world: World) -> None:
    """Discard what is to be discarded and write the config down, now that the run will start."""
    if not world.is_first:
        return
    try:
        if config.resume == "discard" and (folder / "config.json").exists():
            for name in ("checkpoints", "events", "samples", "tensorboard"):
                if (folder / name).exists():
                    shutil.rmtree(folder / name)
        facts = {"task": task.settings(), "world_size": world.size, "versions": versions()}
        text = json.dumps({"config": config.model_dump(mode="json"), **facts}, indent=2)
        (folder / "config.json").write_text(text + "\n")
    except OSError as error:
        raise CheckpointError(f"cannot prepare {folder}: {error}", "another output_dir") from error


def _held_out(task: Task) -> Any:
    """Return the held-out samples, or None when there is not one."""
    data = task.eval_data()
    if data is not None and is_stream(data):
        raise ConfigError("held-out data need a length and an index", "a list of the samples")
    return data if data is not None and len(data) else None


def _length(data: Any) -> str:
    return "none" if data is None else "a stream" if is_stream(data) else str(len(data))


def choose_checkpoint(
    store: CheckpointStore, resume: str
) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    """Return the checkpoint to go on from, and why newer ones were passed over."""
    if resume == "discard":
        return None, []
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
        raise CheckpointError(
            f"no checkpoint in {store.folder} is whole ({reasons})", "another output_dir"
        )
    return checkpoint, rejected


def check_alike(what: str, local: str, world: World) -> None:
    """Refuse a run whose ranks do not agree on something they must share. Collective."""
    said = world.all_texts(local)
    if len(set(said)) > 1:
        rank = next(rank for rank, text in enumerate(said) if text != said[0])
        short = " against ".join(_around_difference(said[0], said[rank]))
        raise ConfigError(
            f"ranks 0 and {rank} see different {what}: {short}",
            "the same flags everywhere, and folders that all nodes share",
        )


def _around_difference(a: str, b: str) -> tuple[str, str]:
    """Return both texts, cut to where they part."""
    start = max(0, next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0) - 30)
    return a[start : start + 60], b[start : start + 60]


def agree_on_contract(
    config: RunConfig,
    data: Any,
    world_size: int,
    checkpoint: Checkpoint | None = None,
    gathers: bool = False,
) -> Contract:
    """Return the batch and rate contract: fresh, or the checkpoint's on this many ranks."""
    plan = plan_for(data, config.batch, world_size)
    effective = scaled_rate(config.rate, world_size, plan.global_batch)
    fresh = Contract(plan, config.rate.lr, config.rate.lr_scaling, effective, config.seed)
    if checkpoint is None:
        return fresh
    if "contract" not in checkpoint.meta:
        raise CheckpointError(
            f"{checkpoint.path} was saved by a loop of its own", "that loop, or another output_dir"
        )
    stored = Contract.from_json(checkpoint.meta["contract"])
    asked = config.batch.global_batch_size
    if asked is not None and not config.accept_changes and asked != stored.plan.global_batch:
        raise ConfigError(
            f"the checkpoint was trained with global_batch_size {stored.plan.global_batch}, "
            f"this run asks for {asked}",
            "the old number, or accept_changes=true to go on with the new one",
        )
    agreed, was = resume_contract(stored, fresh, config.accept_changes), stored.plan
    # The same global batch on other ranks is another loss here: fewer samples meet at a time.
    if gathers and agreed.plan.total_batch != was.total_batch and not config.accept_changes:
        raise ConfigError(
            f"the loss compares the samples of all ranks: the checkpoint was trained with "
            f"{was.total_batch} at a time ({was.batch_size} x {was.world_size} ranks), this run "
            f"would have {agreed.plan.total_batch}",
            f"{was.world_size} ranks, or accept_changes=true",
        )
    return agreed


def choose_precision(wanted: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype to compute in, or None for plain float32."""
    if wanted == "auto":
        on_gpu = device.type == "cuda"
        wanted = ("bf16" if torch.cuda.is_bf16_supported() else "fp16") if on_gpu else "fp32"
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted]


def versions() -> dict[str, str]:
    """Return what a later reader must know to repeat the run."""
    return {"python": platform.python_version(), "torch": str(torch.__version__)}
