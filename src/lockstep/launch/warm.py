"""Modules that are imported once, in the process that forks the workers.

Importing them must start no thread and use no GPU: neither survives a fork.
"""

import torch.utils.data  # noqa: F401

import lockstep.trainer  # noqa: F401
from lockstep.parent import end_with_parent

# Workers end with this process, and this process with its launcher.
end_with_parent()
