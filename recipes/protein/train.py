"""Train protein diffusion. The flags, the model and the data live in `lockstep_recipes.protein`."""

import sys

from lockstep_recipes.command import train
from lockstep_recipes.protein.flags import build

train(build, sys.argv[1:])
