"""What is measured: each finding without a single label seen, and reports found by volume.

Owns: prompts, scores, averages over findings. Pure: it is given all held-out samples.
Does not own: how they were gathered from ranks.

Zero-shot: the score of a finding is the share that "There is X." gets of a volume's two
similarities, against "There is no X.".
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lockstep.errors import ConfigError


def prompts(findings: Sequence[str]) -> list[str]:
    """Return two sentences for each finding: it is there, it is not.

    >>> prompts(["Lung nodule"])
    ['There is lung nodule.', 'There is no lung nodule.']
    """
    return [f"There is {word}{name.lower()}." for name in findings for word in ("", "no ")]


def zero_shot_scores(image: Tensor, prompted: Tensor, scale: Tensor) -> Tensor:
    """Return (B, K): how sure each of K findings is, from directions (B, E) and (2 K, E)."""
    similarity = (image @ prompted.T * scale).view(len(image), -1, 2)
    return similarity.softmax(dim=-1)[..., 0]


def measure_findings(scores: Tensor, labels: Tensor, threshold: float) -> dict[str, float]:
    """Return averages over the findings that some held-out volumes have and others have not.

    A volume whose label is no number (nobody has looked) is left out of that finding.
    F1 is at the best threshold for each finding, precision and recall at `threshold`.
    """
    try:
        from torchmetrics.functional.classification import (
            binary_auroc,
            binary_average_precision,
            binary_precision,
            binary_precision_recall_curve,
            binary_recall,
        )
    except ImportError as error:
        problem = "validation needs the package torchmetrics"
        raise ConfigError(problem, "run pip install 'lockstep-train[recipes]'") from error
    scores, labels = scores.cpu().double(), labels.cpu()
    rows = []
    for score, label in zip(scores.T, labels.T, strict=True):
        known = ~label.isnan()
        score, truth = score[known], label[known].long()
        if len(truth.unique()) < 2:
            continue  # no curve can be drawn
        precision, recall, _ = binary_precision_recall_curve(score, truth)
        f1 = (2 * precision * recall / (precision + recall).clamp(min=1e-12)).max()
        at_threshold = (
            measure(score, truth, threshold=threshold)
            for measure in (binary_precision, binary_recall)
        )
        curves = binary_auroc(score, truth), binary_average_precision(score, truth)
        rows.append(torch.stack([x.double() for x in (*curves, f1, *at_threshold)]))
    if not rows:
        return {}
    names = ("auroc", "auprc", "f1", "precision", "recall")
    return dict(zip(names, torch.stack(rows).mean(dim=0).tolist(), strict=True))


def retrieval_at_1(image: Tensor, text: Tensor, reports: Tensor) -> float:
    """Return the share of volumes whose nearest report, of all held-out ones, is their own.

    `reports` numbers the texts: one that says the same, word for word, is as good.
    """
    nearest = (image @ text.T).argmax(dim=1)
    return float((reports[nearest] == reports).double().mean())


def chosen(measured: Mapping[str, float], wanted: Sequence[str]) -> dict[str, float]:
    """Return what `validation.metrics` asks for; what could not be measured is no number.

    >>> chosen({"auroc": 0.5, "f1": 0.1}, ["auroc", "recall"])
    {'auroc': 0.5, 'recall': nan}
    """
    return {name: measured.get(name, math.nan) for name in wanted}
