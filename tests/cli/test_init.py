"""`lockstep init`: launch files that a machine can read, and that start the script they are for."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lockstep.cli.init import KINDS, init
from lockstep.errors import ConfigError
from lockstep.testing import free_port

BIN = Path(sys.executable).parent
# Who am I, and with whom: written by every rank, without torch, so that it takes a moment.
SCRIPT = """import os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
said = " ".join([*(os.environ.get(name, "-") for name in names), *sys.argv[1:]])
with pathlib.Path("said.txt").open("a") as file:
    file.write(said + "\\n")
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder that holds a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def run(command: str, folder: Path, **env: str) -> list[str]:
    """Run a command line and return what the ranks wrote, sorted."""
    (folder / "said.txt").unlink(missing_ok=True)
    ended = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return sorted((folder / "said.txt").read_text().splitlines())


def test_the_debuggers_file_is_strict_json_with_the_guides_keys(project: Path) -> None:
    said = init("vscode", "train.py", ["--distributed", "--layers", "50"], force=False)
    assert said[0] == "wrote .vscode/launch.json"
    (entry,) = json.loads((project / ".vscode" / "launch.json").read_text())["configurations"]
    assert entry == {
        "name": "Debug DDP Training",
        "type": "python",
        "request": "launch",
        "program": "${workspaceFolder}/train.py",
        "console": "integratedTerminal",
        "args": ["--distributed", "--layers", "50"],
        "env": {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "12355",
        },
    }


@pytest.mark.timeout(300)
def test_the_scripts_start_the_script_with_its_flags_and_more(project: Path) -> None:
    said = init("scripts", "train.py", ["--name", "two words"], force=False)
    assert [line for line in said if "use" in line] == [
        "  use: ./train.sh",
        "  use: ./train_multi_gpu.sh 2",
        "  use: bash train_torchrun.sh",
        "  use: bash train_ddp.sh",
    ]
    more = "--name two words --lr 1"
    assert run("./train.sh --lr 1", project) == [f"- - - {more}"]
    both = [f"0 2 0 {more}", f"1 2 1 {more}"]
    assert run("./train_multi_gpu.sh 2 --lr 1", project) == both
    assert run("bash train_torchrun.sh --lr 1", project) == both
    assert run("bash train_ddp.sh --lr 1", project) == both
    assert run("NUM_GPUS=1 bash train_torchrun.sh", project) == ["0 1 0 --name two words"]


@pytest.mark.timeout(300)
def test_accelerate_starts_two_processes_with_its_file(project: Path) -> None:
    said = init("accelerate", "train.py", [], force=False)
    single, multi = (
        yaml.safe_load((project / f"accelerate_config_{nodes}_node.yaml").read_text())
        for nodes in ("single", "multi")
    )
    assert single["distributed_type"] == multi["distributed_type"] == "MULTI_GPU"
    assert (single["num_machines"], single["num_processes"]) == (1, 2)
    assert (multi["num_machines"], multi["num_processes"]) == (2, 8)
    assert single["mixed_precision"] == "no", "and not false"
    command = said[-1].removeprefix("  use: ")
    assert command.startswith("accelerate launch --config_file ")
    port = f"launch --main_process_port {free_port()}"
    assert run(command.replace("launch", port, 1), project) == ["0 2 0", "1 2 1"]


# --- SLURM -------------------------------------------------------------------

FAKE_SRUN = """#!/usr/bin/env bash
# A stand-in for srun: starts its command once per node, here, and passes USR1 on.
while [[ $1 == -* ]]; do shift; done
trap 'kill -USR1 $first $second' USR1
SLURM_PROCID=0 SLURM_NODEID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_NODEID=1 "$@" & second=$!
finish() { while :; do wait $1; code=$?; kill -0 $1 2>/dev/null || return $code; done; }
finish $first; code=$?
finish $second
exit $code
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
# A stand-in for scontrol: both nodes are this machine, and what is requeued is written down.
[[ $1 == show ]] && printf '127.0.0.1\\n127.0.0.1\\n' || echo "$@" >> requeued.txt
"""
JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_GPUS_PER_NODE": "h100:1",
    "SLURM_PROCID": "0",  # as in every batch script
}


@pytest.fixture
def slurm(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the batch script, and put stand-ins for SLURM's commands before the real ones."""
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        path = project / "fake_slurm" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{project / 'fake_slurm'}:{os.environ['PATH']}")
    assert init("slurm", "train.py", [], force=False)[-1].endswith(
        "sbatch scripts/train_slurm_multi_node.sh"
    )
    return project / "scripts" / "train_slurm_multi_node.sh"


@pytest.mark.timeout(300)
def test_the_batch_script_asks_for_what_the_guide_does_and_runs_on_two_nodes(
    slurm: Path, project: Path
) -> None:
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", slurm.read_text(), re.MULTILINE))
    assert (asked["nodes"], asked["gpus-per-node"], asked["partition"]) == ("2", "4", "gpu")
    assert asked["output"] == "logs/train_%j.out"
    assert (project / "logs").is_dir(), "or SLURM cannot write there"
    assert asked["signal"].startswith("B:USR1@")
    assert "requeue" in asked
    assert run(f"bash {slurm} --lr 1", project, **JOB) == ["0 2 0 --lr 1", "1 2 0 --lr 1"]
    assert not (project / "requeued.txt").exists()


@pytest.mark.timeout(300)
def test_a_job_that_is_warned_saves_and_goes_back_into_the_queue(
    slurm: Path, project: Path
) -> None:
    warned = "import os, pathlib, signal, sys, time\n"
    warned += "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(138))\n"
    warned += SCRIPT + "time.sleep(60)\n"
    (project / "train.py").write_text(warned)
    script = (
        f"bash {slurm} & job=$!\n"
        "while [ ! -f said.txt ] || [ $(wc -l < said.txt) -lt 2 ]; do sleep 0.1; done\n"
        "kill -USR1 $job; wait $job; echo $? > code.txt"
    )
    assert run(script, project, **JOB) == ["0 2 0", "1 2 0"]
    assert (project / "code.txt").read_text() == "138\n"
    assert (project / "requeued.txt").read_text() == "requeue 4711\n"


def test_the_batch_script_keeps_words_as_they_were_typed(project: Path) -> None:
    typed = ["--name", "two words", "--home", "$HOME", "--said", "it's"]
    init("slurm", "train.py", typed, force=False)
    fakes = {"srun": 'while [[ $1 == --* ]]; do shift; done; "$@"', "scontrol": "echo node1"}
    fakes["lockstep"] = "printf '%s\\n' \"$@\" > words.txt"
    for name, text in fakes.items():
        (project / name).write_text(f"#!/bin/bash\n{text}\n")
        (project / name).chmod(0o755)
    env = {**os.environ, **JOB, "PATH": f"{project}:{os.environ['PATH']}"}
    script = project / "scripts" / "train_slurm_multi_node.sh"
    subprocess.run(["bash", script, "--lr", "1 2"], cwd=project, env=env, check=True, timeout=30)
    words = (project / "words.txt").read_text().splitlines()
    assert words[words.index("train.py") :] == ["train.py", *typed, "--lr", "1 2"]


def test_a_name_that_holds_a_word_of_the_template_stays_whole(project: Path) -> None:
    init("slurm", "SYSTEM/train.py", ["--STEM"], force=False)
    text = (project / "scripts" / "train_slurm_multi_node.sh").read_text()
    assert "train SYSTEM/train.py --STEM" in text
    # Or srun ends the launchers that are still saving, with 143, and the job is not queued again.
    assert "srun --kill-on-bad-exit=0 --wait=60 bash" in text
    assert "#SBATCH --job-name=train\n" in text


# --- All kinds ---------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_overwritten_unless_forced(kind: str, project: Path) -> None:
    init(kind, "train.py", [], force=False)
    files = [p for p in project.rglob("*") if p.is_file() and p.name != "train.py"]
    for file in files:
        if file.suffix == ".sh":
            subprocess.run(["bash", "-n", str(file)], check=True)
            assert os.access(file, os.X_OK)
        file.write_text("mine")
    with pytest.raises(ConfigError, match="already\n  try: pass --force"):
        init(kind, "train.py", [], force=False)
    assert {file.read_text() for file in files} == {"mine"}
    init(kind, "train.py", [], force=True)
    assert "mine" not in {file.read_text() for file in files}


def test_one_file_in_the_way_and_none_is_written(project: Path) -> None:
    (project / "train_ddp.sh").write_text("mine")
    with pytest.raises(ConfigError, match="train_ddp.sh exists already"):
        init("scripts", "train.py", [], force=False)
    assert not (project / "train.sh").exists()


def test_a_script_elsewhere_below_is_started_from_here(project: Path) -> None:
    (project / "my code").mkdir()
    shutil.move(project / "train.py", project / "my code" / "go.py")
    init("scripts", "my code/go.py", [], force=False)
    assert run("./train.sh", project) == ["- - -"]


@pytest.mark.parametrize(
    ("kind", "script", "said"),
    [
        ("slrum", "train.py", "nothing to generate for 'slrum'\n  try: use slurm"),
        ("slurm", "/tmp/train.py", "/tmp/train.py is not inside this folder"),
        ("slurm", "../train.py", "../train.py is not inside this folder"),
    ],
)
def test_a_mistake_is_one_line_and_something_to_try(kind: str, script: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        init(kind, script, [], force=False)


def test_a_script_that_is_not_there_yet_is_mentioned(project: Path) -> None:
    (project / "train.py").unlink()
    assert "there is no train.py here yet" in "\n".join(init("vscode", "train.py", [], force=False))
