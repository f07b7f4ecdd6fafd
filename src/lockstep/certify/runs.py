"""Certify a command: start its runs, and keep their folder if something differs.

Owns: the folder of all runs, and what a killed run must have left there. Does not own: processes
(`lockstep.harness`), which runs are started, and the verdict (`certificate.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from lockstep.certify.callback import CALLBACK
from lockstep.certify.certificate import Certificate, certify_parity, certify_resume
from lockstep.certify.settings import RunSettings
from lockstep.errors import ConfigError
from lockstep.harness.attach import KILLED, TRACE
from lockstep.harness.runs import CommandRuns, runs_folder


def certify_command(
    words: Sequence[str],
    steps: int,
    *,
    limit_s: float,
    gpus: Sequence[int] = (),
    exact: bool = False,
    evaluates: bool = False,
    report_run: Callable[[str, float], None] = lambda name, seconds: None,
) -> tuple[Certificate, Path | None]:
    """Certify parity between these numbers of GPUs or, without any, a resume.

    Args:
        words: The command.
        steps: How many steps each run takes.
        limit_s: How long a run may go without progress.
        gpus: The numbers of ranks to compare.
        exact: Whether parity is that of exact mode, bit for bit.
        evaluates: Whether runs also evaluate at each save.
        report_run: Called with the name of each run that succeeded, and its seconds.

    Returns:
        The certificate, and the folder of traces and output if something differs.
    """
    with runs_folder("certify") as folder:
        runs = CommandRuns(words, folder.path, CALLBACK, limit_s=limit_s, tell=report_run)

        def run_command(name: str, settings: RunSettings, ranks: int) -> Path:
            ended = runs.run(name, ranks, asdict(settings))
            if settings.kills:
                check_killed(ended, settings)
            return ended

        if gpus:
            certificate = certify_parity(run_command, gpus, steps, exact=exact)
        else:
            certificate = certify_resume(run_command, steps, evaluates=evaluates)
        folder.is_kept = certificate.finding is not None
    return certificate, folder.path if folder.is_kept else None


def check_killed(folder: Path, settings: RunSettings) -> None:
    """Refuse a run that ended before it could be killed."""
    if (folder / KILLED).exists():
        return
    why = "no training step of lockstep was seen"
    remedy = "certify a command that trains each time it is started"
    if (folder / TRACE).exists():
        why = f"it took fewer than {settings.save_step() + 1} steps"
        remedy = "pass a smaller --steps"
    raise ConfigError(f"the command ended before it could be killed: {why}", remedy)
