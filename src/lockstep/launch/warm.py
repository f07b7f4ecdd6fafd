"""What a worker would spend its first second on, done once.

The process that forks the workers imports this. It must start no thread and touch no
GPU: a fork carries neither over.
"""

import atexit
import os

import torch
import torch.distributed
import torch.nn.parallel
import torch.utils.data

import lockstep.trainer  # noqa: F401

# The first optimizer of a process imports half of torch's compiler: better here than in a worker.
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])

# Workers end with this process, and it ends when its launcher is gone: at once, without
# taking down half of torch first.
atexit.register(os._exit, 0)
