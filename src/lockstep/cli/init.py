"""`lockstep init KIND`: launch files for your own script."""

import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from lockstep.cli.new import Made, fill, write_all
from lockstep.errors import ConfigError, closest, plain, shown
from lockstep.text_input import check_line

KINDS = {
    "vscode": "a debugger configuration",
    "slurm": "a batch script for several nodes",
    "accelerate": "settings for `accelerate launch`",
    "scripts": "shell scripts for one GPU and for several",
}
SCRIPTS = {
    "train.sh": "./train.sh",
    "train_multi_gpu.sh": "./train_multi_gpu.sh 2",
    "train_torchrun.sh": "bash train_torchrun.sh",
    "train_ddp.sh": "bash train_ddp.sh",
}


def init(kind: str, script: str, args: Sequence[str], force: bool) -> list[str]:
    """Write the files of a kind for `script`; return lines about the files and their use.

    Raises:
        ConfigError: for an unknown kind, or a file that exists already.
    """
    if kind not in KINDS:
        known = closest(kind, KINDS) or f"one of {', '.join(KINDS)}"
        raise ConfigError(f"there is nothing to generate for {shown(kind)}", f"use {known}")
    for word in (script, *args):
        check_line("the script or argument", word)
    if Path(script).is_absolute() or ".." in Path(script).parts:
        raise ConfigError(
            f"{plain(script)} is not inside this folder",
            "run lockstep init in the folder of the script",
        )
    files, commands = _files(kind, script, args)
    lines = write_all(files, force=force)
    if not os.path.exists(script):
        lines.append(f"there is no {script} here yet; lockstep new creates one to start from")
    return [*lines, *(f"  use: {command}" for command in commands)]


def _files(kind: str, script: str, args: Sequence[str]) -> tuple[list[Made], list[str]]:
    words = {"SCRIPT": shlex.quote(script), "STEM": re.sub(r"[^\w.-]", "_", Path(script).stem)}
    given = shlex.join(args)
    words |= {" ARGS": f" {given}" if given else ""}
    if kind == "vscode":
        text = json.dumps(launch_json(script, args), indent=4) + "\n"
        made = [Made(Path(".vscode/launch.json"), text)]
        return made, ["Run and Debug in VS Code, `Debug DDP Training`"]
    if kind == "slurm":
        path = Path("scripts/train_slurm_multi_node.sh")
        made = [Made(path, fill(path.name, words), is_program=True)]
        # Without it, SLURM cannot open the output files, and the job fails silently.
        return [*made, Made(Path("logs/.gitignore"), "*\n!.gitignore\n")], [f"sbatch {path}"]
    if kind == "accelerate":
        names = [f"accelerate_config_{nodes}_node.yaml" for nodes in ("single", "multi")]
        made = [Made(Path(name), fill(name, words)) for name in names]
        command = shlex.join(["accelerate", "launch", "--config_file", names[0], script, *args])
        return made, [command]
    made = [Made(Path(name), fill(name, words), is_program=True) for name in SCRIPTS]
    return made, list(SCRIPTS.values())


def launch_json(script: str, args: Sequence[str]) -> dict[str, object]:
    """Return a configuration that debugs one process as the only rank of a group."""
    entry = {
        "name": "Debug DDP Training",
        "type": "python",
        "request": "launch",
        "program": f"${{workspaceFolder}}/{script}",
        "console": "integratedTerminal",
        "args": list(args),
        "env": {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "12355",
        },
    }
    return {"version": "0.2.0", "configurations": [entry]}
