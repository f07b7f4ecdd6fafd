"""A job runs beside the loop, and its failure reaches the loop."""

import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from lockstep.checkpoint import writer as writer_module
from lockstep.checkpoint.writer import BackgroundWriter


def test_submit_returns_while_the_job_runs() -> None:
    writer, gate, done = BackgroundWriter(), threading.Event(), threading.Event()

    def job() -> None:
        gate.wait(10)
        done.set()

    writer.submit(job)
    assert writer.is_busy
    assert not writer.has_failed
    assert not done.is_set()
    gate.set()
    writer.close()
    assert done.is_set()


def test_jobs_run_one_at_a_time_and_in_order() -> None:
    writer, running, order = BackgroundWriter(), [], []

    def job(number: int) -> None:
        running.append(number)
        time.sleep(0.005)
        assert running == [number]
        running.remove(number)
        order.append(number)

    for number in range(10):
        writer.submit(partial(job, number))
    writer.close()
    assert order == list(range(10))


@pytest.mark.parametrize("error", [OSError("disk full"), SystemExit(3)], ids=repr)
def test_a_failure_shows_when_the_job_has_ended_and_is_raised_once(error: BaseException) -> None:
    writer = BackgroundWriter()

    def fail() -> None:
        raise error

    writer.submit(fail)
    while writer.is_busy:
        time.sleep(0.001)
    assert writer.has_failed
    with pytest.raises(type(error)) as caught:
        writer.wait()
    assert caught.value is error
    assert not writer.has_failed
    writer.wait()
    writer.close()


@pytest.mark.parametrize("method", ["wait", "close"])
def test_a_failure_is_raised_by_whoever_asks_first(method: str) -> None:
    writer = BackgroundWriter()
    writer.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        getattr(writer, method)()
    writer.close()


def test_the_next_job_is_not_started_after_a_failure() -> None:
    writer, ran = BackgroundWriter(), []
    writer.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.submit(lambda: ran.append(1))
    assert not ran
    writer.submit(lambda: ran.append(2))
    writer.close()
    assert ran == [2]


def test_a_closed_writer_takes_no_job() -> None:
    writer = BackgroundWriter()
    writer.close()
    writer.close()
    with pytest.raises(RuntimeError, match="closed"):
        writer.submit(lambda: None)


EXITING = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("writer", sys.argv[1])
module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
writer = module.BackgroundWriter()
if sys.argv[3] == "no-hook":
    module.atexit.unregister(writer.close)
def job():
    time.sleep(0.3)
    if sys.argv[3] == "fail": raise OSError("disk full")
    open(sys.argv[2], "w").close()
writer.submit(job)
"""


def leave(tmp_path: Path, how: str) -> tuple[bool, str]:
    target = tmp_path / "saved"
    command = [sys.executable, "-c", EXITING, str(writer_module.__file__), str(target), how]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return target.exists(), result.stderr


def test_leaving_the_interpreter_waits_for_the_job(tmp_path: Path) -> None:
    assert leave(tmp_path, "normally") == (True, "")


def test_without_the_exit_hook_the_job_would_be_lost(tmp_path: Path) -> None:
    assert leave(tmp_path, "no-hook") == (False, "")


def test_a_failure_nobody_asked_for_is_printed_at_exit(tmp_path: Path) -> None:
    assert "disk full" in leave(tmp_path, "fail")[1]
