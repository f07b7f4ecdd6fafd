"""The result of a run. Owns: the data class. Does not own: ending a run (`trainer.py`)."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunResult:
    """The last step of a run, its last metrics, its folder, and its exit code."""

    step: int
    metrics: dict[str, float]
    folder: Path
    exit_code: int = 0
    stop_reason: str = ""
    """Why a callback stopped the run, if one did."""
