"""`python -m lockstep_recipes.jit`: started by `lockstep run jit` on every rank."""

import sys

from lockstep_recipes.command import train
from lockstep_recipes.jit.flags import build

if __name__ == "__main__":
    train(build, sys.argv[1:])
