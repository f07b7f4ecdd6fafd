"""Checks of the job about to run, from what the probe found: each a function of `Findings`.

Owns: what is enough room, memory, speed. Does not own: measuring; `probe.py` did.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.doctor.command import Command
from lockstep.doctor.findings import STAGES, Findings
from lockstep.doctor.report import Result, bytes_text, fail, ok, seconds_text, skip, warn

TIGHT_SHARE = 0.9
NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "fuse", "9p", "afs")
OUT_OF_MEMORY = ("OutOfMemoryError", "can't allocate memory", "MemoryError", "out of memory")
STAGE_WORDS = {
    "script": "the script",
    "folder": "the output folder",
    "data": "the data",
    "resume": "the checkpoint to go on from",
    "contract": "the batch",
    "samples": "the samples",
    "model": "the model",
    "loader": "the loader",
    "step": "a step",
    "save": "a save",
}
SMALLER_BATCH = "half the batch_size with twice the accumulation, or mixed precision"


def _unseen(name: str, stage: str, found: Findings) -> Result | None:
    """Return what to say where the probe did not finish `stage`; None where it did."""
    if stage in found.seen:
        return None
    if found.unseen:
        return skip(name, found.unseen)
    before = [s for s in STAGES[: STAGES.index(stage)] if s in found.problems and s != "folder"]
    if before:
        return skip(name, f"not reached: {STAGE_WORDS[before[-1]]} failed")
    if found.timed_out_s:
        if found.stage != stage:
            return skip(name, f"not reached in {found.timed_out_s:.0f} s")
        fix = "a longer --seconds, or a smaller job"
        return fail(name, f"{STAGE_WORDS[stage]} took longer than {found.timed_out_s:.0f} s", fix)
    return skip(name, "not looked into")


def _problem(name: str, stage: str, found: Findings, fix: str) -> Result | None:
    if stage in found.problems:
        problem, remedy = found.problems[stage]
        return fail(name, problem, remedy or fix)
    return _unseen(name, stage, found)


def script(command: Command, found: Findings) -> Result:
    """Does the script come as far as training?"""
    words = " ".join(command.script)
    said = f"{words[:60]}{'...' if len(words) > 60 else ''}"
    if "script" in found.problems:
        problem, remedy = found.problems["script"]
        return fail("script", f"{said}: {problem}", remedy or "run it by hand to see all of it")
    if found.unseen and not found.task:
        return skip("script", f"{said}: {found.unseen}")
    if found.stage == "script":
        return fail("script", f"{said}: no call of fit in {found.timed_out_s:.0f} s", "--seconds")
    return ok("script", f"{said} trains {found.task!r} on {found.device}")


def command_read(command: Command) -> Result:
    """What does the command start?"""
    nodes = f" on each of {command.num_nodes} machines" if command.num_nodes > 1 else ""
    many = "process" if command.num_processes == 1 else "processes"
    says = f"{command.launcher}: {command.num_processes} {many}{nodes}"
    if command.launcher == "sbatch":
        says = "an sbatch script: its SLURM options are looked at, the command inside is not"
    if command.remarks:
        fix = "activate that environment, or torchrun in place of accelerate --cpu"
        return warn("command", f"{says}; {'; '.join(command.remarks)}", fix)
    return ok("command", says)


def data(found: Findings) -> Result:
    """Are the data there, and can every rank read what it needs first?"""
    name = "data"
    for stage in ("data", "samples"):
        if stage == "samples" and "contract" in found.problems:
            break
        if bad := _problem(name, stage, found, "the path in the command, from this folder"):
            return bad
    if found.is_stream:
        return ok(name, "a stream, read in the order it comes")
    held_out = f", {found.num_held_out} held out" if found.num_held_out else ""
    read = f", the first of each of {found.samples_read} ranks read" if found.samples_read else ""
    return ok(name, f"{found.num_samples} samples{held_out}{read}")


def batch_and_rate(found: Findings, world_size: int) -> Result:
    """What will the batch and the learning rate be on so many ranks?"""
    name = "batch and rate"
    if bad := _problem(name, "contract", found, "see lockstep plan"):
        return bad
    rate = found.config.get("rate", {})
    says = "; ".join(found.contract)
    fixed = found.config.get("batch", {}).get("global_batch_size") or rate.get("reference_batch")
    if rate.get("lr_scaling") == "linear" and world_size > 1 and found.global_batch == fixed:
        fix = "lr_scaling none, or a batch that grows with the ranks"
        return warn(name, f"{says}; the rate is scaled and the batch is not", fix)
    if found.warmup_steps > found.total_steps:
        says += f"; warm-up of {found.warmup_steps} steps outlasts the run of {found.total_steps}"
        return warn(name, says, "a shorter warm-up")
    return ok(name, says)


def resume(found: Findings) -> Result:
    """Does it start anew, or go on, and from what?"""
    if bad := _problem("resume", "resume", found, "another output_dir"):
        return bad
    if found.rejected:
        says = f"goes on from {found.resumed_from}, past {'; '.join(found.rejected)}"
        return warn("resume", says, "nothing, if that was a killed save")
    if found.resumed_from:
        return ok("resume", f"goes on from {found.resumed_from}")
    return ok("resume", f"starts anew in {found.output_dir}")


def output_folder(found: Findings) -> Result:
    """Can the run write, flush and rename where it will save, and has nobody else the folder?"""
    name = "output folder"
    fix = "a folder you may write to (output_dir, save_dir)"
    if found.stage == "script":
        return _unseen(name, "folder", found) or skip(name, "not looked into")
    if bad := _problem(name, "folder", found, fix):
        return bad
    says = f"written, flushed and renamed on {found.file_system or 'its file system'}"
    if found.file_system.startswith(NETWORK_FILE_SYSTEMS):
        return warn(name, f"{says}: a network file system", "one that all nodes share, with locks")
    return ok(name, says)


def checkpoints_kept(found: Findings) -> int:
    """Return the most checkpoints the folder will hold at once, one being written."""
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
    """Will all the checkpoints fit?"""
    name = "room"
    if "folder" in found.problems:
        return skip(name, "not measured: the output folder failed")
    if bad := _problem(name, "save", found, "another output_dir"):
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
        return fail(name, says + at, "a larger save_interval, a smaller keep_last, another disk")
    if needed > TIGHT_SHARE * free:
        return warn(name, says, "a larger save_interval, or make room")
    return ok(name, says)


def step(found: Findings) -> Result:
    """Does one step work, and is its loss a number?"""
    name = "step"
    for stage in ("model", "step"):
        problem = found.problems.get(stage, [""])[0]
        if any(word in problem for word in OUT_OF_MEMORY):
            return skip(name, "not finished: see memory")
    stage = "model" if "model" in found.problems else "step"
    if bad := _problem(name, stage, found, "run it by hand to see the traceback"):
        return bad
    trained = f"{found.num_trained:,} of {found.num_parameters:,} parameters trained"
    says = f"{seconds_text(found.step_s)} on {found.device}, {trained}, loss {found.loss}"
    if found.loss in ("nan", "inf", "-inf"):
        fix = "a lower rate, fp32, and a look at the samples"
        return fail(name, f"{says}: not a number in {found.num_steps} steps", fix)
    compiled = " (not compiled here)" if found.config.get("compile") else ""
    return ok(name, says + compiled)


def memory(found: Findings, num_processes: int, num_gpus: int = 0) -> Result:
    """Does a step fit into what is free?"""
    name = "memory"
    for stage in ("model", "step"):
        problem = found.problems.get(stage, [""])[0]
        if any(word in problem for word in OUT_OF_MEMORY):
            has = f"{bytes_text(found.free_memory_bytes)} free on {found.device}"
            return fail(name, f"{has}: {problem}", SMALLER_BATCH)
    if "step" not in found.seen:
        if "step" in found.problems or "model" in found.problems:
            return skip(name, "not reached: a step failed")
        return _unseen(name, "step", found) or skip(name, "not looked into")
    sharing = num_processes if found.device == "cpu" else -(-num_processes // max(1, num_gpus))
    needed, free = found.memory_bytes * sharing, found.free_memory_bytes
    each = f"{sharing} x {bytes_text(found.memory_bytes)}" if sharing > 1 else bytes_text(needed)
    says = f"a step needs {each}, {bytes_text(free)} free on {found.device}"
    if needed > free:
        return fail(name, says, SMALLER_BATCH)
    if needed > TIGHT_SHARE * free:
        return warn(name, says, SMALLER_BATCH)
    return ok(name, says)


def loader_speed(found: Findings, num_processes: int, num_cores: int | None = None) -> Result:
    """Does reading keep up with the steps?"""
    name = "loader"
    if bad := _problem(name, "loader", found, "run it by hand to see the traceback"):
        return bad
    if "step" not in found.seen:
        return skip(name, f"{seconds_text(found.read_s)} to read a step, with no step to compare")
    cores = num_cores or os.cpu_count() or 1
    workers = found.config.get("loader", {}).get("num_workers", 0)
    each = max(1, workers)
    # One rank was measured; the others of this machine read at the same time.
    crowding = max(1.0, num_processes * each / cores) / max(1.0, each / cores)
    read = found.read_s * crowding
    crowd = (
        f" (x {crowding:.1f} for {num_processes} ranks on {cores} cores)" if crowding > 1 else ""
    )
    says = (
        f"{workers} workers read a step in {seconds_text(found.read_s)}{crowd}, "
        f"a step takes {seconds_text(found.step_s)}"
    )
    more = f"num_workers={min(8, max(1, cores // max(1, num_processes)))}, or cheaper samples"
    slows = read > found.step_s or (not workers and read > 0.2 * found.step_s)
    if slows and read > found.step_s:
        return warn(name, f"{says}: reading limits", more)
    if slows:
        return warn(name, f"{says}: without workers they take turns", more)
    return ok(name, f"{says}: the step limits")


def workers(found: Findings, num_processes: int, num_cores: int | None = None) -> Result:
    """Are there cores for all the loader's workers?"""
    if not found.config:
        return _unseen("workers", "contract", found) or skip("workers", "not looked into")
    cores = num_cores or os.cpu_count() or 1
    each = found.config.get("loader", {}).get("num_workers", 0)
    says = f"{num_processes} x {each} loader workers on {cores} cores"
    if num_processes * each > cores:
        fix = f"num_workers={max(1, cores // num_processes)}"
        return warn("workers", says, fix)
    return ok("workers", says)


def communication(found: Findings, facts: Mapping[str, object], world_size: int) -> Result:
    """Is a step long enough for its gradients to be exchanged meanwhile?"""
    name = "communication"
    if world_size == 1:
        return skip(name, "one rank exchanges nothing")
    if "step" not in found.seen:
        return _unseen(name, "step", found) or skip(name, "no step to compare with")
    total = facts.get("sum")
    if not isinstance(total, dict):
        return skip(name, "the all-reduce was not measured")
    seconds = found.trained_bytes / (total["num_bytes"] / total["seconds"])
    says = (
        f"{bytes_text(found.trained_bytes)} of gradients take about {seconds_text(seconds)}, "
        f"a step {seconds_text(found.step_s)}"
    )
    if seconds > found.step_s:
        fix = "a larger batch_size or more accumulation: so many ranks are not faster"
        return warn(name, says, fix)
    return ok(name, says)


def sinks(
    found: Findings, env: Mapping[str, str], is_there: Callable[[str], object] | None = None
) -> Result:
    """Are the trackers there that the job writes to?"""
    name = "trackers"
    if not found.config:
        return _unseen(name, "contract", found) or skip(name, "not looked into")
    find = is_there or importlib.util.find_spec
    asked = found.config.get("sinks", {})
    wanted = [n for n in ("tensorboard", "wandb") if asked.get(n)]
    if not wanted:
        return skip(name, "neither TensorBoard nor W&B is asked for")
    missing = [n for n in wanted if not find(n)]
    if missing:
        fix = f"pip install {' '.join(missing)}; the run goes on without"
        return warn(name, f"asked for, not installed: {', '.join(missing)}", fix)
    offline = env.get("WANDB_MODE") in ("offline", "disabled")
    has_key = "WANDB_API_KEY" in env or (Path(env.get("HOME", "/")) / ".netrc").exists()
    if "wandb" in wanted and not offline and not has_key:
        fix = "export WANDB_API_KEY=..., or WANDB_MODE=offline"
        return warn(name, "W&B is asked for, and no key is set", fix)
    return ok(name, f"{' and '.join(wanted)} installed; the first rank alone writes")
