"""Scribble-supervised segmentation: a dilated ResNet, ASPP, and localization rectification (LoRM).

Zhang et al., "Scribble Hides Class: Promoting Scribble-Based Weakly-Supervised Semantic
Segmentation with Its Class Label", AAAI 2024, arXiv 2402.17555.
"""

from lockstep_recipes.extras import require

require("PIL")
