"""Train CT-CLIP. Settings, model and data live in `lockstep_recipes.ctclip`."""

import sys

from lockstep_recipes.command import train
from lockstep_recipes.ctclip.flags import build

if __name__ == "__main__":
    train(build, sys.argv[1:])
