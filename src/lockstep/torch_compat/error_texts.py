"""The texts of torch's errors that lockstep searches for, because torch has no types for them.

Owns: every such text, and what it means. Does not own: what is done about it. A new version of
torch may change its words: `tests/torch_compat/` makes real processes fail in these ways.
"""

import re

PEER_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|remote process exiting", re.IGNORECASE
)
"""The text of gloo and NCCL when the process of another rank has ended."""
TIMED_OUT = re.compile(r"timed? ?out(?!_s)", re.IGNORECASE)
"""The text of torch when another rank did not answer within lockstep's `timeout_s`."""
COLLECTIVE_MODULE = "torch.distributed"
"""The module that defines the errors of NCCL and of the store."""
GLOO_SOURCE = re.compile(r"\bgloo/\w+/")
"""The path of a source file, which gloo's RuntimeErrors contain."""
MIXED_SHARDS = "mixed torch.Tensor and DTensor"
"""The text of FSDP2 about a sharded parameter used outside the module that gathers it."""
NOT_DETERMINISTIC = " does not have a deterministic implementation"
"""The text after the name of an operation under `torch.use_deterministic_algorithms`."""
WITHOUT_GRADIENT = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
"""The text of DDP about the parameters, by number, that got no gradient."""
CPU_ALLOCATOR = "CPUAllocator"
"""What a RuntimeError contains if the host has no memory left: only GPUs have a type for it."""


def is_of_collective(error: str, module: str) -> bool:
    """Return whether an error came from a collective; `module` is where its type is defined.

    The text alone does not tell: an upload can time out, too.
    """
    return module == COLLECTIVE_MODULE or GLOO_SOURCE.search(error) is not None


def is_peer_gone(error: BaseException) -> bool:
    """Return whether an error only means that the process of another rank has ended."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return is_of_collective(text, type(error).__module__) and PEER_GONE.search(text) is not None
