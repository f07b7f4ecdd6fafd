"""One run: its parts, and how they are saved and restored together.

Owns: the state of a run. Does not own: building it (`build.py`) or taking its steps.
"""

import gc
import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.callback import Callbacks
from lockstep.checkpoint import (
    KERNELS,
    Checkpoint,
    CheckpointStore,
    fit_groups,
    load_model_state,
    load_optimizer,
    load_scaler,
    snapshot,
)
from lockstep.config import RunConfig
from lockstep.data.ledger import Ledger
from lockstep.data.loader import Loader
from lockstep.dist.agreement import call_together, naming, together
from lockstep.dist.batch_norm import synchronises_itself
from lockstep.dist.ddp import Averaging, replicate, unwrap
from lockstep.dist.environment import launched
from lockstep.dist.same_state import REGISTER, check_registered, check_same_optimizer
from lockstep.dist.trained import (
    TrainedParameters,
    describe_changes,
    list_names,
    name_changes,
    not_optimized,
)
from lockstep.errors import CheckpointError, ConfigError, NonFiniteError
from lockstep.exact.reducer import ExactReducer
from lockstep.plan import Contract
from lockstep.run.average import Averages
from lockstep.run.progress import Progress
from lockstep.run.rates import LearningRates
from lockstep.run.resume import Resumed, changes_best, check_same_choice
from lockstep.run.saved_run import check_saved_run, load_progress
from lockstep.step.train_step import TrainStep
from lockstep.step.update import new_non_finite_flag
from lockstep.task import Task
from lockstep.world import World


@dataclass
class Run:
    """The parts of one run."""

    is_custom_loop = False
    task: Task
    config: RunConfig
    world: World
    contract: Contract
    loader: Loader
    held_out: Any
    model: nn.Module
    optimizer: Optimizer
    averages: Averages
    scaler: torch.amp.GradScaler | None
    autocast: torch.autocast | None
    store: CheckpointStore
    progress: Progress = field(default_factory=Progress)
    resumed: Resumed = field(default_factory=Resumed)
    fingerprints: dict[str, Any] = field(default_factory=dict)
    """Fingerprints of the data when the run began."""
    not_compared: list[str] = field(default_factory=list)
    """The data, "training" or "held-out", that could not be compared between ranks."""
    exact_reducer: ExactReducer | None = None
    """Exact mode's gradient reducer, or None."""
    averaging: Averaging | None = None
    """How gradients are averaged over ranks, except in exact mode. Set your own before
    `replicate`; see docs/own_loop.md."""
    numerics: dict[str, str] = field(default_factory=dict)
    optimizer_as_built: list[dict[str, Any]] = field(default_factory=list)
    """The settings of each parameter group as the task built or added it: a schedule may change
    them later."""
    trained_at_start: list[str] = field(default_factory=list)
    """The trained parameters of the model as the task built it."""
    callbacks: Callbacks = field(default_factory=Callbacks)
    logged: dict[str, tuple[Tensor | float, int]] = field(default_factory=dict)
    """Sum and number of the values that callbacks logged on this rank since the last log line."""
    stop_reason: str = ""
    """Why a callback of this rank asked the run to stop."""
    stops_unsaved: bool = False
    """Whether it asked to stop without a last checkpoint."""
    uses_task_loss: bool = False
    """Whether the trainer has taken a step with the task's own loss."""
    non_finite: Tensor | None = None
    """On a GPU: the sticky flag of the trainer's own steps, once it has taken one."""
    take_step: TrainStep | None = None
    """Takes the trainer's own steps, with the model as it was last replicated."""
    trained: TrainedParameters = field(init=False)
    """The trained parameters of the model as it was last replicated."""
    rates: LearningRates = field(init=False)

    def __post_init__(self) -> None:
        self.trained = TrainedParameters(unwrap(self.model), self.optimizer)
        self.rates = LearningRates(self.optimizer.param_groups)
        self._note_settings()

    @property
    def agrees_on_memory(self) -> bool:
        """Whether ranks agree in each step that it fits into the memory of all of them."""
        # A loss that compares samples changes with the size of micro-batches.
        gathers = self.task.gathers and (self.world.size > 1 or not self.config.exact)
        communicates = self.world.size > 1 and (
            self.config.sync_batch_norm
            or self.config.parallel == "fsdp"
            or synchronises_itself(unwrap(self.model))
        )
        return self.config.on_out_of_memory == "halve" and not (gathers or communicates)

    @property
    def step(self) -> int:
        """The number of weight updates so far."""
        return self.progress.step

    def log(self, name: str, value: Tensor | float) -> None:
        """Add a number to the next log line: the mean over calls since the last, on all ranks."""
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ConfigError(
                f"run.log({name!r}, ...) got a tensor of shape {tuple(value.shape)}, not a number",
                "pass its mean (value.mean()), or each number with a name of its own",
            )
        number = value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
        total, num = self.logged.get(name, (0.0, 0))
        self.logged[name] = (total + number, num + 1)

    def stop(self, reason: str, *, save: bool = True) -> None:
        """Ask for a clean stop after this step, on all ranks, with exit code 0; saved, or not."""
        self.stop_reason = reason or "a callback asked for it"
        self.stops_unsaved = not save

    def parts(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, by name."""
        callbacks = self.callbacks.state_dict()
        return {
            **({"callbacks": callbacks} if callbacks else {}),
            "model": unwrap(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": self.progress.state(),
            "task": self.task_state(),
            **{f"average_{d}": self.averages.state(d) for d in self.config.averages},
            **({"scaler": self.scaler.state_dict()} if self.scaler else {}),
        }

    def task_state(self) -> dict[str, Any]:
        """Return the state of the task; an exception gets a note of its class."""
        return naming(f"{type(self.task).__name__}.state", self.task.state)

    def meta(self, progress: Progress) -> dict[str, Any]:
        """Return the meta data of a checkpoint."""
        return {
            "world_size": self.world.size,
            "job": launched().job,
            "contract": self.contract.to_json(),
            "consumed": progress.consumed,
            "ledger": str(progress.ledger),
            "epochs_completed": progress.consumed // self.contract.plan.samples_per_epoch,
            "config": self.config.model_dump(mode="json"),
            "task": self.task.settings(),
            "data": self.fingerprints,
            "optimizer_as_built": self.optimizer_as_built,
            "trained": self.trained.names,
            "trained_at_start": self.trained_at_start,
            "versions": versions(),
            "numerics": self.numerics,
        }

    def save_before_non_finite(self, step: int) -> Path:
        """Save the weights after `step` updates to a folder that no resume reads."""
        store = CheckpointStore(
            Path(self.config.output_dir) / "non_finite", keep_last=None, recipe=self.task.name
        )
        parts = snapshot(call_together(self.world, self.parts), self.world.is_first)
        if self.world.is_first:
            plan = self.contract.plan
            loader = self.loader
            consumed = loader.consumed_before(step)
            epoch, into = divmod(consumed, plan.samples_per_epoch)
            ledger = Ledger.of_epoch(loader.order, plan, epoch, into)
            progress = Progress(step, consumed, self.progress.best, ledger)
            parts["progress"] = progress.state()
            shutil.rmtree(store.path(step), ignore_errors=True)  # left by an earlier run
            store.save(step, parts, {**self.meta(progress), "names": [], "metrics": {}})
        return store.path(step)

    def set_rate(self, factor: float) -> None:
        """Give every parameter group its base rate times `factor`.

        For a group added during the run, the base rate is the rate it was added with.

        Raises:
            ConfigError: a group no longer has the rate that the last call gave it.
        """
        self.rates.set(self.optimizer.param_groups, factor)
        self._note_settings()  # of the same new groups as the rates

    def _note_settings(self) -> None:
        """Remember the settings of parameter groups that are new."""
        groups = self.optimizer.param_groups
        self.optimizer_as_built += map(_plain_settings, groups[len(self.optimizer_as_built) :])

    def replicate(self) -> None:
        """Replicate the model, or replicate it again, for the parameters that require a gradient.

        Collective.
        """
        self.take_step = None
        is_again = unwrap(self.model) is not self.model
        if is_again:
            self.model = unwrap(self.model)
            gc.collect()  # an exception may keep the old replica, whose hooks would still run
        averaging = self.exact_reducer or self.averaging
        bucket_mb = self.config.gradients.bucket_mb
        self.model = replicate(self.model, self.world, averaging, bucket_mb, is_again)
        self.averages.add_trained()
        pending = self.resumed.pending_optimizer
        num_groups = len(pending["param_groups"]) if pending else 0
        self.trained = TrainedParameters(unwrap(self.model), self.optimizer, num_groups)
        self.take_step = self._build_step()

    def _build_step(self) -> TrainStep:
        device, flag = self.world.device, self.non_finite
        if self.config.on_non_finite == "stop" and device.type == "cuda" and not self.scaler:
            flag = new_non_finite_flag(device) if flag is None else flag
        return TrainStep(
            self.task.loss,
            self.model,
            self.optimizer,
            self.world,
            **self.step_options(),
            non_finite=flag,
            agree_on_memory=self.agrees_on_memory,
        )

    def step_options(self) -> dict[str, Any]:
        """Return the keyword arguments that the config and this run give `train_step`."""
        return {
            "weights": self.task.weights,
            "seed": self.config.seed,
            "max_grad_norm": self.config.max_grad_norm,
            "autocast": self.autocast,
            "scaler": self.scaler,
            "exact_reducer": self.exact_reducer,
            "trained": self.trained,
            "buffers_later": True,
        }

    def update_trained(self) -> str:
        """Replicate the model for the parameters that are now trained. Collective.

        Returns:
            The changes, for a log line.

        Raises:
            ConfigError: on all ranks: they train different parameters, or some that are in no
                parameter group.
        """
        began, ended = self.trained.changes()
        changes = self.world.all_values([began, ended])
        other = next((rank for rank, own in enumerate(changes) if own != changes[0]), None)
        if other is not None:
            here, there = (describe_changes(*changes[rank]) for rank in (0, other))
            raise ConfigError(
                f"ranks 0 and {other} do not train the same parameters (rank 0: {here}; rank "
                f"{other}: {there})",
                "change requires_grad on every rank, in the same step",
            )
        together(self.world, lambda: self._check_optimized(began))
        check_same_optimizer(unwrap(self.model), self.optimizer, self.world)
        resumed = self.resumed
        pending = resumed.pending_optimizer
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        self.rates.note_new(groups)
        self._note_settings()
        if pending and len(groups) == len(pending["param_groups"]):
            assert resumed.checkpoint is not None
            built = resumed.checkpoint.meta.get("optimizer_as_built")
            together(self.world, lambda: self._load_optimizer(pending, built))
            resumed.pending_optimizer = None
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        if self.rates.factor is not None:  # applies it to added groups, too
            self.set_rate(self.rates.factor)
        self.replicate()
        return describe_changes(began, ended)

    def _check_optimized(self, names: list[str]) -> None:
        """Refuse trained parameters that the optimizer does not have."""
        parameters = dict(unwrap(self.model).named_parameters())
        own = {id(parameter) for parameter in parameters.values()}
        check_registered(self.optimizer, own, "the model", REGISTER)
        lost = [name for name in not_optimized(parameters, self.optimizer) if name in names]
        if lost:
            raise ConfigError(
                "these parameters now require a gradient, but no parameter group of the optimizer "
                f"has them: {list_names(lost)}",
                "add them with optimizer.add_param_group, or build the optimizer with all "
                "parameters (it skips frozen ones)",
            )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore what `parts` returned, except the task's state, which is already restored."""
        self._restore_trained(checkpoint)
        optimizer_state = self._restore_weights(checkpoint)
        if len(optimizer_state["param_groups"]) > len(self.optimizer.param_groups):
            self.resumed.pending_optimizer = optimizer_state
        if "callbacks" in checkpoint.parts:
            states = checkpoint.load("callbacks")
            self.resumed.unclaimed_states = self.callbacks.load_state_dict(states)
        self.progress = load_progress(checkpoint)
        if changes_best(checkpoint, self.config):
            self.progress.best = None
        self.progress.consumed = self._consumed_now(checkpoint)
        self.loader.seek(self.progress.step, self.progress.consumed)

    def rewind(self) -> int:
        """Restore the newest checkpoint's weights, not its position in the data. Collective.

        Returns:
            The checkpoint's step.
        """
        checkpoint, _ = together(self.world, lambda: self.store.latest(check_saved_run))
        check_same_choice(checkpoint, "rewind to", self.world)
        if checkpoint is None:
            raise NonFiniteError(
                "there is no checkpoint to rewind to", "set checkpoint.every_steps"
            )
        self._restore_weights(checkpoint)
        return checkpoint.step

    def _restore_trained(self, checkpoint: Checkpoint) -> None:
        """Freeze and unfreeze parameters as the run had done by the checkpoint."""
        then = checkpoint.meta.get("trained")
        at_start = checkpoint.meta.get("trained_at_start", [])
        now = self.trained_at_start
        named = dict(unwrap(self.model).named_parameters())
        if then is None or now == then or not named.keys() >= {*then, *at_start}:
            return  # another model is refused when its weights are loaded
        if now != at_start:  # the task now trains other parameters on purpose
            changes = describe_changes(*name_changes(at_start, now))
            self.resumed.accepted.append(f"trained parameters: {changes}")
            if not self.config.accept_changes:
                raise ConfigError(
                    f"this model does not train the checkpoint's parameters: {changes}",
                    "train the same parameters, or pass accept_changes=true",
                )
            return
        for name, parameter in named.items():
            parameter.requires_grad_(name in then)

    def _restore_weights(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Restore model, optimizer, averages and scaler; an error names the checkpoint.

        Returns:
            The saved state of the optimizer.
        """
        try:
            return self._load_weights(checkpoint)
        except CheckpointError as error:
            if str(checkpoint.path) in error.problem:
                raise
            problem = f"{checkpoint.path}: {error.problem}"
            raise CheckpointError(problem, error.remedy) from error

    def _load_weights(self, checkpoint: Checkpoint) -> dict[str, Any]:
        load_model_state(unwrap(self.model), checkpoint.load("model"))
        built = checkpoint.meta.get("optimizer_as_built")
        optimizer_state: dict[str, Any] = checkpoint.load("optimizer")
        self._load_optimizer(optimizer_state, built)
        self.rates.note_restored()
        for decay in self.config.averages:
            name = f"average_{decay}"
            saved = [p.partition("_")[2] for p in checkpoint.parts if p.startswith("average_")]
            if name not in checkpoint.parts:
                raise CheckpointError(
                    f"{checkpoint.path} holds no average of decay {decay}",
                    f"use the decays it was saved with: {', '.join(saved) or 'none'}",
                )
            always = checkpoint.meta.get("trained_at_start", self.trained_at_start)
            self.averages.load_state(decay, checkpoint.load(name), required=always)
        if self.scaler and "scaler" in checkpoint.parts:
            load_scaler(self.scaler, checkpoint.load("scaler"))
        return optimizer_state

    def _load_optimizer(
        self, state: dict[str, Any], built: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Restore the optimizer's state; keep settings that are built differently, or refuse them.

        Args:
            state: The saved state of the optimizer.
            built: The saved `optimizer_as_built`. Older checkpoints have none, so the settings at
                the save are compared instead.
        """
        settings = [_settings(group) for group in self.optimizer.param_groups]
        try:
            load_optimizer(self.optimizer, fit_groups(self.optimizer, state))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"the optimizer's saved state does not fit: {error}",
                "use the same optimizer with the same parameter groups",
            ) from error
        groups = self.optimizer.param_groups
        then = map(_plain_settings, groups) if built is None else built
        # A group that was added after the save has nothing to be compared with.
        for group, wanted, old, new in zip(
            groups, settings, then, self.optimizer_as_built, strict=False
        ):
            names = [name for name in new if old.get(name) != new[name]]
            changed = {name: wanted[name] for name in names}
            listed = ", ".join(f"{n} {old.get(n)} -> {new[n]}" for n in names)
            if changed:
                self.resumed.accepted.append(f"optimizer: {listed}")
            if changed and not self.config.accept_changes:
                raise ConfigError(
                    f"the checkpoint was trained with another optimizer: {listed}",
                    "restore the old settings, or pass accept_changes=true to use the new ones",
                )
            if changed.keys() - group.keys():  # another kind of optimizer: its state does not fit
                self.optimizer.state.clear()
            group.update(changed)

    def _consumed_now(self, checkpoint: Checkpoint) -> int:
        """Return the position in the data, on a whole step if epochs or steps changed size."""
        stored = Contract.from_json(checkpoint.meta["contract"]).plan
        plan = self.contract.plan
        kept = (stored.samples_per_epoch, stored.global_batch)
        if kept == (plan.samples_per_epoch, plan.global_batch):
            return self.progress.consumed
        epochs, into = divmod(self.progress.consumed, stored.samples_per_epoch)
        whole = min(into, plan.samples_per_epoch - 1) // plan.global_batch * plan.global_batch
        return epochs * plan.samples_per_epoch + whole


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group that a checkpoint is compared by."""
    ignored = {"params", "lr", "initial_lr", *KERNELS}
    return {name: value for name, value in group.items() if name not in ignored}


def _plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return them as JSON values, in which a tensor equals a number, and a tuple a list."""
    text = json.dumps(
        _settings(group), default=lambda v: v.tolist() if hasattr(v, "tolist") else str(type(v))
    )
    settings: dict[str, Any] = json.loads(text)
    return settings


def versions() -> dict[str, str]:
    """Return the versions needed to repeat the run."""
    return {"python": platform.python_version(), "torch": str(torch.__version__)}
