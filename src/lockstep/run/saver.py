"""Save a run: from a copy in memory, in the background, whole or every rank its share.

Owns: what a checkpoint is called, the copy, the hand-over to the writer, the commit once all
shares are there, and what a failed save means. Does not own: when to save; nor files.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from lockstep.checkpoint import BackgroundWriter, Written, share_of, snapshot
from lockstep.dist.agreement import SAME_STATE, state_difference, together
from lockstep.dist.ddp import sync_buffers, unwrap
from lockstep.dist.same_state import different_weights, weights_difference
from lockstep.errors import CheckpointError, ConfigError, TakenOverError
from lockstep.run.record import Record
from lockstep.run.run import Run


class Saver:
    """Saves one run, one checkpoint at a time."""

    def __init__(self, run: Run, record: Record, stack: ExitStack) -> None:
        self.run, self.record = run, record
        self.writer: BackgroundWriter = BackgroundWriter()
        stack.push(self._close)
        self.saved_step = run.progress.step if run.resumed_from else None
        self.committed_step = self.saved_step
        """The newest step whose checkpoint is known to be complete on the disk."""
        self.is_last = False
        """Whether a save that fails can no longer be made good by another."""
        self.run_has_failed = False
        """Whether the run ends by something else, which a save that fails must not hide."""
        self._best = run.progress.best, run.progress.best
        """The best metric that has a checkpoint, and the best once the last save is done."""
        self._lost: tuple[int | None, float | None] = -1, None
        """The step of a best checkpoint that could not be saved, and its metric."""
        self._spare: dict[str, Tensor] = {}
        """The copy that was saved last; no save is under way when the next one is made."""
        self._files: dict[str, dict[str, Any]] = {}
        """What this rank wrote for a checkpoint that awaits the shares of the others."""
        self._commit: Callable[[dict[str, dict[str, Any]]], object] | None = None

    def save(
        self, metrics: Mapping[str, float], is_best: bool = False, replace: bool = False
    ) -> None:
        """Copy the state of the run to host memory and let the writer store it. Collective.

        A checkpoint of the same step is kept unless `replace` is true.

        Raises:
            ConfigError: on all ranks, once it is saved, if `Task.state` differs between them; and
                without saving, if their weights or optimizer settings do.
        """
        world = self.run.world
        apart = weights_difference(
            {"": unwrap(self.run.model)}, {"": self.run.optimizer}, self.run.world
        )
        if apart:
            self._refuse_weights(apart)
            return
        difference = state_difference(together(world, self.run.task.state), world)
        self._save(metrics, is_best, replace)
        if difference:
            self._refuse_state(difference)

    def _refuse_weights(self, difference: str) -> None:
        """Stop a run whose ranks train different weights, and save nothing of them."""
        self.finish_save()
        step = self.run.progress.step
        error = different_weights(difference, f"; step {step} is not saved")
        if not self.run_has_failed:
            raise error
        self.record.events.write("warning", step, message=f"NOT SAVED: {error.problem}")

    def _refuse_state(self, difference: str) -> None:
        """Stop a run whose task remembers something else on every rank: a resume would lose it."""
        self.finish_save()
        step = self.run.progress.step
        where = f"step {step} was saved with rank 0's" if self.saved_step == step else "not saved"
        problem = f"Task.state() differs between ranks: {difference}; {where}"
        if not self.run_has_failed:
            raise ConfigError(problem, SAME_STATE)
        self.record.events.write("warning", step, message=problem)

    def _save(self, metrics: Mapping[str, float], is_best: bool, replace: bool) -> None:
        began = time.monotonic()
        self.finish_save()
        run, saving = self.run, self.run.config.checkpoint
        step = self.saved_step = run.progress.step
        if self._lost[0] == step:  # the same weights once more
            is_best, run.progress.best = True, self._lost[1]
        self._best = self._best[1], run.progress.best
        self.record.sum_ledger()
        names = self._names(is_best)
        meta = {**run.meta(run.progress), "names": names, "metrics": dict(metrics)}
        is_sharded = saving.sharded and run.world.size > 1
        parts = together(run.world, lambda: self._copy(is_sharded))
        # Written before the checkpoint can exist: a resume from it must find this in the record.
        path, stall_s = str(run.store.path(step)), time.monotonic() - began
        self.record.events.write("saving", step, path=path, stall_s=stall_s)

        def commit(what: Any) -> None:
            if what:
                run.store.save(step, what, meta, replace)
            for name in names:
                run.store.name(step, name)
            self.committed_step = step
            self.record.events.write("checkpoint", step, path=path)

        def write_share() -> None:
            self._files = run.store.write_share(step, parts)

        if is_sharded:
            try:
                needed = parts.num_bytes * run.world.size  # ranks have as much each, to a row
                begun = together(
                    run.world, lambda: run.world.is_first and run.store.begin(step, needed, replace)
                )
            except CheckpointError as error:
                self._not_saved(error)
                return
            if not run.world.all_max(int(begun))[0]:
                is_sharded, parts = False, None  # it is there, but for its names
        if is_sharded:
            self._commit = lambda files: commit(Written(parts.skeletons, files))
            self.writer.submit(write_share)
        elif run.world.is_first:
            self.writer.submit(lambda: commit(parts))
        if not saving.background:
            self.finish_save()

    @property
    def votes(self) -> tuple[bool, bool]:
        """Whether a save has failed on this rank, and whether one is under way."""
        return self.writer.has_failed, self.writer.is_busy

    def finish_save_if_ready(self, has_failed: int, is_busy: int) -> None:
        """Finish a save that has failed on any rank, or is complete on all. Collective."""
        if has_failed or (self._commit and not is_busy):
            self.finish_save(wait=False)

    def finish_save(self, wait: bool = True) -> None:
        """Wait for the save under way, commit it once every share is there. Collective.

        Raises:
            CheckpointError: on all ranks, why it failed, unless the run may go on without.
        """
        world = self.run.world
        try:
            together(world, self.writer.wait)
            if self._commit is not None:
                commit, self._commit = self._commit, None
                said = map(json.loads, world.all_texts(json.dumps(self._files)))
                files = {name: facts for share in said for name, facts in share.items()}
                if world.is_first:
                    self.writer.submit(lambda: commit(files))
                if not wait:
                    return
                together(world, self.writer.wait)
            if self.saved_step is not None:  # other ranks than the first learn it here
                self.committed_step = self.saved_step
        except CheckpointError as error:
            self._not_saved(error)

    def _names(self, is_best: bool) -> list[str]:
        """Return the names that a checkpoint of now has beside its step's."""
        progress, saving = self.run.progress, self.run.config.checkpoint
        epochs, into_epoch = divmod(progress.consumed, self.run.contract.plan.samples_per_epoch)
        names = ["best_model.pt"] if is_best else []
        if not into_epoch and saving.name_epochs:
            names.append(f"checkpoint_epoch_{epochs}.pt")
        if saving.name_steps and saving.every_steps and progress.step % saving.every_steps == 0:
            names.append(f"checkpoint_step_{progress.step}.pt")
        return names

    def _copy(self, is_sharded: bool) -> Any:
        """Return a copy of what this rank will write: its share, or all of it on the first rank."""
        world = self.run.world
        if not is_sharded:
            return snapshot(self.run.parts(), world.is_first, self._spare)
        sync_buffers(unwrap(self.run.model), world)  # or each would write statistics of its own
        parts = self.run.parts()
        share = share_of({**parts, "task": {}}, world.rank, world.size)
        if world.is_first:  # all ranks have the same
            own = share_of({"task": parts["task"]})
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
        """Leave nothing half done; then stop, or say it loudly, as the run was told to."""
        progress, (kept, lost) = self.run.progress, self._best
        if progress.best == lost != kept:  # later ones are compared with what is there
            self._lost, progress.best = (self.saved_step, lost), kept
        self._best = kept, kept
        self._commit = self.saved_step = None
        if self.run.world.is_first:
            self.run.store.sweep()
        # A run that another one has replaced can never save again, whatever it was told.
        is_over = self.is_last or isinstance(error, TakenOverError)
        must = is_over or self.run.config.checkpoint.on_failed_save == "stop"
        if must and not self.run_has_failed:
            raise error
        then = "" if self.run_has_failed else "; the run goes on and tries again at the next save"
        message = f"NOT SAVED: {error.problem}{then}"
        self.record.events.write("warning", self.run.progress.step, message=message)
