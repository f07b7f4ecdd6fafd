"""How long SLURM lets a run save before it is killed, against how long saving takes.

Owns: reading what a batch script or a job asks for, and what reaches which process. Does
not own: the time a save takes; that was measured.
"""

import re
import signal
import subprocess
from collections.abc import Callable, Mapping

from lockstep.doctor.command import Command, batch_options
from lockstep.doctor.findings import Findings
from lockstep.doctor.report import Result, fail, ok, seconds_text, skip, warn

KILL_WAIT_S = 30.0
"""SLURM's default between SIGTERM and SIGKILL."""
MARGIN_S = 5.0
HEARD = ("TERM", "INT", "USR1", "HUP")
"""Signals on which a run saves and leaves."""
Ask = Callable[[list[str]], str]


def ask(words: list[str]) -> str:
    """Run a SLURM command and return what it says; nothing if it cannot."""
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


def parse_signal(text: str) -> tuple[bool, str, float]:
    """Return whether it goes to the batch shell alone, its name, and how long before the end.

    >>> parse_signal("B:USR1@120"), parse_signal("SIGTERM"), parse_signal("R:10@30")
    ((True, 'USR1', 120.0), (False, 'TERM', 60.0), (False, 'USR1', 30.0))
    """
    flags, _, rest = text.rpartition(":")
    name, _, seconds = rest.partition("@")
    if name.isdecimal() and int(name) in set(signal.Signals):
        name = signal.Signals(int(name)).name
    return "B" in flags, name.upper().removeprefix("SIG"), float(seconds or 60)


def parse_time(text: str) -> float | None:
    """Return a SLURM time in seconds; None where there is no limit.

    >>> [parse_time(t) for t in ("30", "10:30", "2:00:00", "1-12", "1-02:03:04", "UNLIMITED")]
    [1800.0, 630.0, 7200.0, 129600.0, 93784.0, None]
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not match:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, minutes, seconds = 0, *(*numbers, 0)[:2]
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)


def grace_time(
    command: Command | None, found: Findings | None, env: Mapping[str, str], ask: Ask = ask
) -> Result:
    """Is there time to save between SLURM's warning and its kill?"""
    name = "grace time"
    job = env.get("SLURM_JOB_ID")
    options, script = (
        dict(command.batch if command else {}),
        command.batch_script if command else "",
    )
    if not script and not job:
        return skip(name, "no SLURM job and no sbatch script")
    if not script and job:
        script = ask(["scontrol", "write", "batch_script", job, "-"])
        options = batch_options(script)
    told = re.search(r"^KillWait\s*=\s*(\d+)", ask(["scontrol", "show", "config"]), re.MULTILINE)
    kill_wait = float(told[1]) if told else KILL_WAIT_S
    limit = parse_time(options.get("time", options.get("t", "")))
    until = f"time limit {seconds_text(limit)}, " if limit else ""
    seconds, source = kill_wait, f"KillWait {kill_wait:.0f} s, no --signal"
    fix = "#SBATCH --signal=TERM@"
    needed = MARGIN_S + (found.step_s + found.save_s if found else 0)
    if asked := options.get("signal"):
        to_shell, heard, seconds = parse_signal(asked)
        source = f"--signal={asked}"
        if heard not in HEARD:
            says = f"{source}: a run saves on {', '.join(HEARD)}; this one just ends it"
            return fail(name, says, f"{fix}{seconds:.0f}")
        launcher = command.launcher if command else ""
        if heard == "USR1" and launcher in ("torchrun", "torch.distributed.launch", "accelerate"):
            says = f"{source}: {launcher} is ended by USR1 and takes its ranks along"
            return fail(name, says, f"{fix}{seconds:.0f}, or lockstep launch, which passes it on")
        if to_shell and "trap" not in script:
            says = f"{source} reaches the batch shell alone, which does not pass it on"
            return fail(name, says, f"{fix}{seconds:.0f}, without B:")
        if not to_shell and script and not re.search(r"^[^#\n]*\bsrun\b", script, re.MULTILINE):
            says = f"{source} reaches what srun started, and the script has no srun"
            return warn(name, says, "srun before the command")
    if found is None or not found.save_s:
        return ok(name, f"{until}{seconds:.0f} s to save ({source}); the save was not measured")
    parts = f"{seconds_text(found.step_s)} for a step, {seconds_text(found.save_s)} for a save"
    says = (
        f"{until}{seconds:.0f} s to save ({source}), about {seconds_text(needed)} needed: "
        f"{parts}, {MARGIN_S:.0f} s spare"
    )
    if needed > seconds:
        return fail(name, says, f"{fix}{max(60, round(2 * needed)):.0f}")
    return ok(name, says)
