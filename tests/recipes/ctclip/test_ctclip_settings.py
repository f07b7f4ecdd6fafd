"""Every key of the YAML files does something; what does nothing is refused by its name."""

import json
import math
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel

from lockstep import RunConfig, read_events
from lockstep.errors import ConfigError, LaunchError
from lockstep.plan import Contract
from lockstep.run.build import prepare
from lockstep.run.record import banner
from lockstep.run.resume import fresh_contract
from lockstep.run.run import Run
from lockstep.testing import FakeWorld, run_ranks
from lockstep_recipes.ctclip.config import CTClipConfig
from lockstep_recipes.ctclip.evaluate import measure_findings
from lockstep_recipes.ctclip.flags import build, overrides
from lockstep_recipes.ctclip.launch import check_file, choose_precision
from lockstep_recipes.ctclip.task import CTClipTask
from lockstep_recipes.ctclip.trainer import run
from lockstep_recipes.settings import read_settings

RECIPE = Path(__file__).parents[3] / "recipes" / "ctclip"

# What the guide and its origin document; nothing here may be missing or without effect.
DOCUMENTED = (
    "experiment.name",
    "experiment.seed",
    "data.batch_size",
    "data.num_workers",
    "data.prefetch_factor",
    "data.paths",
    "model.image_encoder",
    "model.text_encoder",
    "model.clip",
    "model.clip.dim_image",
    "training.max_epochs",
    "training.max_steps",
    "training.learning_rate",
    "training.weight_decay",
    "training.gradient_accumulation_steps",
    "training.max_grad_norm",
    "training.warmup_steps",
    "training.min_lr_ratio",
    "training.save_every_n_epochs",
    "validation.eval_every_n_epochs",
    "validation.eval_samples",
    "validation.metrics",
    "validation.threshold",
    "checkpoint.save_dir",
    "checkpoint.keep_last_n",
    "checkpoint.best_metric",
    "logging.use_wandb",
    "logging.log_every_n_steps",
    "logging.profile_timing",
)


def keys_of(kind: type[BaseModel], above: str = "") -> list[str]:
    """Return every key that holds a value."""
    found = []
    for name, field in kind.model_fields.items():
        below = field.annotation
        if isinstance(below, type) and issubclass(below, BaseModel):
            found += keys_of(below, f"{above}{name}.")
        else:
            found.append(above + name)
    return found


def built(config: CTClipConfig, ranks: int = 1) -> Run:
    with ExitStack() as stack:
        made = prepare(CTClipTask(config), config.run_config(), FakeWorld(size=ranks), stack)
        assert banner(made)
        return made


def contract_of(config: CTClipConfig, num_samples: int, ranks: int) -> Contract:
    return fresh_contract(config.run_config(), range(num_samples), ranks)


Check = Callable[[Run], object]
# key: (value, what it changes in the parts of a run, what that is then)
EFFECTS: dict[str, tuple[Any, Check, object]] = {
    "experiment.name": ("other", lambda r: r.store.folder.parent.name, "other"),
    "experiment.seed": (7, lambda r: r.contract.seed, 7),
    "data.batch_size": (2, lambda r: r.contract.plan.global_batch, 2),
    "data.num_workers": (1, lambda r: r.config.loader.num_workers, 1),
    "data.prefetch_factor": (5, lambda r: r.config.loader.prefetch, 5),
    "data.spacing": ([3, 1, 1], lambda r: r.loader.dataset.spacing, (3, 1, 1)),
    "data.drop_last": (False, lambda r: r.contract.plan.samples_per_epoch, 22),
    "data.on_bad_sample": ("skip", lambda r: r.config.loader.on_bad_sample, "skip"),
    "data.paths.validation": (None, lambda r: r.held_out, None),
    "model.image_encoder.image_size": (
        36,
        lambda r: r.loader.dataset[0]["volume"].shape,
        (1, 12, 36, 36),
    ),
    "model.image_encoder.depth": (6, lambda r: r.loader.dataset[0]["volume"].shape[1], 6),
    "model.image_encoder.patch_size": (
        6,
        lambda r: r.model.image_tower.embed[0].weight.numel(),
        216,
    ),
    "model.image_encoder.temporal_patch_size": (
        12,
        lambda r: r.model.image_tower.embed[0].weight.numel(),
        12**3,
    ),
    "model.image_encoder.dim": (32, lambda r: r.model.image_tower.temporal_norm.weight.numel(), 32),
    "model.image_encoder.spatial_depth": (3, lambda r: len(r.model.image_tower.spatial), 3),
    "model.image_encoder.temporal_depth": (3, lambda r: len(r.model.image_tower.temporal), 3),
    "model.image_encoder.heads": (4, lambda r: r.model.image_tower.bias.out.out_features, 4),
    "model.image_encoder.dim_head": (
        4,
        lambda r: r.model.image_tower.spatial[0].attention.q_scale.numel(),
        4,
    ),
    "model.image_encoder.codebook_size": (
        9,
        lambda r: r.model.image_tower.codebook.codes.shape,
        (9, 16),
    ),
    "model.text_encoder.dim": (32, lambda r: r.model.text_projection.in_features, 32),
    "model.text_encoder.depth": (3, lambda r: len(r.model.text_tower.blocks), 3),
    "model.text_encoder.heads": (4, lambda r: r.model.text_tower.blocks[0].heads, 4),
    "model.text_encoder.max_length": (5, lambda r: r.task.tokenize(["a " * 9]).shape[1], 5),
    "model.text_encoder.max_words": (3, lambda r: r.model.text_tower.words.num_embeddings, 6),
    "model.clip.dim_latent": (8, lambda r: r.model.text_projection.out_features, 8),
    "model.clip.dim_text": (16, lambda r: r.model.text_projection.in_features, 16),
    "model.clip.loss": ("siglip", lambda r: float(r.model.shift.detach()), -10.0),
    "model.clip.tau": (2.0, lambda r: float(r.model.tau.detach()), 2.0),
    "training.max_steps": (3, lambda r: r.loader.total_steps, 3),
    "training.learning_rate": ("2e-4", lambda r: r.contract.effective_lr, 2e-4),
    "training.lr_scaling": ("batch", lambda r: r.contract.effective_lr, 5e-4),
    "training.reference_batch": (16, lambda r: r.contract.effective_lr, 2.5e-4),
    "training.weight_decay": (0.3, lambda r: r.optimizer.param_groups[0]["weight_decay"], 0.3),
    "training.gradient_accumulation_steps": (2, lambda r: r.contract.plan.global_batch, 8),
    "training.warmup_steps": (50, lambda r: "outlasts" in banner(r)[-1], True),
    "validation.eval_samples": (3, lambda r: len(r.held_out), 3),
    "checkpoint.save_dir": (
        "elsewhere",
        lambda r: str(r.store.folder),
        "elsewhere/ctclip/checkpoints",
    ),
    "checkpoint.keep_last_n": (2, lambda r: r.store.keep_last, 2),
}
# These need company to be seen.
WITH: dict[str, dict[str, Any]] = {
    "training.lr_scaling": {"training": {"reference_batch": 8}},
    "training.reference_batch": {"training": {"lr_scaling": "batch"}},
    "model.image_encoder.image_size": {"model": {"clip": {"dim_image": 144}}},
    "model.image_encoder.patch_size": {"model": {"clip": {"dim_image": 256}}},
    "model.image_encoder.dim": {"model": {"clip": {"dim_image": 128}}},
}
# Seen in a run, below; or by a test of its own.
IN_A_RUN = (
    "training.max_grad_norm",
    "training.min_lr_ratio",
    "training.save_every_n_epochs",
    "validation.eval_every_n_epochs",
    "validation.metrics",
    "validation.threshold",
    "checkpoint.best_metric",
    "logging.log_every_n_steps",
    "logging.profile_timing",
    "logging.curves",
    "training.max_epochs",
)
ELSEWHERE = {
    "lockstep": "test_exact",
    "data.paths.train": "test_ctclip_data",
    "data.paths.labels": "test_ctclip_data",
    "model.clip.dim_image": "test_ctclip_model",
    "model.text_encoder.path": "test_ctclip_model",
    "training.mixed_precision": "below",
    "logging.use_wandb": "test_sinks",
    "logging.wandb_project": "test_sinks",
    "resume": "test_ctclip_ranks",
    "accept_changes": "test_ctclip_ranks",
}


@pytest.mark.parametrize("key", EFFECTS)
def test_a_key_has_its_effect(key, settings, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    value, look, expected = EFFECTS[key]
    made = built(settings(overrides([f"{key}={yaml.dump(value)}"]), WITH.get(key, {})))
    assert look(made) == expected
    if key != "model.clip.dim_text":  # which may only repeat what is so
        assert look_or_none(look, built(settings())) != expected, "the key changes nothing"


def look_or_none(look: Check, made: Run) -> object:
    try:
        return look(made)
    except AttributeError:
        return None


def test_scaling_by_the_batch_follows_the_guide(settings) -> None:
    # 1.25e-6 for a batch of 4; 2.5e-6 for 8, 5.0e-6 for 16.
    scaled = {"training": {"learning_rate": 1.25e-6, "lr_scaling": "batch"}}
    for ranks, rate in ((1, 1.25e-6), (2, 2.5e-6), (4, 5.0e-6)):
        assert contract_of(settings(scaled), 22, ranks).effective_lr == pytest.approx(rate)
        plain = settings({"training": {"learning_rate": 1.25e-6}})
        assert contract_of(plain, 22, ranks).effective_lr == 1.25e-6, "none by default"
    halved = settings(scaled, {"training": {"reference_batch": 8}})
    assert contract_of(halved, 22, 1).effective_lr == pytest.approx(0.625e-6)


def test_the_keys_of_the_loop_have_their_effect(settings) -> None:
    config = settings(
        {
            "data": {"batch_size": 2},  # eleven steps an epoch
            "training": {
                "max_steps": None,
                "max_epochs": 1,
                "max_grad_norm": 1e-9,
                "min_lr_ratio": 0.5,
                "save_every_n_epochs": 0.25,
            },
            "validation": {
                "eval_every_n_epochs": 0.5,
                "metrics": ["recall", "retrieval_at_1"],
                "threshold": 0.999,
            },
            "checkpoint": {"best_metric": "retrieval_at_1", "keep_last_n": 9},
            "logging": {"log_every_n_steps": 4, "profile_timing": True, "curves": True},
        }
    )
    run_ranks(1, run, config)
    events = read_events(config.folder)

    def steps(kind: str) -> list[int]:
        return [event["step"] for event in events if event["event"] == kind]

    assert steps("step") == [4, 8, 11]
    assert steps("evaluation") == [6, 11]
    assert steps("saving") == [3, 6, 9, 11]
    assert steps("epoch") == [11]
    timed = [set(event) for event in events if event["event"] == "timing"]
    assert any({"step_s", "compute_s", "data_wait_s"} < names for names in timed)
    assert any("evaluation_s" in names for names in timed)
    assert any("save_s" in names for names in timed)
    (first, last) = [event["metrics"] for event in events if event["event"] == "evaluation"]
    assert set(first) == set(last) == {"recall", "retrieval_at_1"}
    assert first["recall"] == 0, "nothing is that sure"
    assert events[[e["event"] for e in events].index("step")]["learning_rate"] > 5e-4
    rates = [event["learning_rate"] for event in events if event["event"] == "step"]
    assert rates[-1] == pytest.approx(5e-4), "half the rate at the end"
    assert (config.folder / "curves.png").exists()
    best = (config.folder / "checkpoints" / "best_model.pt").resolve().name
    assert best == (
        "step_00000011" if last["retrieval_at_1"] > first["retrieval_at_1"] else "step_00000006"
    )


def test_a_metric_nobody_can_measure_is_said_and_never_the_best(
    settings, volumes, tmp_path
) -> None:
    lines = (volumes / "validation" / "manifest.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    bare = [{"volume": str(volumes / "validation" / e["volume"]), "report": "x"} for e in entries]
    (tmp_path / "bare.jsonl").write_text("\n".join(map(json.dumps, bare)))
    config = settings({"data": {"paths": {"validation": str(tmp_path / "bare.jsonl")}}})
    assert any("have no labels" in line for line in banner(built(config)))
    (result,) = run_ranks(1, run, config)
    assert math.isnan(result.metrics["auroc"])
    assert result.metrics["retrieval_at_1"] == 1, "they all say the same"
    assert not (config.folder / "checkpoints" / "best_model.pt").exists()


def group_timeout_s(config: CTClipConfig) -> float:
    waits: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        heard = "lockstep_recipes.ctclip.launch.group_timeout_s"
        patch.setattr(heard, lambda asked: waits.append(asked) or asked)
        run(config)
    return waits[0]


def test_settings_of_the_run_have_their_effect_in_a_loop_of_ones_own(settings) -> None:
    quiet = {"data": {"paths": {"validation": None}}}
    own = {"lockstep": {"schedule": {"shape": "constant"}, "timeout_s": 77}}
    config = settings(quiet, own, {"training": {"max_steps": 3, "warmup_steps": 0}})
    assert run_ranks(1, group_timeout_s, config) == [77]
    rates = [e["learning_rate"] for e in read_events(config.folder) if e["event"] == "step"]
    assert rates == [1e-3] * 3
    assert settings().run_config().timeout_s == 36_000, "unless said"
    if not torch.cuda.is_available():
        with pytest.raises(LaunchError, match="cuda"):
            run(settings(quiet, {"lockstep": {"device": "cuda"}}))


def test_the_banner_says_how_many_pairs_meet(settings) -> None:
    twice = {"training": {"gradient_accumulation_steps": 2}}
    assert "Pairs compared in the loss: 4" in banner(built(settings(twice)))
    # In exact mode those of a whole step do.
    exact = settings(twice, {"lockstep": {"exact": True}})
    assert "Pairs compared in the loss: 8" in banner(built(exact))


def test_a_held_out_volume_without_labels_is_no_healthy_one(settings, volumes, tmp_path) -> None:
    lines = (volumes / "validation" / "manifest.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    for entry in entries:
        entry["volume"] = str(volumes / "validation" / entry["volume"])
    whole = dict(entries[0]["labels"])
    del entries[0]["labels"]
    del entries[1]["labels"]["Emphysema"]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, entries)))
    made = built(settings({"data": {"paths": {"validation": str(tmp_path / "some.jsonl")}}}))
    assert any("2 of 7 held-out volumes lack labels" in line for line in banner(made))
    labels = torch.stack([made.held_out[index]["labels"] for index in range(7)])
    assert labels.isnan().sum() == len(whole) + 1
    perfect = labels.nan_to_num(0.9)  # sure of what nobody has looked at
    assert measure_findings(perfect, labels, 0.5)["auroc"] == 1
    assert measure_findings(perfect, labels, 0.5)["precision"] == 1


def test_a_run_records_every_key_of_its_settings(settings) -> None:
    config = settings()
    built(config)
    stored = json.loads((config.folder / "config.json").read_text())
    assert CTClipConfig.parse(stored["task"]) == config
    assert RunConfig.parse(stored["config"]) == config.run_config()


@pytest.mark.parametrize(
    ("setting", "accelerate", "expected"),
    [
        ("auto", "fp16", "fp16"),
        ("auto", "no", "fp32"),
        ("auto", None, "bf16"),
        ("no", "fp16", "fp32"),
        ("bf16", "fp16", "bf16"),
    ],
)
def test_the_settings_win_over_accelerates_file(
    setting, accelerate, expected, settings, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    if accelerate is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", accelerate)
    wanted = settings({"training": {"mixed_precision": setting}}).training.mixed_precision
    precision = choose_precision(wanted, torch.device("cuda"))
    assert settings().run_config(precision).precision == expected
    assert choose_precision(wanted, torch.device("cpu")) == "fp32"


def test_clipping_clips(settings) -> None:
    # AdamW hides the length of a gradient, but not against its epsilon.
    from safetensors.torch import load_file

    moved = []
    for norm in (1e-9, None):
        config = settings(
            {
                "experiment": {"name": str(norm)},
                "training": {"max_steps": 1, "max_grad_norm": norm, "weight_decay": 0},
            }
        )
        run_ranks(1, run, config)
        folder = config.folder / "checkpoints" / "step_00000001"
        moved.append(load_file(folder / "model.safetensors")["image_projection.weight"])
    start = built(
        settings({"experiment": {"name": "start"}})
    ).model.image_projection.weight.detach()
    clipped, free = (float((weight - start).abs().max()) for weight in moved)
    assert clipped < 0.2 * free


def test_every_key_there_is_and_every_documented_one_is_tested() -> None:
    known = keys_of(CTClipConfig)
    assert set(known) == {*EFFECTS, *IN_A_RUN, *ELSEWHERE}
    sections = {key.rsplit(".", n)[0] for key in known for n in (1, 2)}
    assert not [key for key in DOCUMENTED if key not in {*known, *sections}]


def test_the_page_lists_every_key() -> None:
    text = (RECIPE / "README.md").read_text()
    listed = re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)
    assert listed == [key for key in keys_of(CTClipConfig) if "." in key]


def test_the_files_of_the_guide_hold_its_numbers() -> None:
    base = CTClipConfig.parse(read_settings(RECIPE / "configs" / "base_config.yaml"))
    assert base.model_dump(exclude={"data"}) == CTClipConfig().model_dump(exclude={"data"})
    assert (base.data.batch_size, base.training.learning_rate) == (4, 1.25e-6)
    debug = CTClipConfig.parse(read_settings(RECIPE / "configs" / "debug_config.yaml"))
    assert (debug.training.max_steps, debug.training.warmup_steps) == (100, 10)
    assert (debug.data.num_workers, debug.validation.eval_samples) == (0, 10)
    assert debug.checkpoint.save_dir == Path("saves_debug")
    CTClipConfig.parse(read_settings(RECIPE / "configs" / "sample_config.yaml"))
    for name, machines, processes in (("single", 1, 2), ("multi", 2, 8)):
        path = RECIPE / f"accelerate_config_{name}_node.yaml"
        said = check_file(path, processes)
        assert said.endswith(f"MULTI_GPU, {processes} processes on {machines} machines, fp16")


def test_steps_per_epoch_are_the_guides(settings) -> None:
    config = settings({"training": {"learning_rate": 1.25e-6}})
    for ranks, steps, dropped in ((1, 7375, 0), (2, 3687, 4), (4, 1843, 12), (8, 921, 28)):
        said = contract_of(config, 29_500, ranks).describe()[1]
        kept = 29_500 - dropped
        assert said == f"Steps per epoch: {steps} ({kept} of 29500 samples, {dropped} dropped)"


# --- bad input: one clear line, exit code 2, no traceback ---------------------------------------


def check(ended, *words: str) -> None:
    assert ended.code == 2, ended.err
    assert "Traceback" not in ended.err + ended.out
    said = [line for line in ended.err.splitlines() if line.startswith("lockstep: ")]
    assert len(said) == 1, ended.err
    assert "\n  try: " in ended.err
    for word in words:
        assert word in ended.err, f"{word!r} not in:\n{ended.err}"


@pytest.fixture
def settings_file(values, tmp_path):
    def write(*over: dict[str, Any], text: str = "") -> list[str]:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(values(*over)) + text)
        return ["--config", str(path)]

    return write


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "training: {learning_rat: 1}",
            ["'learning_rat' in section training", "try: use learning_rate"],
        ),
        ("trainig: {}", ["unknown key 'trainig'", "try: use training"]),
        ("learning_rate: 2.5e-6", ["'learning_rate'", "write training.learning_rate: 2.5e-06"]),
        ("training: {mixed_precision: no}", ["training.mixed_precision", "quote the value"]),
        ("data: {batch_size: yes}", ["data.batch_size", "quote the value"]),
        ("experiment: {name: no}", ["experiment.name", "quote the value"]),
        ("training: {learning_rate: fast}", ["training.learning_rate", "fast"]),
        ("validation: {metrics: [auc]}", ["validation.metrics", "auc"]),
        ("validation: {metrics: [f1]}", ["best_metric 'auroc' is not measured"]),
        ("data: {paths: {train: nowhere}}", ["nowhere/manifest.jsonl", "cannot be read"]),
        ("data: {batch_size: 64}", ["22 samples"]),
        ("_base_: other.yaml", ["other.yaml", "cannot be read"]),
        ("data: [", ["is not YAML"]),
    ],
)
def test_bad_settings_are_named_with_what_to_try(change, words, command, values, tmp_path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text(yaml.safe_dump(values()))
    (tmp_path / "config.yaml").write_text(
        change if "_base_" in change else f"_base_: base.yaml\n{change}"
    )
    check(command(build, ["--config", "config.yaml"]), *words)


def test_a_number_written_as_yaml_reads_it_as_text_is_a_number(values) -> None:
    read = yaml.safe_load("training: {learning_rate: 1e-4}")
    assert read["training"]["learning_rate"] == "1e-4"
    assert CTClipConfig.parse(values(read)).training.learning_rate == 1e-4


def test_resuming_is_as_the_file_says_unless_a_flag_says_otherwise(values, tmp_path) -> None:
    said = {"resume": "never", "accept_changes": True}
    (tmp_path / "settings.yaml").write_text(yaml.dump(values(said)))

    def asked(*flags: str) -> tuple[str, bool]:
        config = build(["--config", str(tmp_path / "settings.yaml"), *flags]).args[0]  # type: ignore[attr-defined]
        return config.resume, config.accept_changes

    assert asked() == ("never", True)
    assert asked("--resume", "discard") == ("discard", True)
    assert asked("--set", "resume=auto", "--set", "accept_changes=false") == ("auto", False)


def test_bad_flags_are_named(command, settings_file) -> None:
    check(command(build, []), "--config")
    check(command(build, ["--config", "none.yaml"]), "none.yaml")
    check(command(build, [*settings_file(), "--confg", "x"]), "--confg", "--config")
    check(
        command(build, [*settings_file(), "--set", "data.batch=2"]),
        "'batch' in section data",
        "use batch_size",
    )


def spoil_line(data: Path, text: str) -> None:
    path = data / "train" / "manifest.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = text
    path.write_text("\n".join(lines))


def spoil_volume(data: Path, voxels: Any) -> None:
    import numpy as np

    np.save(data / "train" / "volume_00002.npy", voxels)


def faults() -> dict[str, tuple[Callable[[Path], None], list[str]]]:
    import numpy as np

    def line(text: str) -> Callable[[Path], None]:
        return lambda data: spoil_line(data, text)

    def volume(voxels: Any) -> Callable[[Path], None]:
        return lambda data: spoil_volume(data, voxels)

    gone = (lambda data: (data / "train" / "volume_00002.npy").unlink(), ["does not exist"])
    cut = (
        lambda data: (data / "train" / "volume_00002.npy").write_bytes(b"\x93NUMPY"),
        ["not a readable .npy"],
    )
    good = '{"volume": "volume_00002.npy", "report": "x"'
    return {
        "no JSON": (line("{volume"), ["is not JSON"]),
        "no report": (
            line('{"volume": "volume_00002.npy"}'),
            ["Field required", "try: add report"],
        ),
        "a typing slip": (
            line(good + ', "intercep": 3}'),
            ["intercep", "try: use intercept"],
        ),
        "labels": (line(good + ', "labels": [1, 0]}'), ["2 labels", "18 findings"]),
        "a label": (line(good + ', "labels": {"Cardiomegaly": 3}}'), ["Cardiomegaly 3"]),
        "prepared": (line(good + ', "prepared": true}'), ["marked as prepared"]),
        "gone": gone,
        "cut": cut,
        "a picture": (volume(np.zeros((9, 8))), ["has shape (9, 8)"]),
        "words": (volume(np.array([[["a"]]])), ["holds <U1"]),
        "nothing": (volume(np.zeros((0, 4, 4))), ["has shape (0, 4, 4)"]),
        "no numbers": (volume(np.full((4, 4, 4), np.nan)), ["holds voxels that are NaN"]),
    }


@pytest.mark.parametrize("fault", faults())
def test_bad_data_are_named_with_file_and_line(fault, command, tmp_path, settings_file) -> None:
    from lockstep_recipes.ctclip.sample_data import make_volumes

    data = make_volumes(tmp_path / "data", num=4, num_val=2, shape=(12, 24, 24))
    spoil, words = faults()[fault]
    spoil(data)
    paths = {"train": str(data / "train"), "validation": str(data / "validation")}
    argv = settings_file({"data": {"paths": paths}})
    check(command(build, argv), "manifest.jsonl, line 3", *words)


def test_a_bad_volume_stops_all_ranks_once(command, tmp_path, settings_file) -> None:
    from lockstep_recipes.ctclip.sample_data import make_volumes

    data = make_volumes(tmp_path / "data", num=8, num_val=2, shape=(12, 24, 24))
    spoil_volume(data, [[1.0]])
    paths = {"train": str(data / "train"), "validation": str(data / "validation")}
    argv = settings_file({"data": {"paths": paths}, "experiment": {"name": "bad"}})
    check(command(build, argv, ranks=2), "has shape (1, 1)", "line 3")
    skipping = settings_file(
        {"data": {"paths": paths, "on_bad_sample": "skip"}, "experiment": {"name": "skip"}}
    )
    ended = command(build, skipping, ranks=2)
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_processes: 2", ["no distributed_type"]),
        ("distributed_type: FSDP\nnum_processes: 2", ["FSDP is not supported"]),
        ("distributed_type: MULTI_GPUS\nnum_processes: 2", ["MULTI_GPUS", "MULTI_GPU"]),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: no", ["unquoted no"]),
        ("distributed_type: MULTI_GPU\nnum_processes: 3\nnum_machines: 2", ["3", "2 machines"]),
        ("distributed_type: MULTI_GPU", ["num_processes None"]),
        ("distributed_type: MULTI_GPU\nnum_processes: 4", ["says num_processes 4, the job has 2"]),
        (": [", ["is not YAML"]),
    ],
)
def test_a_bad_accelerate_file_is_named_before_it_is_used(text, words, tmp_path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        check_file(path, 2)
    assert all(word in str(refused.value) for word in [*words, "accelerate.yaml"]), refused.value


def test_accelerate_alone_against_more_processes_is_refused(command, settings_file) -> None:
    # Without LOCAL_RANK, Accelerate takes each process for the only one.
    env = {"ACCELERATE_TORCH_DEVICE": "cpu", "OMPI_COMM_WORLD_SIZE": "3"}
    ended = command(build, settings_file(), ranks=2, **env, OMPI_COMM_WORLD_RANK="0")
    assert set(ended.codes) == {2}
    assert "Traceback" not in ended.err
    said = next(line for line in ended.err.splitlines() if line.startswith("lockstep: "))
    assert re.search(r"disagree|launched|group", said), said
