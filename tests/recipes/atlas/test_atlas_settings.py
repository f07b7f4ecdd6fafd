"""Every key of the settings file is honoured or refused by its name; none is ignored."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import BaseModel

from lockstep import CheckpointStore
from lockstep.errors import ConfigError, LockstepError
from lockstep_recipes.atlas.flags import Settings, build
from lockstep_recipes.atlas.vggt import PRESETS, Aggregator

README = Path(__file__).parents[3] / "recipes" / "atlas" / "README.md"

# The guide's complete example, to the letter.
FIVE_KEYS = """\
# atlas/configs/train_config.yaml

data:
  batch_size: 8  # 每个GPU的batch size
  # 实际总batch = 8 × 8 GPUs = 64

training:
  learning_rate: 1e-4  # 基础学习率
  # 实际学习率 = 1e-4 × 8 = 8e-4 (自动调整)
  warmup_steps: 1000
  gradient_accumulation_steps: 2  # 累积2步
  # 有效batch size = 8 × 8 × 2 = 128
  val_interval: 1000  # 每1000步验证一次
"""

SMALL = ["model.vggt_preset=micro", "model.lang_preset=micro", "model.fusion_hidden_dim=64"]


@pytest.fixture
def made(tmp_path, episodes):
    """Return what a file with one key in it makes: the task and the run."""

    def make(key: str, value: object):
        tree = list(value) if isinstance(value, tuple) else value
        for part in reversed(key.split(".")):
            tree = {part: tree}
        (tmp_path / "settings.yaml").write_text(yaml.safe_dump(tree))
        small = [f"--set={text}" for text in SMALL if not text.startswith(f"{key}=")]
        if key != "data.data_dir":
            small.append(f"--set=data.data_dir={episodes}")
        return build(["--config", str(tmp_path / "settings.yaml"), *small])

    return make


def image_shape(task) -> tuple[int, ...]:
    return tuple(task.train_data()[0]["images"].shape)


def trained(task) -> set[str]:
    model = task.build_model()
    return {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}


def predictions(task) -> torch.Tensor:
    return torch.tensor([[0.5] * 6 + [2.0]] * 2)


def batch_of(task) -> dict[str, torch.Tensor]:
    data = task.train_data()
    return task.collate([data[0], data[1]])


def loss_of(task, **parts: float) -> float:
    """Return the loss of fixed predictions by hand, in the default kinds unless said."""
    made = task._loss(predictions(task), batch_of(task))
    return float(made.loss_sum / made.weight)


def by_hand(task, pose: str = "smooth_l1", gripper: str = "l1", w=(1.0, 0.5)) -> float:
    target = task._standardised(batch_of(task)["action"])
    error = (predictions(task) - target)[:, :6].abs()
    kinds = {"l1": error, "l2": error**2}
    kinds["smooth_l1"] = torch.where(error < 1, error**2 / 2, error - 0.5)
    chance = torch.tensor(2.0).sigmoid()
    wanted = target[:, 6]
    bce = -(wanted * chance.log() + (1 - wanted) * (1 - chance).log())
    grips = {"l1": (chance - wanted).abs(), "bce": bce}
    return float(w[0] * kinds[pose].mean() + w[1] * grips[gripper].mean())


HONOURED = {
    ("model.freeze_vggt", False): lambda t, r: any(
        n.startswith("geometry.backbone.") and p.requires_grad
        for n, p in t.build_model().named_parameters()
    ),
    ("model.freeze_lang_encoder", True): lambda t, r: "language" not in trained(t),
    ("model.vggt_checkpoint", "nowhere.pt"): lambda t, r: (
        t.build_model() and "nowhere.pt does not exist" in t.notes[0]
    ),
    ("model.lang_encoder_name", "llama"): lambda t, r: (
        t.build_model() and any("llama is not a local folder" in note for note in t.notes)
    ),
    ("model.geom_output_dim", 24): lambda t, r: t.build_model().geometry.out.out_features == 24,
    ("model.fusion_hidden_dim", 128): lambda t, r: t.build_model().norm.weight.shape == (128,),
    ("model.action_dim", 5): lambda t, r: t.train_data()[0]["action"].shape == (5,),
    ("model.use_pointnet", False): lambda t, r: not hasattr(t.build_model().geometry, "pointnet"),
    ("model.use_pose", False): lambda t, r: not hasattr(t.build_model().geometry, "to_pose"),
    ("model.use_quaternion", False): lambda t, r: True,
    ("model.use_diffusion_head", False): lambda t, r: True,
    ("model.use_attention_pooling", True): lambda t, r: hasattr(t.build_model(), "pool"),
    ("model.vggt_preset", "tiny"): lambda t, r: t.build_model().geometry.backbone.width == 384,
    ("model.lang_preset", "tiny"): lambda t, r: t.build_model().language.hidden_size == 256,
    ("model.allow_random_backbone", False): lambda t, r: t.build_model() is not None,
    ("model.has_gripper", False): lambda t, r: t.config.model.num_pose == 7,
    ("model.fusion_layers", 2): lambda t, r: len(t.build_model().fusion) == 2,
    ("model.dropout", 0.5): lambda t, r: t.build_model().fusion[0].dropout.p == 0.5,
    ("data.batch_size", 4): lambda t, r: r.batch.batch_size == 4,
    ("data.num_workers", 6): lambda t, r: r.loader.num_workers == 6,
    ("data.train_split", "val"): lambda t, r: len(t.train_data()) == 12,
    ("data.val_split", "train"): lambda t, r: len(t.eval_data()) == 24,
    ("data.val_split", None): lambda t, r: t.eval_data() is None,
    ("data.image_size", 42): lambda t, r: image_shape(t) == (2, 3, 42, 42),
    ("data.use_wrist_camera", False): lambda t, r: image_shape(t) == (1, 3, 518, 518),
    ("data.views", ("wrist",)): lambda t, r: image_shape(t) == (1, 3, 518, 518),
    ("data.normalize_actions", False): lambda t, r: torch.equal(
        t._standardised(batch_of(t)["action"])[:, :6], batch_of(t)["action"][:, :6]
    ),
    ("data.num_temporal_frames", 3): lambda t, r: image_shape(t) == (6, 3, 518, 518),
    ("data.temporal_stride", 2): lambda t, r: t.train_data().config.temporal_stride == 2,
    ("data.use_state", True): lambda t, r: t.num_own == 3,
    ("data.use_last_action", True): lambda t, r: t.num_own == 7,
    ("data.cache_images", True): lambda t, r: t.train_data().config.cache_images,
    ("data.random_shift", 2): lambda t, r: t.train_data().is_augmented,
    ("data.color_jitter", 0.1): lambda t, r: t.train_data().is_augmented,
    ("data.max_frames", 5): lambda t, r: len(t.train_data()) == 5,
    ("training.learning_rate", "1e-3"): lambda t, r: r.rate.lr == 1e-3,
    ("training.lr_scaling", "sqrt"): lambda t, r: r.rate.lr_scaling == "sqrt",
    ("training.warmup_steps", 7): lambda t, r: r.schedule.warmup_steps == 7,
    ("training.gradient_accumulation_steps", 3): lambda t, r: r.batch.accumulate == 3,
    ("training.val_interval", 11): lambda t, r: (
        r.evaluation.is_due(11, None) and not r.evaluation.is_due(10, 1)
    ),
    ("training.num_epochs", 3): lambda t, r: r.epochs == 3,
    ("training.max_steps", 5): lambda t, r: r.max_steps == 5,
    ("training.weight_decay", 0.3): lambda t, r: (
        t.build_optimizer(t.build_model(), 1e-3).param_groups[0]["weight_decay"] == 0.3
    ),
    ("training.log_interval", 9): lambda t, r: r.log_every == 9,
    ("training.save_interval", 13): lambda t, r: (
        r.checkpoint.is_due(13, None) and r.checkpoint.name_steps
    ),
    ("training.max_grad_norm", 0.5): lambda t, r: r.max_grad_norm == 0.5,
    ("training.precision", "fp32"): lambda t, r: r.precision == "fp32",
    ("training.seed", 3): lambda t, r: r.seed == 3,
    ("training.loss.pose_weight", 3): lambda t, r: (
        loss_of(t) == pytest.approx(by_hand(t, w=(3, 0.5)))
    ),
    ("training.loss.gripper_weight", 2): lambda t, r: (
        loss_of(t) == pytest.approx(by_hand(t, w=(1, 2)))
    ),
    ("training.loss.pose_loss_type", "smooth_l1"): lambda t, r: (
        loss_of(t) == pytest.approx(by_hand(t))
    ),
    ("training.loss.pose_loss_type", "l1"): lambda t, r: (
        loss_of(t) == pytest.approx(by_hand(t, "l1"))
    ),
    ("training.loss.pose_loss_type", "l2"): lambda t, r: (
        loss_of(t) == pytest.approx(by_hand(t, "l2"))
    ),
    ("training.loss.gripper_loss_type", "bce"): lambda t, r: (
        loss_of(t) == pytest.approx(by_hand(t, gripper="bce"))
    ),
    ("checkpoint.save_dir", "runs/a/checkpoints"): lambda t, r: r.output_dir == "runs/a",
    ("checkpoint.resume_from", "some.pt"): lambda t, r: r.resume == "some.pt",
    ("checkpoint.epoch_interval", 2): lambda t, r: (
        r.checkpoint.is_due(3, 2) and not r.checkpoint.is_due(3, 1) and r.checkpoint.name_epochs
    ),
    ("logging.log_dir", "elsewhere"): lambda t, r: not Path("elsewhere").exists(),
    ("wandb.enabled", True): lambda t, r: r.sinks.wandb and r.sinks.wandb_project == "atlas-vla",
    ("wandb.project", "mine"): lambda t, r: r.sinks.wandb_project == "mine",
    ("wandb.name", "first"): lambda t, r: r.sinks.wandb_name == "first",
    ("wandb.entity", "me"): lambda t, r: r.sinks.wandb_entity == "me",
    ("wandb.tags", ("a",)): lambda t, r: r.sinks.wandb_tags == ("a",),
    ("device", "cpu"): lambda t, r: r.device == "cpu",
}
REFUSED = {
    ("model.use_quaternion", True): "columns of the actions as recorded",
    ("model.use_diffusion_head", True): "regressed, not sampled",
    ("model.predict_residual", True): "data.use_last_action: true",
}
ELSEWHERE = {
    "lockstep": "test_any_setting_of_a_run_may_stand_in_the_file",
    "data.data_dir": "every test here",
    "data.action_stats_path": "test_statistics_travel_with_the_checkpoint",
    "logging.save_to_file": "test_the_guides_five_keys_run",
    "model.predict_residual": "test_a_residual_of_nothing_repeats_the_last_action",
}


@pytest.mark.parametrize(("key", "value"), HONOURED, ids=lambda v: str(v))
def test_a_key_is_honoured(key, value, made) -> None:
    task, run = made(key, value)
    assert HONOURED[key, value](task, run)


@pytest.mark.parametrize(("key", "value"), REFUSED, ids=lambda v: str(v))
def test_a_key_is_refused_by_its_name(key, value, made) -> None:
    with pytest.raises(ConfigError, match=re.escape(REFUSED[key, value])) as refused:
        made(key, value)
    assert key in refused.value.problem


def keys_of(kind: type[BaseModel], above: str = "") -> list[str]:
    found = []
    for name, field in kind.model_fields.items():
        below = field.annotation
        is_section = isinstance(below, type) and issubclass(below, BaseModel)
        found += keys_of(below, f"{above}{name}.") if is_section else [f"{above}{name}"]
    return found


def test_any_setting_of_a_run_may_stand_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("lockstep: {exact: true, log_every: 7}\n")
    _, run = build(["--config", str(file)])
    assert (run.exact, run.log_every) == (True, 7)


def test_every_key_is_tested_and_documented() -> None:
    keys = set(keys_of(Settings))
    tested = {key for key, _ in [*HONOURED, *REFUSED]} | set(ELSEWHERE)
    assert keys - tested == set()
    assert tested - keys == set()
    documented = set()
    for row in re.findall(r"^\| `([^|]+) \|", README.read_text(), re.MULTILINE):
        documented |= set(re.findall(r"([\w.]+)`", f"`{row}".replace("`, `", "` `")))
    assert documented == keys


def test_the_defaults_are_those_of_the_documentation() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \|", README.read_text(), re.MULTILINE)
    assert len(rows) > 40
    values = yaml.safe_load(Settings().model_dump_json())
    for key, default in rows:
        found = values
        for part in key.split("."):
            found = found[part]
        said = yaml.safe_load(default)
        assert str(found) == str(said) or found == float(said), key


# --- the guide's example --------------------------------------------------------------------------


def test_the_guides_five_keys_run(command, tmp_path) -> None:
    (tmp_path / "train_config.yaml").write_text(FIVE_KEYS)
    argv = ["--config", "train_config.yaml", "--set=logging.save_to_file=true"]
    argv += ["--set=sinks.curves=false"]
    ended = command(build, argv, ranks=2, LOCKSTEP_REHEARSAL="1")
    assert ended.code == 0, ended.err
    assert "  Base LR: 0.0001, Effective LR (scaled by 2): 0.0002\n" in ended.out
    assert "8 per GPU, 16 total (x 2), 32 effective (x 2 accumulated)" in ended.out
    assert "unused" not in ended.err + ended.out, "DDP found a gradient for every parameter"
    assert "warning: freeze_vggt keeps random weights" in ended.out
    kept = (tmp_path / "rehearsal" / "logs" / "train.log").read_text().splitlines()
    said = ended.out.splitlines()
    assert kept == said[1 : said.index("made in rehearsal:")], "all that the run says of itself"


def test_without_settings_every_key_has_its_default(command) -> None:
    ended = command(build, ["--set=sinks.curves=false"], LOCKSTEP_REHEARSAL="1")
    assert ended.code == 0, ended.err
    assert "no --config: every key has its default" in ended.out
    assert "  Distributed: False\n" in ended.out


def test_a_residual_of_nothing_repeats_the_last_action(made, episodes, make_task, context) -> None:
    task = make_task(
        model={"predict_residual": True}, data={"use_last_action": True, "val_split": "train"}
    )
    model = task.build_model().eval()
    with torch.no_grad():
        for parameter in model.head[-1].parameters():
            parameter.zero_()
        batch = task.collate([task.train_data()[i] for i in range(8)])
        measured = task.evaluate(model, batch, context)
    assert float(measured["pose_l1"][0]) == pytest.approx(float(measured["repeat_pose_l1"][0]))


def test_baselines_are_what_they_say(make_task, context) -> None:
    task = make_task()
    batch = task.collate([task.train_data()[i] for i in range(8)])  # frame 0 to 5, then 0, 1
    known = task.statistics
    actions = torch.stack([task.train_data()[i]["action"] for i in range(8)])
    target = (actions - known.mean) / known.std
    first = ((known.first - known.mean) / known.std)[None]
    last = torch.cat((first, target[:5], first, target[6:7]))
    with torch.no_grad():
        measured = task.evaluate(task.build_model().eval(), batch, context)
    means = {name: float(value) / float(weight) for name, (value, weight) in measured.items()}
    assert means["mean_pose_l1"] == pytest.approx(float(target[:, :6].abs().mean()), rel=1e-5)
    repeated = (target - last)[:, :6]
    assert means["repeat_pose_l1"] == pytest.approx(float(repeated.abs().mean()), rel=1e-5)
    assert means["repeat_pose_l2"] == pytest.approx(float(repeated.square().mean()), rel=1e-5)
    gripper = torch.cat((known.first[None], actions[:5], known.first[None], actions[6:7]))[:, 6] > 0
    right = (gripper == (actions[:, 6] > 0)).float().mean()
    assert means["repeat_gripper_accuracy"] == pytest.approx(float(right))


def test_errors_count_in_standard_deviations_whatever_the_loss_does(make_task, context) -> None:
    measured = []
    for normalize in (True, False):
        task = make_task(data={"normalize_actions": normalize})
        batch = task.collate([task.train_data()[i] for i in range(8)])
        with torch.no_grad():
            made = task.evaluate(task.build_model().eval(), batch, context)
        measured.append([float(made[f"{n}_pose_l1"][0]) for n in ("mean", "repeat")])
    assert measured[0] == pytest.approx(measured[1], rel=1e-4)


# --- what a file may get wrong --------------------------------------------------------------------

BAD = {
    "data: {batch_sise: 8}": ["batch_sise", "try: use batch_size"],
    "trainning: {num_epochs: 3}": ["trainning", "try: use training"],
    "training: {loss: {pose_wait: 3}}": ["pose_wait", "try: use pose_weight"],
    "training: {lr_scaling: no}": ["training.lr_scaling=False", "unquoted"],
    "data: {batch_size: yes}": ["data.batch_size=True", "unquoted"],
    "wandb: {name: off}": ["wandb.name=False", "unquoted"],
    "data: {batch_size: many}": ["data.batch_size='many'"],
    "data: {batch_size: 0}": ["data.batch_size=0"],
    "data: [1, 2]": ["data=[1, 2]"],
    "training: {learning_rate: fast}": ["training.learning_rate='fast'"],
    "data: {image_size: 100}": ["data.image_size=100", "image_size: 98"],
    "data: {views: [a], use_wrist_camera: true}": ["data.views and data.use_wrist_camera"],
    "model: {vggt_preset: huge}": ["model.vggt_preset='huge'"],
    "model: {fusion_hidden_dim: 200}": ["fusion_hidden_dim=200", "fusion_hidden_dim: 192"],
    "model: {action_dim: 9}": ["actions have 7 columns", "action_dim: 7"],
    "data: {action_stats_path: none.json}": ["action_stats_path none.json cannot be read"],
    "data: {views: [ceiling]}": [
        "ceiling_000000",
        "try: add the frames, or set data.views to some of: workspace, wrist",
    ],
    "data: {data_dir: nowhere}": ["nowhere does not exist", "data_dir"],
    "data: {train_split: nowhere}": ["nowhere does not exist"],
    "data: {batch_size: 64}": ["larger than the 24 samples"],
    "data: {x": ["line 1 is not YAML"],
}


@pytest.fixture
def bad(command, tmp_path, episodes):
    def check(text: str, words: list[str], *argv: str, data: Path = episodes) -> None:
        (tmp_path / "s.yaml").write_text(text)
        small = [f"--set={word}" for word in SMALL if word.split("=")[0].split(".")[1] not in text]
        if "data_dir" not in text and "[1, 2]" not in text:
            small.append(f"--set=data.data_dir={data}")
        if "image_size" not in text and "[1, 2]" not in text:
            small += ["--set=data.image_size=28", "--set=data.num_workers=0"]
        ended = command(build, ["--config", "s.yaml", "--set=sinks.curves=false", *small, *argv])
        assert ended.code == 2, ended.err + ended.out
        assert "Traceback" not in ended.err + ended.out
        said = [line for line in ended.err.splitlines() if line.startswith("lockstep: ")]
        assert len(said) == 1, ended.err
        for word in [*words, "\n  try: "]:
            assert word in ended.err, f"{word!r} not in:\n{ended.err}"

    return check


@pytest.mark.parametrize("text", BAD)
def test_a_bad_setting_is_named_with_what_to_try(text, bad) -> None:
    bad(text, BAD[text])


def fewer_actions(folder: Path) -> str:
    lines = (folder / "actions.csv").read_text().splitlines()
    (folder / "actions.csv").write_text("\n".join(lines[:-1]))
    return "episode_000001 has 5 actions for 6 frames of workspace"


def missing_image(folder: Path) -> str:
    (folder / "images" / "wrist_000003.png").unlink()
    return "images/wrist_000003.png or .jpg is missing; there are 6 actions"


def no_images(folder: Path) -> str:
    for path in (folder / "images").iterdir():
        path.unlink()
    (folder / "images").rmdir()
    return "episode_000001/images does not exist"


def cut_off(folder: Path) -> str:
    path = folder / "images" / "wrist_000003.png"
    path.write_bytes(path.read_bytes()[:40])
    return "wrist_000003.png is not a readable image"


def no_actions(folder: Path) -> str:
    (folder / "actions.csv").unlink()
    return "episode_000001 has neither actions.csv nor actions.parquet"


def no_instruction(folder: Path) -> str:
    (folder / "language_task.txt").unlink()
    return "episode_000001 has no instruction"


FAULTS = [fewer_actions, missing_image, no_images, cut_off, no_actions, no_instruction]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_bad_episode_is_named(fault, bad, episodes, tmp_path) -> None:
    shutil.copytree(episodes, tmp_path / "data")
    said = fault(tmp_path / "data" / "train" / "episode_000001")
    bad("training: {num_epochs: 1}", [said], data=tmp_path / "data")


def test_a_checkpoint_of_another_recipe_is_refused(bad, tmp_path) -> None:
    store = CheckpointStore(tmp_path / "other", recipe="segmentation")
    store.save(1, {"model": {}}, {})
    bad("", ["belongs to recipe 'segmentation'"], "--resume", "other/step_00000001")
    bad("", ["'missing.pt' is not a checkpoint"], "--resume", "missing.pt")


def test_a_bad_command_line_is_refused(bad) -> None:
    bad("", ["--confg", "--config"], "--confg", "x.yaml")
    bad("", ["'batch_sise' in section data", "use batch_size"], "--set=data.batch_sise=3")
    bad("", ["'keep_lost' in section checkpoint", "use keep_last"], "--set=checkpoint.keep_lost=3")
    bad("", ["none.yaml cannot be read"], "--config", "none.yaml")


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, made) -> None:
    torch.save(Aggregator(PRESETS["tiny"]).state_dict(), tmp_path / "vggt.pt")
    task, _ = made("model.vggt_checkpoint", str(tmp_path / "vggt.pt"))
    with pytest.raises(LockstepError, match="does not fit"):
        task.build_model()
