"""JiT: a plain vision transformer on pixel patches that predicts the clean image.

Li and He, "Back to Basics: Let Denoising Generative Models Denoise", arXiv 2511.13720.
"""

from lockstep_recipes.extras import require

require("PIL")
