"""A robot policy on frozen backbones: images and an instruction in, an end-effector action out.

The geometry backbone is the aggregator of VGGT (Wang et al., "VGGT: Visual Geometry Grounded
Transformer", CVPR 2025, arXiv 2503.11651).
"""

from lockstep_recipes.extras import require

require("PIL")
