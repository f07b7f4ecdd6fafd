"""Interpret the launch variables: the number of processes, and the rank of this one.

Owns: the names that launchers use, and detecting contradictions. Does not own: the environment,
which only `environment.py` reads; all functions here are pure.
"""

import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.errors import LaunchError, plain, shown
from lockstep.text_input import whole_number

LAUNCH_ID = "LOCKSTEP_LAUNCH_ID"
"""Set by `lockstep launch` to its TORCHELASTIC_RUN_ID; a torchrun below it sets another run id."""
MAX_TIMEOUT_S = 1e8
"""Three years: more than any collective should take, and within the range of timers."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch variables of a process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    head: str = "localhost"
    port: int | None = None
    launcher: str = "python"
    job: str = ""
    """The id of the job or agent that starts this command, and restarts it after a failure."""
    is_again: bool = False
    has_agent: bool = False
    """Whether a torch agent, torchrun's or ours, started it; the agent may own the store."""


# For each launcher, the variables of rank, size, local rank and local size. A launcher is detected
# if its first two variables are set.
_ENV = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_Row = tuple[int, int, int | None, int | None]


def detect_launch(env: Mapping[str, str], local_rank_argument: int | None = None) -> Launch:
    """Read the rank of this process from the variables that its launcher set. Pure.

    Understands `lockstep launch`, torchrun (also below accelerate and torch.distributed.launch),
    the five variables set by hand, `srun` with one task per GPU, and MPI. Inside an sbatch script
    SLURM_PROCID exists without `srun`; only step variables prove a task.

    Args:
        env: The environment.
        local_rank_argument: The value of `--local-rank`, used if `env` has none; -1 means none.

    >>> detect_launch({}).size
    1
    >>> detect_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).size
    1

    Raises:
        LaunchError: if variables are missing, malformed or contradict each other.
    """
    if ("RANK" in env) != ("WORLD_SIZE" in env):
        raise _contradiction(env, "RANK and WORLD_SIZE must both be set, and one is missing")
    found = _read_rows(env)
    if local_rank_argument is not None and local_rank_argument < 0:
        local_rank_argument = None
    if not found:
        return Launch(local_rank=local_rank_argument or 0, **_started(env))

    # torchrun under srun: the tasks of the step are nodes, so trust torchrun's ranks.
    has_agent = "TORCHELASTIC_RUN_ID" in env
    if not has_agent and len({(rank, size) for _, (rank, size, _, _) in found}) > 1:
        raise _contradiction(env, "the launchers disagree about rank or size")
    launcher, (rank, size, local_rank, local_size) = found[0]
    if local_rank is None:
        local_rank = local_rank_argument if local_rank_argument is not None else rank
    if not 0 <= rank < size:
        raise _contradiction(env, f"rank {rank} does not fit into {size} processes")
    if local_size is not None and local_rank >= local_size:
        raise _contradiction(env, f"local rank {local_rank} does not fit into {local_size}")

    head, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if launcher == "srun":
        # Ranks on one node can use localhost.
        nodes = "localhost" if local_size == size else env.get("SLURM_STEP_NODELIST", "localhost")
        head = head or _first_host(nodes)
        port = port or str(_port_from(f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"))
    if launcher == "mpi" and local_size == size:
        head = head or "localhost"
        job = env.get("OMPI_MCA_ess_base_jobid") or env.get("PMIX_NAMESPACE")
        port = port or (str(_port_from(job)) if job else None)
    port_number = whole_number(port, most=65_535) if port else None
    if port and not port_number:
        raise _contradiction(env, f"MASTER_PORT={shown(port)} is not a port")
    if head and re.fullmatch(r"[!-~]{1,255}", head) is None:
        raise _contradiction(env, f"{shown(head)} is not the name or address of a host")
    if size > 1 and not (head and port):
        raise _contradiction(env, f"{size} processes need MASTER_ADDR and MASTER_PORT")
    if has_agent:
        is_ours = env.get(LAUNCH_ID) == env["TORCHELASTIC_RUN_ID"]
        launcher = "lockstep launch" if is_ours else "torchrun"
    return Launch(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size or size,
        head=head or "localhost",
        port=port_number,
        launcher=launcher,
        has_agent=has_agent,
        **_started(env),
    )


def check_size(launch: Launch, env: Mapping[str, str]) -> None:
    """Refuse a group whose size is not LOCKSTEP_EXPECTED_RANKS. Pure.

    `lockstep launch` or a user sets the variable. It is ignored without a launcher, because a
    subprocess of a rank inherits it.

    Raises:
        LaunchError: with both numbers.
    """
    expected = env.get("LOCKSTEP_EXPECTED_RANKS", "")
    if expected and launch.launcher != "python" and expected != str(launch.size):
        raise LaunchError(
            f"the group has {launch.size} ranks, and {expected} were asked for "
            "(LOCKSTEP_EXPECTED_RANKS)",
            "start all nodes with the same --nodes and --head, or unset LOCKSTEP_EXPECTED_RANKS "
            "if another launcher runs inside this one",
        )


def _started(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the job that starts this command, and whether it is a restart."""
    counts = [env.get(f"{who}_RESTART_COUNT") for who in ("TORCHELASTIC", "SLURM", "LOCKSTEP")]
    job = env.get("SLURM_JOB_ID") or env.get("TORCHELASTIC_RUN_ID", "")
    if job == "none" and env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE"):
        # Without an id, use the folder of its logs: .../none_x/attempt_0/0/error.json.
        job = (env.get("TORCHELASTIC_ERROR_FILE", "").split("/")[-4:-3] or [job])[0]
    return {"job": job, "is_again": any(count not in (None, "", "0") for count in counts)}


def _read_rows(env: Mapping[str, str]) -> list[tuple[str, _Row]]:
    """Return the variables of each detected launcher, the most trusted first."""
    known = (("env", _ENV), ("srun", _SLURM), ("mpi", _OPEN_MPI), ("mpi", _MPICH))
    found = [
        (launcher, _read_row(env, names))
        for launcher, names in known
        if names[0] in env and names[1] in env
    ]
    # Other launchers run inside SLURM steps: mpirun's daemons are one task per node, and salloc's
    # shell is a step of one task. The variables of such a step do not describe our processes.
    mpi = [row[:2] for launcher, row in found if launcher == "mpi"]
    step = next((row[:2] for launcher, row in found if launcher == "srun"), None)
    if step and len(found) > 1 and (step == (0, 1) or (mpi and step not in mpi)):
        found = [(launcher, row) for launcher, row in found if launcher != "srun"]
    return found


def _read_row(env: Mapping[str, str], names: tuple[str, str, str, str]) -> _Row:
    def read(name: str) -> int | None:
        text = env.get(name)
        if text is None:
            return None
        if name == "SLURM_STEP_TASKS_PER_NODE":
            return _tasks_on(env.get("SLURM_NODEID", "0"), text)
        number = whole_number(text)
        if number is None:
            raise LaunchError(
                f"{name}={shown(text)} is not a number of processes",
                f"unset {name}, or set it to a whole number",
            )
        return number

    rank, size = read(names[0]), read(names[1])
    assert rank is not None
    assert size is not None
    return rank, size, read(names[2]), read(names[3])


def _tasks_on(node: str, tasks_per_node: str) -> int | None:
    """Return the number of a step's tasks on one node, or None if it is not known.

    >>> [_tasks_on(node, "4(x2),3") for node in ("0", "1", "2", "3")]
    [4, 4, 3, None]
    """
    index = whole_number(node) or 0
    for part in tasks_per_node.split(","):
        run = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        tasks = whole_number(run[1]) if run else None
        times = whole_number(run[2] or "1") if run else None
        if tasks is None or times is None:
            return None
        if index < times:
            return tasks
        index -= times
    return None


def _contradiction(env: Mapping[str, str], problem: str) -> LaunchError:
    names = (*_ENV, "MASTER_ADDR", "MASTER_PORT", *_SLURM, *_OPEN_MPI, *_MPICH)
    listed = " ".join(f"{name}={plain(env[name])}" for name in names if name in env)
    return LaunchError(
        f"{problem}: {listed}",
        "start with torchrun, or unset the variables that another launcher left behind",
    )


def shows_traceback(env: Mapping[str, str]) -> bool:
    """Return whether LOCKSTEP_TRACEBACK=1 asks for the traceback of lockstep errors."""
    return env.get("LOCKSTEP_TRACEBACK", "0") not in ("", "0")


def collective_timeout_s(env: Mapping[str, str], configured: float) -> float:
    """Return the timeout of collectives: NCCL_TIMEOUT (seconds) if set, else `configured`.

    Raises:
        LaunchError: if NCCL_TIMEOUT is not a positive number of seconds.
    """
    text = env.get("NCCL_TIMEOUT", "")
    if not text:
        return configured
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise LaunchError(
            f"NCCL_TIMEOUT={shown(text)} is not a time", "set NCCL_TIMEOUT in seconds: 1800"
        )
    return min(seconds, MAX_TIMEOUT_S)


def _first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list.

    >>> _first_host("gpu[07-09,12],login1"), _first_host("rack[1-2]n[4,6]-ib"), _first_host("node3")
    ('gpu07', 'rack1n4-ib', 'node3')
    """
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])+", nodelist)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group()) if first else "localhost"


def _port_from(key: str) -> int:
    """Derive a port below the ephemeral range that all ranks of one job agree on."""
    return 20_000 + zlib.crc32(key.encode(errors="surrogatepass")) % 12_000
