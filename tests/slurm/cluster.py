"""A real SLURM cluster of two nodes on one Linux machine, for tests.

    python tests/slurm/cluster.py       starts one, says what to export, and stops it on Ctrl-C

munged and slurmctld run here, which is the login node; each node is a slurmd in network,
mount, host-name and process namespaces of its own, and sees the same files. A node has a
first process: when that is killed, so is everything on the node, as when the power goes.

Several clusters may run side by side: each holds a numbered slot, which gives it its names,
addresses and folder, and a lock that ends with the process that took it. Whatever a slot's last
holder left behind is cleared away by the next. Nothing outside `/run/lockstep_slurm_N` and
the namespaces `lkN-*` is touched.
"""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setsid")
NUM_SLOTS = 16
NODES = ("node1", "node2")
START_S = 60

CONF = """
ClusterName=lockstep{slot}
SlurmctldHost={here}({net}.1)
SlurmctldPort=27817
SlurmdPort=27818
SlurmUser=root
SlurmdUser=root
CommunicationParameters=NoCtldInAddrAny
AuthType=auth/munge
# A job that returns to the queue waits until its credential has expired; 5 s is the least there is.
AuthInfo=socket={dir}/munge/socket,cred_expire=5
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/spool/%n.pid
SlurmctldLogFile={dir}/log/slurmctld.log
SlurmdLogFile={dir}/log/%n.log
# No control groups: they are not there in every container.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
# More cores and GPUs than the machine has, so that several jobs fit.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
# What takes minutes on a real cluster takes seconds here.
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmctldTimeout=10
SlurmdTimeout=10
MessageTimeout=5
KillWait=10
JobRequeue=1
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[1-2] NodeAddr={net}.[11-12] CPUs=64 RealMemory=4096 Gres=gpu:4
PartitionName=gpu Nodes=ALL Default=YES PriorityTier=1 GraceTime=10 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""

# The first process of a node. Its own view of /proc tells its number outside, before it mounts one.
NODE = """
set -e
dir=$1 node=$2
read -r outside _ </proc/self/stat
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t tmpfs tmpfs /dev/shm
mkdir -p /etc/slurm
mount --bind "$dir/etc" /etc/slurm
mount --bind "$dir/hosts" /etc/hosts
hostname "$node"
unset SLURM_CONF
slurmd -D -N "$node" &
echo "$outside" >"$dir/pids/.$node"; mv "$dir/pids/.$node" "$dir/pids/$node"
while :; do sleep 3600 & wait $! || :; done
"""


class NoCluster(Exception):
    """Says why there can be no cluster here."""


class Cluster:
    """Start it, use it with `env`, hurt its nodes, stop it."""

    def __init__(self, slot: int, lock: int) -> None:
        self.slot = slot
        self._lock = lock
        self.dir = Path(f"/run/lockstep_slurm_{slot}")
        self.prefix = f"lk{slot}-"
        self.net = f"10.78.{slot}"

    @classmethod
    def take(cls) -> "Cluster":
        """Take a free slot and clear away what its last holder left."""
        if os.geteuid() != 0:
            raise NoCluster("a test cluster needs root")
        look_for_programs()
        for slot in range(NUM_SLOTS):
            lock = os.open(f"/run/lockstep_slurm_{slot}.lock", os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                continue
            cluster = cls(slot, lock)
            cluster.clear()
            return cluster
        raise NoCluster(f"all {NUM_SLOTS} slots for test clusters are taken")

    @property
    def env(self) -> dict[str, str]:
        """Return the variables that make SLURM's commands talk to this cluster."""
        return {**os.environ, "SLURM_CONF": str(self.dir / "etc" / "slurm.conf")}

    # --- Life ---

    def start(self) -> None:
        """Start it and wait until both nodes are idle."""
        for name in ("etc", "munge", "state", "spool", "log", "pids", "dev"):
            (self.dir / name).mkdir(parents=True)
        self.dir.chmod(0o755)
        key = self.dir / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        here = socket.gethostname().split(".")[0]
        addresses = {f"{self.net}.1": here, f"{self.net}.11": "node1", f"{self.net}.12": "node2"}
        hosts = ["127.0.0.1 localhost", *(f"{ip} {name}" for ip, name in addresses.items())]
        (self.dir / "hosts").write_text("\n".join(hosts) + "\n")
        conf = CONF.format(slot=self.slot, here=here, net=self.net, dir=self.dir)
        (self.dir / "etc" / "slurm.conf").write_text(conf)
        # A GPU must be a device, or SLURM leaves it out: these are copies of /dev/null.
        for index in range(4):
            os.mknod(self.dir / "dev" / f"gpu{index}", 0o20666, os.makedev(1, 3))
        gres = f"AutoDetect=off\nName=gpu File={self.dir}/dev/gpu[0-3]\n"
        (self.dir / "etc" / "gres.conf").write_text(gres)
        # Never used, but slurmd looks for control groups at the start and would give up.
        (self.dir / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._connect()
        munge = self.dir / "munge"
        self._daemon(
            *("munged", "munged", "-F", f"--key-file={key}", f"--socket={munge}/socket"),
            *(f"--pid-file={munge}/pid", f"--log-file={self.dir}/log/munged.log"),
            *(f"--seed-file={munge}/seed", "--num-threads=2"),
        )
        wait_until((munge / "socket").exists, "munged listens", 10)
        # With our hosts file it listens on the private address only.
        inside = 'mount --bind "$1/hosts" /etc/hosts && exec slurmctld -D -f "$1/etc/slurm.conf"'
        ctld = ("unshare", "--mount", "bash", "-c", inside, "slurmctld", str(self.dir))
        self._daemon("slurmctld", *ctld)
        for node in NODES:
            self.boot(node)
        self.wait_for_nodes()

    def stop(self) -> None:
        """End everything of it and give the slot back."""
        self.clear()
        os.close(self._lock)

    def clear(self) -> None:
        """End the processes that were written down, and remove namespaces and folder."""
        for node in NODES:
            self._end(node, signal.SIGKILL)
        self._end("slurmctld", signal.SIGTERM)
        self._end("munged", signal.SIGTERM)
        quietly("ip", "link", "del", f"{self.prefix}host")
        listed = quietly("ip", "netns", "list").stdout.split("\n")
        for name in [line.split()[0] for line in listed if line.startswith(self.prefix)]:
            for pid in quietly("ip", "netns", "pids", name).stdout.split():
                os.kill(int(pid), signal.SIGKILL)  # it lives in our namespace
            quietly("ip", "netns", "del", name)
        shutil.rmtree(self.dir, ignore_errors=True)

    # --- Nodes ---

    def boot(self, node: str) -> None:
        """Switch a node on."""
        shutil.rmtree(self.dir / "spool" / node, ignore_errors=True)
        (self.dir / "spool" / node).mkdir()
        self._daemon(
            *(f"init_{node}", "nsenter", f"--net=/run/netns/{self.prefix}{node}"),
            *("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"),
            *("bash", "-c", NODE, "init", str(self.dir), node),
        )
        wait_until((self.dir / "pids" / node).exists, f"{node} is up", 20)
        (self.dir / "pids" / f"init_{node}").unlink()  # the node's first process speaks for it

    def crash(self, node: str) -> None:
        """Kill everything on a node at once."""
        self._end(node, signal.SIGKILL)

    def kill_on(self, node: str, number: signal.Signals, command: str) -> int:
        """Send a signal to the processes of a node that run `command`, and count them."""
        first = self._pid(node)
        assert first is not None
        space = os.readlink(f"/proc/{first}/ns/pid")
        found = 0
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if words.startswith(command) and os.readlink(path / "ns/pid") == space:
                    os.kill(int(path.name), number)
                    found += 1
            except OSError:  # it has ended meanwhile
                continue
        return found

    @contextmanager
    def port_taken(self, node: str, port: int) -> Iterator[None]:
        """Let somebody else listen on a port of a node, whoever calls."""
        listen = f"import socket\ns = socket.create_server(('', {port}))\nwhile True: s.accept()"
        command = ["ip", "netns", "exec", f"{self.prefix}{node}", sys.executable, "-c", listen]
        somebody = subprocess.Popen(command)
        try:
            yield
        finally:
            somebody.kill()
            somebody.wait()

    def wait_for_nodes(self, state: str = "idle", nodes: tuple[str, ...] = NODES) -> None:
        """Wait until SLURM says that nodes are in a state."""

        def are_so() -> bool:
            said = self.ask("sinfo", "-hN", "-p", "gpu", "-o", "%N %T").splitlines()
            return {f"{node} {state}" for node in nodes} <= {line.rstrip("*") for line in said}

        try:
            wait_until(are_so, f"{nodes} are {state}", START_S)
        except TimeoutError as late:
            logs = [file.read_text()[-1500:] for file in sorted((self.dir / "log").iterdir())]
            raise TimeoutError("\n".join([str(late), *logs])) from late

    def ask(self, *command: str) -> str:
        """Run one of SLURM's commands and return what it says."""
        asked = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        return asked.stdout

    # --- Underneath ---

    def _connect(self) -> None:
        """Lay a cable from each node and from here to a switch that no firewall rule knows of."""
        switch = f"{self.prefix}switch"
        must("ip", "netns", "add", switch)
        must("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        must("ip", "-n", switch, "link", "set", "br0", "up")
        host = f"{self.prefix}host"
        must("ip", "link", "add", host, "type", "veth", "peer", "name", "host", "netns", switch)
        must("ip", "-n", switch, "link", "set", "host", "master", "br0", "up")
        must("ip", "addr", "add", f"{self.net}.1/24", "dev", host)
        must("ip", "link", "set", host, "up")
        for index, node in enumerate(NODES, 11):
            space = f"{self.prefix}{node}"
            must("ip", "netns", "add", space)
            veth = ("link", "add", node, "type", "veth", "peer", "name", "eth0", "netns", space)
            must("ip", "-n", switch, *veth)
            must("ip", "-n", switch, "link", "set", node, "master", "br0", "up")
            must("ip", "-n", space, "addr", "add", f"{self.net}.{index}/24", "dev", "eth0")
            must("ip", "-n", space, "link", "set", "lo", "up")
            must("ip", "-n", space, "link", "set", "eth0", "up")

    def _daemon(self, name: str, *command: str) -> None:
        """Start a process that is nobody's child, and write its number down."""
        pid_file = self.dir / "pids" / name
        script = 'echo $$ >"$0" && exec "$@"'
        with (self.dir / "log" / f"{name}.out").open("wb") as output:
            subprocess.run(
                ["setsid", "--fork", "bash", "-c", script, str(pid_file), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "SLURM_CONF": str(self.dir / "etc" / "slurm.conf")},
                check=True,
            )

    def _pid(self, name: str) -> int | None:
        """Return the number of a process of ours that lives; numbers are used again by others."""
        try:
            pid = int((self.dir / "pids" / name).read_text())
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        except (OSError, ValueError):
            return None
        return pid if state != "Z" and str(self.dir) in command else None

    def _end(self, name: str, number: signal.Signals) -> None:
        for sent in (number, signal.SIGKILL):
            pid = self._pid(name)
            if pid is not None:
                os.kill(pid, sent)
                try:
                    wait_until(lambda: self._pid(name) is None, f"{name} has ended", 5)
                except TimeoutError:
                    continue
            break
        (self.dir / "pids" / name).unlink(missing_ok=True)


def look_for_programs() -> None:
    """Look for what a cluster needs; `make system` installs it.

    Raises:
        NoCluster: with what is missing.
    """
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise NoCluster(f"no {', '.join(missing)}; `make system` installs what is missing")


def wait_until(is_so: Callable[[], bool], what: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:g} s: {what}")
        time.sleep(0.05)


def quietly(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def must(*command: str) -> None:
    done = quietly(*command)
    if done.returncode:
        raise NoCluster(f"{' '.join(command)}: {done.stderr.strip()}")


def start_cluster() -> Cluster:
    """Return a cluster that runs.

    Raises:
        NoCluster: with the reason, if this machine cannot have one.
    """
    cluster = Cluster.take()
    try:
        cluster.start()
    except PermissionError as error:
        cluster.stop()
        raise NoCluster(f"root may not do everything here: {error}") from error
    except BaseException:
        cluster.stop()
        raise
    return cluster


def main() -> None:
    began = time.monotonic()
    one = start_cluster()
    print(f"export SLURM_CONF={one.dir}/etc/slurm.conf  # up in {time.monotonic() - began:.1f} s")
    print("Ctrl-C stops it", flush=True)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        signal.pause()
    except KeyboardInterrupt:
        one.stop()


if __name__ == "__main__":
    main()
