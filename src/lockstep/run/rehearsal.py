"""A run of a few steps: how LOCKSTEP_REHEARSAL=1 changes a config.

Owns: the number of steps of a rehearsal, and its folder. Does not own: model and data, which do
not change (a recipe may shrink its own), or killing and resuming, which `lockstep rehearse` does.
"""

from pathlib import Path
from typing import Any

from lockstep.config import RunConfig
from lockstep.dist.environment import is_rehearsal

FOLDER = "rehearsal"
STEPS = 4
LOADER_TIMEOUT_S = 60.0
"""How long a worker may take for a batch. The default of five minutes is too long here."""
MOST_STEPS = 12
"""The most steps of a rehearsal that a recipe has set up itself."""


def rehearsed(config: RunConfig) -> RunConfig:
    """Return the config to run: in a rehearsal, a few steps of `config`, otherwise `config`.

    Batch, learning rate, precision and data stay the same. A rehearsal starts from scratch in
    `<output_dir>/rehearsal`, and evaluates and saves at its end. If a recipe has already made
    such a config, only its loader's time limit changes.
    """
    if not is_rehearsal():
        return config
    timeout_s = min(config.loader.timeout_s, LOADER_TIMEOUT_S)
    if FOLDER in Path(config.output_dir).parts and 0 < (config.max_steps or 0) <= MOST_STEPS:
        loader = config.loader.model_copy(update={"timeout_s": timeout_s})
        return config if loader == config.loader else config.model_copy(update={"loader": loader})
    folder = Path(config.output_dir) / FOLDER
    log_file = config.sinks.log_file
    sections: dict[str, dict[str, Any]] = {
        "loader": {"num_workers": min(config.loader.num_workers, 1), "timeout_s": timeout_s},
        "sinks": {"log_file": str(folder / Path(log_file).name) if log_file else None},
    }
    changes = {name: getattr(config, name).model_copy(update=new) for name, new in sections.items()}
    changes |= {"output_dir": str(folder), "resume": "discard", "log_every": 1}
    changes |= {"epochs": None, "max_steps": min(config.max_steps or STEPS, STEPS)}
    return config.saving_every(STEPS).model_copy(update=changes)
