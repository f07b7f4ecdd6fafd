"""Metrics and pictures: errors of the policy and of two trivial baselines, action curves.

Owns: the metrics, the two baselines, the picture. Does not own: which frames are held out.

`mean` always predicts the training split's mean action; `repeat` predicts the previous action
(at an episode's first frame, the mean first action of training episodes). Both are measured
on the same frames as the policy. Pose errors are in standard deviations.
"""

import torch
from torch import Tensor

from lockstep.run_files import replacing

Pairs = dict[str, tuple[Tensor, Tensor | float]]
MOST_CURVES = 12


def measure_poses(predicted: Tensor, target: Tensor, last: Tensor, mean: Tensor) -> Pairs:
    """Sum absolute and squared errors of poses (B, D), of the policy and the baselines."""
    answers = {"": predicted, "mean_": mean.expand_as(target), "repeat_": last}
    measured: Pairs = {}
    for name, answer in answers.items():
        error = answer.double() - target.double()
        measured[f"{name}pose_l1"] = (error.abs().sum(), error.numel())
        measured[f"{name}pose_l2"] = (error.square().sum(), error.numel())
    return measured


def measure_grippers(predicted: Tensor, target: Tensor, last: Tensor, mean: Tensor) -> Pairs:
    """Count correct grippers (B), given in [0, 1]: only open or closed matters."""
    answers = {"": predicted, "mean_": mean.expand_as(target), "repeat_": last}
    closed = target > 0.5
    return {
        f"{name}gripper_accuracy": (((answer > 0.5) == closed).sum(), target.numel())
        for name, answer in answers.items()
    }


def draw_actions(predicted: Tensor, target: Tensor, title: str, folder: str, name: str) -> bool:
    """Draw each column of (T, A) over time, truth and prediction; return whether that worked."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    num = min(target.shape[1], MOST_CURVES)
    rows = -(-num // 3)
    figure = Figure(figsize=(10, 1.9 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    times = torch.arange(len(target)).tolist()
    for column in range(num):
        axes = figure.add_subplot(rows, 3, column + 1)
        axes.plot(times, target[:, column].tolist(), color="0.35", label="recorded")
        axes.plot(times, predicted[:, column].tolist(), color="tab:orange", label="predicted")
        axes.set_title(f"action {column}", fontsize=8)
        axes.tick_params(labelsize=7)
        if column == 0:
            axes.legend(fontsize=7)
    figure.suptitle(title, fontsize=9)
    with replacing(folder, name) as file:
        figure.savefig(file, dpi=110, format="png")
    return True
