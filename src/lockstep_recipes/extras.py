"""Refuse a recipe that is imported without the packages of the extra `recipes`.

Owns: the message that names a missing package. Does not own: packages that a recipe needs only
with certain settings, such as transformers; these are imported where they are used.
"""

from importlib.util import find_spec

from lockstep.errors import ConfigError, own_exit_code

DISTRIBUTIONS = {"PIL": "pillow"}
"""What pip calls a package, if that is not the name to import."""


def require(*packages: str) -> None:
    """Refuse to continue if a package of the extra `recipes` is not installed.

    Each recipe calls it in its `__init__.py`, so every command of the recipe does so first. A
    script that does not catch the error prints it without a traceback, with exit code 2.

    Raises:
        ConfigError: with the names of the missing packages.
    """
    missing = [DISTRIBUTIONS.get(name, name) for name in packages if find_spec(name) is None]
    if missing:
        with own_exit_code():
            raise ConfigError(
                f"packages that this recipe needs are not installed: {', '.join(missing)}",
                'run pip install "lockstep-train[recipes]"',
            )
