"""Protein side chains on a fixed backbone, by masked (absorbing) discrete diffusion."""

from lockstep_recipes.extras import require

require("gemmi")
