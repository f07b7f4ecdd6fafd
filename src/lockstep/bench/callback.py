"""The callback of `lockstep bench`: times the steps of a run, and ends it when it has enough.

Owns: the config of a measured run, and when it begins and ends. Does not own: what is measured
(`probe.py`, `profiled_steps.py`), or how the command was started (`runs.py`).
"""

import sys
from pathlib import Path
from typing import Any

from lockstep.bench.probe import Probe
from lockstep.bench.settings import BenchSettings
from lockstep.callback import Callback
from lockstep.config import RunConfig
from lockstep.data.batch import StepBatch
from lockstep.dist.collectives import Collectives
from lockstep.dist.environment import tool_folder
from lockstep.errors import ConfigError
from lockstep.harness.attach import TRACE, read_settings
from lockstep.observe.sinks import SinkConfig
from lockstep.step.report import StepReport

NEVER = 10**9
NOT_EXACT = "measured without exact mode"
SHARDED = "a sharded model exchanges inside its passes: no separate exchange, and no forecast"


class BenchCallback(Callback):
    """One rank's share of a measurement."""

    communicates = True

    def __init__(self) -> None:
        self.folder = tool_folder()
        self.settings = BenchSettings(**read_settings(self.folder))
        self.remarks: list[str] = []
        self.probe: Probe | None = None

    def configure(self, task: Any, config: RunConfig, world: Collectives) -> RunConfig:
        """Let the run go on for as long as it is measured, and save and evaluate nothing."""
        if world.device.type == "cuda" and world.backend == "gloo":
            raise ConfigError(
                f"{world.size} processes would share GPUs: this does not measure {world.size} GPUs",
                "pass at most the number of GPUs here to --gpus; the forecast covers more",
            )
        if config.exact:
            self.remarks.append(NOT_EXACT)
        if config.parallel == "fsdp":
            self.remarks.append(SHARDED)
        return measured_config(config, self.folder)

    def on_run_start(self, run: Any) -> None:
        """Prepare the measurement; refuse a loop that would train for real, and to its end."""
        if run.is_custom_loop:
            raise ConfigError(
                "a loop around train_step alone cannot be measured",
                "write the loop with prepare and a Trainer, as docs/own_loop.md shows",
            )
        run.held_out = None
        self.probe = Probe(run, self.settings, self.folder / TRACE, self.remarks)
        self.communicates = False  # a vote after each step would be timed

    def on_step_end(self, run: Any, batch: StepBatch, report: StepReport) -> None:
        """End a step; stop after the last one. Weights that differ between ranks are not saved."""
        if self.probe is not None:
            self.probe.end_step()
            if self.probe.has_all_steps:
                self.communicates = True
                run.stop("all steps are measured", save=False)

    def on_run_end(self, run: Any, result: Any) -> None:
        """Measure the rest, and end the process: what the script does after `fit` is not run."""
        if self.probe is not None and self.probe.has_all_steps:
            self.probe.finish()
            sys.exit(0)


def measured_config(config: RunConfig, folder: Path) -> RunConfig:
    """Return the config to measure under."""
    return config.saving_every(NEVER).model_copy(
        update={
            "output_dir": str(folder / "run"),
            "resume": "auto",
            "epochs": None,
            "max_steps": NEVER,
            "exact": False,  # its sums are not an all-reduce
            "sinks": SinkConfig(curves=False),
        }
    )
