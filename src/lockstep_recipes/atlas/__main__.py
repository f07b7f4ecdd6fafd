"""`python -m lockstep_recipes.atlas`: what `lockstep run atlas` starts on a rank."""

import sys

from lockstep_recipes.atlas.flags import build
from lockstep_recipes.command import train

if __name__ == "__main__":
    train(build, sys.argv[1:])
