"""Run a few steps of a command, kill it at its first checkpoint, and resume it."""
