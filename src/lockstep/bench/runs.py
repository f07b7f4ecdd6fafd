"""Run a command to measure it, as typed or on several processes.

Owns: the folder of a measurement and its runs. Does not own: measuring in a rank (`callback.py`),
or reading the figures (`measured.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from lockstep.bench.measured import Measured
from lockstep.bench.settings import CALLBACK, BenchSettings
from lockstep.harness.command import ending_on_signals
from lockstep.harness.runs import CommandRuns, runs_folder


class BenchRuns(CommandRuns):
    """Runs a command as typed or as several ranks of one group, and measures it."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        *,
        limit_s: float = 300.0,
        threads: int = 0,
        report: Callable[[str, float], None] = lambda name, seconds: None,
    ) -> None:
        super().__init__(words, folder, CALLBACK, limit_s=limit_s, tell=report, threads=threads)

    def measure(self, ranks: int, steps: int, *, profiles: bool = True) -> Measured:
        """Run the command on `ranks` ranks, or as typed if it is 0."""
        settings = BenchSettings(steps, profiles)
        folder = self.run(f"{ranks} x" if ranks else "as typed", ranks, asdict(settings))
        return Measured.read(folder, ranks)


@contextmanager
def bench_runs(
    words: Sequence[str], limit_s: float, threads: int, report: Callable[[str, float], None]
) -> Iterator[BenchRuns]:
    """Yield the runs of a command; their folder is kept only if one of them fails."""
    with runs_folder("bench") as folder, ending_on_signals():
        yield BenchRuns(words, folder.path, limit_s=limit_s, threads=threads, report=report)
