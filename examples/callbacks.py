"""Four callbacks: early stopping, learning rates, gradient norms, another library's logger."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lockstep import Callback, RunConfig, Task, fit


class EarlyStopping(Callback):
    """Stop when `metric` has not improved for `patience` evaluations."""

    def __init__(self, metric: str = "loss", patience: int = 3) -> None:
        self.metric = metric
        self.patience = patience
        self.best = float("inf")
        self.num_worse = 0

    def on_run_start(self, run: Any) -> None:
        self._stop_if_due(run)  # a run that was stopped stays stopped when it is started again

    def on_evaluation_end(self, run: Any, metrics: Mapping[str, float]) -> None:
        self.num_worse = 0 if metrics[self.metric] < self.best else self.num_worse + 1
        self.best = min(self.best, metrics[self.metric])
        self._stop_if_due(run)

    def _stop_if_due(self, run: Any) -> None:
        if self.num_worse >= self.patience:
            run.stop(
                f"{self.metric} has not improved on {self.best:.4g} for {self.num_worse} times"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_worse": self.num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.num_worse = state["best"], state["num_worse"]


class LearningRates(Callback):
    """Log the rate of every parameter group, under names of their own."""

    def on_step_end(self, run: Any, batch: Any, report: Any) -> None:
        for index, group in enumerate(run.optimizer.param_groups):
            run.log(f"learning_rate/group_{index}", group["lr"])


class GradientNorms(Callback):
    """Log the norm of each parameter's gradient: reduced over ranks, and clipped."""

    def on_run_start(self, run: Any) -> None:
        def look(optimizer: Any, *_: Any) -> None:
            for name, parameter in run.model.named_parameters():
                if parameter.grad is not None:
                    run.log(f"gradient/{name}", parameter.grad.norm())

        run.optimizer.register_step_pre_hook(look)  # torch calls it before optimizer.step()


class TextLogger(Callback):
    """Hand every metric to another library; here, a text file stands in for its client."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_evaluation_end(self, run: Any, metrics: Mapping[str, float]) -> None:
        if run.world.is_first:  # metrics are the same on every rank
            with self.path.open("a") as file:
                file.write(f"{run.step} {dict(metrics)}\n")


class Waves(Task):
    name = "waves"

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def samples(self, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        x = torch.randn(256, 8, generator=torch.Generator().manual_seed(seed))
        return list(zip(x, x.sin().sum(dim=1, keepdim=True), strict=True))

    def train_data(self) -> Any:
        return self.samples(1)

    def eval_data(self) -> Any:
        return self.samples(2)

    def loss(self, model: nn.Module, batch: Any, context: Any) -> torch.Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)


if __name__ == "__main__":
    callbacks = [EarlyStopping(), LearningRates(), GradientNorms(), TextLogger("metrics.txt")]
    result = fit(Waves(), RunConfig(output_dir="waves", epochs=20), callbacks)
    raise SystemExit(result.exit_code)
