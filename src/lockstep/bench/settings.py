"""What `lockstep bench` asks of its callback in the processes of a measured command.

Owns: the name of the callback and its settings. Does not own: the callback, which is imported
only where the command trains.
"""

from dataclasses import dataclass

CALLBACK = "lockstep.bench.callback:BenchCallback"


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How much is measured."""

    steps: int
    """Steps as they are, and the same number with gradients kept local."""
    profiles: bool = True
    """Whether further steps are traced and their operations counted."""
