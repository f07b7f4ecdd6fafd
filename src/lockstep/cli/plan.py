"""`lockstep plan`: the batch and learning-rate contract for several numbers of GPUs."""

import json
from typing import Any

from lockstep.cli.words import read_counts
from lockstep.errors import ConfigError, shown
from lockstep.parse import parse_model
from lockstep.plan import MAX_COUNT, BatchConfig, RateConfig, plan_batches, scaled_rate
from lockstep.text_input import LARGEST

COLUMNS = {
    "gpus": "GPUs",
    "batch_size": "batch per GPU",
    "total_batch": "total batch",
    "effective_batch": "effective batch",
    "steps_per_epoch": "steps per epoch",
    "dropped": "dropped",
    "lr": "learning rate",
}


def plan_rows(
    samples: int, batch: BatchConfig, rate: RateConfig | None, gpus: list[int]
) -> list[dict[str, Any]]:
    """Return one row of numbers for each number of GPUs."""
    rows = []
    for world_size in gpus:
        plan = plan_batches(batch, samples, world_size)
        rows.append(
            {
                "gpus": world_size,
                "batch_size": plan.batch_size,
                "total_batch": plan.samples_at_once,
                "effective_batch": plan.global_batch,
                "steps_per_epoch": plan.steps_per_epoch,
                "dropped": plan.dropped,
                "lr": scaled_rate(rate, world_size, plan.global_batch) if rate else None,
            }
        )
    return rows


def show_plan(
    samples: int,
    batch_size: int,
    gpus: str,
    accumulate: int,
    lr: float | None,
    lr_scaling: str,
    reference_batch: int,
    as_json: bool,
) -> None:
    """Print the plan as a table, or as JSON."""
    sizes = read_counts(gpus, most=LARGEST)
    if not 0 < samples < MAX_COUNT:
        raise ConfigError(
            f"--samples {shown(samples)} is not a number from 1 to {MAX_COUNT - 1:,}",
            "pass the number of samples in the training set",
        )
    batch = parse_model(BatchConfig, {"batch_size": batch_size, "accumulate": accumulate})
    values = {"lr": lr, "lr_scaling": lr_scaling, "reference_batch": reference_batch}
    rate = parse_model(RateConfig, {**values, "lr": 1.0 if lr is None else lr})
    rows = plan_rows(samples, batch, rate if lr is not None else None, sizes)
    if as_json:
        print(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*COLUMNS.values())
    for column in table.columns:
        column.justify = "right"
        column.overflow = "fold"  # a truncated number would be wrong
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in COLUMNS))
    Console().print(table)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
