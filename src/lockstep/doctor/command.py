"""What a command line would start: its launcher, processes, rendezvous address and script.

Owns: the options of each launcher that a check needs, and reading through a shell script. Does not
own: running the job (`trial.py`).
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, LaunchError, plain, shown
from lockstep.launch.recipes import recipe_names
from lockstep.text_input import whole_number
from lockstep.yaml_input import read_yaml_file

DEFAULT_PORT = 29500
"""The default port of torchrun, torch.distributed.launch and accelerate."""
SHELL_S = 20.0

FLAGS = {
    "srun": "u unbuffered l label exclusive overlap kill-on-bad-exit v verbose Q quiet O",
    "sbatch": "wait W parsable requeue no-requeue exclusive hold H test-only v verbose Q quiet",
    "python": "u B E s S I O OO v q b d i P x",
    "lockstep launch": "m",
}
"""The options without a value, by launcher; any other takes the next word as its value."""
SHELLS = ("bash", "sh", "zsh", "dash")
LAUNCHERS = ("torchrun", "accelerate", "python", "python3", "lockstep", "srun")


@dataclass(frozen=True, slots=True)
class Command:
    """The parts of a command line that the checks need."""

    launcher: str
    script: tuple[str, ...] = ()
    """A script, or -m and a module, and its arguments."""
    num_processes: int = 1
    """On this machine."""
    num_nodes: int = 1
    head: str = "localhost"
    port: int | None = None
    """The rendezvous port; None if the launcher takes a free one, or none is needed."""
    env: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path()
    batch: Mapping[str, str] = field(default_factory=dict)
    """The SLURM options of an sbatch script."""
    batch_script: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Return the number of processes on all machines."""
        return self.num_processes * self.num_nodes


def read_command(
    words: Sequence[str], env: Mapping[str, str], folder: Path, num_gpus: int = 0
) -> Command:
    """Return what the command `words` would start in `folder`, with the variables `env`.

    >>> torchrun = ["torchrun", "--nproc_per_node=2", "--master_port", "29501", "t.py", "--lr", "1"]
    >>> found = read_command(torchrun, {}, Path())
    >>> found.num_processes, found.port, found.script
    (2, 29501, ('t.py', '--lr', '1'))

    Raises:
        LockstepError: the command cannot start, or cannot be understood.
    """
    own: dict[str, str] = {}
    rest = list(words)
    if rest[:1] == ["env"]:
        rest.pop(0)
    while rest and re.match(r"[A-Za-z_][A-Za-z0-9_]*=", rest[0]):
        name, _, value = rest.pop(0).partition("=")
        own[name] = value
    if not rest or not rest[0]:
        raise ConfigError(
            "there is no command after --", "write lockstep doctor -- torchrun train.py"
        )
    env = {**env, **own}
    program, name = rest[0], Path(rest[0]).name
    remark = _find_program(program, env, folder)
    found = _read(name, rest, env, folder, num_gpus)
    remarks = (*found.remarks, *([remark] if remark else []))
    found = replace(found, env={**own, **found.env}, remarks=remarks)
    return found if found.folder != Path() else replace(found, folder=folder)


def _read(
    name: str, words: list[str], env: Mapping[str, str], folder: Path, num_gpus: int
) -> Command:
    if name == "lockstep":
        return _read_lockstep(words[1:], num_gpus)
    if name == "torchrun":
        return _read_torchrun(name, words[1:], num_gpus)
    if name == "accelerate" and words[1:2] == ["launch"]:
        return _read_accelerate(words[2:], env, folder, num_gpus)
    if name == "srun":
        return _read_srun(words[1:], env, folder, num_gpus)
    if name == "sbatch":
        return _read_sbatch(words[1:], folder)
    if name in SHELLS or name.endswith(".sh"):
        return _read_shell(words, env, folder, num_gpus)
    if re.fullmatch(r"python[0-9.]*", name):
        return _read_python(words[1:], env, num_gpus)
    raise ConfigError(
        f"lockstep doctor does not know the launcher {name!r}",
        "use python, torchrun, accelerate launch, lockstep run, srun, sbatch or a shell script",
    )


def _find_program(program: str, env: Mapping[str, str], folder: Path) -> str:
    """Return a remark on where the program was found; refuse one that does not exist."""
    if "/" in program:
        path = folder / program
        if not os.path.isfile(path):
            raise LaunchError(
                f"there is no file {plain(program)} in {folder}",
                "pass its path relative to that folder",
            )
        if shutil.which(str(path.absolute())) is None:
            raise LaunchError(f"{program} may not be executed", f"run chmod +x {program}")
        return ""
    # This is `lockstep` itself, so it exists, whatever path it was called by.
    if program == "lockstep" or shutil.which(program, path=env.get("PATH")):
        return ""
    beside = Path(sys.executable).with_name(program)
    if os.path.exists(beside):
        return f"{program} is not on PATH but in {beside.parent}"
    raise LaunchError(f"there is no program {shown(program)}", "check its name, or install it")


def _options(launcher: str, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split a launcher's own options from the command it runs.

    >>> _options("srun", ["--exclusive", "--ntasks-per-node", "2", "-n8", "t.py", "--x"])
    ({'exclusive': '', 'ntasks_per_node': '2', 'n': '8'}, ['t.py', '--x'])
    """
    flags = FLAGS[launcher].replace("-", "_").split()
    found: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        option, equals, value = word.lstrip("-").partition("=")
        option = option.replace("-", "_")
        if not word.startswith("--") and re.fullmatch(r"[nNJpt][0-9]+", option):
            option, equals, value = option[0], "=", option[1:]  # -n8
        if equals or option in flags:
            found[option] = value
        else:
            found[option] = rest.pop(0) if rest else ""
        if option in ("m", "module") and not equals:
            break
    if rest[:1] == ["--"]:
        rest.pop(0)
    return found, rest


def _count(text: str, what: str, num_gpus: int = 0) -> int:
    if text in ("auto", "gpu", "all"):
        return max(1, num_gpus)
    number = whole_number(text)
    if not number:
        raise LaunchError(
            f"{what}={plain(text)} is not a number of processes of 1 or more",
            f"pass a number, such as {what}=2; without GPUs the processes run on the CPU",
        )
    return number


def _port(text: str, what: str) -> int:
    number = whole_number(text, most=65_535)
    if number is None:
        raise LaunchError(f"{what} {plain(text)} is not a port", f"pass {what} {DEFAULT_PORT}")
    return number


def _script(rest: Sequence[str], is_module: object) -> tuple[str, ...]:
    if not rest:
        raise LaunchError("the command names no script", "add train.py, or -m MODULE")
    return ("-m", *rest) if is_module else tuple(rest)


def _read_torchrun(launcher: str, words: Sequence[str], num_gpus: int) -> Command:
    args, cores = _torchrun_options(words), os.cpu_count() or 1
    counts = {"gpu": num_gpus, "cpu": cores, "auto": num_gpus or cores}
    num = _count(str(counts.get(args.nproc_per_node, args.nproc_per_node)), "--nproc_per_node")
    nodes = _count(args.nnodes.split(":")[-1], "--nnodes")
    head, at, option = args.master_addr, args.master_port, "--master_port"
    if args.rdzv_endpoint:
        head, _, at = args.rdzv_endpoint.partition(":")
        option = "--rdzv_endpoint"
    port: int | None = _port(str(at or DEFAULT_PORT), option)
    if args.standalone or port == 0:
        port = None
    script = _script([args.training_script, *args.training_script_args], args.module)
    if launcher == "torch.distributed.launch" and not (args.use_env or args.module):
        script = (script[0], "--local-rank=0", *script[1:])
    return Command(launcher, script, num, nodes, head, port)


def _torchrun_options(words: Sequence[str]) -> Namespace:
    """Parse the options of torchrun, or of torch.distributed.launch, with torch's own parser."""
    try:
        from torch.distributed.run import get_args_parser
    except ImportError as error:
        raise LaunchError(f"torch cannot be imported: {error}", "install torch") from error
    parser = get_args_parser()
    parser.add_argument("--use-env", "--use_env", action="store_true")
    return _parse(parser, "torchrun", words)


def _parse(parser: ArgumentParser, launcher: str, words: Sequence[str]) -> Namespace:
    """Parse a launcher's options with its own parser; the script is the first positional word."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            return parser.parse_args(list(words))
    except SystemExit:
        problem = printed.getvalue().strip().rpartition("error: ")[2]
    if "training_script" in problem:
        _script([], is_module=False)
    raise LaunchError(f"{launcher} refuses its options: {problem:.200}", "correct the command")


def _read_python(words: Sequence[str], env: Mapping[str, str], num_gpus: int) -> Command:
    module = words.index("-m") if "-m" in words[:5] else None
    if module is not None and words[module + 1 : module + 2]:
        name, rest = words[module + 1], words[module + 2 :]
        if name in ("torch.distributed.run", "torch.distributed.launch"):
            launcher = "torchrun" if name.endswith("run") else name
            return _read_torchrun(launcher, rest, num_gpus)
        script = _script([name, *rest], is_module=True)
    else:
        script = _script(_options("python", words)[1], is_module=False)
    # The five variables were set by hand: this is one of several such commands.
    size = env.get("WORLD_SIZE", "1")
    num = whole_number(size) or 1
    if num == 1 or "RANK" not in env:
        return Command("python", script)
    local = env.get("LOCAL_WORLD_SIZE", size)
    here = whole_number(local) or num
    port = _port(env.get("MASTER_PORT", str(DEFAULT_PORT)), "MASTER_PORT")
    return Command("env", script, here, max(1, num // here), env.get("MASTER_ADDR", ""), port)


def _read_lockstep(words: Sequence[str], num_gpus: int) -> Command:
    verb, rest = (words[0] if words else ""), list(words[1:])
    if verb == "launch":
        options, script = _options("lockstep launch", rest)
        nodes = _count(options.get("nodes", "1"), "--nodes")
        head, _, at = options.get("head", "localhost").partition(":")
        port = _port(at or "0", "--head") if nodes > 1 else None
        num = _count(options.get("gpus", "all"), "--gpus", num_gpus)
        return Command("lockstep", _script(script, "m" in options), num, nodes, head, port)
    if verb != "run":
        raise ConfigError(
            f"`lockstep {verb}` does not train", "use lockstep run or lockstep launch"
        )
    gpus, own = "1", []
    while rest:
        word = rest.pop(0)
        if word == "--gpus" and rest:
            gpus = rest.pop(0)
        elif word.startswith("--gpus="):
            gpus = word.partition("=")[2]
        else:
            own.append(word)
    recipe = own.pop(0) if own and not own[0].startswith("-") else ""
    if recipe not in recipe_names():
        known = ", ".join(recipe_names())
        raise ConfigError(f"there is no recipe {recipe!r}", f"use one of {known}")
    num = _count(gpus, "--gpus", num_gpus)
    return Command("lockstep", ("-m", f"lockstep_recipes.{recipe}", *own), num)


def _read_accelerate(
    words: Sequence[str], env: Mapping[str, str], folder: Path, num_gpus: int
) -> Command:
    try:
        from accelerate.commands.launch import launch_command_parser
    except ImportError as error:
        problem = f"accelerate cannot be imported: {error}"
        raise LaunchError(problem, "install accelerate") from error
    options = _parse(launch_command_parser(), "accelerate", words)
    settings: dict[str, Any] = {}
    if path := options.config_file:
        settings = read_yaml_file(folder / path, "write the file with `accelerate config`")
        if "distributed_type" not in settings:
            raise ConfigError(
                f"{path} has no distributed_type, and accelerate refuses it",
                "add distributed_type: MULTI_GPU",
            )
        if settings.get("mixed_precision") is False:
            raise ConfigError(
                f"{path}: YAML reads an unquoted `no` as false, and accelerate fails on it",
                "write mixed_precision: 'no'",
            )

    def option(name: str, default: object) -> str:
        given = getattr(options, name)
        return str(settings.get(name, default) if given is None else given)

    nodes = _count(option("num_machines", 1), "--num_machines")
    total = _count(option("num_processes", max(1, num_gpus)), "--num_processes")
    remarks = []
    if options.cpu and total > 1:
        remarks.append("`accelerate launch --cpu` starts one process, whatever num_processes says")
        total = 1
    port = _port(option("main_process_port", DEFAULT_PORT), "--main_process_port")
    script = _script([options.training_script, *options.training_script_args], options.module)
    head = option("main_process_ip", "localhost")
    here = max(1, total // nodes)
    is_alone = total == 1
    return Command(
        "accelerate", script, here, nodes, head, None if is_alone else port, remarks=tuple(remarks)
    )


def _read_srun(
    words: Sequence[str], env: Mapping[str, str], folder: Path, num_gpus: int
) -> Command:
    options, rest = _options("srun", words)
    nodes = _count(_either(options, env, "N", "nodes", "SLURM_JOB_NUM_NODES"), "--nodes")
    tasks = _count(_either(options, env, "n", "ntasks", "SLURM_NTASKS", str(nodes)), "--ntasks")
    per_node = options.get("ntasks_per_node")
    inner = read_command(rest, env, folder, num_gpus)
    if inner.launcher != "python":  # one launcher per node
        return replace(inner, num_nodes=max(inner.num_nodes, nodes))
    here = _count(per_node, "--ntasks-per-node") if per_node else max(1, tasks // nodes)
    return replace(inner, launcher="srun", num_processes=here, num_nodes=nodes)


def _either(
    options: Mapping[str, str],
    env: Mapping[str, str],
    short: str,
    long: str,
    variable: str,
    default: str = "1",
) -> str:
    return options.get(short) or options.get(long) or env.get(variable) or default


def _read_sbatch(words: Sequence[str], folder: Path) -> Command:
    options, rest = _options("sbatch", words)
    if not rest or not os.path.isfile(folder / rest[0]):
        name = rest[0] if rest else ""
        raise LaunchError(
            f"there is no batch script {shown(name)} in {folder}",
            "pass its path relative to that folder",
        )
    text = (folder / rest[0]).read_text(errors="replace")
    asked = {**batch_options(text), **options}
    nodes = _count(asked.get("nodes", asked.get("N", "1")).split("-")[0], "--nodes")
    return Command("sbatch", num_nodes=nodes, batch=asked, batch_script=text)


def batch_options(text: str) -> dict[str, str]:
    r"""Return the options in the #SBATCH lines of a script.

    >>> batch_options("#!/bin/sh\n#SBATCH --signal=TERM@120  # to save\n#SBATCH -N 2\nsrun x")
    {'signal': 'TERM@120', 'N': '2'}
    """
    found: dict[str, str] = {}
    for line in re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quote that is not closed: SLURM reads to the end of the line
            words = line.split()
        options, _ = _options("sbatch", words)
        found |= options
    return found


STAND_IN = """#!/bin/sh
{ printf '%s\\0' "$PWD" "$(basename "$0")"; [ $# -eq 0 ] || printf '%s\\0' "$@"; } > "FOLDER/words"
env -0 > "FOLDER/env"
"""


def _read_shell(
    words: Sequence[str], env: Mapping[str, str], folder: Path, num_gpus: int
) -> Command:
    """Run a shell script with stand-ins for the launchers, and read what it would start.

    The script itself really runs, with all its side effects; only the launchers are replaced.
    """
    scripts = [word for word in words[:3] if not word.startswith("-") and word not in SHELLS]
    path = folder / (scripts[0] if scripts else "")
    if not scripts or not os.path.isfile(path):
        name = shown(scripts[0] if scripts else "")
        remedy = "pass its path relative to that folder"
        raise LaunchError(f"there is no script {name} in {folder}", remedy)
    text = path.read_text(errors="replace")
    by_path = re.search(r"\S*/(?:python[0-9.]*|torchrun|accelerate|lockstep)\s", text)
    if by_path or not re.search(r"\b(?:python3?|torchrun|accelerate|lockstep)\b", text):
        found = f"calls {by_path.group().strip()} by its path" if by_path else "starts no launcher"
        raise ConfigError(f"{path.name} {found}: not checked", "pass the command inside it")
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as made:
        for name in LAUNCHERS:
            shim = Path(made) / name
            shim.write_text(STAND_IN.replace("FOLDER", made))
            shim.chmod(0o755)
        shimmed = {**env, "PATH": f"{made}:{env.get('PATH', '/usr/bin:/bin')}"}
        try:
            ended = subprocess.run(
                list(words),
                cwd=folder,
                env=shimmed,
                capture_output=True,
                text=True,
                timeout=SHELL_S,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaunchError(f"{path.name}: {error}", "pass the command inside it") from None
        record = Path(made) / "words"
        if not record.exists():
            reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
            raise LaunchError(f"{path.name} starts nothing: {reason}", "run it by hand to see why")
        where, *inner = os.fsdecode(record.read_bytes()).split("\0")[:-1]
        pairs = (Path(made) / "env").read_bytes().decode(errors="replace").split("\0")
        after = dict(pair.partition("=")[::2] for pair in pairs if "=" in pair)
    own = {n: v for n, v in after.items() if env.get(n) != v and n not in ("PATH", "PWD", "_")}
    found_command = read_command(inner, {**env, **own}, Path(where), num_gpus)
    return replace(found_command, env={**own, **found_command.env})
