"""Write a cache folder from structures; see `lockstep_recipes.protein.preprocess`."""

import sys

from lockstep_recipes.command import finish
from lockstep_recipes.protein.preprocess import run

if __name__ == "__main__":
    finish(run, sys.argv[1:])
