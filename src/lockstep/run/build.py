"""Build every part of a run, or raise the same error on all ranks.

Owns: the order: folder, data, checkpoint, batch plan, model, optimizer. Does not own: the steps,
which the trainer takes.
"""

import inspect
import json
import shutil
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.callback import Callback, collect_callbacks, listed
from lockstep.checkpoint import Checkpoint, CheckpointStore, FolderLock
from lockstep.checkpoint.layout import damaged
from lockstep.checkpoint.manifest import in_brief
from lockstep.config import RunConfig
from lockstep.data.fingerprint import check_same_samples, is_full_fingerprint_due
from lockstep.data.loader import Loader
from lockstep.data.order import num_leaves_of, padded_step
from lockstep.data.reader import is_stream, refuse_data_loader
from lockstep.dist import position
from lockstep.dist.agreement import call_together, check_same, first_of_ranks, together
from lockstep.dist.batch_norm import refuse_padding, synchronise_batch_norm
from lockstep.dist.ddp import Averaging
from lockstep.dist.environment import launched
from lockstep.dist.fsdp import is_sharded, shard
from lockstep.dist.same_state import (
    REGISTER,
    check_registered,
    check_same_model,
    check_same_optimizer,
)
from lockstep.errors import CheckpointError, ConfigError, own_exit_code, shown
from lockstep.exact.determinism import fingerprint, set_numerics
from lockstep.exact.reducer import ExactReducer
from lockstep.observe.events import log_name
from lockstep.plan import BatchPlan, Contract
from lockstep.randomness import seed_all, seed_everything
from lockstep.run.average import Averages
from lockstep.run.early_exit import refuse_early_exit
from lockstep.run.rehearsal import rehearsed
from lockstep.run.resume import (
    Resumed,
    changed_data,
    changed_settings,
    check_batch_norm,
    check_same_choice,
    choose_checkpoint,
    free_settings,
    fresh_contract,
    resume_if_restarted,
    resumed_contract,
    take_fingerprints,
)
from lockstep.run.run import Run, versions
from lockstep.run_files import refuse_link, refuse_shared, replace_text
from lockstep.task import Task
from lockstep.torch_compat.private import check_scaler, replay_graphs, replays_graphs
from lockstep.world import World

SAME_FILES = (
    "build the same data on every rank: take no seed from the rank or the clock, sort file lists, "
    "and read files that all nodes share"
)


def prepare(
    task: Task,
    config: RunConfig,
    world: World,
    stack: ExitStack,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Build the run, and restore its checkpoint if there is one. Collective.

    The callbacks of `world`, such as those in LOCKSTEP_CALLBACKS, are called after `callbacks`.
    """
    position.this_rank.begin_run()
    stack.callback(position.this_rank.leave_run)
    stack.enter_context(own_exit_code())
    refuse_early_exit(stack, world, _lost_before_first_step)
    builder = _Builder(task, config, world, stack)
    builder.attach_callbacks(callbacks)
    with world.phase("open folder"):
        builder.open_folder()
    with world.phase("build data"):
        builder.build_data()
    with world.phase("find checkpoint"):
        builder.find_checkpoint()
        builder.compare_data()
    with world.phase("plan batches"):
        builder.plan_batches()
    with world.phase("build model"):
        builder.build_model()
        builder.build_optimizer()
        return builder.build_run()


def _lost_before_first_step() -> str:
    """Describe what an exit loses; once there is a trainer, it knows."""
    return "the run had not reached its first step" if position.this_rank.step is None else ""


class _Builder:
    """The parts built so far. Public methods are collective; call them in this order."""

    checkpoint: Checkpoint | None
    """The checkpoint to resume from."""
    changed_data: list[str]
    """The differences from the data that the checkpoint was trained with."""

    def __init__(self, task: Task, config: RunConfig, world: World, stack: ExitStack) -> None:
        self.task = task
        self.config = config
        self.world = world
        self.stack = stack

    def attach_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Collect the callbacks and let them change the config."""
        world = self.world
        self.callbacks = collect_callbacks(world, lambda: [*listed(callbacks), *world.callbacks])
        self.stack.enter_context(world.inside_run())
        self.config = call_together(
            world, lambda: self.callbacks.configure(self.task, rehearsed(self.config), world)
        )

    def open_folder(self) -> None:
        """Check that ranks have the same settings, then lock the run's folder."""
        config = self.config
        settings = config.model_dump_json(exclude={"output_dir"}) + json.dumps(self.task.settings())
        check_same("settings", settings, self.world)
        set_numerics(config, self.world.device, self.stack)
        self.folder = Path(config.output_dir)
        together(self.world, self._lock_folder)
        self.store = CheckpointStore(
            self.folder / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            recipe=self.task.name,
        )

    def _lock_folder(self) -> None:
        """Refuse an unsafe folder; on the first rank, lock the folder until the run ends."""
        refuse_link(self.folder, log_name(self.world.rank))
        if self.world.is_first:
            refuse_shared(self.folder, self.config.allow_shared_folder)
            lock = FolderLock(self.folder)
            lock.acquire()
            self.stack.callback(lock.release)

    def build_data(self) -> None:
        """Build the training and the held-out data."""
        world = self.world
        seed = self.config.seed
        # Two streams, so that held-out data do not depend on how training data use theirs.
        seed_everything(world.device, seed, "training data")
        self.data = together(world, self._build_training)
        seed_everything(world.device, seed, "held-out data")
        self.held_out = together(world, self._build_held_out)
        check_same("numbers of training samples", _length(self.data), world)
        check_same("numbers of held-out samples", _length(self.held_out), world)

    def _build_training(self) -> Any:
        data = self.task.train_data()
        refuse_data_loader(data)
        return data

    def _build_held_out(self) -> Any:
        """Return the held-out samples, or None if there are none."""
        data = self.task.eval_data()
        refuse_data_loader(data)
        if data is not None and is_stream(data):
            raise ConfigError(
                "held-out data need a length and an index", "return a list of the samples"
            )
        return data if data is not None and len(data) else None

    def find_checkpoint(self) -> None:
        """Choose the checkpoint to resume from, the same on every rank."""
        world = self.world
        store = self.store
        together(world, lambda: store.restore_replaced() if world.is_first else None)
        if world.all_max(int(launched().is_again))[0]:  # nodes count their restarts separately
            self.config = together(
                world, lambda: resume_if_restarted(self.config, store, launched().job)
            )
        self.resumed = Resumed(
            *together(world, lambda: choose_checkpoint(store, self.config.resume))
        )
        self.checkpoint = self.resumed.checkpoint
        check_same_choice(self.checkpoint, "resume from", world)

    def compare_data(self) -> None:
        """Compare the data between ranks, and with the data that the checkpoint recorded."""
        world = self.world
        named = {"training": self.data, "held-out": self.held_out}
        is_full = is_full_fingerprint_due(world)
        self.fingerprints = together(
            world,
            lambda: take_fingerprints(
                self.data, self.held_out, self.config.seed, self.checkpoint, is_full
            ),
        )
        self.not_compared = [
            name
            for name, dataset in named.items()
            if not check_same_samples(name, dataset, self.fingerprints[name], world, SAME_FILES)
        ]
        changed = together(world, lambda: changed_data(self.checkpoint, self.fingerprints, named))
        self.changed_data = first_of_ranks(changed, world)  # not every rank reads all files
        for taken in self.fingerprints.values():
            taken.pop("old_samples", None)  # only needed for the comparison with the checkpoint

    def plan_batches(self) -> None:
        """Plan steps and micro-batches, and take over the folder: nothing refuses the run now.

        The task gets its saved state before its model: a vocabulary may size its embedding.
        """
        world = self.world
        self.contract, self.resumed.accepted = together(
            world,
            lambda: plan_run(
                self.task, self.config, self.data, world.size, self.checkpoint, self.changed_data
            ),
        )
        call_together(world, self._load_task_state)
        self.loader = together(
            world,
            lambda: build_loader(self.task, self.config, self.data, world, self.contract.plan),
        )
        self.loader.is_compared = self.loader.is_compared or not is_stream(self.data)
        together(world, self._take_folder_over)
        self.store.generation = world.all_max(self.store.generation)[0]

    def _load_task_state(self) -> None:
        """Restore the task's saved state; an error is reported as one of the checkpoint."""
        checkpoint = self.checkpoint
        if checkpoint is None:
            return
        state = checkpoint.load("task")
        if not isinstance(state, Mapping):
            raise damaged(checkpoint.path, f"manifest.json: skeletons.task is {in_brief(state)}")
        try:
            self.task.load_state(state)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise CheckpointError(
                f"{checkpoint.path}: the task cannot load its saved state (skeletons.task): "
                f"{type(error).__name__}: {error!s:.200} at "
                f"{Path(place.filename).name}:{place.lineno} in {place.name}",
                "resume with the code that saved it, or use an older checkpoint",
            ) from error

    def _take_folder_over(self) -> None:
        """Stop earlier runs from saving into the folder, and write config.json.

        With resume=discard the run in the folder is deleted: checkpoints, events, samples,
        TensorBoard files.
        """
        if not self.world.is_first:
            return
        folder = self.folder
        store = self.store
        checkpoint = self.checkpoint
        is_discarding = self.config.resume == "discard"
        holds_run = (folder / "config.json").exists()
        if is_discarding and not holds_run and (folder / "checkpoints").exists():
            raise ConfigError(
                f"{folder} holds checkpoints but no config.json: they may belong to something "
                "else, so nothing was deleted",
                "use another output_dir, or delete them yourself",
            )
        try:
            is_own = checkpoint is not None and is_in(store, checkpoint)
            store.take_over(checkpoint.step if checkpoint and is_own else -1)
            if is_discarding and holds_run:
                store.clear()
                for name in ("events", "samples", "tensorboard"):
                    if (folder / name).exists():
                        shutil.rmtree(folder / name)
            facts = {
                "config": self.config.model_dump(mode="json"),
                "task": self.task.settings(),
                "world_size": self.world.size,
                "versions": versions(),
            }
            replace_text(folder, "config.json", json.dumps(facts, indent=2) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"cannot prepare {folder}: {error}", "use another output_dir"
            ) from error

    def build_model(self) -> None:
        """Build the model, on the device or sharded over ranks."""
        task = self.task
        config = self.config
        world = self.world
        seed_all(config.seed, "weights")
        self.model = model = together(world, task.build_model)
        check_same_model(model, world)
        if config.sync_batch_norm and world.size > 1:
            together(world, lambda: synchronise_batch_norm(model, world))
        together(world, lambda: check_model(model, self.loader, self.checkpoint, config))
        if config.parallel == "fsdp":
            together(world, lambda: shard(model, world, task.blocks(model), config.gradients.dtype))
        else:
            model.to(world.device)

    def build_optimizer(self) -> None:
        """Build the optimizer, and choose the dtype to compute in."""
        world = self.world
        model = self.model
        self.optimizer = together(world, self._build_optimizer)
        check_same_optimizer(model, self.optimizer, world)
        self.dtype = choose_precision(self.config.precision, world.device)
        has_scalar = any(p.dim() == 0 for p in model.parameters())
        if self.dtype == torch.float16 and is_sharded(model) and has_scalar:
            raise ConfigError(
                "parallel=fsdp with precision=fp16 cannot train parameters without dimensions",
                "set precision=bf16, or give scalar parameters one dimension",
            )

    def _build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.task.build_optimizer(self.model, self.contract.effective_lr)
        check_optimizer(optimizer)
        own = {id(parameter) for parameter in self.model.parameters()}
        check_registered(optimizer, own, "the model", REGISTER)
        return optimizer

    def build_run(self) -> Run:
        """Put the parts together, restore them, compile and replicate the model."""
        config = self.config
        world = self.world
        checkpoint = self.checkpoint
        run = self._put_together()
        if checkpoint is not None:
            call_together(world, lambda: run.restore(checkpoint))
            together(world, lambda: _make_newest(self.store, checkpoint, world))
        if config.compile:
            self._compile()
        if config.exact:
            run.exact_reducer = ExactReducer(self.model, world, self.task.gathers)
        run.numerics = fingerprint(world.device)
        run.replicate()
        if checkpoint is None:  # `replicate` has just copied the first rank's weights to all
            run.averages = Averages(self.model, config.averages)
        return run

    def _put_together(self) -> Run:
        config = self.config
        model = self.model
        kind = self.world.device.type
        scaler = torch.amp.GradScaler(kind) if self.dtype == torch.float16 else None
        if scaler:
            check_scaler(scaler)
        autocast = None
        if self.dtype:
            # A cache of the cast weights would keep gathered shards until the end of a pass.
            autocast = torch.autocast(kind, self.dtype, cache_enabled=not is_sharded(model))
        return Run(
            task=self.task,
            config=config,
            world=self.world,
            contract=self.contract,
            loader=self.loader,
            held_out=self.held_out,
            model=model,
            optimizer=self.optimizer,
            averages=Averages(model, config.averages if self.checkpoint else ()),
            scaler=scaler,
            autocast=autocast,
            store=self.store,
            resumed=self.resumed,
            fingerprints=self.fingerprints,
            not_compared=self.not_compared,
            averaging=Averaging(self.world, config.gradients.dtype),
            callbacks=self.callbacks,
            trained_at_start=[name for name, p in model.named_parameters() if p.requires_grad],
        )

    def _compile(self) -> None:
        self.stack.callback(replay_graphs, replays_graphs())
        replay_graphs(self.config.compile == "graphs")
        self.task.compile(self.model)
        # A new graph step may overwrite memory of the one before, where gradients accumulate
        # over micro-batches. So begin a graph step only after an update.
        new_step = torch.compiler.cudagraph_mark_step_begin
        new_step()  # type: ignore[no-untyped-call]
        self.optimizer.register_step_post_hook(lambda *_: new_step())  # type: ignore[no-untyped-call]


def check_optimizer(optimizer: Any) -> None:
    """Refuse what is not an optimizer, or one that calls the loss itself."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"build_optimizer returned {shown(optimizer)}, not a torch.optim.Optimizer",
            "return one optimizer; parameters may be in several groups of it",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__}.step needs a closure, which computes the loss again",
            "use an optimizer that takes one gradient per step, such as AdamW",
        )


def plan_run(
    task: Task,
    config: RunConfig,
    data: Any,
    world_size: int,
    checkpoint: Checkpoint | None,
    changed_data: list[str],
) -> tuple[Contract, list[str]]:
    """Return the batch and rate of a run on `world_size` ranks, and the accepted changes.

    Raises:
        ConfigError: no run is possible with these numbers; or the settings and data differ from
            the checkpoint's, each with its old and new value.
    """
    if checkpoint is None:
        return fresh_contract(config, data, world_size), []
    gathers = task.gathers and not config.exact
    contract, change = resumed_contract(config, data, world_size, checkpoint, gathers)
    free = free_settings(checkpoint)
    changes = changed_settings(checkpoint, config, task.settings(), task.may_change, free)
    changes += changed_data
    if change and not (changes or config.accept_changes):
        raise ConfigError(*change)
    changes += [change.problem] if change else []
    if changes and not config.accept_changes:
        raise ConfigError(
            f"settings or data differ from the checkpoint's: {'; '.join(changes)}",
            "restore the old values, or pass accept_changes=true to continue with the new ones",
        )
    return contract, changes


def build_loader(task: Task, config: RunConfig, data: Any, world: World, plan: BatchPlan) -> Loader:
    """Return the loader of a run's training data."""
    needs_epochs = config.schedule.warmup_epochs or not config.checkpoint.every_steps
    if is_stream(data) and needs_epochs:
        raise ConfigError(
            "the training data are a stream, which has no epochs: warm-up and saving must be set "
            "in steps",
            "set schedule.warmup_steps and checkpoint.every_steps",
        )
    return Loader(
        data,
        world,
        plan=plan,
        epochs=config.epochs,
        max_steps=config.max_steps,
        seed=config.seed,
        order=task.order(data, config.seed),
        collate=task.collate,
        config=config.loader,
    )


def check_model(
    model: nn.Module, loader: Loader, checkpoint: Checkpoint | None, config: RunConfig
) -> None:
    """Refuse a model whose batch normalisation would see other samples than it should."""
    plan = loader.plan
    check_batch_norm(model, checkpoint, plan, config)
    step = padded_step(plan, loader.total_steps)
    if step is not None:
        refuse_padding(model, num_leaves_of(plan, step), plan.world_size)


def is_in(store: CheckpointStore, checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is the one of its step in this store."""
    return checkpoint.path.resolve() == store.path(checkpoint.step).resolve()


def _make_newest(store: CheckpointStore, checkpoint: Checkpoint, world: World) -> None:
    """Make the checkpoint that the run resumes from the newest of the store, with its names.

    A checkpoint from another folder, or one that was set aside, is copied: otherwise the folder
    would have none until the first save.
    """
    if not world.is_first:
        return
    is_own = is_in(store, checkpoint)
    store.set_aside_after(checkpoint.step if is_own else -1)
    if not is_own:
        parts = {part: checkpoint.load(part) for part in checkpoint.parts}
        store.save(checkpoint.step, parts, checkpoint.meta)
    for name in checkpoint.meta.get("names", []):
        store.name(checkpoint.step, name)


def _length(data: Any) -> str:
    if data is None:
        return "none"
    return "a stream" if is_stream(data) else str(len(data))


def choose_precision(wanted: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype to compute in, or None for plain float32."""
    if wanted == "auto":
        on_gpu = device.type == "cuda"
        wanted = ("bf16" if torch.cuda.is_bf16_supported() else "fp16") if on_gpu else "fp32"
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted]
