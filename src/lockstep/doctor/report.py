"""The result of a check as one line, and all results as a table or as JSON.

Owns: the four things a check can say, and how they are laid out. Does not own: any
check, or where the lines go.
"""

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from lockstep.errors import printable

Status = Literal["ok", "warn", "fail", "skip"]

WORDS = {"ok": "ok", "warn": "warning", "fail": "failed", "skip": "not applicable"}


@dataclass(frozen=True, slots=True)
class Result:
    """One check's verdict, with the numbers it rests on."""

    name: str
    """Empty until `checks.py` lists it."""
    status: Status
    evidence: str
    fix: str = ""


def ok(evidence: str) -> Result:
    """Return a passed check, with its evidence."""
    return Result("", "ok", evidence)


def warn(evidence: str, fix: str) -> Result:
    """Return a warning: the job will run, but not as well as it could."""
    return Result("", "warn", evidence, fix)


def fail(evidence: str, fix: str) -> Result:
    """Return a failed check, with what to do about it."""
    return Result("", "fail", evidence, fix)


def skip(why: str) -> Result:
    """Return a skipped check, with the reason."""
    return Result("", "skip", why)


def exit_code(results: Sequence[Result]) -> int:
    """Return 1 if any check failed, else 0; warnings do not count."""
    return int(any(result.status == "fail" for result in results))


def summary(results: Sequence[Result]) -> str:
    """Return the number of results of each status as text.

    >>> summary([ok(""), ok(""), fail("", ""), warn("", "")])
    '2 ok, 1 warning, 1 failed'
    """
    counts = Counter(result.status for result in results)
    order: tuple[Status, ...] = ("ok", "warn", "fail", "skip")
    plural = {**WORDS, "warn": "warnings" if counts["warn"] > 1 else "warning"}
    return ", ".join(f"{counts[s]} {plural[s]}" for s in order if counts[s])


def as_json(results: Sequence[Result]) -> str:
    """Return the results, their counts and the exit code as one JSON object."""
    counts = Counter(result.status for result in results)
    listed = [asdict(result) for result in results]
    code = exit_code(results)
    return json.dumps({"exit_code": code, "counts": counts, "checks": listed}, indent=2)


def as_lines(results: Sequence[Result], width: int | None = None) -> list[tuple[Status, str]]:
    """Return the lines of the table; each fix is on its own line below its evidence.

    Without a width, evidence and fix are one line each, however long.

    >>> results = [Result("port", "ok", "free"), Result("data", "fail", "no folder x", "pass y")]
    >>> for _, line in as_lines(results):
    ...     print(line)
    ok    port  free
    fail  data  no folder x
                try: pass y
    """
    longest = max((len(result.name) for result in results), default=0)
    indent = " " * (longest + 8)
    lines: list[tuple[Status, str]] = []
    for result in results:
        texts = [(f"{result.status:<6}{result.name:<{longest}}  ", printable(result.evidence))]
        if result.fix:
            texts.append((indent, f"try: {printable(result.fix)}"))
        for head, text in texts:
            wrapped = textwrap.wrap(text, max(30, width - len(indent))) if width else [text]
            first, *rest = wrapped or [""]
            lines += [(result.status, f"{head}{first}".rstrip())]
            lines += [(result.status, f"{indent}{line}") for line in rest]
    return lines


def bytes_text(num_bytes: float) -> str:
    """Return a number of bytes with a readable unit.

    >>> bytes_text(512), bytes_text(1536), bytes_text(3 * 2**30)
    ('512 B', '1.5 KB', '3.0 GB')
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KB", "MB", "GB"):
        num_bytes /= 1024
        if num_bytes < 1000:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} TB"


def seconds_text(seconds: float) -> str:
    """Return a time with a readable unit.

    >>> seconds_text(0.0123), seconds_text(2.5), seconds_text(7200)
    ('12 ms', '2.5 s', '120 min')
    """
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
