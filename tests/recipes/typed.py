"""A command line, typed in a copy of a recipe's folder, in miniature."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
LIMIT_S = 150
MADE = ("output", "data", "wandb", "log", "saves*", "checkpoints", "rehearsal", "*.out", "*.err")


@dataclass(frozen=True)
class Ended:
    """What a command has said, and where it ran."""

    out: str
    err: str
    folder: Path

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def place(recipe: str, folder: Path) -> Path:
    """Copy a recipe's folder, and return where its guide's commands are typed."""
    copy = folder / "recipes" / recipe
    shutil.copytree(ROOT / "recipes" / recipe, copy, ignore=shutil.ignore_patterns(*MADE))
    return copy.parent if recipe == "atlas" else copy


def environment(**more: str) -> dict[str, str]:
    path = f"{BIN}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "LOCKSTEP_REHEARSAL": "1", "OMP_NUM_THREADS": "1", **more}


def stand_in(name: str, script: str, folder: Path, others: str | None = None) -> str:
    """Put a program in front of all others, and return the PATH on which it is found."""
    path = folder / "stand_ins" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return f"{path.parent}:{others or f'{BIN}:' + os.environ['PATH']}"


def run(command: str, folder: Path, code: int = 0, **more: str) -> Ended:
    """Run it to its end, which must be this one; whatever it started ends with it."""
    started = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = started.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        out, err = started.communicate()
        pytest.fail("\n".join([f"still running after {LIMIT_S} s:", out, err]))
    assert started.returncode == code, out + err
    return Ended(out, err, folder)
