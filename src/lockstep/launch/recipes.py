"""The installed recipes, which are found without importing them."""

import importlib.util
import pkgutil


def recipe_names() -> list[str]:
    """Return the names of the installed recipes."""
    spec = importlib.util.find_spec("lockstep_recipes")
    locations = spec.submodule_search_locations if spec else None
    return [module.name for module in pkgutil.iter_modules(locations) if module.ispkg]
