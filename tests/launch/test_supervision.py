"""The launcher and ranks that leave early, do not stop, or are killed again and again."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import HERE, LAUNCH, Start, Started, wait_until

from lockstep.checkpoint import CheckpointStore
from lockstep.dist.position import Position
from lockstep.launch import failure, ranks, stopping
from lockstep.launch.memory import ControlGroup, MemoryWatch, free_host_bytes
from lockstep.launch.stopping import save_time_s

TRAIN = HERE / "train_stuck.py"
HOST = socket.gethostname()


def begin(start: Start, folder: Path, moment: str, act: str, *options: str) -> Started:
    """Start two ranks, and return when one of them is about to act."""
    launched = start(*LAUNCH, "2", *options, TRAIN, folder, moment, act)
    is_there = (folder / "acts").exists
    wait_until(lambda: is_there() or launched.process.poll() is not None, moment)
    assert is_there(), launched.text
    return launched


# --- A rank whose script ends early ----------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers, which are forked from here, take a rank for abandoned after a second."""
    monkeypatch.setattr(ranks, "LOOK_S", 0.1)
    monkeypatch.setattr(ranks, "ABANDONED_S", 1.0)


EXITED = "LeftEarlyError: the script called exit() inside a run that had not finished; "
AFTER_FIT = "call exit() after fit has returned"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("moment", "act", "where"),
    [
        ("fifth_step", "exit", ", after step 4: "),
        ("fifth_step", "leave", " exited with code 0 after step 4, "),
        ("data", "exit", ": "),
        ("enter", "exit", " exited with code 0 before it joined the others, "),
    ],
)
def test_a_rank_that_exits_with_0_while_others_need_it_ends_the_run(
    moment: str, act: str, where: str, tmp_path: Path, start: Start
) -> None:
    launched = begin(start, tmp_path, moment, act, "--restarts=3")
    assert launched.finish(40) == 6, launched.text
    said = f"lockstep: rank 1 on {HOST}{where}"
    is_silent = moment == "enter" or act == "leave"
    said += "but the others still needed it: " if is_silent else EXITED
    assert launched.text.count(said) == 1, launched.text
    remedy = "let all ranks end the script at the same point" if is_silent else AFTER_FIT
    assert f"\n  try: {remedy}" in launched.text
    assert "restarting" not in launched.text, "the script would end early once more"
    assert "Traceback" not in launched.text.split(said)[1], "the cause is said last"
    assert launched.orphans() == []


@pytest.mark.parametrize(
    ("moment", "act", "said"),
    [
        ("fifth_step", "all_exit", ", after step 4: " + EXITED),
        ("data", "all_exit", f": {EXITED}the run had not reached its first step"),
        (
            "fifth_step",
            "all_vanish",
            " exited with code 0 after step 4, inside a run that had not finished; so did 1 more",
        ),
    ],
)
def test_ranks_that_all_exit_with_0_inside_a_run_have_not_finished(
    moment: str, act: str, said: str, tmp_path: Path, start: Start
) -> None:
    launched = begin(start, tmp_path, moment, act, "--restarts=3")
    assert launched.finish(40) == 6, launched.text
    assert len(re.findall(f"lockstep: rank [01] on {HOST}{re.escape(said)}", launched.text)) == 1
    assert launched.text.count("  try: ") == 1, launched.text
    assert "restarting" not in launched.text, "the script would end early once more"
    assert "Traceback" not in launched.text


def test_a_keyboard_interrupt_in_a_step_is_not_taken_for_a_save(
    tmp_path: Path, start: Start
) -> None:
    """Steps 2 and 4 are saved, and step 5 is not."""
    launched = begin(start, tmp_path, "sixth_step", "all_interrupt")
    assert launched.finish(40) == 5, launched.text
    said = r"lockstep: rank [01] on .*, after step 5: NotSavedError: stopped by KeyboardInterrupt"
    assert len(re.findall(said, launched.text)) == 1, launched.text
    assert "Traceback" not in launched.text


UPLOAD = """
import os, sys, time
from pathlib import Path
import psutil
from lockstep import World

world = World.enter(device="cpu")
pid = Path(sys.argv[1], "pid" + os.environ["TORCHELASTIC_RESTART_COUNT"])
if world.rank == 1:
    pid.with_suffix(".new").write_text(str(os.getpid()))
    pid.with_suffix(".new").rename(pid)
    sys.exit()
while not pid.exists():
    time.sleep(0.01)
other = int(pid.read_text())
while psutil.pid_exists(other) and psutil.Process(other).status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
time.sleep(0.5)  # until the process that forks ranks has reported the end
raise RuntimeError("upload: Read timed out")
"""


def test_an_error_of_a_rank_on_its_own_is_not_taken_for_an_early_exit_of_another(
    tmp_path: Path, start: Start
) -> None:
    (tmp_path / "upload.py").write_text(UPLOAD)
    launched = start(*LAUNCH, "2", "--restarts=1", tmp_path / "upload.py", tmp_path)
    assert launched.finish(60) == 1, launched.text
    assert launched.text.count("Traceback (most recent call last)") == 2, launched.text
    said = f"lockstep: rank 0 on {HOST}: RuntimeError: upload: Read timed out\n"
    assert launched.text.count(said) == 2, launched.text
    assert "restarting all ranks (restarts left: 0)" in launched.text
    assert "still needed it" not in launched.text


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("moment", ["finished", "exit"])
def test_a_rank_may_work_on_after_the_others_are_done(
    moment: str, tmp_path: Path, start: Start
) -> None:
    launched = begin(start, tmp_path, moment, "work")
    assert launched.finish(40) == 0, launched.text


def test_a_rank_needs_those_that_have_not_finished_the_run_it_is_in() -> None:
    here, there = Position(), Position()
    assert not here.needs(there)
    here.begin_join()
    assert here.needs(there)
    there.begin_join()
    assert not here.needs(there), "it is on its way"
    here.end_join()
    there.end_join()
    for run in (here, there):
        run.begin_run()
    assert here.needs(there)
    there.finish_run()
    assert not here.needs(there), "it has done its part"
    here.finish_run()
    here.begin_run()
    assert here.needs(there), "a second run"
    here.leave_run()
    assert here.needs(there), "a run that failed is not finished"


def test_a_position_is_read_from_outside_and_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "position.bin"
    assert Position.read(path).step is None
    code = (
        "import os, sys; from pathlib import Path; from lockstep.dist.position import Position; "
        "p = Position(); p.share(Path(sys.argv[1])); p.begin_run(); p.reach(40); "
        "os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, path], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert Position.read(path).step == 40
    assert Position.read(path).is_in_run


# --- A second signal -------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["stop", "hold"])
@pytest.mark.parametrize(
    ("moment", "number"),
    [("import", signal.SIGINT), ("fifth_step", signal.SIGTERM), ("save", signal.SIGINT)],
)
def test_a_second_signal_ends_the_launcher_and_all_below_it_whatever_they_do(
    moment: str, number: signal.Signals, act: str, tmp_path: Path, start: Start
) -> None:
    launched = begin(start, tmp_path, moment, act)
    assert len(launched.look_around()) >= 5  # two ranks, what forks them, and what one has started
    os.killpg(launched.pid, number)
    wait_until(lambda: "lockstep: stopping: ranks may save for up to 90 s; " in launched.text, "it")
    time.sleep(1.2)
    assert launched.process.poll() is None, launched.text
    os.killpg(launched.pid, number)
    assert launched.finish(60) == 5, launched.text  # well before the 90 s that ranks may save
    assert launched.orphans() == []
    assert launched.text.count("lockstep: not saved: ranks were killed") == 1, launched.text
    assert "the steps since the last checkpoint will be repeated\n" in launched.text
    assert "Traceback" not in launched.text
    again = "press Ctrl-C again" if number == signal.SIGINT else "send SIGTERM again"
    assert f"{again}, 1 s or more from now, to end them without saving\n" in launched.text


@pytest.mark.parametrize(
    ("act", "place"),
    [("hold", r'  File ".*train_stuck\.py", line \d+ in act_at'), ("stop", "  \\(no")],
)
def test_ranks_that_do_not_stop_are_named_with_their_step_and_where_they_are(
    act: str, place: str, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "SAVE_S", 6.0)
    monkeypatch.setattr(ranks, "SLOW_S", 1.5)
    launched = begin(start, tmp_path, "fifth_step", act)
    launched.look_around()
    os.kill(launched.pid, signal.SIGTERM)
    assert launched.finish(60) == 5, launched.text
    said = r"lockstep: rank 1 has not stopped yet, after step 4; it is at\n" + place
    assert len(re.findall(said, launched.text)) == 1, launched.text
    assert launched.text.count("rank 0 has not stopped yet, after step 4; it is at\n  File") == 1
    stopping_at = launched.text.index("lockstep: stopping: ranks may save")
    assert stopping_at < launched.text.index("has not stopped yet")
    assert launched.orphans() == []


def test_an_echo_of_the_first_signal_does_not_end_ranks(tmp_path: Path, start: Start) -> None:
    launched = begin(start, tmp_path, "fifth_step", "stop")
    for _ in range(3):
        os.kill(launched.pid, signal.SIGTERM)
        time.sleep(0.1)
    stopped = next(p for p in launched.look_around() if p.status() == psutil.STATUS_STOPPED)
    time.sleep(1.0)
    assert launched.process.poll() is None
    stopped.send_signal(signal.SIGCONT)
    assert launched.finish(60) == 143, launched.text
    assert "not saved" not in launched.text
    assert launched.orphans() == []


def test_ranks_that_do_not_stop_in_time_are_killed_and_it_is_said(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "SAVE_S", 1.0)
    launched = begin(start, tmp_path, "fifth_step", "stop")
    launched.look_around()
    os.kill(launched.pid, signal.SIGTERM)
    assert launched.finish(60) == 5, launched.text
    assert "ranks may save for up to 1 s" in launched.text
    assert "lockstep: not saved: ranks were killed at step 4; the steps since" in launched.text
    assert launched.orphans() == []


def test_under_slurm_ranks_are_ended_before_slurm_would_kill_the_launcher() -> None:
    unknown = {"SLURM_JOB_ID": "7"}

    def job(left_s: int) -> dict[str, str]:
        return {**unknown, "SLURM_JOB_END_TIME": str(int(time.time()) + left_s)}

    term = signal.SIGTERM
    warning = signal.SIGUSR1
    assert save_time_s(term, {}, lambda: 30.0) == 90
    for at_the_limit in (job(-1), job(0), job(20), unknown, job(10**12)):
        assert save_time_s(term, at_the_limit, lambda: 30.0) == 25
        assert save_time_s(term, at_the_limit, lambda: 60.0) == 55
    assert save_time_s(term, unknown, lambda: 3.0) == 5
    assert 80 < save_time_s(term, job(120), lambda: 30.0) <= 115, "--signal=TERM@120"
    assert 560 < save_time_s(term, job(600), lambda: 30.0) <= 595
    assert 20 < save_time_s(warning, job(60), lambda: 30.0) <= 55
    assert 560 < save_time_s(warning, job(600), lambda: 30.0) <= 595
    assert save_time_s(warning, job(-1), lambda: 30.0) == 5
    assert save_time_s(warning, unknown, lambda: 30.0) == 90
    assert save_time_s(signal.SIGINT, job(600), lambda: 30.0) == 90


def test_under_slurm_the_launcher_says_how_long_a_warning_leaves(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 7200))
    launched = begin(start, tmp_path, "fifth_step", "stop")
    stopped = next(p for p in launched.look_around() if p.status() == psutil.STATUS_STOPPED)
    os.kill(launched.pid, signal.SIGTERM)
    wait_until(lambda: "lockstep: stopping: ranks may save" in launched.text, "the announcement")
    stopped.send_signal(signal.SIGCONT)
    assert launched.finish(60) == 143, launched.text
    found = re.search(
        r"may save for up to (\d+) s \(SLURM may kill them earlier\); send", launched.text
    )
    assert found, launched.text
    assert 6000 < int(found[1]) < 7200


def test_slurms_own_sigterm_after_an_earlier_one_leaves_ranks_the_time_to_save(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --signal=TERM@10, every process gets SIGTERM 10 s before the time limit and at it."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 10))
    launched = begin(start, tmp_path, "fifth_step", "stop")
    family = launched.look_around()
    stopped = next(p for p in family if p.status() == psutil.STATUS_STOPPED)

    def send_to_all() -> None:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        os.kill(launched.pid, signal.SIGTERM)

    send_to_all()
    wait_until(lambda: "lockstep: stopping: ranks may save" in launched.text, "the announcement")
    time.sleep(1.5)
    send_to_all()
    wait_until(lambda: launched.text.count("lockstep: stopping: ranks") == 2, "the second notice")
    time.sleep(0.5)
    assert launched.process.poll() is None, launched.text
    stopped.send_signal(signal.SIGCONT)
    assert launched.finish(60) == 143, launched.text
    assert "not saved" not in launched.text
    assert "send SIGINT twice, 1 s or more apart, to end them without saving" in launched.text
    checkpoint, _ = CheckpointStore(tmp_path / "run" / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    assert checkpoint.step >= 5
    assert launched.orphans() == []


# --- A rank that is killed again and again ---------------------------------------------------


def test_a_rank_killed_three_times_after_the_same_step_is_not_tried_again(
    tmp_path: Path, start: Start
) -> None:
    launched = begin(start, tmp_path, "fifth_step", "kill", "--restarts=10")
    assert launched.finish() == 4, launched.text
    said = f"lockstep: rank 1 on {HOST} was killed by SIGKILL after step 4"
    assert launched.text.count(said) == 3, launched.text
    end = "lockstep: killed by SIGKILL 3 times after step 4; not trying again\n  try: look at what"
    assert end in launched.text


def test_kills_before_the_script_reports_steps_are_not_taken_for_the_same(tmp_path: Path) -> None:
    process = type("Gone", (), {"pid": 1, "exitcode": -9, "sentinel": 0})()
    one = ranks.Ranks([process], [tmp_path], first=3)
    assert failure.killed(one, 0, signal.SIGKILL).identity == ""
    position = Position()
    position.share(tmp_path / "position.bin")
    position.begin_run()
    assert failure.killed(one, 0, signal.SIGKILL).identity == "SIGKILL before its first step"
    position.reach(7)
    assert failure.killed(one, 0, signal.SIGKILL).identity == "SIGKILL after step 7"


@pytest.mark.parametrize("version", [1, 2])
def test_kills_for_want_of_memory_are_counted_in_either_kind_of_control_group(
    version: int, tmp_path: Path
) -> None:
    listed = tmp_path / "cgroup"
    if version == 1:
        listed.write_text("8:pids:/\n4:memory:/job\n0::/\n")
        folder = tmp_path / "memory" / "job"
        events, limit = folder / "memory.oom_control", folder / "memory.limit_in_bytes"
        current = folder / "memory.usage_in_bytes"
        before, after = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", "oom_kill 3\n"
    else:
        listed.write_text("0::/job\n")
        folder = tmp_path / "job"
        events, limit = folder / "memory.events", folder / "memory.max"
        current = folder / "memory.current"
        before, after = "low 0\noom 1\noom_kill 2\n", "low 0\noom 2\noom_kill 3\n"
    folder.mkdir(parents=True)
    events.write_text(before)
    limit.write_text("209715200\n")
    group = ControlGroup.own(tmp_path, listed)
    assert group is not None
    assert group.num_free_bytes() is None
    current.write_text("209715100\n")
    assert free_host_bytes(group) == 100
    watch = MemoryWatch(group)
    watch.look([os.getpid()])
    assert watch.was_out_of_memory is False
    events.write_text(after)
    assert watch.was_out_of_memory is True
    assert watch.text(os.getpid()).startswith("peak memory ")
    assert watch.text(os.getpid()).endswith(" of 200 MiB")
    assert MemoryWatch(None).was_out_of_memory is None


GREEDY = """
import os, time
held = []
while os.environ["RANK"] == "1":
    held.append(bytearray(b"." * (1 << 25)))
    time.sleep(0.05)
time.sleep(60)
"""


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """Make a control group of 1 GiB, which only root may."""
    own = ControlGroup.own()
    if own is None or not os.access(own.events.parent, os.W_OK):
        pytest.skip("no control group can be made here")
    folder = own.events.parent / f"lockstep_test_{os.getpid()}"
    folder.mkdir()
    (folder / own.limit.name).write_text(str(1 << 30))
    yield folder
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # the kernel may still be emptying it
            folder.rmdir()
        time.sleep(0.05)


LAUNCH_IN = (
    "import os, sys; from pathlib import Path; "
    "Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid())); "
    "from lockstep.launch.local import launch; "
    "from lockstep.launch.request import LaunchRequest; "
    "sys.exit(launch(LaunchRequest((sys.argv[2],), 2)))"
)


def test_a_rank_that_the_kernel_kills_for_its_memory_is_named_with_its_peak(
    tmp_path: Path, start: Start, memory_group: Path
) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY)
    launched = start(sys.executable, "-c", LAUNCH_IN, memory_group, tmp_path / "greedy.py")
    assert launched.finish() == 137, launched.text
    assert f"lockstep: rank 1 on {HOST} was killed by SIGKILL" in launched.text
    assert " of 1.0 GiB); the kernel's out-of-memory killer did it\n" in launched.text
    assert "\n  try: lower batch.batch_size or loader.num_workers" in launched.text


# --- Ctrl-C while things are imported --------------------------------------------------------


SLOW_IMPORT = """
import pathlib, time
pathlib.Path("imports").touch()
while True:
    try:
        time.sleep(60)
    except BaseException as error:  # as a C extension does
        raise ImportError("a module that was interrupted") from error
"""


def command() -> str:
    """Return Python code that does what the installed `lockstep` does."""
    settings = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())
    module, function = settings["project"]["scripts"]["lockstep"].split(":")
    return f"import sys; from {module} import {function}; sys.exit({function}())"


def test_ctrl_c_while_the_command_is_imported_is_one_line(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "typer.py").write_text(SLOW_IMPORT)
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    begun = start(sys.executable, "-c", command(), "--help", env={"PYTHONPATH": path})
    wait_until((tmp_path / "imports").exists, "the import")
    os.killpg(begun.pid, signal.SIGINT)
    assert begun.finish(60) == 130, begun.text
    assert begun.text == "lockstep: interrupted\n"


def test_ctrl_c_while_ranks_are_about_to_be_forked_is_one_line(
    tmp_path: Path, start: Start
) -> None:
    words = ("launch", "--gpus", "2", TRAIN, tmp_path, "none", "none")
    begun = start(sys.executable, "-c", command(), *words)

    def forks() -> bool:
        lines = [" ".join(p.cmdline()) for p in begun.look_around() if p.is_running()]
        return any("multiprocessing.forkserver" in line for line in lines)

    with contextlib.suppress(psutil.NoSuchProcess):
        wait_until(forks, "the process that forks ranks")
    time.sleep(0.2)  # it imports torch
    os.killpg(begun.pid, signal.SIGINT)
    assert begun.finish(60) == 130, begun.text
    assert begun.text == "lockstep: stopped by SIGINT; no rank was running\n"
    assert begun.orphans() == []


def test_ctrl_c_while_ranks_import_their_script_is_quiet(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text("import slow")
    note = "import os; open('rank_' + os.environ['RANK'], 'w').close()"
    (tmp_path / "slow.py").write_text(f"{note}\n{SLOW_IMPORT}")
    monkeypatch.chdir(tmp_path)
    launched = start(*LAUNCH, "2", "script.py")
    wait_until(lambda: len([*tmp_path.glob("rank_*")]) == 2, "the import on both ranks")
    os.killpg(launched.pid, signal.SIGINT)
    assert launched.finish(60) == 130, launched.text
    lines = launched.text.splitlines()
    assert len(lines) == 1, launched.text
    assert lines[0].startswith("lockstep: stopping: ")
    assert launched.orphans() == []
