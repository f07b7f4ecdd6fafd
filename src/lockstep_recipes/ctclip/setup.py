"""Build every part of a CT-CLIP run, or refuse on all ranks alike what cannot work.

Owns: the order in which the spine's parts come to life: folder, data, checkpoint,
contract, words, model, optimizer. Does not own: what happens then (`trainer.py`).
"""

import json
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.agreement import together
from lockstep.checkpoint import Checkpoint, CheckpointStore, FolderLock, load_model_state
from lockstep.data.loader import Loader, LoaderConfig, plan_for
from lockstep.errors import CheckpointError, ConfigError
from lockstep.parallel import bare
from lockstep.plan import BatchConfig, Contract, RateConfig, resume_contract, scaled_rate
from lockstep.randomness import seed_all
from lockstep.runtime import World
from lockstep.setup import Progress, check_alike, choose_checkpoint, versions
from lockstep_recipes.ctclip.config import CTClipConfig
from lockstep_recipes.ctclip.data import VolumeData
from lockstep_recipes.ctclip.launch import choose_precision
from lockstep_recipes.ctclip.task import CTClipTask


@dataclass
class Run:
    """The parts of one run."""

    config: CTClipConfig
    task: CTClipTask
    world: World
    contract: Contract
    loader: Loader
    reading: LoaderConfig
    held_out: VolumeData | None
    model: nn.Module
    optimizer: Optimizer
    autocast: torch.autocast | None
    scaler: torch.amp.GradScaler | None
    store: CheckpointStore
    rejected: list[tuple[Path, str]]
    progress: Progress = field(default_factory=Progress)
    resumed_from: Checkpoint | None = None

    def parts(self) -> dict[str, Any]:
        """Return all that a resumed run needs, by name."""
        return {
            "model": bare(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": self.progress.state(),
            "task": self.task.state(),
            **({"scaler": self.scaler.state_dict()} if self.scaler else {}),
        }

    def meta(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Return what a checkpoint says of itself."""
        return {
            "world_size": self.world.size,
            "contract": self.contract.to_json(),
            "consumed": self.progress.consumed,
            "ledger": str(self.progress.ledger),
            "metrics": metrics,
            "config": json.loads(self.config.model_dump_json()),
            "versions": versions(),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take back what `parts` returned; the task's own part came before the model."""
        load_model_state(bare(self.model), checkpoint.load("model"))
        decay = [group["weight_decay"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(checkpoint.load("optimizer"))
        stored = [group["weight_decay"] for group in self.optimizer.param_groups]
        if stored != decay and not self.config.accept_changes:
            raise ConfigError(
                f"the checkpoint was trained with weight_decay {stored[0]}, not {decay[0]}",
                f"weight_decay: {stored[0]}, or --accept_changes",
            )
        for group, wanted in zip(self.optimizer.param_groups, decay, strict=True):
            group["weight_decay"] = wanted
        if self.scaler and "scaler" in checkpoint.parts:
            self.scaler.load_state_dict(checkpoint.load("scaler"))
        self.progress = Progress.from_state(checkpoint.load("progress"), self.world.device)
        self.loader.seek(self.progress.step, self.progress.consumed)
        self.resumed_from = checkpoint
        if self.world.is_first:
            is_own = checkpoint.path.resolve().parent == self.store.folder.resolve()
            self.store.set_aside_after(checkpoint.step if is_own else -1)


def prepare(config: CTClipConfig, task: CTClipTask, world: World, stack: ExitStack) -> Run:
    """Build the run, restored from its checkpoint where there is one. Collective."""
    check_alike("settings", config.model_dump_json(), world)
    together(world, lambda: _take_folder(config, world, stack))
    data, held_out = together(world, task.train_data), together(world, task.eval_data)
    check_alike("data", f"{len(data)} + {len(held_out)} {task.findings}", world)
    store = CheckpointStore(
        config.folder / "checkpoints", keep_last=config.checkpoint.keep_last_n, recipe=task.name
    )
    checkpoint, rejected = together(world, lambda: choose_checkpoint(store, config.resume))
    found = f"{checkpoint.path.name} {checkpoint.meta.get('ledger')}" if checkpoint else "none"
    check_alike("checkpoints to go on from", found, world)
    contract = together(world, lambda: agree_on_contract(config, len(data), world.size, checkpoint))
    if checkpoint is not None:  # the words before the model: they size its embedding
        task.load_state(checkpoint.load("task"))
    reading = LoaderConfig(
        num_workers=config.data.num_workers,
        prefetch=config.data.prefetch_factor,
        on_bad_sample=config.data.on_bad_sample,
    )
    loader = Loader(
        data,
        world,
        plan=contract.plan,
        epochs=config.training.max_epochs,
        max_steps=config.training.max_steps,
        seed=config.experiment.seed,
        collate=task.collate,
        config=reading,
    )
    seed_all(config.experiment.seed, "weights")
    model = together(world, task.build_model).to(world.device)
    dtype = choose_precision(config.training.mixed_precision, world.device)
    run = Run(
        config=config,
        task=task,
        world=world,
        contract=contract,
        loader=loader,
        reading=reading,
        held_out=held_out if len(held_out) else None,
        model=model,
        optimizer=task.build_optimizer(model, contract.effective_lr),
        autocast=torch.autocast(world.device.type, dtype) if dtype else None,
        scaler=torch.amp.GradScaler(world.device.type) if dtype == torch.float16 else None,
        store=store,
        rejected=rejected,
    )
    if checkpoint is not None:
        together(world, lambda: run.restore(checkpoint))
    run.model = world.replicate(model)
    return run


def _take_folder(config: CTClipConfig, world: World, stack: ExitStack) -> None:
    """Let the first rank lock the run's folder, and write the settings down."""
    if not world.is_first:
        return
    folder, lock = config.folder, FolderLock(config.folder)
    lock.acquire()
    stack.callback(lock.release)
    try:
        if config.resume == "discard" and (folder / "config.json").exists():
            for name in ("checkpoints", "events"):
                shutil.rmtree(folder / name, ignore_errors=True)
        facts = {"world_size": world.size, "versions": versions()}
        values = json.loads(config.model_dump_json())
        (folder / "config.json").write_text(json.dumps({"config": values, **facts}, indent=2))
    except OSError as error:
        raise CheckpointError(
            f"cannot prepare {folder}: {error}", "another checkpoint.save_dir"
        ) from error


def agree_on_contract(
    config: CTClipConfig, num_samples: int, world_size: int, checkpoint: Checkpoint | None = None
) -> Contract:
    """Return the batch and the rate: fresh, or the checkpoint's.

    Raises:
        ConfigError: with each number that has changed since.
    """
    data, training = config.data, config.training
    batch = BatchConfig(
        batch_size=data.batch_size,
        accumulate=training.gradient_accumulation_steps,
        drop_last=data.drop_last,
    )
    rate = RateConfig(
        lr=training.learning_rate,
        lr_scaling=training.lr_scaling,
        reference_batch=training.reference_batch,
    )
    plan = plan_for(range(num_samples), batch, world_size)
    effective = scaled_rate(rate, world_size, plan.global_batch)
    fresh = Contract(plan, rate.lr, rate.lr_scaling, effective, config.experiment.seed)
    if checkpoint is None:
        return fresh
    stored = Contract.from_json(checkpoint.meta["contract"])
    agreed = resume_contract(stored, fresh, config.accept_changes)
    # The same global batch on other ranks is another loss here: fewer pairs meet at a time.
    if stored.plan.total_batch != plan.total_batch and not config.accept_changes:
        raise ConfigError(
            f"the checkpoint was trained with {stored.plan.total_batch} pairs told apart at a time "
            f"({stored.plan.batch_size} x {stored.plan.world_size} ranks), this run would have "
            f"{plan.total_batch}",
            f"{stored.plan.world_size} ranks, or --accept_changes",
        )
    return agreed
