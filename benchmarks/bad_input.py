"""Does any bad input end in a traceback, take more than 2 s, or more than 1 GB?

    python benchmarks/bad_input.py [--seed 0] [--sets 4000] [--flags 4000]
        [--environments 20000] [--answers 5000] [--commands 2000] [--json]

Hands seeded bad input to the functions that the commands call: values of `--set` to every recipe,
launch variables, what `scontrol` prints, settings files, JSON, words of the command line. Each
must be accepted with a value that survives being written and read, or refused by a LockstepError:
one problem, shortened and without control characters, and one remedy. A sample goes through real
commands. Prints a table; exit code 1 if anything else happened.
"""

import argparse
import contextlib
import importlib
import io
import json
import math
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECIPES = ("jit", "protein", "atlas", "segmentation", "ctclip")
LIMIT_S = 2.0
LIMIT_BYTES = 2**30
STUCK_S = 10
"""When an input is given up. Seconds are those of the CPU, so that a busy machine fails nothing;
an input that makes a command wait uses none, and is found by this."""
LONGEST = 12_000
"""Characters of an error; its two parts are at most 4,000 each, escapes included a bit more."""


# --- Inputs: seeded, and the same for tests and this script ---------------------------------

DIGITS = ["9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000, "1" + "_1" * 3000, "9" * 20, "1e400"]
TEXTS = [
    "",
    " ",
    "\t",
    "\x00",
    "\x1b[31mred\x1b[0m",
    "two\nlines",
    "\ud800",
    "\udcff\udcfe",
    "\u202egpj.exe",
    "\u0663",
    "٣٤",
    "²",
    "½",
    "x" * 100_000,
    "'",
    '"',
    "`",
    "%",
    "@",
    "!",
    "*",
    "&",
    "#",
    "|",
    ">",
    "?",
    "-",
    "=",
    "<<",
    ":",
    ",",
    "$(id)",
    "${X}",
    "../../x",
    "nan",
    "-inf",
]
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40)
)
VALUES = [
    *DIGITS,
    *TEXTS,
    "2024-01-01",
    "2024-13-45",
    "2024-01-01T25:61:61Z",
    "0000-00-00",
    "12:30:00",
    "1:" * 3000 + "1",
    "0b" + "1" * 20_000,
    "0x_",
    "010",
    "0o17",
    "1_000",
    "-0",
    ".nan",
    ".inf",
    "-.inf",
    "1.0e+400",
    "[" * 3000,
    "[" * 60 + "]" * 60,
    "{a: " * 500 + "1" + "}" * 500,
    "- " * 500,
    "[" + "1," * 30_000 + "]",
    "{" * 3000,
    "!!python/object/apply:os.system [id]",
    "!!python/name:os.system",
    "!!binary '=='",
    "!!timestamp x",
    "!!int x",
    "!!float x",
    "!!bool maybe",
    "!!null x",
    "!!set {a}",
    "!!omap [a]",
    "!foo bar",
    "!!str 2024",
    "&a [*a]",
    "&a {b: *a}",
    "*a",
    "{<<: 3}",
    "{<<: [1]}",
    "{[1]: 2}",
    "{{a: 1}: 2}",
    "? a",
    "{1: 2}",
    "{null: 1}",
    "{2024-01-01: 1}",
    "{a: 1, a: 2}",
    "a: b: c",
    '"\\ud800"',
    '"\\0"',
    '"\\U00110000"',
    '"\\UFFFFFFFF"',
    '"\\xzz"',
    "true",
    "yes",
    "off",
    "~",
    "null",
    "--- 1\n--- 2",
    "...",
    "%YAML 9.9\n--- a",
    "[1, 2",
    "{a: 1",
    "[]",
    "{}",
    "[[]]",
    "[null]",
    "0",
    "1",
    "-1",
    "0.5",
    "1e-4",
    "auto",
    "cosine",
    "[0.9, 0.99]",
    "{batch_size: 4}",
    '"quoted"',
]
SECTIONS = ("batch", "rate", "schedule", "loader", "evaluation", "checkpoint", "sinks", "gradients")
KEYS = [
    *("output_dir", "seed", "epochs", "max_steps", "precision", "max_grad_norm", "averages"),
    *("exact", "parallel", "num_threads", "compile", "device", "timeout_s", "log_every", "resume"),
    *SECTIONS,
    *("batch.batch_size", "batch.global_batch_size", "rate.lr", "rate.reference_batch"),
    *("schedule.shape", "schedule.warmup_epochs", "schedule.floor", "loader.num_workers"),
    *("loader.prefetch", "loader.timeout_s", "evaluation.every_epochs", "evaluation.every_steps"),
    *("checkpoint.every_epochs", "checkpoint.keep_last", "sinks.wandb_tags", "sinks.log_file"),
    *("gradients.bucket_mb", "data.batch_size", "data.data_dir", "model.action_dim"),
    *("training.learning_rate", "training.loss", "training.loss.pose_weight", "checkpoint"),
    *("experiment.name", "experiment.seed", "data.paths.train", "data.spacing", "lockstep"),
    *("lockstep.epochs", "validation.metrics", "checkpoint.save_dir", "wandb.tags", "logging"),
    *("", ".", "a..b", "epochs.number", "a." * 3000 + "b", "x" * 50_000, "\x1b[2J", "\ud800"),
    *("é", "batch.batch_sise", "__class__", "model_config", " epochs ", "1", "null"),
]


def mutated(rng: random.Random, text: str) -> str:
    """Return a text with a piece cut out, doubled, replaced or put in."""
    start = rng.randint(0, len(text))
    end = min(len(text), start + rng.randint(0, 12))
    piece = rng.choice(["", text[start:end] * 2, rng.choice(TEXTS)[:200], chr(rng.randint(0, 255))])
    return text[:start] + piece + text[end:]


def set_text(rng: random.Random) -> str:
    """Return an argument of `--set`."""
    value = rng.choice(VALUES)
    if rng.random() < 0.3:
        value = mutated(rng, value)
    text = f"{rng.choice(KEYS)}={value}"
    return text if rng.random() < 0.97 else text.replace("=", "")


NUMBERS = ["0", "1", "2", "3", "8", "29500", "65536", "-1", "1.5", "1e3", "0x2", "1_0", " 1", "+1"]
LISTS = [
    *("4(x2),3", "1(x999999999999)", "9999999999999(x9999999999999)", "1," * 50_000, "(x", "x3)"),
    *("1(x" + "9" * 5000 + ")", "4(x2", ",,,", "0(x0)"),
]
HOSTS = [
    *("localhost", "node[1-2]", "gpu[07-09,12],login1", "[" * 60_000, "[a" * 30_000, "n[]", "a b"),
    *("[" + "," * 60_000 + "]", "host\n", "\udcff", "::1", "a" * 70_000, "node" + "[1]" * 20_000),
]
TIMES = ["1800", "1e9", "nan", "inf", "-1", "1800s", "0", "1e400", "9" * 5000, "0.5"]
DEVICES = ["0,1", "", "-1", "GPU-x", "0," * 30_000, "0,0,0", "\u0663", "MIG-1/2/3", "9" * 5000]
NUMBER_NAMES = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    *("SLURM_JOB_NUM_NODES", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_SIZE", "MPI_LOCALRANKID"),
    *("MPI_LOCALNRANKS", "MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_RESTART_COUNT", "LOCKSTEP_RESTART_COUNT", "LOCKSTEP_REHEARSAL"),
]
OTHER_NAMES = {
    "SLURM_STEP_TASKS_PER_NODE": LISTS,
    "SLURM_STEP_NODELIST": HOSTS,
    "MASTER_ADDR": HOSTS,
    "NCCL_TIMEOUT": TIMES,
    "CUDA_VISIBLE_DEVICES": DEVICES,
    "TORCHELASTIC_RUN_ID": TEXTS,
    "TORCHELASTIC_ERROR_FILE": ["/tmp/none_x/attempt_0/0/error.json", "", "/", "x" * 9000],
    "PMIX_NAMESPACE": TEXTS,
}
LAUNCHES: list[dict[str, str]] = [
    {},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
    {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n[1-2]"},
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    {"PMI_RANK": "0", "PMI_SIZE": "2"},
]


def environment(rng: random.Random) -> dict[str, str]:
    """Return launch variables, of one launcher or several, some of them hostile."""
    env = dict(rng.choice(LAUNCHES))
    if rng.random() < 0.2:
        env |= rng.choice(LAUNCHES)
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.6:
            name = rng.choice(NUMBER_NAMES)
            value = rng.choice([*NUMBERS, *NUMBERS, *DIGITS, *TEXTS])
        else:
            name = rng.choice(list(OTHER_NAMES))
            value = rng.choice([*OTHER_NAMES[name], *OTHER_NAMES[name], *TEXTS])
        if rng.random() < 0.2:
            value = mutated(rng, value)
        env[name] = value.replace("\0", "")
    return {name: value for name, value in env.items() if rng.random() < 0.95}


JOB = (
    "JobId=7 JobName=train UserId=me(1000) JobState=RUNNING Reason=None Requeue=1 Restarts=0 "
    "ExitCode=0:0 RunTime=00:01:02 TimeLimit=12:00:00 EndTime=2026-01-01T12:00:00 NodeList=n[1-2]\n"
)
CONFIG = "Configuration data as of 2026-01-01\nKillWait                = 30 sec\nTCPTimeout = 2 sec"
BATCH = (
    "#!/bin/bash\n#SBATCH --time=12:00:00\n#SBATCH --signal=B:USR1@120 # save\n"
    "#SBATCH --nodes=2\n#SBATCH --comment='two words'\nsrun python train.py\n"
)
PIECES = [
    *DIGITS,
    *TEXTS,
    *("ExitCode=x:y", "ExitCode=9:9:9", "ExitCode=-1:-1", "ExitCode=", "JobState=", "JobState=RUN"),
    *("KillWait = many", "KillWait=-3", "KillWait = " + "9" * 5000, "--signal=TERM@soon"),
    *("--signal=@", "--signal=B:", "--signal=99999@1", "--time=soon", "--time=-1", "--time=1-1-1"),
    *("--time=" + "9" * 5000, "--time=٣:٣", "--comment='open", '--comment="', "--nodes=\\"),
    *("\ufffd" * 50, "=" * 5000, "a=b " * 5000, "\n" * 5000, "slurm_load_jobs error: ...\n"),
]


def answer(rng: random.Random) -> dict[str, str]:
    """Return what three SLURM commands print: truncated, binary, huge, or nearly right."""
    said = {"job": JOB, "config": CONFIG, "batch": BATCH}
    for name in said:
        text = said[name]
        for _ in range(rng.randint(0, 3)):
            start = rng.randint(0, len(text))
            text = text[:start] + rng.choice(PIECES) + text[start + rng.randint(0, 20) :]
        if rng.random() < 0.2:
            text = text[: rng.randint(0, len(text))]
        if rng.random() < 0.1:
            text = rng.randbytes(rng.randint(0, 300)).decode(errors="replace")
        said[name] = text
    return said


def settings_files(folder: Path) -> dict[str, Path]:
    """Write a settings file of each bad kind, and return them by name."""
    texts: dict[str, str | bytes] = {
        "a list": "- 1\n- 2\n",
        "a word": "hello\n",
        "tabs": "data:\n\tbatch_size: 4\n",
        "NUL bytes": b"data:\n  batch_size: \x004\n",
        "latin-1": "experiment:\n  name: caf\xe9\n".encode("latin-1"),
        "utf-16": "data: {batch_size: 4}\n".encode("utf-16"),
        "an image": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 40,
        "alias bomb": BOMB,
        "merge bomb": MERGE_BOMB,
        "contains itself": "data: &a\n  paths: *a\n",
        "nesting": "data: " + "[" * 20_000 + "\n",
        "a key twice": "data:\n  batch_size: 4\n  batch_size: 8\n",
        "a list for a key": "data:\n  ? [1, 2]\n  : 3\n",
        "a number for a key": "1: 2\n",
        "a tag": "data: !!python/object/apply:os.system [id]\n",
        "a bad date": "experiment:\n  name: 2024-13-45\n",
        "digits": "data:\n  batch_size: " + "9" * 5000 + "\n",
        "a bad escape": 'experiment:\n  name: "\\UFFFFFFFF"\n',
        "a surrogate": 'experiment:\n  name: "\\ud800"\n',
        "a base that is a number": "_base_: ${NOTHING:3}\n",
        "a base of itself": "_base_: a_base_of_itself.yaml\n",
        "a base that is gone": "_base_: gone.yaml\n",
        "a variable that is no YAML": "data: ${NOTHING:a: b: c}\n",
        "open variables": "data: '" + "${a:" * 50_000 + "'\n",
        "unknown keys": "nothing: 1\n\x41" * 1 + ": 2\n",
        "sections that are words": "data: four\ntraining: 3\nmodel: [1]\ncheckpoint: x\nwandb: 1\n",
        "NaN": "training:\n  learning_rate: .nan\n  weight_decay: .inf\n",
        "many keys": "".join(f"key_{n}: {n}\n" for n in range(30_000)),
        "a long line": "name: " + "x" * 2_000_000 + "\n",
    }
    files = {}
    for name, content in texts.items():
        path = folder / f"{name.replace(' ', '_')}.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        files[name] = path
    with (folder / "large.yaml").open("wb") as file:
        file.truncate(2**36)  # without a block on the disk
    os.mkfifo(folder / "pipe.yaml")
    (folder / "loop.yaml").symlink_to("loop.yaml")
    files["64 GB"] = folder / "large.yaml"
    files["a pipe"] = folder / "pipe.yaml"
    files["a link to itself"] = folder / "loop.yaml"
    files["a folder"] = folder
    files["missing"] = folder / "missing.yaml"
    files["a line in its name"] = folder / "two\nlines.yaml"
    files["a long name"] = folder / ("x" * 5000)
    files["endless"] = Path("/dev/zero")
    files["unreadable"] = Path("/proc/self/mem")
    return files


def number_text(rng: random.Random) -> str:
    return rng.choice([*NUMBERS, *DIGITS, *TEXTS, "99999999999", "2147483648", "1,2,99999999999"])


def command_line(rng: random.Random) -> list[str]:
    """Return words after `lockstep` that start nothing, whatever they say."""
    text, number = rng.choice(TEXTS), number_text(rng)
    other = rng.choice(["x" * 300, "a\nb", "\udcff", "/", ".", "", "a/../../b", "gone.py", text])
    float_flag = rng.choice(["nan", "inf", "-1", "1e400", "0", number])
    lines = [
        ["plan", "--samples", number, "--batch-size", number_text(rng)],
        ["plan", "--samples", "100", "--batch-size", "4", "--gpus", number, "--lr", float_flag],
        ["plan", "--samples", "100", "--batch-size", "4", "--lr-scaling", text],
        ["launch", "--gpus", number, other],
        ["launch", "--nodes", number, "--head", text, "gone.py"],
        ["launch", "--wait", float_flag, "--restarts", number, "gone.py"],
        ["run", text, "--gpus", number],
        ["run", "jit", "--gpus", number, "--gone"],
        ["submit", "--dry-run", "--nodes", number, "train.py"],
        ["submit", "--dry-run", "--partition", text, "--account", other, "train.py"],
        ["submit", "--dry-run", "--time", rng.choice([number, "1-" + number]), "train.py"],
        ["submit", "--dry-run", "--folder", text, "--name", other, "train.py", text],
        ["submit", "--dry-run", "--sbatch", f"{rng.choice(['qos', text])}={other}", "train.py"],
        ["submit", "--dry-run", "--array", text, "--setup", other, "train.py", other],
        ["submit", "--dry-run", "--requeues", number, "--restarts", number, "train.py"],
        ["submit", "--dry-run", other],
        ["new", rng.choice([text, other, "x" * 300 + "/y"])],
        ["init", rng.choice(["slurm", "vscode", "scripts", "accelerate", text]), other, text],
        ["rehearse", "--without", text, "--", "gone"],
        ["rehearse", "--limit", float_flag, "--", f"gone-{other[:20]}"],
        ["certify", "parity", "--gpus", number, "--", "gone"],
        ["bench", "scaling", "--gpus", number, "--link", text, "--", "gone"],
        ["bench", "scaling", "--interconnect", text, "--json", other, "--", "gone"],
        [text, other],
    ]
    return [word.replace("\0", "") for word in rng.choice(lines)]


def doctor_line(rng: random.Random) -> list[str]:
    """Return words that `lockstep doctor --` would take apart, without running any."""
    text, number = rng.choice(TEXTS), number_text(rng)
    lines = [
        ["torchrun", f"--nproc_per_node={number}", "t.py"],
        ["torchrun", "--nnodes", number, "--master_port", number, "t.py", text],
        ["torchrun", f"--rdzv_endpoint={text}:{number}", "t.py"],
        ["srun", f"-n{number}", "python", "t.py"],
        ["srun", "--nodes", number, "python", text],
        ["sbatch", text],
        ["sbatch", "--nodes=" + number, "batch.sh"],
        ["lockstep", "launch", "--gpus", number, "--head", text, "--nodes", "2", "t.py"],
        ["lockstep", "run", text, "--gpus", number],
        ["accelerate", "launch", "--config_file", text, "t.py"],
        ["accelerate", "launch", "--num_processes", number, "t.py"],
        ["python", "-m", text],
        ["bash", text],
        [text or "gone"],
        ["x" * 5000 + "/y"],
        [],
    ]
    return [word.replace("\0", "") for word in rng.choice(lines)]


# --- What is asked of each ------------------------------------------------------------------


@dataclass
class Tally:
    """How many inputs were accepted, refused in words, or did what none may do."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    examples: list[str] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return sum(n for kind, n in self.counts.items() if kind not in ("accepted", "refused"))


class Stuck(BaseException):
    """An input that was given up; no `except Exception` catches it."""


def _give_up(*_: object) -> None:
    raise Stuck


def fault_in(error: BaseException) -> str:
    """Return what is wrong with the words of an error raised on purpose, or nothing."""
    problem, remedy = str(error.problem), str(error.remedy)  # type: ignore[attr-defined]
    said = str(error)
    if not problem.strip() or not remedy.strip():
        return "says nothing"
    if len(said) > LONGEST:
        return f"is {len(said):,} characters long"
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", said):
        return "holds control characters"
    if problem.count("\n") or remedy.count("\n"):
        return "is more than a sentence"
    return ""


def judge(action: Callable[[], object]) -> tuple[str, str, float]:
    """Do it; return what it came to, what was wrong, and the seconds of CPU time it took."""
    from lockstep.errors import LockstepError

    kind, told = "accepted", ""
    began = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, STUCK_S)
    try:
        action()
    except LockstepError as error:
        told = fault_in(error)
        kind = "badly worded" if told else "refused"
        told = f"{told}: {str(error)[:300]!r}" if told else ""
        if error.exit_code != 2:
            kind, told = "wrong code", f"exit code {error.exit_code}"
    except SystemExit as ended:
        if ended.code == 2:
            kind = "refused"
        elif ended.code not in (0, None):
            kind, told = "wrong code", f"exit code {ended.code!r}"
    except Stuck:
        kind, told = "slow", f"more than {STUCK_S} s"
    except BaseException as error:
        kind = "traceback"
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        told = f"{type(error).__name__} at {place}: {str(error)[:150]!r}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.process_time() - began
    if kind in ("accepted", "refused") and seconds > LIMIT_S:
        kind, told = "slow", f"{seconds:.1f} s"
    return kind, told, seconds


def survives(model: Any) -> None:
    """Check that a config is the same after being written as JSON and read."""
    text = model.model_dump_json()
    assert type(model).model_validate_json(text) == model, "is another after writing and reading"
    assert not re.search(r"\b(NaN|Infinity)\b", text)
    _check_finite(model.model_dump())


def _check_finite(value: Any) -> None:
    if isinstance(value, float):
        assert math.isfinite(value), "NaN or infinity was accepted"
    for part in value.values() if isinstance(value, dict) else ():
        _check_finite(part)
    if isinstance(value, list | tuple):
        for part in value:
            _check_finite(part)


CTCLIP_SETTINGS = "experiment: {name: a}\n"


def build(recipe: str, argv: list[str]) -> None:
    """Do what `lockstep run RECIPE` does before it trains."""
    built = importlib.import_module(f"lockstep_recipes.{recipe}.flags").build(argv)
    if callable(built):  # ctclip: the run, with its settings as the first argument
        survives(built.args[0].run_config())
        survives(built.args[0])
    else:
        survives(built[0].config)
        survives(built[1])


Cases = Iterator[tuple[str, Callable[[], object]]]
"""Inputs in words, each with what is done with it."""


def set_cases(seed: int, count: int, folder: Path) -> Cases:
    """Hand `--set` values to every recipe in turn."""
    rng = random.Random(seed)
    (folder / "ctclip.yaml").write_text(CTCLIP_SETTINGS)
    for number in range(count):
        recipe, text = RECIPES[number % len(RECIPES)], set_text(rng)
        config = ["--config", str(folder / "ctclip.yaml")] if recipe == "ctclip" else []
        yield (
            f"{recipe} --set {text[:60]!r}",
            lambda r=recipe, c=config, t=text: build(r, [*c, "--set", t]),
        )


def flag_cases(seed: int, count: int, folder: Path) -> Cases:
    """Hand values to every flag of every recipe, except those that generate data."""
    rng = random.Random(seed)
    os.chdir(folder)
    (folder / "ctclip.yaml").write_text(CTCLIP_SETTINGS)
    parsers = {r: importlib.import_module(f"lockstep_recipes.{r}.flags").flags() for r in RECIPES}
    for number in range(count):
        recipe = RECIPES[number % len(RECIPES)]
        known = [f for f in parsers[recipe]._option_string_actions if f.startswith("--")]
        flag = rng.choice([f for f in known if f not in ("--help", "--sample_data", "--config")])
        value = rng.choice([*NUMBERS, *DIGITS, *TEXTS, *TIMES, "1" + "0" * 400, "auto"])
        words = ["--config", "ctclip.yaml"] if recipe == "ctclip" else []
        words += [flag, value] if number % 2 else [f"{flag}={value}"]
        words = [word.replace("\0", "") for word in words]
        yield f"{recipe} {flag} {value[:40]!r}", lambda r=recipe, w=words: build(r, w)


def environment_cases(seed: int, count: int, folder: Path) -> Cases:
    """Hand launch variables to all that read them."""
    from lockstep.dist.detect import detect_launch
    from lockstep.dist.environment import group_timeout_s
    from lockstep.doctor import grace, machine, network
    from lockstep.doctor.command import read_command
    from lockstep.doctor.report import as_json, as_lines

    rng = random.Random(seed)
    search = {"PATH": os.environ["PATH"]}
    driver = machine.Driver(
        (machine.Gpu(0, "GPU-a", "", 1, 0, ()), machine.Gpu(1, "GPU-b", "", 1, 0, ()))
    )
    (folder / "t.py").touch()

    def timeout(env: dict[str, str]) -> None:
        os.environ["NCCL_TIMEOUT"] = env["NCCL_TIMEOUT"]
        try:
            assert 0 < group_timeout_s(1800) <= 1e8
        finally:
            del os.environ["NCCL_TIMEOUT"]

    def look(env: dict[str, str]) -> None:
        results = [
            network.launch_variables(env),
            machine.gpus(driver, env),
            grace.grace_time(None, None, env, lambda words: ""),
        ]
        for text in [as_json(results), *(line for _, line in as_lines(results))]:
            assert len(text) < 10 * LONGEST, "a verdict of many characters"
        for _, line in as_lines(results):
            assert not re.search(r"[\x00-\x08\x0b-\x1f]", line), "control characters in a verdict"

    def launch(env: dict[str, str]) -> None:
        found = detect_launch(env)
        assert 0 <= found.rank < found.size < 2**31
        assert found.port is None or 0 < found.port < 65_536

    for number in range(count):
        env = environment(rng)
        # A lone surrogate other than those that stand for bytes cannot be in an environment.
        env = {n: re.sub("[\ud800-\udc7f\udd00-\udfff]", "?", v) for n, v in env.items()}
        told = json.dumps(env)[:100]
        if number % 4 == 0 and "NCCL_TIMEOUT" in env:
            yield told, lambda e=env: timeout(e)
        elif number % 4 == 1:
            yield told, lambda e=env: look(e)
        elif number % 4 == 2:
            words = ["python", "t.py"] if number % 8 == 2 else ["srun", "python", "t.py"]
            yield told, lambda e=env, w=words: read_command(w, {**e, **search}, folder)
        else:
            yield told, lambda e=env: launch(e)


def answer_cases(seed: int, count: int, folder: Path) -> Cases:
    """Hand what SLURM's commands print to those that read it."""
    from lockstep.doctor import grace
    from lockstep.doctor.findings import Findings
    from lockstep.launch.slurm import read_status

    rng = random.Random(seed)

    def check(said: dict[str, str]) -> None:
        status = read_status(said["job"])
        if status is not None:
            assert 0 <= status.exit_code <= 255
            assert status.text("7")

        def ask(words: list[str]) -> str:
            return said["config" if words[1:] == ["show", "config"] else "batch"]

        found = Findings(step_s=1.0, save_s=2.0)
        result = grace.grace_time(None, found, {"SLURM_JOB_ID": "7"}, ask)
        assert result.evidence

    for _ in range(count):
        said = answer(rng)
        yield f"{said['job'][:80]!r}", lambda s=said: check(s)


def file_cases(seed: int, count: int, folder: Path) -> Cases:
    """Hand settings files of every kind to every recipe, and to what checks Accelerate's."""
    from lockstep.doctor.command import read_command
    from lockstep_recipes.ctclip.launch import check_file

    files = settings_files(folder)
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name, path in files.items():
        for recipe in RECIPES:
            yield (
                f"{recipe} --config: {name}",
                lambda r=recipe, p=path: build(r, ["--config", str(p)]),
            )
        yield f"accelerate: {name}", lambda p=path: check_file(p)
        words = ["accelerate", "launch", "--config_file", str(path), "t.py"]
        yield f"doctor: {name}", lambda w=words: read_command(w, env, folder)
    fields = ["num_machines", "num_processes", "mixed_precision", "distributed_type"]
    rng = random.Random(seed)
    for number in range(count):
        values = {name: rng.choice(VALUES) for name in fields if rng.random() < 0.5}
        values = {"distributed_type": "MULTI_GPU", "num_processes": "4"} | values
        path = folder / f"accelerate_{number}.yaml"
        text = "".join(f"{name}: {value}\n" for name, value in values.items())
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        yield f"accelerate: {text[:80]!r}", lambda p=path: check_file(p)


BAD_JSON = [
    *("", "{", "[", "null", "3", '"x"', "[]", "{}", "[" * 100_000, '{"a":' * 100_000, "\ud800"),
    *("9" * 5000, '{"mean": [' + "9" * 5000 + "]}", "NaN", '{"mean": NaN, "std": 1}'),
    *('{"mean": [1e999], "std": [1]}', '{"mean": {"a": 1}, "std": "x"}', '{"mean": 1' + "0" * 400),
    *('{"mean": [1' + "0" * 400 + '], "std": [1]}', '{"train": 3}', '{"train": [[1], {"a": 2}]}'),
    *('{"seq": 3}', '{"seq": "AC", "coords": {"N": "x"}, "name": 1}', '{"volume": 3}'),
    *('{"volume": "a", "report": "b", "spacing": [' + "9" * 400 + "]}", '{"text": 3}'),
    *('{"prompt": 1, "answer": 2}', '{"text": "\\ud800"}', '{"volume": "\\u0000"}'),
    *('{"seq": "A", "name": "b", "coords": {"N": [[1' + "0" * 400 + ",2,3]]}}", "\x00\xff"),
]


def json_cases(seed: int, count: int, folder: Path) -> Cases:
    """Hand JSON files to every recipe that reads some."""
    import torch

    from lockstep_recipes.atlas.data import Statistics, read_instruction, read_statistics
    from lockstep_recipes.ctclip.data import _entry
    from lockstep_recipes.jit.data import read_tokens
    from lockstep_recipes.protein.preprocess import Filter, _read_line, read_splits

    rng = random.Random(seed)
    ones = torch.ones(1)
    measured = Statistics(*[ones] * len(Statistics.__slots__))
    for number in range(count):
        text = BAD_JSON[number] if number < len(BAD_JSON) else mutated(rng, rng.choice(BAD_JSON))
        path = folder / f"json_{number}" / "metadata.json"
        path.parent.mkdir()
        path.write_bytes(text.encode(errors="surrogatepass"))

        def line(text: str = text) -> None:
            found = _read_line(text, "line 1", Filter())
            if isinstance(found, Exception):
                raise found

        told = repr(text[:60])
        yield f"atlas statistics {told}", lambda p=path: read_statistics(p, measured)
        yield f"atlas instruction {told}", lambda p=path: read_instruction(p.parent)
        yield f"jit {told}", lambda p=path: read_tokens(p)
        yield f"protein splits {told}", lambda p=path: read_splits(p, ["a"])
        yield f"protein line {told}", line
        yield f"ctclip {told}", lambda p=path, t=text: _entry(p, 1, t)


def command_cases(seed: int, count: int, folder: Path) -> Cases:
    """Hand words to `lockstep` itself, and to what takes a command line apart."""
    from lockstep.cli.main import main
    from lockstep.doctor.command import read_command

    rng = random.Random(seed)
    (folder / "train.py").touch()
    (folder / "t.py").touch()
    (folder / "batch.sh").write_text(BATCH)
    os.chdir(folder)
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(words: list[str]) -> None:
        sys.argv = ["lockstep", *words]
        said = io.StringIO()
        code: object = 0
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                main()
            except SystemExit as ended:
                code = ended.code
        assert "Traceback" not in said.getvalue()
        lines = said.getvalue().splitlines()
        if any(line.startswith("lockstep: ") for line in lines):  # in our own words
            assert code == 2, f"exit code {code}"
            assert len(said.getvalue()) < LONGEST, "an error of many characters"
            assert any(line.startswith("  try: ") for line in lines), "no remedy"
        raise SystemExit(code)

    for number in range(count):
        if number % 3:
            words = command_line(rng)
            yield f"lockstep {words!r}"[:150], lambda w=words: run(w)
        else:
            words = doctor_line(rng)
            yield f"doctor -- {words!r}"[:150], lambda w=words: read_command(w, env, folder, 2)


CAMPAIGNS: dict[str, Callable[[int, int, Path], Cases]] = {
    "--set values": set_cases,
    "recipe flags": flag_cases,
    "environments": environment_cases,
    "scontrol outputs": answer_cases,
    "settings files": file_cases,
    "JSON files": json_cases,
    "command lines": command_cases,
}


def run_campaign(name: str, seed: int, count: int) -> Tally:
    """Run a campaign in a forked process that may take 1 GB more than it begins with."""
    for module in ("lockstep.trainer", *(f"lockstep_recipes.{r}.flags" for r in RECIPES)):
        importlib.import_module(module)  # here, so that no input pays for it
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            sender.send(_work(name, seed, count))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    sender.close()
    try:
        tally: Tally = receiver.recv()
    except EOFError:
        tally = Tally(name, Counter({"died": 1}), examples=["the process ended"])
    finally:
        os.waitpid(child, 0)
        receiver.close()
    return tally


def _work(name: str, seed: int, count: int) -> Tally:
    signal.signal(signal.SIGALRM, _give_up)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for variable in [n for n in os.environ if n in NUMBER_NAMES or n in OTHER_NAMES]:
        del os.environ[variable]
    tally = Tally(name)
    with tempfile.TemporaryDirectory(prefix="lockstep-bad-input-") as folder:
        for told, action in CAMPAIGNS[name](seed, count, Path(folder)):
            kind, fault, seconds = judge(action)
            tally.counts[kind] += 1
            tally.slowest_s = max(tally.slowest_s, seconds)
            if fault and len(tally.examples) < 2000:
                tally.examples.append(f"{kind}: {told}: {fault}")
        os.chdir("/")
    return tally


# --- A sample through real commands -----------------------------------------------------------


def real_commands(folder: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return commands, each with the variables it is started with."""
    (folder / "train.py").write_text("import lockstep; lockstep.World.enter()\n")
    files = settings_files(folder)
    lockstep = [sys.executable, "-m", "lockstep.cli.main"]
    sets = ["epochs=" + "9" * 5000, "epochs=2024-13-45", "checkpoint=3", "epochs=" + "[" * 5000]
    found = {
        f"ctclip --config: {name}": ([*lockstep, "run", "ctclip", "--config", str(path)], {})
        for name, path in files.items()
        if name in ("alias bomb", "merge bomb", "a pipe", "endless", "64 GB", "nesting")
    }
    for text in sets:
        found[f"jit --set {text[:20]}"] = ([*lockstep, "run", "jit", "--set", text], {})
    found["submit, a line too many"] = (
        [*lockstep, "submit", "--dry-run", "--partition", "a\n#SBATCH --x", "train.py"],
        {},
    )
    found["launch --gpus 99999999999"] = (
        [*lockstep, "launch", "--gpus", "99999999999", "train.py"],
        {},
    )
    tasks = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    found["1(x999999999999)"] = (
        [*lockstep, "run", "jit"],
        {**tasks, "SLURM_STEP_TASKS_PER_NODE": "1(x999999999999)", "MASTER_ADDR": "a b"},
    )
    return found


def run_commands(folder: Path) -> Tally:
    """Run each for real: exit code 2, words, under 1 GB, at most 2 s more than a plain refusal."""
    tally = Tally("real commands")
    env = {n: v for n, v in os.environ.items() if n not in NUMBER_NAMES}
    usual = [sys.executable, "-m", "lockstep.cli.main", "run", "ctclip", "--config", "gone.yaml"]
    usual_s = min(_run(usual, env, folder)[2] for _ in range(2))
    for told, (words, more) in real_commands(folder).items():
        code, said, seconds, most_bytes = _run(words, {**env, **more}, folder)
        kind = "refused"
        if "Traceback" in said:
            kind = "traceback"
        elif code != 2:
            kind = "wrong code"
        elif "\n  try: " not in said or len(said) > LONGEST:
            kind = "badly worded"
        elif most_bytes > LIMIT_BYTES:
            kind = "large"
        elif seconds > usual_s + LIMIT_S:
            kind = "slow"
        tally.counts[kind] += 1
        tally.slowest_s = max(tally.slowest_s, seconds - usual_s)
        if kind != "refused":
            fault = f"exit code {code}, {seconds:.1f} s, {most_bytes >> 20} MB"
            tally.examples.append(f"{kind}: {told}: {fault}: {said[-300:]!r}")
    return tally


def _run(words: list[str], env: dict[str, str], folder: Path) -> tuple[int, str, float, int]:
    """Run a command for at most a minute; return its exit code, errors, CPU seconds and memory."""
    with tempfile.TemporaryFile() as file:
        began = time.perf_counter()
        process = subprocess.Popen(
            words,
            env={**env, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
        )
        deadline = began + 60
        while True:
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            if time.perf_counter() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
                _, status, usage = os.wait4(process.pid, 0)
                break
            time.sleep(0.02)
        process.returncode = os.waitstatus_to_exitcode(status)
        file.seek(0)
        said = file.read(10 * LONGEST).decode(errors="replace")
    return process.returncode, said, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sets", type=int, default=4000)
    parser.add_argument("--flags", type=int, default=4000)
    parser.add_argument("--environments", type=int, default=20_000)
    parser.add_argument("--answers", type=int, default=5000)
    parser.add_argument("--commands", type=int, default=2000)
    parser.add_argument("--examples", type=int, default=10, help="faults to print of each kind")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    counts = [args.sets, args.flags, args.environments, args.answers, 100, 200, args.commands]
    tallies = [
        run_campaign(name, args.seed, count)
        for name, count in zip(CAMPAIGNS, counts, strict=True)
        if count
    ]
    with tempfile.TemporaryDirectory(prefix="lockstep-bad-input-") as folder:
        tallies.append(run_commands(Path(folder)))
    if args.json:
        print(json.dumps([{"name": t.name, **t.counts, "slowest_s": t.slowest_s} for t in tallies]))
    else:
        kinds = ["accepted", "refused", "traceback", "badly worded", "wrong code", "slow", "other"]
        print(f"{'':<18}{'inputs':>8}" + "".join(f"{kind:>14}" for kind in kinds) + f"{'max s':>8}")
        for tally in tallies:
            other = {k: n for k, n in tally.counts.items() if k not in kinds}
            cells = [tally.counts[kind] for kind in kinds[:-1]] + [sum(other.values())]
            line = "".join(f"{cell:>14,}" for cell in cells)
            total = sum(tally.counts.values())
            print(f"{tally.name:<18}{total:>8,}{line}{tally.slowest_s:>8.2f}")
        for tally in tallies:
            for example in tally.examples[: args.examples]:
                print(f"  {tally.name}: {example}")
    return int(any(tally.failed for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())
