"""Ranks: who they are, how they communicate, and how a model is replicated or sharded over them."""
