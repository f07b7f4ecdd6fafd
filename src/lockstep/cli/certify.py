"""`lockstep certify resume|parity -- COMMAND`: run it several times, compare, say what came of it.

Owns: starting the command's processes, starting it again after the kill, the folder of all
that, and the table. Does not own: what a process does differently (`certify/part.py`), the
verdict (`certify/certificate.py`).
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lockstep.certify.certificate import Certificate, certify_parity, certify_resume
from lockstep.certify.part import Part
from lockstep.cli.run import read_counts
from lockstep.cli.stage import reach
from lockstep.errors import ConfigError, LaunchError
from lockstep.harness.attach import KILLED, TRACE
from lockstep.harness.command import ending_on_signals
from lockstep.harness.runs import CommandRuns
from lockstep.plan import count_ranks


@ending_on_signals()
def certify(
    kind: str,
    words: Sequence[str],
    *,
    gpus: str = "",
    steps: int,
    limit_s: float,
    exact: bool = False,
    evaluates: bool = False,
    as_json: bool = False,
) -> int:
    """Certify a command, print the certificate, and return the exit code."""
    if not words:
        raise ConfigError(
            "there is no command", f"add one: lockstep certify {kind} -- python train.py"
        )
    sizes = read_sizes(gpus) if kind == "parity" else []

    def tell(name: str, seconds: float) -> None:
        if not as_json:
            print(f"  {name:<14}{steps} steps {seconds:>7.1f} s", flush=True)

    folder = Path(tempfile.mkdtemp(prefix="lockstep_certify_"))
    runs = CommandRuns(words, folder, reach, limit_s=limit_s, tell=tell)
    if not as_json:
        print(f"certifying {kind}: {' '.join(words)}", flush=True)

    def play(name: str, part: Part, ranks: int) -> Path:
        ended = runs.run(name, ranks, asdict(part))
        if part.kills and not (ended / KILLED).exists():
            steps = "no step of lockstep's was seen in it"
            if (ended / TRACE).exists():
                steps = f"it took fewer than {part.save_at + 1} steps"
            raise ConfigError(
                f"the command ended before it could be killed: {steps}", "pass more --steps"
            )
        return ended

    is_kept = False
    try:
        if kind == "parity":
            certificate = certify_parity(play, sizes, steps, exact=exact)
        else:
            certificate = certify_resume(play, steps, evaluates=evaluates)
        is_kept = certificate.finding is not None
    except LaunchError:
        is_kept = True
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
    kept = str(folder) if is_kept else None
    if as_json:
        print(json.dumps({**certificate.to_json(), "command": list(words), "folder": kept}))
    else:
        print("\n".join(lines_of(certificate, kept)), flush=True)
    return 1 if certificate.finding else 0


def read_sizes(gpus: str) -> list[int]:
    """Return the numbers of ranks to compare.

    >>> read_sizes("4,1,2")
    [1, 2, 4]
    """
    sizes = read_counts(gpus)
    if len(sizes) < 2:
        raise ConfigError(
            f"--gpus {gpus} is nothing to compare", f"pass --gpus {sizes[0]},{2 * sizes[0]}"
        )
    return sizes


def lines_of(certificate: Certificate, folder: str | None) -> list[str]:
    """Lay a certificate out as a table."""
    columns = certificate.columns
    if not columns:
        return _end_of(certificate, folder)
    rows = list(dict.fromkeys(name for column in columns for name in column.cells))
    lines = ["", "  " + f"{'':<15}{'compared':>9}  " + "  ".join(f"{c.title:<15}" for c in columns)]
    for name in rows:
        num = sum(column.compared.get(name, 0) for column in columns)
        cells = "  ".join(f"{column.cells.get(name, '-'):<15}" for column in columns)
        lines.append(f"  {name:<15}{num:>9}  {cells}")
    return [*(line.rstrip() for line in lines), *_end_of(certificate, folder)]


def _end_of(certificate: Certificate, folder: str | None) -> list[str]:
    """Return the remarks and the verdict."""
    lines = [""]
    if sizes := certificate.batch_sizes:
        each = [f"{size} on {count_ranks(num)}" for num, size in sizes.items()]
        why = "; samples of all ranks meet, so that as many met on each number of ranks"
        lines.append(f"batch_size: {', '.join(each)}{why if certificate.is_joint else ''}")
    lines += [f"remark: {remark}" for remark in certificate.remarks]
    if certificate.finding is None:
        return [*lines, f"certified: {certificate.proof}"]
    finding = certificate.finding
    lines += [f"differs first: {finding.cause}", f"  {finding.says}", f"  try: {finding.remedy}"]
    return [*lines, f"  traces and output are in {folder}"]
