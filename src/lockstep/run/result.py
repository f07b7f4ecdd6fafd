"""How a run ended. Owns: the record. Does not own: ending it (`trainer.py`)."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended: where it stands, what it measured, and the exit code it deserves."""

    step: int
    metrics: dict[str, float]
    folder: Path
    exit_code: int = 0
    stop_reason: str = ""
    """Why a callback stopped the run, if one did."""
