"""A job of the test cluster, followed as a user follows it, and what its run leaves behind."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster, wait_until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BIN = Path(sys.executable).parent
LIMIT_S = 100.0


class Submitted:
    """`lockstep submit`, followed by a process of ours, and the job it stands for."""

    def __init__(self, cluster: Cluster, folder: Path, words: tuple[str, ...]) -> None:
        self.cluster = cluster
        self.folder = folder
        self.output = folder / "followed.txt"
        self.began = time.time()
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [str(BIN / "lockstep"), "submit", *words],
                cwd=folder,
                env={**cluster.env, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def job_id(self) -> str:
        """Return the number SLURM gave it."""
        wait_until(lambda: "lockstep: job " in self.text, f"submitted:\n{self.text}", LIMIT_S)
        found = re.search(r"lockstep: job (\d+), log", self.text)
        assert found, self.text
        return found[1]

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has taken so many steps."""
        self._wait(lambda: last_step(self.folder / "run") >= step, f"step {step}")

    def wait_for_text(self, words: str) -> None:
        """Wait until the log, as it is followed, says so."""
        self._wait(lambda: words in self.text, words)

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        def come_or_over() -> bool:
            return is_so() or self.process.poll() is not None

        try:
            wait_until(come_or_over, what, LIMIT_S)
        except TimeoutError as late:
            raise TimeoutError(f"{late}\n{self.text}") from None
        assert is_so(), f"it ended before {what}:\n{self.text}"

    def finish(self) -> int:
        """Return the exit code."""
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"ran for over {LIMIT_S:g} s:\n{self.text}")

    def end(self) -> None:
        """Take the job from the cluster, if it is still there."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if re.search(r"lockstep: job (\d+), log", self.text):
            self.cluster.ask("scancel", "--signal=KILL", "--full", self.job_id)
            self.cluster.ask("scancel", self.job_id)


Submit = Callable[..., Submitted]


def events(folder: Path) -> list[dict[str, object]]:
    """Return what the first rank of a run wrote down."""
    path = folder / "events" / "rank_0.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def last_step(folder: Path) -> int:
    """Return the last step of a run, or -1."""
    steps = [int(str(one["step"])) for one in events(folder) if one["event"] == "step"]
    return max(steps, default=-1)


def resumed_at(folder: Path) -> list[int]:
    """Return at which steps a run went on."""
    return [int(str(one["step"])) for one in events(folder) if one["event"] == "resume"]


def weights(folder: Path, step: int) -> bytes:
    """Return the weights of a run after a step, as they lie on the disk."""
    return (folder / "checkpoints" / f"step_{step:08d}" / "model.safetensors").read_bytes()


def processes_of(folder: Path) -> list[str]:
    """Return the commands of living processes that mention a folder, or work in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if "train_steps.py" in command and os.readlink(path / "cwd") == str(folder):
                found.append(command)
        except OSError:
            continue
    return found
