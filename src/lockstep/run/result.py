"""How a run ended. Owns: the record. Does not own: ending it (`trainer.py`)."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended: its step, the last metrics, its folder, and the exit code."""

    step: int
    metrics: dict[str, float]
    folder: Path
    exit_code: int = 0
    stop_reason: str = ""
    """Why a callback stopped the run, if one did."""
