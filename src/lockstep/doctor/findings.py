"""The findings of a trial, as plain values: its ranks write them, the checks read them.

Owns: the fields, and the file that carries them from one process to another. Each rank writes its
file again at every phase, so that a killed rank has recorded how far it got.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

TRIAL_PHASES: tuple[str, ...] = (
    "script",
    "folder",
    "resume",
    "data",
    "contract",
    "model",
    "samples",
    "loader",
    "step",
    "save",
)
"""The phases of a trial, in order. A trial ends at the first that fails, except `folder`."""


@dataclass
class Findings:
    """The findings of one rank; a field that was not reached keeps its default."""

    phase: str = "script"
    """The phase that started last."""
    passed: list[str] = field(default_factory=list)
    """The phases that succeeded."""
    problems: dict[str, list[str]] = field(default_factory=dict)
    """Problem and remedy, by phase."""
    failed_at: float = 0.0
    """The time when this rank failed, in seconds since 1970."""
    unchecked: str = ""
    """Why the rest of the job was not checked, although nothing failed."""
    timed_out_s: float = 0.0
    needs_group: bool = False
    """Whether the job must be tried on several ranks."""
    num_ranks: int = 1
    """The number of ranks that were started for the trial."""

    task: str = ""
    device: str = "cpu"
    config: dict[str, Any] = field(default_factory=dict)
    output_dir: str = ""
    scratch: str = ""
    """A temporary folder of the trial, inside or above the output folder."""
    free_disk_bytes: int = 0
    file_system: str = ""

    num_samples: int = 0
    is_stream: bool = False
    num_held_out: int = 0
    samples_read: int = 0

    resumed_from: str = ""
    rejected: list[str] = field(default_factory=list)
    contract: list[str] = field(default_factory=list)
    """The lines that a run prints."""
    total_steps: int = 0
    steps_per_epoch: int = 0
    warmup_steps: int = 0
    global_batch: int = 0
    accumulate: int = 1

    num_parameters: int = 0
    num_trained: int = 0
    trained_bytes: int = 0
    is_sharded: bool = False

    read_s: float = 0.0
    """The time to read one rank's samples of a step, without training."""
    num_batches_read: int = 0
    batch_bytes: int = 0
    """The size of one micro-batch."""
    batch_tensors: int = 0

    step_s: float = 0.0
    num_steps: int = 0
    loss: str = ""
    memory_bytes: int = 0
    """The peak of one rank; for host memory, including its loader's workers."""
    state_bytes: int = 0
    """The part of that for weights, gradients and optimizer state."""
    free_memory_bytes: int = 0
    """The free memory of its device before the trial."""

    checkpoint_bytes: int = 0
    save_s: float = 0.0

    def write(self, path: Path) -> None:
        """Write all fields to a file, atomically."""
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self)))
        os.replace(fresh, path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file of `write`; return the defaults if there is none."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError):
            return cls()

    @classmethod
    def merged(cls, ranks: Sequence[Self]) -> Self:
        """Return rank 0's findings, with the first failure of any rank and the largest peak."""
        first = ranks[0]
        failed = [found for found in ranks if found.failed_at]
        own = min(failed, key=lambda found: found.failed_at, default=first)
        folder = {phase: problem for phase, problem in first.problems.items() if phase == "folder"}
        return replace(
            first,
            phase=own.phase,
            passed=[phase for phase in first.passed if phase not in own.problems],
            problems=folder | own.problems,
            failed_at=own.failed_at,
            memory_bytes=max(found.memory_bytes for found in ranks),
            state_bytes=max(found.state_bytes for found in ranks),
            save_s=max(found.save_s for found in ranks),
        )


def findings_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's findings, for a trial in `folder`."""
    return folder / f"findings_{rank}.json"
