"""Errors raised on purpose: a script that lets one through ends with the code it stands for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from lockstep import PartialLoss, RunConfig, fit
from lockstep.testing import TinyTask

class Broken(TinyTask):
    def loss(self, model, batch, context):
        part = super().loss(model, batch, context)
        return PartialLoss(part.loss_sum * float("nan"), part.weight)

try:
    fit(TinyTask(), RunConfig(output_dir="refused", epochs=1, batch={"batch_size": 1000}))
except Exception as refused:
    print(type(refused).__name__)
raise SystemExit(fit(Broken(), RunConfig(output_dir="broken", epochs=1)).exit_code)
"""


@pytest.mark.parametrize(
    ("code", "said", "env"),
    [
        (3, "no weight has moved", {}),
        (2, "need MASTER_ADDR and MASTER_PORT", {"RANK": "0", "WORLD_SIZE": "2"}),
    ],
)
def test_a_script_without_a_launcher_ends_with_the_errors_own_code(
    code: int, said: str, env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert ended.stdout.startswith("LaunchError" if env else "ConfigError"), "and was caught"
    assert ended.stderr.count("Traceback") == 1
    assert said in ended.stderr


TYPED = """
from lockstep.errors import ConfigError, own_exit_code
with own_exit_code():
    raise ConfigError("mistyped", "again")

print("still here")
"""


def test_somebody_who_types_is_not_thrown_out() -> None:
    command = [sys.executable, "-i"]
    ended = subprocess.run(command, input=TYPED, capture_output=True, text=True, check=False)
    assert "ConfigError: mistyped" in ended.stderr
    assert (ended.stdout, ended.returncode) == ("still here\n", 0)
