"""Names and error texts of torch that other versions may lack, rename or reword.

Importing this does not import torch.
"""

COMPILER = "torch._dynamo"
"""The module that takes torch over a second to import, once something is compiled."""
