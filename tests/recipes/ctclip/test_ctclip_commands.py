"""Every command of the guide runs as printed, in the recipe's folder, under rehearsal."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from lockstep import read_events
from lockstep.testing import free_port

RECIPE = Path(__file__).parents[3] / "recipes" / "ctclip"
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.timeout(600)

ACCELERATE = (
    "accelerate launch --config_file accelerate_config_single_node.yaml "
    "train.py --config configs/base_config.yaml"
)
# form: (command, ranks, the run's folder)
FORMS = {
    "27": ("bash scripts/train_multi_gpu.sh", 2, "saves/rehearsal/ctclip"),
    "27 on 0,1": (
        "export CUDA_VISIBLE_DEVICES=0,1\nbash scripts/train_multi_gpu.sh",
        2,
        "saves/rehearsal/ctclip",
    ),
    "28": (ACCELERATE, 2, "saves/rehearsal/ctclip"),
    "30": (
        "python train.py --config configs/debug_config.yaml",
        1,
        "saves_debug/rehearsal/ctclip_debug",
    ),
}


def environment(**more: str) -> dict[str, str]:
    path = f"{BIN}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "LOCKSTEP_REHEARSAL": "1", "OMP_NUM_THREADS": "1", **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("saves*", "data", "*.out", "*.err")
    return shutil.copytree(RECIPE, tmp_path / "ctclip", ignore=ignored)


def run(command: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=110,
    )


def check_run(ended: subprocess.CompletedProcess[str], ranks: int, folder: Path) -> None:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    kind = "MULTI_CPU" if ranks > 1 else "NO"
    for line in (
        f"Distributed environment: {kind}",
        f"Number of processes: {ranks}",
        "Number of GPUs: 0",
        f"Steps per epoch: {64 // 4 // ranks} (64 of 64 samples, 0 dropped)",
        "Base LR: 1.25e-06, rule: none, factor: 1, effective LR: 1.25e-06",
    ):
        assert lines.count(line) == 1, f"{line}\n{ended.stdout}"
    assert sum(line.startswith("step ") for line in lines) == 4
    kinds = [event["event"] for event in read_events(folder)]
    assert kinds.count("evaluation") == kinds.count("checkpoint") == 1
    for rank in range(ranks):
        assert len([e for e in read_events(folder, rank) if e["event"] == "step"]) == 4
    assert (folder / "checkpoints" / "step_00000004" / "model.safetensors").exists()


@pytest.mark.usefixtures("fixed_ports")
@pytest.mark.parametrize("form", FORMS)
def test_the_guides_command_runs_as_printed(form: str, folder: Path) -> None:
    command, ranks, made = FORMS[form]
    check_run(run(command, folder), ranks, folder / made)


FAKE_SRUN = """#!/usr/bin/env bash
# A stand-in for srun: starts its command once per node, here, with the rank of each.
while [[ $1 == -* ]]; do shift; done
SLURM_PROCID=0 SLURM_NODEID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_NODEID=1 "$@" & second=$!
wait $first; code=$?
wait $second && exit $code
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
# A stand-in for `scontrol show hostnames`: both nodes are this machine.
printf '127.0.0.1\\n127.0.0.1\\n'
"""


@pytest.fixture
def fake_slurm(tmp_path: Path) -> dict[str, str]:
    """Return the variables of a job on two nodes of one GPU, and stand-ins for its commands."""
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        path = tmp_path / "fake_slurm" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return {
        "PATH": f"{tmp_path / 'fake_slurm'}:{BIN}:{os.environ['PATH']}",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_PER_NODE": "1",
        "SLURM_PROCID": "0",  # as in every batch script
        "MAIN_PORT": str(free_port()),
    }


def test_the_batch_script_trains_on_two_nodes(folder: Path, fake_slurm: dict[str, str]) -> None:
    script = folder / "scripts" / "train_slurm_multi_node.sh"
    head = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    said = dict(line.split()[1].split("=") for line in head)
    assert said["--nodes"] == "2"
    assert said["--gpus-per-node"] == "4"
    assert said["--partition"] == "gpu"
    assert said["--output"] == "logs/train_%j.out"
    assert (folder / Path(said["--error"]).parent).is_dir(), "or sbatch cannot write there"

    refused = run("bash scripts/train_slurm_multi_node.sh", folder, **fake_slurm)
    assert refused.returncode == 2
    assert "says num_processes 8, the job has 2" in refused.stderr
    config = folder / "accelerate_config_multi_node.yaml"
    config.write_text(config.read_text().replace("num_processes: 8", "num_processes: 2"))
    ended = run("bash scripts/train_slurm_multi_node.sh", folder, **fake_slurm)
    check_run(ended, 2, folder / "saves/rehearsal/ctclip")


@pytest.mark.parametrize(
    ("line", "said"),
    [("", "has no distributed_type"), ("distributed_type: MULTI_GPU\nmixed_precision: no", "bare")],
)
def test_the_script_refuses_a_bad_accelerate_file_in_one_line(folder, line, said) -> None:
    (folder / "accelerate_config_single_node.yaml").write_text(f"num_processes: 2\n{line}\n")
    ended = run("bash scripts/train_multi_gpu.sh", folder)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


# --- launchers, to the last bit ------------------------------------------------------------------

STEPS = 60
LAUNCHERS = {
    "accelerate": "accelerate launch --config_file accelerate_config_single_node.yaml "
    "--main_process_port {port} train.py",
    "torchrun": "torchrun --nproc_per_node=2 --master_port={port} train.py",
}


@pytest.fixture
def configured(folder: Path, values) -> Path:
    """Return the recipe's folder with a settings file of a short run, seven epochs of it."""
    steps = {"max_steps": STEPS, "max_epochs": 99, "save_every_n_epochs": 1e9}
    quiet = {"eval_every_n_epochs": 1e9, "eval_samples": 2}
    made = values({"data": {"batch_size": 2}, "training": steps, "validation": quiet})
    (folder / "config.yaml").write_text(yaml.safe_dump(made))
    return folder


def start(launcher: str, folder: Path, name: str) -> subprocess.Popen[str]:
    command = LAUNCHERS[launcher].format(port=free_port())
    words = [*command.split(), "--config", "config.yaml", "--set", f"experiment.name={name}"]
    return subprocess.Popen(
        [str(BIN / words[0]), *words[1:]],
        cwd=folder,
        env=environment(LOCKSTEP_REHEARSAL="0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=100)
    return out


def events_of(folder: Path) -> list[dict[str, object]]:
    path = folder / "events" / "rank_0.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def stop_in_mid_epoch(process: subprocess.Popen[str], folder: Path) -> int:
    """Ask the launcher to stop once a few steps are done; return the step that was saved."""
    deadline = time.monotonic() + 90
    while sum(event["event"] == "step" for event in events_of(folder)) < 3:
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out = finish(process)
    assert process.returncode != 0, out
    (saved,) = (folder / "checkpoints").glob("step_*")
    return int(saved.name[5:])


def test_launchers_agree_and_resume_to_the_last_bit(configured: Path, tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    straight = start("accelerate", configured, "straight")
    assert "MULTI_CPU" in finish(straight)
    assert straight.returncode == 0
    final = f"checkpoints/step_{STEPS:08d}"
    names = ("model.safetensors", "optimizer.safetensors")
    expected = [(saves / "straight" / final / name).read_bytes() for name in names]
    for launcher in LAUNCHERS:
        step = stop_in_mid_epoch(start(launcher, configured, launcher), saves / launcher)
        assert 3 <= step < STEPS
        again = start(launcher, configured, launcher)
        out = finish(again)
        assert again.returncode == 0, out
        assert f"resumed at step {step} from" in out
        made = [(saves / launcher / final / name).read_bytes() for name in names]
        assert made == expected, launcher
    assert any(event["event"] == "stop" for event in events_of(saves / "torchrun"))


def test_a_manifest_of_29500_volumes_has_the_guides_steps(configured, volumes, tmp_path) -> None:
    line = (volumes / "train" / "manifest.jsonl").read_text().splitlines()[0]
    entry = json.loads(line) | {"volume": str(volumes / "train" / "volume_00000.npy")}
    (tmp_path / "many.jsonl").write_text((json.dumps(entry) + "\n") * 29_500)
    config = yaml.safe_load((configured / "config.yaml").read_text())
    config["data"] |= {"batch_size": 4}
    config["data"]["paths"]["train"] = str(tmp_path / "many.jsonl")
    config["training"] |= {"max_steps": 1}
    (configured / "config.yaml").write_text(yaml.safe_dump(config))
    out = finish(start("torchrun", configured, "many"))
    assert "\nSteps per epoch: 3687 (29496 of 29500 samples, 4 dropped)\n" in out
