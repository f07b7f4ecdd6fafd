"""Save a run in the background, from a copy in memory: whole, or a share on every rank.

Owns: the names of a checkpoint, the copy, handing it to the writer, the commit once all shares
are written, and the reaction to a failed save. Does not own: when to save, or files.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lockstep.checkpoint import BackgroundWriter, Share, Written, share_of, snapshot
from lockstep.dist.agreement import (
    SAME_STATE,
    call_together,
    is_same,
    state_difference,
    together,
)
from lockstep.dist.ddp import sync_buffers, unwrap
from lockstep.dist.fsdp import is_sharded
from lockstep.dist.same_state import different_weights, weights_difference
from lockstep.errors import CheckpointError, ConfigError, TakenOverError
from lockstep.run.record import Record
from lockstep.run.run import Run

Files = dict[str, dict[str, Any]]
"""The manifest's entry for each file, by name."""


@dataclass
class _PendingCommit:
    """A checkpoint of which every rank is writing its share."""

    commit: Callable[[Files], object]
    """Commits the checkpoint, given the files of all ranks."""
    files: Files = field(default_factory=dict)
    """The files of this rank."""


class Saver:
    """Saves one run, one checkpoint at a time."""

    def __init__(self, run: Run, record: Record, stack: ExitStack) -> None:
        self.run = run
        self.record = record
        self.writer: BackgroundWriter = BackgroundWriter()
        stack.push(self._close)
        self.saved_step = run.progress.step if run.resumed.checkpoint else None
        self.committed_step = self.saved_step
        """The newest step whose checkpoint is known to be complete on disk."""
        self.is_last = False
        """Whether this is the last save of the run, so that no later one can replace it."""
        self.run_has_failed = False
        """Whether the run ends with another error, which a failed save must not hide."""
        self._best_saved = run.progress.best
        """The best metric that has a checkpoint."""
        self._best_pending = run.progress.best
        """The value of `_best_saved` once the current save is done."""
        self._lost_step: int | None = None
        """The step of a best checkpoint that could not be saved."""
        self._lost_best: float | None = None
        """The metric of that checkpoint."""
        self._spare: dict[str, Tensor] = {}
        """Host memory of the last copy, reused by the next one."""
        self._pending: _PendingCommit | None = None

    def save(
        self, metrics: Mapping[str, float], is_best: bool = False, replace: bool = False
    ) -> None:
        """Copy the state of the run to host memory and let the writer store it. Collective.

        A checkpoint of the same step is kept unless `replace` is true.

        Raises:
            ConfigError: on all ranks, after the save, if `Task.state` differs between ranks;
                instead of the save, if weights or optimizer settings do.
        """
        world = self.run.world
        model = unwrap(self.run.model)
        difference = weights_difference({"": model}, {"": self.run.optimizer}, world)
        if difference:
            self._refuse_weights(difference)
            return
        difference = state_difference(call_together(world, self.run.task_state), world)
        self._save(metrics, is_best, replace)
        if difference:
            self._refuse_state(difference)

    def _refuse_weights(self, difference: str) -> None:
        """Stop a run whose ranks have different weights, without saving them."""
        self.finish_save()
        step = self.run.progress.step
        error = different_weights(difference, f"; step {step} is not saved")
        self._raise_or_warn(error, f"NOT SAVED: {error.problem}")

    def _refuse_state(self, difference: str) -> None:
        """Stop a run whose task has different states on ranks: a resume would lose all but one."""
        self.finish_save()
        step = self.run.progress.step
        where = f"step {step} was saved with rank 0's" if self.saved_step == step else "not saved"
        problem = f"Task.state() differs between ranks: {difference}; {where}"
        self._raise_or_warn(ConfigError(problem, SAME_STATE), problem)

    def _raise_or_warn(self, error: ConfigError, warning: str) -> None:
        if not self.run_has_failed:
            raise error
        self.record.events.write("warning", self.run.progress.step, message=warning)

    def _save(self, metrics: Mapping[str, float], is_best: bool, replace: bool) -> None:
        began = time.monotonic()
        self.finish_save()
        run = self.run
        step = run.progress.step
        self.saved_step = step
        if self._lost_step == step:  # saving these weights failed before
            is_best = True
            run.progress.best = self._lost_best
        self._best_saved = self._best_pending
        self._best_pending = run.progress.best
        self.record.sum_ledger()
        names = self._names(is_best)
        meta = {**run.meta(run.progress), "names": names, "metrics": dict(metrics)}
        path = str(run.store.path(step))

        def commit(contents: Any) -> None:
            if contents:
                run.store.save(step, contents, meta, replace)
            for name in names:
                run.store.name(step, name)
            self.committed_step = step
            self.record.events.write("checkpoint", step, path=path)

        shares = run.config.checkpoint.sharded and run.world.size > 1 and self._can_share()
        # Ranks' running statistics may differ, and a resume gives all of them the first rank's.
        sync_buffers(unwrap(run.model), run.world)
        state = call_together(run.world, run.parts)
        parts = together(run.world, lambda: self._copy(state, shares))
        # Written before the checkpoint exists: a resume from it must find this event.
        stall_s = time.monotonic() - began
        self.record.events.write("saving", step, path=path, stall_s=stall_s)
        try:
            if shares and self._begin(parts, step, replace):
                self._submit_share(parts, step, commit)
            elif run.world.is_first:  # if the shares exist already, only add the names
                self.writer.submit(lambda: commit(None if shares else parts))
        except CheckpointError as error:
            self._not_saved(error)
            return
        if not run.config.checkpoint.background:
            self.finish_save()

    def _can_share(self) -> bool:
        """Return whether ranks can divide the state: its shapes are the same on all. Collective."""
        model = unwrap(self.run.model)
        if is_sharded(model):  # then the first rank saves the buffers
            return True
        state = model.state_dict()
        return is_same([[*getattr(value, "shape", ())] for value in state.values()], self.run.world)

    def _begin(self, share: Share, step: int, replace: bool) -> bool:
        """Make room for a sharded checkpoint; return False if the step has one. Collective."""
        world = self.run.world
        store = self.run.store
        needed = share.num_bytes * world.size  # shares have about the same size
        begun = together(world, lambda: world.is_first and store.begin(step, needed, replace))
        return bool(world.all_max(int(begun))[0])

    def _submit_share(self, share: Share, step: int, commit: Callable[[Any], None]) -> None:
        """Let the writer write this rank's share; it is committed once all are written."""
        pending = _PendingCommit(lambda files: commit(Written(share.skeletons, files)))

        def write() -> None:
            pending.files = self.run.store.write_share(step, share)

        self._pending = pending
        self.writer.submit(write)

    @property
    def is_ready(self) -> bool:
        """Whether this rank's share of a checkpoint is written, and waits for the commit."""
        return self._pending is not None and not self.writer.is_busy

    def finish_save_if_ready(self, has_failed: bool, is_busy: bool) -> None:
        """Finish a save that failed on any rank or is complete on all. Collective."""
        if has_failed or (self._pending and not is_busy):
            self.finish_save(wait=False)

    def finish_save(self, wait: bool = True) -> None:
        """Wait for the current save, and commit it once every share is written. Collective.

        Raises:
            CheckpointError: on all ranks, if the save failed and the run must not continue.
        """
        world = self.run.world
        try:
            together(world, self.writer.wait, every_exception=True)
            if self._pending:
                self._submit_commit(self._pending)
                self._pending = None
                if not wait:
                    return
                together(world, self.writer.wait, every_exception=True)
            if self.saved_step is not None:  # only the first rank knew it until now
                self.committed_step = self.saved_step
        except CheckpointError as error:
            self._not_saved(error)

    def _submit_commit(self, pending: _PendingCommit) -> None:
        """Let the first rank commit the files of all ranks. Collective."""
        files: Files = {}
        for found in self.run.world.all_values(pending.files):
            files |= found
        if self.run.world.is_first:
            self.writer.submit(lambda: pending.commit(files))

    def _names(self, is_best: bool) -> list[str]:
        """Return the names of a checkpoint saved now, in addition to that of its step."""
        progress = self.run.progress
        saving = self.run.config.checkpoint
        epochs, into_epoch = divmod(progress.consumed, self.run.contract.plan.samples_per_epoch)
        names = ["best_model.pt"] if is_best else []
        if not into_epoch and saving.name_epochs:
            names.append(f"checkpoint_epoch_{epochs}.pt")
        if saving.name_steps and saving.every_steps and progress.step % saving.every_steps == 0:
            names.append(f"checkpoint_step_{progress.step}.pt")
        return names

    def _copy(self, parts: Mapping[str, Any], shares: bool) -> Any:
        """Return a copy of what this rank writes: its share, or on the first rank everything."""
        world = self.run.world
        if not shares:
            return snapshot(parts, world.is_first, self._spare)
        of_first = {name: part for name, part in parts.items() if name in ("task", "callbacks")}
        share = share_of({**parts, **dict.fromkeys(of_first, {})}, world.rank, world.size)
        if world.is_first:
            own = share_of(of_first)
            share.tensors.update(own.tensors)
            share.skeletons.update(own.skeletons)
        return share._replace(tensors=snapshot(share.tensors, spare=self._spare))

    def _close(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the writer."""
        self.run_has_failed = error is not None
        try:
            self.writer.close()
        except CheckpointError as lost:
            self._not_saved(lost)

    def _not_saved(self, error: CheckpointError) -> None:
        """Clean up after a failed save; then raise or warn, depending on `on_failed_save`."""
        progress = self.run.progress
        if progress.best == self._best_pending != self._best_saved:
            self._lost_step = self.saved_step
            self._lost_best = progress.best
            progress.best = self._best_saved  # compare later metrics with a saved checkpoint
        self._best_pending = self._best_saved
        self._pending = None
        self.saved_step = None
        if self.run.world.is_first:
            self.run.store.sweep()
        # After another run has taken over the folder, no later save can succeed.
        is_over = self.is_last or isinstance(error, TakenOverError)
        must_stop = is_over or self.run.config.checkpoint.on_failed_save == "stop"
        if must_stop and not self.run_has_failed:
            raise error
        then = "" if self.run_has_failed else "; the run continues and tries again at the next save"
        message = f"NOT SAVED: {error.problem}{then}"
        self.record.events.write("warning", self.run.progress.step, message=message)
