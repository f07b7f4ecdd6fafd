"""Build every part of a run, or refuse on all ranks alike what cannot work.

Owns: the order in which things come to life: folder, data, contract, model,
optimizer, checkpoint. Does not own: what happens then; that is the trainer's.
"""

import gc
import json
import platform
import shutil
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep import position
from lockstep.agreement import check_alike, together
from lockstep.average import Averages
from lockstep.batch_norm import synchronise_batch_norm
from lockstep.checkpoint import (
    KERNELS,
    Checkpoint,
    CheckpointStore,
    FolderLock,
    fit_groups,
    load_model_state,
    load_optimizer,
    load_scaler,
    snapshot,
)
from lockstep.checkpoint.layout import damaged
from lockstep.checkpoint.manifest import in_brief
from lockstep.config import RunConfig
from lockstep.data.fingerprint import check_same_samples, is_full_print_due
from lockstep.data.ledger import Ledger
from lockstep.data.loader import Loader
from lockstep.data.reader import is_stream
from lockstep.errors import CheckpointError, ConfigError, NonFiniteError, own_exit_code
from lockstep.exact import LeafSum
from lockstep.numerics import fingerprint, settle_numerics
from lockstep.observe.events import log_name
from lockstep.parallel import Averaging, bare, replicate
from lockstep.plan import Contract
from lockstep.progress import Progress
from lockstep.randomness import seed_all, seed_everything
from lockstep.rehearsal import rehearsed
from lockstep.resuming import (
    agree_on_contract,
    agree_to_go_on,
    changed_data,
    changed_settings,
    check_batch_norm,
    choose_checkpoint,
    settled,
    take_prints,
)
from lockstep.run_files import refuse_link, refuse_shared, replace_text
from lockstep.runtime import World, launched
from lockstep.saved_run import check_saved_run, load_progress
from lockstep.sharding import is_sharded, shard
from lockstep.task import Task
from lockstep.trained import TrainedParameters, describe_changes, differences, list_names

SAME_FILES = (
    "build the same data on every rank: take no seed from the rank or the clock, sort file lists, "
    "and read files that all nodes share"
)


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
    prints: dict[str, Any] = field(default_factory=dict)
    """What the data held when the run began."""
    not_compared: list[str] = field(default_factory=list)
    """Which data, "training" or "held-out", could not be compared between ranks."""
    leaf_sum: LeafSum | None = None
    """In exact mode, what adds up."""
    averaging: Averaging | None = None
    """Else, what averages gradients over ranks. One's own, then `replicate`: docs/own_loop.md."""
    numerics: dict[str, str] = field(default_factory=dict)
    rate_factor: float | None = None
    """What `set_rate` was last called with."""
    trained_at_start: list[str] = field(default_factory=list)
    """The parameters that the task's model trains before any is frozen or unfrozen."""
    pending_optimizer: dict[str, Any] | None = None
    """The saved state of an optimizer to which the run had added parameter groups; this one is
    to add them again."""
    broken: Tensor | None = None
    """On a GPU, whether a step of the trainer's was no longer arithmetic; see `train_step`."""

    def __post_init__(self) -> None:
        self.trained = TrainedParameters(bare(self.model), self.optimizer)

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

    def meta(self, progress: Progress) -> dict[str, Any]:
        """Return what a checkpoint says of the run beside its tensors."""
        return {
            "world_size": self.world.size,
            "job": launched().job,
            "contract": self.contract.to_json(),
            "consumed": progress.consumed,
            "ledger": str(progress.ledger),
            "epochs_completed": progress.consumed // self.contract.plan.samples_per_epoch,
            "config": self.config.model_dump(mode="json"),
            "task": self.task.settings(),
            "data": self.prints,
            "trained": self.trained.names,
            "trained_at_start": self.trained_at_start,
            "versions": versions(),
            "numerics": self.numerics,
        }

    def keep_evidence(self, step: int) -> Path:
        """Save the present weights as those that `step` updates left, where no resume looks."""
        store = CheckpointStore(
            Path(self.config.output_dir) / "non_finite", keep_last=None, recipe=self.task.name
        )
        parts = snapshot(self.parts(), self.world.is_first)
        if self.world.is_first:
            plan, loader = self.contract.plan, self.loader
            consumed = loader.consumed_before(step)
            epoch, into = divmod(consumed, plan.samples_per_epoch)
            ledger = Ledger.of_epoch(loader.order, plan, epoch, into)
            progress = Progress(step, consumed, self.progress.best, ledger)
            parts["progress"] = progress.state()
            shutil.rmtree(store.path(step), ignore_errors=True)  # of a run that went another way
            store.save(step, parts, {**self.meta(progress), "names": [], "metrics": {}})
        return store.path(step)

    def set_rate(self, factor: float) -> None:
        """Give every parameter group its base rate times `factor`.

        The base rate of a group that was added during the run is the rate it was added with.
        """
        groups = self.optimizer.param_groups
        if len(groups) < len(self.base_rates):
            raise ConfigError(
                f"the optimizer has {len(groups)} parameter groups and had {len(self.base_rates)}",
                "keep the groups, and set requires_grad of what is not to be trained to False",
            )
        self.base_rates += [group["lr"] for group in groups[len(self.base_rates) :]]
        for group, base in zip(groups, self.base_rates, strict=True):
            group["lr"] = base * factor
        self.rate_factor = factor

    def replicate(self) -> None:
        """Replicate the model, again where it was before; train what requires a gradient now.

        Collective.
        """
        if bare(self.model) is not self.model:
            self.model = bare(self.model)
            gc.collect()  # an error may hold the old replica, which would still take gradients
        way, mb = self.leaf_sum or self.averaging, self.config.gradients.bucket_mb
        self.model = replicate(self.model, self.world, way, mb)
        self.averages.follow()
        pending = self.pending_optimizer
        num_groups = len(pending["param_groups"]) if pending else 0
        self.trained = TrainedParameters(bare(self.model), self.optimizer, num_groups)

    def follow_trained(self) -> str:
        """Replicate the model for the parameters that are trained now. Collective.

        Returns:
            What has changed, in a few words.

        Raises:
            ConfigError: on all ranks: they do not train the same parameters, or some that are in
                no parameter group.
        """
        began, ended = self.trained.changes()
        said = self.world.all_texts(json.dumps([began, ended]))
        other = next((rank for rank, text in enumerate(said) if text != said[0]), None)
        if other is not None:
            here, there = (describe_changes(*json.loads(said[rank])) for rank in (0, other))
            raise ConfigError(
                f"ranks 0 and {other} do not train the same parameters (rank 0: {here}; rank "
                f"{other}: {there})",
                "change requires_grad on every rank, in the same step",
            )
        together(self.world, lambda: self._check_optimized(began))
        pending, groups = self.pending_optimizer, self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        self.base_rates += rates[len(self.base_rates) :]
        if pending and len(groups) == len(pending["param_groups"]):
            together(self.world, lambda: self._load_optimizer(pending))
            self.pending_optimizer = None
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        if self.rate_factor is not None:  # a group that was added has no part in it yet
            self.set_rate(self.rate_factor)
        self.replicate()
        return describe_changes(began, ended)

    def _check_optimized(self, names: list[str]) -> None:
        """Refuse parameters that no update would move."""
        optimized = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        parameters = dict(bare(self.model).named_parameters())
        lost = [name for name in names if id(parameters[name]) not in optimized]
        if lost:
            raise ConfigError(
                f"{list_names(lost)} now require a gradient, and no parameter group of the "
                "optimizer has them",
                "add them with optimizer.add_param_group, or build the optimizer with all "
                "parameters: it leaves out those that are frozen",
            )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take back what `parts` returned; the task's own part came before the model."""
        self._restore_trained(checkpoint)
        self._restore_weights(checkpoint)
        saved = checkpoint.load("optimizer")
        if len(saved["param_groups"]) > len(self.optimizer.param_groups):
            self.pending_optimizer = saved
        self.progress = load_progress(checkpoint)
        self.progress.consumed = self._consumed_now(checkpoint)
        self.loader.seek(self.progress.step, self.progress.consumed)
        self.resumed_from = checkpoint

    def rewind(self) -> int:
        """Take back the weights of the newest checkpoint, but not its place in the data.

        Returns:
            Its step.
        """
        checkpoint, _ = self.store.latest(check_saved_run)
        if checkpoint is None:
            raise NonFiniteError("there is no checkpoint to rewind to", "checkpoint.every_steps")
        self._restore_weights(checkpoint)
        return checkpoint.step

    def _restore_trained(self, checkpoint: Checkpoint) -> None:
        """Freeze and unfreeze what the run had frozen and unfrozen by the checkpoint."""
        then = checkpoint.meta.get("trained")
        began_with = checkpoint.meta.get("trained_at_start", [])
        now, named = self.trained_at_start, dict(bare(self.model).named_parameters())
        if then is None or now == then or not named.keys() >= {*then, *began_with}:
            return  # another model altogether is refused with its weights
        if now != began_with:  # the task has changed, and what it trains now is no accident
            if not self.config.accept_changes:
                changes = describe_changes(*differences(began_with, now))
                raise ConfigError(
                    f"this model does not train what the checkpoint's did: {changes}",
                    "train the same parameters, or pass accept_changes=true",
                )
            return
        for name, parameter in named.items():
            parameter.requires_grad_(name in then)

    def _restore_weights(self, checkpoint: Checkpoint) -> None:
        """Take back model, optimizer, averages and scaler; an error says of which checkpoint."""
        try:
            self._load_weights(checkpoint)
        except CheckpointError as error:
            if str(checkpoint.path) in error.problem:
                raise
            problem = f"{checkpoint.path}: {error.problem}"
            raise CheckpointError(problem, error.remedy) from error

    def _load_weights(self, checkpoint: Checkpoint) -> None:
        load_model_state(bare(self.model), checkpoint.load("model"))
        self._load_optimizer(checkpoint.load("optimizer"))
        for decay in self.config.averages:
            name = f"average_{decay}"
            saved = [p.partition("_")[2] for p in checkpoint.parts if p.startswith("average_")]
            if name not in checkpoint.parts:
                raise CheckpointError(
                    f"{checkpoint.path} holds no average of decay {decay}",
                    f"the decays it was saved with: {', '.join(saved) or 'none'}",
                )
            always = checkpoint.meta.get("trained_at_start", self.trained_at_start)
            self.averages.load_state(decay, checkpoint.load(name), required=always)
        if self.scaler and "scaler" in checkpoint.parts:
            load_scaler(self.scaler, checkpoint.load("scaler"))

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """Take back the optimizer's state, but not silently its old settings."""
        apart = {"params", "lr", "initial_lr", *KERNELS}
        asked = [
            {name: value for name, value in group.items() if name not in apart}
            for group in self.optimizer.param_groups
        ]
        try:
            load_optimizer(self.optimizer, fit_groups(self.optimizer, state))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"the optimizer's saved state does not fit: {error}",
                "use the same optimizer with the same parameter groups",
            ) from error
        for group, wanted in zip(self.optimizer.param_groups, asked, strict=True):
            changed = {n: value for n, value in wanted.items() if not _is_same(group.get(n), value)}
            if changed and not self.config.accept_changes:
                old = ", ".join(f"{n} {group.get(n)} -> {value}" for n, value in changed.items())
                raise ConfigError(
                    f"the checkpoint was trained with another optimizer: {old}",
                    "the old settings, or accept_changes=true to go on with the new ones",
                )
            if changed.keys() - group.keys():  # of another kind: what it has is none of ours
                self.optimizer.state.clear()
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
    position.own.begin_run()
    stack.callback(position.own.leave_run)
    stack.enter_context(own_exit_code())
    config = rehearsed(config)
    folder = Path(config.output_dir)
    settings = config.model_dump_json(exclude={"output_dir"}) + json.dumps(task.settings())
    check_alike("settings", settings, world)
    settle_numerics(config, world.device, stack)
    together(world, lambda: _take_folder(folder, config, world, stack))
    # Two streams: the held-out data do not depend on what the training data drew.
    seed_everything(world.device, config.seed, "training data")
    data = together(world, task.train_data)
    seed_everything(world.device, config.seed, "held-out data")
    held_out = together(world, lambda: _held_out(task))
    check_alike("numbers of training samples", _length(data), world)
    check_alike("numbers of held-out samples", _length(held_out), world)
    store = CheckpointStore(
        folder / "checkpoints", keep_last=config.checkpoint.keep_last, recipe=task.name
    )
    together(world, lambda: store.restore_replaced() if world.is_first else None)
    if world.all_max(int(launched().is_again))[0]:  # machines count restarts each for itself
        config = together(world, lambda: settled(config, store, launched().job))
    checkpoint, rejected = together(world, lambda: choose_checkpoint(store, config.resume))
    found = f"{checkpoint.path.name} {checkpoint.meta.get('ledger')}" if checkpoint else "none"
    check_alike("checkpoints to go on from", found, world)
    is_full = is_full_print_due(world)
    prints = together(world, lambda: take_prints(data, held_out, config.seed, checkpoint, is_full))
    named = {"training": data, "held-out": held_out}
    not_compared = [
        name
        for name, dataset in named.items()
        if not check_same_samples(name, dataset, prints[name], world, SAME_FILES)
    ]
    changed = together(world, lambda: changed_data(checkpoint, prints, named))
    # Not every rank has looked into all files: what one has found counts for all.
    told = map(json.loads, world.all_texts(json.dumps(changed)))
    changed = next((found for found in told if found), [])
    contract = together(
        world,
        lambda: agree_to_go_on(
            checkpoint,
            config,
            changed_settings(checkpoint, config, task.settings(), task.may_change) + changed,
            lambda: agree_on_contract(
                config, data, world.size, checkpoint, task.gathers and not config.exact
            ),
        ),
    )
    for taken in prints.values():
        taken.pop("old_samples", None)  # was for the comparison with the checkpoint alone
    if checkpoint is not None:  # before the model: a vocabulary may size its embedding
        together(world, lambda: _load_task_state(task, checkpoint))

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
    loader.is_compared = loader.is_compared or not is_stream(data)
    together(world, lambda: _settle_folder(folder, task, config, world, store, checkpoint))
    store.generation = world.all_max(store.generation)[0]
    seed_all(config.seed, "weights")
    model = together(world, task.build_model)
    if config.sync_batch_norm and world.size > 1:
        synchronise_batch_norm(model, world)
    together(world, lambda: check_batch_norm(model, checkpoint, contract.plan, config))
    if config.parallel == "fsdp":
        together(world, lambda: shard(model, world, task.blocks(model), config.gradients.dtype))
    else:
        model.to(world.device)
    optimizer = together(world, lambda: task.build_optimizer(model, contract.effective_lr))
    precision, is_whole = choose_precision(config.precision, world.device), not is_sharded(model)
    kind = world.device.type
    if precision == torch.float16 and not is_whole and not all(p.dim() for p in model.parameters()):
        raise ConfigError("parallel=fsdp with fp16 needs parameters with an axis", "precision=bf16")
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
        averages=Averages(model, config.averages if checkpoint else ()),
        scaler=torch.amp.GradScaler(kind) if precision == torch.float16 else None,
        # A cache of the weights, cast, would hold all of them until the end of a pass.
        autocast=torch.autocast(kind, precision, cache_enabled=is_whole) if precision else None,
        store=store,
        rejected=rejected,
        prints=prints,
        not_compared=not_compared,
        averaging=Averaging(world, config.gradients.dtype),
        trained_at_start=[name for name, p in model.named_parameters() if p.requires_grad],
    )
    if checkpoint is not None:
        together(world, lambda: run.restore(checkpoint))
        together(world, lambda: _settle(store, checkpoint, world))
    if config.compile:
        from torch._inductor import config as compiler

        compiler.triton.cudagraphs = config.compile == "graphs"
        task.compile(model)
        # What a step leaves in the memory of its graphs may be written over from the next one on,
        # and not before: gradients of several micro-batches lie there.
        new_step = torch.compiler.cudagraph_mark_step_begin
        new_step()  # type: ignore[no-untyped-call]
        optimizer.register_step_post_hook(lambda *_: new_step())  # type: ignore[no-untyped-call]
    if config.exact:
        run.leaf_sum = LeafSum(model, world, task.gathers)
    run.numerics = fingerprint(world.device)
    run.replicate()
    if checkpoint is None:  # only now do all ranks have the first rank's weights
        run.averages = Averages(model, config.averages)
    return run


def is_in(store: CheckpointStore, checkpoint: Checkpoint) -> bool:
    """Say whether a checkpoint is the store's own of its step, not one from elsewhere."""
    return checkpoint.path.resolve() == store.path(checkpoint.step).resolve()


def _settle(store: CheckpointStore, checkpoint: Checkpoint, world: World) -> None:
    """Make the checkpoint the run goes on from the newest here, with the names it was to have.

    One from elsewhere, or that was set aside, is copied: until the first save the run would
    have nothing else to go on from.
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


def _take_folder(folder: Path, config: RunConfig, world: World, stack: ExitStack) -> None:
    """Lock the run's folder, on the first rank, until the run ends; refuse one that is not safe."""
    refuse_link(folder, log_name(world.rank))
    if world.is_first:
        refuse_shared(folder, config.allow_shared_folder)
        lock = FolderLock(folder)
        lock.acquire()
        stack.callback(lock.release)


def _settle_folder(
    folder: Path,
    task: Task,
    config: RunConfig,
    world: World,
    store: CheckpointStore,
    checkpoint: Checkpoint | None,
) -> None:
    """Take the folder over from earlier groups and write the config down: the run will start.

    What is to be discarded is. From here on nobody else may save into the folder.
    """
    if not world.is_first:
        return
    holds_run = (folder / "config.json").exists()
    if config.resume == "discard" and not holds_run and (folder / "checkpoints").exists():
        raise ConfigError(
            f"{folder} holds checkpoints and no config.json: whose they are is not known, and "
            "nothing is discarded",
            "another output_dir, or remove them yourself",
        )
    try:
        is_own = checkpoint is not None and is_in(store, checkpoint)
        store.take_over(checkpoint.step if checkpoint and is_own else -1)
        if config.resume == "discard" and holds_run:
            store.clear()
            for name in ("events", "samples", "tensorboard"):
                if (folder / name).exists():
                    shutil.rmtree(folder / name)
        facts = {"task": task.settings(), "world_size": world.size, "versions": versions()}
        text = json.dumps({"config": config.model_dump(mode="json"), **facts}, indent=2)
        replace_text(folder, "config.json", text + "\n")
    except OSError as error:
        raise CheckpointError(f"cannot prepare {folder}: {error}", "another output_dir") from error


def _load_task_state(task: Task, checkpoint: Checkpoint) -> None:
    """Give the task what it saved; what it cannot make sense of is the checkpoint's fault."""
    state = checkpoint.load("task")
    if not isinstance(state, Mapping):
        raise damaged(checkpoint.path, f"manifest.json: skeletons.task is {in_brief(state)}")
    try:
        task.load_state(state)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise CheckpointError(
            f"{checkpoint.path}: the task cannot load its saved state (skeletons.task): "
            f"{type(error).__name__}: {error!s:.200} at {Path(place.filename).name}:{place.lineno} "
            f"in {place.name}",
            "resume with the code that saved it, or use an older checkpoint",
        ) from error


def _is_same(saved: Any, built: Any) -> bool:
    """Say whether an optimizer has the same setting, a number or a tensor of the same value."""
    plain = [v.tolist() if isinstance(v, Tensor) else v for v in (saved, built)]
    return bool(plain[0] == plain[1])


def _held_out(task: Task) -> Any:
    """Return the held-out samples, or None when there is not one."""
    data = task.eval_data()
    if data is not None and is_stream(data):
        raise ConfigError("held-out data need a length and an index", "a list of the samples")
    return data if data is not None and len(data) else None


def _length(data: Any) -> str:
    return "none" if data is None else "a stream" if is_stream(data) else str(len(data))


def choose_precision(wanted: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype to compute in, or None for plain float32."""
    if wanted == "auto":
        on_gpu = device.type == "cuda"
        wanted = ("bf16" if torch.cuda.is_bf16_supported() else "fp16") if on_gpu else "fp32"
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted]


def versions() -> dict[str, str]:
    """Return what a later reader must know to repeat the run."""
    return {"python": platform.python_version(), "torch": str(torch.__version__)}
