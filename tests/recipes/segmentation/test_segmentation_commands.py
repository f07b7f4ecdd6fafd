"""What `test_guide_commands.py` does not start: a flag left out, and the debugger's file."""

import json
from pathlib import Path

import pytest
from typed import ROOT, place, run


@pytest.mark.timeout(300)
def test_torchrun_without_the_flag_is_refused_by_its_name(tmp_path: Path) -> None:
    command = "torchrun --nproc_per_node=2 --standalone train.py"
    ended = run(command, place("segmentation", tmp_path), code=1)
    said = [line for line in ended.err.splitlines() if line.startswith("lockstep: ")]
    assert said == ["lockstep: 2 processes were started without --distributed"]
    assert "exitcode:2" in ended.err.replace(" ", "")
    assert "step " not in ended.out, "nothing was trained"


def test_the_debug_configuration_is_strict_json_with_the_guides_keys() -> None:
    text = (ROOT / "recipes/segmentation/.vscode/launch.json").read_text()
    (entry,) = json.loads(text)["configurations"]
    assert entry == {
        "name": "Debug DDP Training",
        "type": "python",
        "request": "launch",
        "program": "${workspaceFolder}/train.py",
        "console": "integratedTerminal",
        "args": [
            *("--distributed", "--local_rank", "0"),
            *("--layers", "50", "--model_type", "res50_ASPP_lorm"),
        ],
        "env": {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "12355",
        },
    }
