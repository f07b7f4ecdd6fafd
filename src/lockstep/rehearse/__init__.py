"""The very command in miniature, killed at its first checkpoint and resumed."""
