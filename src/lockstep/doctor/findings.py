"""What was found out about a job, as plain numbers: the probe writes them, the checks read them.

Owns: the fields, and the file that carries them from one process to the other. It is
written anew after every stage, so that a probe that is killed has said how far it came.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

STAGES: tuple[str, ...] = (
    "script",
    "folder",
    "data",
    "resume",
    "contract",
    "samples",
    "model",
    "loader",
    "step",
    "save",
)
"""In this order the probe looks; what fails at one leaves the later ones unseen."""


@dataclass
class Findings:
    """Everything the probe saw. What it did not come to keeps its default."""

    stage: str = "script"
    """What was being looked at last."""
    seen: list[str] = field(default_factory=list)
    """Stages that were looked at and are sound."""
    problems: dict[str, list[str]] = field(default_factory=dict)
    """By stage: what is wrong, and what to try."""
    unseen: str = ""
    """Why the job could not be looked into, where nothing is wrong with it."""
    timed_out_s: float = 0.0

    task: str = ""
    device: str = "cpu"
    config: dict[str, Any] = field(default_factory=dict)
    output_dir: str = ""
    scratch: str = ""
    """A folder of the probe's own, inside or above the output folder; it removes it."""
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

    read_s: float = 0.0
    """To read what one rank needs for one step, by itself."""
    num_batches_read: int = 0
    batch_bytes: int = 0
    """Of one micro-batch."""
    batch_tensors: int = 0

    step_s: float = 0.0
    num_steps: int = 0
    loss: str = ""
    memory_bytes: int = 0
    """The most one rank held, its loader's workers included where it is host memory."""
    free_memory_bytes: int = 0
    """On its device, before it began."""

    checkpoint_bytes: int = 0
    save_s: float = 0.0

    def write(self, path: Path) -> None:
        """Put all of it into a file, in one rename."""
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self)))
        os.replace(fresh, path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote; nothing at all if it wrote nothing."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError):
            return cls()
