"""Bad input: one clear line, exit code 2, no traceback, nothing lost."""

import json
import os
import shlex
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lockstep import CheckpointStore, read_events
from lockstep.checkpoint import FolderLock
from lockstep_recipes.jit.flags import build
from lockstep_recipes.jit.sample_data import make_images

SMALL = shlex.split(
    "--model JiT-T/4 --img_size 8 --batch_size 8 --epochs 1 --max_steps 2 --grid 0 --num_workers 0 "
    "--num_fid_samples 0 --ema_decays 0.9 --set sinks.curves=false --output_dir run"
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_images(tmp_path / "images", num=40, size=8, classes=2)


def train_once(command, data: Path) -> None:
    ended = command(build, [*SMALL, "--data_path", str(data)])
    assert ended.code == 0, ended.err


def check(ended, *words: str, code: int = 2) -> None:
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err + ended.out
    assert ended.err.count("lockstep: ") == 1, ended.err
    assert "\n  try: " in ended.err
    for word in words:
        assert word in ended.err, f"{word!r} not in:\n{ended.err}"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--batch_sise", "8"], ["--batch_sise", "--batch_size"]),
        (["--batch-sizes=8"], ["--batch_size"]),
        (["stray"], ["stray"]),
        (["--batch_size", "many"], ["--batch_size", "many"]),
        (["--batch_size", "-1"], ["batch.batch_size", "-1"]),
        (["--lr", "fast"], ["--lr", "fast"]),
        (["--pred", "y"], ["--pred", "y"]),
        (["--set", "checkpoint.keep_lst=3"], ["keep_lst", "keep_last"]),
        (["--set", "chekpoint.keep_last=3"], ["chekpoint", "checkpoint"]),
        (["--set", "checkpoint.keep_last=few"], ["checkpoint.keep_last", "few"]),
        (["--set", "nonsense"], ["nonsense", "name=value"]),
        (["--model", "JiT-B/5"], ["JiT-B/5", "JiT-B/4"]),
        (["--img_size", "10"], ["10"]),
        (["--batch_size", "4000"], ["4000", "32 samples", "batch_size=32"]),
        (["--resume", "checkpoint_epoch_9.pt"], ["checkpoint_epoch_9.pt"]),
        (["--inception_weights", "nowhere.pth"], ["nowhere.pth"]),
        (["--label_drop", "2"], ["label_drop", "2"]),
        (["--set", "seed=[1"], ["[1", "cannot be used"]),
        (["--set", "timeout_s=1e300"], ["timeout_s"]),
        (["--warmup_epochs", "1e308"], ["warmup_epochs"]),
        (["--lr", "inf"], ["lr"]),
        (["--ema_decays", "2"], ["averages", "2"]),
        (["--sample_data", "0"], ["--sample_data", "0"]),
        (["--sample_data", "9", "--img_size", "0"], ["image_size"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_bad_flag_is_named_with_what_to_try(command, data, argv, words) -> None:
    check(command(build, [*SMALL, "--data_path", str(data), *argv]), *words)


def test_a_folder_without_usable_data_is_named(command, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "table.csv").write_text("1,2")
    for name in ("missing", "empty", "file", "file/below", "other"):
        check(command(build, [*SMALL, "--data_path", name]), name)


def test_two_ranks_say_it_once(command, tmp_path) -> None:
    check(command(build, [*SMALL, "--data_path", "missing"], ranks=2), "missing")


def corrupt_one(data: Path) -> Path:
    victim = sorted(data.rglob("*.png"))[7]
    victim.write_bytes(victim.read_bytes()[:40])
    return victim


def test_a_corrupt_image_stops_all_ranks_with_its_name(command, data) -> None:
    victim = corrupt_one(data)
    argv = [*SMALL, "--data_path", str(data), "--batch_size", "4", "--max_steps", "20"]
    check(command(build, [*argv, "--epochs", "9"], ranks=2), victim.name)


def test_a_corrupt_image_is_skipped_alike_on_any_number_of_ranks(command, data, tmp_path) -> None:
    victim = corrupt_one(data)
    argv = [*SMALL, "--data_path", str(data), "--on_bad_image", "skip", "--max_steps", "5"]
    argv += ["--set", "batch.global_batch_size=8", "--batch_size", "4"]
    weights = []
    for ranks in (1, 2):
        folder = tmp_path / f"run{ranks}"
        ended = command(build, [*argv, "--output_dir", str(folder), "--epochs", "2"], ranks=ranks)
        assert ended.code == 0, ended.err
        skipped = [
            event
            for rank in range(ranks)
            for event in read_events(folder, rank)
            if event["event"] == "sample_skipped"
        ]
        assert len(skipped) == 1
        assert victim.name in skipped[0]["reason"]
        weights.append(load_file(folder / "checkpoints" / "step_00000005" / "model.safetensors"))
    for name, weight in weights[0].items():
        assert (weights[1][name] - weight).abs().max() < 1e-5, name


def test_contradicting_launch_variables_are_listed(command, data) -> None:
    argv = [*SMALL, "--data_path", str(data)]
    check(command(build, argv, RANK="3", WORLD_SIZE="2"), "RANK=3", "WORLD_SIZE=2")
    check(command(build, argv, WORLD_SIZE="2"), "WORLD_SIZE=2", "RANK")
    variables = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
    check(command(build, argv, RANK="0", WORLD_SIZE="1", **variables), "SLURM_STEP_NUM_TASKS=4")


def test_a_checkpoint_of_another_recipe_is_refused_and_kept(command, data, tmp_path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints", recipe="protein")
    store.save(7, {"model": {}}, {})
    check(command(build, [*SMALL, "--data_path", str(data)]), "'protein'", "'jit'")
    assert store.latest()[0].step == 7


def test_a_folder_in_use_is_refused_with_its_holder(command, data, tmp_path) -> None:
    with FolderLock(tmp_path / "run"):
        check(command(build, [*SMALL, "--data_path", str(data)]), "in use", str(os.getpid()))
    train_once(command, data)


def test_an_output_that_cannot_be_a_folder_is_named(command, data, tmp_path) -> None:
    (tmp_path / "run").write_text("in the way")
    check(command(build, [*SMALL, "--data_path", str(data)]), "run")


def test_a_changed_batch_on_resume_needs_a_word(command, data, tmp_path) -> None:
    train_once(command, data)
    argv = [*SMALL, "--data_path", str(data), "--batch_size", "4", "--max_steps", "6"]
    before = sorted((tmp_path / "run" / "checkpoints").rglob("*"))
    check(command(build, argv), "batch_size 8 -> 4", "accept_changes")
    assert sorted((tmp_path / "run" / "checkpoints").rglob("*")) == before
    assert command(build, [*argv, "--accept_changes"]).code == 0


def test_changed_data_on_resume_need_a_word(command, data) -> None:
    train_once(command, data)
    next(data.rglob("*.png")).unlink()
    check(command(build, [*SMALL, "--data_path", str(data), "--max_steps", "4"]), "samples")


def test_a_damaged_checkpoint_is_passed_over_aloud(command, data, tmp_path) -> None:
    argv = [*SMALL, "--data_path", str(data), "--set", "checkpoint.every_steps=1"]
    assert command(build, argv).code == 0
    newest = tmp_path / "run" / "checkpoints" / "step_00000002" / "model.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    ended = command(build, [*argv, "--max_steps", "3"])
    assert ended.code == 0, ended.err
    assert "skipped checkpoint" in ended.out
    assert "hash mismatch in model.safetensors" in ended.out
    assert "resumed at step 1" in ended.out
    for folder in (tmp_path / "run" / "checkpoints").glob("step_*"):
        (folder / "manifest.json").write_text("{}")
    check(command(build, argv), "step_00000003", "unreadable")


def test_the_resolved_config_is_written_down(command, data, tmp_path) -> None:
    train_once(command, data)
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["config"]["batch"]["batch_size"] == 8
    assert stored["world_size"] == 1
