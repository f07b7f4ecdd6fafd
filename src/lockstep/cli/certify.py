"""`lockstep certify resume|parity -- COMMAND`: read the arguments, print the certificate.

Owns: the table and the verdict as text. Does not own: the certificate (`lockstep.certify`).
"""

import json
from collections.abc import Sequence
from pathlib import Path

from lockstep.certify.certificate import Certificate
from lockstep.certify.runs import certify_command
from lockstep.cli.words import read_counts
from lockstep.errors import ConfigError
from lockstep.harness.command import ending_on_signals
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

    def print_run(name: str, seconds: float) -> None:
        if not as_json:
            print(f"  {name:<14}{steps} steps {seconds:>7.1f} s", flush=True)

    sizes = read_sizes(gpus) if kind == "parity" else []
    if not as_json:
        print(f"certifying {kind}: {' '.join(words)}", flush=True)
    certificate, folder = certify_command(
        words,
        steps,
        limit_s=limit_s,
        gpus=sizes,
        exact=exact,
        evaluates=evaluates,
        report_run=print_run,
    )
    if as_json:
        kept = str(folder) if folder else None
        print(json.dumps({**certificate.to_json(), "command": list(words), "folder": kept}))
    else:
        print("\n".join(lines_of(certificate, folder)), flush=True)
    return 1 if certificate.finding else 0


def read_sizes(gpus: str) -> list[int]:
    """Return the numbers of ranks to compare.

    >>> read_sizes("4,1,2")
    [1, 2, 4]
    """
    sizes = sorted({*read_counts(gpus)})
    if len(sizes) < 2:
        raise ConfigError(
            f"--gpus {gpus} leaves nothing to compare", f"pass --gpus {sizes[0]},{2 * sizes[0]}"
        )
    return sizes


def lines_of(certificate: Certificate, folder: Path | None) -> list[str]:
    """Return the certificate as a table and its verdict."""
    return [*_table(certificate), "", *_remarks(certificate), *_verdict(certificate, folder)]


def _table(certificate: Certificate) -> list[str]:
    columns = certificate.columns
    if not columns:
        return []
    rows = list(dict.fromkeys(name for column in columns for name in column.cells))
    lines = ["", "  " + f"{'':<15}{'compared':>9}  " + "  ".join(f"{c.title:<15}" for c in columns)]
    for name in rows:
        num = sum(column.compared.get(name, 0) for column in columns)
        cells = "  ".join(f"{column.cells.get(name, '-'):<15}" for column in columns)
        lines.append(f"  {name:<15}{num:>9}  {cells}")
    return [line.rstrip() for line in lines]


def _remarks(certificate: Certificate) -> list[str]:
    lines = []
    if sizes := certificate.batch_sizes:
        each = ", ".join(f"{size} on {count_ranks(num)}" for num, size in sizes.items())
        why = "; samples of all ranks are combined, so fewer ranks have larger micro-batches"
        lines.append(f"batch_size: {each}{why if certificate.is_joint else ''}")
    return lines + [f"remark: {remark}" for remark in certificate.remarks]


def _verdict(certificate: Certificate, folder: Path | None) -> list[str]:
    finding = certificate.finding
    if finding is None:
        return [f"certified: {certificate.proof}"]
    return [
        f"differs first: {finding.cause}",
        f"  {finding.says}",
        f"  try: {finding.remedy}",
        f"  traces and output are in {folder}",
    ]
