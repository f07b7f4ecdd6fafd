"""Build every part of a run, or refuse on all ranks alike what cannot work.

Owns: the order in which things come to life: folder, data, contract, model,
optimizer, checkpoint. Does not own: what happens then; that is the trainer's.
"""

import json
import shutil
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from lockstep.callback import SAME_CALLBACKS, Callback, Callbacks
from lockstep.checkpoint import (
    Checkpoint,
    CheckpointStore,
    FolderLock,
)
from lockstep.checkpoint.layout import damaged
from lockstep.checkpoint.manifest import in_brief
from lockstep.config import RunConfig
from lockstep.data.fingerprint import check_same_samples, is_full_print_due
from lockstep.data.loader import Loader
from lockstep.data.order import num_leaves_of
from lockstep.data.reader import is_stream
from lockstep.dist import position
from lockstep.dist.agreement import check_same, together
from lockstep.dist.batch_norm import padded_step, refuse_padding, synchronise_batch_norm
from lockstep.dist.ddp import Averaging
from lockstep.dist.environment import launched
from lockstep.dist.fsdp import is_sharded, shard
from lockstep.dist.same_state import (
    REGISTER,
    check_registered,
    check_same_model,
    check_same_optimizer,
)
from lockstep.dist.world import World
from lockstep.errors import CheckpointError, ConfigError, own_exit_code
from lockstep.exact.determinism import fingerprint, set_numerics
from lockstep.exact.reducer import ExactReducer
from lockstep.observe.events import log_name
from lockstep.randomness import seed_all, seed_everything
from lockstep.run.average import Averages
from lockstep.run.early_exit import refuse_early_exit
from lockstep.run.rehearsal import rehearsed
from lockstep.run.resume import (
    agree_on_contract,
    changed_data,
    changed_settings,
    check_batch_norm,
    choose_checkpoint,
    contract_or_refusal,
    free_settings,
    resume_if_restarted,
    take_prints,
)
from lockstep.run.run import Run, versions
from lockstep.run_files import refuse_link, refuse_shared, replace_text
from lockstep.task import Task
from lockstep.torch_compat.private import replay_graphs, replays_graphs

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
    """Build the run, restored from its checkpoint where there is one. Collective.

    Callbacks of `world`, which LOCKSTEP_CALLBACKS names among others, come after the given ones.
    """
    position.own.begin_run()
    stack.callback(position.own.leave_run)
    stack.enter_context(own_exit_code())
    refuse_early_exit(stack, world, lambda: "the run had not reached its first step")
    attached = together(world, lambda: Callbacks([*callbacks, *world.callbacks]))
    stack.enter_context(world.inside_run())
    names = ", ".join(name for name, _ in attached.named())
    check_same("callbacks", names or "none", world, SAME_CALLBACKS)
    config = together(world, lambda: attached.configure(task, rehearsed(config), world))
    folder = Path(config.output_dir)
    settings = config.model_dump_json(exclude={"output_dir"}) + json.dumps(task.settings())
    check_same("settings", settings, world)
    set_numerics(config, world.device, stack)
    together(world, lambda: _take_folder(folder, config, world, stack))
    # Two streams: the held-out data do not depend on what the training data drew.
    seed_everything(world.device, config.seed, "training data")
    data = together(world, task.train_data)
    seed_everything(world.device, config.seed, "held-out data")
    held_out = together(world, lambda: _held_out(task))
    check_same("numbers of training samples", _length(data), world)
    check_same("numbers of held-out samples", _length(held_out), world)
    store = CheckpointStore(
        folder / "checkpoints", keep_last=config.checkpoint.keep_last, recipe=task.name
    )
    together(world, lambda: store.restore_replaced() if world.is_first else None)
    if world.all_max(int(launched().is_again))[0]:  # machines count restarts each for itself
        config = together(world, lambda: resume_if_restarted(config, store, launched().job))
    checkpoint, rejected = together(world, lambda: choose_checkpoint(store, config.resume))
    found = f"{checkpoint.path.name} {checkpoint.meta.get('ledger')}" if checkpoint else "none"
    check_same("checkpoints to go on from", found, world)
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
        lambda: contract_or_refusal(
            checkpoint,
            config,
            changed_settings(
                checkpoint, config, task.settings(), task.may_change, free_settings(checkpoint)
            )
            + changed,
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
    check_same_model(model, world)
    if config.sync_batch_norm and world.size > 1:
        together(world, lambda: synchronise_batch_norm(model, world))
    together(world, lambda: check_batch_norm(model, checkpoint, contract.plan, config))
    if (step := padded_step(contract.plan, loader.total_steps)) is not None:
        refuse_padding(model, num_leaves_of(contract.plan, step), world.size)
    if config.parallel == "fsdp":
        together(world, lambda: shard(model, world, task.blocks(model), config.gradients.dtype))
    else:
        model.to(world.device)
    optimizer = together(world, lambda: task.build_optimizer(model, contract.effective_lr))
    own = {id(parameter) for parameter in model.parameters()}
    together(world, lambda: check_registered(optimizer, own, "the model", REGISTER))
    check_same_optimizer(model, optimizer, world)
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
        callbacks=attached,
        trained_at_start=[name for name, p in model.named_parameters() if p.requires_grad],
    )
    if checkpoint is not None:
        together(world, lambda: run.restore(checkpoint))
        together(world, lambda: _settle(store, checkpoint, world))
    if config.compile:
        stack.callback(replay_graphs, replays_graphs())
        replay_graphs(config.compile == "graphs")
        task.compile(model)
        # What a step leaves in the memory of its graphs may be written over from the next one on,
        # and not before: gradients of several micro-batches lie there.
        new_step = torch.compiler.cudagraph_mark_step_begin
        new_step()  # type: ignore[no-untyped-call]
        optimizer.register_step_post_hook(lambda *_: new_step())  # type: ignore[no-untyped-call]
    if config.exact:
        run.exact_reducer = ExactReducer(model, world, task.gathers)
    run.numerics = fingerprint(world.device)
    run.replicate()
    if checkpoint is None:  # only now do all ranks have the first rank's weights
        run.averages = Averages(model, config.averages)
    return run


def is_in(store: CheckpointStore, checkpoint: Checkpoint) -> bool:
    """Say whether a checkpoint is the store's own of its step, not one from elsewhere."""
    return checkpoint.path.resolve() == store.path(checkpoint.step).resolve()


def _settle(store: CheckpointStore, checkpoint: Checkpoint, world: World) -> None:
    """Make the checkpoint that the run resumes from the newest here, with its names.

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
