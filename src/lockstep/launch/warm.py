"""What a worker would spend its first second on, done once.

The process that forks the workers imports this. It must start no thread and touch no
GPU: a fork carries neither over.
"""

import torch.utils.data  # noqa: F401

import lockstep.trainer  # noqa: F401
from lockstep.parent import end_with_parent

# Workers end with this process, and this process with its launcher.
end_with_parent()
