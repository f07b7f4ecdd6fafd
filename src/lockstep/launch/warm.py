"""What a worker would spend its first second on, done once.

The process that forks the workers imports this. It must start no thread and touch no
GPU: a fork carries neither over.
"""

import atexit
import os

import torch._dynamo  # exact mode asks for it: better here, once, than in every rank that goes on
import torch.utils.data  # noqa: F401

import lockstep.trainer  # noqa: F401

# Workers end with this process, and it ends when its launcher is gone: at once, without
# taking down half of torch first.
atexit.register(os._exit, 0)
