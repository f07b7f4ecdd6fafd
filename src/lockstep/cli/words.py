"""What verbs that take a command after them have in common.

Owns: that the command is taken as it was typed, flags and all. Does not own: any verb.
"""

from typing import Annotated

import typer

AS_TYPED = {"allow_interspersed_args": False, "ignore_unknown_options": True}
Words = Annotated[list[str], typer.Argument(metavar="-- COMMAND ...", help="as you would type it")]
