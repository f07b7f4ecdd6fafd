"""Train JiT. The flags, the model and the data live in `lockstep_recipes.jit`."""

import sys

from lockstep_recipes.command import train
from lockstep_recipes.jit.flags import build

train(build, sys.argv[1:])
