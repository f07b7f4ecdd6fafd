"""Stop signals: noticed, remembered once, insisted on twice, and given back afterwards."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.config import RunConfig
from lockstep.signals import DUPLICATE_S, EXIT_CODES, StopSignals
from lockstep.testing import TinyTask
from lockstep.trainer import fit

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGQUIT)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.001)


def what_is_set() -> tuple[object, ...]:
    """Return this process's handlers and its wake-up descriptor."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return (*(signal.getsignal(number) for number in ALL), wakeup)


def exit_code_of(action: Callable[[], None]) -> int:
    """Fork, do `action`, and return how the child ended."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            action()
        os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def own_handlers() -> Iterator[Callable[..., None]]:
    """Set handlers of our own, with a wake-up descriptor, as another library would."""

    def handler(number: int, frame: object) -> None:
        pass

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {number: signal.signal(number, handler) for number in ALL}
    wakeup = signal.set_wakeup_fd(writer)
    yield handler
    signal.set_wakeup_fd(wakeup)
    for number, previous in before.items():
        signal.signal(number, previous)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("number", ALL)
def test_a_signal_is_remembered_with_its_exit_code(number: signal.Signals) -> None:
    with StopSignals() as signals:
        assert (signals.requested, signals.exit_code) == (None, 0)
        os.kill(os.getpid(), number)
        wait_until(lambda: signals.requested is not None)
        assert signals.requested is number
        assert signals.exit_code == 128 + number == EXIT_CODES[number]


def test_the_first_signal_decides_the_exit_code() -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: signals.requested is not None)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        assert signals.exit_code == 138


def signal_in_turn(*numbers: signal.Signals, unsaved: str) -> None:
    """Get signals, each later than the echo of the one before; return if none of them ends us."""
    with StopSignals() as signals:
        signals.unsaved = lambda: unsaved
        for number in numbers:
            history = signals._history
            before = history.last_at = history.last_at - 1.5 * DUPLICATE_S
            os.kill(os.getpid(), number)
            deadline = time.monotonic() + 5
            while history.last_at == before and time.monotonic() < deadline:
                time.sleep(0.001)
        os._exit(7)


@pytest.mark.parametrize(
    ("unsaved", "code"), [("the steps since checkpoint step 3 will be repeated", 5), ("", 130)]
)
def test_a_second_signal_after_the_echo_leaves_at_once_and_says_what_is_lost(
    unsaved: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first signal decides the exit code, unless steps are lost."""
    assert (
        exit_code_of(lambda: signal_in_turn(signal.SIGINT, signal.SIGTERM, unsaved=unsaved)) == code
    )
    said = f"lockstep: stopped by SIGTERM without saving: {unsaved}\n" if unsaved else ""
    assert capfd.readouterr().err == said


def test_the_signal_after_slurms_warning_leaves_its_grace_to_the_save(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """SLURM sends SIGUSR1 before the time limit, SIGTERM at it, and SIGKILL after KillWait."""
    warning, limit = signal.SIGUSR1, signal.SIGTERM
    assert exit_code_of(lambda: signal_in_turn(warning, limit, unsaved="all")) == 7
    said = "lockstep: SIGTERM came before the run could save; if killed now, all\n"
    assert capfd.readouterr().err == said
    assert exit_code_of(lambda: signal_in_turn(warning, limit, unsaved="")) == 7
    assert capfd.readouterr().err == ""
    assert exit_code_of(lambda: signal_in_turn(warning, limit, limit, unsaved="all")) == 5
    assert exit_code_of(lambda: signal_in_turn(warning, warning, unsaved="all")) == 5


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ((signal.SIGTERM, signal.SIGTERM), 7),  # --signal=TERM@20, and the time limit
        ((signal.SIGTERM, signal.SIGTERM, signal.SIGTERM), 7),
        ((signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM), 7),
        ((signal.SIGTERM, signal.SIGUSR1), 7),
        ((signal.SIGINT, signal.SIGTERM), 7),
        ((signal.SIGTERM, signal.SIGINT), 7),
        ((signal.SIGTERM, signal.SIGINT, signal.SIGINT), 5),
        ((signal.SIGINT, signal.SIGTERM, signal.SIGINT), 5),
        ((signal.SIGINT, signal.SIGINT), 5),
    ],
)
def test_inside_a_slurm_job_its_own_signals_never_insist(
    sent: tuple[signal.Signals, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert exit_code_of(lambda: signal_in_turn(*sent, unsaved="all")) == code


def test_the_planted_fault_an_echo_does_not_leave() -> None:
    def echo() -> None:
        with StopSignals():
            for _ in range(5):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.02)
            os._exit(7)

    assert exit_code_of(echo) == 7


def test_other_signals_are_none_of_our_business(own_handlers: Callable[..., None]) -> None:
    before = signal.signal(signal.SIGUSR2, own_handlers)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.05)
        assert signals.requested is None
    signal.signal(signal.SIGUSR2, before)


def test_handlers_and_wakeup_descriptor_are_given_back(own_handlers: object) -> None:
    before, descriptors = what_is_set(), len(os.listdir("/proc/self/fd"))
    with StopSignals():
        assert what_is_set() != before
    assert what_is_set() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert "stop-signals" not in {thread.name for thread in threading.enumerate()}


def test_they_are_given_back_after_an_error_too(own_handlers: object) -> None:
    before = what_is_set()
    with pytest.raises(ZeroDivisionError), StopSignals():
        raise ZeroDivisionError
    assert what_is_set() == before


def test_listening_outside_the_main_thread_changes_nothing() -> None:
    before, found = what_is_set(), []

    def listen() -> None:
        with StopSignals() as signals:
            found.append((what_is_set_in_thread(), signals.exit_code))

    def what_is_set_in_thread() -> tuple[object, ...]:
        return tuple(signal.getsignal(number) for number in ALL)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [(before[:-1], 0)]


def test_a_forked_child_gets_its_signals_itself() -> None:
    with StopSignals() as signals:

        def wait() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

        assert exit_code_of(wait) == -signal.SIGTERM
        time.sleep(0.05)
        assert signals.requested is None


# --- With a whole run --------------------------------------------------------


def tiny_run(folder: Path) -> RunConfig:
    return RunConfig.parse(
        {"output_dir": str(folder), "max_steps": 3, "batch": {"batch_size": 8}, "device": "cpu"}
    )


def test_fit_gives_signals_back(tmp_path: Path, own_handlers: object) -> None:
    before = what_is_set()
    assert fit(TinyTask(), tiny_run(tmp_path)).exit_code == 0
    assert what_is_set() == before


def test_fit_works_in_a_thread(tmp_path: Path) -> None:
    before, results = what_is_set(), []
    thread = threading.Thread(target=lambda: results.append(fit(TinyTask(), tiny_run(tmp_path))))
    thread.start()
    thread.join()
    assert [(result.step, result.exit_code) for result in results] == [(3, 0)]
    assert what_is_set() == before


def test_a_signal_before_the_first_step_stops_there_with_nothing_to_save(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(TinyTask):
        def train_data(self):  # type: ignore[no-untyped-def]
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            return super().train_data()

    result = fit(Interrupted(), tiny_run(tmp_path))
    assert (result.step, result.exit_code) == (0, 143)
    assert not [*(tmp_path / "checkpoints").glob("step_*")]
    written = capfd.readouterr()
    assert "stopping at step 0: SIGTERM" in written.out
    assert written.err == ""
    changed = tiny_run(tmp_path).with_overrides(["batch.batch_size=4"])
    again = fit(TinyTask(), changed)  # and nothing that binds the next start
    assert (again.step, again.exit_code) == (3, 0)
