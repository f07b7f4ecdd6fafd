"""Console output of the first rank: a progress bar on a terminal, plain lines elsewhere.

Owns: the wording, the remaining time, and that a closed output never ends a run. Does not
own: the numbers, which all come in events.
"""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lockstep.observe.events import Event
from lockstep.run_files import append_text

if TYPE_CHECKING:
    from rich.progress import Progress

STEP_FIELDS: dict[str, Callable[[float], str]] = {
    "epoch": "epoch {:.2f}".format,
    "loss": "loss {:.4g}".format,
    "learning_rate": "lr {:.1e}".format,
    "grad_norm": "grad {:.3g}".format,
    "samples_per_second": lambda rate: f"{rate:.{0 if rate >= 10 else 2}f} samples/s",
    "data_wait_share": "data wait {:.0%}".format,
    "data_wait_rank": "on rank {}".format,
    "slow_rank": "rank {} is slow:".format,
    "slow_ratio": "{:.1f} x the others' time".format,
}
LINES = {
    "resume": "resumed at step {step} from {path}",
    "epoch": "epoch {epoch} done  loss {loss:.4g}  {message}",
    "compiled": "the first step took {local_seconds:.1f} s, most of it to compile",
    "trained_parameters": "from step {step}: {message}",
    "out_of_memory": "warning: {message}",
    "non_finite": "warning: {message}",
    "checkpoint": "checkpoint at step {step}  {path}",
    "picture": "picture at step {step}  {path}",
    "worker_lost": "warning: {message}",
    "sample_skipped": "skipped sample {sample}: {reason}",
    "warning": "warning: {message}",
    "evaluation_interrupted": "evaluation at step {step} interrupted: a resume begins with it",
    "stop": "stopping at step {step}: {reason}",
    "run_end": "done at step {step} after {duration}",
}
BAR_FIELDS = ("loss", "samples_per_second")
REDRAW_S = 0.1
ETA_REPORTS = 10
"""Number of reports over which the rate for the ETA is measured."""


class Console:
    """A listener that prints events.

    The ETA is the remaining steps at the rate of the last ten reports, including evaluations
    and saves, since more of them will come. It counts from the step at which the run started
    or resumed.

    Args:
        total_steps: The last step of the run.
        stream: Where to print (default: standard output).
        clock: Seconds, for the ETA.
        is_terminal: Whether to draw a bar (default: if the stream is a terminal).
        log_file: A file to append the lines to.
    """

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_terminal: bool | None = None,
        log_file: Path | str | None = None,
    ) -> None:
        self._total_steps = total_steps
        self._stream: TextIO | None = sys.stdout if stream is None else stream
        with suppress(AttributeError, ValueError):  # for paths that the terminal cannot encode
            self._stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        self._clock = clock
        self._reports: deque[tuple[float, int]] = deque([(clock(), 0)], maxlen=ETA_REPORTS + 1)
        if is_terminal is None:
            is_terminal = self._stream is not None and _can_draw(self._stream)
        self._wants_bar = is_terminal
        self._bar: Progress | None = None
        self._drawn = -math.inf
        self._log_file = Path(log_file) if log_file is not None else None

    def __call__(self, event: Event) -> None:
        """Print one event."""
        kind = event["event"]
        step = event["step"]
        if kind in ("run_start", "resume"):
            self._reports.clear()
            self._reports.append((self._clock(), step))
        if kind == "step":
            self._reports.append((self._clock(), step))
            if self._wants_bar:
                self._guarded(lambda: self._move_bar(event))
                self._keep(self._step_line(event))
                return
        if kind == "run_end":
            self.close()
        if kind not in (
            "run_start",
            "saving",
        ):  # the banner reports the first; the second is reported when done
            self.note(self._step_line(event) if kind == "step" else _line(event))

    def note(self, text: str) -> None:
        """Print lines, above the bar if there is one."""
        self._guarded(lambda: self._print(text))
        self._keep(text)

    def _keep(self, text: str) -> None:
        """Write a line to the log file; on an error, stop logging to it, but not the run."""
        if self._log_file is None:
            return
        try:
            append_text(self._log_file.parent, self._log_file.name, text + "\n")
        except OSError as error:
            path = self._log_file
            self._log_file = None
            self.note(f"warning: cannot write the log {path}: {error.strerror}")

    def close(self) -> None:
        """Stop drawing the bar and restore the terminal."""
        bar, self._bar = self._bar, None
        if bar is not None:
            self._guarded(bar.stop)

    def _time_left(self) -> list[str]:
        (began, first_step), (now, last_step) = self._reports[0], self._reports[-1]
        if last_step <= first_step:
            return []
        step_time_s = (now - began) / (last_step - first_step)
        return [f"ETA {_duration(step_time_s * max(0, self._total_steps - last_step))}"]

    def _step_line(self, event: Event) -> str:
        width = max(5, len(str(self._total_steps)))
        head = f"step {event['step']:>{width}}/{self._total_steps}"
        return "  ".join([head, *_worded(event, STEP_FIELDS), *self._time_left()])

    def _move_bar(self, event: Event) -> None:
        if self._stream is None:
            return
        if self._bar is None:
            self._bar = _build_bar(self._stream, self._total_steps)
        report = "  ".join([*_worded(event, BAR_FIELDS), *self._time_left()])
        self._bar.update(self._bar.task_ids[0], completed=event["step"], report=report)
        self._bar.start()
        if self._clock() - self._drawn >= REDRAW_S or event["step"] >= self._total_steps:
            self._drawn = self._clock()
            self._bar.refresh()

    def _print(self, text: str) -> None:
        if self._stream is None:
            return
        if self._bar is not None:
            # `out` prints the text unchanged: no markup, no wrapping.
            self._bar.console.out(text, highlight=False)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def _guarded(self, show: Callable[[], None]) -> None:
        try:
            show()
        except (BrokenPipeError, ValueError):  # the reader is gone, or the file is closed
            self._stop_printing()
        except OSError:  # a full disk: only this line is lost
            pass

    def _stop_printing(self) -> None:
        stream, self._stream = self._stream, None
        bar, self._bar = self._bar, None
        # Otherwise the next `print` of a recipe would raise and end the run.
        with suppress(OSError, ValueError, AttributeError):
            descriptor = stream.fileno()  # type: ignore[union-attr]  # None is suppressed too
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
        with suppress(OSError, ValueError):
            if bar is not None:
                bar.stop()


def _can_draw(stream: TextIO) -> bool:
    try:
        if not stream.isatty():
            return False
    except ValueError:  # closed
        return False
    from rich.console import Console as RichConsole

    return not RichConsole(file=stream).is_dumb_terminal


def _build_bar(stream: TextIO, total_steps: int) -> "Progress":
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    class Terminal(RichConsole):
        def on_broken_pipe(self) -> None:
            # Overridden because rich would exit the program.
            raise BrokenPipeError

    whole = Column(no_wrap=True)
    bar = Progress(
        TextColumn("step {task.completed}/{task.total}", markup=False, table_column=whole),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[report]}", markup=False, table_column=whole.copy()),
        console=Terminal(file=stream, force_terminal=True),
        expand=True,
        # Draw only on events; a refresh thread would take time from the steps.
        auto_refresh=False,
    )
    bar.add_task("training", total=total_steps, report="")
    return bar


def _line(event: Event) -> str:
    try:
        duration = _duration(event.get("seconds", 0))
        return LINES[event["event"]].format(**event, duration=duration)
    except (KeyError, ValueError, TypeError):  # an event of a custom loop
        own = {name: event[name] for name in event if name not in ("event", "step", "time")}
        words = [f"{name} {_short(value)}" for name, value in event.get("metrics", own).items()]
        return "  ".join([f"{event['event']} at step {event['step']}", *words])


def _worded(event: Event, names: Iterable[str]) -> list[str]:
    known = [name for name in names if isinstance(event.get(name), int | float)]
    return [STEP_FIELDS[name](event[name]) for name in known]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
