"""What every test may rely on: one thread, no launcher's environment, and nothing left behind.

Each test is followed by the leak police. A test that changed the environment,
left a thread, a child process or a process group behind ends in an error that
names what it left; the police then clears it away, so that no other test pays.
"""

import fcntl
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import hypothesis
import psutil
import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import warm_python

# Tests fork ranks from this process. A fork copies an OpenMP pool without its
# threads, and the first parallel region of the child then waits for ever.
torch.set_num_threads(1)

# A shell that starts the suite in its background has it ignore SIGINT and SIGQUIT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup has it ignore SIGHUP.
for number in (signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

# Ask the driver, not the CUDA runtime, whether there is a GPU: a process that
# has called the runtime cannot fork ranks that use one.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

REPOSITORY = Path(__file__).resolve().parents[1]
REAL_DATA = Path(os.environ.get("LOCKSTEP_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
NEEDS_GPU = "needs a GPU"
NEEDS_SLURM = "no test cluster"
"""How a test begins its reason when it is skipped for want of SLURM."""
GRACE_S = 2.0

hypothesis.settings.register_profile("lockstep", deadline=None, derandomize=True)
hypothesis.settings.load_profile("lockstep")


# --- Environment -------------------------------------------------------------

LAUNCHER_NAMES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "NCCL_TIMEOUT",
}
LAUNCHER_PREFIXES = (
    "MASTER_",
    "SLURM_",
    "SBATCH_",
    "SRUN_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_",
    "MV2_",
    "TORCHELASTIC_",
    "ACCELERATE_",
    "WANDB_",
    "LOCKSTEP_",
)


def launcher_names(environment: Mapping[str, str]) -> set[str]:
    """Return the variables by which a launcher, or a user's settings, would steer a run."""
    return {n for n in environment if n in LAUNCHER_NAMES or n.startswith(LAUNCHER_PREFIXES)}


@pytest.fixture(scope="session", autouse=True)
def no_launcher() -> Iterator[None]:
    """Hide the launcher that may have started pytest, also from fixtures of a module."""
    with pytest.MonkeyPatch.context() as patch:
        for name in launcher_names(os.environ):
            patch.delenv(name)
        yield


# --- Leak police -------------------------------------------------------------

# Set by pytest for each phase of a test, or by torch when it first compiles.
UNPOLICED_NAMES = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH",
}
# Kept by Python and torch for the life of the process that first needed them.
UNPOLICED_COMMANDS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch/_inductor/compile_worker",
    "torch_shm_manager",
)


WARM_SERVER = "warm_python.py"
"""Kept for the session; but not what was started by it."""


def environment() -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if n not in UNPOLICED_NAMES}


def leaked_environment(before: Mapping[str, str]) -> list[str]:
    """Describe the variables that differ from `before`, and put them back."""
    after = environment()
    found = []
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name):
            continue
        if name not in before:
            found.append(f"environment variable {name} was set and not removed")
            del os.environ[name]
        else:
            verb = "changed" if name in after else "removed"
            found.append(f"environment variable {name} was {verb} and not put back")
            os.environ[name] = before[name]
    return found


def foreground_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.is_alive() and not t.daemon}


def leaked_threads(before: set[threading.Thread]) -> list[str]:
    """Describe the non-daemon threads that are not in `before` and do not end by themselves."""
    deadline = time.monotonic() + GRACE_S
    for thread in foreground_threads() - before:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [f"thread {t.name!r} is still running" for t in foreground_threads() - before]


def living_children() -> set[psutil.Process]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # none at all: most tests need not look through all processes
        return set()
    return {p for p in psutil.Process().children(recursive=True) if describe(p)}


def describe(process: psutil.Process) -> str:
    """Return the command of `process`; empty for one that has ended or is not policed."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        command = " ".join(process.cmdline()) or process.name()
    except psutil.NoSuchProcess:
        return ""
    if WARM_SERVER in command and process.ppid() == os.getpid():
        return ""
    return "" if any(kept in command for kept in UNPOLICED_COMMANDS) else command


def leaked_children(before: set[psutil.Process]) -> list[str]:
    """Describe the child processes that are not in `before` and do not end; kill them."""
    deadline = time.monotonic() + GRACE_S
    while (leaked := living_children() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    found = []
    for process in leaked:
        if command := describe(process):
            found.append(f"child process {process.pid} is still alive: {command[:200]}")
            process.kill()
    return found


def leaked_group() -> list[str]:
    """Describe a process group that nobody left, and leave it."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    return [f"process group was not left (rank {rank} of {size})"]


@pytest.fixture(autouse=True)
def leak_police(no_launcher: None) -> Iterator[None]:
    """Fail the test that leaves something behind. Set up first, so it looks last."""
    variables, threads, children = environment(), foreground_threads(), living_children()
    yield
    found = leaked_environment(variables) + leaked_group()
    found += leaked_threads(threads) + leaked_children(children)
    if found:
        pytest.fail("the test leaked:\n  " + "\n  ".join(found), pytrace=False)


# --- Processes that have imported torch already --------------------------------


@pytest.fixture(scope="session")
def warm_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with `python`, `torchrun` and `lockstep` that need not import torch."""
    programs, end = warm_python.start(tmp_path_factory.mktemp("warm"))
    yield programs
    end()


# --- Data and hardware -------------------------------------------------------


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real data, or skip."""
    if not REAL_DATA.is_dir():
        pytest.skip("real data not present: LOCKSTEP_TEST_DATA, or ../shared/data, is no folder")
    return REAL_DATA


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip(NEEDS_GPU)


SLOW_FILES: dict[str, int] = json.loads((Path(__file__).parent / "slow_files.json").read_text())
"""Seconds that the tests of a file take. Only their order matters, so they need not be exact."""
TAKE_TURNS = {"test_guide_commands.py", "test_docs.py"}
"""These wait for the same ports, so one process runs them."""


def shares(names: list[str], num: int) -> list[list[int]]:
    """Share tests, given by their files' names, among processes: slow files first, equal numbers.

    Each process begins with a part of the beginning of the list, of equal length, and takes from
    the end of another's when it has nothing left: so slow tests come first everywhere.
    """
    files: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        files.setdefault("together" if name in TAKE_TURNS else name, []).append(index)
    seconds = {name: SLOW_FILES.get(name, 0) for name in files}
    seconds["together"] = sum(SLOW_FILES.get(name, 0) for name in TAKE_TURNS)
    shared: list[list[int]] = [[] for _ in range(num)]
    busy = [0.0] * num
    slow = sorted((name for name in files if seconds[name]), key=lambda name: -seconds[name])
    for name in slow:
        least = busy.index(min(busy))
        shared[least] += files[name]
        busy[least] += seconds[name]
    quick = [index for name in files if not seconds[name] for index in files[name]]
    for number, share in enumerate(shared):
        wanted = len(names) * (number + 1) // num - len(names) * number // num - len(share)
        share += quick[: max(0, wanted)]
        del quick[: max(0, wanted)]
    shared[-1] += quick
    return shared


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let processes that run tests side by side begin with the slow ones."""
    num = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if num > 1:
        order = sum(shares([item.path.name for item in items], num), start=[])
        items[:] = [items[index] for index in order]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what was collected to itself: no garbage, and a rank forked from here would copy it."""
    gc.collect()
    gc.freeze()


ROW = "{form:>4}  {recipe:<12}  {processes:>9}  {seconds:>7}  {seen:<{wide}}  {command}"


def write_guide_table(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of the guides' commands that ran, as `test_guide_commands.py` recorded it."""
    ran = [one for reports in terminalreporter.stats.values() for one in reports]
    called = [one for one in ran if getattr(one, "when", "") == "call"]
    rows = [row for one in called for name, row in one.user_properties if name == "guide form"]
    if rows:
        forms = {row["form"] for row in rows}
        terminalreporter.section(f"{len(forms)} forms of the guides' commands")
        wide = max(len(row["seen"]) for row in rows)
        head = {name: name for name in rows[0]}
        for row in [head, *sorted(rows, key=lambda row: int(row["form"]))]:
            terminalreporter.write_line(ROW.format(**row, wide=wide))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    write_guide_table(terminalreporter)
    reports = terminalreporter.stats.get("skipped", [])
    skipped = [(r.nodeid, r.longrepr[2]) for r in reports if isinstance(r.longrepr, tuple)]
    for want, needed in ((NEEDS_GPU, "a GPU"), (NEEDS_SLURM, "SLURM (make system)")):
        names = sorted(name for name, reason in skipped if want in reason)
        if names:
            tests = "1 test needs" if len(names) == 1 else f"{len(names)} tests need"
            were = "was" if len(names) == 1 else "were"
            terminalreporter.write_line(f"{tests} {needed} and {were} skipped")
        if want == NEEDS_SLURM:
            terminalreporter.write("".join(f"  {name}\n" for name in names))


@pytest.fixture
def fixed_ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let one test at a time use the ports that guides name, in whatever process it runs."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with (shared / "fixed_ports").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
