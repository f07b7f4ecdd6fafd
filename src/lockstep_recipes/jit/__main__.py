"""`python -m lockstep_recipes.jit`: what `lockstep run jit` starts on every rank."""

import sys

from lockstep_recipes.command import train
from lockstep_recipes.jit.flags import build

if __name__ == "__main__":
    train(build, sys.argv[1:])
