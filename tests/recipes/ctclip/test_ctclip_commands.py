"""What `test_guide_commands.py` does not start: what is refused; launchers, to the last bit."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from typed import BIN, environment, place, run, stand_in

from lockstep.testing import free_port, run_ranks
from lockstep_recipes.ctclip.flags import build

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return place("ctclip", tmp_path)


def test_the_batch_script_refuses_a_file_that_says_something_else(folder: Path) -> None:
    script = folder / "scripts" / "train_slurm_multi_node.sh"
    head = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    said = dict(line.split()[1].split("=") for line in head)
    assert said["--nodes"] == "2"
    assert said["--gpus-per-node"] == "4"
    assert said["--partition"] == "gpu"
    assert said["--output"] == "logs/train_%j.out"
    assert (folder / Path(said["--error"]).parent).is_dir(), "or sbatch cannot write there"

    job = {
        "PATH": stand_in("scontrol", "printf 'node1\\nnode2\\n'", folder.parent),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_PER_NODE": "1",
    }
    refused = run("bash scripts/train_slurm_multi_node.sh", folder, code=2, **job)
    assert "says num_processes 8, the job has 2" in refused.err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "has no distributed_type"),
        ("distributed_type: MULTI_GPU\nmixed_precision: no", "unquoted"),
    ],
)
def test_the_script_refuses_a_bad_accelerate_file_in_one_line(folder, line, said) -> None:
    (folder / "accelerate_config_single_node.yaml").write_text(f"num_processes: 2\n{line}\n")
    ended = run("bash scripts/train_multi_gpu.sh", folder, code=2)
    assert said in ended.err
    assert "Traceback" not in ended.err


# --- launchers, to the last bit ------------------------------------------------------------------

STEPS = 120
LAUNCHERS = {
    "accelerate": "accelerate launch --config_file accelerate_config_single_node.yaml "
    "--main_process_port {port} train.py",
    "torchrun": "torchrun --nproc_per_node=2 --master_port={port} train.py",
}


@pytest.fixture
def configured(folder: Path, values) -> Path:
    """Return the recipe's folder with a settings file of a short run, 24 epochs of it."""
    steps = {"max_steps": STEPS, "max_epochs": 99, "save_every_n_epochs": 1e9}
    quiet = {"eval_every_n_epochs": 1e9, "eval_samples": 2}
    made = values({"data": {"batch_size": 2}, "training": steps, "validation": quiet})
    (folder / "config.yaml").write_text(yaml.safe_dump(made))
    return folder


def run_forked(folder: Path, name: str) -> None:
    """Run it on two ranks that no launcher starts."""
    words = ["--config", str(folder / "config.yaml"), "--set", f"experiment.name={name}"]
    run_ranks(2, lambda: build(words)().step)


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


def num_steps(folder: Path) -> int:
    return sum(event["event"] == "step" for event in events_of(folder))


def stop_in_mid_epoch(process: subprocess.Popen[str], folder: Path) -> int:
    """Ask the launcher to stop once a few more steps are done; return the step that was saved."""
    deadline, done = time.monotonic() + 90, num_steps(folder)
    while num_steps(folder) < done + 3:
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out = finish(process)
    assert process.returncode != 0, out
    saved = max((folder / "checkpoints").glob("step_*"))
    return int(saved.name[5:])


def test_launchers_agree_and_resume_to_the_last_bit(configured: Path, tmp_path: Path) -> None:
    """Begun by one launcher, stopped, taken up by the other, stopped, finished by the first."""
    saves = tmp_path / "saves"
    run_forked(configured, "straight")
    steps = [0]
    for launcher in LAUNCHERS:
        steps += [stop_in_mid_epoch(start(launcher, configured, "in_turn"), saves / "in_turn")]
    assert steps == sorted(set(steps)), "each went on"
    assert steps[-1] < STEPS
    last = start("accelerate", configured, "in_turn")
    out = finish(last)
    assert last.returncode == 0, out
    assert "MULTI_CPU" in out
    assert f"resumed at step {steps[-1]} from" in out
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, other = (
            (saves / run / f"checkpoints/step_{STEPS:08d}" / name).read_bytes()
            for run in ("straight", "in_turn")
        )
        assert one == other, name
    stops = [event for event in events_of(saves / "in_turn") if event["event"] == "stop"]
    assert [event["step"] for event in stops] == steps[1:]


def test_a_manifest_of_29500_volumes_has_the_guides_steps(
    configured, volumes, tmp_path, capfd
) -> None:
    line = (volumes / "train" / "manifest.jsonl").read_text().splitlines()[0]
    entry = json.loads(line) | {"volume": str(volumes / "train" / "volume_00000.npy")}
    (tmp_path / "many.jsonl").write_text((json.dumps(entry) + "\n") * 29_500)
    config = yaml.safe_load((configured / "config.yaml").read_text())
    config["data"] |= {"batch_size": 4}
    config["data"]["paths"]["train"] = str(tmp_path / "many.jsonl")
    config["training"] |= {"max_steps": 1}
    (configured / "config.yaml").write_text(yaml.safe_dump(config))
    run_forked(configured, "many")
    out = capfd.readouterr().out
    assert "\nSteps per epoch: 3687 (29496 of 29500 samples, 4 dropped)\n" in out
