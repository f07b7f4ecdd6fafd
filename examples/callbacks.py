"""Six callbacks: early stopping, learning rates, a gradient histogram, noise, two loggers.

docs/callbacks.md shows them; a test keeps the two the same.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from lockstep import Callback, RunConfig, Task, fit


class EarlyStopping(Callback):
    """Stop when `metric` has not improved for `patience` evaluations."""

    def __init__(self, metric="loss", patience=3):
        self.metric, self.patience = metric, patience
        self.best, self.num_worse = float("inf"), 0

    def on_run_start(self, run):
        self.stop_if_due(run)  # a run that was stopped stays stopped when it is started again

    def on_evaluation_end(self, run, metrics):
        self.num_worse = 0 if metrics[self.metric] < self.best else self.num_worse + 1
        self.best = min(self.best, metrics[self.metric])
        self.stop_if_due(run)

    def stop_if_due(self, run):
        if self.num_worse >= self.patience:
            run.stop(f"{self.metric} has not improved on {self.best:.4g} in {self.num_worse} evals")

    def state_dict(self):
        return {"best": self.best, "num_worse": self.num_worse}

    def load_state_dict(self, state):
        self.best, self.num_worse = state["best"], state["num_worse"]


class LearningRates(Callback):
    """Log the learning rate of every parameter group."""

    def on_step_end(self, run, batch, report):
        for index, group in enumerate(run.optimizer.param_groups):
            run.log(f"learning_rate/group_{index}", group["lr"])


class GradientHistogram(Callback):
    """Log the share of gradient values in each decade, from below 1e-8 to above 1."""

    def on_run_start(self, run):
        # torch calls it before optimizer.step(): gradients are reduced over ranks, and clipped.
        run.optimizer.register_step_pre_hook(lambda optimizer, *_: self.log_shares(run, optimizer))

    def log_shares(self, run, optimizer):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        values = torch.cat([p.grad.abs().flatten() for p in params if p.grad is not None])
        decades = values.log10().floor().clamp(-9, 0)
        for decade in range(-9, 1):
            run.log(f"gradient/1e{decade}", (decades == decade).float().mean())


class InputNoise(Callback):
    """Add noise to the inputs: the same on any number of ranks, and after a resume."""

    def __init__(self, scale=0.05):
        self.scale = scale

    def on_step_start(self, run, batch):
        for place, micro_batch in enumerate(batch.micro_batches):
            x, y = micro_batch.data
            random = np.random.default_rng([batch.step, *micro_batch.ids])
            noise = torch.tensor(random.standard_normal(x.shape), dtype=x.dtype, device=x.device)
            batch.micro_batches[place] = replace(micro_batch, data=(x + self.scale * noise, y))


class LibraryLogger(Callback):
    """Hand losses and metrics to another library: `log` may be `mlflow.log_metrics`."""

    def __init__(self, log, every=50):
        self.log, self.every = log, every

    def on_step_end(self, run, batch, report):
        if run.step % self.every == 0 and run.world.is_first:
            self.log({"train/loss": float(report.loss)}, step=run.step)

    def on_evaluation_end(self, run, metrics):
        if run.world.is_first:  # metrics are the same on every rank
            self.log({f"held_out/{name}": value for name, value in metrics.items()}, step=run.step)


class TextLog(Callback):
    """Write a line of step and loss to a file; a resume removes the lines that it will repeat."""

    def __init__(self, path="losses.txt", every=50):
        self.path, self.every = Path(path), every

    def on_run_start(self, run):
        if run.world.is_first and self.path.exists():
            lines = self.path.read_text().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]  # a kill may cut the last one
            kept = [line for line in whole if int(line.split()[0]) <= run.step]
            self.path.write_text("".join(kept))

    def on_step_end(self, run, batch, report):
        if run.step % self.every == 0 and run.world.is_first:
            with self.path.open("a") as file:
                file.write(f"{run.step} {float(report.loss):.6g}\n")


class Waves(Task):
    name = "waves"

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def samples(self, seed):
        x = torch.randn(256, 8, generator=torch.Generator().manual_seed(seed))
        return list(zip(x, x.sin().sum(dim=1, keepdim=True), strict=True))

    def train_data(self):
        return self.samples(1)

    def eval_data(self):
        return self.samples(2)

    def loss(self, model, batch, context):
        x, y = batch
        return functional.mse_loss(model(x), y)


def write_line(metrics, step):
    """Stand in for a library: add a line to a text file."""
    with Path("metrics.txt").open("a") as file:
        file.write(f"{step} {metrics}\n")


if __name__ == "__main__":
    callbacks = [EarlyStopping(), LearningRates(), GradientHistogram()]
    callbacks += [InputNoise(), LibraryLogger(write_line), TextLog()]
    result = fit(Waves(), RunConfig(output_dir="waves", epochs=20), callbacks)
    raise SystemExit(result.exit_code)
