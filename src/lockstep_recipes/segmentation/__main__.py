"""`python -m lockstep_recipes.segmentation`, which `lockstep run segmentation` starts."""

import sys

from lockstep_recipes.command import train
from lockstep_recipes.segmentation.flags import build

if __name__ == "__main__":
    train(build, sys.argv[1:])
