"""Check that the time SLURM leaves a run for saving is longer than a save.

Owns: reading the options of a batch script or a job, and which process gets which signal. Does
not own: measuring a save.
"""

import re
from collections.abc import Callable, Mapping

from lockstep.doctor.command import Command, batch_options
from lockstep.doctor.findings import Findings
from lockstep.doctor.report import Result, fail, ok, seconds_text, skip, warn
from lockstep.errors import plain
from lockstep.launch.slurm_text import (
    KILL_WAIT_S,
    UNLIMITED,
    parse_kill_wait,
    parse_signal,
    parse_time_limit,
    run_command,
)
from lockstep.signals import EXIT_CODES

MARGIN_S = 5.0
HEARD = tuple(number.name.removeprefix("SIG") for number in EXIT_CODES)
"""Signals after which a run saves and exits."""
Ask = Callable[[list[str]], str]


def ask(words: list[str]) -> str:
    """Run a SLURM command and return its output; empty if it fails."""
    answer = run_command(words, timeout_s=10)
    return answer.out if answer and answer.code == 0 else ""


def _time_limit(text: str) -> str:
    """Return the time limit as the beginning of a line; empty if there is none."""
    if not text or text.upper() in UNLIMITED:
        return ""
    seconds = parse_time_limit(text)
    return f"time limit {seconds_text(seconds) if seconds else 'not known'}, "


def grace_time(
    command: Command | None, found: Findings | None, env: Mapping[str, str], ask: Ask = ask
) -> Result:
    """Check that a save fits between SLURM's warning and its kill."""
    job = env.get("SLURM_JOB_ID")
    options, script = (
        dict(command.batch if command else {}),
        command.batch_script if command else "",
    )
    if not script and not job:
        return skip("no SLURM job and no sbatch script")
    if not script and job:
        script = ask(["scontrol", "write", "batch_script", job, "-"])
        options = batch_options(script)
    kill_wait = parse_kill_wait(ask(["scontrol", "show", "config"]))
    known = "" if kill_wait is not None else " (SLURM's default: the cluster's is not known)"
    kill_wait = KILL_WAIT_S if kill_wait is None else kill_wait
    until = _time_limit(options.get("time", options.get("t", "")))
    seconds: float = kill_wait
    source = f"KillWait {kill_wait:.0f} s{known}, no --signal"
    fix = "write #SBATCH --signal=TERM@"
    needed = MARGIN_S + (found.step_s + found.save_s if found else 0)
    if asked := options.get("signal"):
        source = f"--signal={plain(asked)}"
        option = parse_signal(asked)
        if option is None:
            says = f"{source} is not a signal and a time that SLURM understands"
            return fail(says, f"{fix}120")
        to_shell, heard, seconds = option.to_shell, option.name, option.seconds
        if heard not in HEARD:
            says = f"{source}: a run saves on {', '.join(HEARD)}; this signal just kills it"
            return fail(says, f"{fix}{seconds:.0f}")
        launcher = command.launcher if command else ""
        if heard == "USR1" and launcher in ("torchrun", "torch.distributed.launch", "accelerate"):
            says = f"{source}: {launcher} is ended by USR1 and takes its ranks along"
            return fail(says, f"{fix}{seconds:.0f}, or use lockstep launch, which passes it on")
        if to_shell and "trap" not in script:
            says = f"{source} reaches the batch shell alone, which does not pass it on"
            return fail(says, f"{fix}{seconds:.0f}, without B:")
        if not to_shell and script and not re.search(r"^[^#\n]*\bsrun\b", script, re.MULTILINE):
            says = f"{source} reaches what srun started, and the script has no srun"
            return warn(says, "write srun before the command")
    if found is None or not found.save_s:
        return ok(f"{until}{seconds:.0f} s to save ({source}); the save was not measured")
    parts = f"{seconds_text(found.step_s)} for a step, {seconds_text(found.save_s)} for a save"
    says = (
        f"{until}{seconds:.0f} s to save ({source}), about {seconds_text(needed)} needed: "
        f"{parts}, {MARGIN_S:.0f} s spare"
    )
    if needed > seconds:
        return fail(says, f"{fix}{max(60, round(2 * needed)):.0f}")
    return ok(says)
