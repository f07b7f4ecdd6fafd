"""`lockstep launch`: one failing rank is heard once, nobody is left behind, killed ranks go on."""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from processes import HERE, LAUNCH, LAUNCH_AFRESH, Start, last_step, wait_until

from lockstep.checkpoint import CheckpointStore
from lockstep.launch import agent
from lockstep.launch.logs import follow_log
from lockstep.launch.ranks import Ranks
from lockstep.launch.worker import check_module
from lockstep.testing import free_port

TRAIN = HERE / "train_and_save.py"


def pids_of(folder: Path, num: int) -> list[int]:
    """Return the ranks' process ids, as they wrote them down."""
    files = [folder / f"pid_{rank}" for rank in range(num)]
    wait_until(lambda: all(f.exists() and f.read_text() for f in files), "all ranks' ids", 60)
    return [int(file.read_text()) for file in files]


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def weights(folder: Path) -> bytes:
    checkpoint, _ = CheckpointStore(folder / "checkpoints", recipe="tiny").latest()
    assert checkpoint is not None
    return (checkpoint.path / "model.safetensors").read_bytes()


# --- A rank that fails ---------------------------------------------------------------------------


def test_an_exception_is_shown_once_with_rank_host_and_step_and_nobody_stays(
    tmp_path: Path, start: Start
) -> None:
    launched = start(*LAUNCH, "4", TRAIN, tmp_path, "--fail_at=3", "--fail_rank=1")
    pids = pids_of(tmp_path, 4)
    wait_until(lambda: "the planted fault" in launched.text, "the exception")
    assert launched.finish(30) == 1, launched.text  # nobody waited 60 s in a collective
    wait_until(lambda: all(map(is_gone, pids)), "all ranks gone", 10)
    text = launched.text
    assert text.count("Traceback (most recent call last):") == 1, text
    assert text.count('raise ZeroDivisionError("the planted fault")') == 1, text
    said = (
        rf"lockstep: rank 1 on {socket.gethostname()}, after step 3: ZeroDivisionError: the planted"
    )
    assert len(re.findall(said, text)) == 1, text
    assert "still running" not in text, "the stacks of the others explain nothing here"


def test_the_same_error_at_the_same_step_three_times_is_not_tried_again(
    tmp_path: Path, start: Start
) -> None:
    launched = start(*LAUNCH, "2", "--restarts=9", TRAIN, tmp_path, "--fail_at=3")
    assert launched.finish() == 4, launched.text
    assert launched.text.count("ZeroDivisionError: the planted fault") == 2 * 3
    assert "the same error 3 times in the same place; not trying again" in launched.text


def test_errors_at_different_steps_are_tried_again(tmp_path: Path, start: Start) -> None:
    launched = start(*LAUNCH, "2", "--restarts=4", TRAIN, tmp_path, "--fail_at=each")
    assert launched.finish() == 0, launched.text
    assert launched.text.count("lockstep: restarting all ranks") == 4, launched.text


def test_a_request_that_cannot_work_is_said_once_and_not_tried_again(
    tmp_path: Path, start: Start
) -> None:
    launched = start(*LAUNCH, "2", "--restarts=3", TRAIN, tmp_path, "--batch_size=nonsense")
    assert launched.finish() == 2, launched.text
    assert launched.text.count("nonsense") == 1, launched.text
    assert "Traceback" not in launched.text


def test_a_rank_that_leaves_is_not_taken_for_those_it_leaves_alone(
    tmp_path: Path, start: Start
) -> None:
    launched = start(*LAUNCH, "2", TRAIN, tmp_path, "--fail_at=3", "--fail_with=200")
    assert launched.finish() == 200, launched.text
    assert "lockstep: rank 0 exited with code 200\n" in launched.text, launched.text
    assert "Traceback" not in launched.text, "rank 1 lost its peer, which is no cause"


def test_an_error_of_ours_that_a_script_lets_through_is_not_tried_again(
    tmp_path: Path, start: Start
) -> None:
    (tmp_path / "own.py").write_text("import lockstep.errors as e; raise e.DataError('no', 'a')")
    launched = start(*LAUNCH, "1", "--restarts=3", tmp_path / "own.py")
    assert launched.finish(30) == 2, launched.text
    assert "restarting" not in launched.text


WATCHED = """
import os, threading, time
threading.Timer(0.1, lambda: os._exit(7)).start()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("end", "has_left"),
    [("raise ValueError('mine')", False), ("sys.exit(7)", False), ("sys.exit('text')", False)]
    + [("sys.exit(0)", True), ("pass", True)],
)
def test_a_rank_that_fails_does_not_wait_for_the_others_to_leave_the_group(
    end: str, has_left: bool, tmp_path: Path, start: Start
) -> None:
    (tmp_path / "script.py").write_text(
        "import atexit, sys\nimport torch.distributed as dist\nfrom pathlib import Path\n"
        "from lockstep.world import World\n"
        "def note():\n"
        "    if world.rank == 1:\n"
        "        Path(sys.argv[1]).write_text(str(not dist.is_initialized()))\n"
        "atexit.register(note)  # the first to be registered is the last to run\n"
        "world = World.enter(device='cpu')\n"
        f"if world.rank == 1:\n    {end}\n"
    )
    launched = start(*LAUNCH, "2", tmp_path / "script.py", tmp_path / "left")
    launched.finish(60)
    assert (tmp_path / "left").read_text() == str(has_left), launched.text


def test_a_thread_may_end_its_rank(tmp_path: Path, start: Start) -> None:
    (tmp_path / "watched.py").write_text(WATCHED)
    launched = start(*LAUNCH, "1", tmp_path / "watched.py")
    assert launched.finish(30) == 7, launched.text


DEAF = """
import os, signal, time
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("deaf", "w").close()
    time.sleep(300)
while not os.path.exists("deaf"):
    time.sleep(0.01)
raise ZeroDivisionError("the planted fault, no matter of timeout_s")
"""
IMPATIENT = "from lockstep.launch import agent; agent.PEERS_S = 1.0; "


def test_a_rank_that_the_agent_had_to_kill_is_not_taken_for_the_cause(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deaf.py").write_text(DEAF)
    launched = start(sys.executable, "-c", IMPATIENT + LAUNCH_AFRESH, "deaf.py")
    assert launched.finish() == 1, launched.text
    said = f"lockstep: rank 0 on {socket.gethostname()}: ZeroDivisionError: the planted fault"
    assert said in launched.text, launched.text
    assert "rank 1" not in launched.text, "nobody has waited for it"


STUCK = """
import os, signal, time
from lockstep import World

def look_for_something():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a run does, to save first
    open("pid", "w").write(str(os.getpid()))
    time.sleep(300)

world = World.enter(timeout_s=2)
if os.environ["RANK"] == "1":
    look_for_something()
world.barrier()
"""


def test_ranks_that_waited_in_vain_are_told_what_the_other_was_at(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stuck.py").write_text(STUCK)
    launched = start(*LAUNCH, "2", "stuck.py")
    said = r"lockstep: rank 1 was still running, at\n  File \".*stuck.py\", line 8 in look_"
    wait_until(lambda: re.search(said, launched.text), "the place")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # torch would wait for 30 s
    assert launched.finish() == 1, launched.text
    assert len(re.findall(said, launched.text)) == 1, launched.text


ABSENT = """
import sys
from lockstep import World

world = World.enter(timeout_s=1)
if world.rank == 1:
    sys.exit()
world.barrier()
"""


REFUSED = """
from lockstep import RunConfig, fit
from lockstep.testing import TinyTask

fit(TinyTask(), RunConfig(output_dir="run", epochs=1, batch={"batch_size": 1000}, device="cpu"))
"""


def test_an_error_raised_on_purpose_is_said_without_a_traceback(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the run's folder is made where it is started
    (tmp_path / "refused.py").write_text(REFUSED)
    launched = start(*LAUNCH, "2", "refused.py")
    assert launched.finish() == 2, launched.text
    assert "Traceback" not in launched.text
    said = r"lockstep: rank \d on \S+: ConfigError: a batch of 1000 x 2 = 2000 is larger than .*\n"
    assert len(re.findall(said + "  try: ", launched.text)) == 1, launched.text


def test_a_rank_whose_script_came_to_its_end_too_early_is_named(
    tmp_path: Path, start: Start
) -> None:
    (tmp_path / "absent.py").write_text(ABSENT)
    launched = start(*LAUNCH, "2", tmp_path / "absent.py")
    assert launched.finish() == 6, launched.text
    assert (
        f"lockstep: rank 1 on {socket.gethostname()} exited with code 0, but the others"
        in launched.text
    )
    assert ", line 8, in <module>\n    world.barrier()\n" in launched.text
    assert launched.text.count("Traceback") == 1, "of rank 0"


NO_ROOM = (  # as a full /dev/shm has it
    "from multiprocessing import synchronize; "
    "synchronize.SemLock.__init__ = lambda *_, **__: open('/dev/full', 'w').write('.' * 9999); "
)


def test_ranks_for_which_there_is_no_room_are_refused(tmp_path: Path, start: Start) -> None:
    (tmp_path / "absent.py").write_text(ABSENT)
    launched = start(sys.executable, "-c", NO_ROOM + LAUNCH_AFRESH, tmp_path / "absent.py")
    assert launched.finish() == 1, launched.text
    said = "LaunchError: the ranks cannot be started: [Errno 28] No space left on device"
    assert said in launched.text, launched.text


def test_a_rank_that_is_stuck_alone_on_its_machine_is_told_of_there(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "LEFT_S", 0.5)
    monkeypatch.chdir(tmp_path)  # the script writes into the folder it runs in
    script = tmp_path / "stuck.py"
    where = STUCK.replace('os.environ["RANK"] == "1"', 'os.environ["IS_STUCK"] == "yes"')
    script.write_text(where.replace("SIG_IGN", "SIG_DFL"))
    words = (*LAUNCH, "1", "--nodes", "2", "--head", f"localhost:{free_port()}", "--node-rank")
    # Machines meet on the first, which is there for as long as its own rank is.
    stuck = start(*words, "0", script, env={"IS_STUCK": "yes"})
    other = start(*words, "1", script, env={"IS_STUCK": "no"})
    said = "lockstep: the launchers on the other nodes have ended\nlockstep: rank"
    wait_until(lambda: said in stuck.text, said)
    assert "in look_for_something" in stuck.text
    os.kill(stuck.pid, signal.SIGTERM)
    assert [stuck.finish(), other.finish()] == [143, 1]


# --- A rank that is killed -----------------------------------------------------------------------


def test_a_rank_that_ends_before_it_is_asked_does_not_end_the_launcher(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "place.txt").touch()
    processes = [SimpleNamespace(pid=gone.pid, exitcode=None)]  # it was a moment ago
    said = Ranks(processes, [tmp_path], first=1).where()  # type: ignore[arg-type]
    assert said.splitlines()[0] == "lockstep: rank 1 was still running, at"


def test_killed_ranks_go_on_and_end_with_the_same_weights(tmp_path: Path, start: Start) -> None:
    straight = start(*LAUNCH, "2", TRAIN, tmp_path / "straight")
    hit = start(*LAUNCH, "2", "--restarts=5", TRAIN, tmp_path / "hit", "--step_s=0.05")
    seen: set[int] = set()
    folder = tmp_path / "hit"
    for kill in range(3):
        wait_until(lambda at=5 * kill + 4: last_step(folder) >= at, "the next step")  # type: ignore[misc]
        pid = pids_of(folder, 2)[kill % 2]
        assert pid not in seen, "a new process after each kill"
        seen.add(pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda n=kill + 1: hit.text.count("was killed by SIGKILL") == n, "the news")  # type: ignore[misc]
    assert straight.finish() == 0, straight.text
    assert hit.finish() == 0, hit.text
    assert weights(tmp_path / "hit") == weights(tmp_path / "straight")


# --- A launcher that is killed -------------------------------------------------------------------


def test_no_rank_outlives_its_launcher(tmp_path: Path, start: Start) -> None:
    launched = start(*LAUNCH, "2", TRAIN, tmp_path, "--step_s=600")  # they would not end by now
    pids = pids_of(tmp_path, 2)
    os.kill(launched.pid, signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, pids)), "the ranks gone", 60)
    assert launched.orphans() == []


# --- Several machines (here: launchers on one) ---------------------------------------------------


def test_two_launchers_form_one_group_and_go_on_together(tmp_path: Path, start: Start) -> None:
    head = f"localhost:{free_port()}"
    both = [
        start(
            *(*LAUNCH, "1", "--nodes=2", f"--node-rank={rank}", f"--head={head}", "--restarts=3"),
            *(TRAIN, tmp_path / "two", "--step_s=0.05"),
        )
        for rank in range(2)
    ]
    alone = start(*LAUNCH, "2", TRAIN, tmp_path / "alone")
    wait_until(lambda: last_step(tmp_path / "two") >= 4, "a few steps")
    os.kill(pids_of(tmp_path / "two", 2)[1], signal.SIGKILL)
    assert [one.finish() for one in both] == [0, 0], both[0].text + both[1].text
    assert alone.finish() == 0, alone.text
    assert weights(tmp_path / "two") == weights(tmp_path / "alone")


def test_a_machine_that_gives_up_is_told_of_on_the_others_in_a_line(
    tmp_path: Path, start: Start
) -> None:
    nodes = (*LAUNCH, "1", "--nodes=2", f"--head=localhost:{free_port()}", "--restarts=3")
    words = (TRAIN, tmp_path, "--fail_at=2", "--fail_rank=1", "--fail_with=2")
    both = [start(*nodes, f"--node-rank={rank}", *words) for rank in (0, 1)]
    codes = [one.finish(60) for one in both]
    assert sorted(codes) == [1, 2], [one.text for one in both]
    other = both[codes.index(1)].text
    assert "\nlockstep: the 2 nodes could not rendezvous after a restart\n  try: " in other
    assert "elastic" not in other, "no traceback of the launcher's own"


CUT_OFF = """
import os, time
open("there" + os.environ["RANK"], "w").close()
while not os.path.exists("cut") or os.environ["RANK"] == "0":
    time.sleep(0.02)
raise ZeroDivisionError("the planted fault")
"""


def test_a_machine_that_is_cut_off_says_why_it_ends(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cut_off.py").write_text(CUT_OFF)
    nodes = (*LAUNCH, "1", "--nodes=2", f"--head=localhost:{free_port()}")
    head, other = (start(*nodes, f"--node-rank={rank}", "cut_off.py") for rank in (0, 1))
    wait_until(lambda: len(list(tmp_path.glob("there*"))) == 2, "both ranks")
    os.kill(head.pid, signal.SIGSTOP)  # as a cut cable: it does not answer, nor is it gone
    try:
        (tmp_path / "cut").touch()
        assert other.finish(30) == 1, other.text
    finally:
        os.kill(head.pid, signal.SIGKILL)
    assert "ZeroDivisionError: the planted fault" in other.text


def test_a_machine_that_does_not_come_is_named(start: Start) -> None:
    head = f"localhost:{free_port()}"
    nodes = (*LAUNCH, "1", "--nodes=3", f"--head={head}", "--wait=6")
    both = [start(*nodes, f"--node-rank={rank}", TRAIN, "nowhere") for rank in (0, 1)]
    for one in both:
        assert one.finish(30) == 2, one.text
        assert one.text.startswith(
            "lockstep: of 3 nodes, node 2 did not join within 6 s\n  try: "
        ), one.text


# --- What is kept --------------------------------------------------------------------------------


def test_each_rank_has_a_log_file(tmp_path: Path, start: Start) -> None:
    launched = start(*LAUNCH, "2", f"--logs={tmp_path / 'logs'}", TRAIN, tmp_path / "run")
    assert launched.finish() == 0, launched.text
    logs = {path.parent.name: path.read_text() for path in tmp_path.glob("logs/*/*/*/stdout.log")}
    assert "hello from rank 0\n" in logs["0"]
    assert "hello from rank 1\n" in logs["1"]
    assert "hello from rank 0\n" in launched.text
    assert "[rank1]:hello from rank 1\n" in launched.text


def test_a_log_is_followed_line_by_line_and_to_its_end_at_once(tmp_path: Path) -> None:
    path, shown, finished = tmp_path / "log", io.StringIO(), threading.Event()
    path.write_text("whole\nin two ")
    follow = partial(follow_log, "[rank1]:", str(path), shown, finished)
    follower = threading.Thread(target=follow, args=(0.01,))
    follower.start()
    wait_until(lambda: "whole" in shown.getvalue(), "the first line", 10)
    with path.open("a") as file:
        file.write("pieces\nno end")
    finished.set()
    follower.join(10)
    lines = ["whole", "in two pieces", "no end"]
    assert shown.getvalue() == "".join(f"[rank1]:{line}\n" for line in lines)
    began = time.monotonic()
    follow(60.0)
    assert time.monotonic() - began < 30  # it did not wait for its next look


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("2", "nowhere.py"), "there is no script 'nowhere.py'"),
        (("2", "."), "'.' is a folder, not a script"),
        (("2", "-m"), "-m needs the name of a module"),
        (("2", "-m", "nomodule"), "there is no module 'nomodule'"),
        (("2", "-m", ".relative"), "there is no module '.relative'"),
        (("2", "-m", "lockstep.nomodule"), "there is no module 'lockstep.nomodule'"),
        (("2", "-m", "lockstep.cli"), "the package 'lockstep.cli' cannot be run: it has no"),
        (("2", "-m", "sys"), "the module 'sys' cannot be run: it is not written in Python"),
        (("2", "-m", "train_and_save.py"), "-m takes a module, and train_and_save.py is a script"),
        (("none", TRAIN), "--gpus none is not a number of processes"),
        (("2", "--nodes=2", TRAIN), "--nodes 2 needs the address of node 0"),
        (("2", "--head=a:1", TRAIN), "--head 'a:1' names node 0, and --nodes is missing"),
        (("2", f"--logs={TRAIN}", TRAIN), f"the log folder {TRAIN} cannot be created: File exists"),
        (("2", "--nodes=2", "--head=a:b", TRAIN), "--head 'a:b' is not HOST:PORT"),
        (
            ("2", "--nodes=2", "--node-rank=2", "--head=a:1", TRAIN),
            "--node-rank 2 is out of range for 2 nodes",
        ),
    ],
)
def test_what_cannot_start_is_one_line(words: tuple[str, ...], said: str, start: Start) -> None:
    refused = start(*LAUNCH, *words)
    assert refused.finish() == 2, refused.text
    assert refused.text.startswith(f"lockstep: {said}"), refused.text
    assert refused.text.count("\n") == 2


@pytest.mark.parametrize(
    ("file", "text", "module"),
    [
        ("alone.py", "raise AssertionError('imported')", "alone"),
        ("package/train.py", "", "package.train"),
        ("package/__main__.py", "", "package"),
        ("late/__init__.py", "__path__.append(__path__[0] + '/src')", "late.train"),
        ("broken/__init__.py", "raise ValueError('the ranks report it')", "broken.train"),
    ],
)
def test_a_module_is_found_where_ranks_will_find_it(
    file: str, text: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    (tmp_path / "late" / "src").mkdir(parents=True, exist_ok=True)
    (tmp_path / "late" / "src" / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    searched = sys.path.copy()
    imported = set(sys.modules)
    check_module(module)
    assert sys.path == searched
    for name in set(sys.modules) - imported:
        del sys.modules[name]
