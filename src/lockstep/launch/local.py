"""Run a command on N processes of this machine, under torch's elastic agent.

Owns: the agent's settings and the exit code. Does not own: restarting, hosts.
"""

import dataclasses
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import Any

STOPPING: dict[str, Any] = {
    # Passed on to every rank; SLURM announces the time limit with SIGUSR1.
    "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    # How long ranks that were told to stop may save; who signals twice need not wait.
    "shutdown_timeout": 90,
}
"""How the agent passes a stop on, where this version of torch lets us say."""


def launch(command: Sequence[str], num_processes: int) -> int:
    """Run `command` as ranks 0 to N-1 and return the exit code of the first that failed, or 0."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The failing rank has said what is wrong; the agent's own table says it again, worse.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    cores_each = max(1, (os.cpu_count() or 1) // num_processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(cores_each))
    known = {setting.name for setting in dataclasses.fields(LaunchConfig)}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        **{name: value for name, value in STOPPING.items() if name in known},
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        sys.stderr.write(
            f"lockstep: rank {rank} was ended by {name}\n"
            "  try: the same command again; it goes on from the newest checkpoint\n"
        )
        return 128 - failure.exitcode
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0
