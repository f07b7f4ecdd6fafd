"""Stop runs at many moments of a long evaluation, and see that each one loses nothing.

    python benchmarks/stop_in_evaluation.py [--ways python launch "one rank" slurm] [--moments 20]
        [--evaluation-s 200] [--at-once 10] [--grace-s 60] [--json FILE]

A run saves at step 2 and begins at step 3 an evaluation that sleeps in each of its 100 batches.
It gets SIGTERM at one of several moments, evenly spread over the evaluation: as one process, as
two ranks through their launcher, as two ranks of which one alone is signalled, and as a job on two
nodes of a real SLURM (`scancel`, which kills what is left after `--grace-s`; needs root). Good is
a run that saves step 3 without the evaluation, leaves with 143, and, started again, makes the
evaluation first and then ends with the weights and metrics of a run that nobody stopped. Prints a
line for each trial and a table; exit code 1 when one is not good.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep import CheckpointStore, RunConfig, fit, read_events
from lockstep.errors import LockstepError
from lockstep.task import Context
from lockstep.testing import TinyTask

BIN = Path(sys.executable).parent
SCRIPT = Path(__file__).resolve()
SLURM = SCRIPT.parents[1] / "tests" / "slurm"
WAYS = ("python", "launch", "one rank", "slurm")
SAVED_STEP, EVALUATED_STEP, NUM_STEPS = 2, 3, 6
NUM_BATCHES = 100
START_S = 300.0
"""How long a run may take to come to its evaluation, and how long it may take to stop."""


# --- What is run ------------------------------------------------------------------------------


class SlowToEvaluate(TinyTask):
    """Sleeps in each held-out batch, and says when it begins and who it is."""

    def __init__(self, folder: Path, evaluation_s: float) -> None:
        super().__init__(num_samples=24, num_held_out=2 * NUM_BATCHES)
        self.folder = folder
        self.evaluation_s = evaluation_s

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> Any:
        pid = self.folder / f"pid_{context.world.rank}"
        if not pid.exists():
            pid.write_text(str(os.getpid()))
        time.sleep(self.evaluation_s * context.world.size / NUM_BATCHES)
        return super().evaluate(model, batch, context)


def train(folder: Path, evaluation_s: float) -> int:
    """Train, on as many ranks as were launched; return the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    config = RunConfig.parse(
        {
            "output_dir": str(folder / "run"),
            "max_steps": NUM_STEPS,
            "batch": {"batch_size": 2, "global_batch_size": 4},
            "evaluation": {"every_steps": EVALUATED_STEP, "save_best": True},
            "checkpoint": {"every_epochs": None, "every_steps": SAVED_STEP},
            "sinks": {"curves": False},
            "device": "cpu",
        }
    )
    return fit(SlowToEvaluate(folder, evaluation_s), config).exit_code


# --- One trial --------------------------------------------------------------------------------


@dataclass
class Trial:
    """One run that was stopped and started again."""

    way: str
    moment_s: float
    exit_code: int | None = None
    stop_s: float = 0.0
    """From the signal to the end of every process."""
    saved_step: int | None = None
    faults: str = ""

    def __str__(self) -> str:
        verdict = self.faults or "saved, evaluated first on resume, same bits"
        return (
            f"{self.way:<9} {self.moment_s:6.1f} s  exit {self.exit_code}  after {self.stop_s:5.1f}"
            f" s  step {self.saved_step}  {verdict}"
        )


@dataclass
class Way:
    """One way to start a run and to stop it."""

    name: str
    num_ranks: int
    begin: Callable[[Path, float], "subprocess.Popen[bytes]"]
    """Start the run in a folder, with so long an evaluation."""
    stop: Callable[["subprocess.Popen[bytes]", Path], None]
    """Ask it to stop."""


def begin_here(command: list[str | Path], folder: Path, evaluation_s: float) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [*map(str, command), str(SCRIPT), "train", str(folder), str(evaluation_s)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def stop_here(process: Any, folder: Path) -> None:
    os.kill(process.pid, signal.SIGTERM)


def stop_last_rank(process: Any, folder: Path) -> None:
    os.kill(int((folder / "pid_1").read_text()), signal.SIGTERM)


def attempt(way: Way, folder: Path, moment_s: float, evaluation_s: float) -> Trial:
    """Start a run and stop it in its evaluation."""
    trial = Trial(way.name, moment_s)
    process = way.begin(folder, evaluation_s)
    try:
        began = wait_for(folder, process, way.num_ranks)
        time.sleep(max(0.0, began + moment_s - time.time()))
        asked = time.monotonic()
        way.stop(process, folder)
        trial.exit_code = process.wait(START_S)
        trial.stop_s = time.monotonic() - asked
    except (subprocess.TimeoutExpired, TimeoutError) as error:
        trial.faults = f"{type(error).__name__}: {error}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return trial


def wait_for(folder: Path, process: Any, num_ranks: int) -> float:
    """Return when the evaluation began, once every rank is in it."""
    deadline = time.monotonic() + START_S
    marks = [folder / f"pid_{rank}" for rank in range(num_ranks)]
    while not all(mark.exists() and mark.read_text() for mark in marks):
        if process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError("it did not come to its evaluation")
        time.sleep(0.05)
    return max(mark.stat().st_mtime for mark in marks)


def outcome(folder: Path) -> tuple[dict[int, Any], dict[str, Any]]:
    """Return the metrics of each evaluation, and the final weights."""
    found = [event for event in read_events(folder / "run") if event["event"] == "evaluation"]
    checkpoint = store(folder).latest()[0]
    assert checkpoint is not None
    weights = {name: value.tolist() for name, value in checkpoint.load("model").items()}
    return {event["step"]: event["metrics"] for event in found}, weights


def store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder / "run" / "checkpoints", recipe="tiny")


def faults_of(folder: Path, trial: Trial, way: Way, undisturbed: Any) -> list[str]:
    """Judge what a stopped run left, start it again, and judge that."""
    faults = []
    events = list(read_events(folder / "run", raw=True))
    stops = [event.get("exit_code") for event in events if event["event"] == "stop"]
    if stops != [143] or (trial.way != "slurm" and trial.exit_code != 143):
        faults.append(f"exit code {trial.exit_code}, stops {stops}")
    if any(event["event"] == "evaluation" for event in events):
        faults.append("the evaluation went on to its end")
    checkpoint, _ = store(folder).latest()
    trial.saved_step = checkpoint.step if checkpoint else None
    if checkpoint is None or checkpoint.step != EVALUATED_STEP:
        faults.append(f"saved step {trial.saved_step}")
    elif not checkpoint.load("progress")["evaluation_pending"]:
        faults.append("no evaluation owed")
    code = way.begin(folder, 0.0).wait(START_S)
    if code:
        faults.append(f"the resumed run ended with {code}")
    kinds = [event["event"] for event in read_events(folder / "run", raw=True)]
    if "resume" not in kinds or kinds[kinds.index("resume") + 1] != "evaluation":
        faults.append("the resumed run did not evaluate first")
    if outcome(folder) != undisturbed:
        faults.append("another result than undisturbed")
    return faults


# --- On a SLURM cluster -----------------------------------------------------------------------


@contextmanager
def slurm(grace_s: int) -> Iterator[Way]:
    """Start a cluster that gives cancelled jobs so long; yield how to submit and to cancel."""
    sys.path.insert(0, str(SLURM))
    from cluster import start_cluster  # type: ignore[import-not-found]

    cluster = start_cluster()
    try:
        conf = cluster.dir / "etc" / "slurm.conf"
        conf.write_text(re.sub("KillWait=.*", f"KillWait={grace_s}", conf.read_text()))
        cluster.ask("scontrol", "reconfigure")
        now = cluster.ask("scontrol", "show", "config")
        assert re.search(rf"KillWait += {grace_s} sec", now), "SLURM has not taken the grace"

        def begin(folder: Path, evaluation_s: float) -> Any:
            folder.mkdir(parents=True, exist_ok=True)
            words = ["submit", "--nodes", "2", "--cpus-only", "--time", "30", str(SCRIPT)]
            with (folder / "output.txt").open("ab") as output:
                return subprocess.Popen(
                    [str(BIN / "lockstep"), *words, "train", str(folder), str(evaluation_s)],
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**cluster.env, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )

        def stop(process: Any, folder: Path) -> None:
            said = (folder / "output.txt").read_text()
            (job_id,) = re.findall(r"lockstep: job (\d+), log", said)
            cluster.ask("scancel", job_id)

        yield Way("slurm", 2, begin, stop)
    finally:
        cluster.stop()


# --- All of them ------------------------------------------------------------------------------


def stop_all(way: Way, args: argparse.Namespace, root: Path) -> list[Trial]:
    """Stop runs of one way at every moment, some of them at a time."""
    undisturbed = root / f"{way.name}_undisturbed"
    way.begin(undisturbed, 0.0).wait(START_S)
    expected = outcome(undisturbed)

    def one(index: int) -> Trial:
        moment_s = (index + 0.5) * args.evaluation_s / args.moments
        folder = root / f"{way.name}_{index}"
        trial = attempt(way, folder, moment_s, args.evaluation_s)
        if not trial.faults:
            try:
                faults = faults_of(folder, trial, way, expected)
            except (LockstepError, OSError, AssertionError, subprocess.TimeoutExpired) as error:
                faults = [f"{type(error).__name__}: {error}"]
            trial.faults = "; ".join(faults)
        print(trial, flush=True)
        return trial

    # Those that wait longest first, or the last ones would wait alone.
    with ThreadPoolExecutor(args.at_once) as pool:
        return list(pool.map(one, reversed(range(args.moments))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--evaluation-s", type=float, default=200.0)
    parser.add_argument("--at-once", type=int, default=10)
    parser.add_argument("--grace-s", type=int, default=60, help="SLURM's KillWait")
    parser.add_argument("--json", help="write the trials here, too")
    args = parser.parse_args()
    launch = [BIN / "lockstep", "launch", "--gpus", "2"]
    here = (
        Way("python", 1, partial(begin_here, [sys.executable]), stop_here),
        Way("launch", 2, partial(begin_here, launch), stop_here),
        Way("one rank", 2, partial(begin_here, launch), stop_last_rank),
    )
    root = Path(tempfile.mkdtemp(prefix="stop_in_evaluation_"))
    trials: list[Trial] = []
    try:
        for way in here:
            if way.name in args.ways:
                trials += stop_all(way, args, root)
        if "slurm" in args.ways:
            with slurm(args.grace_s) as way:
                trials += stop_all(way, args, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"\n{'way':<10}{'good':>8}{'median stop':>14}{'longest':>10}")
    for name in args.ways:
        own = sorted((trial for trial in trials if trial.way == name), key=lambda t: t.stop_s)
        num_good = sum(not trial.faults for trial in own)
        median_s, longest_s = own[len(own) // 2].stop_s, own[-1].stop_s
        print(f"{name:<10}{num_good:>4}/{len(own)}{median_s:>12.1f} s{longest_s:>8.1f} s")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(trial) for trial in trials], indent=2))
    return int(any(trial.faults for trial in trials))


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        raise SystemExit(train(Path(sys.argv[2]), float(sys.argv[3])))
    raise SystemExit(main())
