"""The commands of the guides, all thirty forms, run as printed: one table, one test.

A row says what a guide prints, how many processes that starts, and what must be seen: lines of
the first rank, each once and in this order; the steps in the record of every rank; files. All
run in miniature (LOCKSTEP_REHEARSAL=1), in a copy of the recipe's folder. The table, with
seconds and what was seen, is printed at the end of the session (`conftest.py`).
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from lockstep import read_events
from lockstep.testing import free_port

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "slurm")]

from cluster import NoCluster, start_cluster, wait_until  # noqa: E402
from typed import BIN, LIMIT_S, Ended, environment, place, run, stand_in  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # waiting for a port counts as time


# --- How a form is started -------------------------------------------------------


def in_shell(form: "Form", folder: Path) -> Ended:
    """Type it."""
    return run(form.command, folder, **form.programs())


def with_gpus(form: "Form", folder: Path) -> Ended:
    """Type it where nvidia-smi, or what stands in for it, lists as many GPUs as processes."""
    listing = f"for i in $(seq {form.processes}); do echo GPU $i; done"
    programs = form.programs()
    path = stand_in("nvidia-smi", listing, folder.parent, programs.pop("PATH", None))
    return run(form.command, folder, PATH=path, **programs)


def once_per_gpu(form: "Form", folder: Path) -> Ended:
    """Type what the guide shows for the first GPU, then the same for each of the others."""
    first = form.command + '\nstarted="$started $!"'
    names = r"\b(RANK|LOCAL_RANK|CUDA_VISIBLE_DEVICES)=0"
    each = [re.sub(names, rf"\g<1>={gpu}", first) for gpu in range(form.processes)]
    wait = "for one in $started; do wait $one || exit 1; done"
    typed = "\n".join(["trap 'kill $started 2>/dev/null' EXIT", *each, wait])
    return run(typed, folder, **form.programs())


def on_a_cluster(form: "Form", folder: Path) -> Ended:
    """Submit it to a real SLURM of two nodes, where another job has the port that guides name."""
    try:
        cluster = start_cluster()
    except NoCluster as reason:
        pytest.skip(f"no test cluster: {str(reason).splitlines()[0]}")

    def state(job_id: str) -> str:
        said = cluster.ask("scontrol", "show", "job", "--oneliner", job_id)
        return said.partition("JobState=")[2].partition(" ")[0]

    living = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "")  # it may not answer at once
    try:
        with cluster.port_taken("node1", 29500):
            said = run(form.command, folder, SLURM_CONF=cluster.env["SLURM_CONF"]).out
            job_id = said.split()[-1]
            assert said == f"Submitted batch job {job_id}\n"
            wait_until(lambda: state(job_id) not in living, "the job has ended", LIMIT_S)
        out, err = ((folder / f"logs/train_{job_id}.{kind}").read_text() for kind in ("out", "err"))
        assert state(job_id) == "COMPLETED", out + err
    finally:
        cluster.stop()
    return Ended(out, err, folder)


def in_a_browser(form: "Form", folder: Path) -> Ended:
    """Start the server, on a port of ours, and list the scalars that it shows."""
    port = free_port()
    server = subprocess.Popen(
        [str(BIN / form.command.split()[0]), *form.command.split()[1:], f"--port={port}"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def tags() -> list[str]:
        assert server.poll() is None, "it ended"
        try:
            url = f"http://127.0.0.1:{port}/data/plugin/scalars/tags"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return sorted(tag for one in json.load(answer).values() for tag in one)
        except (OSError, ValueError):
            return []

    try:
        wait_until(lambda: "val/miou" in tags(), "it shows what was measured", 60)
        return Ended("".join(f"shows {tag}\n" for tag in tags()), "", folder)
    finally:
        server.terminate()
        server.wait(20)


# --- What must be seen -----------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """One form, as a guide prints it."""

    number: int
    recipe: str
    processes: int
    command: str
    says: tuple[str, ...]
    """How lines begin that the first rank prints: each once, in this order."""
    folder: str
    """Where the run is."""
    makes: Mapping[str, int] = field(default_factory=dict)
    """How many files are in there, by pattern."""
    num_steps: int = 4
    from_step: int = 0
    start: Callable[["Form", Path], Ended] | None = in_shell
    """None: it is the last line of the form before it, which has started it."""
    more: Callable[[Ended, Path], None] | None = None
    """What else must be so."""

    warm: Path | None = None
    """Where programs are that have imported torch already; None starts fresh ones."""

    def programs(self) -> dict[str, str]:
        """Return the variables by which its processes are found; torchrun reads the second."""
        if self.warm is None:
            return {}
        path = f"{self.warm}:{BIN}:{os.environ['PATH']}"
        return {"PATH": path, "PYTHON_EXEC": str(self.warm / "python")}

    @property
    def name(self) -> str:
        return f"{self.number} {' '.join(self.command.split())[:40]}"

    def check(self, ended: Ended) -> str:
        """Look for everything, and return it in words."""
        assert "Traceback" not in ended.err, ended.err
        lines = ended.lines
        found = [[n for n, line in enumerate(lines) if line.startswith(s)] for s in self.says]
        for said, places in zip(self.says, found, strict=True):
            assert len(places) == 1, f"{said!r}: {len(places)} times in\n{ended.out}"
        assert found == sorted(found), f"in another order:\n{ended.out}"
        steps = [line for line in lines if line.startswith("step ")]
        assert len(steps) == self.num_steps, f"only the first rank prints\n{ended.out}"

        folder = ended.folder / self.folder
        last_step = self.from_step + self.num_steps
        ranks = sorted(int(path.stem[5:]) for path in folder.glob("events/rank_*.jsonl"))
        assert ranks == list(range(self.processes))
        for rank in ranks:
            taken = [one["step"] for one in read_events(folder, rank) if one["event"] == "step"]
            assert taken == list(range(1, last_step + 1)), f"rank {rank}"
        events = read_events(folder, raw=True)
        times = Counter((one["event"], one["step"]) for one in events)
        assert times["evaluation", last_step] == times["checkpoint", last_step] == 1
        made = {pattern: list(folder.glob(pattern)) for pattern in ("curves.png", *self.makes)}
        counts = {pattern: len(paths) for pattern, paths in made.items()}
        assert counts == {"curves.png": 1, **self.makes}, made
        for path in sum(made.values(), start=[]):
            check_file(path)
        if self.more:
            self.more(ended, folder)
        return f"{len(self.says)} lines, {sum(counts.values())} files, {told(events)}"


def told(events: Sequence[Mapping[str, Any]]) -> str:
    """Say what the first rank wrote down of its run: the batch, the rate, steps and losses."""
    begun = [one for one in events if one["event"] == "run_start"][-1]
    steps = [one for one in events if one["event"] == "step"]
    batch = begun["plan"]["batch_size"] * begun["plan"]["leaves_per_step"]
    return (
        f"batch {batch}, rate {begun['effective_lr']:g}, {len(steps)} steps, "
        f"loss {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}"
    )


def check_file(path: Path) -> None:
    """Check that a checkpoint has weights, a picture shows something, and no file is empty."""
    if path.parent.name == "checkpoints":
        path /= "model.safetensors"
    if path.suffix == ".png":
        with Image.open(path) as picture:
            low, high = picture.convert("L").getextrema()
            assert low < high, f"{path} shows nothing"
            assert picture.width >= 64
    assert path.stat().st_size > 0, path


def contract(size: int, ranks: int, accumulated: int = 1) -> str:
    """Return the line that states the batch."""
    total = size * ranks
    return (
        f"Batch size: {size} per GPU, {total} total (x {ranks}), "
        f"{total * accumulated} effective (x {accumulated} accumulated)"
    )


def rate(base: float, factor: float = 1) -> str:
    """Return the line that states the learning rate."""
    rule = "none" if factor == 1 else "linear"
    return f"Base LR: {base:g}, rule: {rule}, factor: {factor:g}, effective LR: {base * factor:g}"


def began(recipe: str, ranks: int, launcher: str = "torchrun") -> str:
    """Return the line that states who trains."""
    started = f"{launcher}, gloo" if ranks > 1 else "python"
    return f"lockstep: {recipe} on {ranks} x cpu (started by {started})"


# --- Protein ---------------------------------------------------------------------

PATHS = "--pdb_path data/cache --cache_dir data/cache"
SPLIT = f"{PATHS} --use_predefined_split --epochs 300 --batch_size 4"
DIFFUSION = "--use_discrete_diffusion --num_diffusion_steps 1000"
FULL = f"{SPLIT} {DIFFUSION} --warmup_epochs 20 --learning_rate 5e-4"
LAUNCH = "python -m torch.distributed.launch"


def protein(number: int, ranks: int, command: str, size: int = 4, lr: float = 5e-4) -> Form:
    diffusion = "启用 (时间步数: 1000)" if DIFFUSION in command else "未启用 (mask_ratio=0.15)"
    split = ["✅ 使用预定义的数据集划分"] if "--use_predefined_split" in command else []
    says = (
        began("protein", ranks),
        "设备: cpu",
        f"DDP 模式: 启用 (world_size={ranks})",
        "模型已包装为 DDP (device_id=0)",
        f"批次大小: {size} (每GPU)",
        f"总批次大小: {size * ranks} (所有GPU)",
        f"扩散模型: {diffusion}",
        *split,
        contract(size, ranks),
        rate(lr),
    )
    makes = {"checkpoints/best_model.pt": 1, "samples/*.fasta": 1}
    start = with_gpus if "nvidia-smi" in command else in_shell
    return Form(number, "protein", ranks, command, says, "rehearsal", makes, start=start)


PROTEIN = [
    protein(1, 2, f"torchrun --nproc_per_node=$(nvidia-smi -L | wc -l) train.py {FULL}"),
    protein(2, 4, f"torchrun --nproc_per_node=4 train.py {SPLIT} {DIFFUSION}"),
    protein(3, 2, f"torchrun --nproc_per_node=2 train.py {SPLIT}"),
    protein(4, 4, f"CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node=4 train.py {SPLIT}"),
    protein(5, 4, f"{LAUNCH} --nproc_per_node=4 train.py {SPLIT}"),
    protein(
        6, 4, "torchrun --nproc_per_node=4 train.py --learning_rate 1e-3 --batch_size 4", lr=1e-3
    ),
    protein(7, 2, "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 train.py"),
    protein(8, 8, f"torchrun --nproc_per_node=8 train.py {FULL} --save_dir checkpoints"),
    protein(
        9,
        2,
        f"torchrun --nproc_per_node=2 train.py {PATHS} --use_predefined_split --epochs 300 "
        f"--batch_size 8 {DIFFUSION}",
        size=8,
    ),
]

# --- Atlas -----------------------------------------------------------------------

CONFIG = "atlas/train.py --config atlas/configs/train_config.yaml"
TEN = f"torchrun --nproc_per_node=8 {CONFIG}"
BY_HAND = f"""\
export MASTER_ADDR=localhost
export MASTER_PORT=29500
export WORLD_SIZE=8
export RANK=0
export LOCAL_RANK=0
CUDA_VISIBLE_DEVICES=0 python {CONFIG} &"""


def check_measures(ended: Ended, folder: Path) -> None:
    """Every metric stands beside those of the two baselines."""
    names = {"pose_l1", "pose_l2", "gripper_accuracy"}
    both = {f"{kind}{name}" for kind in ("", "mean_", "repeat_") for name in names}
    for event in read_events(folder):
        if event["event"] == "evaluation":
            assert set(event["metrics"]) == {"loss", "pose_loss", "gripper_loss", *both}


def atlas(number: int, ranks: int, command: str, launcher: str = "torchrun") -> Form:
    says = (
        began("atlas", ranks, launcher),
        "Training setup:",
        "  Distributed: True",
        f"  World size: {ranks}",
        "  Rank: 0, Local rank: 0",
        f"  Base LR: 0.0001, Effective LR (scaled by {ranks}): {1e-4 * ranks:g}",
        contract(8, ranks, 2),
        rate(1e-4, ranks),
    )
    made = ("checkpoints/checkpoint_epoch_10.pt", "checkpoints/best_model.pt")
    makes = dict.fromkeys([*made, "samples/step_00000010.png"], 1)
    form = Form(number, "atlas", ranks, command, says, "rehearsal", makes, num_steps=10)
    return replace(form, more=check_measures)


RESUMED = atlas(13, 8, f"{TEN} --resume checkpoints/checkpoint_epoch_10.pt")
NEW = ("resumed at step 10 from ", "epoch 11 done", "epoch 12 done")
ATLAS = [
    (
        atlas(15, 8, f"export WANDB_API_KEY=your_key\n{TEN}"),
        replace(atlas(10, 8, TEN), start=None),
        replace(RESUMED, says=(*RESUMED.says, *NEW), from_step=10, num_steps=2),
    ),
    atlas(11, 8, f"{LAUNCH} --nproc_per_node=8 --master_port=29500 {CONFIG}"),
    replace(atlas(12, 8, BY_HAND, "env"), start=once_per_gpu),
    atlas(14, 4, f"CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node=4 {CONFIG}"),
]

# --- JiT -------------------------------------------------------------------------

IMAGES = "train.py --data_path ./data/train"
HUNDRED = "--batch_size 64 --epochs 100"
NAMED = '--use_wandb --wandb_project "jit-diffusion" --wandb_name "jit-v1-2gpu"'
PORT = "--nproc_per_node=2 --master_port=29500"


def jit(number: int, ranks: int, command: str, lr: float = 5e-5) -> Form:
    total = f"GPUs: {ranks}, batch size per GPU: 64, effective batch size: {64 * ranks}"
    script = [total] if command.startswith("./train_multi") else []
    makes = {
        "checkpoints/step_00000004": 1,
        "samples/step_00000004.png": 1,
        "wandb/offline-run-*": int("--use_wandb" in command),
    }
    says = (*script, began("jit", ranks), contract(64, ranks), rate(lr))
    return Form(number, "jit", ranks, command, says, "output/rehearsal", makes)


JIT = [
    jit(16, 2, "./train_multi_gpu.sh 2", 1e-4),
    jit(16, 4, "./train_multi_gpu.sh 4", 1e-4),
    jit(16, 1, "./train.sh"),
    jit(17, 2, f"torchrun {PORT} {IMAGES} {HUNDRED} --use_amp --use_wandb"),
    jit(18, 2, f"{LAUNCH} {PORT} {IMAGES} {HUNDRED}"),
    jit(
        19,
        2,
        f"torchrun {PORT} {IMAGES} --model JiT-B/4 --img_size 64 {HUNDRED} --lr 1e-4 --use_amp "
        f"{NAMED}",
        1e-4,
    ),
    jit(20, 2, f"torchrun --nproc_per_node=2 --master_port=29501 {IMAGES} {HUNDRED} --use_amp"),
]

# --- Segmentation ----------------------------------------------------------------

UNCHANGED = "warning: linear scaling multiplies the rate by 2, but the effective batch is still 16"


def check_log(ended: Ended, folder: Path) -> None:
    """The log file has the line of the epoch; a rate is warned of only if it alone grew."""
    (said,) = [line for line in ended.lines if line.startswith("Epoch[")]
    assert "], iou_all[0." in said
    assert (folder / "log.txt").read_text() == said + "\n"
    has_grown = contract(8, 2) not in ended.lines
    assert (UNCHANGED not in ended.lines) == has_grown


def segmentation(number: int, ranks: int, command: str, size: int = 16) -> Form:
    says = (
        began("segmentation", ranks),
        f"Effective lr : {1e-3 * ranks:g}",
        contract(size, ranks),
        f"Base LR: 0.001, rule: linear, factor: {ranks}, effective LR: {1e-3 * ranks:g}",
        " * IOU_All 0.",
        "Epoch[0",
    )
    folder = "log/res50_ASPP_lorm/rehearsal"
    makes = {"checkpoints/step_00000004": 1, "samples/step_00000004.png": 1, "**/*.tfevents.*": 1}
    return Form(number, "segmentation", ranks, command, says, folder, makes, more=check_log)


SEGMENTATION = [
    segmentation(21, 2, "bash train_torchrun.sh", 8),
    segmentation(21, 2, "bash train_ddp.sh", 8),
    segmentation(22, 4, "torchrun --nproc_per_node=4 --standalone train.py --distributed"),
    segmentation(23, 2, f"{LAUNCH} --nproc_per_node=2 --use_env train.py --distributed"),
    (
        segmentation(24, 1, "python train.py --layers 50 --model_type res50_ASPP_lorm"),
        Form(
            *(26, "segmentation", 1, "tensorboard --logdir=./log"),
            says=("shows train/learning_rate", "shows train/loss", "shows val/miou"),
            folder="log/res50_ASPP_lorm/rehearsal",
            from_step=4,
            num_steps=0,
            start=in_a_browser,
        ),
    ),
    segmentation(25, 1, "python train.py --distributed --local_rank=0"),
]

# --- CT-CLIP ---------------------------------------------------------------------

ON_ALL = "bash scripts/train_multi_gpu.sh"
ACCELERATE = "accelerate launch --config_file accelerate_config_single_node.yaml"


def ctclip(number: int, ranks: int, command: str) -> Form:
    says = (
        f"lockstep: ctclip on {ranks} x cpu (started by ",
        f"Distributed environment: {'MULTI_CPU' if ranks > 1 else 'NO'}",
        f"Number of processes: {ranks}",
        "Number of GPUs: 0",
        contract(4, ranks),
        f"Steps per epoch: {64 // 4 // ranks} (64 of 64 samples, 0 dropped)",
        rate(1.25e-6),
    )
    is_debug = "debug" in command
    folder = "saves_debug/rehearsal/ctclip_debug" if is_debug else "saves/rehearsal/ctclip"
    makes = {"checkpoints/step_00000004": 1}
    return Form(number, "ctclip", ranks, command, says, folder, makes)


CTCLIP = [
    (
        ctclip(27, 2, f"export CUDA_VISIBLE_DEVICES=0,1\n{ON_ALL}"),
        replace(ctclip(27, 2, ON_ALL), start=None),
    ),
    ctclip(28, 2, f"{ACCELERATE} train.py --config configs/base_config.yaml"),
    replace(ctclip(29, 8, "sbatch scripts/train_slurm_multi_node.sh"), start=on_a_cluster),
    ctclip(30, 1, "python train.py --config configs/debug_config.yaml"),
]

# Forms in brackets share a folder: each goes on where the one before it has ended.
PRINTED = [*PROTEIN, *ATLAS, *JIT, *SEGMENTATION, *CTCLIP]
SITTINGS = [(one,) if isinstance(one, Form) else one for one in PRINTED]
TABLE = [form for forms in SITTINGS for form in forms]


# These start fresh interpreters, every launcher and every recipe once; the others start processes
# that have imported torch already (`warm_python.py`).
FRESH = {3, 14, 16, 19, 23, 24, 26, 28, 29, 30}


# --- The test --------------------------------------------------------------------


@pytest.mark.parametrize("sitting", SITTINGS, ids=lambda forms: " + ".join(f.name for f in forms))
def test_the_guides_command_runs_as_printed(
    sitting: tuple[Form, ...],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    request: pytest.FixtureRequest,
) -> None:
    if sitting[0].processes > 1 and sitting[0].start is not on_a_cluster:
        request.getfixturevalue("fixed_ports")  # guides name them, so these forms take turns
    folder = place(sitting[0].recipe, tmp_path)
    before, ended = set(folder.iterdir()), None
    for form in sitting:
        row = {"form": form.number, "recipe": form.recipe, "processes": form.processes}
        row |= {"seconds": "", "seen": "NOT AS PRINTED", "command": " ".join(form.command.split())}
        record_property("guide form", row)
        began = time.monotonic()
        try:
            if form.start and form.number not in FRESH:
                form = replace(form, warm=request.getfixturevalue("warm_programs"))
            ended = form.start(form, folder) if form.start else ended
        except pytest.skip.Exception as skipped:
            row["seen"] = f"skipped: {skipped}"
            raise
        if form.start:
            row["seconds"] = f"{time.monotonic() - began:.1f}"
        row["seen"] = form.check(ended)
        if not form.start:
            row["seen"] += f"; as the last line of form {sitting[0].number}"
        made = {path.name for path in set(folder.iterdir()) - before}
        assert made == {Path(form.folder).parts[0]}, "and nothing else"


def test_all_thirty_forms_are_in_the_table() -> None:
    assert {form.number for form in TABLE} == set(range(1, 31))
    fresh = [form for form in TABLE if form.number in FRESH]
    assert {form.recipe for form in fresh} == {form.recipe for form in TABLE}
    started = " ".join(form.command for form in fresh)
    assert all(
        f"{name} " in started for name in ("torchrun", LAUNCH, "accelerate launch", "sbatch")
    )
    for before, form in zip(TABLE, TABLE[1:], strict=False):
        assert form.start or before.command.splitlines()[-1] == form.command


def module_of(recipe: str) -> ModuleType:
    """Return the tests of a recipe's other commands; `tests/test_docs.py` asks what they start."""
    path = HERE / recipe / f"test_{recipe}_commands.py"
    spec = importlib.util.spec_from_file_location(f"commands_of_{recipe}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
