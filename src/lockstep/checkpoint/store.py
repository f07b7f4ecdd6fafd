"""The folder of a run's checkpoints: commit, find and remove them.

Owns: the one rename that commits a checkpoint, its aliases, and the decision which checkpoints to
remove. Does not own: the contents of a checkpoint, or which process saves: there is one writer,
ensured by `FolderLock`.

    checkpoints/
      step_00000120/                            see layout.py
      checkpoint_epoch_10.pt -> step_00000120   an alias; its checkpoint is kept
      superseded_1_step_00000200/               set aside when the run resumed from an older one
      generation_00000002.json                  the group of processes that may save; generation.py

Names that begin with a dot are unfinished; the next save removes them. A step folder may be a link
to a checkpoint on another disk. It is read like any other and never removed.
"""

import itertools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lockstep.checkpoint import generation
from lockstep.checkpoint.layout import (
    MANIFEST,
    STEP_FOLDER,
    Checkpoint,
    Written,
    flush_folder,
    plain_name,
    read_checkpoint,
    read_manifest,
    write_manifest,
    write_share,
)
from lockstep.checkpoint.lock import FolderLock
from lockstep.checkpoint.state import Share, load_model_state, load_optimizer, share_of, snapshot
from lockstep.dist.agreement import call_together, together
from lockstep.dist.ddp import sync_buffers, unwrap
from lockstep.dist.environment import launched_rank, rehearsal_folder
from lockstep.dist.same_state import check_registered, check_same_weights
from lockstep.errors import CheckpointError, closest
from lockstep.nested import tensors_in

if TYPE_CHECKING:
    from lockstep.world import World

_log = logging.getLogger("lockstep")

CHECK_FOLDER = "check the permissions of the folder, and that its disk is mounted and not full"
"""The remedy for an error of the file system."""

_GENERATION = re.compile(r"\.g(\d+)$")
"""The generation at the end of an unfinished name."""


@dataclass
class _Use:
    """This process's use of a folder of checkpoints, through any number of stores."""

    pid: int
    read_step: int = -1
    """The newest checkpoint that was read; a custom loop continues from it."""
    lock: FolderLock | None = None
    """Set by the first save of a custom loop, and held until the process ends."""
    generation: int = 0
    saved: dict[Path, tuple[object, ...]] = field(default_factory=dict)
    """The checkpoints that custom loops of this process have saved, with their fingerprints."""

    def note_read(self, step: int) -> None:
        """Remember that the checkpoint of a step was read."""
        self.read_step = max(self.read_step, step)


_uses: dict[Path, _Use] = {}


def _use_of(folder: Path) -> _Use:
    """Return this process's use of a folder; a forked process starts with a new one."""
    key = folder.resolve()
    if key not in _uses or _uses[key].pid != os.getpid():
        _uses[key] = _Use(os.getpid())
    return _uses[key]


class CheckpointStore:
    """The checkpoints of one run. Any process may read; only one may save, name or set aside."""

    def __init__(
        self, folder: str | Path, *, keep_last: int | None = 3, recipe: str | None = None
    ) -> None:
        if keep_last is not None and keep_last < 1:
            problem = f"keep_last={keep_last} keeps no checkpoint"
            raise CheckpointError(problem, "pass keep_last=1 or more, or None to keep all")
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.recipe = recipe or "custom"
        """Written into every checkpoint; one of another recipe is not continued."""
        self._opens_any = recipe is None
        self.generation = 0
        """The generation of this group, the same on all ranks; 0 until it has taken over the
        folder."""
        self._verified: dict[Path, tuple[object, ...]] = {}
        """The fingerprints of checkpoints that have been verified."""
        self._committed: dict[Path, tuple[object, ...]] = {}
        """The fingerprints of checkpoints that this store has saved."""
        self._restored: dict[Path, set[str]] = {}
        """The parts of each checkpoint that `load_into` has restored."""
        self._replaceable: dict[Path, tuple[object, ...]] = {}
        """The fingerprint of the damaged checkpoint that the current save may replace."""

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, which may not exist."""
        return self.folder / f"step_{step:08d}"

    def save(
        self,
        step: int,
        parts: Mapping[str, Any] | Written,
        meta: Mapping[str, Any],
        replace: bool = False,
    ) -> Path:
        """Write a checkpoint, read it back, commit it, and return its folder.

        A valid checkpoint of the same step is kept, unless `replace` is true and it is not a link.
        Older ones that are no longer needed are removed afterwards. `parts` may be the files that
        ranks have `Written` since `begin`, each with `write_share`.

        A replaced checkpoint has a hidden name between two renames. If the process is killed
        there, `restore_replaced` or the next save renames it back.

        Raises:
            CheckpointError: nothing was committed, and existing checkpoints are unchanged.
        """
        final = self.path(step)
        try:
            if not isinstance(parts, Written):
                share = share_of(parts)
                begin = partial(self.begin, replace=True) if replace else self.begin
                if not begin(step, share.num_bytes):
                    return final
                parts = Written(share.skeletons, self.write_share(step, share))
            aside = self._aside(step)
            with self._reporting(step, sum(facts["size_bytes"] for facts in parts.files.values())):
                write_manifest(aside, step, self.recipe, parts, meta, self.generation)
                read_checkpoint(aside, hashed=False)  # each rank has verified its own files
                self._raise_if_taken_over()
                before = self._hidden("replaced" if replace else "rejected", final.name)
                if os.path.lexists(final) and self._replaceable.get(final) == _fingerprint(final):
                    os.rename(final, before)
                try:
                    os.rename(aside, final)
                except OSError:
                    self._restore(before)
                    raise
                flush_folder(self.folder)
                if replace:
                    shutil.rmtree(before, ignore_errors=True)
        finally:
            shutil.rmtree(self._aside(step), ignore_errors=True)
        self._verified[final] = self._committed[final] = _fingerprint(final)
        self._prune(final)
        return final

    def begin(self, step: int, num_needed: int = 0, replace: bool = False) -> bool:
        """Prepare for the files of a checkpoint; return False if a valid one must be kept."""
        if step < 0:
            raise CheckpointError(f"step {step} cannot be saved", "pass a step of 0 or more")
        final = self.path(step)
        with self._reporting(step, num_needed):
            if not self.generation and generation.claims(self.folder):
                self.take_over(max(self._accepted(), default=-1))  # a custom loop, after `fit`
            self._raise_if_taken_over()
            self.set_stale_aside()
            if self._is_saved(final) and not (replace and not final.is_symlink()):
                flush_folder(self.folder)  # a save that failed after its rename did not flush
                return False
            self._replaceable = {final: _fingerprint(final)}
            self.sweep()
            self._aside(step).mkdir(parents=True)
            if not self._verified:
                _flush_above(self.folder)
        return True

    def write_share(self, step: int, share: Share) -> dict[str, dict[str, Any]]:
        """Write one rank's share of a checkpoint, and return the manifest entries of its files."""
        with self._reporting(step, share.num_bytes):
            return write_share(self._aside(step), share)

    def sweep(self) -> None:
        """Remove unfinished files of this group and of earlier ones."""
        for kind in ("writing", "removing", "rejected", "replaced", "naming"):
            for path in self.folder.glob(f".{kind}_*"):
                whose = _GENERATION.search(path.name)
                if whose and int(whose[1]) > self.generation:
                    continue
                with suppress(OSError):
                    self._restore(path)
                if path.is_symlink():
                    with suppress(OSError):
                        path.unlink()
                else:
                    shutil.rmtree(path, ignore_errors=True)

    def restore_replaced(self) -> None:
        """Rename checkpoints back if a process was killed while it replaced them.

        Call this before taking over the folder.

        Raises:
            CheckpointError: a checkpoint cannot be renamed.
        """
        for path in self.folder.glob(".replaced_*"):
            with _reported(f"cannot rename {path}", CHECK_FOLDER):
                self._restore(path)

    def _restore(self, hidden: Path) -> None:
        """Rename a replaced checkpoint back, unless the new one was committed."""
        name = _GENERATION.sub("", hidden.name).removeprefix(".replaced_")
        final = self.folder / name
        is_checkpoint = STEP_FOLDER.fullmatch(name) and os.path.lexists(hidden)
        if is_checkpoint and not os.path.lexists(final):
            os.rename(hidden, final)
            flush_folder(self.folder)

    def name(self, step: int, alias: str) -> Path:
        """Point `alias` (such as `best_model.pt`) at a checkpoint, which is then never removed.

        Raises:
            CheckpointError: there is no such checkpoint, or the name is in use for something else.
        """
        link = self.folder / plain_name(alias)
        target = self.path(step)
        self._raise_if_taken_over()
        with self._reporting_takeover():
            if not target.is_dir():
                raise self._not_found(target.name)
            is_taken = os.path.lexists(link) and not link.is_symlink()
            if is_taken or alias == "lock" or STEP_FOLDER.fullmatch(alias):
                problem = f"{link} cannot be used as the name of a checkpoint"
                raise CheckpointError(problem, "use a name such as best_model.pt")
            with _reported(f"cannot create {link}", CHECK_FOLDER):
                self._point(link, target.name)
        return link

    def aliases(self) -> dict[str, str]:
        """Return each alias with the name of its folder."""
        links = (
            entry
            for entry in self._entries()
            if entry.is_symlink()
            and os.path.isdir(entry.path)
            and not STEP_FOLDER.fullmatch(entry.name)
        )
        return {link.name: os.path.basename(os.path.realpath(link.path)) for link in links}

    def steps(self) -> list[int]:
        """Return the steps that have a folder or a link, valid or not, in ascending order."""
        entries = self._entries()
        names = (e.name for e in entries if e.is_symlink() or e.is_dir(follow_symlinks=False))
        return sorted(int(match[1]) for name in names if (match := STEP_FOLDER.fullmatch(name)))

    def verify(self, path: str | Path) -> None:
        """Read a whole checkpoint and compare it with its manifest.

        Raises:
            CheckpointError: names the file and the fault.
        """
        read_checkpoint(Path(path))

    def latest(
        self, check: Callable[[Checkpoint], None] = lambda checkpoint: None
    ) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
        """Return the newest valid checkpoint, and why each newer one was rejected.

        A checkpoint is also rejected if its group saved it after another group had taken over the
        folder. If the result is None and the list is not empty, every checkpoint is damaged; then
        a run should stop, not start over.

        Args:
            check: Raises a CheckpointError if the caller cannot use the meta data.

        Raises:
            CheckpointError: the checkpoint belongs to another recipe.
        """
        rejected: list[tuple[Path, str]] = []
        newest = self._newest_generation()
        for path in map(self.path, reversed(self.steps())):
            try:
                checkpoint = read_checkpoint(path)
                _raise_if_stale(checkpoint, newest)
                if checkpoint.recipe == self.recipe:
                    check(checkpoint)
            except CheckpointError as error:
                rejected.append((path, error.problem))
            else:
                _use_of(self.folder).note_read(checkpoint.step)
                return self._of_this_recipe(checkpoint), rejected
        return None, rejected

    def open(self, path: str | Path) -> Checkpoint:
        """Return the verified checkpoint at a path: a step folder or an alias.

        A relative path is tried in the working directory, in this store's folder, and in its
        parent (`checkpoints/checkpoint_epoch_10.pt`).

        Raises:
            CheckpointError: there is none, it is damaged, or it belongs to another recipe than
                the one that the store was given.
        """
        for base in (Path(), self.folder, self.folder.parent):
            if not os.path.isdir(base / path):
                continue
            found = Path(os.path.realpath(base / path))
            if STEP_FOLDER.fullmatch(found.name) or os.path.lexists(found / MANIFEST):
                checkpoint = read_checkpoint(found)
                if not self._opens_any:
                    self._of_this_recipe(checkpoint)
                if found == self.path(checkpoint.step).resolve():
                    _use_of(self.folder).note_read(checkpoint.step)
                return checkpoint
        raise self._not_found(str(path))

    def save_from(self, world: "World", step: int, **objects: Any) -> None:
        """Save the `state_dict()` of each object, from the first rank. Collective.

        For a custom loop: `store.save_from(world, loader.step, model=model, ...)`.
        Afterwards every rank has the first rank's buffers, as after a resume.

        The first save locks the folder until the process ends, and takes it over as `fit` does:
        checkpoints that are newer than any that this process has read are set aside.

        Raises:
            FolderInUseError: on all ranks, if another process saves into this folder.
            ConfigError: on all ranks, without saving, if their weights or optimizer settings
                differ, or an optimizer has parameters that none of the objects has.
            CheckpointError: on all ranks, if the save fails, or another run has saved this step.
        """
        self._enter_rehearsal()
        modules = {name: unwrap(o) for name, o in objects.items() if isinstance(o, nn.Module)}
        optimizers = {name: o for name, o in objects.items() if isinstance(o, Optimizer)}
        check_same_weights(modules, optimizers, world)
        for module in modules.values():
            sync_buffers(module, world)

        def states() -> dict[str, Any]:
            return {name: unwrap(o).state_dict() for name, o in objects.items()}

        def save() -> None:
            _check_parameters_are_saved(objects)
            if world.is_first:
                self._take_folder()
                self._raise_if_of_another_run(step)
                path = self.save(step, parts, {})
                _use_of(self.folder).saved[path] = _fingerprint(path)

        with world.phase("save"):
            state = call_together(world, states)
            parts = together(world, lambda: snapshot(state, world.is_first))
            together(world, save, every_exception=True)
        if world.custom_loop is not None:
            world.custom_loop.checkpoint_saved(self.path(step))

    def load_into(self, **objects: Any) -> int:
        """Restore each object from the newest valid checkpoint; return its step, or 0 if none.

        Raises:
            CheckpointError: every checkpoint is damaged, or the checkpoint does not fit.
            ConfigError: an optimizer has parameters that none of the objects has.
        """
        self._enter_rehearsal()
        if any(isinstance(target, nn.Module) for target in objects.values()):
            _check_parameters_are_saved(objects)  # without modules, another call loads them
        checkpoint, rejected = self.latest()
        if checkpoint is None and rejected:
            problem = f"no checkpoint in {self.folder} is valid: {rejected[0][1]}"
            raise CheckpointError(problem, "restore one from a copy, or use another folder")
        if checkpoint is None:
            return 0
        for name, target in objects.items():
            if isinstance(target, nn.Module):
                load_model_state(unwrap(target), checkpoint.load(name))
            elif isinstance(target, Optimizer):
                try:
                    load_optimizer(target, checkpoint.load(name))
                except (ValueError, KeyError) as error:
                    raise CheckpointError(
                        f"the saved state of {name} does not fit: {error}",
                        "build the same optimizer, and before load_into add the parameter groups "
                        "that the saved run had added",
                    ) from error
            else:
                target.load_state_dict(checkpoint.load(name))
        self._warn_of_rest(checkpoint, objects)
        return checkpoint.step

    def _warn_of_rest(self, checkpoint: Checkpoint, objects: Mapping[str, Any]) -> None:
        """Warn of saved states that this call and earlier ones have not restored."""
        self._restored.setdefault(checkpoint.path, set()).update(objects)
        rest = [part for part in checkpoint.parts if part not in self._restored[checkpoint.path]]
        restores_model = any(isinstance(o, nn.Module | Optimizer) for o in objects.values())
        if rest and restores_model and launched_rank() == 0:
            _log.warning(
                "%s also holds %s, which load_into was not given: they start from scratch",
                checkpoint.path,
                ", ".join(rest),
            )

    def _enter_rehearsal(self) -> None:
        """In a rehearsal, use another folder than the real run."""
        folder = rehearsal_folder()
        if folder is not None and not self.folder.is_relative_to(folder):
            self.folder = folder / "stores" / str(self.folder.absolute()).lstrip("/")

    def _take_folder(self) -> None:
        """Lock the folder for this process and take it over, once.

        Raises:
            FolderInUseError: another process holds the lock.
        """
        use = _use_of(self.folder)
        if use.lock is None:
            lock = FolderLock(self.folder).acquire()
            try:
                self.restore_replaced()
                use.generation = self.take_over(use.read_step)
                for path in self.set_stale_aside():
                    _log.warning("set aside %s: this run did not continue from it", path)
            except BaseException:
                lock.release()
                raise
            use.lock = lock
        self.generation = use.generation

    def _raise_if_of_another_run(self, step: int) -> None:
        """Refuse to save a step that another run has saved, since its checkpoint would be kept."""
        final = self.path(step)
        is_own = _use_of(self.folder).saved.get(final, ()) == _fingerprint(final) != ()
        if is_own or step == _use_of(self.folder).read_step or not self._is_saved(final):
            return
        raise CheckpointError(
            f"{final} was saved by another run, and step {step} of this one is not saved",
            "call store.load_into before the first step, or save into another folder",
        )

    def take_over(self, resumed_from: int = -1) -> int:
        """Claim the folder for this group: earlier groups may no longer save into it.

        Checkpoints up to the step `resumed_from` stay valid, by default none. Any other checkpoint
        of an earlier group, also a future one, is rejected by `latest` and set aside.

        Returns:
            The number of the claim. Every rank of the group must set it as its `generation`.

        Raises:
            CheckpointError: the claim cannot be written.
        """
        with _reported(f"cannot take over {self.folder}", CHECK_FOLDER):
            accepted = self._accepted()
            steps = {step for step in accepted if step <= resumed_from}
            steps |= {resumed_from} & set(self.steps())  # the user may have chosen a stale one
            above = max([0, *accepted.values()])
            self.generation = generation.claim(self.folder, above, steps).number
        return self.generation

    def set_stale_aside(self) -> list[Path]:
        """Set aside checkpoints that an earlier group saved after a later one took over."""
        newest = self._newest_generation()
        if newest is None:
            return []
        stale = []
        for step in self.steps():
            path = self.path(step)
            if step in newest.steps or self._committed.get(path) == _fingerprint(path):
                continue  # saves reading most manifests at every save
            with suppress(CheckpointError):  # damaged: a resume rejects it, a save replaces it
                if _is_stale(read_manifest(path), newest):
                    stale.append(step)
        return self._set_aside(stale)

    def clear(self) -> None:
        """Remove every checkpoint and alias in the folder, but not the claims.

        Raises:
            OSError: a file or folder cannot be removed.
        """
        for entry in list(os.scandir(self.folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif not generation.is_claim(entry.name):
                os.unlink(entry.path)

    def set_aside_after(self, step: int) -> list[Path]:
        """Set aside every checkpoint newer than `step`, by renaming it.

        Otherwise a run that resumed from an older checkpoint would use the newer ones at its next
        resume. They stay readable, and keep their aliases.
        """
        return self._set_aside([newer for newer in self.steps() if newer > step])

    def _set_aside(self, steps: list[int]) -> list[Path]:
        moved = []
        # The newest first, so that a kill midway does not leave it in place.
        for old in map(self.path, reversed(steps)):
            names = (old.with_name(f"superseded_{n}_{old.name}") for n in itertools.count(1))
            new = next(name for name in names if not os.path.lexists(name))
            with _reported(f"cannot rename {old} to {new.name}", CHECK_FOLDER):
                self._raise_if_taken_over()
                os.rename(old, new)
                flush_folder(self.folder)
            moved.append(new)
        with _reported(f"cannot update the links in {self.folder}", CHECK_FOLDER):
            self._update_aliases()
        return moved

    def _update_aliases(self) -> None:
        """Point each alias at its checkpoint's new name, also after a kill midway."""
        for link in self._entries():
            if not link.is_symlink() or os.path.exists(link.path):
                continue
            if STEP_FOLDER.fullmatch(link.name):  # a checkpoint on a disk that is not mounted
                continue
            target = os.path.basename(os.readlink(link.path))
            if STEP_FOLDER.fullmatch(target):
                aside = self.folder.glob(f"superseded_*_{target}")
                newest = max(aside, key=lambda path: int(path.name.split("_")[1]), default=None)
                if newest is not None:
                    self._point(self.folder / link.name, newest.name)

    def _entries(self) -> list[os.DirEntry[str]]:
        with _reported(f"cannot list {self.folder}", CHECK_FOLDER):
            try:
                return [e for e in os.scandir(self.folder) if not e.name.startswith(".")]
            except FileNotFoundError:
                return []

    def _is_saved(self, path: Path) -> bool:
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError:
            return False
        return self._of_this_recipe(checkpoint) is checkpoint

    def _prune(self, just_saved: Path) -> None:
        """Keep `just_saved`, the newest valid ones up to `keep_last`, and all with an alias."""
        if self.keep_last is None:
            return
        aliased = set(self.aliases().values())
        num_kept = 1
        for path in map(self.path, reversed(self.steps())):
            if path == just_saved or path.is_symlink():  # the user has moved it to another disk
                continue
            if num_kept < self.keep_last:
                num_kept += self._is_verified(path)
            elif path.name not in aliased:
                # Ignore errors: the new checkpoint is safe, and the next save tries again.
                self._raise_if_taken_over()
                with suppress(OSError):
                    hidden = self._hidden("removing", path.name)
                    os.rename(path, hidden)
                    shutil.rmtree(hidden, ignore_errors=True)

    def _is_verified(self, path: Path) -> bool:
        """Verify a checkpoint, once, and again if its files change."""
        found = _fingerprint(path)
        if self._verified.get(path) != found:
            try:
                self.verify(path)
            except CheckpointError:
                return False
            self._verified[path] = found
        return True

    def _aside(self, step: int) -> Path:
        return self._hidden("writing", self.path(step).name)

    def _hidden(self, kind: str, name: str) -> Path:
        """Return a name for unfinished files, with the generation if there is one."""
        suffix = f".g{self.generation}" if self.generation else ""
        return self.folder / f".{kind}_{name}{suffix}"

    def _point(self, link: Path, target: str) -> None:
        """Make or move a symbolic link in one rename."""
        fresh = self._hidden("naming", link.name)
        fresh.unlink(missing_ok=True)
        os.symlink(target, fresh)
        os.replace(fresh, link)
        flush_folder(link.parent)

    def _raise_if_taken_over(self) -> None:
        """Refuse to write after another group has taken over the folder."""
        if self.generation:
            with _reported(f"cannot list {self.folder}", CHECK_FOLDER):
                generation.raise_if_taken_over(self.folder, self.generation)

    @contextmanager
    def _reporting_takeover(self) -> Iterator[None]:
        """Raise TakenOverError instead if another group has taken over: it removes our files."""
        try:
            yield
        except CheckpointError:
            self._raise_if_taken_over()
            raise

    def _newest_generation(self) -> generation.Generation | None:
        with _reported(f"cannot list {self.folder}", CHECK_FOLDER):
            return generation.newest(self.folder)

    def _accepted(self) -> dict[int, int]:
        """Return the steps with a readable and valid manifest, each with its generation."""
        newest = self._newest_generation()
        found = {}
        for step in self.steps():
            with suppress(CheckpointError):
                checkpoint = read_manifest(self.path(step))
                _raise_if_stale(checkpoint, newest)
                found[step] = checkpoint.generation
        return found

    @contextmanager
    def _reporting(self, step: int, num_needed: int = 0) -> Iterator[None]:
        """Turn an OSError into a CheckpointError with the sizes."""
        with self._reporting_takeover():
            try:
                yield
            except OSError as error:
                needed = f"{num_needed:,} bytes needed, " if num_needed else ""
                raise CheckpointError(
                    f"cannot save step {step} in {self.folder}: {error} "
                    f"({needed}{_free_bytes(self.folder)} free)",
                    "free space on the disk, or save into another folder; earlier checkpoints are "
                    "unchanged",
                ) from error

    def _of_this_recipe(self, checkpoint: Checkpoint) -> Checkpoint:
        if checkpoint.recipe != self.recipe:
            raise CheckpointError(
                f"{checkpoint.path} belongs to recipe {checkpoint.recipe!r}, "
                f"this run is {self.recipe!r}",
                f"resume it with {checkpoint.recipe!r}, or save into another folder",
            )
        return checkpoint

    def _not_found(self, wanted: str) -> CheckpointError:
        existing = [*(self.path(step).name for step in self.steps()), *sorted(self.aliases())]
        guess = closest(Path(wanted).name, existing)
        return CheckpointError(
            f"{wanted!r} is not a checkpoint; {self.folder} holds {', '.join(existing) or 'none'}",
            f"use {guess!r}" if guess else "pass a step folder or one of those names",
        )


def _check_parameters_are_saved(objects: Mapping[str, Any]) -> None:
    """Refuse an optimizer with parameters that none of the other objects has."""
    others = [unwrap(o) for o in objects.values() if not isinstance(o, Optimizer)]
    modules = [o for o in others if isinstance(o, nn.Module)]
    known = {id(p) for module in modules for p in module.parameters()}
    remedy = "pass the module that holds it too, or register it in a module that is passed"
    for name, optimizer in objects.items():
        if isinstance(optimizer, Optimizer):
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            if any(id(p) not in known for p in trained):
                rest = [o.state_dict() for o in others if not isinstance(o, nn.Module)]
                places = {tensor.data_ptr() for tensor in tensors_in(rest)}
                known |= {id(p) for p in trained if places and p.data_ptr() in places}
            check_registered(optimizer, known, f"what is saved with {name}", remedy)


@contextmanager
def _reported(problem: str, remedy: str) -> Iterator[None]:
    """Turn an OSError into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{problem}: {error}", remedy) from error


def _is_stale(checkpoint: Checkpoint, newest: generation.Generation | None) -> bool:
    if newest is None or checkpoint.generation >= newest.number:
        return False
    return checkpoint.step not in newest.steps


def _raise_if_stale(checkpoint: Checkpoint, newest: generation.Generation | None) -> None:
    """Refuse a checkpoint that an earlier group saved after a later one took over."""
    if newest is not None and _is_stale(checkpoint, newest):
        raise CheckpointError(
            f"{checkpoint.path}: saved by generation {checkpoint.generation} of this run, which "
            f"generation {newest.number} had replaced at {newest.since} (process {newest.pid} on "
            f"{newest.host})",
            "use a checkpoint of the newest generation",
        )


def _flush_above(folder: Path) -> None:
    """Make the names of a folder and its parents survive a power loss, if we have permission."""
    device = folder.stat().st_dev
    for above in folder.absolute().parents:
        if above.stat().st_dev != device:
            break
        with suppress(PermissionError):
            flush_folder(above)


def _free_bytes(folder: Path) -> str:
    with suppress(OSError):
        return f"{shutil.disk_usage(folder).free:,}"
    return "an unknown number"


def _fingerprint(folder: Path) -> tuple[object, ...]:
    """Return a value that changes when a file of the checkpoint is written."""
    with suppress(OSError):
        found = ((entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(folder))
        return tuple(sorted((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in found))
    return ()
