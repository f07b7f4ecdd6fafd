"""`python -m lockstep_recipes.protein`: started by `lockstep run protein` on every rank."""

import sys

from lockstep_recipes.command import train
from lockstep_recipes.protein.flags import build

if __name__ == "__main__":
    train(build, sys.argv[1:])
