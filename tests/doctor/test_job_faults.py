"""Each fault of a job turns one check red, and only that one."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import config_in, named, needs_mount, red, try_task, yellow
from torch import Tensor, nn

from lockstep.checkpoint import FolderLock
from lockstep.config import RunConfig
from lockstep.doctor.checks import Examination, verdicts
from lockstep.doctor.command import Command
from lockstep.doctor.findings import Findings
from lockstep.doctor.grace import grace_time
from lockstep.doctor.job import checkpoints_kept
from lockstep.doctor.report import Result
from lockstep.doctor.trial import try_job
from lockstep.errors import DataError
from lockstep.task import Context, PartialLoss, Task
from lockstep.testing import TinyTask
from lockstep.trainer import fit
from lockstep_recipes.jit.flags import build

replace = dataclasses.replace


@pytest.fixture
def judge(without_gpu: Examination, tmp_path: Path) -> Any:
    """Return a function that really tries a job, and gives the verdicts."""

    def give(task: Task, config: RunConfig | None = None) -> list[Result]:
        found = try_task(task, config or config_in(tmp_path), tmp_path)
        return verdicts(replace(without_gpu, found=found))

    return give


# --- Data ----------------------------------------------------------------------


def test_data_that_are_not_there(judge: Any, tmp_path: Path) -> None:
    task, config = build(["--data_path", str(tmp_path / "nowhere"), "--output_dir", str(tmp_path)])
    results = judge(task, config)
    assert red(results) == {"data"}
    assert "nowhere" in named(results, "data").evidence


class FilesTask(TinyTask):
    """Read each sample from a file of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        for index, sample in enumerate(super().train_data()):
            torch.save(sample, folder / f"{index}.pt")

    def train_data(self) -> Any:
        return Files(sorted(self.folder.glob("*.pt")))


class Files:
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return torch.load(self.paths[index])


def test_a_sample_that_one_rank_cannot_read(judge: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    task = FilesTask(tmp_path / "data")
    assert red(judge(task)) == set()
    found = try_task(task, config_in(tmp_path), tmp_path)
    assert found.samples_read == 2
    for path in (tmp_path / "data").iterdir():
        path.write_bytes(b"no sample")
    results = judge(task)
    assert red(results) == {"data"}
    assert "rank 0: sample " in named(results, "data").evidence
    assert named(results, "step").status == "skip"


# --- Batch, rate, resume ---------------------------------------------------------


def test_a_batch_larger_than_the_data(judge: Any, tmp_path: Path) -> None:
    results = judge(TinyTask(48), config_in(tmp_path, batch={"batch_size": 32}))
    assert red(results) == {"batch and rate"}
    assert "32 x 2 = 64 is larger than the 48" in named(results, "batch and rate").evidence


def test_the_batch_and_rate_are_those_of_the_launched_size(judge: Any, tmp_path: Path) -> None:
    config = config_in(tmp_path, rate={"lr": 1e-3, "lr_scaling": "linear"})
    says = named(judge(TinyTask(), config), "batch and rate").evidence
    assert "4 per GPU, 8 total (x 2)" in says
    assert "effective LR: 0.002" in says


def test_a_rate_that_is_scaled_though_the_batch_is_not(judge: Any, tmp_path: Path) -> None:
    rate = {"lr": 1e-3, "lr_scaling": "linear"}
    batch = {"batch_size": 4, "global_batch_size": 8}
    assert "batch and rate" in yellow(
        judge(TinyTask(), config_in(tmp_path, rate=rate, batch=batch))
    )


def test_another_batch_than_the_checkpoint_was_trained_with(judge: Any, tmp_path: Path) -> None:
    fit(TinyTask(), config_in(tmp_path, max_steps=2))
    before = sorted(path.name for path in (tmp_path / "out").rglob("*"))
    results = judge(TinyTask(), config_in(tmp_path, batch={"batch_size": 3}))
    assert red(results) == {"batch and rate"}
    assert "batch_size 4 -> 3" in named(results, "batch and rate").evidence
    assert named(results, "resume").evidence == "resumes from step_00000002"
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == before


def test_a_checkpoint_that_is_not_there(judge: Any, tmp_path: Path) -> None:
    config = config_in(tmp_path, resume="checkpoints/checkpoint_epoch_10.pt")
    results = judge(TinyTask(), config)
    assert red(results) == {"resume"}
    assert "checkpoint_epoch_10.pt" in named(results, "resume").evidence


class Counting(TinyTask):
    """Note the step of each forward pass."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        with self.file.open("a") as file:
            file.write(f"{context.step}\n")
        return super().loss(model, batch, context)


def test_a_rank_gets_the_micro_batches_that_it_will_have(tmp_path: Path) -> None:
    config = config_in(tmp_path, batch={"batch_size": 4, "global_batch_size": 16})
    try_task(Counting(tmp_path / "fresh"), config, tmp_path, world_size=2)
    assert (tmp_path / "fresh").read_text().split().count("0") == 2
    # A job that began with 16 samples a step on one rank keeps them on four.
    alone = config_in(tmp_path, batch={"batch_size": 4, "accumulate": 4}, max_steps=2)
    fit(TinyTask(), alone)
    found = try_task(Counting(tmp_path / "resumed"), alone, tmp_path, world_size=4)
    assert found.resumed_from == "step_00000002"
    assert "16 effective (x 1 accumulated)" in found.contract[0]
    assert (tmp_path / "resumed").read_text().split().count("2") == 1


class Wider(TinyTask):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), super().build_model())


def test_a_checkpoint_of_another_model(judge: Any, tmp_path: Path) -> None:
    fit(TinyTask(), config_in(tmp_path, max_steps=2))
    before = sorted(path.name for path in (tmp_path / "out").rglob("*"))
    assert red(judge(TinyTask())) == set()
    results = judge(Wider())
    assert red(results) == {"resume"}
    assert "step_00000002" in named(results, "resume").evidence
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == before


# --- Folder, room, save -----------------------------------------------------------


def test_a_file_in_place_of_the_output_folder(judge: Any, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    results = judge(TinyTask())
    assert red(results) == {"output folder"}
    assert "Not a directory" in named(results, "output folder").evidence
    assert named(results, "step").status == "ok"
    assert named(results, "room").status == "skip"


def test_a_folder_another_run_writes_to(judge: Any, tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "out").acquire()
    try:
        results = judge(TinyTask())
    finally:
        lock.release()
    assert red(results) == {"output folder"}
    assert "is in use by" in named(results, "output folder").evidence


BIG = """
import sys, torch
from lockstep import RunConfig, fit
from lockstep.testing import TinyTask

class Big(TinyTask):
    def build_model(self):
        model = super().build_model()
        model.more = torch.nn.Parameter(torch.zeros(40_000, dtype=torch.float64))
        return model
    def loss(self, model, batch, context):
        part = super().loss(model, batch, context)
        return type(part)(part.loss_sum + model.more.sum() * 0, part.weight)

fit(Big(), RunConfig.parse({"epochs": 3, "output_dir": sys.argv[1], "batch": {"batch_size": 4}}))
"""


TRY = """
import os
from pathlib import Path
from lockstep.doctor.command import Command
from lockstep.doctor.trial import try_job
command = Command("python", ("train.py", "small"), folder=Path.cwd())
try_job(command, os.environ, 150).write(Path("found.json"))
"""


@needs_mount
@pytest.mark.timeout(240)
def test_a_disk_too_small_for_the_checkpoints(without_gpu: Examination, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "train.py").write_text(BIG)
    shell = f'mount -t tmpfs -o size=3m,mode=755 none {tmp_path}/small && exec "$@"'
    words = ["unshare", "-m", "sh", "-c", shell, "sh", sys.executable, "-c", TRY]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=200)
    results = verdicts(replace(without_gpu, found=Findings.read(tmp_path / "found.json")))
    assert red(results) == {"room"}
    assert "3.0 MB free" in named(results, "room").evidence
    assert "full after 3" in named(results, "room").evidence


def test_named_checkpoints_add_up(measured: Findings) -> None:
    saving = {"keep_last": 3, "name_epochs": True, "every_epochs": 10}
    config = {"checkpoint": saving, "evaluation": {"save_best": True}}
    found = replace(measured, config=config, total_steps=1000, steps_per_epoch=10)
    assert checkpoints_kept(found) == 3 + 1 + 1 + 10


# --- Step, memory, loader ------------------------------------------------------------


class Broken(TinyTask):
    """A task whose loss does what it is told to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        part = super().loss(model, batch, context)
        if self.how == "raises":
            raise ValueError("shapes 3 and 4 do not match")
        if self.how == "no number":
            return PartialLoss(part.loss_sum * float("nan"), part.weight)
        torch.empty(2**48, dtype=torch.uint8)  # 256 TB
        raise AssertionError("was allocated")

    def collate(self, samples: list[Any]) -> Any:
        if self.how == "collate":
            raise ValueError("ragged")
        return super().collate(samples)


@pytest.mark.parametrize(
    ("how", "name", "words"),
    [
        ("raises", "step", "ValueError: shapes 3 and 4"),
        ("no number", "step", "non-finite"),
        ("allocates", "memory", "free on cpu: RuntimeError"),
        ("collate", "loader", "ragged"),
    ],
)
def test_a_step_that_does_not_work(how: str, name: str, words: str, judge: Any) -> None:
    results = judge(Broken(how))
    assert red(results) == {name}
    assert words in named(results, name).evidence


def test_less_memory_than_a_step_needs(without_gpu: Examination, healthy: Examination) -> None:
    assert without_gpu.found is not None
    found = replace(without_gpu.found, memory_bytes=6 * 2**30, free_memory_bytes=10 * 2**30)
    results = verdicts(replace(without_gpu, found=found))
    assert red(results) == {"memory"}
    assert "2 x 6.0 GB, 10.0 GB free" in named(results, "memory").evidence
    # On GPUs of their own, ranks do not share.
    on_gpu = replace(found, device="cuda:0")
    assert red(verdicts(replace(healthy, found=on_gpu))) == set()
    larger = replace(on_gpu, memory_bytes=11 * 2**30)
    assert red(verdicts(replace(healthy, found=larger))) == {"memory"}


# --- Ranks that share more than gradients ---------------------------------------------


FSDP = """
import sys, torch
from lockstep import RunConfig, fit
from lockstep.testing import TinyTask

class Large(TinyTask):
    def build_model(self):
        sizes = (5, 500), (500, 1000), (1000, 3)
        model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes)).double()
        if sys.argv[1] == "mixed":
            model[1].bias.data = model[1].bias.data.float()
        return model

fit(Large(), RunConfig.parse(
    {"epochs": 3, "output_dir": "out", "parallel": sys.argv[2], "batch": {"batch_size": 4}}
))
"""


def try_large(tmp_path: Path, *words: str) -> tuple[Command, Findings]:
    (tmp_path / "train.py").write_text(FSDP)
    command = Command("torchrun", ("train.py", *words), 2, folder=tmp_path)
    return command, try_job(command, os.environ, 150)


@pytest.mark.timeout(300)
def test_an_fsdp_job_is_judged_by_its_shards(without_gpu: Examination, tmp_path: Path) -> None:
    command, whole = try_large(tmp_path, "plain", "ddp")
    command, found = try_large(tmp_path, "plain", "fsdp")
    assert (whole.num_ranks, found.num_ranks) == (1, 2)
    assert found.passed[-1] == "save"
    assert found.num_parameters == whole.num_parameters
    assert 0.5 <= found.state_bytes / whole.state_bytes < 0.51
    assert 0.9 < found.checkpoint_bytes / whole.checkpoint_bytes < 1.1

    # What is free is enough for two shards, and not for the whole state twice.
    found = replace(found, memory_bytes=found.state_bytes, free_memory_bytes=20 * 2**20)
    whole = replace(whole, memory_bytes=whole.state_bytes, free_memory_bytes=20 * 2**20)
    examination = replace(without_gpu, command=command)
    assert red(verdicts(replace(examination, found=found))) == set()
    assert red(verdicts(replace(examination, found=whole))) == {"memory"}

    # Twice as many ranks hold half as much each.
    four = replace(command, num_nodes=2)
    says = named(verdicts(replace(examination, command=four, found=found)), "memory").evidence
    assert "a shard of 1/4, estimated from 2 ranks" in says


@pytest.mark.timeout(300)
def test_a_model_that_cannot_be_sharded(without_gpu: Examination, tmp_path: Path) -> None:
    command, found = try_large(tmp_path, "mixed", "fsdp")
    results = verdicts(replace(without_gpu, command=command, found=found))
    assert red(results) == {"step"}
    assert "uniform original parameter dtype" in named(results, "step").evidence
    assert named(results, "output folder").status == "ok"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_batch_normalisation_over_all_ranks_needs_them(tmp_path: Path) -> None:
    config = config_in(tmp_path, sync_batch_norm=True)
    assert try_task(TinyTask(), config, tmp_path).needs_group
    found = try_task(TinyTask(), config, tmp_path, num_ranks=2)
    assert (found.num_ranks, found.passed[-1]) == (2, "save")
    assert not try_task(TinyTask(), config, tmp_path, world_size=1).needs_group


def test_the_first_rank_that_failed_is_believed() -> None:
    lost = Findings(phase="step", failed_at=2.0, problems={"step": ["lost connection", ""]})
    lost = replace(lost, passed=["folder"], scratch="x", memory_bytes=1)
    cause = Findings(phase="loader", failed_at=1.0, problems={"loader": ["ragged", ""]})
    merged = Findings.merged([lost, replace(cause, memory_bytes=2)])
    assert merged.problems == {"loader": ["ragged", ""]}
    assert (merged.phase, merged.passed, merged.scratch) == ("loader", ["folder"], "x")
    assert merged.memory_bytes == 2


class SlowSamples(TinyTask):
    def train_data(self) -> Any:
        return Slow(super().train_data())


class Slow(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        import time

        time.sleep(0.05)
        return super().__getitem__(index)


def test_a_loader_slower_than_the_step_is_said(judge: Any) -> None:
    results = judge(SlowSamples())
    assert red(results) == set()
    assert named(results, "loader").status == "warn"
    assert "reading limits" in named(results, "loader").evidence


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"read_s": 5.0}, "loader"),
        ({"trained_bytes": 2**40}, "communication"),
        ({"rejected": ["step_00000004: truncated"]}, "resume"),
        ({"file_system": "nfs4"}, "output folder"),
        ({"warmup_steps": 1000}, "batch and rate"),
    ],
)
def test_what_works_but_not_well_is_a_warning(
    change: Mapping[str, Any], name: str, healthy: Examination
) -> None:
    assert healthy.found is not None
    results = verdicts(replace(healthy, found=replace(healthy.found, **change)))
    assert red(results) == set()
    assert yellow(results) == {name}


def test_more_workers_than_cores_is_a_warning(healthy: Examination) -> None:
    assert healthy.found is not None
    many = {**healthy.found.config, "loader": {"num_workers": 10_000, "prefetch": 2}}
    found = replace(healthy.found, config=many, batch_tensors=0, batch_bytes=0)
    from lockstep.doctor.job import workers

    assert workers(found, num_processes=2, num_cores=8).status == "warn"
    assert workers(found, num_processes=2, num_cores=20_000).status == "ok"


def test_trackers_that_are_missing_are_a_warning(healthy: Examination) -> None:
    from lockstep.doctor.job import sinks

    assert healthy.found is not None
    found = replace(healthy.found, config={"sinks": {"wandb": True, "tensorboard": True}})
    assert "not installed: wandb" in sinks(found, {}, lambda name: name != "wandb").evidence
    no_key = sinks(found, {"HOME": "/nowhere"}, lambda name: True)
    assert (no_key.status, "no key" in no_key.evidence) == ("warn", True)
    assert sinks(found, {"WANDB_API_KEY": "x"}, lambda name: True).status == "ok"


# --- SLURM's grace time -----------------------------------------------------------------


def batch(lines: str, body: str = "srun python train.py") -> Command:
    from lockstep.doctor.command import batch_options

    text = f"#!/bin/bash\n{lines}\n{body}\n"
    return Command("sbatch", batch=batch_options(text), batch_script=text)


@pytest.mark.parametrize(
    ("lines", "save_s", "status"),
    [
        ("#SBATCH --signal=TERM@120", 30.0, "ok"),
        ("#SBATCH --signal=TERM@120", 200.0, "fail"),
        ("#SBATCH --signal=15@120", 30.0, "ok"),
        ("#SBATCH --signal=QUIT@120", 30.0, "ok"),
        ("#SBATCH --signal=USR2@120", 1.0, "fail"),
        ("#SBATCH --signal=B:USR1@120", 1.0, "fail"),
        ("#SBATCH --time=1:00:00", 1.0, "ok"),
        ("#SBATCH --time=1:00:00", 40.0, "fail"),  # KillWait is 30 s
    ],
)
def test_saving_must_fit_into_the_grace_time(
    lines: str, save_s: float, status: str, healthy: Examination
) -> None:
    assert healthy.found is not None
    found = replace(healthy.found, save_s=save_s)
    results = verdicts(replace(healthy, command=batch(lines), found=found))
    assert named(results, "grace time").status == status
    assert red(results) == ({"grace time"} if status == "fail" else set())


def test_inside_a_job_slurm_is_asked(
    healthy: Examination, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "scontrol"
    fake.write_text(
        '#!/bin/sh\nif [ "$1" = write ]; then echo "#SBATCH --signal=USR1@90"; echo srun x; fi\n'
        'if [ "$1" = show ]; then echo "KillWait                = 45 sec"; fi\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    env = {"SLURM_JOB_ID": "7"}
    results = verdicts(replace(healthy, env=env))
    assert "90 s to save (--signal=USR1@90)" in named(results, "grace time").evidence
    by_torchrun = Command("torchrun", ("train.py",), 2)
    results = verdicts(replace(healthy, env=env, command=by_torchrun))
    assert red(results) == {"grace time"}
    fake.write_text(fake.read_text().replace("#SBATCH --signal=USR1@90", ""))
    told = grace_time(healthy.command, healthy.found, env).evidence
    assert "45 s to save (KillWait 45 s" in told


# --- The script, in a process of its own ----------------------------------------------------


@pytest.mark.timeout(240)
def test_a_script_that_cannot_be_imported_is_said_in_a_line(
    without_gpu: Examination, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import lockstep\nimport no_such_module\n")
    command = Command("torchrun", ("train.py",), 2, folder=tmp_path)
    found = try_job(command, os.environ, 100)
    results = verdicts(replace(without_gpu, command=command, found=found))
    assert red(results) == {"script"}
    assert "No module named 'no_such_module'" in named(results, "script").evidence
    assert named(results, "data").evidence == "not reached: the script failed"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("threads", ["4,2", ""])
def test_a_job_is_tried_with_any_omp_num_threads(threads: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import lockstep\nimport no_such_module\n")
    command = Command("torchrun", ("train.py",), 2, folder=tmp_path)
    found = try_job(command, {**os.environ, "OMP_NUM_THREADS": threads}, 100)
    assert "No module named 'no_such_module'" in found.problems["script"][0]


def test_a_script_that_is_killed_has_probably_run_out_of_memory(
    without_gpu: Examination, tmp_path: Path
) -> None:
    killed = "import lockstep, os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "train.py").write_text(killed)
    command = Command("python", ("train.py",), folder=tmp_path)
    found = try_job(command, os.environ, 100)
    result = named(verdicts(replace(without_gpu, command=command, found=found)), "script")
    assert "killed (SIGKILL), probably because it ran out of memory" in result.evidence
    assert result.fix == "free memory, or lower batch_size or num_workers"


def test_a_script_that_is_not_there_and_one_that_would_train(
    without_gpu: Examination, tmp_path: Path
) -> None:
    command = Command("torchrun", ("train.py",), 2, folder=tmp_path)
    found = try_job(command, os.environ, 60)
    assert red(verdicts(replace(without_gpu, command=command, found=found))) == {"script"}
    (tmp_path / "train.py").write_text("open('trained', 'w')\n")
    found = try_job(command, os.environ, 60)
    results = verdicts(replace(without_gpu, command=command, found=found))
    assert red(results) == set()
    assert "does not use lockstep" in named(results, "script").evidence
    assert not (tmp_path / "trained").exists()


SLOW = """
import time
from lockstep import RunConfig, fit
from lockstep.errors import LockstepError
print("loaded")
time.sleep(600)
"""


@pytest.mark.timeout(240)
def test_a_trial_ends_after_its_seconds_and_leaves_no_process(
    without_gpu: Examination, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SLOW)
    command = Command("python", ("train.py",), folder=tmp_path)
    found = try_job(command, os.environ, 3)
    results = verdicts(replace(without_gpu, command=command, found=found))
    assert red(results) == {"script"}
    assert "in 3 s" in named(results, "script").evidence


@pytest.mark.timeout(240)
def test_a_custom_loop_ends_in_its_first_step_before_it_can_save(
    without_gpu: Examination, tmp_path: Path
) -> None:
    example = Path(__file__).parents[2] / "examples" / "five_lines.py"
    saves = "finally:\n    open('saved', 'w')\n"
    (tmp_path / "loop.py").write_text(
        f"try:\n{textwrap.indent(example.read_text(), '    ')}\n{saves}"
    )
    command = Command("python", ("loop.py",), folder=tmp_path)
    found = try_job(command, os.environ, 100)
    results = verdicts(replace(without_gpu, command=command, found=found))
    assert red(results) == set()
    assert "641 of 641 parameters" in named(results, "step").evidence
    assert named(results, "memory").status == "ok"
    assert "a custom loop" in named(results, "data").evidence
    assert [path.name for path in tmp_path.iterdir()] == ["loop.py"]


@pytest.mark.timeout(240)
def test_a_loop_around_prepare_under_accelerate_is_tried_whole(
    without_gpu: Examination, tmp_path: Path
) -> None:
    shutil.copytree(Path(__file__).parents[2] / "recipes" / "ctclip", tmp_path / "ctclip")
    script = ("train.py", "--config", "configs/base_config.yaml")
    command = Command("accelerate", script, 2, port=None, folder=tmp_path / "ctclip")
    found = try_job(command, {**os.environ, "LOCKSTEP_REHEARSAL": "1"}, 100)
    assert found.problems == {}
    assert (found.task, found.passed[-1], found.samples_read) == ("ctclip", "save", 2)
    results = verdicts(replace(without_gpu, command=command, found=found))
    assert red(results) == set()
    assert "4 per GPU, 8 total (x 2)" in named(results, "batch and rate").evidence


def test_errors_on_purpose_keep_their_words(judge: Any) -> None:
    class Refuses(TinyTask):
        def train_data(self) -> Any:
            raise DataError("there is no index.csv", "make one")

    result = named(judge(Refuses()), "data")
    assert (result.evidence, result.fix) == ("there is no index.csv", "make one")


def test_findings_survive_the_way_through_a_file(measured: Findings, tmp_path: Path) -> None:
    measured.write(tmp_path / "f.json")
    assert Findings.read(tmp_path / "f.json") == measured
    (tmp_path / "g.json").write_text(json.dumps({"unknown": 1})[:5])
    assert Findings.read(tmp_path / "g.json") == Findings()
