"""Train scribble segmentation. Flags, model and data live in `lockstep_recipes.segmentation`."""

import sys

from lockstep_recipes.command import train
from lockstep_recipes.segmentation.flags import build

train(build, sys.argv[1:])
