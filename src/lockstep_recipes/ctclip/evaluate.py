"""Metrics: zero-shot classification of findings, and retrieval of reports by volume.

Owns: prompts, scores, averages over findings, as pure functions of all held-out samples.
Does not own: gathering these from the ranks.

Zero-shot: the score of a finding is the softmax share of "There is X." against
"There is no X.", by their similarity with the volume.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def prompts(findings: Sequence[str]) -> list[str]:
    """Return two sentences for each finding: present, and absent.

    >>> prompts(["Lung nodule"])
    ['There is lung nodule.', 'There is no lung nodule.']
    """
    return [f"There is {word}{name.lower()}." for name in findings for word in ("", "no ")]


def zero_shot_scores(image: Tensor, prompted: Tensor, scale: Tensor) -> Tensor:
    """Return the scores (B, K) of K findings from unit embeddings (B, E) and (2 K, E)."""
    similarity = (image @ prompted.T * scale).view(len(image), -1, 2)
    return similarity.softmax(dim=-1)[..., 0]


def measure_findings(scores: Tensor, labels: Tensor, threshold: float) -> dict[str, float]:
    """Return averages over the findings that some held-out volumes have and others do not.

    Volumes without a label (NaN) do not count for that finding. F1 uses the best threshold of
    each finding; precision and recall use `threshold`.
    """
    from torchmetrics.functional.classification import (
        binary_auroc,
        binary_average_precision,
        binary_precision,
        binary_precision_recall_curve,
        binary_recall,
    )

    scores = scores.cpu().double()
    labels = labels.cpu()
    rows = []
    for score, label in zip(scores.T, labels.T, strict=True):
        known = ~label.isnan()
        score = score[known]
        truth = label[known].long()
        if len(truth.unique()) < 2:
            continue  # only one class: no curve
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
    """Return the share of volumes whose nearest held-out report is their own.

    `reports` numbers the texts: identical texts have the same number, and any of them counts.
    """
    nearest = (image @ text.T).argmax(dim=1)
    return float((reports[nearest] == reports).double().mean())


def chosen(measured: Mapping[str, float], wanted: Sequence[str]) -> dict[str, float]:
    """Return the metrics in `wanted`; those that could not be measured are NaN.

    >>> chosen({"auroc": 0.5, "f1": 0.1}, ["auroc", "recall"])
    {'auroc': 0.5, 'recall': nan}
    """
    return {name: measured.get(name, math.nan) for name in wanted}
