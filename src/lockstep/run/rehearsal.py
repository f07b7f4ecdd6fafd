"""A run in miniature: what LOCKSTEP_REHEARSAL=1 makes of a config.

Owns: how many steps a rehearsal has, and that it happens in a folder of its own. Does not
own: model and data, which stay as they are (a recipe may shrink its own), nor killing and
resuming, which `lockstep rehearse` does from outside.
"""

from pathlib import Path
from typing import Any

from lockstep.config import RunConfig
from lockstep.dist.environment import is_rehearsal

FOLDER = "rehearsal"
STEPS = 4
WAITS_S = 60.0
"""How long a worker may take over a batch: who rehearses does not wait for five minutes."""
MOST_STEPS = 12
"""What a recipe's own rehearsal may take."""


def rehearsed(config: RunConfig) -> RunConfig:
    """Return the config to run: `config` itself, or, in a rehearsal, a handful of its steps.

    Batch, rate, precision and data stay as asked. It validates and saves at the end, anew each
    time, in `<output_dir>/rehearsal`. A config of so few steps that is there already is left
    alone but for its patience, so that a recipe may rehearse in its own way.
    """
    if not is_rehearsal():
        return config
    waits_s = min(config.loader.timeout_s, WAITS_S)
    if FOLDER in Path(config.output_dir).parts and 0 < (config.max_steps or 0) <= MOST_STEPS:
        loader = config.loader.model_copy(update={"timeout_s": waits_s})
        return config if loader == config.loader else config.model_copy(update={"loader": loader})
    folder, log_file = Path(config.output_dir) / FOLDER, config.sinks.log_file
    seldom = {"every_epochs": None, "every_steps": STEPS}
    sections: dict[str, dict[str, Any]] = {
        "loader": {"num_workers": min(config.loader.num_workers, 1), "timeout_s": waits_s},
        "evaluation": seldom,
        "checkpoint": seldom,
        "sinks": {"log_file": str(folder / Path(log_file).name) if log_file else None},
    }
    small = {name: getattr(config, name).model_copy(update=new) for name, new in sections.items()}
    small |= {"output_dir": str(folder), "resume": "discard", "log_every": 1}
    small |= {"epochs": None, "max_steps": min(config.max_steps or STEPS, STEPS)}
    return config.model_copy(update=small)
