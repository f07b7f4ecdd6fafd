"""Checks of the job about to run: each is a function of the findings of its trial.

Owns: how much disk, memory and speed is enough. Does not own: measuring (`callback.py`).
"""

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.doctor.command import Command
from lockstep.doctor.findings import TRIAL_PHASES, Findings
from lockstep.doctor.report import Result, bytes_text, fail, ok, seconds_text, skip, warn

TIGHT_SHARE = 0.9
NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "fuse", "9p", "afs")
OUT_OF_MEMORY = ("OutOfMemoryError", "can't allocate memory", "MemoryError", "out of memory")
PHASE_NOUNS = {
    "script": "the script",
    "folder": "the output folder",
    "resume": "the checkpoint",
    "data": "the data",
    "contract": "the batch",
    "model": "the model",
    "samples": "a sample",
    "loader": "the loader",
    "step": "a step",
    "save": "a save",
}
SMALLER_BATCH = "halve batch_size and double accumulate, or use mixed precision"
LONGER = "pass a longer --seconds, or try a smaller job"
TRACEBACK = "run the command by itself to see the traceback"


def _unfinished(phase: str, found: Findings) -> Result | None:
    """Return why the trial did not finish `phase`; None if it did."""
    if phase in found.passed:
        return None
    if found.unchecked:
        return skip(found.unchecked)
    failed = [p for p in TRIAL_PHASES if p in found.problems and p != "folder"]
    if failed:
        return skip(f"not reached: {PHASE_NOUNS[failed[-1]]} failed")
    if found.timed_out_s:
        if found.phase != phase:
            return skip(f"not reached in {found.timed_out_s:.0f} s")
        return fail(f"{PHASE_NOUNS[phase]} took longer than {found.timed_out_s:.0f} s", LONGER)
    return skip("not checked")


def _problem(phase: str, found: Findings, fix: str) -> Result | None:
    if phase in found.problems:
        problem, remedy = found.problems[phase]
        return fail(problem, remedy or fix)
    return _unfinished(phase, found)


def script(command: Command, found: Findings) -> Result:
    """Check that the script gets as far as training."""
    words = " ".join(command.script)
    shown_words = f"{words[:60]}{'...' if len(words) > 60 else ''}"
    if "script" in found.problems:
        problem, remedy = found.problems["script"]
        return fail(f"{shown_words}: {problem}", remedy or TRACEBACK)
    if found.unchecked and not found.task:
        return skip(f"{shown_words}: {found.unchecked}")
    if found.phase == "script":
        return fail(f"{shown_words}: no call of fit in {found.timed_out_s:.0f} s", LONGER)
    ranks = f", tried as {found.num_ranks} ranks" if found.num_ranks > 1 else ""
    return ok(f"{shown_words} trains {found.task!r} on {found.device}{ranks}")


def command_read(command: Command) -> Result:
    """Report what the command starts."""
    nodes = f" on each of {command.num_nodes} machines" if command.num_nodes > 1 else ""
    many = "process" if command.num_processes == 1 else "processes"
    says = f"{command.launcher}: {command.num_processes} {many}{nodes}"
    if command.launcher == "sbatch":
        says = "an sbatch script: its SLURM options are checked, the command inside is not"
    if command.remarks:
        fix = "use torchrun in place of accelerate --cpu"
        if "not on PATH" in command.remarks[-1]:
            fix = "activate that environment"
        return warn(f"{says}; {'; '.join(command.remarks)}", fix)
    return ok(says)


def data(found: Findings) -> Result:
    """Check that the data exist, and that every rank can read its first sample."""
    if bad := _problem("data", found, "correct the path in the command"):
        return bad
    if "samples" in found.problems or (found.phase == "samples" and found.timed_out_s):
        return _problem("samples", found, "check the file of that sample") or skip("")
    if "samples" not in found.passed:
        return ok("opened; no sample was read")
    if found.is_stream:
        return ok("a stream, read in the order it comes")
    held_out = f", {found.num_held_out} held out" if found.num_held_out else ""
    read = f", the first of each of {found.samples_read} ranks read"
    return ok(f"{found.num_samples} samples{held_out}{read}")


def batch_and_rate(found: Findings, world_size: int) -> Result:
    """Report and check the batch and the learning rate on this number of ranks."""
    if bad := _problem("contract", found, "run lockstep plan"):
        return bad
    rate = found.config.get("rate", {})
    says = "; ".join(found.contract)
    fixed = found.config.get("batch", {}).get("global_batch_size") or rate.get("reference_batch")
    if rate.get("lr_scaling") == "linear" and world_size > 1 and found.global_batch == fixed:
        fix = "set lr_scaling=none, or let the batch grow with the ranks"
        return warn(f"{says}; the rate is scaled and the batch is not", fix)
    if found.warmup_steps > found.total_steps:
        says += f"; warm-up of {found.warmup_steps} steps outlasts the run of {found.total_steps}"
        return warn(says, "set a shorter warm-up")
    return ok(says)


def resume(found: Findings) -> Result:
    """Report whether the job starts from scratch or resumes, and from which checkpoint."""
    if bad := _problem("resume", found, "use another output_dir"):
        return bad
    if found.rejected:
        says = f"resumes from {found.resumed_from}; fell back from {'; '.join(found.rejected)}"
        fix = "check the disk, unless a save was killed"
        return warn(says, fix)
    if found.resumed_from:
        return ok(f"resumes from {found.resumed_from}")
    return ok(f"starts from scratch in {found.output_dir}")


def output_folder(found: Findings) -> Result:
    """Check that the run can write, flush and rename files in a folder that no other run uses."""
    fix = "use a folder you may write to (output_dir, save_dir)"
    if found.phase == "script":
        return _unfinished("folder", found) or skip("not checked")
    if bad := _problem("folder", found, fix):
        return bad
    says = f"written, flushed and renamed on {found.file_system or 'its file system'}"
    if found.file_system.startswith(NETWORK_FILE_SYSTEMS):
        fix = "use a folder that all nodes share, on a file system with locks"
        return warn(f"{says}: a network file system", fix)
    return ok(says)


def checkpoints_kept(found: Findings) -> int:
    """Return the maximum number of checkpoints in the folder at a time, one being written."""
    saving, evaluation = found.config.get("checkpoint", {}), found.config.get("evaluation", {})
    kept = int(saving.get("keep_last", 3)) + 1
    if found.num_held_out and evaluation.get("save_best", True):
        kept += 1
    epochs = found.total_steps // max(1, found.steps_per_epoch)
    if saving.get("name_epochs") and saving.get("every_epochs"):
        kept += int(epochs / saving["every_epochs"])
    if saving.get("name_steps") and saving.get("every_steps"):
        kept += found.total_steps // int(saving["every_steps"])
    return kept


def room(found: Findings) -> Result:
    """Check that all checkpoints fit on the disk."""
    if "folder" in found.problems:
        return skip("not measured: the output folder failed")
    if bad := _problem("save", found, "use another output_dir"):
        return bad
    kept, each = checkpoints_kept(found), found.checkpoint_bytes
    needed, free = kept * each, found.free_disk_bytes
    took = f", a save takes {seconds_text(found.save_s)}" if found.save_s else ""
    says = (
        f"{bytes_text(needed)} for up to {kept} checkpoints of {bytes_text(each)}, "
        f"{bytes_text(free)} free{took}"
    )
    if needed > free:
        at = f": full after {free // each}" if each else ""
        fix = "save less often (save_interval), lower keep_last, or use another disk"
        return fail(says + at, fix)
    if needed > TIGHT_SHARE * free:
        return warn(says, "save less often (save_interval), or make room")
    return ok(says)


def _is_out_of_memory(found: Findings) -> str:
    """Return the problem, if the model or a step does not fit in memory."""
    for phase in ("model", "step"):
        problem = found.problems.get(phase, [""])[0]
        if any(word in problem for word in OUT_OF_MEMORY):
            return problem
    return ""


def step(found: Findings) -> Result:
    """Check that a step works, and that its loss is finite."""
    if _is_out_of_memory(found):
        return skip("not finished: see memory")
    phase = "model" if "model" in found.problems else "step"
    if bad := _problem(phase, found, TRACEBACK):
        return bad
    trained = f"{found.num_trained:,} of {found.num_parameters:,} parameters trained"
    took = "its first step" if found.unchecked else "a step"
    shards = f", sharded over {found.num_ranks} ranks" if found.is_sharded else ""
    says = (
        f"{seconds_text(found.step_s)} on {found.device} for {took}{shards}, {trained}, "
        f"loss {found.loss}"
    )
    if found.loss in ("nan", "inf", "-inf"):
        fix = "lower the learning rate, set precision=fp32, and check the samples"
        return fail(f"{says}: non-finite after {found.num_steps} steps", fix)
    return ok(says)


def memory_per_rank(found: Findings, world_size: int) -> int:
    """Return the memory that each rank of the job needs: shards get smaller with more ranks.

    >>> memory_per_rank(Findings(memory_bytes=900, state_bytes=800), world_size=8)
    900
    >>> of_two = Findings(memory_bytes=900, state_bytes=800, is_sharded=True, num_ranks=2)
    >>> memory_per_rank(of_two, world_size=8)
    300
    """
    if not found.is_sharded or world_size <= found.num_ranks:
        return found.memory_bytes
    return found.memory_bytes - round(found.state_bytes * (1 - found.num_ranks / world_size))


def memory(found: Findings, command: Command, num_gpus: int = 0) -> Result:
    """Check that a step fits into the free memory."""
    if problem := _is_out_of_memory(found):
        has = f"{bytes_text(found.free_memory_bytes)} free on {found.device}"
        return fail(f"{has}: {problem}", SMALLER_BATCH)
    if "step" not in found.passed:
        if "step" in found.problems or "model" in found.problems:
            return skip("not reached: a step failed")
        return _unfinished("step", found) or skip("not checked")
    here = command.num_processes
    sharing = here if found.device == "cpu" else -(-here // max(1, num_gpus))
    per_rank = memory_per_rank(found, command.world_size)
    needed, free = per_rank * sharing, found.free_memory_bytes
    each = f"{sharing} x {bytes_text(per_rank)}" if sharing > 1 else bytes_text(needed)
    says = f"a step needs {each}, {bytes_text(free)} free on {found.device}"
    if found.is_sharded:
        shard = round(found.state_bytes * found.num_ranks / command.world_size)
        says += f"; {bytes_text(shard)} of it is a shard of 1/{command.world_size}"
    if found.is_sharded and command.world_size > found.num_ranks:
        says += f", estimated from {found.num_ranks} ranks"
    if needed > free:
        return fail(says, SMALLER_BATCH)
    if needed > TIGHT_SHARE * free:
        return warn(says, SMALLER_BATCH)
    return ok(says)


def loader_speed(found: Findings, num_processes: int, num_cores: int | None = None) -> Result:
    """Check that reading is as fast as the steps."""
    if bad := _problem("loader", found, TRACEBACK):
        return bad
    if "step" not in found.passed:
        return skip(f"{seconds_text(found.read_s)} to read a step, with no step to compare")
    cores = num_cores or os.cpu_count() or 1
    workers = found.config.get("loader", {}).get("num_workers", 0)
    each = max(1, workers)
    # One rank was measured; the other ranks of this machine read at the same time.
    crowding = max(1.0, num_processes * each / cores) / max(1.0, each / cores)
    read = found.read_s * crowding
    count = "1 worker" if workers == 1 else f"{workers} workers"
    crowd = (
        f" (x {crowding:.1f} for {num_processes} ranks on {cores} cores)" if crowding > 1 else ""
    )
    says = (
        f"reading a step takes {seconds_text(found.read_s)} with {count}{crowd}, "
        f"a step takes {seconds_text(found.step_s)}"
    )
    enough = min(8, max(1, cores // max(1, num_processes)))
    fix = f"set num_workers={enough}, or make samples cheaper to read"
    slows = read > found.step_s or (not workers and read > 0.2 * found.step_s)
    if slows and read > found.step_s:
        return warn(f"{says}: reading limits", fix)
    if slows:
        return warn(f"{says}: without workers, a rank reads and trains in turn", fix)
    return ok(f"{says}: the step limits")


def workers(found: Findings, num_processes: int, num_cores: int | None = None) -> Result:
    """Check that there are cores for all loader workers."""
    if not found.config:
        return _unfinished("contract", found) or skip("not checked")
    cores = num_cores or os.cpu_count() or 1
    each = found.config.get("loader", {}).get("num_workers", 0)
    says = f"{num_processes} x {each} loader workers on {cores} cores"
    if num_processes * each > cores:
        fix = f"set num_workers={max(1, cores // num_processes)}"
        return warn(says, fix)
    return ok(says)


def communication(found: Findings, facts: Mapping[str, object], world_size: int) -> Result:
    """Check that gradients are exchanged in less time than a step takes."""
    if world_size == 1:
        return skip("one rank exchanges nothing")
    if "step" not in found.passed:
        return _unfinished("step", found) or skip("no step to compare with")
    total = facts.get("sum")
    if not isinstance(total, dict):
        return skip("the all-reduce was not measured")
    seconds = found.trained_bytes / (total["num_bytes"] / total["seconds"])
    says = (
        f"{bytes_text(found.trained_bytes)} of gradients take about {seconds_text(seconds)}, "
        f"a step {seconds_text(found.step_s)}"
    )
    if seconds > found.step_s:
        fix = "raise batch_size or accumulate: otherwise this many ranks are not faster"
        return warn(says, fix)
    return ok(says)


def sinks(
    found: Findings, env: Mapping[str, str], is_there: Callable[[str], object] | None = None
) -> Result:
    """Check that the trackers (TensorBoard, W&B) that the job uses are installed."""
    if not found.config:
        return _unfinished("contract", found) or skip("not checked")
    find = is_there or importlib.util.find_spec
    asked = found.config.get("sinks", {})
    wanted = [n for n in ("tensorboard", "wandb") if asked.get(n)]
    if not wanted:
        return skip("neither TensorBoard nor W&B is asked for")
    missing = [n for n in wanted if not find(n)]
    if missing:
        fix = f"run pip install {' '.join(missing)}; the run also works without"
        return warn(f"asked for, but not installed: {', '.join(missing)}", fix)
    offline = env.get("WANDB_MODE") in ("offline", "disabled")
    has_key = "WANDB_API_KEY" in env or (Path(env.get("HOME", "/")) / ".netrc").exists()
    if "wandb" in wanted and not offline and not has_key:
        fix = "set WANDB_API_KEY, or WANDB_MODE=offline"
        return warn("W&B is asked for, but no key is set", fix)
    return ok(f"{' and '.join(wanted)} installed; the first rank alone writes")
