"""Run a command to be measured, as it was typed or on several processes.

Owns: the folder of a measurement and its runs. Does not own: what a rank measures (`callback.py`),
or how its figures are read (`measured.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from lockstep.bench.measured import Measured
from lockstep.bench.settings import CALLBACK, BenchSettings
from lockstep.harness.attach import attached
from lockstep.harness.command import ending_on_signals
from lockstep.harness.runs import CommandRuns, runs_folder


class BenchRuns(CommandRuns):
    """Runs a command as it was typed, or as so many ranks of one group, and measures it."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        *,
        limit_s: float = 300.0,
        threads: int = 0,
        report: Callable[[str, float], None] = lambda name, seconds: None,
    ) -> None:
        attach = partial(attached, callback=CALLBACK)
        super().__init__(words, folder, attach, limit_s=limit_s, tell=report, threads=threads)

    def measure(self, ranks: int, steps: int, *, profiles: bool = True) -> Measured:
        """Run the command on so many ranks; 0: as it was typed."""
        settings = BenchSettings(steps, profiles)
        folder = self.run(f"{ranks} x" if ranks else "as typed", ranks, asdict(settings))
        return Measured.read(folder, ranks)


@contextmanager
def bench_runs(
    words: Sequence[str], limit_s: float, threads: int, report: Callable[[str, float], None]
) -> Iterator[BenchRuns]:
    """Yield the runs of a command in a folder that is kept only if one of them fails."""
    with runs_folder("bench") as folder, ending_on_signals():
        yield BenchRuns(words, folder.path, limit_s=limit_s, threads=threads, report=report)
