"""Train a robot policy. Settings, model and data live in `lockstep_recipes.atlas`."""

import sys

from lockstep_recipes.atlas.flags import build
from lockstep_recipes.command import train

train(build, sys.argv[1:])
