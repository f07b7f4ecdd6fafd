"""CT-CLIP: chest CT volumes and their reports in one space, launched by Hugging Face Accelerate.

Hamamci et al., "Developing Generalist Foundation Models from a Multimodal Dataset for 3D
Computed Tomography", arXiv 2403.17834.
"""

from lockstep_recipes.extras import require

require("accelerate", "torchmetrics")
