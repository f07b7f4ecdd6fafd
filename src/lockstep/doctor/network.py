"""Checks of the network between ranks: launch variables, port, host names, a real all-reduce.

Owns: the conditions for making a process group. Does not own: making one;
`collective.py` does, in other processes.
"""

import socket
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

import psutil

from lockstep.dist.detect import collective_timeout_s, detect_launch
from lockstep.doctor.command import DEFAULT_PORT, Command
from lockstep.doctor.report import Result, bytes_text, fail, ok, seconds_text, skip, warn
from lockstep.errors import LaunchError, shown
from lockstep.harness.ranks import free_port
from lockstep.text_input import whole_number

SLOW_BYTES_S = {"gloo": 20 * 2**20, "cpu:gloo,cuda:nccl": 2**30}
"""Below this rate an all-reduce on one machine counts as broken: a busy machine still reaches
five times as much."""
LAUNCH_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
LAUNCH_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "TORCHELASTIC_")


def without_launch(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without launch variables."""
    return {
        n: v for n, v in env.items() if n not in LAUNCH_NAMES and not n.startswith(LAUNCH_PREFIXES)
    }


def launch_variables(env: Mapping[str, str], command: Command | None = None) -> Result:
    """Check that the launch variables in the environment do not contradict each other."""
    text = env.get("NCCL_TIMEOUT", "")
    starts_its_own = command is not None and command.launcher not in ("python", "env", "srun")
    set_by_hand = [n for n in LAUNCH_NAMES if n in env]
    try:
        collective_timeout_s(env, 0)
        launch = detect_launch(without_launch(env) if starts_its_own else env)
    except LaunchError as error:
        return fail(error.problem, error.remedy)
    if env.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        return warn("CUDA_LAUNCH_BLOCKING=1 makes every kernel wait", "unset CUDA_LAUNCH_BLOCKING")
    timeout = f"; a collective may wait {text} s (NCCL_TIMEOUT)" if text else ""
    if starts_its_own:
        over = f", and replaces {', '.join(set_by_hand)}" if set_by_hand else ""
        assert command is not None
        return ok(f"{command.launcher} sets its own{over}{timeout}")
    if launch.size > 1:
        others = "all others must be started, too"
        return ok(f"rank {launch.rank} of {launch.size} ({launch.launcher}): {others}")
    return ok(f"none that launch anything: one process{timeout}")


def port_free(command: Command | None, env: Mapping[str, str]) -> Result:
    """Check that the rendezvous port is free."""
    if command is None:
        text = env.get("MASTER_PORT", str(DEFAULT_PORT))
        port = whole_number(text, most=65_535) or DEFAULT_PORT
        is_certain, head = "MASTER_PORT" in env, env.get("MASTER_ADDR", "localhost")
    elif command.launcher == "sbatch":
        return skip("the batch script chooses it, on another machine")
    elif command.port is None:
        alone = command.world_size == 1
        return ok("one process needs none" if alone else f"{command.launcher} takes a free one")
    else:
        port, is_certain, head = command.port, True, command.head
    if not _is_here(head):
        return skip(f"the ranks meet at {head}:{port}, on another machine")
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            says = f"port {port} is taken{_holder(port)} ({error.strerror})"
            fix = (
                f"pass --master_port={free_port()}, or use torchrun --standalone or lockstep launch"
            )
            return fail(says, fix) if is_certain else warn(says, fix)
    return ok(f"{port} is free")


def _holder(port: int) -> str:
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            at_port = connection.laddr and connection.laddr.port == port
            if at_port and connection.status == psutil.CONN_LISTEN and connection.pid:
                process = psutil.Process(connection.pid)
                return f" by process {connection.pid}: {' '.join(process.cmdline())[:80]}"
    return ""


def _is_here(head: str) -> bool:
    if head in ("", "localhost", "127.0.0.1", "0.0.0.0", socket.gethostname()):
        return True
    with suppress(OSError, UnicodeError):  # UnicodeError: the name has a label that is too long
        theirs = {info[4][0] for info in socket.getaddrinfo(head, None)}
        addresses = (a for found in psutil.net_if_addrs().values() for a in found)
        return any(a.address.split("%")[0] in theirs for a in addresses)
    return True  # the next check reports a name that does not resolve


def names_resolve(command: Command | None, env: Mapping[str, str]) -> Result:
    """Check that the names of this host and of the head resolve, and that interfaces exist."""
    interfaces = psutil.net_if_addrs()
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        for word in filter(None, env.get(variable, "").split(",")):
            exact, text = word.startswith("="), word.lstrip("=")
            if word.startswith("^"):
                continue
            if not any(i == text or (not exact and i.startswith(text)) for i in interfaces):
                return fail(
                    f"{variable}={word}: no such interface; there are {', '.join(interfaces)}",
                    f"unset {variable}",
                )
    head = (command.head if command else "") or env.get("MASTER_ADDR", "localhost")
    if head not in ("", "localhost"):
        try:
            socket.getaddrinfo(head, None)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            fix = "use the first node's address: scontrol show hostnames, or hostname -I there"
            return fail(f"the head {shown(head)} does not resolve: {why}", fix)
    host = socket.gethostname()
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]
    except OSError:
        says = f"this host's own name, {host}, does not resolve"
        fix = f"add 127.0.0.1 {host} to /etc/hosts, or set GLOO_SOCKET_IFNAME=eth0"
        several = command is not None and command.num_nodes > 1
        return fail(says, fix) if several else warn(says, fix)
    up = [i for i, state in psutil.net_if_stats().items() if state.isup]
    return ok(f"{host} is {address}; interfaces {', '.join(up)}")


def sum_over_ranks(facts: Mapping[str, Any], has_network: bool = True) -> Result:
    """Check that an all-reduce between ranks on this machine works, and how fast it is."""
    if not has_network:
        return skip("not tried, since network failed")
    if "torch" not in facts:
        return skip("not tried without torch")
    total = facts.get("sum")
    if total is None:
        fix = (
            "set NCCL_DEBUG=INFO to see where it fails; set GLOO_SOCKET_IFNAME or "
            "NCCL_SOCKET_IFNAME to use another interface"
        )
        return fail(f"no sum came back: {facts.get('sum_error', 'no answer in time')}", fix)
    rate = total["num_bytes"] / total["seconds"]
    says = (
        f"{total['num_ranks']} ranks, {_plain(total['backend'], total['device'])}: "
        f"{bytes_text(total['num_bytes'])} in {seconds_text(total['seconds'])}, "
        f"{bytes_text(rate)}/s"
    )
    if not total["is_right"]:
        return fail(f"{says}, and the sum is wrong", "set NCCL_P2P_DISABLE=1, and check the GPUs")
    if rate < SLOW_BYTES_S.get(total["backend"], 0):
        return warn(
            f"{says}: slow", "try an idle machine; set NCCL_DEBUG=INFO; look at nvidia-smi topo -m"
        )
    return ok(says)


def _plain(backend: str, device: str) -> str:
    return f"{'NCCL' if 'nccl' in backend and device == 'cuda' else 'gloo'} on {device}"
