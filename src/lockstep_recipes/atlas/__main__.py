"""`python -m lockstep_recipes.atlas`: started by `lockstep run atlas` on every rank."""

import sys

from lockstep_recipes.atlas.flags import build
from lockstep_recipes.command import train

if __name__ == "__main__":
    train(build, sys.argv[1:])
