"""The thirty command forms of the guides, and which test starts each of them as printed.

The commands are written out here a second time, from the guides, and compared with what the
recipes' tests really start: a form that is dropped or bent there is missed here. To start all
of them and see the table with seconds and results:

    python tests/recipes/test_guide_commands.py [FORM ...]
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
RUNS_AS_PRINTED = "test_the_guides_command_runs_as_printed"


@dataclass(frozen=True)
class Form:
    """One form: what the guide prints, and the test that starts it."""

    number: int
    recipe: str
    command: str
    processes: int
    test: str
    started: Callable[[ModuleType], str]
    """The command line, taken from the test's own module."""

    @property
    def node(self) -> str:
        return f"{HERE.name}/{self.recipe}/test_{self.recipe}_commands.py::{self.test}"


# --- The guides --------------------------------------------------------------

PATHS = "--pdb_path data/cache --cache_dir data/cache"
SPLIT = f"{PATHS} --use_predefined_split --epochs 300 --batch_size 4"
DIFFUSION = "--use_discrete_diffusion --num_diffusion_steps 1000"
FULL = f"{SPLIT} {DIFFUSION} --warmup_epochs 20 --learning_rate 5e-4"
PROTEIN = {
    1: (2, f"torchrun --nproc_per_node=$(nvidia-smi -L | wc -l) train.py {FULL}"),
    2: (4, f"torchrun --nproc_per_node=4 train.py {SPLIT} {DIFFUSION}"),
    3: (2, f"torchrun --nproc_per_node=2 train.py {SPLIT}"),
    4: (4, f"CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node=4 train.py {SPLIT}"),
    5: (4, f"python -m torch.distributed.launch --nproc_per_node=4 train.py {SPLIT}"),
    6: (4, "torchrun --nproc_per_node=4 train.py --learning_rate 1e-3 --batch_size 4"),
    7: (2, "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 train.py"),
    8: (8, f"torchrun --nproc_per_node=8 train.py {FULL} --save_dir checkpoints"),
    9: (
        2,
        f"torchrun --nproc_per_node=2 train.py {PATHS} --use_predefined_split --epochs 300 "
        f"--batch_size 8 {DIFFUSION}",
    ),
}
CONFIG = "atlas/train.py --config atlas/configs/train_config.yaml"
TEN = f"torchrun --nproc_per_node=8 {CONFIG}"
OLD = "python -m torch.distributed.launch"
IMAGES = "train.py --data_path ./data/train"
HUNDRED = "--batch_size 64 --epochs 100"
NAMED = '--use_wandb --wandb_project "jit-diffusion" --wandb_name "jit-v1-2gpu"'
JIT = {
    17: f"torchrun --nproc_per_node=2 --master_port=29500 {IMAGES} {HUNDRED} --use_amp --use_wandb",
    18: f"{OLD} --nproc_per_node=2 --master_port=29500 {IMAGES} {HUNDRED}",
    19: f"torchrun --nproc_per_node=2 --master_port=29500 {IMAGES} --model JiT-B/4 --img_size 64 "
    f"{HUNDRED} --lr 1e-4 --use_amp {NAMED}",
    20: f"torchrun --nproc_per_node=2 --master_port=29501 {IMAGES} {HUNDRED} --use_amp",
}
SEGMENTATION = {
    22: (4, "22", "torchrun --nproc_per_node=4 --standalone train.py --distributed"),
    23: (2, "23", f"{OLD} --nproc_per_node=2 --use_env train.py --distributed"),
    24: (1, "24", "python train.py --layers 50 --model_type res50_ASPP_lorm"),
    25: (1, "25", "python train.py --distributed --local_rank=0"),
}
ACCELERATE = (
    "accelerate launch --config_file accelerate_config_single_node.yaml "
    "train.py --config configs/base_config.yaml"
)


def by_form(form: str, ranks: int | None = None) -> Callable[[ModuleType], str]:
    """Return how to find a command in a module's FORMS."""

    def find(module: ModuleType) -> str:
        found = module.FORMS[form]
        text = found if isinstance(found, str) else found[0]
        return str(text.replace("{n}", str(ranks)))

    return find


def source_of(text: str) -> Callable[[ModuleType], str]:
    """Return how to find a command that stands in a test's own text."""

    def find(module: ModuleType) -> str:
        source = Path(str(module.__file__)).read_text()
        return text if text in source else f"not in {module.__file__}"

    return find


def hand_started(module: ModuleType) -> str:
    """Return form 12 with its loop over ranks unrolled to the lines of the first."""
    loop = module.FORMS["12"][0]
    wanted = ("export", "CUDA_VISIBLE_DEVICES")
    lines = [line.strip() for line in loop.splitlines() if line.strip().startswith(wanted)]
    return "; ".join(lines).replace("$k", "0")


BY_HAND = "; ".join(
    [
        "export MASTER_ADDR=localhost",
        "export MASTER_PORT=29500",
        "export WORLD_SIZE=8",
        "export RANK=0",
        "export LOCAL_RANK=0",
        f"CUDA_VISIBLE_DEVICES=0 python {CONFIG} &",
    ]
)
RESUMED = "test_the_guides_run_and_its_resume"
OTHERS = "test_the_guides_other_commands_run_as_printed"

TABLE = [
    *(
        Form(n, "protein", text, ranks, f"{RUNS_AS_PRINTED}[{n}-{ranks}]", by_form(str(n), ranks))
        for n, (ranks, text) in PROTEIN.items()
    ),
    Form(10, "atlas", TEN, 8, RESUMED, lambda module: str(module.TEN)),
    Form(
        11,
        "atlas",
        f"{OLD} --nproc_per_node=8 --master_port=29500 {CONFIG}",
        8,
        f"{OTHERS}[11]",
        by_form("11"),
    ),
    Form(12, "atlas", BY_HAND, 8, f"{OTHERS}[12]", hand_started),
    Form(
        13,
        "atlas",
        f"{TEN} --resume checkpoints/checkpoint_epoch_10.pt",
        8,
        RESUMED,
        lambda module: (
            f"{module.TEN}{source_of(' --resume checkpoints/checkpoint_epoch_10.pt')(module)}"
        ),
    ),
    Form(
        14,
        "atlas",
        f"CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node=4 {CONFIG}",
        4,
        f"{OTHERS}[14]",
        by_form("14"),
    ),
    Form(
        15,
        "atlas",
        f"export WANDB_API_KEY=your_key; {TEN}",
        8,
        RESUMED,
        lambda module: f"{source_of('export WANDB_API_KEY=your_key')(module)}; {module.TEN}",
    ),
    *(
        Form(
            16,
            "jit",
            f"./train_multi_gpu.sh {n}",
            n,
            f"{RUNS_AS_PRINTED}[16-{n}]",
            by_form("16", n),
        )
        for n in (2, 4)
    ),
    Form(16, "jit", "./train.sh", 1, "test_the_script_for_one_gpu_runs", source_of("./train.sh")),
    *(
        Form(n, "jit", text, 2, f"{RUNS_AS_PRINTED}[{n}-2]", by_form(str(n), 2))
        for n, text in JIT.items()
    ),
    *(
        Form(
            21,
            "segmentation",
            f"bash train_{name}.sh",
            2,
            f"{RUNS_AS_PRINTED}[21 {name}]",
            by_form(f"21 {name}"),
        )
        for name in ("torchrun", "ddp")
    ),
    *(
        Form(n, "segmentation", text, ranks, f"{RUNS_AS_PRINTED}[{form}]", by_form(form))
        for n, (ranks, form, text) in SEGMENTATION.items()
    ),
    Form(
        26,
        "segmentation",
        "tensorboard --logdir=./log",
        1,
        f"{RUNS_AS_PRINTED}[24]",
        source_of("tensorboard --logdir=./log"),
    ),
    Form(
        27, "ctclip", "bash scripts/train_multi_gpu.sh", 2, f"{RUNS_AS_PRINTED}[27]", by_form("27")
    ),
    Form(
        27,
        "ctclip",
        "export CUDA_VISIBLE_DEVICES=0,1\nbash scripts/train_multi_gpu.sh",
        2,
        f"{RUNS_AS_PRINTED}[27 on 0,1]",
        by_form("27 on 0,1"),
    ),
    Form(28, "ctclip", ACCELERATE, 2, f"{RUNS_AS_PRINTED}[28]", by_form("28")),
    Form(
        29,
        "ctclip",
        "bash scripts/train_slurm_multi_node.sh",  # what sbatch runs, on stand-ins for two nodes
        2,
        "test_the_batch_script_trains_on_two_nodes",
        source_of("bash scripts/train_slurm_multi_node.sh"),
    ),
    Form(
        30,
        "ctclip",
        "python train.py --config configs/debug_config.yaml",
        1,
        f"{RUNS_AS_PRINTED}[30]",
        by_form("30"),
    ),
]


# --- The index is true -------------------------------------------------------


@cache
def module_of(recipe: str) -> ModuleType:
    path = HERE / recipe / f"test_{recipe}_commands.py"
    spec = importlib.util.spec_from_file_location(f"commands_of_{recipe}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flat(command: str) -> str:
    return re.sub(r"[;\s]+", " ", command).strip()


def name(form: Form) -> str:
    return f"{form.number} {form.command[:40]}"


def test_all_thirty_forms_are_in_the_table() -> None:
    assert {form.number for form in TABLE} == set(range(1, 31))


@pytest.mark.parametrize("form", TABLE, ids=name)
def test_a_form_is_started_as_the_guide_prints_it(form: Form) -> None:
    assert flat(form.started(module_of(form.recipe))) == flat(form.command)


@pytest.mark.parametrize("form", TABLE, ids=name)
def test_the_named_test_exists_with_these_parameters(form: Form) -> None:
    function, _, given = form.test.removesuffix("]").partition("[")
    tested = getattr(module_of(form.recipe), function)
    marks = [mark for mark in getattr(tested, "pytestmark", []) if mark.name == "parametrize"]
    assert bool(marks) == bool(given)
    if len(marks) == 1 and isinstance(marks[0].args[0], str):
        assert given in list(marks[0].args[1])
    elif len(marks) == 1:
        assert given in ["-".join(map(str, values)) for values in marks[0].args[1]]
    for part in given.split("-") if len(marks) > 1 else []:
        assert any(part in map(str, mark.args[1]) for mark in marks), part


def test_a_command_that_was_bent_would_be_found() -> None:
    bent = ModuleType("bent")
    bent.FORMS = {"28": (ACCELERATE.replace("base", "debug"), 2, "")}  # type: ignore[attr-defined]
    form = next(form for form in TABLE if form.number == 28)
    assert flat(form.started(bent)) != flat(form.command)


# --- The table, with seconds and results -------------------------------------


def start_all(forms: list[Form]) -> dict[str, tuple[float, str]]:
    """Run the tests of `forms`; return seconds and result of each by its name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        nodes = sorted({str(HERE.parent / form.node) for form in forms})
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            "-o",
            "junit_family=xunit2",
        ]
        subprocess.run([sys.executable, "-m", "pytest", *options, *nodes], check=False)
        cases = ElementTree.parse(report).iter("testcase")
        results = {}
        for case in cases:
            bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            key = f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"
            results[key] = (float(case.get("time", 0)), bad[0] if bad else "passed")
        return results


def main(wanted: list[str]) -> int:
    """Start the forms and print the table."""
    forms = [form for form in TABLE if not wanted or str(form.number) in wanted]
    results = start_all(forms)
    print(f"\n{'form':>4}  {'recipe':<12} {'processes':>9} {'seconds':>8}  {'result':<8} command")
    codes = 0
    for form in forms:
        key = f"test_{form.recipe}_commands::{form.test}"
        seconds, result = results.get(key, (0.0, "not run"))
        codes |= result != "passed"
        head = f"{form.number:>4}  {form.recipe:<12} {form.processes:>9} {seconds:>8.1f}"
        print(f"{head}  {result:<8} {flat(form.command)}")
    return codes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
