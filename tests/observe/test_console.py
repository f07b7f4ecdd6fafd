"""What the first rank prints, on a terminal and elsewhere."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.observe.console import Console
from lockstep.observe.events import Event


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def event(kind: str, step: int, **fields: Any) -> Event:
    return {"event": kind, "step": step, "time": 0.0, **fields}


FULL_STEP = {
    "loss": 0.43119,
    "learning_rate": 1e-4,
    "grad_norm": 0.91,
    "epoch": 1.2,
    "samples_per_second": 1234.4,
    "data_wait_share": 0.021,
}


def plain_lines(events: list[Event], total_steps: int = 1000) -> list[str]:
    stream = io.StringIO()
    console = Console(total_steps, stream)
    for each in events:
        console(each)
    return stream.getvalue().splitlines()


def test_a_step_is_one_plain_line() -> None:
    clock, stream = Clock(), io.StringIO()
    console = Console(1000, stream, clock)
    clock.now = 26.2
    console(event("step", 120, **FULL_STEP))
    assert stream.getvalue() == (
        "step   120/1000  epoch 1.20  loss 0.4312  lr 1.0e-04  grad 0.91"
        "  1234 samples/s  data wait 2%  ETA 0:03:12\n"
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_log_file_keeps_every_line_and_goes_on_after_a_resume(
    tmp_path: Path, is_terminal: bool
) -> None:
    for step in (1, 2):
        console = Console(9, io.StringIO(), is_terminal=is_terminal, log_file=tmp_path / "a" / "b")
        console.note("a banner")
        console(event("step", step, loss=0.5))
        console.close()
    lines = (tmp_path / "a" / "b").read_text().splitlines()
    assert lines[0] == lines[2] == "a banner"
    assert [line[:22] for line in lines[1::2]] == [
        "step     1/9  loss 0.5",
        "step     2/9  loss 0.5",
    ]


def test_a_log_file_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    stream = io.StringIO()
    (tmp_path / "a").write_text("a file, not a folder")
    console = Console(9, stream, log_file=tmp_path / "a" / "b")
    console.note("one")
    console.note("two")
    told = stream.getvalue().splitlines()
    assert [told[0], told[2:]] == ["one", ["two"]]
    assert told[1].startswith(f"warning: cannot write the log {tmp_path / 'a' / 'b'}")


def test_every_kind_has_its_line() -> None:
    assert plain_lines(
        [
            event("run_start", 0, world_size=2, device="cuda", recipe="jit", plan={"batch": 4}),
            event("resume", 40, path="checkpoints/40"),
            event("epoch", 50, epoch=1, loss=0.5, message="8 of 8 samples, each once"),
            event("evaluation", 50, metrics={"loss": 0.41234, "ema_loss": 0.4}),
            event("checkpoint", 50, path="checkpoints/50"),
            event("picture", 50, path="samples/[50].png"),
            event("sample_skipped", 51, sample=17, reason="truncated file"),
            event("warning", 51, message="disk almost full"),
            event("evaluation_interrupted", 60),
            event("stop", 60, reason="SIGTERM"),
            event("run_end", 60, seconds=75.2),
            event("of_my_own", 61, temperature=21.5),
        ]
    ) == [
        "resumed at step 40 from checkpoints/40",
        "epoch 1 done  loss 0.5  8 of 8 samples, each once",
        "evaluation at step 50  loss 0.4123  ema_loss 0.4",
        "checkpoint at step 50  checkpoints/50",
        "picture at step 50  samples/[50].png",
        "skipped sample 17: truncated file",
        "warning: disk almost full",
        "evaluation at step 60 interrupted: a resume begins with it",
        "stopping at step 60: SIGTERM",
        "done at step 60 after 0:01:15",
        "of_my_own at step 61  temperature 21.5",
    ]


def test_an_event_with_missing_fields_still_prints() -> None:
    lines = plain_lines([event("step", 3, loss=float("nan")), event("checkpoint", 3, path="x")])
    assert lines[0].startswith("step     3/1000  loss nan")
    assert lines[1] == "checkpoint at step 3  x"


def eta(line: str) -> str:
    found = re.search(r"ETA ([\d:]+)", line)
    return found.group(1) if found else ""


def test_the_time_left_follows_the_recent_rate() -> None:
    clock, stream = Clock(), io.StringIO()
    console = Console(1000, stream, clock)
    for step in range(10, 110, 10):  # one second a step
        clock.now += 10
        console(event("step", step))
    assert eta(stream.getvalue().splitlines()[-1]) == "0:15:00"
    for step in range(110, 220, 10):  # two seconds a step, for long enough
        clock.now += 20
        console(event("step", step))
    assert eta(stream.getvalue().splitlines()[-1]) == "0:26:20"


def test_the_time_left_counts_from_the_resumed_step() -> None:
    clock, stream = Clock(), io.StringIO()
    console = Console(1000, stream, clock)
    clock.now += 500  # loading the checkpoint
    console(event("resume", 900, path="x"))
    clock.now += 20
    console(event("step", 910))
    assert eta(stream.getvalue()) == "0:03:00"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    clock, stream = Clock(), Terminal()
    console = Console(200, stream, clock)
    console.note("banner [with brackets]")
    for step in range(1, 201):
        clock.now += 1
        console(event("step", step, **FULL_STEP))
        if step == 100:
            console(event("evaluation", step, metrics={"loss": 0.25}))
            console(event("picture", step, path="[red]100[/red].png"))
    console(event("run_end", 200, seconds=200.0))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "banner [with brackets]\n" in text
    assert "evaluation at step 100  loss 0.25\n" in text
    assert "picture at step 100  [red]100[/red].png\n" in text
    assert re.search(r"step 50/200 .*━.* loss 0\.4312  1234 samples/s  ETA 0:02:30", text)
    assert "step 200/200" in text
    assert text.rstrip().endswith("done at step 200 after 0:03:20")
    assert "\x1b[?25h" in stream.getvalue(), "the cursor is shown again"
    assert sys.stdout is not None
    assert "FileProxy" not in type(sys.stdout).__name__, "standard output is given back"


def test_the_bar_is_not_redrawn_for_every_one_of_many_fast_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    clock, stream = Clock(), Terminal()
    console = Console(10_000, stream, clock)
    for step in range(1, 1001):
        clock.now += 0.001
        console(event("step", step, **FULL_STEP))
    console.close()
    assert stream.getvalue().count("samples/s") < 20


def test_no_color_means_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    clock, stream = Clock(), Terminal()
    console = Console(10, stream, clock)
    console(event("step", 5, **FULL_STEP))
    console.close()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", stream.getvalue())


def test_a_letter_that_a_stream_does_not_know_silences_nothing(tmp_path: Path) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="latin-1", write_through=True)
    console = Console(10, stream, log_file=tmp_path / "log")
    for text in ("before", "输出", "half a letter: \udcff", "after"):
        console.note(text)
    assert written.getvalue() == b"before\n\\u8f93\\u51fa\nhalf a letter: \\udcff\nafter\n"
    kept = (tmp_path / "log").read_text(encoding="utf-8")
    assert kept == "before\n输出\nhalf a letter: \\udcff\nafter\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_closed_stream_does_not_end_the_run(is_terminal: bool) -> None:
    stream = io.StringIO()
    console = Console(10, stream, is_terminal=is_terminal)
    console(event("step", 1, **FULL_STEP))
    stream.close()
    console(event("step", 2, **FULL_STEP))
    console(event("evaluation", 2, metrics={}))
    console.close()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_reader_that_leaves_ends_neither_the_run_nor_its_exit_code(is_terminal: bool) -> None:
    program = f"""
import time
from lockstep.observe.console import Console
console = Console(2000, is_terminal={is_terminal})
for step in range(2000):
    console({{"event": "step", "step": step, "loss": 1.0}})
    console({{"event": "picture", "step": step, "path": "x" * 200}})
console.close()
print("from the recipe", flush=True)
import sys
print("reached the end", file=sys.stderr)
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm"},
    )
    assert trainer.stdout is not None
    assert trainer.stderr is not None
    trainer.stdout.readline()
    trainer.stdout.close()
    errors = trainer.stderr.read().decode()
    trainer.stderr.close()
    assert trainer.wait(30) == 0, errors
    assert errors == "reached the end\n"


def test_a_full_disk_behind_a_redirection_loses_only_its_lines() -> None:
    class Full(io.StringIO):
        is_full = True

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    stream = Full()
    console = Console(10, stream)
    console.note("lost")
    stream.is_full = False
    console.note("kept")
    assert stream.getvalue() == "kept\n"
