"""What lockstep uses of torch that another version may lack, rename or say in other words.

Importing this does not import torch.
"""

COMPILER = "torch._dynamo"
"""The module that takes torch over a second to import, once something is compiled."""
