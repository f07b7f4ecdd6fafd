"""`lockstep rehearse -- COMMAND`: a few steps of the command, killed and resumed.

Owns: the output of a rehearsal, and its folder. Does not own: the rehearsal (`lockstep.rehearse`).
"""

import json
from collections.abc import Sequence

from lockstep.errors import ConfigError, closest
from lockstep.harness.command import ending_on_signals
from lockstep.harness.runs import runs_folder
from lockstep.rehearse.rehearsal import REHEARSED, PhaseResult, Rehearsal, Report


@ending_on_signals()
def rehearse(words: Sequence[str], limit_s: float, without: Sequence[str], as_json: bool) -> int:
    """Rehearse a command, print its phases, and return the exit code."""
    if not words:
        raise ConfigError("there is no command", "add one: lockstep rehearse -- python train.py")
    for name in without:
        if name not in REHEARSED:
            known = closest(name, REHEARSED) or f"one of {', '.join(REHEARSED)}"
            raise ConfigError(f"there is no phase {name!r}", f"pass {known}")

    def print_phase(phase: PhaseResult) -> None:
        if not as_json:
            took = "" if phase.seconds is None else f"{phase.seconds:.1f} s"
            print(f"  {phase.phase:<9}{phase.verdict:<7}{took:>7}  {phase.evidence}", flush=True)

    if not as_json:
        print(f"rehearsing: {' '.join(words)}", flush=True)
    with runs_folder("rehearsal") as folder:
        report = Rehearsal(words, folder.path, limit_s, without, print_phase).run()
        folder.is_kept = report.verdict != "passed"
    if folder.is_kept:
        report.output = str(folder.path / "output.txt")
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        print(_summary(report), flush=True)
    return 1 if folder.is_kept else 0


def _summary(report: Report) -> str:
    unseen = [phase for phase in report.phases if phase.verdict == "not seen"]
    lines = [f"  {phase.phase:<9}not seen         {phase.evidence}".rstrip() for phase in unseen]
    total = sum(phase.seconds or 0 for phase in report.phases)
    if report.verdict == "passed":
        lines.append(f"passed: every phase was seen, in {total:.0f} s")
        if report.without:
            lines[-1] = f"passed, without {', '.join(report.without)}, in {total:.0f} s"
    elif report.failed:
        lines.append(f"failed in {report.failed}; the command's output is in {report.output}")
    else:
        lines.append(
            f"incomplete: {', '.join(report.missing)} not seen; "
            f"the command's output is in {report.output}"
        )
        lines.append("  try: pass --without PHASE for each phase that this command does not have")
    return "\n".join(lines)
