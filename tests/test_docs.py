"""Every command and every snippet in the documentation runs."""

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import default_collate

from lockstep import RunConfig, StepReport, Task, fit
from lockstep.errors import ConfigError
from lockstep.plan import BatchConfig, RateConfig, plan_batches, scaled_rate
from lockstep.schedule import ScheduleConfig, build_schedule
from lockstep.testing import TinyTask, run_ranks
from lockstep_recipes.command import Flags
from lockstep_recipes.jit.flags import flags

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    return [line for block in blocks(page, "bash") for line in block.splitlines() if line]


# These verbs reach the processes of a command as their interpreters start.
NEED_FRESH = re.compile(r"lockstep (bench|doctor)")


def in_rehearsal(
    command: str, folder: Path, warm: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it; with `warm`, by programs that have imported torch already."""
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "LOCKSTEP_REHEARSAL": "1"}
    env["OMP_NUM_THREADS"] = "1"
    if warm and not NEED_FRESH.search(command):
        env |= {"PATH": f"{warm}:{env['PATH']}", "PYTHON_EXEC": str(warm / "python")}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=180
    )


def cases() -> list[tuple[str, str]]:
    """Return every command with the first page that shows it: translations show the same ones."""
    shown = {c: page.name for page in reversed(PAGES) for c in reversed(commands(page))}
    return [(page, command) for command, page in reversed(shown.items())]


@pytest.mark.usefixtures("fixed_ports")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("page", "command"), cases(), ids=lambda value: value[:60])
def test_a_documented_command_runs(
    page: str, command: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Those of the front page start fresh interpreters."""
    words = shlex.split(command)
    if words[0] == "make":
        # These set up or run the whole suite; that they exist is what can be shown from inside it.
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if words[0] == "./check":
        assert os.access(ROOT / "check", os.X_OK)
        return
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    warm = None if page == "README.md" else request.getfixturevalue("warm_programs")
    ended = in_rehearsal(command, tmp_path, warm)
    assert ended.returncode == 0, f"{page}: {command}\n{ended.stdout}\n{ended.stderr}"


def test_the_demo_is_a_command_the_recipe_takes() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    demo = re.search(r"^DEMO = (.*)$", makefile, re.MULTILINE)
    assert demo
    words = shlex.split(demo[1])
    assert words[:5] == [".venv/bin/lockstep", "run", "jit", "--gpus", "$(DEMO_PROCESSES)"]
    assert flags().read(words[5:]).output_dir == "runs/demo"


# --- The recipes' pages --------------------------------------------------------

# Where the commands of a page are typed, seen from the folder that holds the recipes.
TYPED_IN = {"atlas": "."}
NUM_SHOWN = {"atlas": 6, "ctclip": 6, "jit": 4, "protein": 5, "segmentation": 8}
# These need data, or what a long run has made: that their flags are known is what can be shown.
NEED_MORE = ("protein.sample", "protein.preprocess", "segmentation.test")
JUST_PORTS = "jit"  # its page shows the guide's commands under other ports


def recipe_cases() -> list[tuple[str, str]]:
    return [
        (recipe, command)
        for recipe in NUM_SHOWN
        for command in commands(ROOT / "recipes" / recipe / "README.md")
    ]


@cache
def started_elsewhere() -> set[str]:
    """Return the command lines that the recipes' own tests start."""
    path = ROOT / "tests" / "recipes" / "test_guide_commands.py"
    spec = importlib.util.spec_from_file_location("guide_commands", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["guide_commands"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    ours = module.module_of("atlas").OURS
    return {" ".join(text.split()) for text in (ours, *(form.command for form in module.TABLE))}


def flags_of(recipe: str, words: list[str]) -> tuple[str, Flags | None, list[str]]:
    """Return what a command starts, its flags where it has any, and the words for them."""
    if words[0] in ("bash", "tensorboard") or words[0].startswith("./"):
        return words[words[0] == "bash"], None, []
    if words[:2] == ["lockstep", "run"]:
        module, rest = f"{words[2]}.flags", words[words.index("--gpus") + 2 :]
    elif "train.py" in " ".join(words):
        at = next(n for n, word in enumerate(words) if word.endswith("train.py"))
        module, rest = f"{recipe}.flags", words[at + 1 :]
    elif "scripts/preprocess_dataset.py" in words:
        module, rest = "protein.preprocess", words[2:]
    else:
        assert words[:2] == ["python", "-m"], words
        module, rest = words[2].removeprefix("lockstep_recipes."), words[3:]
    found = importlib.import_module(f"lockstep_recipes.{module}")
    return module, found.flags() if hasattr(found, "flags") else None, rest


@pytest.fixture(scope="module")
def pages_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the recipes' folders, in which a page's commands run one after another."""
    ignored = shutil.ignore_patterns("output", "data", "log", "saves*", "checkpoints", "rehearsal")
    return shutil.copytree(
        ROOT / "recipes", tmp_path_factory.mktemp("pages") / "recipes", ignore=ignored
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("recipe", "command"), recipe_cases(), ids=lambda value: value[:60])
def test_a_command_of_a_recipes_page_runs(
    recipe: str, command: str, pages_folder: Path, request: pytest.FixtureRequest
) -> None:
    """Those that the recipe's own tests start are only looked at."""
    folder = pages_folder / TYPED_IN.get(recipe, recipe)
    plain = re.sub(r"^\w+=\S+ ", "", command)
    started, flags, rest = flags_of(recipe, shlex.split(plain))
    if flags is not None:
        args = vars(flags.read(rest))
        if args.get("config"):
            assert (folder / args["config"]).is_file()
    elif started.endswith(".sh"):
        assert os.access(folder / started, os.X_OK)
    else:
        assert shutil.which(str(BIN / started)) or started.endswith("sample_data"), command
    is_known = " ".join(command.split()) in started_elsewhere() or recipe == JUST_PORTS
    if not is_known and started not in NEED_MORE:
        request.getfixturevalue("fixed_ports")
        ended = in_rehearsal(command, folder, request.getfixturevalue("warm_programs"))
        assert ended.returncode == 0, f"{recipe}: {command}\n{ended.stdout}\n{ended.stderr}"


def test_the_pages_show_as_many_commands_as_are_looked_at() -> None:
    assert set(NUM_SHOWN) == {page.parent.name for page in ROOT.glob("recipes/*/README.md")}
    for recipe, num in NUM_SHOWN.items():
        assert len(commands(ROOT / "recipes" / recipe / "README.md")) == num, recipe


def test_a_flag_that_a_page_misspells_would_be_found(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(ConfigError, match="--layers"):
        test_a_command_of_a_recipes_page_runs(
            "segmentation", "python train.py --leyers 50", tmp_path, request
        )


def test_the_snippet_on_the_front_page_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (snippet,) = blocks(ROOT / "README.md", "python")
    monkeypatch.chdir(tmp_path)
    x = torch.randn(64, 8)
    samples = [{"x": row, "y": row.sum()[None]} for row in x]
    with pytest.raises(SystemExit) as ended:
        exec(compile(snippet, "README.md", "exec"), {"samples": samples})
    assert ended.value.code == 0
    assert (tmp_path / "run" / "checkpoints" / "step_00000020" / "model.safetensors").exists()


STEPS = re.compile(r"^    for batch in trainer\.steps\(\):\n(?: {8}.*\n)+", re.MULTILINE)


def test_the_loops_that_are_shown_train_as_fit_does(tmp_path: Path) -> None:
    """The averaging that is shown, put into either, does not change what is too small to clip."""
    _, loop, own_step, average = blocks(ROOT / "docs" / "own_loop.md", "python")
    assert own_step.startswith("for batch in trainer.steps():")
    loops = {"loop": loop, "own_step": STEPS.sub(textwrap.indent(own_step, "    "), loop)}
    put_in = textwrap.indent(average, "    ")
    for name, code in tuple(loops.items()):
        loops[f"{name}_averaging"] = re.sub(
            r"^(    run = prepare.*\n)", rf"\1{put_in}", code, flags=re.MULTILINE
        )
    assert len(set(loops.values())) == 4
    settings = {
        "seed": 3,
        "epochs": 2,
        "max_grad_norm": 0.01,
        "precision": "bf16",
        "batch": {"batch_size": 4, "accumulate": 3},
        "schedule": {"warmup_steps": 4},
        "sinks": {"curves": False},
    }
    warmup = build_schedule(ScheduleConfig(warmup_steps=4), None, 8)
    weights = {}
    for name in ("fit", *loops):
        config = RunConfig(output_dir=str(tmp_path / name), **settings)
        task = TinyTask(dropout=0.5)
        if name == "fit":
            fit(task, config)
        else:
            given = {"task": task, "config": config, "my_factor": warmup}
            exec(compile(loops[name], "own_loop.md", "exec"), given)
        weights[name] = load_file(tmp_path / name / "checkpoints/step_00000008/model.safetensors")
    for name, found in weights.items():
        assert all(torch.equal(found[key], tensor) for key, tensor in weights["fit"].items()), name


class TiedWithBatchNorm(TinyTask):
    """Two tied layers, batch normalisation, and a frozen layer: what an average does not hold."""

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 3))
        model[2].weight = model[0].weight
        model[3].requires_grad_(False)
        return model.double()


def test_the_averaged_weights_that_are_loaded_are_those_that_the_run_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (snippet,) = blocks(ROOT / "docs" / "checkpoints.md", "python")
    settings = {"epochs": 4, "averages": [0.999], "rate": {"lr": 0.05}, "sinks": {"curves": False}}
    task = TiedWithBatchNorm()
    metrics = fit(task, RunConfig(output_dir=str(tmp_path / "output"), **settings)).metrics
    assert metrics["ema_loss"] != pytest.approx(metrics["loss"], rel=1e-3)
    newest = max((tmp_path / "output" / "checkpoints").glob("step_*"))
    monkeypatch.chdir(tmp_path)
    model = task.build_model()
    exec(compile(snippet.replace("best_model.pt", newest.name), "checkpoints.md", "exec"), locals())
    batch = default_collate(task.eval_data())
    loss = task.loss(model, batch, context=None)  # type: ignore[arg-type]
    assert float(loss.loss_sum.detach() / loss.weight) == pytest.approx(
        metrics["ema_loss"], rel=1e-12
    )


# --- The page of a Task ---------------------------------------------------------


def task_example() -> Any:
    spec = importlib.util.spec_from_file_location("task_example", ROOT / "examples" / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_a_task_shows_the_example_as_it_is() -> None:
    """The page shows methods without their class, so indents and blank lines are not compared."""

    def lines(code: str) -> str:
        return "".join(f"\n{line.strip()}" for line in code.splitlines() if line.strip())

    shown = [lines(block) for block in blocks(ROOT / "docs" / "task.md", "python")]
    code = lines((ROOT / "examples" / "task.py").read_text())
    assert all(block in code for block in shown)
    places = [code.index(block) for block in shown]
    assert sorted(places) == places


def test_the_page_of_a_task_lists_every_method_attribute_and_field() -> None:
    page = (ROOT / "docs" / "task.md").read_text()
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"`(\w+)[`(]", cell)}
    public = {name for kind in (Task, StepReport) for name in dir(kind) if not name.startswith("_")}
    assert names == public


def trained_tagger(kind: str, folder: Path) -> dict[str, float]:
    config = RunConfig(
        output_dir=str(folder),
        epochs=2,
        batch={"batch_size": 16, "global_batch_size": 32},
        rate={"lr": 3e-3},
        sinks={"curves": False},
        timeout_s=30,
    )
    return dict(fit(getattr(task_example(), kind)(), config).metrics)


@pytest.mark.parametrize("kind", ["Tagger", "TaggerOfTwoTerms"])
def test_the_task_that_is_shown_learns_the_same_on_two_ranks(kind: str, tmp_path: Path) -> None:
    (one,) = run_ranks(1, trained_tagger, kind, tmp_path / "1")
    two, other = run_ranks(2, trained_tagger, kind, tmp_path / "2")
    assert one.keys() == {"loss", "accuracy", "f1"}
    assert two == other
    assert two == pytest.approx(one, rel=1e-3)
    assert one["accuracy"] > 0.8


def slug(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    words = re.sub(r"[`*]|\]\([^)]*\)", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def broken_links(page: Path) -> list[str]:
    """Return the links of a page to files or headings that are not there."""
    broken = []
    for target in re.findall(r"\]\(([^):]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        text = linked.read_text() if linked.suffix == ".md" and linked.exists() else ""
        headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
        if not linked.exists() or (anchor and anchor not in map(slug, headings)):
            broken.append(target)
    return broken


def linking_pages() -> list[Path]:
    return [*PAGES, *ROOT.glob("recipes/*/README.md")]


# --- The page of settings lists every field of RunConfig ------------------------


def settings(model: type[BaseModel], section: str = "") -> list[tuple[str, str]]:
    """Return the name of every setting, with its default as YAML writes it."""
    found = []
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            found += settings(type(default), f"{name}.")
        else:
            plain = list(default) if isinstance(default, tuple) else default
            found.append((section + name, yaml.safe_dump(plain).splitlines()[0]))
    return found


def settings_shown(page: str) -> list[tuple[str, str]]:
    return re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \|", page, re.MULTILINE)


def test_the_page_of_settings_has_every_setting_and_its_default() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert settings_shown(page) == settings(RunConfig)
    assert settings_shown(page.replace("| `3` |", "| `4` |")) != settings(RunConfig)


@pytest.mark.parametrize(
    "page", linking_pages(), ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page)


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `title`, here\n[a](#a-title-here) [b](#other) [c](gone.md) [d](page.md#x)")
    assert broken_links(page) == ["#other", "gone.md", "page.md#x"]


# --- The tables of the guides are what `lockstep plan` computes ----------------


def table_rows(page: Path, columns: int) -> list[list[str]]:
    """Return the rows of numbers, `| 1 | ...`, of the page's tables with so many columns."""
    rows = re.findall(r"^\| (.*) \|$", page.read_text(), re.MULTILINE)
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    return [row for row in cells if len(row) == columns]


def table_faults(page: Path) -> list[str]:
    """Return the rows of a guide's three tables that `plan` would write otherwise."""
    faults = []
    for row in table_rows(page, 4):
        if row[0].isdigit() and row[1] == str(4 * int(row[0])):
            plan = plan_batches(BatchConfig(batch_size=4), 29_500, int(row[0]))
            if row[1:] != [
                str(n) for n in (plan.samples_at_once, plan.steps_per_epoch, plan.dropped)
            ]:
                faults.append(" ".join(row))
        elif row[0][0].isdigit() and all(cell.isdigit() for cell in row[1:]):
            config = BatchConfig(batch_size=int(row[1]), accumulate=int(row[2]))
            if plan_batches(config, 29_500, int(row[0][0])).global_batch != int(row[3]):
                faults.append(" ".join(row))
    for row in table_rows(page, 6):
        rule = re.match(r"`(none|linear|sqrt|batch)`", row[0])
        if rule:
            rate = RateConfig(lr=5e-4, lr_scaling=rule[1], reference_batch=4)  # type: ignore[arg-type]
            rates = [scaled_rate(rate, n, 4 * n) for n in (1, 2, 4, 8)]
            if [float(cell) for cell in row[2:]] != [float(f"{r:.3g}") for r in rates]:
                faults.append(" ".join(row))
    return faults


@pytest.mark.parametrize("name", ["guide.md", "guide.zh.md"])
def test_the_tables_of_the_guides_are_those_of_plan(name: str, tmp_path: Path) -> None:
    guide = ROOT / "docs" / name
    assert not table_faults(guide)
    planted = tmp_path / name
    wrong = {
        "| 3687 |": "| 3688 |",
        "| 32 | 4 | 128 |": "| 32 | 4 | 64 |",
        "| 7.07e-4 |": "| 7.7e-4 |",
    }
    for right, other in wrong.items():
        assert right in guide.read_text()
        planted.write_text(guide.read_text().replace(right, other))
        assert table_faults(planted), right


def test_a_broken_command_would_be_found(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n```bash\nlockstep pln\n```\n")
    assert commands(page) == ["lockstep pln"]
    with pytest.raises(AssertionError, match="lockstep pln"):
        test_a_documented_command_runs("page.md", "lockstep pln", tmp_path / "run", request)
