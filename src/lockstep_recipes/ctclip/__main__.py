"""`python -m lockstep_recipes.ctclip`: started by `lockstep run ctclip` on every rank."""

import sys

from lockstep_recipes.command import train
from lockstep_recipes.ctclip.flags import build

if __name__ == "__main__":
    train(build, sys.argv[1:])
